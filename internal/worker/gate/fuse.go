package gate

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/kernel"
)

// Names under which the keeper holds what a FUSE gate needs to survive its
// daemon; it holds the arenas under KeptArena as well.
const (
	KeptFUSE = "gate/fuse" // the connection: a descriptor of /dev/fuse
	// keptServed and a node's number: an arena that is complete and released,
	// and that a mount still reads through the gate.
	keptServed = "gate/served/"
)

const (
	// fuseWorkers take turns to read requests; each answers what it has read.
	fuseWorkers = 4
	// fuseGrace is for how long after its release a node can still be mounted:
	// by a mount that asked for its device before.
	fuseGrace = time.Minute
	// interruptPoll is how often interrupted readers are looked at.
	interruptPoll = 20 * time.Millisecond
)

// FUSE is a Gate for kernels without pre-content events: a filesystem of the
// gate's own, at Options.Dir, that shows each guarded arena as a file. EROFS is
// mounted over that file (Device), on its own (Linux 6.12) or by a loop device.
// A read of a present range is answered with the arena's bytes, a read of an
// absent one when it is here. It belongs to one process at a time.
//
// # Why not a library
//
// The protocol is spoken here, by package kernel, because the one thing that
// matters most is what FUSE libraries do not do: to go on with a connection
// that another process has opened, initialised, and died over. For that
// nothing may be in memory only. So a node's number is the inode number of its
// arena, its name is that number in decimal, there are no file handles, and INIT
// can come at any time. The ten operations of a read-only directory are little.
//
// # When a process dies
//
// The keeper has the connection too, so the filesystem lives on, and reads
// wait in the kernel. Takeover serves on. What the old daemon had read and not
// answered the kernel sends again when it is told to (FUSE_NOTIFY_RESEND, Linux 6.9), so unlike at the
// fanotify gate no journal is needed and nothing has to be denied. Before
// 6.9 such reads are lost: they hang, and cannot be killed, until the connection ends
// (unmount, or abort it in /sys/fs/fuse/connections). Close therefore
// gives back what it leaves unanswered where it can.
//
// When daemon and keeper die together the kernel ends the connection, and all
// reads fail: the mounts over it have to be made anew, but nobody reads zeros.
// This gate fails closed.
//
// # Release
//
// A mount that was made through the gate goes on through it: the kernel opened
// the file at mount. From its release on, the arena is served without a
// question, and Device names the arena itself, so that new mounts have no process in
// their path. The gate forgets the arena when the kernel has dropped the node, which it
// does when the last mount is gone. Until then Idle is false. There is no
// passthrough (Linux 6.9): it would count as one more filesystem below the
// EROFS mount, and overlayfs could not be stacked on that any more.
//
// # Killed readers
//
// One that waits for its request itself waits for the answer even after SIGKILL, once the request has been
// read. The kernel tells of a signal (FUSE_INTERRUPT) but not of which; to fail a read because
// of SIGALRM would be wrong. So the gate looks at the reader in /proc, and
// answers when SIGKILL is pending. A reader that is killed while there is no daemon
// goes when there is one again.
//
// EROFS (since Linux 6.13 or so) has its readers wait for the pages instead: they go at once, and the
// kernel does not tell. So the gate looks, once a second, whether they are still there. Whoever else waits for
// such a page reads it again.
//
// Until then the mount cannot be unmounted.
//
// # What its process must not do
//
// What Fanotify says of memory maps and programs is true here as well. Besides, it
// must not open the gate's files by os.Open: that makes the runtime's poller
// ask the file whether it can be polled, and the answer would have to be polled for. open(2) is
// harmless.
//
// # Memory
//
// The files are opened for direct I/O: their pages are cached by the EROFS mount
// and, as part of the arena, like at the fanotify gate, and not a third time.
type FUSE struct {
	dev    *os.File
	devFD  int // dev's descriptor, valid until Close has waited
	dir    string
	keeper Keeper
	log    *slog.Logger
	stop   func(string)

	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	wg     sync.WaitGroup // workers, waits, sweeper, watcher

	events, waits, denied atomic.Int64

	sweepNow chan struct{} // has one token when there is something to sweep
	// signalled has one token when a reader that waits has a signal.
	signalled chan struct{}
	buffers   sync.Pool // *[]byte: an answer to the longest read

	// nodes is what workers look arenas up in. The map is replaced, never
	// changed, under mu.
	nodes atomic.Pointer[map[uint64]*fuseNode]

	mu       sync.Mutex
	grace    time.Duration        // fuseGrace
	names    map[string]*fuseNode // guarded and not released
	started  bool
	closed   bool
	dead     bool                 // the connection has ended
	parked   []kernel.FuseRequest // for nodes nobody has guarded yet, until Start
	pending  map[uint64]*fuseWait // by unique number
	slots    slots
	watching bool // the watcher runs
}

