// Package node is the worker's daemon: it pulls images as bundles, mounts them
// before their contents have arrived, keeps them, and prepares the filesystems
// of containers on them.
//
// # What is on the disk
//
//	<root>/lock            held by the one daemon of this root
//	<root>/images/         one record for each reference (type image)
//	<root>/rootfs/         one directory for each chain ID (type rootfs)
//	<root>/containers/     one directory for each container (type container)
//	<root>/run/            sockets, the daemon's log; of no use after a reboot
//
// # What is in memory
//
// Node holds the records, and for every rootfs that is incomplete its open
// arena. A rootfs that is complete costs no descriptor and almost no heap: it is
// mounted, and the daemon is out of its way.
//
// # After a crash
//
// Everything is found again from the disk, from the mounts that are there, and
// from the descriptors in the keeper (package keeper): see restore.go.
package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/credentials"
	"hydrofoil.dev/foil/internal/worker/fetch"
	"hydrofoil.dev/foil/internal/worker/gate"
	"hydrofoil.dev/foil/internal/worker/hosts"
	"hydrofoil.dev/foil/internal/worker/keeper"
)

// Options configure a Node. Root is required.
type Options struct {
	// Root is the worker's directory, on ext4, XFS or btrfs: EROFS images and
	// fanotify pre-content marks cannot be on tmpfs and overlayfs.
	Root string
	// Binary is the foil program, started as keeper; the running program when
	// empty.
	Binary string
	// GiveUp is how long a pull goes on trying while its server cannot be
	// reached, before reads that wait for it fail; package fetch's default
	// when 0.
	GiveUp time.Duration
	// Connect lists servers (http://HOST:PORT or https://HOST) to which a
	// connection is kept open from the start on, whether or not anything is
	// pulled. WarmUp is the most bytes, at most bundle.MaxWarm, that each new one of these connections is
	// warmed up with.
	Connect []string
	WarmUp  int64
	// NoStartup does without startup sets.
	NoStartup bool
	// Version is told to clients.
	Version string
	Logger  *slog.Logger
	// Workers is how many frames a pull decodes at a time; 0: as many as there are
	// processors to the Go runtime.
	Workers int
	// Gate is what is to hold back reads of what is absent: kernel.GateFanotify,
	// GateFUSE or GateLoop; empty: the best that the host can have.
	Gate string
	// Hosts says who answers for registries. Its Logger is set to this one's.
	Hosts hosts.Options
	// Store, when set, keeps descriptors besides the keeper.
	Store DescriptorStore
	// Credentials, when set, has what somebody who pulls by this daemon shows to
	// the registry of an image, by its name, HOST/REPOSITORY; none: what Hosts
	// has.
	Credentials func(repository string) credentials.Credential

	// DiskLimit is how much images may take before those that nothing uses are
	// evicted; none when zero. See StartEviction.
	DiskLimit Limit
	// NoReports keeps the daemon from telling servers what containers read until
	// they were ready; ReportSample is which share of starts it tells of, 0
	// means 1.
	NoReports    bool
	ReportSample float64

	earlyFor    time.Duration // the constant of that name when 0
	firstRetry  time.Duration // the same
	wantedRetry time.Duration // the same
	warmFor     time.Duration // the constant of that name when 0

	// Listening, when set, is called when Serve's socket takes connections.
	Listening func()

	// crash, when set by a test, is called at named points.
	crash func(point string)
}

func (n *Node) at(point string) {
	if n.opts.crash != nil {
		n.opts.crash(point)
	}
}

