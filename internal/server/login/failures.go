package login

import (
	"net/netip"
	"sync"
	"time"
)

const (
	// failBurst is how many failures an address has before it is slowed down, and failEvery the time
	// for each further try.
	failBurst = 10
	failEvery = 3 * time.Second
	// maxFailing bounds the addresses that are remembered. All others count as one then.
	maxFailing = 10_000
)

// Failures slows addresses down that fail to log in.
type Failures struct {
	mu   *sync.Mutex
	left map[netip.Addr]tries // guarded by mu
}

// tries are what an address has left, at a time.
type tries struct {
	left float64
	at   time.Time
}

func (t tries) now(now time.Time) tries {
	return tries{min(failBurst, t.left+now.Sub(t.at).Seconds()/failEvery.Seconds()), now}
}

// NewFailures returns some of nobody.
func NewFailures() Failures {
	return Failures{mu: new(sync.Mutex), left: make(map[netip.Addr]tries)}
}

// Network is what counts as one client of an address: an IPv6 host has 2^64 of them.
func Network(a netip.Addr) netip.Addr {
	a = a.Unmap().WithZone("")
	if a.Is6() {
		if p, err := a.Prefix(64); err == nil {
			return p.Addr()
		}
	}
	return a
}

// Check refuses an address that has failed too often. Errors: *Error.
func (f *Failures) Check(a netip.Addr, way string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	t, ok := f.left[f.key(a)]
	if !ok {
		return nil
	}
	if t = t.now(time.Now()); t.left >= 1 {
		return nil
	}
	return &Error{Way: way, Message: "too many failed logins from this address: wait, and check the credentials",
		After: time.Duration((1 - t.left) * float64(failEvery))}
}

// Add counts a failure.
func (f *Failures) Add(a netip.Addr) {
	f.mu.Lock()
	defer f.mu.Unlock()
	now := time.Now()
	if len(f.left) >= maxFailing {
		for k, t := range f.left {
			if t.now(now).left == failBurst {
				delete(f.left, k)
			}
		}
	}
	k := f.key(a)
	t, ok := f.left[k]
	if !ok {
		t = tries{failBurst, now}
	}
	t = t.now(now)
	t.left = max(0, t.left-1)
	f.left[k] = t
}

// key is under what an address is remembered. mu must be held.
func (f *Failures) key(a netip.Addr) netip.Addr {
	a = Network(a)
	if _, ok := f.left[a]; ok || len(f.left) < maxFailing {
		return a
	}
	return netip.Addr{}
}
