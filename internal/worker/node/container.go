package node

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/kernel"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/launch"
	"hydrofoil.dev/foil/internal/worker/runner"
)

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
type container struct {
	Version int `json:"version"`
	api.Container
	ChainID digest.Digest `json:"chain_id"`
	Traced  bool          `json:"traced,omitempty"`

	// tracing records what it reads; nil unless this daemon made it to be
	// traced. Guarded by Node.mu.
	tracing *tracing
	// busy: it is being made or removed. reserved is set while it waits for its image, which
	// is not known yet. Guarded by Node.mu.
	busy     bool
	reserved *reservation
}

const containerVersion = 1

var containerID = regexp.MustCompile(`^[a-zA-Z0-9][a-zA-Z0-9_.-]*$`)

// reservation is what a container has while its image is still coming.
type reservation struct {
	drop  context.CancelCauseFunc // ends the Pull that asked for it
	ended chan struct{}           // closed when it is a container, or has gone
}

// CreateContainer mounts a writable filesystem over an image for a container.
func (n *Node) CreateContainer(ctx context.Context, req api.ContainerRequest) (_ *api.Container, err error) {
	name, err := api.NormalRef(req.Ref)
	if err != nil {
		return nil, err
	}
	leave, err := n.enter()
	if err != nil {
		return nil, err
	}
	defer leave()
	c, err := n.reserve(req.ID, nil)
	if err != nil {
		return nil, err
	}
	made, err := n.fill(ctx, c, name, req, func() error { return n.makeDirs(c) })
	n.settle(c, err == nil)
	return made, err
}