// Node is the daemon. It implements api.Service.
type Node struct {
	opts    Options
	log     *slog.Logger
	lock    *os.File
	started time.Time
	gate    gate.Gate
	loop    bool // EROFS is mounted over loop devices
	keeper  *keeper.Client
	hosts   *hosts.Set
	metrics *nodeMetrics
	kept    []*fetch.Client // of opts.Connect
	// gateLost: there was no gate to take over when this daemon started.
	gateLost  bool
	fromStore bool   // the gate was with Options.Store only
	began     string // one of the constants of that name; set by restore

	ctx  context.Context // ends when the node closes; pulls run under it
	stop context.CancelCauseFunc
	work sync.WaitGroup // pulls, and requests that use what Close takes away
	// restored: what is on the disk and in the keeper has been looked at.
	restored bool

	// layout is held while the directory of a rootfs is laid out, taken over,
	// unmounted or removed, so that one chain ID means one thing at a time. It is
	// taken before mu, and for longer.
	layout sync.Mutex

	// eviction is held while it is decided what goes, and until it has gone. It
	// is taken before layout.
	eviction sync.Mutex

	// mu guards what follows, and the rootfs as their type says. It is held for
	// moments only, never during I/O: the gate's answers need it. A pull's own
	// mutex is taken after it.
	mu         sync.Mutex
	closing    bool
	images     map[string]*image         // by reference
	rootfs     map[digest.Digest]*rootfs // by chain ID
	lent       map[digest.Digest]*rootfs // lenders, by ID
	containers map[string]*container
	pulls      map[string]*pull      // by reference; the last one of each
	waited     []*fetch.Waits        // of pulls that have ended, the last keptWaits
	early      map[string]*pull      // by the reference that will claim them
	removing   map[string]bool       // references that RemoveImage is at
	retries    map[string]*retry     // pulls that failed, by reference
	holds      map[digest.Digest]int // what Hold keeps, by chain ID
	warnings   []string
	evicting   bool
	later      bool          // collect is going to be called again
	pause      time.Duration // before that, the last time
}

var _ api.Service = (*Node)(nil)

// New opens a worker's root and restores what is there: images, mounts, and
// pulls that an earlier daemon did not finish. It needs root privileges.
func New(opts Options) (_ *Node, err error) {
	if opts.Root == "" {
		return nil, errors.New("node: no root directory given")
	}
	if os.Geteuid() != 0 {
		return nil, errorf(api.CodeUnauthorized, "the node daemon mounts filesystems and needs root: run it with sudo, or as a system service")
	}
	if opts.Root, err = filepath.Abs(opts.Root); err != nil {
		return nil, err
	}
	if opts.Logger == nil {
		opts.Logger = slog.Default()
	}
	if opts.GiveUp == 0 {
		opts.GiveUp = fetch.DefaultGiveUp
	}
	if opts.firstRetry == 0 {
		opts.firstRetry = firstRetry
	}
	if opts.wantedRetry == 0 {
		opts.wantedRetry = wantedRetry
	}
	if opts.earlyFor == 0 {
		opts.earlyFor = earlyFor
	}
	if err := os.MkdirAll(opts.Root, 0o711); err != nil {
		return nil, err
	}
	// The kernel lists mounts by their real paths.
	if opts.Root, err = filepath.EvalSymlinks(opts.Root); err != nil {
		return nil, err
	}
	for _, d := range []string{"images", "rootfs", "containers", "run"} {
		if err := os.MkdirAll(filepath.Join(opts.Root, d), 0o711); err != nil {
			return nil, err
		}
	}
	n := &Node{
		opts:       opts,
		log:        opts.Logger,
		started:    time.Now(),
		rootfs:     make(map[digest.Digest]*rootfs),
		lent:       make(map[digest.Digest]*rootfs),
		containers: make(map[string]*container),
		pulls:      make(map[string]*pull),
		early:      make(map[string]*pull),
		removing:   make(map[string]bool),
		retries:    make(map[string]*retry),
		metrics:    newMetrics(),
		began:      beganNew,
	}
	opts.Hosts.Logger = opts.Logger
	n.hosts = hosts.New(opts.Hosts)
	n.ctx, n.stop = context.WithCancelCause(context.Background())
	if n.lock, err = lockRoot(filepath.Join(opts.Root, "lock")); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			_ = n.Close()
		}
	}()
	if n.images, err = n.loadImages(); err != nil {
		return nil, err
	}
	if err := n.loadContainers(); err != nil {
		return nil, err
	}
	n.dropTraced()
	held, err := n.openGate()
	if err != nil {
		return nil, gateError(err)
	}
	if err := n.restore(held); err != nil {
		return nil, err
	}
	for _, base := range opts.Connect {
		c, err := n.hosts.Server(n.ctx, base)
		if err != nil {
			return nil, fmt.Errorf("connect to %s: %w", base, err)
		}
		n.kept = append(n.kept, c)
		n.work.Go(func() { c.Keep(n.ctx, opts.WarmUp) })
	}
	return n, nil
}

func lockRoot(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		_ = f.Close()
		return nil, errorf(api.CodeConflict, "another daemon uses %s (lock %s: %w): use its socket, or give this one another --root", filepath.Dir(path), path, err)
	}
	return f, nil
}

