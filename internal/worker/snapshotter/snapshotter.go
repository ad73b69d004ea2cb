// Package snapshotter is Hydrofoil as a containerd snapshotter: containerd's
// snapshots API, served by the node daemon on a Unix socket, so that ctr,
// nerdctl, crictl and the kubelet pull and run as before.
//
// # Two paths
//
// Plain: snapshots are those of containerd's own overlayfs snapshotter, which
// this package wraps. Everything goes this way that is no layer of an image, or
// of an image that cannot be had as a bundle: containerd fetches and unpacks.
//
// Lazy: when containerd prepares the first layer of an image that can be had as
// a bundle, the node pulls it until its rootfs is mounted, and every layer is
// answered with ErrAlreadyExists: containerd fetches none. Their snapshots are all
// made with the first, or before that, when the mirror tells that containerd has
// resolved the image (Expect). The committed snapshot of the last layer is the
// rootfs. Those of the layers below it are virtual: they are names, nothing else.
//
// A snapshot on a rootfs is an overlay with the EROFS mount as its lowest
// directory. What containerd's snapshotter would put below it is left out.
//
// A virtual snapshot can become the parent of something else: a container of an
// image that is a prefix of another, or the layers of an image that shares a
// prefix with it and goes the plain way. Then it is materialised: its layer, and
// those below it, are fetched from the registry and unpacked into it, as
// containerd would have done.
//
// # What is on the disk
//
//	<dir>/metadata.db          containerd's store of snapshots
//	<dir>/snapshots/ID/fs      what a snapshot holds; empty in the lazy ones
//	<dir>/snapshots/ID/lazy    the record (type record) of a rootfs or a virtual
//	                           snapshot, or of one that was virtual
//	<dir>/images/HASH          the name of an image that was pulled for
//	                           containerd, and goes when its rootfs snapshot does
//	<dir>/expected/HASH        names of snapshots that were made when containerd had
//	                           resolved an image, and that it has not asked for yet
//
// # What containerd must say
//
// The labels of an image's layers, which containerd passes when it is configured
// to (deploy/containerd): the image's reference, the digest of its manifest, and
// the chain ID of each layer. The chain ID decides: a snapshot stands for the
// layers that it names, whatever the other labels say.
package snapshotter

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"path"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/core/snapshots/storage"
	"github.com/containerd/containerd/v2/plugins/snapshots/overlay"
	"github.com/containerd/errdefs"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"

	"hydrofoil.dev/foil/internal/kernel"
	"hydrofoil.dev/foil/internal/worker/node"
	"hydrofoil.dev/foil/internal/worker/origin"
)

// Node is what a Snapshotter needs of the daemon; *node.Node is one.
type Node interface {
	// Has reports whether an image is here, or on its way.
	Has(name string) bool
	// Hold brings an image here until its rootfs is mounted, and keeps it until
	// Release is called as often.
	Hold(ctx context.Context, name string) (*node.Held, error)
	Release(key origin.Key)
	// ContainerMade tells of a snapshot on a rootfs. ContainerStarts tells that what process
	// returns, or something unknown, is about to run there.
	ContainerMade(rootfs origin.Key, id string)
	ContainerStarts(rootfs origin.Key, id string, process func() node.Process)
	RemoveImage(ctx context.Context, name string) error
	// RootfsUsage is what a rootfs takes on the disk, in bytes and files.
	RootfsUsage(key origin.Key) (size, inodes int64, err error)
	// Proven reports whether a rootfs is known to be the layers that its chain ID names.
	Proven(key origin.Key) bool
	// Proof says how far that is known, for people. AwaitProof has it found out now.
	Proof(key origin.Key) string
	AwaitProof(ctx context.Context, key origin.Key) error
	// MayStart returns an error if no new container may start on a rootfs. It may wait for its proof for a while.
	MayStart(ctx context.Context, key origin.Key) error
	// OpenBlob reads a blob of an image from its registry, not verified.
	OpenBlob(ctx context.Context, name string, blob ocispec.Descriptor) (io.ReadCloser, error)
}

