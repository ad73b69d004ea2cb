// Package containers keeps what `foil run` makes: a directory for each container,
// with its filesystem mounted on that of an image.
//
// A container is a directory <root>/containers/<ID>, which is its OCI bundle
// directory as well:
//
//	container.json  its record; written last: a directory without one is a
//	                leftover
//	rootfs          where its filesystem is mounted: an overlay of
//	upper, work     what it writes, on the mount of its image's rootfs
//	image, gate     of one that is traced: see trace.go
//
// The runner adds config.json and its own state.
package containers

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/durable"
	"hydrofoil.dev/foil/internal/kernel"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/gate"
	"hydrofoil.dev/foil/internal/worker/images"
	"hydrofoil.dev/foil/internal/worker/launch"
	"hydrofoil.dev/foil/internal/worker/locks"
	"hydrofoil.dev/foil/internal/worker/origin"
	"hydrofoil.dev/foil/internal/worker/pull"
	"hydrofoil.dev/foil/internal/worker/records"
	"hydrofoil.dev/foil/internal/worker/runner"
	"hydrofoil.dev/foil/internal/worker/start"
	"hydrofoil.dev/foil/internal/worker/store"
)

// Options configure a Set. All are required.
type Options struct {
	Root   string
	Images *images.Set
	Store  *store.Store
	Pulls  *pull.Puller
	Gate   gate.Gate
	Loop   bool // EROFS is mounted over loop devices
	// WantedRetry is how long after a pull has failed a container that is made of
	// its image has it tried again at the earliest.
	WantedRetry time.Duration
	// MayStart returns an error if no new container may start on a rootfs, which an image names. It may wait for a proof.
	MayStart func(ctx context.Context, r *store.Rootfs, image string, w Waiting) error
	Logger   *slog.Logger
	Warn     func(format string, args ...any)
}

// Waiting is who waits for a container, and is told how far its image is. Of the zero value nobody is.
type Waiting struct {
	// Interval is between events of progress; 0: there are none.
	Interval time.Duration
	Emit     func(api.Event) error
}

// Set is all containers of a root.
type Set struct {
	opts Options
	log  *slog.Logger
	work sync.WaitGroup

	mu  locks.Mutex[locks.Containers]
	all map[string]*Container // by ID
}

// Container is one container. Its exported fields do not change once it is made.
type Container struct {
	Version int `json:"version"`
	api.Container
	ChainID digest.Digest `json:"chain_id"`
	// On is the rootfs that it is on. Older versions note none: theirs has the chain ID's key.
	On     origin.Key `json:"on,omitempty"`
	Traced bool       `json:"traced,omitempty"`

	// tracing records what it reads; nil unless this daemon made it to be
	// traced. Guarded by Set.mu.
	tracing *tracing
	// busy: it is being made or removed. reserved is set while it waits for its image, which
	// is not known yet. Guarded by Set.mu.
	busy     bool
	reserved *reservation
	readers  int // who read its files. Guarded by Set.mu
}

const version = 1

var validID = regexp.MustCompile(`^[a-zA-Z0-9][a-zA-Z0-9_.-]*$`)

// reservation is what a container has while its image is still coming.
type reservation struct {
	drop  context.CancelCauseFunc // ends the pull that asked for it
	ended chan struct{}           // closed when it is a container, or has gone
}

