// Package share has contents that several running pulls of one worker want, of one server, come once.
//
// A pull that begins while others run has its server wait before it sends what is planned
// (fetch.Options.Elsewhere). It looks at the pulls that began earlier, and has the server skip what lies in their
// arenas, or will. It copies that when it is there, and compares it with its own TOC. A read that needs some of it
// has it come soon in the other pull; so has a service that is about to start what its own plan begins with. While
// a service starts on an image of an earlier one, the rest waits: the start has the line.
//
// Only earlier pulls count, so that none waits for itself. One that fails, is stopped, brings nothing for a while,
// or has wrong bytes, is dropped: the server is asked for what it was to bring, and nothing is expected of it any
// more.
package share

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"time"

	"hydrofoil.dev/foil/internal/worker/arena"
	"hydrofoil.dev/foil/internal/worker/fetch"
	"hydrofoil.dev/foil/internal/worker/locks"
	"hydrofoil.dev/foil/internal/worker/store"
)

const (
	// placedWithin is how long a pull waits for earlier ones to lay out their arenas.
	placedWithin = time.Second
	// yieldWithin is how long a pull waits at most for services that start on images of earlier ones. With
	// placedWithin it is less than bundle.MaxChoice.
	yieldWithin = 8 * time.Second
	// lookEvery is how often a pull looks at what others have brought.
	lookEvery = 100 * time.Millisecond
	// frontBytes is how much of its plan, bytes of contents, a pull has come early in the others for a service that
	// is about to start: about what the server ranks because programs are linked with it.
	frontBytes = 8 << 20
)

// Pull is a pull of this worker.
type Pull interface {
	store.Filler
	// Ref is what it pulls.
	Ref() string
	// Placed is closed when Rootfs is known, or never will be.
	Placed() <-chan struct{}
	// Rootfs returns what it fills, or nil.
	Rootfs() *store.Rootfs
	// Server returns who is asked.
	Server() string
	// Stream returns what comes from there, or nil; Held reports whether it brings nothing because a service starts.
	Stream() *fetch.Pull
	Held() bool
	// Ended reports whether nothing more comes by it, HasFailed whether it has failed, or is about to say so.
	Ended() bool
	HasFailed() bool
	// Begun is when it began. For as long as Hold from then on a service starts on its image and has the
	// line; 0: none is about to.
	Begun() time.Time
	Hold() time.Duration
}

// Options are what Contents need.
type Options struct {
	Own     Pull
	Earlier func() []Pull // those of the same registry that run, and began before Own, the first one first
	Store   *store.Store
	Stalled time.Duration     // how long another pull may bring nothing
	Copied  func(bytes int64) // called with what was had of others
	Logger  *slog.Logger
}

// Contents are those of a pull that others bring.
type Contents struct {
	Options
	ctx  context.Context
	stop context.CancelFunc // ends ctx
	work sync.WaitGroup     // look, and reads that wait for others

	mu      locks.Mutex[locks.Leaf]
	over    bool          // nothing is begun any more
	looking bool          // look runs
	others  []Pull        // that ran, and had begun earlier, when the last stream began
	list    []*share      // what is expected of them
	dropped []Pull        // of which nothing is expected any more
	fresh   bool          // one was dropped since Await returned
	looked  chan struct{} // closed, and made anew, when look has looked at all
}

// New returns the Contents of a pull that lasts as long as ctx. End them.
func New(ctx context.Context, o Options) *Contents {
	x := &Contents{Options: o, looked: make(chan struct{})}
	x.ctx, x.stop = context.WithCancel(ctx)
	return x
}

// share is what one other pull brings.
type share struct {
	*expected
	by     Pull
	leases store.Leases // keep what the other one fills

	// of look
	filled int64     // bytes, when it was looked at last
	since  time.Time // when that grew
}

func (one *share) close() {
	one.Close()
	one.leases.End()
}

// Reasons to drop another pull.
var (
	errEnded   = errors.New("it has ended without it")
	errStalled = errors.New("it brings nothing")
)

// End ends all of it.
func (x *Contents) End() {
	x.mu.Lock()
	x.over = true
	x.mu.Unlock()
	x.stop()
	x.work.Wait()
	x.mu.Lock()
	list := x.list
	x.list, x.others, x.dropped = nil, nil, nil
	x.mu.Unlock()
	for _, one := range list {
		one.close()
	}
}