var _ Node = (*node.Node)(nil)

// Options configure a Snapshotter. Dir is required.
type Options struct {
	// Dir is where snapshots are kept. Containers write there.
	Dir string
	// Node pulls and mounts images; without one every image goes the plain way.
	Node Node
	// HeaderTimeout is how long containerd is made to wait for an image's header
	// before the image goes the plain way; 30 s when 0. A server may have to
	// ingest the image first.
	HeaderTimeout time.Duration
	// Groups are registries that trust each other. Claims: Claim is asked of each image that containerd resolves.
	Groups origin.Groups
	Claims bool
	// Containerd is the path of containerd's own socket, which is asked what runs in a
	// container; empty: it is not.
	Containerd string
	Logger     *slog.Logger
	// Listening, when set, is called when Serve's socket takes connections.
	Listening func()
}

// Labels of snapshots, for people: `ctr snapshots info` shows them. Nothing relies
// on them but on the last.
const (
	// LabelPath is how the image came: PathLazy, PathFull or PathPlain.
	LabelPath = "hydrofoil.dev/path"
	// LabelReason says why it came that way.
	LabelReason = "hydrofoil.dev/reason"
	// LabelImage is the name by which the node knows the image.
	LabelImage = "hydrofoil.dev/image"
	// LabelRole of a lazy snapshot is rootfs or layer.
	LabelRole = "hydrofoil.dev/role"
	// LabelProof of an image's rootfs says what is known of where its files come from: served, proving N%, proven,
	// unproven: WHY or failed: WHY. Walk does not tell it: containerd keeps the labels that it finds there when it has
	// pulled, and shows those instead of what Stat says later.
	LabelProof = "hydrofoil.dev/proof"
	// LabelOwners of a snapshot says ownersChanged: see Commit.
	LabelOwners = "hydrofoil.dev/owners"

	PathLazy  = "lazy"  // containers can start while its bytes come
	PathFull  = "full"  // every byte was here already: nothing is waited for
	PathPlain = "plain" // containerd fetches and unpacks it

	ownersChanged = "changed"
)

// Snapshotter implements containerd's snapshots.Snapshotter and Cleaner.
type Snapshotter struct {
	plain snapshots.Snapshotter // containerd's own, on the same metadata
	meta  *storage.MetaStore
	opts  Options
	log   *slog.Logger

	// materialise is held while virtual snapshots are unpacked.
	materialise sync.Mutex

	// mu guards what follows, and is held while a lazy snapshot is made or
	// removed, so that there is one for a layer and its parent.
	mu      sync.Mutex
	records map[string]*record // by snapshot ID
	pulls   map[string]*pulled // by the image's name, while containerd pulls it
	refused map[string]refusal // images that lately could not be had, by name
	// expected are the images that containerd has resolved and not asked for yet,
	// by name.
	expected map[string]*expectation
	// asking counts who has asked for an image, and has no answer from the node.
	asking map[string]int
	closed bool

	containerd *grpc.ClientConn // nil: it is not asked

	boot string         // the kernel's boot_id
	work sync.WaitGroup // what makes expected snapshots

	paths    *prometheus.CounterVec // path, reason
	unpacked prometheus.Counter
}

var (
	_ snapshots.Snapshotter = (*Snapshotter)(nil)
	_ snapshots.Cleaner     = (*Snapshotter)(nil)
)