// Load reads the containers that an earlier daemon made. Until Attach they can only
// be looked at.
//
// Errors: api.CodeUnsupported when a newer foil wrote a record.
func Load(root string, log *slog.Logger, warn func(format string, args ...any)) (*Set, error) {
	s := &Set{opts: Options{Root: root, Logger: log, Warn: warn}, log: log, all: make(map[string]*Container)}
	dir := filepath.Join(root, "containers")
	names, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	for _, e := range names {
		path := filepath.Join(dir, e.Name())
		record := filepath.Join(path, "container.json")
		b, err := os.ReadFile(record)
		c := new(Container)
		if err == nil {
			err = json.Unmarshal(b, c)
		}
		switch {
		case errors.Is(err, os.ErrNotExist):
			if err := clearDir(path); err != nil {
				warn("remove what is left of container %s: %v", e.Name(), err)
			}
			continue
		case err == nil:
			err = records.CheckVersion(record, c.Version, version)
		}
		if newer := (*records.NewerError)(nil); errors.As(err, &newer) {
			return nil, api.Errorf(api.CodeUnsupported, "%w", err)
		}
		if err != nil {
			warn("the record of container %s cannot be used: %v; it is left as it is in %s", e.Name(), err, path)
			continue
		}
		if c.On == "" {
			c.On = origin.Key(c.ChainID)
		}
		s.all[c.ID] = c
	}
	return s, nil
}

// Attach gives the set what new containers are made of.
func (s *Set) Attach(opts Options) { s.opts, s.log = opts, opts.Logger }

// Wait waits until records are durable.
func (s *Set) Wait() { s.work.Wait() }

// Create mounts a writable filesystem over an image for a container.
func (s *Set) Create(ctx context.Context, req api.ContainerRequest) (_ *api.Container, err error) {
	name, err := api.NormalRef(req.Ref)
	if err != nil {
		return nil, err
	}
	c, err := s.reserve(req.ID, nil)
	if err != nil {
		return nil, err
	}
	made, err := s.fill(ctx, c, name, req, Waiting{}, func() error { return s.makeDirs(c) })
	s.settle(c, err == nil)
	return made, err
}