// Begin returns fetch's Options.Elsewhere for a stream that begins; nil when nothing can be expected of
// other pulls.
func (x *Contents) Begin() func(ctx context.Context, absent []int) []int {
	others := x.Earlier()
	x.mu.Lock()
	defer x.mu.Unlock()
	x.others = slices.DeleteFunc(others, func(o Pull) bool { return slices.Contains(x.dropped, o) })
	if len(x.others)+len(x.list) == 0 {
		return nil
	}
	return x.expect
}

// expect returns which of the absent segments, which are in the order of the plan, others bring.
func (x *Contents) expect(ctx context.Context, planned []int) []int {
	x.mu.Lock()
	others, list := slices.Clone(x.others), slices.Clone(x.list)
	x.mu.Unlock()
	absent := slices.Sorted(slices.Values(planned))
	rest := absent
	for _, one := range list {
		rest = without(rest, one.Segments())
	}
	timer := time.NewTimer(placedWithin)
	defer timer.Stop()
	for _, o := range others {
		select {
		case <-o.Placed():
		case <-timer.C:
			timer.Reset(0) // nor for those after it
		case <-ctx.Done():
			return nil
		}
		one := x.expectOf(o, rest)
		if one == nil {
			continue
		}
		segments := one.Segments()
		if !x.add(one) {
			one.close()
			continue
		}
		x.Logger.Info("another pull brings contents of this image", "ref", x.Own.Ref(), "by", o.Ref(), "segments", len(segments))
		x.hurry(one, planned)
		rest = without(rest, segments)
	}
	x.yield(ctx, others)
	return without(absent, rest)
}

// hurry has another pull bring early what the plan begins with, if a service is about to start.
func (x *Contents) hurry(one *share, planned []int) {
	if x.Own.Hold() == 0 {
		return
	}
	front := int64(0)
	end := slices.IndexFunc(planned, func(i int) bool {
		front += one.Length(i)
		return front > frontBytes
	})
	if end < 0 {
		end = len(planned)
	}
	if f := one.by.Stream(); f != nil {
		f.Hurry(one.There(planned[:end]))
	}
}

// yield waits while a service starts on the image of another pull, unless one is about to start on this
// image, too: the start has the line for itself.
func (x *Contents) yield(ctx context.Context, others []Pull) {
	starts := func(o Pull) bool {
		return !o.Ended() && time.Since(o.Begun()) < o.Hold()
	}
	over := time.NewTimer(yieldWithin)
	defer over.Stop()
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	for x.Own.Hold() == 0 && slices.ContainsFunc(others, starts) {
		select {
		case <-tick.C:
		case <-over.C:
			return
		case <-ctx.Done():
			return
		}
	}
}

// without returns list without what is in some. Both are ascending.
func without(list, some []int) []int {
	return slices.DeleteFunc(slices.Clone(list), func(i int) bool {
		_, ok := slices.BinarySearch(some, i)
		return ok
	})
}

// expectOf returns what of the absent segments another pull brings, or nil.
func (x *Contents) expectOf(o Pull, absent []int) *share {
	own, r := x.Own.Rootfs(), o.Rootfs()
	if own == nil || r == nil || o.Server() != x.Own.Server() || !r.Complete() && (o.HasFailed() || r.Filler() != store.Filler(o)) {
		return nil
	}
	a := own.Arena()
	if a == nil || len(absent) == 0 {
		return nil
	}
	one := &share{by: o, since: time.Now()}
	src := x.Store.Lender(r, own, &one.leases)
	if src == nil {
		one.leases.End()
		return nil
	}
	if one.expected = expect(a, r, src, absent); one.expected == nil {
		_ = src.Close()
		one.leases.End()
		return nil
	}
	return one
}

// add notes what another pull brings, unless nothing is expected of that one, or of any.
func (x *Contents) add(one *share) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.over || slices.Contains(x.dropped, one.by) {
		return false
	}
	x.list = append(x.list, one)
	if !x.looking {
		x.looking = true
		x.work.Go(x.look)
	}
	return true
}