// Open opens the snapshots in a directory, and takes hold again of the rootfs
// that they use. One that cannot be had harms only itself: it is tried again
// when it is needed.
func Open(ctx context.Context, opts Options) (_ *Snapshotter, err error) {
	if opts.Dir, err = filepath.Abs(opts.Dir); err != nil {
		return nil, err
	}
	if strings.ContainsAny(opts.Dir, ":,\\") {
		return nil, fmt.Errorf("snapshotter directory %s: the options of overlayfs cannot hold a path with ':', ',' or '\\': choose another --root", opts.Dir)
	}
	if opts.Logger == nil {
		opts.Logger = slog.New(slog.DiscardHandler)
	}
	if opts.HeaderTimeout == 0 {
		opts.HeaderTimeout = 30 * time.Second
	}
	for _, d := range []string{opts.Dir, filepath.Join(opts.Dir, "images"), filepath.Join(opts.Dir, "expected")} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return nil, err
		}
	}
	if err := check(opts.Dir); err != nil {
		return nil, err
	}
	s := &Snapshotter{opts: opts, log: opts.Logger, records: make(map[string]*record), pulls: make(map[string]*pulled), refused: make(map[string]refusal), expected: make(map[string]*expectation), asking: make(map[string]int), paths: newPaths()}
	boot, err := kernel.ReadBootID()
	if err != nil {
		return nil, err
	}
	s.boot = boot.String()
	if s.containerd, err = dial(opts.Containerd); err != nil {
		return nil, err
	}
	s.unpacked = prometheus.NewCounter(prometheus.CounterOpts{Name: "foil_node_unpacked_layers_total",
		Help: "Layers of lazy images that were fetched and unpacked after all, because something that is not in the image is made on them."})
	if s.meta, err = storage.NewMetaStore(filepath.Join(opts.Dir, "metadata.db")); err != nil {
		return nil, err
	}
	// Id-mapped mounts are made when a client asks for them by label, and then
	// containerd has found that the kernel can.
	if s.plain, err = overlay.NewSnapshotter(opts.Dir, overlay.WithMetaStore(s.meta), overlay.WithRemapIDs); err != nil {
		return nil, errors.Join(err, s.meta.Close())
	}
	if err := s.load(ctx); err != nil {
		return nil, errors.Join(err, s.meta.Close())
	}
	if err := s.dropUnfinished(ctx); err != nil {
		s.log.Warn("what a crash left of snapshots takes room still", "error", err)
	}
	return s, nil
}

// dropUnfinished removes what an earlier daemon was making when it died:
// directories without a snapshot, layers half unpacked. Nothing is made meanwhile.
func (s *Snapshotter) dropUnfinished(ctx context.Context) error {
	err := s.Cleanup(ctx)
	if errdefs.IsNotFound(err) { // there has been no snapshot yet: none of these is one's
		var dirs []string
		dirs, err = filepath.Glob(filepath.Join(s.opts.Dir, "snapshots", "*"))
		for _, dir := range dirs {
			err = errors.Join(err, os.RemoveAll(dir))
		}
	}
	half, globErr := filepath.Glob(filepath.Join(s.opts.Dir, "snapshots", "*", "unpack"))
	err = errors.Join(err, globErr)
	for _, dir := range half {
		err = errors.Join(err, os.RemoveAll(dir))
	}
	return err
}

// Close ends the snapshotter's holds. Mounts stay.
func (s *Snapshotter) Close() error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return nil
	}
	s.closed = true
	for _, r := range s.records {
		s.letGo(r)
	}
	for name, p := range s.pulls {
		p.timer.Stop()
		s.opts.Node.Release(p.held.Rootfs)
		delete(s.pulls, name)
	}
	for _, e := range s.expected {
		e.timer.Stop() // the next daemon removes what was made for it
	}
	s.mu.Unlock()
	s.work.Wait()
	if s.containerd != nil {
		_ = s.containerd.Close()
	}
	return s.plain.Close()
}

// Stat returns what is known of a snapshot.
func (s *Snapshotter) Stat(ctx context.Context, key string) (snapshots.Info, error) {
	info, err := s.plain.Stat(ctx, key)
	if err != nil {
		return info, err
	}
	return s.proofLabelled(s.labelled(info)), nil
}

// Update changes labels. Those of this package cannot be changed.
func (s *Snapshotter) Update(ctx context.Context, info snapshots.Info, fields ...string) (snapshots.Info, error) {
	info, err := s.plain.Update(ctx, info, fields...)
	if err != nil {
		return info, err
	}
	return s.proofLabelled(s.labelled(info)), nil
}