// fuseNode is an arena behind the gate, or a released one that is still mounted
// through it.
type fuseNode struct {
	behind
	node uint64
	dev  uint64
	size int64
	file *os.File // the gate's own descriptor
	held *os.File // the keeper's under keptServed, of an earlier daemon
	fd   int      // of file
	// use is held for reading while fd is read from, for writing while it is
	// closed.
	use sync.RWMutex

	kept bool // under keptServed; guarded by the gate's mu
}

// fuseWait is a read of an absent range.
type fuseWait struct {
	kernel.FuseRequest
	reader
	node        *fuseNode
	cancel      context.CancelFunc
	interrupted bool // guarded by the gate's mu
}

var _ Gate = (*FUSE)(nil)

// NewFUSE makes a gate that nobody held before, and mounts its filesystem at
// o.Dir in place of whatever is mounted there. The connection is with the
// keeper when it returns. It answers lookups at once, and reads of arenas
// nobody has guarded from Start on.
func NewFUSE(ctx context.Context, o Options) (*FUSE, error) {
	if err := os.MkdirAll(o.Dir, 0o700); err != nil {
		// A dead filesystem cannot even be looked at.
		if !errors.Is(err, unix.ENOTCONN) && !errors.Is(err, os.ErrExist) {
			return nil, fmt.Errorf("make FUSE gate: %w", err)
		}
	}
	if err := unmountAll(o.Dir); err != nil {
		return nil, fmt.Errorf("make FUSE gate: %w", err)
	}
	dev, err := kernel.MountFuse(o.Dir)
	if err != nil {
		return nil, fmt.Errorf("make FUSE gate: %w", err)
	}
	g, err := newFUSE(dev, o)
	if err == nil && g.keeper != nil {
		if err = g.keeper.Put(ctx, KeptFUSE, dev); err != nil {
			err = errors.Join(fmt.Errorf("give the FUSE connection to the keeper: %w", err), g.Close())
		}
	}
	if err != nil {
		return nil, errors.Join(err, unmountAll(o.Dir))
	}
	return g, nil
}

func unmountAll(dir string) error {
	mounts, err := kernel.Mounts(dir)
	if err != nil {
		return err
	}
	for i := len(mounts) - 1; i >= 0; i-- {
		if err := kernel.Unmount(mounts[i].Target, true); err != nil {
			return err
		}
	}
	return nil
}

