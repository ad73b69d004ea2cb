package gate

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/kernel"
	"hydrofoil.dev/foil/internal/worker/gate/journal"
)

// Names under which the keeper holds what a gate needs to survive its daemon.
const (
	KeptGroup   = "gate/group"   // the fanotify group
	KeptJournal = "gate/journal" // the journal of unanswered events
	// KeptArena and the name given to Guard: a descriptor of the arena that was
	// opened before its mark. Only such a descriptor reads and writes the arena without waiting
	// for itself, so the next daemon must go on with this one and must not open the
	// arena by its path.
	KeptArena = "arena/"
)

// ErrNoGate is returned by Takeover when there is no gate to inherit: this is
// the first start, or daemon and keeper died together. In the latter case
// mounts over incomplete arenas serve zeros for holes. The caller must serve
// nothing from them, remount them behind a new gate, and report them
// (invariant 3).
var ErrNoGate = errors.New("no gate to take over")

// Keeper holds descriptors for the gate in another process. Both methods
// return only when the keeper has done it.
type Keeper interface {
	Put(ctx context.Context, name string, f *os.File) error
	Drop(ctx context.Context, name string) error
}

// Options of a gate.
type Options struct {
	// Keeper is the second holder of the gate. Without one (nil) a crash of
	// this process lets waiting reads through as zeros.
	Keeper Keeper
	// Held is what the keeper held when this process started, by name;
	// Takeover looks for the group and the journal in it. Files that it uses
	// belong to the gate from then on; the others it leaves alone.
	Held map[string]*os.File
	// Dir is where a FUSE gate mounts its filesystem: a directory below the
	// root, which it makes.
	Dir string
	// Logger gets what an operator should know. Nil: slog.Default().
	Logger *slog.Logger
	// MaxPending bounds the reads that wait, each of which costs a goroutine and, at a
	// fanotify gate, a descriptor; 0 means 1,024 there, and 16,000 at a FUSE gate. It is lowered to what RLIMIT_NOFILE
	// leaves room for. Of one arena as many may wait as are free; see slots.
	MaxPending int

	// stop, when set by a crash test, is called at named points.
	stop func(point string)
}

const (
	batch    = 64 // events in one read of the group
	minSlots = 2 * batch
	// maxNumber bounds the numbers of events, and so what a takeover has to
	// clear: some 30 ms.
	maxNumber = 65536
	// lateEvents is for how long after Release events of an arena can still
	// turn up that were raised before it.
	lateEvents = time.Minute
)

// Stats counts what a gate did since this process made it.
type Stats struct {
	Events  int64 // read
	Waits   int64 // of those: found absent, had to wait
	Denied  int64 // failed with EIO
	Pending int   // read and not answered now
}

