package gate

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"runtime"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/kernel"
	"hydrofoil.dev/foil/internal/worker/gate/journal"
)

// pendingEvent is an event that has a slot in the journal and no answer.
type pendingEvent struct {
	journal.Record
	slot  int
	pid   int32        // of the reader; 0: not known
	stale *staleNumber // not nil: its number is shared with a stale event
}

// fanWait is an event whose range is absent.
type fanWait struct {
	pendingEvent
	reader
	arena  *guarded
	cancel context.CancelFunc
	killed bool // guarded by the gate's mu
}

// read is the reader goroutine. Its thread is its own, and waits in the kernel: what reads pages that
// are here waits for this thread alone, and not for the Go scheduler to find it another one.
func (g *Fanotify) read() {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var (
		buf    [batch * kernel.PreAccessEventLen]byte
		events []kernel.FanotifyEvent
		taken  []pendingEvent
	)
	for {
		if err := g.waitForEvent(); err != nil {
			g.log.Error("gate stops: its group cannot be waited for", "err", err)
			return
		}
		// While new events can get numbers of old ones, none must be answered
		// between a read and the note of what it brought.
		locked := g.nShared.Load() > 0
		if locked {
			g.mu.Lock()
		}
		got, err := unix.Read(g.groupFD, buf[:])
		if locked && (err != nil || got <= 0) {
			g.mu.Unlock()
			locked = false
		}
		if g.ctx.Err() != nil && got <= 0 {
			return
		}
		if err != nil || got <= 0 {
			// One whose reader was killed is taken back.
			if errors.Is(err, unix.EINTR) || errors.Is(err, unix.EAGAIN) {
				continue
			}
			// Without a free descriptor the kernel fails the read it could not
			// tell us of (EPERM). Go slowly, and the others wait instead.
			g.log.Error("gate cannot read an event; the read behind it failed", "err", err)
			select {
			case <-g.ctx.Done():
				return
			case <-time.After(100 * time.Millisecond):
			}
			continue
		}
		g.at("read")
		events, err = kernel.ParseFanotifyEvents(events[:0], buf[:got])
		if err != nil {
			g.log.Error("gate cannot understand the kernel; reads may hang until the daemon is restarted", "err", err)
		}
		if !locked {
			g.mu.Lock()
		}
		taken = g.noteLocked(taken[:0], events)
		g.mu.Unlock()
		g.at("noted")
		for _, p := range taken {
			g.handle(p)
		}
		g.at("handled")
	}
}

// waitForEvent returns when there is something to read, or the gate closes.
func (g *Fanotify) waitForEvent() error {
	fds := [...]unix.PollFd{{Fd: int32(g.groupFD), Events: unix.POLLIN}, {Fd: int32(g.closing), Events: unix.POLLIN}}
	if _, err := unix.Poll(fds[:], -1); err != nil && !errors.Is(err, unix.EINTR) {
		return fmt.Errorf("poll: %w", err)
	}
	return nil
}

func (g *Fanotify) at(point string) {
	if g.stop != nil {
		g.stop(point)
	}
}

// noteLocked writes events into the journal, and denies what cannot be noted.
func (g *Fanotify) noteLocked(dst []pendingEvent, events []kernel.FanotifyEvent) []pendingEvent {
	g.events.Add(int64(len(events)))
	for _, e := range events {
		if e.Number < 0 {
			g.log.Error("gate got an event without a descriptor", "number", e.Number, "mask", e.Mask)
			continue
		}
		var st unix.Stat_t
		err := unix.Fstat(int(e.Number), &st)
		if err != nil {
			g.drop(e.Number, fmt.Errorf("stat the event's descriptor: %w", err))
			continue
		}
		p := pendingEvent{
			Record: journal.Record{Inode: journal.Inode{Dev: uint64(st.Dev), Ino: st.Ino}, Number: e.Number},
			pid:    e.PID,
		}
		p.Off, p.N = eventRange(e, st.Size)
		if len(g.freeSlots) == 0 {
			g.drop(e.Number, errors.New("the journal is full"))
			continue
		}
		p.slot = g.freeSlots[len(g.freeSlots)-1]
		g.freeSlots = g.freeSlots[:len(g.freeSlots)-1]
		g.pending++
		if sn := g.stale[e.Number]; sn != nil {
			sn.open++
			sn.answers++
			sn.slots = append(sn.slots, p.slot)
			sn.owned = true
			p.stale = sn
		}
		g.journal.Take(p.slot, p.Record, p.stale != nil)
		dst = append(dst, p)
	}
	return dst
}

// eventRange is the part of an event's range that lies in the file, size
// bytes long: what is read beyond its end is nothing.
func eventRange(e kernel.FanotifyEvent, size int64) (off, n int64) {
	if !e.Ranged {
		return 0, size
	}
	if e.Offset >= uint64(size) {
		return size, 0
	}
	off = int64(e.Offset)
	return off, int64(min(e.Count, uint64(size)-e.Offset, math.MaxInt64))
}

