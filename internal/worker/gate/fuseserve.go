package gate

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/kernel"
)

// work is one worker: whoever is first at the descriptor reads a request, and
// answers it while another reads the next.
func (g *FUSE) work(rc syscall.RawConn) {
	var buf [kernel.FuseRequestLen]byte
	for {
		var (
			n    int
			rerr error
		)
		err := rc.Read(func(fd uintptr) bool {
			n, rerr = unix.Read(int(fd), buf[:])
			return !errors.Is(rerr, unix.EAGAIN)
		})
		if g.ctx.Err() != nil && (err != nil || rerr != nil) {
			return
		}
		switch {
		case errors.Is(rerr, unix.EINTR), errors.Is(rerr, unix.ENOENT):
			continue // ENOENT: its reader was killed meanwhile
		case err != nil, errors.Is(rerr, unix.ENODEV):
			g.die(errors.Join(err, rerr))
			return
		case rerr != nil:
			g.log.Error("gate cannot read a FUSE request", "err", rerr)
			select {
			case <-g.ctx.Done():
				return
			case <-time.After(100 * time.Millisecond):
			}
			continue
		}
		g.at("read")
		r, err := kernel.ParseFuseRequest(buf[:n])
		if err != nil {
			g.log.Error("gate cannot understand the kernel", "err", err)
			if r.Unique != 0 {
				g.answer(kernel.FuseError(nil, r.Unique, unix.EIO))
			}
			continue
		}
		g.handle(r)
		g.at("handled")
	}
}

func (g *FUSE) at(point string) {
	if g.stop != nil {
		g.stop(point)
	}
}

// die notes that the connection has ended: somebody unmounted the filesystem,
// or aborted it.
func (g *FUSE) die(err error) {
	g.mu.Lock()
	said := g.dead
	g.dead = true
	g.mu.Unlock()
	if !said {
		g.log.Error("the gate's FUSE filesystem has ended: reads through it fail; start the daemon again", "dir", g.dir, "err", err)
	}
}

// handle answers one request, or sees to it that it is answered.
func (g *FUSE) handle(r kernel.FuseRequest) {
	switch r.Op {
	case kernel.FuseInit:
		g.answer(kernel.FuseInitAnswer(nil, r))
	case kernel.FuseLookup:
		node, err := strconv.ParseUint(r.Name, 10, 64)
		if err != nil || r.Node != kernel.FuseRoot || strconv.FormatUint(node, 10) != r.Name {
			g.answer(kernel.FuseError(nil, r.Unique, unix.ENOENT))
		} else if n := g.find(node, r, unix.ENOENT); n != nil {
			g.answer(kernel.FuseEntryAnswer(nil, r.Unique, n.attributes()))
		}
	case kernel.FuseGetattr:
		if r.Node == kernel.FuseRoot {
			g.answer(kernel.FuseAttrAnswer(nil, r.Unique, kernel.FuseFile{Node: r.Node, Dir: true}))
		} else if n := g.find(r.Node, r, unix.ENOENT); n != nil {
			g.answer(kernel.FuseAttrAnswer(nil, r.Unique, n.attributes()))
		}
	case kernel.FuseOpen:
		if r.Flags&unix.O_ACCMODE != unix.O_RDONLY {
			g.answer(kernel.FuseError(nil, r.Unique, unix.EROFS))
		} else if n := g.find(r.Node, r, unix.ENOENT); n != nil {
			g.answer(kernel.FuseOpenAnswer(nil, r.Unique))
		}
	case kernel.FuseRead:
		g.events.Add(1)
		if n := g.find(r.Node, r, unix.EIO); n != nil {
			g.read(n, r)
		}
	case kernel.FuseOpendir:
		g.answer(kernel.FuseOpenAnswer(nil, r.Unique))
	case kernel.FuseReaddir, kernel.FuseReleasedir, kernel.FuseDestroy:
		g.answer(kernel.FuseError(nil, r.Unique, 0)) // nothing to list
	case kernel.FuseStatfs:
		g.answer(kernel.FuseStatfsAnswer(nil, r.Unique))
	case kernel.FuseRelease:
		g.answer(kernel.FuseError(nil, r.Unique, 0))
		g.maybeSweep(r.Node)
	case kernel.FuseForget, kernel.FuseBatchForget:
		for _, node := range r.Forget {
			g.maybeSweep(node)
		}
	case kernel.FuseInterrupt:
		g.interrupt(r)
	default:
		g.answer(kernel.FuseError(nil, r.Unique, unix.ENOSYS))
	}
}