// Fanotify is a Gate of fanotify pre-content events (Linux 6.14). It belongs
// to one process at a time; that only one daemon runs on a root is the
// caller's business.
//
// # The way of an event
//
// One goroutine reads the group, up to 64 events at once. Each gets noted in
// the journal before anything else is done with it. If its range is present
// it is answered there and then. Else a goroutine calls Backing.Need and
// answers. After the answer the journal's slot is freed, and only then the
// event's descriptor closed: a number must not be given to another event while the slot
// still speaks of the old one.
//
// # When a process dies
//
// The kernel knows an event that was read only by its number, the descriptor
// number it got in the process that read it. When that process dies and the
// keeper still holds the group, the event stays, under that number, and any
// holder may answer it; but nobody is told of it again. Takeover therefore,
// before anything is read:
//
//  1. takes group and journal from the keeper. No group: ErrNoGate.
//  2. denies with EIO every number below the journal's limit that the journal
//     does not hold. These were read but not yet noted (the process died in
//     between), so nobody knows their range; without an answer their readers
//     would wait for ever. An answer to a number that no event has does
//     nothing. It must happen before the first read, because a new event
//     would get one of these numbers.
//  3. occupies each number the journal holds (a duplicate of /dev/null), until
//     its event is answered. Otherwise a new event could get the same number
//     as an old one, and an answer could let the wrong one through. Where
//     the number is in use in this process already it cannot be occupied. The
//     journal then says that it may be shared. Should it become free and a new
//     event get it, then both events are held until both ranges are here, and answered
//     together; and should this process die before, then the next one, which
//     cannot know how many events have the number, denies them all.
//
// Then the caller puts its arenas back with Guard, at which the noted events
// of each go on waiting for their ranges; and calls Start, which denies noted
// events of arenas nobody knows, and reads on.
//
// # Killed readers
//
// A reader waits killably (Linux 6.14 to 6.18: fanotify_get_response uses a
// killable, freezable wait), so SIGKILL ends it at once. Its event, if it was
// not read yet, is taken from the queue; else it stays under its number, and is
// freed with its answer, which is as good as any. Nobody is told. So the gate looks, once a second, whether the
// threads that wait are still there, and denies the events of others. Who waited for an earlier daemon is not
// known, so those events keep their slots until their ranges are here.
//
// # Who waits
//
// A read of a present range needs no slot: it is answered as it is read. How many reads may wait, of one
// arena and in all, is described at slots.
//
// # What its process must not do
//
// It must not map files behind its own gate into its memory and touch them,
// nor execute them itself: a page fault, and the start of a process until the
// program is loaded, hold one of the Go runtime's processors, and the gate can
// wait for that processor for ever. Reads by system calls are harmless.
type Fanotify struct {
	group   *os.File
	groupFD int // group's descriptor, valid until Close has waited
	closing int // eventfd(2), readable from Close on
	journal *journal.Journal
	keeper  Keeper
	log     *slog.Logger
	stop    func(string)
	threads bool // events name the thread that waits, not its process

	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	wg     sync.WaitGroup // the reader, every wait, and watch

	// arenas is what the reader looks events up in. The map is replaced, never
	// changed, under mu.
	arenas atomic.Pointer[map[journal.Inode]*guarded]

	events, waits, denied atomic.Int64

	mu        sync.Mutex
	names     map[string]*guarded
	slots     slots
	waiting   map[*fanWait]struct{}
	watching  bool  // watch runs
	freeSlots []int // of the journal
	pending   int   // slots of the journal that are taken
	started   bool
	closed    bool
	// stale has the numbers that an earlier daemon left, until answered;
	// nShared counts those that a new event can get too.
	stale   map[int32]*staleNumber
	nShared atomic.Int32
}

// guarded is an arena behind the gate, or one released a moment ago.
type guarded struct {
	behind
	inode journal.Inode
	file  *os.File // the caller's
}

var _ Gate = (*Fanotify)(nil)

// New makes a gate that nobody held before. Group and journal are with the
// keeper when it returns. Call Start before anything reads a guarded arena
// through the gate.
func New(ctx context.Context, o Options) (*Fanotify, error) {
	limit, err := numberLimit()
	if err != nil {
		return nil, err
	}
	group, err := kernel.NewFanotifyGroup()
	if err != nil {
		return nil, err
	}
	j, err := journal.New(limit)
	if err != nil {
		group.Close()
		return nil, err
	}
	g, err := newFanotify(group, j, limit, o)
	if err != nil {
		group.Close()
		j.Close()
		return nil, err
	}
	if err := g.keep(ctx); err != nil {
		return nil, errors.Join(err, g.Close())
	}
	return g, nil
}

func newFanotify(group *os.File, j *journal.Journal, limit uint64, o Options) (*Fanotify, error) {
	g := &Fanotify{
		journal: j,
		keeper:  o.Keeper,
		log:     o.Logger,
		slots:   slots{max: o.MaxPending},
		waiting: map[*fanWait]struct{}{},
		stop:    o.stop,
		names:   map[string]*guarded{},
		stale:   map[int32]*staleNumber{},
	}
	if g.log == nil {
		g.log = slog.Default()
	}
	if g.slots.max <= 0 {
		g.slots.max = fanotifyPending
	}
	// A quarter of the numbers is for everything else that the process opens,
	// and two batches of slots for what is in hand when the bound is met.
	g.slots.max = min(g.slots.max, int(limit)*3/4, j.Slots()-minSlots)
	g.ctx, g.cancel = context.WithCancel(context.Background())
	g.arenas.Store(&map[journal.Inode]*guarded{})
	for i := j.Slots() - 1; i >= 0; i-- {
		g.freeSlots = append(g.freeSlots, i)
	}
	var err error
	if g.group, err = kernel.Unpolled(group); err != nil {
		return nil, fmt.Errorf("use fanotify group: %w", err)
	}
	rc, err := g.group.SyscallConn()
	if err == nil {
		err = rc.Control(func(fd uintptr) { g.groupFD = int(fd) })
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("use fanotify group: %w", err), g.group.Close())
	}
	if g.threads, err = kernel.FanotifyNamesThreads(g.groupFD); err != nil {
		return nil, errors.Join(err, g.group.Close())
	}
	if g.closing, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		return nil, errors.Join(fmt.Errorf("eventfd: %w", err), g.group.Close())
	}
	return g, nil
}