// Walk calls fn for each snapshot that the filters let through, when it has read
// all of them: a transaction that is open would keep the database from growing,
// and so wait for fn, and for mu, whose holder may be the one who writes.
func (s *Snapshotter) Walk(ctx context.Context, fn snapshots.WalkFunc, filters ...string) error {
	var all []snapshots.Info
	err := s.plain.Walk(ctx, func(_ context.Context, info snapshots.Info) error {
		all = append(all, info)
		return nil
	}, filters...)
	if err != nil {
		return err
	}
	for _, info := range all {
		if err := fn(ctx, s.labelled(info)); err != nil {
			return err
		}
	}
	return nil
}

// labelled adds the labels of a lazy snapshot.
func (s *Snapshotter) labelled(info snapshots.Info) snapshots.Info {
	r := s.recordOf(info.Name)
	if r == nil {
		return info
	}
	labels := maps.Clone(info.Labels)
	if labels == nil {
		labels = make(map[string]string)
	}
	labels[LabelPath], labels[LabelReason] = r.path()
	labels[LabelImage], labels[LabelRole] = r.Image, r.Role
	info.Labels = labels
	return info
}

// proofLabelled adds LabelProof, once labelled has added the others.
func (s *Snapshotter) proofLabelled(info snapshots.Info) snapshots.Info {
	s.mu.Lock()
	defer s.mu.Unlock()
	if r := s.named(info.Name); r != nil && r.held != nil && info.Labels != nil {
		info.Labels[LabelProof] = s.opts.Node.Proof(r.held.Rootfs)
	}
	return info
}

// Usage returns what a snapshot takes on the disk: of a rootfs what has arrived,
// with what another rootfs lends counted there; of a virtual one nothing.
func (s *Snapshotter) Usage(ctx context.Context, key string) (snapshots.Usage, error) {
	u, err := s.plain.Usage(ctx, key)
	if err != nil {
		return u, err
	}
	r := s.recordOf(key)
	switch {
	case r == nil:
	case r.Role == roleRootfs:
		s.mu.Lock()
		held := r.held
		s.mu.Unlock()
		if held == nil {
			return u, fmt.Errorf("usage of snapshot %s: its rootfs is not here: %w", key, errdefs.ErrUnavailable)
		}
		if u.Size, u.Inodes, err = s.opts.Node.RootfsUsage(held.Rootfs); err != nil {
			return u, fmt.Errorf("usage of snapshot %s: %w", key, err)
		}
	default:
		u.Size, u.Inodes = r.Size, r.Inodes
	}
	return u, nil
}

// Prepare makes a snapshot that can be written to. For a layer of an image that
// can be had as a bundle it returns ErrAlreadyExists: the layer's snapshot is
// there, committed.
func (s *Snapshotter) Prepare(ctx context.Context, key, parent string, opts ...snapshots.Opt) ([]mount.Mount, error) {
	opts, info, err := asked(opts)
	if err != nil {
		return nil, err
	}
	if target := info.Labels[snapshots.LabelSnapshotRef]; target != "" {
		why, err := s.skip(ctx, key, target, parent, info.Labels)
		if err == nil {
			image, _ := imageName(info.Labels)
			err = s.onForeign(ctx, image, parent)
		}
		if err != nil {
			return nil, err
		}
		opts = append(opts, snapshots.WithLabels(map[string]string{LabelPath: PathPlain, LabelReason: why}))
		return s.create(ctx, s.plain.Prepare, key, parent, opts)
	}
	return s.start(ctx, s.plain.Prepare, key, parent, opts)
}

// View makes a snapshot that can be read only.
func (s *Snapshotter) View(ctx context.Context, key, parent string, opts ...snapshots.Opt) ([]mount.Mount, error) {
	opts, _, err := asked(opts)
	if err != nil {
		return nil, err
	}
	return s.start(ctx, s.plain.View, key, parent, opts)
}

type createFunc func(ctx context.Context, key, parent string, opts ...snapshots.Opt) ([]mount.Mount, error)

