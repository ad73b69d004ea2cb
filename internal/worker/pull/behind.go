package pull

import (
	"context"
	"time"

	"hydrofoil.dev/foil/internal/worker/store"
)

// lookEvery is how often a pull looks whether the one that fills its rootfs brings anything; stalled is how long that may
// bring nothing, and another one whose contents are waited for.
const (
	lookEvery = 100 * time.Millisecond
	stalled   = 5 * time.Second
)

// awaitOther waits until no other pull fills r: p does then, or nobody need. Others that bring nothing for a while, be
// it one or one after the other, give r to p: nobody makes another image wait by claiming its rootfs first.
func (p *Pull) awaitOther(r *store.Rootfs) error {
	defer p.waitBehind(nil)
	w := &watch{r: r, since: time.Now(), written: -1}
	for p.ctx.Err() == nil {
		other, _ := r.Filler().(*Pull)
		if other == nil || other == p || p.awaitOne(w, other) {
			return nil
		}
	}
	return context.Cause(p.ctx)
}

// watch looks whether a rootfs is being filled.
type watch struct {
	r       *store.Rootfs
	since   time.Time // something came, or was held back
	written int64     // by then
}

// stalled is for how long nothing has come; other fills the rootfs now.
func (w *watch) stalled(other *Pull) time.Duration {
	if a := w.r.Arena(); a == nil || a.Written() != w.written || other.Held() {
		if w.since = time.Now(); a != nil {
			w.written = a.Written()
		}
	}
	return time.Since(w.since)
}

// awaitOne waits until another pull fills the rootfs no more, or p takes that over, which it reports.
func (p *Pull) awaitOne(w *watch, other *Pull) (mine bool) {
	p.waitBehind(other)
	ctx, stop := context.WithCancel(p.ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = other.Wait(ctx)
	}()
	defer func() {
		stop()
		<-ended
	}()
	tick := time.NewTicker(min(lookEvery, p.s.opts.Stalled))
	defer tick.Stop()
	for {
		select {
		case <-ended:
			return false
		case <-tick.C:
		}
		if w.r.Filler() != store.Filler(other) {
			return false
		}
		if w.stalled(other) >= p.s.opts.Stalled && p.overtake(w.r, other) {
			return true
		}
	}
}

// overtake has p fill r instead of another pull, once.
func (p *Pull) overtake(r *store.Rootfs, other *Pull) bool {
	p.mu.Lock()
	first := !p.overtook
	p.overtook = true
	p.mu.Unlock()
	if !first || !r.HandOver(other, p) {
		return false
	}
	p.s.log.Warn("the pull that fills a rootfs brings nothing; another one goes on with it", "ref", p.ref.Name, "instead_of", other.ref.Name)
	other.mu.Lock()
	f := other.stream
	other.yielded = true
	other.mu.Unlock()
	if f != nil {
		f.Stop()
	}
	return true
}

func (p *Pull) hasYielded() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.yielded
}