// keep puts group and journal with the keeper, journal first: a keeper that
// has the group has the journal too.
func (g *Fanotify) keep(ctx context.Context) error {
	if g.keeper == nil {
		return nil
	}
	if err := g.keeper.Put(ctx, KeptJournal, g.journal.File()); err != nil {
		return fmt.Errorf("give the gate's journal to the keeper: %w", err)
	}
	if err := g.keeper.Put(ctx, KeptGroup, g.group); err != nil {
		return fmt.Errorf("give the gate's group to the keeper: %w", err)
	}
	return nil
}

// numberLimit returns the bound of all descriptor numbers in this process,
// and lowers RLIMIT_NOFILE to maxNumber if it is above: an event with a number that
// no takeover clears could hang its reader.
func numberLimit() (uint64, error) {
	var rl unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &rl); err != nil {
		return 0, fmt.Errorf("read the limit of open files: %w", err)
	}
	if rl.Cur > maxNumber {
		// By way of syscall, so that children get the same.
		s := syscall.Rlimit{Cur: maxNumber, Max: rl.Max}
		if err := syscall.Setrlimit(unix.RLIMIT_NOFILE, &s); err != nil {
			return 0, fmt.Errorf("lower the limit of open files to %d: %w", maxNumber, err)
		}
		rl.Cur = maxNumber
	}
	return rl.Cur, nil
}

// Guard implements Gate. The keeper holds file before the mark is made. The
// name must be new, unless the last arena of that name was released; after Takeover
// it is the name that the arena had in the daemon before. file must stay open until Release
// or Close.
func (g *Fanotify) Guard(name string, file *os.File, b Backing) error {
	st, err := file.Stat()
	if err != nil {
		return fmt.Errorf("guard arena %s: %w", name, err)
	}
	sys, ok := st.Sys().(*syscall.Stat_t)
	if !ok || !st.Mode().IsRegular() {
		return fmt.Errorf("guard arena %s: not a regular file", name)
	}
	a := &guarded{
		behind: behind{name: name, backing: b},
		inode:  journal.Inode{Dev: uint64(sys.Dev), Ino: sys.Ino},
		file:   file,
	}
	a.ctx, a.cancel = context.WithCancel(g.ctx)

	// It can be found before the mark lets the first event come.
	g.mu.Lock()
	err = g.addLocked(a)
	g.mu.Unlock()
	if err != nil {
		a.cancel()
		return fmt.Errorf("guard arena %s: %w", name, err)
	}
	if err = g.mark(a); err != nil {
		g.mu.Lock()
		delete(g.names, name)
		g.setLocked(a.inode, nil)
		g.mu.Unlock()
		a.cancel()
		return fmt.Errorf("guard arena %s: %w", name, err)
	}
	g.resume(a)
	return nil
}

func (g *Fanotify) addLocked(a *guarded) error {
	if g.closed {
		return os.ErrClosed
	}
	if g.names[a.name] != nil {
		return errors.New("the name is in use")
	}
	if was := (*g.arenas.Load())[a.inode]; was != nil && !was.released.Load() {
		return fmt.Errorf("the file is behind the gate already, as %s", was.name)
	}
	g.names[a.name] = a
	g.setLocked(a.inode, a)
	return nil
}

// setLocked replaces the map of arenas: key is a, or is gone (nil). Arenas
// released so long ago that no event of theirs can be on its way go too.
func (g *Fanotify) setLocked(key journal.Inode, a *guarded) {
	next := make(map[journal.Inode]*guarded)
	for k, v := range *g.arenas.Load() {
		if k != key && !(v.released.Load() && time.Since(v.since) > lateEvents) {
			next[k] = v
		}
	}
	if a != nil {
		next[key] = a
	}
	g.arenas.Store(&next)
}

