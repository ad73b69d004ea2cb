package upstream

import (
	"context"
	"sync"
)

// checks lets those who ask for the same at the same time share an answer.
type checks struct {
	mu sync.Mutex
	m  map[string]*pair // guarded by mu
}

// pair is the run under way for a key, and the one after it, if somebody waits
// for that.
type pair struct{ running, next *check }

type check struct {
	done chan struct{} // closed when value and err are set
	run  func(context.Context) (any, error)

	value any
	err   error
}

// share returns the result of run, or of one that was under way; with fresh,
// only of one that began after share was called. run goes on when ctx ends.
func (a *Accelerator) share(ctx context.Context, c *checks, key string, fresh bool, run func(context.Context) (any, error)) (any, error) {
	r := &check{done: make(chan struct{}), run: run}
	c.mu.Lock()
	p := c.m[key]
	switch {
	case p == nil:
		p = &pair{running: r}
		if err := a.run(func(ctx context.Context) { c.work(ctx, key, p) }); err != nil {
			c.mu.Unlock()
			return nil, err
		}
		if c.m == nil {
			c.m = map[string]*pair{}
		}
		c.m[key] = p
	case !fresh:
		r = p.running
	case p.next == nil:
		p.next = r
	default:
		r = p.next
	}
	c.mu.Unlock()
	select {
	case <-r.done:
		return r.value, r.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// work runs what is wanted for a key until nobody waits any more.
func (c *checks) work(ctx context.Context, key string, p *pair) {
	for r := p.running; r != nil; {
		r.value, r.err = r.run(ctx)
		c.mu.Lock()
		ended := r
		p.running, p.next = p.next, nil
		r = p.running
		if r == nil {
			delete(c.m, key)
		}
		c.mu.Unlock()
		// Only now: whoever has its answer and asks again gets another one.
		close(ended.done)
	}
}
