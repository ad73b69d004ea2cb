// Package node is the worker's daemon. It puts together what its parts are: images
// (package images), pulls (pull), rootfs with their mounts and state (store),
// containers (containers), and answers for them on the API's socket.
//
// # What is on the disk
//
//	<root>/lock            held by the one daemon of this root; says which process that is
//	<root>/images/         package images
//	<root>/rootfs/         package store
//	<root>/containers/     package containers
//	<root>/run/            sockets, the daemon's log; of no use after a reboot
//
// # After a crash
//
// Everything is found again from the disk, from the mounts that are there, and
// from the descriptors in the keeper (package keeper): see store.Restore.
package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"hydrofoil.dev/foil/internal/kernel"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/containers"
	"hydrofoil.dev/foil/internal/worker/credentials"
	"hydrofoil.dev/foil/internal/worker/gate"
	"hydrofoil.dev/foil/internal/worker/hosts"
	"hydrofoil.dev/foil/internal/worker/images"
	"hydrofoil.dev/foil/internal/worker/keeper"
	"hydrofoil.dev/foil/internal/worker/locks"
	"hydrofoil.dev/foil/internal/worker/memory"
	"hydrofoil.dev/foil/internal/worker/origin"
	"hydrofoil.dev/foil/internal/worker/prover"
	"hydrofoil.dev/foil/internal/worker/pull"
	"hydrofoil.dev/foil/internal/worker/remote"
	"hydrofoil.dev/foil/internal/worker/rootlock"
	"hydrofoil.dev/foil/internal/worker/servers"
	"hydrofoil.dev/foil/internal/worker/store"
	"hydrofoil.dev/foil/internal/worker/yield"
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
	// KeepServers is to how many servers of others, those that pulls use most, a connection is kept, too;
	// 0: none.
	KeepServers int
	// ProveWithin is how long an image may be here unproven before it starts no new container; 0: for ever.
	ProveWithin time.Duration
	// ProveCalm is how long after an image is complete, or the daemon begun, its proof is begun.
	ProveCalm time.Duration
	// Policies say of which registries' images a container may start before they are proven. Of others it may if their
	// servers were authenticated.
	Policies origin.Policies
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
	// Groups are registries that trust each other: what came from one is used for images of the others.
	Groups origin.Groups
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
	// StartupMemory is how much of what is available startup pages may take that are read before anybody asks for
	// them; the zero value is no limit. See package memory.
	StartupMemory Limit
	// NoReports keeps the daemon from telling servers what containers read until
	// they were ready; ReportSample is which share of starts it tells of, 0
	// means 1.
	NoReports    bool
	ReportSample float64

	// Listening, when set, is called when Serve's socket takes connections.
	Listening func()

	// For tests: pull.Options.ClaimWithin, FirstRetry and Stalled, pull.WantedRetry,
	// store.Options.KeepWarm when not 0; crash is called at named points; noProofs has nothing proven but by Prove.
	claimWithin, firstRetry, stalled, wantedRetry, keepWarm time.Duration
	crash                                                   func(point string)
	noProofs                                                bool
}

// Node is the daemon. It implements api.Service.
type Node struct {
	opts    Options
	log     *slog.Logger
	lock    *rootlock.Lock
	started time.Time
	metrics *nodeMetrics

	gate     gate.Gate
	loop     bool // EROFS is mounted over loop devices
	gateLost bool // there was no gate to take over when this daemon started
	keeper   *keeper.Client
	sockets  map[string]*os.File // listening ones of an earlier daemon, by their names at the keeper
	answered atomic.Bool         // the keeper holds one, or is to
	began    string              // one of the constants of that name

	hosts      *hosts.Set
	kept       []*remote.Client // of opts.Connect
	servers    *servers.Set
	images     *images.Set
	store      *store.Store
	memory     *memory.Budget
	others     *yield.Watch
	pulls      *pull.Puller
	prover     *prover.Prover
	containers *containers.Set

	ctx  context.Context // ends when the node closes
	stop context.CancelCauseFunc
	work sync.WaitGroup // requests that use what Close takes away

	// eviction is held while it is decided what goes, and until it has gone. It is
	// held over I/O, and taken before every other lock.
	eviction sync.Mutex

	mu       locks.Mutex[locks.Node]
	closing  bool
	restored bool // what is on the disk and in the keeper has been looked at
	evicting bool
	holds    map[origin.Key]int // what Hold keeps
	warnings []string
}

var _ api.Service = (*Node)(nil)