func (g *Fanotify) mark(a *guarded) error {
	if g.keeper != nil {
		if err := g.keeper.Put(g.ctx, KeptArena+a.name, a.file); err != nil {
			return fmt.Errorf("give it to the keeper: %w", err)
		}
	}
	err := kernel.MarkPreAccess(g.group, a.file)
	if err != nil && g.keeper != nil {
		err = errors.Join(err, g.keeper.Drop(g.ctx, KeptArena+a.name))
	}
	return err
}

// Release implements Gate. Every later read is let through by the kernel
// unasked, so an arena with absent blocks must not be mounted any more. Should
// one be released, then reads of it that wait go on if their range is present,
// and fail with EIO if it is not.
func (g *Fanotify) Release(name string) error {
	g.mu.Lock()
	a := g.names[name]
	g.mu.Unlock()
	if a == nil {
		return fmt.Errorf("release arena %s: not behind the gate", name)
	}
	st, err := a.file.Stat()
	if err != nil {
		return fmt.Errorf("release arena %s: %w", name, err)
	}
	if err := kernel.UnmarkPreAccess(g.group, a.file); err != nil {
		return fmt.Errorf("release arena %s: %w", name, err)
	}
	a.complete.Store(a.backing.Present(0, st.Size()))
	g.mu.Lock()
	if g.names[name] != a {
		g.mu.Unlock()
		return fmt.Errorf("release arena %s: released twice at once", name)
	}
	delete(g.names, name)
	a.since = time.Now()
	a.released.Store(true)
	// It stays findable: events raised before may still be in the queue.
	g.setLocked(a.inode, a)
	g.mu.Unlock()
	a.cancel()
	if g.keeper != nil {
		if err := g.keeper.Drop(g.ctx, KeptArena+name); err != nil {
			return fmt.Errorf("release arena %s: take it from the keeper: %w", name, err)
		}
	}
	return nil
}

// Start begins to answer. After Takeover, every arena must be back behind the
// gate by now: noted events of other arenas are denied with EIO.
func (g *Fanotify) Start() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed || g.started {
		return errors.New("start gate: it is closed or was started before")
	}
	g.started = true
	for _, sn := range g.stale {
		for _, s := range sn.waiting {
			g.log.Warn("read failed with EIO: it waits for an arena that is not here any more",
				"dev", s.Inode.Dev, "inode", s.Inode.Ino, "offset", s.Off, "count", s.N)
			g.denied.Add(1)
			g.decideStaleLocked(sn, false)
		}
		sn.waiting = nil
	}
	g.wg.Go(g.read)
	return nil
}

// Stats returns what the gate did so far.
func (g *Fanotify) Stats() Stats {
	g.mu.Lock()
	defer g.mu.Unlock()
	return Stats{Events: g.events.Load(), Waits: g.waits.Load(), Denied: g.denied.Load(), Pending: g.pending}
}

// Close implements Gate: it answers nothing any more and waits for its
// goroutines. Events without an answer stay in the journal for the next daemon. The keeper keeps what it
// holds.
func (g *Fanotify) Close() error {
	g.mu.Lock()
	if g.closed {
		g.mu.Unlock()
		return nil
	}
	g.closed = true
	g.mu.Unlock()
	g.cancel()
	// Wakes the reader but leaves the group, which waits still use.
	_, werr := unix.Write(g.closing, []byte{7: 1})
	g.wg.Wait()
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, sn := range g.stale {
		if sn.owned {
			unix.Close(int(sn.number))
		}
	}
	return errors.Join(werr, unix.Close(g.closing), g.group.Close(), g.journal.Close())
}

// Kind implements Gate.
func (g *Fanotify) Kind() string { return "fanotify" }

// Device implements Gate: the arena itself.
func (g *Fanotify) Device(_, arena string) string { return arena }

// Idle implements Gate.
func (g *Fanotify) Idle() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.names) == 0
}

// End implements Gate.
func (g *Fanotify) End(ctx context.Context) error {
	err := g.Close()
	if g.keeper != nil {
		err = errors.Join(err, g.keeper.Drop(ctx, KeptGroup), g.keeper.Drop(ctx, KeptJournal))
	}
	return err
}