// TakeoverFUSE goes on with the gate that an earlier daemon left with the
// keeper. It returns ErrNoGate when o.Held has none, or one that has ended. Afterwards: Guard for every
// incomplete arena, then Start.
func TakeoverFUSE(o Options) (*FUSE, error) {
	dev := o.Held[KeptFUSE]
	if dev == nil {
		return nil, ErrNoGate
	}
	g, err := newFUSE(dev, o)
	if err != nil {
		return nil, fmt.Errorf("take over FUSE gate: %w", err)
	}
	p := []unix.PollFd{{Fd: int32(g.devFD), Events: unix.POLLIN}}
	if _, err := unix.Poll(p, 0); err == nil && p[0].Revents&unix.POLLERR != 0 {
		return nil, errors.Join(ErrNoGate, g.Close())
	}
	err = kernel.FuseResend(g.devFD)
	if errors.Is(err, unix.EINVAL) {
		g.log.Warn("this kernel cannot send requests again that the last daemon left unanswered (Linux 6.9): such reads hang", "err", err)
		err = nil
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("take over FUSE gate: %w", err), g.Close())
	}
	return g, nil
}

// newFUSE begins to serve a connection.
func newFUSE(dev *os.File, o Options) (*FUSE, error) {
	g := &FUSE{
		dev:      dev,
		dir:      o.Dir,
		keeper:   o.Keeper,
		log:      o.Logger,
		stop:     o.stop,
		sweepNow: make(chan struct{}, 1), signalled: make(chan struct{}, 1),
		names:   map[string]*fuseNode{},
		pending: map[uint64]*fuseWait{},
		slots:   slots{max: o.MaxPending},
		grace:   fuseGrace,
	}
	if g.slots.max <= 0 {
		g.slots.max = fusePending
	}
	g.slots.max = min(g.slots.max, kernel.FuseBackground)
	if g.log == nil {
		g.log = slog.Default()
	}
	g.buffers.New = func() any {
		b := make([]byte, kernel.FuseReadHeader+kernel.FuseMaxRead)
		return &b
	}
	g.ctx, g.cancel = context.WithCancel(context.Background())
	rc, err := dev.SyscallConn()
	if err == nil {
		err = rc.Control(func(fd uintptr) { g.devFD = int(fd) })
	}
	if err != nil {
		return nil, fmt.Errorf("use FUSE connection: %w", err)
	}
	nodes, err := g.adopt(o.Held)
	if err != nil {
		return nil, err
	}
	g.nodes.Store(&nodes)
	for range fuseWorkers {
		g.wg.Go(func() { g.work(rc) })
	}
	g.wg.Go(g.sweeper)
	g.sweep()
	return g, nil
}

// adopt goes on with the arenas that were released and are still mounted.
func (g *FUSE) adopt(held map[string]*os.File) (map[uint64]*fuseNode, error) {
	nodes := map[uint64]*fuseNode{}
	for name, f := range held {
		number, ok := strings.CutPrefix(name, keptServed)
		if !ok {
			continue
		}
		n, err := g.newNode(name, f, nil)
		if err != nil {
			return nil, fmt.Errorf("go on with %s: %w", name, err)
		}
		if strconv.FormatUint(n.node, 10) != number {
			return nil, fmt.Errorf("go on with %s: it is file %d", name, n.node)
		}
		n.complete.Store(true)
		n.released.Store(true)
		n.kept, n.held = true, f
		nodes[n.node] = n
	}
	return nodes, nil
}

// newNode makes a node with a descriptor of its own.
func (g *FUSE) newNode(name string, file *os.File, b Backing) (*fuseNode, error) {
	st, err := file.Stat()
	if err != nil {
		return nil, err
	}
	sys, ok := st.Sys().(*syscall.Stat_t)
	if !ok || !st.Mode().IsRegular() {
		return nil, errors.New("not a regular file")
	}
	if sys.Ino <= kernel.FuseRoot {
		return nil, fmt.Errorf("it has the inode number %d, which no file may have here", sys.Ino)
	}
	n := &fuseNode{behind: behind{name: name, backing: b}, node: sys.Ino, dev: uint64(sys.Dev), size: st.Size()}
	rc, err := file.SyscallConn()
	if err != nil {
		return nil, err
	}
	cerr := rc.Control(func(fd uintptr) { n.fd, err = unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 0) })
	if err = errors.Join(cerr, err); err != nil {
		return nil, fmt.Errorf("duplicate its descriptor: %w", err)
	}
	n.file = os.NewFile(uintptr(n.fd), name)
	n.ctx, n.cancel = context.WithCancel(g.ctx)
	return n, nil
}