// New opens a worker's root and restores what is there: images, mounts, and
// pulls that an earlier daemon did not finish. It needs root privileges.
func New(opts Options) (_ *Node, err error) {
	if opts.Root == "" {
		return nil, errors.New("node: no root directory given")
	}
	if os.Geteuid() != 0 {
		return nil, api.Errorf(api.CodeUnauthorized, "the node daemon mounts filesystems and needs root: run it with sudo, or as a system service")
	}
	if opts.Root, err = makeRoot(opts.Root); err != nil {
		return nil, err
	}
	if opts.Logger == nil {
		opts.Logger = slog.Default()
	}
	if opts.wantedRetry == 0 {
		opts.wantedRetry = pull.WantedRetry
	}
	n := &Node{
		opts:    opts,
		log:     opts.Logger,
		started: time.Now(),
		metrics: newMetrics(),
		began:   beganNew,
		holds:   make(map[origin.Key]int),
	}
	opts.Hosts.Logger = opts.Logger
	n.hosts = hosts.New(opts.Hosts)
	n.ctx, n.stop = context.WithCancelCause(context.Background())
	if n.lock, err = rootlock.Take(opts.Root, n.log); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			_ = n.Close()
		}
	}()
	named := make([]*remote.Client, len(opts.Connect))
	for i, base := range opts.Connect {
		if named[i], err = n.hosts.Server(n.ctx, base); err != nil {
			return nil, fmt.Errorf("connect to %s: %w", base, err)
		}
	}
	n.servers = n.openServers(named)
	if err := n.open(); err != nil {
		return nil, err
	}
	n.kept = named
	for i, c := range named {
		n.work.Go(func() { c.Keep(n.ctx, remote.Keeping{WarmUp: opts.WarmUp, Used: n.hosts.LogIn(opts.Connect[i])}) })
	}
	return n, nil
}

// openServers remembers servers, and connects to those that were used most and that are not among
// the named.
func (n *Node) openServers(named []*remote.Client) *servers.Set {
	o := servers.Options{
		Path: filepath.Join(n.opts.Root, "servers.json"), Most: n.opts.KeepServers, Logger: n.log,
		Keeping: remote.Keeping{WarmUp: min(n.opts.WarmUp, usedWarmUp), Least: usedWarmLeast},
		Client: func(ctx context.Context, s servers.Server) (*remote.Client, error) {
			return n.hosts.Known(ctx, s.Registry, s.PlainHTTP, s.Base)
		},
	}
	for _, c := range named {
		o.Named = append(o.Named, c.Base())
	}
	return servers.Open(o)
}

// Bounds of what a server that nobody named may send so that TCP learns the path: bytes, and the
// time between two times.
const (
	usedWarmUp    = 8 << 20
	usedWarmLeast = time.Hour
)

// connections are all that are kept.
func (n *Node) connections() []*remote.Client { return slices.Concat(n.kept, n.servers.Clients()) }

// makeRoot makes the directories of a root, and returns its real path. Only root may
// enter them: below are files of all images, with their set-user-ID bits in the
// filesystems of containers. Containers in user namespaces need no more, since
// overlayfs and runtimes open what is here as root. A root that was there keeps its mode:
// it may be a directory with other things in it.
func makeRoot(root string) (string, error) {
	root, err := filepath.Abs(root)
	if err != nil {
		return "", err
	}
	if err := os.MkdirAll(root, 0o700); err != nil {
		return "", err
	}
	// The kernel lists mounts by their real paths.
	if root, err = filepath.EvalSymlinks(root); err != nil {
		return "", err
	}
	for _, d := range []string{"images", "rootfs", "containers", "run"} {
		d = filepath.Join(root, d)
		if err := os.MkdirAll(d, 0o700); err != nil {
			return "", err
		}
		if err := os.Chmod(d, 0o700); err != nil { // earlier versions let others pass
			return "", err
		}
	}
	return root, nil
}