// start is create for what no layer is unpacked into: a container's, if it may start.
func (s *Snapshotter) start(ctx context.Context, create createFunc, key, parent string, opts []snapshots.Opt) ([]mount.Mount, error) {
	err := s.ready(ctx, parent)
	if err == nil {
		err = s.mayStart(ctx, parent)
	}
	if err != nil {
		return nil, fmt.Errorf("prepare snapshot %s: %w", key, err)
	}
	return s.create(ctx, create, key, parent, opts)
}

func (s *Snapshotter) create(ctx context.Context, create createFunc, key, parent string, opts []snapshots.Opt) ([]mount.Mount, error) {
	if err := s.ready(ctx, parent); err != nil {
		return nil, fmt.Errorf("prepare snapshot %s: %w", key, err)
	}
	mounts, err := create(ctx, key, parent, opts...)
	if err != nil {
		return nil, err
	}
	if mounts, err = s.rewrite(ctx, key, mounts); err != nil {
		return nil, errors.Join(err, s.plain.Remove(ctx, key))
	}
	s.made(key, parent)
	return mounts, nil
}

// Mounts returns how a snapshot is mounted.
func (s *Snapshotter) Mounts(ctx context.Context, key string) ([]mount.Mount, error) {
	mounts, err := s.plain.Mounts(ctx, key)
	if err != nil {
		return nil, err
	}
	if err := s.ready(ctx, key); err != nil {
		return nil, fmt.Errorf("mounts of snapshot %s: %w", key, err)
	}
	if mounts, err = s.rewrite(ctx, key, mounts); err != nil {
		return nil, err
	}
	s.starts(ctx, key)
	return mounts, nil
}

// Commit makes a snapshot one that others can be made on.
//
// A containerd that was not told that Hydrofoil maps IDs (the capability
// remap-ids, deploy/containerd), which 1.7 cannot be, makes a copy of an image for
// each user namespace, with the owners of all files changed, and containers on
// that. It asks for the mapping by labels nevertheless, and then must not get it.
func (s *Snapshotter) Commit(ctx context.Context, name, key string, opts ...snapshots.Opt) error {
	opts, _, err := asked(opts)
	if err != nil {
		return err
	}
	if path.Base(key) == path.Base(name)+"-remap" { // as containerd's client calls them
		opts = append(opts, snapshots.WithLabels(map[string]string{LabelOwners: ownersChanged}))
	}
	// Labels are not inherited; these are ours.
	if info, err := s.plain.Stat(ctx, key); err == nil && info.Labels[LabelPath] != "" {
		opts = append(opts, snapshots.WithLabels(map[string]string{LabelPath: info.Labels[LabelPath], LabelReason: info.Labels[LabelReason]}))
	}
	return s.plain.Commit(ctx, name, key, opts...)
}

// Remove removes a snapshot that no other is made on, and with a rootfs's the
// image that was pulled for it.
func (s *Snapshotter) Remove(ctx context.Context, key string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.named(key)
	if err := s.plain.Remove(ctx, key); err != nil {
		return err
	}
	if r != nil {
		delete(s.records, r.ID)
		s.letGo(r)
		s.dropImage(ctx, r.Image)
	}
	return nil
}

// Cleanup removes what is left of snapshots that are gone.
func (s *Snapshotter) Cleanup(ctx context.Context) error {
	return s.plain.(snapshots.Cleaner).Cleanup(ctx)
}

// asked returns options without labels that are this package's to set, and what
// they ask for.
func asked(opts []snapshots.Opt) ([]snapshots.Opt, snapshots.Info, error) {
	var info snapshots.Info
	for _, o := range opts {
		if err := o(&info); err != nil {
			return nil, info, err
		}
	}
	maps.DeleteFunc(info.Labels, func(k, _ string) bool { return strings.HasPrefix(k, "hydrofoil.dev/") })
	want := info
	return []snapshots.Opt{func(i *snapshots.Info) error {
		if want.Labels != nil {
			i.Labels = maps.Clone(want.Labels)
		}
		if want.Parent != "" {
			i.Parent = want.Parent
		}
		return nil
	}}, info, nil
}