// Guard implements Gate. The name must be new, unless the last arena of that
// name was released. All arenas must be on one filesystem. The keeper holds file from then on, so it must
// stay open until Release or Close.
func (g *FUSE) Guard(name string, file *os.File, b Backing) error {
	n, err := g.newNode(name, file, b)
	if err != nil {
		return fmt.Errorf("guard arena %s: %w", name, err)
	}
	var was *fuseNode
	g.mu.Lock()
	was, err = g.addLocked(n)
	g.mu.Unlock()
	if err != nil {
		n.close()
		return fmt.Errorf("guard arena %s: %w", name, err)
	}
	if g.keeper != nil {
		if err := g.keeper.Put(g.ctx, KeptArena+name, file); err != nil {
			g.mu.Lock()
			delete(g.names, name)
			g.setLocked(n.node, was)
			g.mu.Unlock()
			n.close()
			return fmt.Errorf("guard arena %s: give it to the keeper: %w", name, err)
		}
	}
	if was != nil {
		g.letGo(was)
	}
	g.replay(n)
	return nil
}

// letGo takes a released node, which is not in the map any more, from the
// keeper.
func (g *FUSE) letGo(n *fuseNode) {
	if n.kept && g.keeper != nil {
		if err := g.keeper.Drop(g.ctx, n.keptName()); err != nil && g.ctx.Err() == nil {
			g.log.Warn("take a released arena from the keeper", "arena", n.name, "err", err)
		}
	}
	n.close()
}

func (n *fuseNode) keptName() string { return keptServed + strconv.FormatUint(n.node, 10) }

// addLocked makes a node known, in place of a released one of the same file,
// which it returns.
func (g *FUSE) addLocked(n *fuseNode) (was *fuseNode, err error) {
	switch {
	case g.closed:
		return nil, os.ErrClosed
	case g.dead:
		return nil, errors.New("the gate's FUSE filesystem has ended; start the daemon again")
	case g.names[n.name] != nil:
		return nil, errors.New("the name is in use")
	}
	all := *g.nodes.Load()
	for _, other := range all {
		if other.dev != n.dev {
			return nil, errors.New("it is on another filesystem than the other arenas")
		}
	}
	if was = all[n.node]; was != nil && !was.released.Load() {
		return nil, fmt.Errorf("the file is behind the gate already, as %s", was.name)
	}
	g.names[n.name] = n
	g.setLocked(n.node, n)
	return was, nil
}

// setLocked replaces the map of nodes: node is n, or is gone (nil).
func (g *FUSE) setLocked(node uint64, n *fuseNode) {
	next := make(map[uint64]*fuseNode)
	for k, v := range *g.nodes.Load() {
		next[k] = v
	}
	if n == nil {
		delete(next, node)
	} else {
		next[node] = n
	}
	g.nodes.Store(&next)
}

// close lets go of the node's descriptor when nobody reads it any more.
func (n *fuseNode) close() {
	n.cancel()
	n.use.Lock()
	defer n.use.Unlock()
	n.file.Close()
	if n.held != nil {
		n.held.Close()
	}
	n.fd = -1
}

// Device implements Gate: the gate's file, until the arena is released.
func (g *FUSE) Device(name, arena string) string {
	g.mu.Lock()
	defer g.mu.Unlock()
	if n := g.names[name]; n != nil {
		return filepath.Join(g.dir, strconv.FormatUint(n.node, 10))
	}
	return arena
}