// reserve takes an ID for a container, which is busy until settle. It does not touch the disk.
func (n *Node) reserve(id string, until *reservation) (*container, error) {
	if len(id) > 128 || !containerID.MatchString(id) {
		return nil, errorf(api.CodeInvalid, "container ID %q: use up to 128 letters, digits, '_', '.' and '-', a letter or digit first", id)
	}
	dir := filepath.Join(n.opts.Root, "containers", id)
	c := &container{
		Version:   containerVersion,
		Container: api.Container{ID: id, Dir: dir, Rootfs: filepath.Join(dir, "rootfs")},
		busy:      true,
		reserved:  until,
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.containers[id] != nil {
		return nil, errorf(api.CodeConflict, "container %s exists: choose another name, or remove it with `foil rm %s`", id, id)
	}
	n.containers[id] = c
	return c, nil
}

// makeDirs makes the directories of a container.
func (n *Node) makeDirs(c *container) error {
	// What an earlier one left would be seen in this one.
	if err := n.clearContainer(c.Dir); err != nil {
		return err
	}
	for _, d := range []string{"rootfs", "upper", "work"} {
		if err := os.MkdirAll(filepath.Join(c.Dir, d), 0o711); err != nil {
			return err
		}
	}
	return nil
}

// fill makes a reserved container one of the image of that name, which must be mounted, traced
// as req says. dirs, unless nil, makes its directories.
func (n *Node) fill(ctx context.Context, c *container, name string, req api.ContainerRequest, dirs func() error) (_ *api.Container, err error) {
	n.mu.Lock()
	img := n.images[name]
	var r *rootfs
	if img != nil {
		r = n.rootfs[img.ChainID]
	}
	switch {
	case img == nil || n.removing[name]:
		err = errorf(api.CodeNotFound, "no image %s here: pull it with `foil pull %s`", name, name)
	case r != nil && r.broken != nil:
		err = errorf(api.CodeCorrupt, "image %s cannot be served: %w", name, r.broken)
	case r == nil || !r.mounted:
		err = errorf(api.CodeNotFound, "image %s is not mounted: pull it again with `foil pull %s`", name, name)
	case req.Trace && !r.rec.Complete:
		err = errorf(api.CodeConflict, "image %s is not complete, and only a complete one can be traced: pull it with `foil pull %s`", name, name)
	}
	if err != nil {
		n.mu.Unlock()
		return nil, err
	}
	c.Ref, c.Digest, c.Created, c.Config = name, img.Digest.String(), time.Now().UTC(), json.RawMessage(img.Config)
	c.ChainID, c.Traced = r.rec.ChainID, req.Trace // holds the image from here on
	n.touch(img)
	n.tryNow(name, n.opts.wantedRetry)
	if !req.Trace {
		r.learning.created(c.ID)
	}
	n.mu.Unlock()
	if dirs != nil {
		if err := dirs(); err != nil {
			return nil, err
		}
	}
	// The upper directory becomes the container's root directory: it has to
	// look like the image's.
	if err := likeRoot(r.path("mnt"), filepath.Join(c.Dir, "upper")); err != nil {
		return nil, err
	}
	lower := r.path("mnt")
	if req.Trace {
		if lower, err = n.startTracing(ctx, c, r, req.Before); err != nil {
			return nil, err
		}
	}
	if err := mountContainer(c, lower); err != nil {
		return nil, err
	}
	b, err := json.Marshal(c)
	if err != nil {
		return nil, err
	}
	record := filepath.Join(c.Dir, "container.json")
	if err := replaceFile(record, b); err != nil {
		return nil, err
	}
	// A power cut ends the container, so that its start need not wait for this.
	n.work.Go(func() {
		err := errors.Join(syncFile(record), syncDir(c.Dir))
		if err != nil && !errors.Is(err, os.ErrNotExist) { // it was removed
			n.log.Warn("make the record of a container durable", "id", c.ID, "error", err)
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
func (n *Node) settle(c *container, made bool) {
	if !made {
		if err := n.clearTraced(c); err != nil {
			n.log.Warn("remove what is left of a container", "id", c.ID, "error", err)
		}
	}
	n.mu.Lock()
	c.busy = false
	if !made {
		delete(n.containers, c.ID)
		if r := n.rootfs[c.ChainID]; r != nil {
			r.learning.removed(c.ID)
		}
	}
	if c.reserved != nil {
		close(c.reserved.ended)
		c.reserved = nil
	}
	n.mu.Unlock()
	if !made {
		n.collect()
	}
}

// pullInto is Pull for one who has a container made with the image.
func (n *Node) pullInto(ctx context.Context, req api.PullRequest, emit func(api.Event) error) (err error) {
	leave, err := n.enter()
	if err != nil {
		return err
	}
	leave = sync.OnceFunc(leave)
	defer leave()
	ctx, drop := context.WithCancelCause(ctx)
	defer drop(nil)
	c, err := n.reserve(req.Container, &reservation{drop: drop, ended: make(chan struct{})})
	if err != nil {
		return err
	}
	settled := false
	defer func() {
		if !settled {
			n.settle(c, false)
		}
	}()
	p, err := n.startPull(ctx, req, "", false)
	if err != nil {
		return err
	}
	// While the server is asked.
	if err := n.makeDirs(c); err != nil {
		return err
	}
	// Who is told now begins runc, which takes the processors for a while: not before the
	// question is on its way.
	select {
	case <-p.asked:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	ev := p.snapshot()
	ev.Event, ev.Container = api.Reserved, &api.Container{ID: c.ID, Dir: c.Dir, Rootfs: c.Rootfs}
	if err := emit(ev); err != nil {
		return err
	}
	err = p.follow(ctx, req, func(ev api.Event) error {
		if ev.Event != api.Mounted || settled {
			return emit(ev)
		}
		if ev.Container, err = n.fill(ctx, c, p.ref.name, api.ContainerRequest{}, nil); err != nil {
			return err
		}
		if err := emit(ev); err != nil {
			return err // nobody has it
		}
		settled = true
		n.settle(c, true)
		leave()
		return nil
	})
	if err != nil && ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

func mountContainer(c *container, lower string) error {
	err := kernel.MountOverlay(kernel.Overlay{
		Lower:  []string{lower},
		Upper:  filepath.Join(c.Dir, "upper"),
		Work:   filepath.Join(c.Dir, "work"),
		Target: c.Rootfs,
	})
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

// Containers lists what CreateContainer made, oldest first.
func (n *Node) Containers(context.Context) ([]api.Container, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	list := make([]api.Container, 0, len(n.containers))
	for _, c := range n.containers {
		if !c.busy {
			list = append(list, c.Container)
		}
	}
	slices.SortFunc(list, func(a, b api.Container) int {
		if c := a.Created.Compare(b.Created); c != 0 {
			return c
		}
		return strings.Compare(a.ID, b.ID)
	})
	return list, nil
}

// RemoveContainer unmounts a container's filesystem and removes what it wrote.
func (n *Node) RemoveContainer(ctx context.Context, id string) error {
	leave, err := n.enter()
	if err != nil {
		return err
	}
	defer leave()
	n.mu.Lock()
	c := n.containers[id]
	if c != nil && c.reserved != nil {
		r := c.reserved
		r.drop(errorf(api.CodeConflict, "container %s was removed before its image was mounted", id))
		n.mu.Unlock()
		select {
		case <-r.ended:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		n.mu.Lock()
		if n.containers[id] != c { // else it has become one meanwhile
			n.mu.Unlock()
			return nil
		}
	}
	if c == nil || c.busy {
		n.mu.Unlock()
		if c != nil {
			return errorf(api.CodeConflict, "container %s is just being made or removed: try again in a moment", id)
		}
		return errorf(api.CodeNotFound, "no container %s: `foil ps -a` lists them", id)
	}
	c.busy = true
	n.mu.Unlock()
	err = n.removeContainer(ctx, c)
	n.mu.Lock()
	c.busy = false
	if err == nil {
		delete(n.containers, id)
		if img := n.images[c.Ref]; img != nil {
			n.touch(img)
		}
		if r := n.rootfs[c.ChainID]; r != nil {
			r.learning.removed(id)
		}
	}
	n.mu.Unlock()
	if err == nil {
		n.collect()
	}
	return err
}

func (n *Node) removeContainer(ctx context.Context, c *container) error {
	runc := runner.Runner{StateRoot: launch.StateRoot(n.opts.Root)}
	state, err := runc.State(ctx, c.ID)
	switch {
	case errors.Is(err, runner.ErrNotFound): // prepared only, or ended
	case err != nil:
		return err
	case state.Status != "stopped":
		return errorf(api.CodeConflict, "container %s is running: stop it first, or remove it with `foil rm --force %s`", c.ID, c.ID)
	default:
		// Who ran it was killed: what runc knows of it goes too.
		if err := runc.Delete(ctx, c.ID); err != nil {
			return err
		}
	}
	return n.clearTraced(c)
}

// clearContainer removes a container's directory. The record goes first, so
// that what a crash leaves is a leftover and not half a container.
func (n *Node) clearContainer(dir string) error {
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
	return os.RemoveAll(dir)
}

// busyFor is for how long a container's filesystem may be in use after the container's end: by
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

// loadContainers reads the containers that an earlier daemon made.
func (n *Node) loadContainers() error {
	dir := filepath.Join(n.opts.Root, "containers")
	names, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range names {
		path := filepath.Join(dir, e.Name())
		b, err := os.ReadFile(filepath.Join(path, "container.json"))
		c := new(container)
		if err == nil {
			err = json.Unmarshal(b, c)
		}
		switch {
		case errors.Is(err, os.ErrNotExist):
			if err := n.clearContainer(path); err != nil {
				n.Warn("remove what is left of container %s: %v", e.Name(), err)
			}
			continue
		case err == nil:
			err = checkVersion(filepath.Join(path, "container.json"), c.Version, containerVersion)
		}
		if newer := (*newerError)(nil); errors.As(err, &newer) {
			return errorf(api.CodeUnsupported, "%w", err)
		}
		if err != nil {
			n.Warn("the record of container %s cannot be used: %v; it is left as it is in %s", e.Name(), err, path)
			continue
		}
		n.containers[c.ID] = c
	}
	return nil
}
