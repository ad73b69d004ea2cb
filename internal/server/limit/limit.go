// Package limit bounds how much each of many may have, in a bounded memory.
package limit

import (
	"sync"
	"time"

	"golang.org/x/time/rate"
)

// Buckets are token buckets by key.
type Buckets[K comparable] struct {
	every rate.Limit
	burst int
	most  int

	mu  sync.Mutex
	all map[K]*rate.Limiter // guarded by mu: those that are not full, and some that are
	// rest is for keys that there is no room for: they share one. guarded by mu
	rest *rate.Limiter
}

// New returns buckets of burst tokens, which get perSecond a second. At most as many keys as most are told apart:
// with more that have taken something lately, the others share one bucket.
func New[K comparable](perSecond float64, burst, most int) *Buckets[K] {
	return &Buckets[K]{
		every: rate.Limit(perSecond), burst: burst, most: most,
		all: make(map[K]*rate.Limiter), rest: rate.NewLimiter(rate.Limit(perSecond), burst),
	}
}

// Take takes n tokens of a key. If there are not as many it takes none, and after is when there will be; more
// than a bucket holds never are, and are taken as a whole bucket.
func (b *Buckets[K]) Take(key K, n int) (ok bool, after time.Duration) {
	n = min(n, b.burst)
	now := time.Now()
	b.mu.Lock()
	defer b.mu.Unlock()
	l := b.of(key, now)
	if l.AllowN(now, n) {
		return true, 0
	}
	r := l.ReserveN(now, n)
	after = r.DelayFrom(now)
	r.CancelAt(now)
	return false, max(after, time.Millisecond)
}

// Charge takes n tokens of a key, though there may not be as many, and returns when the bucket will owe nothing any more: who
// waits for that keeps to the rate, and those who wait for one bucket come in the order in which they were charged.
func (b *Buckets[K]) Charge(key K, n int) (after time.Duration) {
	now := time.Now()
	b.mu.Lock()
	defer b.mu.Unlock()
	l := b.of(key, now)
	for {
		part := min(n, b.burst)
		after = l.ReserveN(now, part).DelayFrom(now)
		if n -= part; n <= 0 {
			return after
		}
	}
}

// of returns the bucket of a key. mu must be held.
func (b *Buckets[K]) of(key K, now time.Time) *rate.Limiter {
	if l := b.all[key]; l != nil {
		return l
	}
	if len(b.all) >= b.most {
		for k, l := range b.all {
			if l.TokensAt(now) >= float64(b.burst) {
				delete(b.all, k)
			}
		}
	}
	if len(b.all) >= b.most {
		return b.rest
	}
	l := rate.NewLimiter(b.every, b.burst)
	b.all[key] = l
	return l
}