// Release implements Gate. Mounts that read the arena through the gate go on
// through it. Should one be released that has absent blocks, then reads of it that wait go on
// if their range is present, and fail with EIO if it is not.
func (g *FUSE) Release(name string) error {
	g.mu.Lock()
	n := g.names[name]
	if n == nil {
		g.mu.Unlock()
		return fmt.Errorf("release arena %s: not behind the gate", name)
	}
	delete(g.names, name)
	n.complete.Store(n.backing.Present(0, n.size))
	n.since = time.Now()
	n.released.Store(true)
	n.kept = n.complete.Load()
	g.mu.Unlock()
	n.cancel()
	defer g.sweep()
	if g.keeper == nil {
		return nil
	}
	if n.complete.Load() {
		// First this, so that a mounted arena is always with the keeper.
		if err := g.keeper.Put(g.ctx, n.keptName(), n.file); err != nil {
			return fmt.Errorf("release arena %s: give it to the keeper: %w", name, err)
		}
	}
	if err := g.keeper.Drop(g.ctx, KeptArena+name); err != nil {
		return fmt.Errorf("release arena %s: take it from the keeper: %w", name, err)
	}
	return nil
}

// Start says that every arena is back behind the gate: reads of others fail
// with EIO from now on, those that have waited for it too.
func (g *FUSE) Start() error {
	g.mu.Lock()
	if g.closed || g.started {
		g.mu.Unlock()
		return errors.New("start gate: it is closed or was started before")
	}
	g.started = true
	parked := g.parked
	g.parked = nil
	g.mu.Unlock()
	for _, r := range parked {
		g.handle(r)
	}
	return nil
}

// Stats returns what the gate did so far.
func (g *FUSE) Stats() Stats {
	g.mu.Lock()
	defer g.mu.Unlock()
	return Stats{Events: g.events.Load(), Waits: g.waits.Load(), Denied: g.denied.Load(), Pending: len(g.pending)}
}

// Kind implements Gate.
func (g *FUSE) Kind() string { return "fuse" }

// Idle implements Gate. No mount may be under way.
func (g *FUSE) Idle() bool {
	for _, n := range *g.nodes.Load() {
		if !n.released.Load() || g.known(n) {
			return false
		}
	}
	return true
}

// known reports whether the kernel has a node, other than by its mere name.
func (g *FUSE) known(n *fuseNode) bool {
	name := strconv.FormatUint(n.node, 10)
	if err := kernel.FuseDropName(g.devFD, name); err != nil && !errors.Is(err, unix.ENOENT) {
		g.log.Debug("drop the name of an arena", "node", n.node, "err", err)
	}
	known, err := kernel.FuseKnows(g.devFD, n.node)
	return known || err != nil
}

// Close implements Gate: it answers nothing any more and waits for its
// goroutines. What has no answer goes back into the kernel's queue, for the next daemon. The keeper
// keeps what it holds, and the filesystem stays mounted.
func (g *FUSE) Close() error {
	g.mu.Lock()
	if g.closed {
		g.mu.Unlock()
		return nil
	}
	g.closed = true
	g.mu.Unlock()
	g.cancel()
	// Wakes the workers but leaves the descriptor, which others still use.
	g.dev.SetReadDeadline(time.Unix(1, 0))
	g.wg.Wait()
	// So that a reader which waits can be killed while there is no daemon.
	// Kernels that cannot do it keep them.
	if err := kernel.FuseResend(g.devFD); err != nil {
		g.log.Debug("requests without an answer stay as they are", "err", err)
	}
	for _, n := range *g.nodes.Load() {
		n.close()
	}
	return g.dev.Close()
}

// End implements Gate.
func (g *FUSE) End(ctx context.Context) error {
	var kept []string
	g.mu.Lock()
	for _, n := range *g.nodes.Load() {
		if n.kept {
			kept = append(kept, n.keptName())
		}
	}
	g.mu.Unlock()
	err := errors.Join(g.Close(), unmountAll(g.dir))
	if g.keeper != nil {
		for _, name := range append(kept, KeptFUSE) {
			err = errors.Join(err, g.keeper.Drop(ctx, name))
		}
	}
	return err
}
