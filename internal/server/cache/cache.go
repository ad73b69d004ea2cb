// Package cache keeps in memory what is dear to make.
package cache

import (
	"container/list"
	"context"
	"errors"
	"sync"

	"golang.org/x/sync/singleflight"
)

// Cache keeps the values used last, up to a number of bytes, and makes each
// value once at a time.
type Cache[V any] struct {
	limit int64
	cost  func(V) int64

	mu      sync.Mutex
	used    int64                    // guarded by mu
	recent  list.List                // guarded by mu: *cached[V], the last used in front
	entries map[string]*list.Element // guarded by mu
	closed  bool                     // guarded by mu

	loads singleflight.Group
	ctx   context.Context // of loads; ends with Close
	stop  context.CancelFunc
	work  sync.WaitGroup // loads that run
}

// ErrClosed is returned by Get after Close.
var ErrClosed = errors.New("the server is shutting down")

type cached[V any] struct {
	key   string
	value V
	cost  int64
}

// New returns an empty Cache of values that cost at most limit bytes together.
func New[V any](limit int64, cost func(V) int64) *Cache[V] {
	c := &Cache[V]{limit: limit, cost: cost, entries: map[string]*list.Element{}}
	c.ctx, c.stop = context.WithCancel(context.Background())
	return c
}

// Close ends the loads that run, and waits for them: nobody may wait for them any more, and they go on all the same.
func (c *Cache[V]) Close() {
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	c.stop()
	c.work.Wait()
}

// begin reports whether a load may run. If so it ends with a call of c.work.Done.
func (c *Cache[V]) begin() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.closed {
		c.work.Add(1)
	}
	return !c.closed
}

// Get returns the value of key, from load if it is not here. Whoever waits for
// another's load gets its value or its error; load goes on when ctx ends, until Close.
func (c *Cache[V]) Get(ctx context.Context, key string, load func(context.Context) (V, error)) (V, error) {
	if v, ok := c.find(key); ok {
		return v, nil
	}
	done := c.loads.DoChan(key, func() (any, error) {
		// Another load may have ended since.
		if v, ok := c.find(key); ok {
			return v, nil
		}
		var v V
		if !c.begin() {
			return v, ErrClosed
		}
		defer c.work.Done()
		own, cancel := context.WithCancel(context.WithoutCancel(ctx))
		defer cancel()
		defer context.AfterFunc(c.ctx, cancel)()
		v, err := load(own)
		if err == nil {
			c.Put(key, v)
		}
		return v, err
	})
	select {
	case r := <-done:
		return r.Val.(V), r.Err
	case <-ctx.Done():
		var none V
		return none, ctx.Err()
	}
}

// Has reports whether the value of key is here.
func (c *Cache[V]) Has(key string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	_, ok := c.entries[key]
	return ok
}

// find returns a value that is here.
func (c *Cache[V]) find(key string) (v V, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	e, ok := c.entries[key]
	if !ok {
		return v, false
	}
	c.recent.MoveToFront(e)
	return e.Value.(*cached[V]).value, true
}

// Put keeps a value, in place of the one that key has.
func (c *Cache[V]) Put(key string, v V) {
	e := &cached[V]{key, v, c.cost(v)}
	if e.cost > c.limit {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if old, ok := c.entries[key]; ok {
		c.remove(old)
	}
	c.entries[key] = c.recent.PushFront(e)
	c.used += e.cost
	for c.used > c.limit {
		c.remove(c.recent.Back())
	}
}

// Drop forgets a value.
func (c *Cache[V]) Drop(key string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if e, ok := c.entries[key]; ok {
		c.remove(e)
	}
}

// remove is called with mu held.
func (c *Cache[V]) remove(e *list.Element) {
	v := c.recent.Remove(e).(*cached[V])
	delete(c.entries, v.key)
	c.used -= v.cost
}