// open opens the parts, in the order in which they need each other.
func (n *Node) open() (err error) {
	o := n.opts
	if n.images, err = images.Load(o.Root, n.log, n.Warn); err != nil {
		return err
	}
	if n.containers, err = containers.Load(o.Root, n.log, n.Warn); err != nil {
		return err
	}
	inherited, err := n.openGate()
	if err != nil {
		return gateError(err)
	}
	n.store = store.New(store.Options{
		Root: o.Root, Gate: n.gate, Loop: n.loop, Drop: n.holders().Drop, Names: n, Groups: o.Groups, Warn: n.Warn, Logger: n.log,
		Conflict: n.metrics.conflicts.Inc,
		KeepWarm: o.keepWarm, WakeAfter: o.wantedRetry, At: o.crash,
		Waited: func(d time.Duration) { n.metrics.wait.Observe(d.Seconds()) },
	})
	n.memory = memory.New(memory.Options{Limit: o.StartupMemory.of, Look: memory.Host{}.Look, Logger: n.log})
	n.others = yield.New(kernel.Proc("").Processors)
	n.pulls = pull.New(pull.Options{
		Memory: n.memory, Others: n.others,
		Store: n.store, Images: n.images, Hosts: n.hosts, Logger: n.log, MakeRoom: n.makeRoom,
		GiveUp: o.GiveUp, Workers: o.Workers, NoStartup: o.NoStartup, NoReports: o.NoReports, ReportSample: o.ReportSample,
		Credentials: o.Credentials, Completed: n.completed, At: o.crash, ClaimWithin: o.claimWithin, FirstRetry: o.firstRetry, Stalled: o.stalled,
		Used: n.servers.Used,
	})
	n.prover = n.newProver()
	n.containers.Attach(containers.Options{
		MayStart: n.mayStart,
		Root:     o.Root, Images: n.images, Store: n.store, Pulls: n.pulls, Gate: n.gate, Loop: n.loop,
		WantedRetry: o.wantedRetry, Logger: n.log, Warn: n.Warn,
	})
	n.containers.DropTraced(n.ctx)
	lost, err := n.store.Restore(inherited)
	if err != nil {
		return err
	}
	switch {
	case !n.gateLost:
		n.began = beganTakeover
	case lost:
		n.began = beganLost
	}
	n.mu.Lock()
	n.restored = true
	n.mu.Unlock()
	var again []*images.Image
	for _, img := range n.images.List() {
		// One that is not what its image says comes again only when somebody asks for it.
		if r := n.store.Get(img.Rootfs); r == nil || !r.Complete() || r.Broken() != nil && r.Record().Wrong == "" {
			again = append(again, img.Image)
		}
	}
	n.pulls.GoOn(again, true)
	n.store.CountUnproven(n.started)
	n.prover.Start(!n.opts.noProofs)
	return nil
}

// gateError says of an error that there is no gate what that means.
func gateError(err error) error {
	if !kernel.Lacking(err) {
		return err
	}
	return api.Errorf(api.CodeUnsupported, "this kernel, %s, cannot hold back reads of what is not here (fanotify pre-content events need Linux 6.14): %w; `foil doctor` says what this host lacks", kernel.Release(), err)
}

// enter lets a request use the node, which Close waits for until leave is
// called.
func (n *Node) enter() (leave func(), err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closing {
		return nil, pull.ErrStopping
	}
	n.work.Add(1)
	return n.work.Done, nil
}

// during is enter for a request that may last: its context ends when the daemon stops.
func (n *Node) during(ctx context.Context) (_ context.Context, leave func(), err error) {
	left, err := n.enter()
	if err != nil {
		return nil, nil, err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(n.ctx, func() { cancel(pull.ErrStopping) })
	return ctx, func() {
		stop()
		cancel(nil)
		left()
	}, nil
}

// Close ends the daemon's work and waits for it. Mounts stay, and so do the
// gate and the arenas' descriptors, in the keeper: reads of what is absent wait
// for the next daemon. When nothing is incomplete the keeper is told to end.
func (n *Node) Close() error {
	n.mu.Lock()
	n.closing = true
	idle := n.restored
	n.mu.Unlock()
	n.stop(pull.ErrStopping)
	var errs []error
	if n.pulls != nil {
		n.pulls.Stop()
	}
	if n.prover != nil {
		n.prover.Stop()
	}
	n.work.Wait()
	if n.servers != nil {
		n.servers.Close()
	}
	if n.containers != nil {
		n.containers.Wait()
	}
	if n.store != nil {
		n.store.Stop()
		// Nobody else is left, but the gate, which reads presence maps.
		idle = idle && !n.store.NeedsGate()
		errs = append(errs, n.store.Sync(context.Background()))
	}
	errs = append(errs, n.closeGate(idle))
	if n.store != nil {
		errs = append(errs, n.store.Close())
	}
	n.hosts.Close()
	if n.lock != nil {
		errs = append(errs, n.lock.Close())
		n.lock = nil
	}
	return errors.Join(errs...)
}

// mostWarnings bounds what is remembered of them: a server can give rise to any number.
const mostWarnings = 100

// Warn records what an operator should know; `foil status` shows it.
func (n *Node) Warn(format string, args ...any) {
	msg := fmt.Sprintf(format, args...)
	n.log.Warn(msg)
	n.mu.Lock()
	defer n.mu.Unlock()
	n.warnings = append(slices.DeleteFunc(n.warnings, func(o string) bool { return o == msg }), msg)
	if over := len(n.warnings) - mostWarnings; over > 0 {
		n.warnings = slices.Delete(n.warnings, 0, over)
	}
}
