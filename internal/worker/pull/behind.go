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

// awaitOther waits until no other pull fills r. One that brings nothing for a while gives r to p: nobody makes
// another image wait by claiming its rootfs first.
func (p *Pull) awaitOther(r *store.Rootfs) error {
	other, _ := r.Filler().(*Pull)
	if other == nil || other == p {
		return nil
	}
	p.waitBehind(other)
	defer p.waitBehind(nil)
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
	since, written := time.Now(), int64(-1)
	for {
		select {
		case <-ended:
			return context.Cause(p.ctx)
		case <-tick.C:
		}
		if a := r.Arena(); a == nil || a.Written() != written || other.Held() {
			if since = time.Now(); a != nil {
				written = a.Written()
			}
		}
		if r.Filler() != store.Filler(other) {
			return nil // a third one
		}
		if time.Since(since) >= p.s.opts.Stalled && p.overtake(r, other) {
			return nil
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