// enter lets a request use the node, which Close waits for until leave is
// called.
func (n *Node) enter() (leave func(), err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closing {
		return nil, errStopping
	}
	n.work.Add(1)
	return n.work.Done, nil
}

// Close ends the daemon's work and waits for it. Mounts stay, and so do the
// gate and the arenas' descriptors, in the keeper: reads of what is absent wait
// for the next daemon. When nothing is incomplete the keeper is told to end.
func (n *Node) Close() error {
	n.mu.Lock()
	n.closing = true
	n.mu.Unlock()
	n.stop(errStopping)
	n.work.Wait()
	// Nobody else is left, but the gate, which reads presence maps.
	var errs []error
	n.mu.Lock()
	idle := n.restored
	var open []*rootfs
	for _, r := range n.rootfs {
		if r.arena != nil {
			open = append(open, r)
		}
		// One that could not be opened again has its gate all the same.
		if !r.rec.Complete && (r.own() >= 0 || r.broken != nil) {
			idle = false
		}
	}
	n.mu.Unlock()
	for _, r := range open {
		if err := r.arena.Sync(context.Background()); err != nil {
			errs = append(errs, err)
		}
	}
	errs = append(errs, n.closeGate(idle))
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, r := range n.rootfs {
		if r.arena != nil {
			errs = append(errs, r.arena.Close())
			r.arena = nil
		}
		r.closeRetired()
		if r.kept != nil {
			_ = r.kept.Close()
			r.kept = nil
		}
		r.contents.close()
	}
	for _, r := range n.lent {
		r.close()
	}
	n.hosts.Close()
	if n.lock != nil {
		errs = append(errs, n.lock.Close())
		n.lock = nil
	}
	return errors.Join(errs...)
}

// Warn records what an operator should know; `foil status` shows it.
func (n *Node) Warn(format string, args ...any) {
	msg := fmt.Sprintf(format, args...)
	n.log.Warn(msg)
	n.mu.Lock()
	defer n.mu.Unlock()
	n.warnings = append(n.warnings, msg)
}

// Images lists what is here, by reference.
func (n *Node) Images(context.Context) ([]api.Image, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	list := make([]api.Image, 0, len(n.images))
	for _, img := range n.images {
		v := api.Image{
			Ref:     img.Ref,
			Digest:  img.Digest.String(),
			ChainID: img.ChainID.String(),
			State:   n.imageState(img),
			Why:     img.Why,
			Created: img.Created,
		}
		if r := n.rootfs[img.ChainID]; r != nil {
			v.Files = r.rec.Files
			v.ContentTotal = r.rec.Contents
			v.ContentHere = r.here()
			if r.broken != nil {
				v.Why = r.broken.Error()
			}
		}
		list = append(list, v)
	}
	slices.SortFunc(list, func(a, b api.Image) int { return strings.Compare(a.Ref, b.Ref) })
	return list, nil
}

// here returns how many bytes of contents are here. Called with Node.mu held.
func (r *rootfs) here() int64 {
	if r.rec.Complete || r.own() < 0 {
		return r.rec.Contents
	}
	if r.arena == nil {
		return 0
	}
	return r.rec.Contents - (r.arena.Layout().ContentBytes() - r.arena.ContentHere())
}

// Status says what the daemon is doing.
func (n *Node) Status(context.Context) (*api.Status, error) {
	s := &api.Status{
		Version: n.opts.Version,
		PID:     os.Getpid(),
		Started: n.started,
		Gate:    n.gateName(),
		Keeper:  n.keeper.PID(),
	}
	n.mu.Lock()
	s.Warnings = slices.Clone(n.warnings)
	for _, c := range n.kept {
		w, ok := c.Kept()
		s.Servers = append(s.Servers, api.ServerStatus{URL: c.Base(), Warm: ok, WarmUp: w.Bytes, Rate: w.Rate})
	}
	pulls := make([]*pull, 0, len(n.pulls))
	for _, p := range n.pulls {
		pulls = append(pulls, p)
	}
	n.mu.Unlock()
	for _, p := range pulls {
		s.Pulls = append(s.Pulls, p.status())
	}
	slices.SortFunc(s.Pulls, func(a, b api.PullStatus) int { return a.Time.Compare(b.Time) })
	return s, nil
}
