package gate

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/kernel"
	"hydrofoil.dev/foil/internal/worker/gate/journal"
)

// staleNumber is a number under which events of an earlier daemon wait,
// guarded by the gate's mu.
type staleNumber struct {
	number  int32
	open    int  // events whose range is not decided
	answers int  // events that wait for an answer under this number
	deny    bool // one of them must fail; so all do
	slots   []int
	owned   bool           // the number is a descriptor of the gate, to be closed
	shared  bool           // it could not be occupied: new events can have it too
	waiting []journal.Slot // not resumed yet
}

// Takeover goes on with the gate that an earlier daemon left with the keeper;
// what it does, and why, is described at Fanotify. It returns ErrNoGate when
// o.Held has none. Afterwards: Guard for every incomplete arena, with the file that
// o.Held has under KeptArena+name, then Start.
func Takeover(ctx context.Context, o Options) (*Fanotify, error) {
	group := o.Held[KeptGroup]
	if group == nil {
		return nil, ErrNoGate
	}
	if err := checkGroup(group); err != nil {
		return nil, err
	}
	limit, err := numberLimit()
	if err != nil {
		return nil, err
	}
	log := o.Logger
	if log == nil {
		log = slog.Default()
	}
	var (
		j     *journal.Journal
		old   uint64 = maxNumber
		taken []journal.Slot
	)
	if f := o.Held[KeptJournal]; f == nil {
		err = errors.New("the keeper has none")
	} else {
		j, old, taken, err = journal.Open(f, minSlots)
	}
	if err != nil {
		// All that is lost is which ranges the unanswered reads want: they
		// fail with EIO, and everything after them goes on.
		log.Warn("gate journal is lost: reads that wait now fail with EIO", "err", err)
		old, taken = maxNumber, nil
		if j, err = journal.New(max(limit, old)); err != nil {
			return nil, err
		}
	}
	limit = max(limit, old)
	j.SetLimit(limit)
	g, err := newFanotify(group, j, limit, o)
	if err != nil {
		return nil, err
	}
	if err := g.inherit(limit, taken); err != nil {
		return nil, errors.Join(err, g.Close())
	}
	if err := g.keep(ctx); err != nil {
		return nil, errors.Join(err, g.Close())
	}
	return g, nil
}

// checkGroup tells a fanotify group from another file under its name.
func checkGroup(f *os.File) error {
	rc, err := f.SyscallConn()
	if err != nil {
		return fmt.Errorf("take over gate: %w", err)
	}
	var target string
	cerr := rc.Control(func(fd uintptr) {
		target, err = os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd))
	})
	if err = errors.Join(cerr, err); err != nil {
		return fmt.Errorf("take over gate: %w", err)
	}
	if target != "anon_inode:[fanotify]" {
		return fmt.Errorf("take over gate: the keeper's %s is %s, not a fanotify group", KeptGroup, target)
	}
	return nil
}

// inherit does steps 2 and 3 of a takeover.
func (g *Fanotify) inherit(limit uint64, taken []journal.Slot) error {
	noted := make(map[int32]bool, len(taken))
	for _, s := range taken {
		noted[s.Number] = true
	}
	for _, s := range taken {
		if s.Shared {
			noted[s.Number] = false
		}
	}
	denied := 0
	for n := range int32(limit) {
		if noted[n] {
			continue
		}
		// Again, in case it is shared.
		for {
			err := kernel.FanotifyDeny(g.groupFD, n, unix.EIO)
			if errors.Is(err, unix.ENOENT) {
				break
			}
			if err != nil {
				return fmt.Errorf("take over gate: deny event %d: %w", n, err)
			}
			denied++
		}
	}
	if denied > 0 {
		g.denied.Add(int64(denied))
		g.log.Warn("reads failed with EIO: the last daemon died before it noted them", "reads", denied)
	}
	for _, s := range taken {
		if !noted[s.Number] {
			g.journal.Free(s.Index)
		}
	}
	taken = slices.DeleteFunc(taken, func(s journal.Slot) bool { return !noted[s.Number] })

	null, err := unix.Open(os.DevNull, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("take over gate: open %s: %w", os.DevNull, err)
	}
	slotTaken := make(map[int]bool, len(taken))
	for _, s := range taken {
		slotTaken[s.Index] = true
		sn := g.stale[s.Number]
		if sn == nil {
			sn = &staleNumber{number: s.Number}
			g.stale[s.Number] = sn
			if sn.owned, err = occupy(null, s.Number); err != nil {
				return fmt.Errorf("take over gate: occupy number %d: %w", s.Number, err)
			}
			if sn.shared = !sn.owned; sn.shared {
				g.nShared.Add(1)
			}
		}
		if sn.shared {
			g.journal.Share(s.Index)
		}
		sn.open++
		sn.answers++
		sn.slots = append(sn.slots, s.Index)
		sn.waiting = append(sn.waiting, s)
	}
	if g.stale[int32(null)] == nil {
		unix.Close(null)
	}
	free := g.freeSlots[:0]
	for _, i := range g.freeSlots {
		if !slotTaken[i] {
			g.journal.Free(i) // it may hold what package journal would not believe
			free = append(free, i)
		}
	}
	g.freeSlots = free
	g.pending = len(taken)
	if len(taken) > 0 {
		g.log.Info("took over waiting reads", "reads", len(taken))
	}
	return nil
}

// occupy makes number a duplicate of null, or null itself, and reports false when it is something else
// already or beyond what this process may open.
func occupy(null int, number int32) (bool, error) {
	if int(number) == null {
		return true, nil
	}
	// Asks for the number or the next free one above it: unlike dup2 it never
	// closes what somebody else has there.
	got, err := unix.FcntlInt(uintptr(null), unix.F_DUPFD_CLOEXEC, int(number))
	switch {
	case err == nil && got == int(number):
		return true, nil
	case err == nil:
		unix.Close(got)
		return false, nil
	case errors.Is(err, unix.EINVAL), errors.Is(err, unix.EMFILE):
		return false, nil
	}
	return false, err
}

// resume lets the events that an earlier daemon noted for a wait on.
func (g *Fanotify) resume(a *guarded) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, sn := range g.stale {
		keep := sn.waiting[:0]
		for _, s := range sn.waiting {
			if s.Inode != a.inode {
				keep = append(keep, s)
				continue
			}
			// They had slots in the daemon before, which let no arena have too many.
			g.slots.taken++
			a.waiting++
			g.waitLocked(a, pendingEvent{Record: s.Record, slot: s.Index, stale: sn})
		}
		sn.waiting = keep
	}
}

// decideStaleLocked decides one event of a stale number, and answers when all are
// decided. The lock makes sure that no new event joins a number that is
// being answered.
func (g *Fanotify) decideStaleLocked(sn *staleNumber, allow bool) {
	sn.open--
	sn.deny = sn.deny || !allow
	if sn.open > 0 {
		return
	}
	for range sn.answers {
		g.answer(sn.number, !sn.deny, true)
	}
	delete(g.stale, sn.number)
	if sn.shared {
		g.nShared.Add(-1)
	}
	for _, slot := range sn.slots {
		g.journal.Free(slot)
		g.releaseSlotLocked(slot)
	}
	if sn.owned {
		unix.Close(int(sn.number))
	}
}
