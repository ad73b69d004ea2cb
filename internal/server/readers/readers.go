// Package readers knows who reads objects of the store, so that those that nobody needs any more are removed only
// when nobody can be reading them.
//
// Who reads begins, and only then asks the catalog where things are. What the catalog forgets later stays until
// that reader has ended: an object can be removed that was forgotten before the oldest reader began.
package readers

import (
	"sync"
	"time"
)

// Readers are those of one process. The zero value is ready, and so is nil: nobody reads then.
type Readers struct {
	mu   sync.Mutex
	last uint64               // guarded by mu
	all  map[uint64]time.Time // guarded by mu: when each began
}

// Begin says that somebody reads until end.
func (r *Readers) Begin() (end func()) {
	if r == nil {
		return func() {}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.all == nil {
		r.all = make(map[uint64]time.Time)
	}
	r.last++
	id := r.last
	r.all[id] = time.Now()
	return sync.OnceFunc(func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		delete(r.all, id)
	})
}

// Oldest returns when the oldest reader began: now, if there is none.
func (r *Readers) Oldest() time.Time {
	now := time.Now()
	if r == nil {
		return now
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, t := range r.all {
		if t.Before(now) {
			now = t
		}
	}
	return now
}
