package rootfs

import (
	"context"
	"errors"
	"slices"
	"time"

	"hydrofoil.dev/foil/internal/worker/arena"
	"hydrofoil.dev/foil/internal/worker/gate"
	"hydrofoil.dev/foil/internal/worker/locks"
)

// Filler is a pull. At any time one fills a rootfs.
type Filler interface {
	// Claimed reports whether somebody wants the image that it brings. One that was
	// begun for an image's header only may never be claimed.
	Claimed() bool
	// Yield ends a Filler that is not claimed.
	Yield()
}

// Source brings what a Filler promised: one stream of a server.
type Source interface {
	// Need waits until [off, off+n) of an arena is present, and has it come soon.
	// When ctx ends with arena.ErrAnother the read goes on by another Source.
	Need(ctx context.Context, a *arena.Arena, off, n int64) error
}

// filling is who brings what a rootfs lacks. Guarded by Rootfs.mu.
type filling struct {
	by      Filler   // nil: nobody
	next    []Filler // those that want it, too, in turn
	source  Source   // of by; nil: it has none yet
	waiting map[*waiter]struct{}
	wakes   []*Wake // end pauses after which a pull is begun again
}

// waiter is a read that waits.
type waiter struct {
	by   Source // nil: none
	stop context.CancelCauseFunc
}

// Claim makes f the one that fills r, unless r is complete or another one does: then f is the next in turn, until
// Unclaim. It reports whether f fills it now.
func (r *Rootfs) Claim(f Filler) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch by := r.fill.by; {
	case r.rec.Complete, by == f:
	case by == nil, r.arena != nil && r.arena.Failure() != nil: // it has given up
		r.fillBy(f)
	case !slices.Contains(r.fill.next, f):
		r.fill.next = append(r.fill.next, f)
	}
	return r.fill.by == f
}

// fillBy makes f, nil: nobody, the one that fills r. Reads wait for what it brings. Called with r.mu held.
func (r *Rootfs) fillBy(f Filler) {
	r.fill.by, r.fill.source = f, nil
	r.fill.leave(f)
	if f != nil && r.arena != nil {
		r.arena.Resume()
	}
}

// leave takes f from those that are next.
func (v *filling) leave(f Filler) {
	v.next = slices.DeleteFunc(v.next, func(o Filler) bool { return o == f })
}

// turn returns who is next, or nil: one that is not claimed may never fill anything.
func (v *filling) turn() Filler {
	if i := slices.IndexFunc(v.next, Filler.Claimed); i >= 0 {
		return v.next[i]
	}
	return nil
}

// HandOver makes to the one that fills r instead of from, which is the last in turn then. It reports whether from did.
func (r *Rootfs) HandOver(from, to Filler) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.fill.by != from {
		return false
	}
	r.fillBy(to)
	r.fill.next = append(r.fill.next, from)
	return true
}

// GiveUp says that f, if it fills r, brings no more of it, and why. Reads of what r lacks fail, unless another one is
// next: that one fills it now.
func (r *Rootfs) GiveUp(f Filler, why error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.fill.by != f || r.arena == nil || r.rec.Complete {
		return
	}
	if next := r.fill.turn(); next != nil {
		r.fillBy(next)
		return
	}
	r.arena.Fail(why)
}

// Unclaim ends that f fills r, or wants to. Who is next fills it now.
func (r *Rootfs) Unclaim(f Filler) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.fill.leave(f)
	if r.fill.by != f {
		return
	}
	var next Filler
	if !r.rec.Complete {
		next = r.fill.turn()
	}
	r.fillBy(next)
}

// Filler returns who fills r, or nil.
func (r *Rootfs) Filler() Filler {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.fill.by
}

// Supply has reads that wait, and those that come, wait by a source of f, if f
// fills r.
func (r *Rootfs) Supply(f Filler, src Source) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.fill.by != f {
		return
	}
	r.fill.source = src
	for w := range r.fill.waiting {
		if w.by != src {
			w.stop(arena.ErrAnother)
		}
	}
}

// Waiting is how many reads wait for what r lacks.
func (r *Rootfs) Waiting() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.fill.waiting)
}

// Fail makes reads of what r lacks fail, unless somebody brings it, or it is known
// already why they fail.
func (r *Rootfs) Fail(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.arena != nil && r.fill.by == nil && !r.rec.Complete && r.arena.Failure() == nil {
		r.arena.Fail(err)
	}
}