func (n *fuseNode) attributes() kernel.FuseFile {
	return kernel.FuseFile{Node: n.node, Size: n.size}
}

// find returns the node that a request is about. It returns nil when there is
// none, and sees to the answer: before Start it may yet come, and the request
// waits for it; else it fails with errno.
func (g *FUSE) find(node uint64, r kernel.FuseRequest, errno unix.Errno) *fuseNode {
	if n := (*g.nodes.Load())[node]; n != nil {
		return n
	}
	g.mu.Lock()
	if n := (*g.nodes.Load())[node]; n != nil || !g.started {
		if n == nil {
			g.parked = append(g.parked, r)
		}
		g.mu.Unlock()
		return n
	}
	g.mu.Unlock()
	if r.Op == kernel.FuseRead {
		g.denied.Add(1)
		g.log.Warn("read failed with EIO: no arena of this gate", "node", node, "offset", r.Offset, "count", r.Size, "pid", r.PID)
	}
	g.answer(kernel.FuseError(nil, r.Unique, errno))
	return nil
}

// replay handles what has waited for a node.
func (g *FUSE) replay(n *fuseNode) {
	var mine []kernel.FuseRequest
	g.mu.Lock()
	rest := g.parked[:0]
	for _, r := range g.parked {
		if r.Node == n.node || r.Op == kernel.FuseLookup && r.Name == strconv.FormatUint(n.node, 10) {
			mine = append(mine, r)
		} else {
			rest = append(rest, r)
		}
	}
	g.parked = rest
	g.mu.Unlock()
	for _, r := range mine {
		g.handle(r)
	}
}

// read answers a read, now or, by way of a goroutine, when its range is here.
func (g *FUSE) read(n *fuseNode, r kernel.FuseRequest) {
	off, count := int64(r.Offset), int64(r.Size)
	if off >= n.size {
		count = 0
	}
	count = min(count, n.size-off)
	if count <= 0 || n.meets(off, count) {
		g.answerRead(n, r, count)
		return
	}
	ctx, cancel := context.WithCancel(n.ctx)
	w := &fuseWait{FuseRequest: r, reader: newReader(int32(r.PID), true), node: n, cancel: cancel}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		cancel() // the next daemon answers
		return
	}
	if err := g.slots.take(&n.waiting); err != nil {
		cancel()
		g.refuse(n, r, err)
		return
	}
	g.pending[r.Unique] = w
	if !g.watching {
		g.watching = true
		g.wg.Go(g.watch)
	}
	g.waits.Add(1)
	g.wg.Go(func() {
		defer cancel()
		err := n.backing.Need(ctx, off, count)
		if !g.take(w) {
			return // its reader was killed
		}
		// Need's word is not enough after an error or a Release: the presence
		// map decides.
		if n.present(off, count) {
			g.answerRead(n, r, count)
			return
		}
		if g.ctx.Err() != nil && err != nil {
			return // the next daemon answers
		}
		if err == nil {
			err = errors.New("the range did not become present")
		}
		g.refuse(n, r, err)
	})
}

// refuse fails a read, and says why.
func (g *FUSE) refuse(n *fuseNode, r kernel.FuseRequest, err error) {
	n.denials.log(g.log, n.name, int64(r.Offset), int64(r.Size), int32(r.PID), err)
	g.denied.Add(1)
	g.answer(kernel.FuseError(nil, r.Unique, unix.EIO))
}

// take makes the caller the one who answers a read that waited, if nobody has.
func (g *FUSE) take(w *fuseWait) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.pending[w.Unique] != w {
		return false
	}
	delete(g.pending, w.Unique)
	g.slots.free(&w.node.waiting)
	return true
}

// answerRead answers with bytes of the arena, count of them at the request's
// offset, all of them within it and present.
func (g *FUSE) answerRead(n *fuseNode, r kernel.FuseRequest, count int64) {
	buf := g.buffers.Get().(*[]byte)
	defer g.buffers.Put(buf)
	b := kernel.FuseReadAnswer((*buf)[:0], r.Unique, int(max(count, 0)))
	if count > 0 {
		b = b[:kernel.FuseReadHeader+int(count)]
		if err := n.readAt(b[kernel.FuseReadHeader:], int64(r.Offset)); err != nil {
			g.log.Error("read failed with EIO: the arena cannot be read", "arena", n.name, "offset", r.Offset, "count", count, "err", err)
			g.denied.Add(1)
			b = kernel.FuseError((*buf)[:0], r.Unique, unix.EIO)
		}
	}
	g.answer(b)
	g.at("answered")
}