// look copies what others have brought, until nothing is expected of them.
func (x *Contents) look() {
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	for {
		x.mu.Lock()
		list := slices.Clone(x.list)
		x.looking = len(list) > 0
		close(x.looked)
		x.looked = make(chan struct{})
		x.mu.Unlock()
		if len(list) == 0 {
			return
		}
		for _, one := range list {
			x.lookAt(one)
		}
		select {
		case <-tick.C:
		case <-x.ctx.Done():
			return
		}
	}
}

// lookAt copies what one other pull has brought, and drops it if it brings no more.
func (x *Contents) lookAt(one *share) {
	ended := one.by.HasFailed() || one.by.Ended() // before what it brought is copied
	copied, err := one.Copy(x.ctx)
	x.Copied(copied)
	filled, now := one.Filled(), time.Now()
	if filled > one.filled || one.by.Held() {
		one.filled, one.since = filled, now
	}
	switch {
	case x.ctx.Err() != nil:
	case err != nil:
		x.drop(one, err)
	case len(one.Segments()) == 0:
		x.remove(one)
	case ended:
		x.drop(one, errEnded)
	case now.Sub(one.since) >= x.Stalled:
		x.drop(one, errStalled)
	}
}

// remove ends what is expected of another pull. It reports whether anything was.
func (x *Contents) remove(one *share) bool {
	x.mu.Lock()
	k := slices.Index(x.list, one)
	if k >= 0 {
		x.list = slices.Delete(x.list, k, k+1)
	}
	x.mu.Unlock()
	if k >= 0 {
		one.close()
	}
	return k >= 0
}

// drop has what was expected of another pull come from the server, and expects nothing more of that one.
func (x *Contents) drop(one *share, why error) {
	segments := one.Segments()
	x.mu.Lock()
	if slices.Contains(x.list, one) {
		x.dropped, x.fresh = append(x.dropped, one.by), true
	}
	x.mu.Unlock()
	if !x.remove(one) {
		return
	}
	x.Logger.Warn("another pull does not bring what this one expects; asking for it", "ref", x.Own.Ref(), "by", one.by.Ref(), "segments", len(segments), "error", why)
	if f := x.Own.Stream(); f != nil {
		f.Bring(segments)
	}
	x.Store.Collect() // what the other one filled may have been removed
}

// Await waits, after the last stream, until all that others bring is here, or something is absent
// that none of them brings. It reports whether one was dropped since it returned last.
func (x *Contents) Await(a *arena.Arena) (dropped bool) {
	for {
		x.mu.Lock()
		list, looked := slices.Clone(x.list), x.looked
		x.mu.Unlock()
		left := 0
		for _, one := range list {
			left += len(one.Segments())
		}
		if a.Missing() > left || a.Complete() || x.ctx.Err() != nil {
			x.mu.Lock()
			defer x.mu.Unlock()
			dropped, x.fresh = x.fresh, false
			return dropped
		}
		select {
		case <-looked:
		case <-x.ctx.Done():
		}
	}
}

// bring has what a read lacks come soon, where it is expected of others, until stop is called.
func (x *Contents) bring(ctx context.Context, a *arena.Arena, off, n int64) (stop func()) {
	x.mu.Lock()
	list := slices.Clone(x.list)
	x.mu.Unlock()
	if len(list) == 0 {
		return func() {}
	}
	ctx, cancel := context.WithCancel(ctx)
	unlink := context.AfterFunc(x.ctx, cancel)
	for _, i := range a.AbsentSegments(nil, off, n) {
		for _, one := range list {
			x.goes(func() {
				if err := one.Bring(ctx, i); err != nil && ctx.Err() == nil {
					x.drop(one, err)
				}
			})
		}
	}
	return func() {
		unlink()
		cancel()
	}
}

// goes runs fn, which ends with x.ctx.
func (x *Contents) goes(fn func()) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if !x.over {
		x.work.Go(fn)
	}
}

// Source returns the store.Source of a stream, and of what others bring.
func (x *Contents) Source(stream *fetch.Pull) store.Source { return &source{stream, x} }

type source struct {
	*fetch.Pull
	of *Contents
}

// Need implements store.Source. The stream, too, asks for what others do not bring in time.
func (v *source) Need(ctx context.Context, a *arena.Arena, off, n int64) error {
	defer v.of.bring(ctx, a, off, n)()
	return v.Pull.Need(ctx, a, off, n)
}