// drop denies an event that has no slot.
func (g *Fanotify) drop(number int32, why error) {
	g.denied.Add(1)
	g.log.Error("read failed with EIO: gate cannot handle its event", "err", why)
	if err := kernel.FanotifyDeny(g.groupFD, number, unix.EIO); err != nil {
		g.log.Error("gate cannot answer", "number", number, "err", err)
	}
	unix.Close(int(number))
}

// handle answers an event, now or, by way of a goroutine, when its range is here.
func (g *Fanotify) handle(p pendingEvent) {
	a := (*g.arenas.Load())[p.Inode]
	switch {
	case a == nil:
		g.log.Warn("read failed with EIO: no arena of this gate",
			"dev", p.Inode.Dev, "inode", p.Inode.Ino, "offset", p.Off, "count", p.N, "pid", p.pid)
		g.denied.Add(1)
		g.decide(p, false)
	case a.meets(p.Off, p.N):
		g.decide(p, true)
	default:
		g.mu.Lock()
		err := g.slots.take(&a.waiting)
		if err == nil {
			g.waitLocked(a, p)
		}
		g.mu.Unlock()
		if err != nil {
			g.refuse(a, p, err)
		}
	}
}

// waitLocked starts the goroutine that answers p when its range is here, or its reader is no more. After
// Close there is none, and p stays in the journal.
func (g *Fanotify) waitLocked(a *guarded, p pendingEvent) {
	if g.closed {
		if p.stale == nil {
			unix.Close(int(p.Number))
		}
		return
	}
	w := &fanWait{pendingEvent: p, arena: a, reader: newReader(p.pid, g.threads)}
	ctx, cancel := context.WithCancel(a.ctx)
	w.cancel = cancel
	g.waiting[w] = struct{}{}
	if !g.watching {
		g.watching = true
		g.wg.Go(g.watch)
	}
	g.waits.Add(1)
	g.wg.Go(func() {
		defer cancel()
		g.await(ctx, w)
	})
}

// await waits, and answers unless the next daemon has to. The reader's slot is free before the
// reader goes on.
func (g *Fanotify) await(ctx context.Context, w *fanWait) {
	a := w.arena
	err := a.backing.Need(ctx, w.Off, w.N)
	g.mu.Lock()
	delete(g.waiting, w)
	g.slots.free(&a.waiting)
	killed := w.killed
	g.mu.Unlock()
	switch {
	// Need's word is not enough after an error or a Release: the presence map decides.
	case a.present(w.Off, w.N):
		g.decide(w.pendingEvent, true)
		return
	case killed:
		g.decide(w.pendingEvent, false)
		return
	case g.ctx.Err() != nil && err != nil:
		if w.stale == nil {
			unix.Close(int(w.Number)) // the next daemon answers
		}
		return
	case err == nil:
		err = errors.New("the range did not become present")
	}
	g.refuse(a, w.pendingEvent, err)
}

// watch ends waits of readers that are no more, as long as there are waits. The kernel does not tell of
// them: it lets a killed reader go, and keeps its event until that is answered.
func (g *Fanotify) watch() {
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	var turns rounds[*fanWait]
	for {
		select {
		case <-g.ctx.Done():
			return
		case <-tick.C:
		}
		g.mu.Lock()
		if g.watching = len(g.waiting) > 0; !g.watching {
			g.mu.Unlock()
			return
		}
		look := turns.next(func() []*fanWait { return slices.Collect(maps.Keys(g.waiting)) })
		g.mu.Unlock()
		for _, w := range look {
			if !w.gone() {
				continue
			}
			g.mu.Lock()
			w.killed = true
			g.mu.Unlock()
			w.cancel()
		}
	}
}

// refuse fails a read, and says why.
func (g *Fanotify) refuse(a *guarded, p pendingEvent, err error) {
	a.denials.log(g.log, a.name, p.Off, p.N, p.pid, err)
	g.denied.Add(1)
	g.decide(p, false)
}

// decide answers an event and forgets it, in the order that Fanotify's comment gives.
func (g *Fanotify) decide(p pendingEvent, allow bool) {
	if p.stale != nil {
		g.mu.Lock()
		g.decideStaleLocked(p.stale, allow)
		g.mu.Unlock()
		return
	}
	g.answer(p.Number, allow, false)
	g.at("answered")
	g.journal.Free(p.slot)
	unix.Close(int(p.Number))
	g.mu.Lock()
	g.releaseSlotLocked(p.slot)
	g.mu.Unlock()
}

func (g *Fanotify) releaseSlotLocked(slot int) {
	g.freeSlots = append(g.freeSlots, slot)
	g.pending--
}

// answer tells the kernel. A stale event may have its answer already: its daemon
// died before it freed the slot.
func (g *Fanotify) answer(number int32, allow, stale bool) {
	var err error
	if allow {
		err = kernel.FanotifyAllow(g.groupFD, number)
	} else {
		err = kernel.FanotifyDeny(g.groupFD, number, unix.EIO)
	}
	if err != nil && !(stale && errors.Is(err, unix.ENOENT)) {
		g.log.Error("gate cannot answer", "number", number, "err", err)
	}
}