func (n *fuseNode) readAt(b []byte, off int64) error {
	n.use.RLock()
	defer n.use.RUnlock()
	if n.fd < 0 {
		return os.ErrClosed
	}
	for len(b) > 0 {
		got, err := unix.Pread(n.fd, b, off)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return err
		case got == 0:
			return fmt.Errorf("it ends at %d", off)
		}
		b, off = b[got:], off+int64(got)
	}
	return nil
}

// answer tells the kernel. ENOENT: the request has ended without us.
func (g *FUSE) answer(b []byte) {
	for {
		_, err := unix.Write(g.devFD, b)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil && !errors.Is(err, unix.ENOENT) {
			g.log.Error("gate cannot answer", "err", err)
		}
		return
	}
}

// interrupt notes that a reader has a signal. The kernel says so once for each
// request, whatever signals come, unless it is asked to say it again.
func (g *FUSE) interrupt(r kernel.FuseRequest) {
	g.mu.Lock()
	w := g.pending[r.Interrupt]
	if w != nil {
		w.interrupted = true
		select {
		case g.signalled <- struct{}{}:
		default:
		}
	}
	g.mu.Unlock()
	if w == nil {
		// Answered already, or in another worker's hands, or parked.
		time.Sleep(time.Millisecond)
		g.answer(kernel.FuseError(nil, r.Unique, unix.EAGAIN))
	}
}

// watch fails the reads of killed readers, for as long as any wait.
func (g *FUSE) watch() {
	var turns rounds[*fuseWait]
	soon := time.NewTimer(interruptPoll)
	soon.Stop()
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	for {
		var look []*fuseWait
		select {
		case <-g.ctx.Done():
			return
		case <-g.signalled:
		case <-soon.C:
		case <-tick.C:
			g.mu.Lock()
			look = turns.next(func() []*fuseWait { return slices.Collect(maps.Values(g.pending)) })
			g.mu.Unlock()
		}
		var signalled []*fuseWait
		g.mu.Lock()
		if g.watching = len(g.pending) > 0; !g.watching {
			g.mu.Unlock()
			return
		}
		for _, w := range g.pending {
			if w.interrupted {
				signalled = append(signalled, w)
			}
		}
		g.mu.Unlock()
		for _, w := range look {
			if w.gone() {
				g.fail(w)
			}
		}
		for _, w := range signalled {
			if w.PID != 0 && kernel.Killed(fmt.Sprintf("/proc/%d", w.PID)) {
				g.fail(w)
			}
		}
		if len(signalled) > 0 {
			soon.Reset(interruptPoll)
		}
	}
}

// fail ends the wait of a reader that was killed.
func (g *FUSE) fail(w *fuseWait) {
	if g.take(w) {
		w.cancel()
		g.answer(kernel.FuseError(nil, w.Unique, unix.EINTR))
	}
}

// maybeSweep is called when the kernel lets go of a node.
func (g *FUSE) maybeSweep(node uint64) {
	if n := (*g.nodes.Load())[node]; n != nil && n.released.Load() {
		g.sweep()
	}
}

// sweep wakes the sweeper.
func (g *FUSE) sweep() {
	select {
	case g.sweepNow <- struct{}{}:
	default:
	}
}

// sweeper forgets released nodes that the kernel does not have any more.
func (g *FUSE) sweeper() {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		select {
		case <-g.ctx.Done():
			return
		case <-g.sweepNow:
		case <-timer.C:
		}
		next := time.Hour
		for _, n := range *g.nodes.Load() {
			if !n.released.Load() {
				continue
			}
			g.mu.Lock()
			left := g.grace - time.Since(n.since)
			g.mu.Unlock()
			if left > 0 {
				next = min(next, left)
				continue
			}
			g.forget(n)
		}
		timer.Reset(next)
	}
}

// forget forgets n, if the kernel has.
func (g *FUSE) forget(n *fuseNode) {
	if g.known(n) {
		return
	}
	g.mu.Lock()
	if (*g.nodes.Load())[n.node] != n {
		g.mu.Unlock()
		return // guarded again
	}
	g.setLocked(n.node, nil)
	g.mu.Unlock()
	g.letGo(n)
}
