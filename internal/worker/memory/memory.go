// Package memory says how much of the node's memory startup pages may take that are read into page caches before
// anybody has asked for them.
//
// The kernel charges a page of a file to the cgroup of the process that has it brought into memory, and to nobody
// else as long as it is there. Pages that the daemon writes to an arena, and pages that it reads through a mount,
// are the daemon's; what a container reads that is not in memory is the container's. So no page that is read
// ahead can have a container killed. But it takes memory from the node and from the daemon's own cgroup, and a
// container would have, at the daemon's expense, what its own limit denies it. So there are three bounds:
//
//   - all starts together have a share of what the node can spare, and of what the daemon's own cgroup leaves;
//   - the start of a container has no more than the container's cgroups leave it;
//   - none has anything while memory is short.
//
// What is not read ahead is read lazily: when a process asks for it, at its own expense.
package memory

import (
	"log/slog"
	"sync/atomic"
	"time"

	"hydrofoil.dev/foil/internal/kernel"
	"hydrofoil.dev/foil/internal/worker/locks"
)

const (
	// lookEvery is for how long what is known of memory is believed.
	lookEvery = time.Second
	// tightPressure is the share of the last ten seconds in which somebody waited for memory, from which on it
	// is short. On a host that has enough of it, reclaim in the background makes nobody wait.
	tightPressure = 0.05
	// tightShare is which share of memory has to be available so that it is not short, wherever the kernel does
	// not tell of pressure.
	tightShare = 0.05
)

// Sight is how memory stands.
type Sight struct {
	Available int64 // bytes that startup pages could have at most
	Tight     bool  // somebody waits for memory
}

// Options configure a Budget. Limit and Look are required.
type Options struct {
	// Limit is how many bytes of those that are available may be taken.
	Limit func(available int64) int64
	Look  func() Sight
	// Logger is told when memory becomes short, and when it is no longer; nil: nobody is.
	Logger *slog.Logger
}

// Budget is that of a node. Its methods may be called on nil, which refuses nothing.
type Budget struct {
	opts    Options
	refused atomic.Int64 // bytes

	mu      locks.Mutex[locks.Leaf]
	sight   Sight
	looked  time.Time // when sight was seen; zero: never
	looking bool      // somebody looks anew
	taken   int64     // by all accounts
}

// New returns a budget of which nothing is taken.
func New(o Options) *Budget {
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	return &Budget{opts: o}
}

// look returns how memory stands, or stood a moment ago. b.mu is not held.
func (b *Budget) look() Sight {
	b.mu.Lock()
	first := b.looked.IsZero()
	if !first && (b.looking || time.Since(b.looked) < lookEvery) {
		defer b.mu.Unlock()
		return b.sight
	}
	b.looking = true
	was := b.sight
	b.mu.Unlock()
	now := b.opts.Look()
	if now.Tight != was.Tight {
		b.opts.Logger.Info("memory is short, or no longer: while it is, startup pages are read when they are asked for", "short", now.Tight, "available", now.Available)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.sight, b.looked, b.looking = now, time.Now(), false
	return now
}

// Tight reports whether memory is short.
func (b *Budget) Tight() bool { return b != nil && b.look().Tight }

// Taken returns how many bytes the starts that are under way have taken.
func (b *Budget) Taken() int64 {
	if b == nil {
		return 0
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.taken
}

// Refused returns how many bytes have been refused so far.
func (b *Budget) Refused() int64 {
	if b == nil {
		return 0
	}
	return b.refused.Load()
}

// Account is what one start takes of a budget. The zero value takes of none, and is refused nothing.
type Account struct {
	of *Budget

	// Guarded by Budget.mu.
	taken int64
	most  int64 // bytes that the containers' limits leave; less than 0: no limit is known
	ended bool
}

// Begin returns the account of a start. Who begins one ends it.
func (b *Budget) Begin() *Account { return &Account{of: b, most: -1} }

// Bound has the account take no more than a container's limits leave that is started: of several, the least.
func (a *Account) Bound(left int64) {
	if a.of == nil {
		return
	}
	a.of.mu.Lock()
	defer a.of.mu.Unlock()
	if a.most < 0 || left < a.most {
		a.most = left
	}
}

// Take asks for memory for n bytes, which are read now. If it reports false they are to be left to whoever needs them.
func (a *Account) Take(n int64) bool {
	b := a.of
	if b == nil {
		return true
	}
	s := b.look()
	limit := b.opts.Limit(s.Available)
	b.mu.Lock()
	defer b.mu.Unlock()
	if a.ended || s.Tight || b.taken+n > limit || a.most >= 0 && a.taken+n > a.most {
		b.refused.Add(n)
		return false
	}
	a.taken, b.taken = a.taken+n, b.taken+n
	return true
}

// End gives back what was taken: the start is over, and its pages are like all others that the kernel may take away.
func (a *Account) End() {
	if a.of == nil {
		return
	}
	a.of.mu.Lock()
	defer a.of.mu.Unlock()
	a.of.taken -= a.taken
	a.taken, a.ended = 0, true
}

// Host looks at this host: what is available on it, and what the daemon's own cgroup leaves, which pays for all that
// the daemon reads.
type Host struct {
	Proc    kernel.Proc
	Cgroups kernel.Cgroups
}

// Look is for Options.Look. What cannot be found out does not bound anything.
func (h Host) Look() Sight {
	s := Sight{Available: kernel.Unlimited}
	total, available, err := h.Proc.Available()
	if err == nil {
		s.Available = available
		s.Tight = float64(available) < tightShare*float64(total)
	}
	if share, err := h.Proc.MemoryPressure(); err == nil {
		s.Tight = s.Tight || share >= tightPressure
	}
	if own, err := h.Cgroups.OwnMemory(h.Proc); err == nil {
		if left, err := h.Cgroups.MemoryLeft(own); err == nil {
			s.Available = min(s.Available, left)
		}
	}
	return s
}

// Own returns how many bytes the garbage collector may let a program's memory grow to, whose own cgroup has a limit; 0:
// it has none. A quarter is left to the kernel, and to pages of files. Without it a program with a limit is killed
// for garbage that it could have collected.
func (h Host) Own() int64 {
	own, err := h.Cgroups.OwnMemory(h.Proc)
	if err != nil {
		return 0
	}
	left, err := h.Cgroups.MemoryLeft(own)
	if err != nil || left == kernel.Unlimited {
		return 0
	}
	return left - left/4
}