// Resume makes reads of what r lacks wait again, instead of failing: a pull is
// about to be begun.
func (r *Rootfs) Resume() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.arena != nil && r.fill.by == nil {
		r.arena.Resume()
	}
}

// Wake ends a pause, after which the pull of an image that failed is begun again,
// before its time: because somebody reads what is absent.
type Wake struct {
	since time.Time
	asked time.Duration // how long the server asks not to be asked

	mu   locks.Mutex[locks.Leaf]
	c    chan struct{}
	done bool
}

// NewWake is of a pause that begins now.
func NewWake(asked time.Duration) *Wake {
	return &Wake{since: time.Now(), asked: asked, c: make(chan struct{})}
}

// C is closed when the pause is to end.
func (w *Wake) C() <-chan struct{} { return w.c }

// Fire ends the pause, and reports whether it has, unless that was done before, the
// pause has lasted for less than least, or the server asked for more.
func (w *Wake) Fire(least time.Duration) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.done || time.Since(w.since) < max(least, w.asked) {
		return false
	}
	w.done = true
	close(w.c)
	return true
}

// End makes Fire do nothing any more: the pause is over.
func (w *Wake) End() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.done = true
}

// WakeBy has reads of what r lacks fire w.
func (r *Rootfs) WakeBy(w *Wake) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.fill.wakes = append(r.fill.wakes, w)
}

// wake is called by a read of what nobody brings. If such reads fail, because the
// pull has, it has the pull begun again, and this read wait for it; but not so soon
// that a server that is away would be asked for every read. Called with r.mu held.
func (r *Rootfs) wake(a *arena.Arena) {
	if a.Failure() == nil {
		return
	}
	wakes := r.fill.wakes
	r.fill.wakes = nil
	for _, w := range wakes {
		if w.Fire(r.opts.WakeAfter) {
			a.Resume()
			continue
		}
		w.mu.Lock()
		done := w.done
		w.mu.Unlock()
		if !done {
			r.fill.wakes = append(r.fill.wakes, w)
		}
	}
}

// Backing returns what answers the gate for its arena a: from the presence map, and
// through who fills it now. o, unless nil, is told of reads.
func (r *Rootfs) Backing(a *arena.Arena, o Observer) gate.Backing {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.arena, r.observer = a, o
	return &backing{r: r, arena: a, o: o}
}

// backing takes Rootfs.mu and no other lock.
type backing struct {
	r     *Rootfs
	arena *arena.Arena
	o     Observer
}

// Present implements gate.Backing.
func (b *backing) Present(off, n int64) bool { return b.arena.Present(off, n) || b.r.lendsOnly() }

// Met implements gate.Backing.
func (b *backing) Met(off, n int64, present bool) {
	if needed := b.arena.Touch(off, n); needed && b.o != nil {
		b.o.Read(off, n, !present)
	}
}

// Need implements gate.Backing.
func (b *backing) Need(ctx context.Context, off, n int64) error {
	begin := time.Now()
	defer func() { b.r.opts.Waited(time.Since(begin)) }()
	return b.await(ctx, off, n)
}

// Await waits until [off, off+n) of the rootfs's own arena is here, and has it come soon, as a
// read does that meets the gate.
func (r *Rootfs) Await(ctx context.Context, off, n int64) error {
	a := r.Arena()
	if a == nil {
		return nil // all of it is here
	}
	return (&backing{r: r, arena: a}).await(ctx, off, n)
}

// await waits for what a read needs, by one source after the other.
func (b *backing) await(ctx context.Context, off, n int64) error {
	for {
		if again, err := b.need(ctx, off, n); !again {
			return err
		}
	}
}

// need waits by the source that there is now, or by none. again says that there is
// another one.
func (b *backing) need(ctx context.Context, off, n int64) (again bool, err error) {
	r := b.r
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	w := &waiter{stop: stop}
	r.mu.Lock()
	if r.fill.by == nil {
		r.wake(b.arena)
	}
	w.by = r.fill.source
	if r.fill.waiting == nil {
		r.fill.waiting = make(map[*waiter]struct{})
	}
	r.fill.waiting[w] = struct{}{}
	r.mu.Unlock()
	defer func() {
		r.mu.Lock()
		delete(r.fill.waiting, w)
		r.mu.Unlock()
	}()
	if w.by != nil {
		err = w.by.Need(ctx, b.arena, off, n)
	} else {
		err = b.arena.Wait(ctx, off, n)
	}
	return err != nil && errors.Is(context.Cause(ctx), arena.ErrAnother), err
}