// reserve takes an ID for a container, which is busy until settle. It does not touch the disk.
func (s *Set) reserve(id string, until *reservation) (*Container, error) {
	if len(id) > 128 || !validID.MatchString(id) {
		return nil, api.Errorf(api.CodeInvalid, "container ID %q: use up to 128 letters, digits, '_', '.' and '-', a letter or digit first", id)
	}
	dir := filepath.Join(s.opts.Root, "containers", id)
	c := &Container{
		Version:   version,
		Container: api.Container{ID: id, Dir: dir, Rootfs: filepath.Join(dir, "rootfs")},
		busy:      true,
		reserved:  until,
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.all[id] != nil {
		return nil, api.Errorf(api.CodeConflict, "container %s exists: choose another name, or remove it with `foil rm %s`", id, id)
	}
	s.all[id] = c
	return c, nil
}

// makeDirs makes the directories of a container.
func (s *Set) makeDirs(c *Container) error {
	// What an earlier one left would be seen in this one.
	if err := clearDir(c.Dir); err != nil {
		return err
	}
	for _, d := range []string{"rootfs", "upper", "work"} {
		if err := os.MkdirAll(filepath.Join(c.Dir, d), 0o700); err != nil {
			return err
		}
	}
	return nil
}

// hold makes a reserved container one of an image, which must be mounted: the image
// stays from then on.
func (s *Set) hold(ctx context.Context, c *Container, name string, traced bool, w Waiting) (*store.Rootfs, error) {
	img := s.opts.Images.Get(name)
	if img == nil {
		return nil, notHere(name)
	}
	s.mu.Lock()
	c.Ref, c.Digest, c.Created, c.Config = name, img.Digest.String(), time.Now().UTC(), json.RawMessage(img.Config)
	c.ChainID, c.On, c.Traced = img.ChainID, img.Rootfs, traced
	s.mu.Unlock()
	// Who removes the image marks it first, and looks for containers then.
	if s.opts.Pulls.Blocked(name) || s.opts.Images.Get(name) == nil {
		return nil, notHere(name)
	}
	r := s.opts.Store.Get(img.Rootfs)
	switch {
	case r != nil && r.Broken() != nil:
		return nil, api.Errorf(api.CodeCorrupt, "image %s cannot be served: %w", name, r.Broken())
	case r == nil || !r.Mount().Mounted():
		return nil, api.Errorf(api.CodeNotFound, "image %s is not mounted: pull it again with `foil pull %s`", name, name)
	case traced && !r.Complete():
		return nil, api.Errorf(api.CodeConflict, "image %s is not complete, and only a complete one can be traced: pull it with `foil pull %s`", name, name)
	}
	return r, s.opts.MayStart(ctx, r, name, w)
}

func notHere(name string) error {
	return api.Errorf(api.CodeNotFound, "no image %s here: pull it with `foil pull %s`", name, name)
}

// fill makes a reserved container one of the image of that name, which must be mounted, traced
// as req says. dirs, unless nil, makes its directories.
func (s *Set) fill(ctx context.Context, c *Container, name string, req api.ContainerRequest, w Waiting, dirs func() error) (_ *api.Container, err error) {
	r, err := s.hold(ctx, c, name, req.Trace, w)
	if err != nil {
		return nil, err
	}
	s.opts.Images.Touch(name)
	s.opts.Pulls.TryNow(name, s.opts.WantedRetry)
	if !req.Trace {
		start.LearnerOf(r).Created(c.ID)
	}
	if dirs != nil {
		if err := dirs(); err != nil {
			return nil, err
		}
	}
	// The upper directory becomes the container's root directory: it has to
	// look like the image's.
	if err := likeRoot(r.Mountpoint(), filepath.Join(c.Dir, "upper")); err != nil {
		return nil, err
	}
	lower := r.Mountpoint()
	if req.Trace {
		if lower, err = s.startTracing(ctx, c, r, req.Before); err != nil {
			return nil, err
		}
	}
	if err := mount(c, lower); err != nil {
		return nil, err
	}
	b, err := json.Marshal(c)
	if err != nil {
		return nil, err
	}
	record := filepath.Join(c.Dir, "container.json")
	if err := records.Replace(record, b); err != nil {
		return nil, err
	}
	// A power cut ends the container, so that its start need not wait for this.
	s.work.Go(func() {
		err := errors.Join(durable.Sync(record), durable.Sync(c.Dir))
		if err != nil && !errors.Is(err, os.ErrNotExist) { // it was removed
			s.log.Warn("make the record of a container durable", "id", c.ID, "error", err)
		}
	})
	// Who asked and went away would never remove it.
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	made := c.Container
	return &made, nil
}

// settle ends the making of a container: it is its caller's, or it goes.
func (s *Set) settle(c *Container, made bool) {
	if !made {
		if err := s.clear(c); err != nil {
			s.log.Warn("remove what is left of a container", "id", c.ID, "error", err)
		}
	}
	s.mu.Lock()
	c.busy = false
	if !made {
		delete(s.all, c.ID)
	}
	reserved := c.reserved
	c.reserved = nil
	s.mu.Unlock()
	if !made {
		s.forgotten(c)
	}
	if reserved != nil {
		close(reserved.ended)
	}
}

// forgotten is called when a container has gone: what only it named goes, too.
func (s *Set) forgotten(c *Container) {
	if r := s.opts.Store.Get(c.On); r != nil {
		start.LearnerOf(r).Removed(c.ID)
	}
	s.opts.Store.Collect()
}

// Pull pulls an image as a Puller does, and has a container made with it. made is
// called when the container is its caller's.
func (s *Set) Pull(ctx context.Context, req api.PullRequest, emit func(api.Event) error, made func()) (err error) {
	ctx, drop := context.WithCancelCause(ctx)
	defer drop(nil)
	c, err := s.reserve(req.Container, &reservation{drop: drop, ended: make(chan struct{})})
	if err != nil {
		return err
	}
	settled := false
	defer func() {
		if !settled {
			s.settle(c, false)
		}
	}()
	p, err := s.opts.Pulls.Start(ctx, req, pull.How{})
	if err != nil {
		return err
	}
	// While the server is asked.
	if err := s.makeDirs(c); err != nil {
		return err
	}
	// Who is told now begins runc, which takes the processors for a while: not before the
	// question is on its way.
	select {
	case <-p.Asked():
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	ev := p.Snapshot()
	ev.Event, ev.Container = api.Reserved, &api.Container{ID: c.ID, Dir: c.Dir, Rootfs: c.Rootfs}
	if err := emit(ev); err != nil {
		return err
	}
	err = p.Follow(ctx, req, func(ev api.Event) error {
		if ev.Event != api.Mounted || settled {
			return emit(ev)
		}
		if ev.Container, err = s.fill(ctx, c, p.Ref(), api.ContainerRequest{}, Waiting{req.Interval, emit}, nil); err != nil {
			return err
		}
		if err := emit(ev); err != nil {
			return err // nobody has it
		}
		settled = true
		s.settle(c, true)
		made()
		return nil
	})
	if err != nil && ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

// mount mounts a container's filesystem. A change of a file's owner or mode copies its metadata only (metacopy), so that
// an entrypoint's chown -R fetches nothing; and a directory that is renamed stays where it lies. Who reads the upper
// directory has to know that, as package changes does.
//
// What overlayfs notes for that are attributes in trusted.overlay. Neither the image has any (store.layOut sees to
// that), nor can a container make some: it lacks the capability, and with it the kernel gives them other names.
func mount(c *Container, lower string) error {
	o := kernel.Overlay{
		Lower:   []string{lower},
		Upper:   filepath.Join(c.Dir, "upper"),
		Work:    filepath.Join(c.Dir, "work"),
		Target:  c.Rootfs,
		Options: kernel.Metacopy,
	}
	err := kernel.MountOverlay(o)
	if errors.Is(err, unix.EINVAL) { // the module's parameters forbid it
		o.Options = nil
		err = kernel.MountOverlay(o)
	}
	if err != nil {
		return fmt.Errorf("mount the filesystem of container %s: %w", c.ID, err)
	}
	return nil
}

// likeRoot gives the directory upper the owner, mode and times of root.
func likeRoot(root, upper string) error {
	var st unix.Stat_t
	if err := unix.Stat(root, &st); err != nil {
		return fmt.Errorf("stat %s: %w", root, err)
	}
	if err := os.Chown(upper, int(st.Uid), int(st.Gid)); err != nil {
		return err
	}
	if err := unix.Chmod(upper, st.Mode&0o7777); err != nil {
		return fmt.Errorf("chmod %s: %w", upper, err)
	}
	return os.Chtimes(upper, time.Unix(st.Atim.Unix()), time.Unix(st.Mtim.Unix()))
}

// List lists what Create made, oldest first.
func (s *Set) List() []api.Container {
	s.mu.Lock()
	list := make([]api.Container, 0, len(s.all))
	for _, c := range s.all {
		if !c.busy {
			list = append(list, c.Container)
		}
	}
	s.mu.Unlock()
	slices.SortFunc(list, func(a, b api.Container) int {
		if c := a.Created.Compare(b.Created); c != 0 {
			return c
		}
		return strings.Compare(a.ID, b.ID)
	})
	return list
}

// Len is how many containers there are, those that are being made included.
func (s *Set) Len() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.all)
}

// On returns the IDs of all containers, by the rootfs that they are on, sorted.
func (s *Set) On() map[origin.Key][]string {
	s.mu.Lock()
	defer s.mu.Unlock()
	on := make(map[origin.Key][]string)
	for id, c := range s.all {
		if c.On != "" {
			on[c.On] = append(on[c.On], id)
		}
	}
	for _, ids := range on {
		slices.Sort(ids)
	}
	return on
}

// Started takes what is known of a container's start. It is for learning only.
func (s *Set) Started(id string, began api.Start) error {
	s.mu.Lock()
	c := s.all[id]
	var r *store.Rootfs
	if c != nil && !c.Traced {
		r = s.opts.Store.Get(c.On)
	}
	s.mu.Unlock()
	if c == nil {
		return api.Errorf(api.CodeNotFound, "no container %s: `foil ps -a` lists them", id)
	}
	if r == nil {
		return nil
	}
	if p, ok := r.Filler().(*pull.Pull); ok && !began.Ready.IsZero() {
		p.Ready()
	}
	start.LearnerOf(r).Started(id, began)
	return nil
}

// Remove unmounts a container's filesystem and removes what it wrote.
func (s *Set) Remove(ctx context.Context, id string) error {
	c, err := s.takeForRemoval(ctx, id)
	if c == nil {
		return err
	}
	err = s.remove(ctx, c)
	s.mu.Lock()
	c.busy = false
	if err == nil {
		delete(s.all, id)
	}
	s.mu.Unlock()
	if err == nil {
		s.opts.Images.Touch(c.Ref)
		s.forgotten(c)
	}
	return err
}

// takeForRemoval makes a container busy. It returns nil when it has gone meanwhile.
func (s *Set) takeForRemoval(ctx context.Context, id string) (*Container, error) {
	s.mu.Lock()
	c := s.all[id]
	if c != nil && c.reserved != nil {
		r := c.reserved
		s.mu.Unlock()
		r.drop(api.Errorf(api.CodeConflict, "container %s was removed before its image was mounted", id))
		select {
		case <-r.ended:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
		s.mu.Lock()
		if s.all[id] != c { // else it has become one meanwhile
			s.mu.Unlock()
			return nil, nil
		}
	}
	defer s.mu.Unlock()
	switch {
	case c == nil:
		return nil, api.Errorf(api.CodeNotFound, "no container %s: `foil ps -a` lists them", id)
	case c.busy:
		return nil, api.Errorf(api.CodeConflict, "container %s is just being made or removed: try again in a moment", id)
	case c.readers > 0:
		return nil, api.Errorf(api.CodeConflict, "container %s is just being committed or compared: try again in a moment", id)
	}
	c.busy = true
	return c, nil
}

func (s *Set) remove(ctx context.Context, c *Container) error {
	runc := runner.Runner{StateRoot: launch.StateRoot(s.opts.Root)}
	state, err := runc.State(ctx, c.ID)
	switch {
	case errors.Is(err, runner.ErrNotFound): // prepared only, or ended
	case err != nil:
		return err
	case state.Status != "stopped":
		return api.Errorf(api.CodeConflict, "container %s is running: stop it first, or remove it with `foil rm --force %s`", c.ID, c.ID)
	default:
		// Who ran it was killed: what runc knows of it goes too.
		if err := runc.Delete(ctx, c.ID); err != nil {
			return err
		}
	}
	return s.clear(c)
}

// clearDir removes a container's directory. The record goes first, so
// that what a crash leaves is a leftover and not half a container.
func clearDir(dir string) error {
	if err := os.Remove(filepath.Join(dir, "container.json")); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	err := unmountEnded(filepath.Join(dir, "rootfs"))
	if err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) { // EINVAL: not mounted
		return err
	}
	// Those of a trace are nobody else's.
	for _, name := range []string{tracedMount, tracedGate} {
		err := kernel.Unmount(filepath.Join(dir, name), true)
		if err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
			return err
		}
	}
	return removeAll(dir)
}

// removeAll removes a directory into which who reserved the container may still be writing: runc's
// files, of a container that will never run.
func removeAll(dir string) error {
	for end := time.Now().Add(busyFor); ; time.Sleep(time.Millisecond) {
		err := os.RemoveAll(dir)
		if !errors.Is(err, unix.ENOTEMPTY) || time.Now().After(end) {
			return err
		}
	}
}

// busyFor is for how long a container's directory may be in use after the container's end: by
// who lists processes and follows their roots, for example.
const busyFor = 2 * time.Second

// unmountEnded unmounts the filesystem of a container that has ended.
func unmountEnded(target string) error {
	for end := time.Now().Add(busyFor); ; time.Sleep(10 * time.Millisecond) {
		err := kernel.Unmount(target, false)
		if !errors.Is(err, unix.EBUSY) || time.Now().After(end) {
			return err
		}
	}
}
