// Package yield says when the daemon is to leave the processors to others: to the services that run while the rest of an
// image arrives.
//
// What no container waits for yields by being less, not by having less priority. While others want the processors,
// the server is told to rest for Rest of each Turn (bundle.Promotion.Rest), so there is less of all that an image
// costs: decoding, hashing, writing, and what the kernel does for the network and the disk. Nothing queues up on the
// way meanwhile, so what a read lacks is promoted, and comes, as ever.
//
// A thread of least priority (SCHED_IDLE) would cost nobody anything, but make containers wait for it. It would run
// Go code, and hold a mutex of the daemon, the lock of the arena's inode, or a processor of Go's scheduler that the
// garbage collector waits for, when the kernel takes its processor away. On a busy node it would have it back after a
// second, and reads that need the daemon would wait so long. So workers have a low priority at most (package kernel),
// with which a thread has a processor again after some tens of milliseconds, and the usual one when a read waits.
package yield

import (
	"time"

	"hydrofoil.dev/foil/internal/kernel"
	"hydrofoil.dev/foil/internal/worker/locks"
)

const (
	// Turn is how often it is decided anew, and Rest how much of it is rest while others want the processors.
	Turn = 250 * time.Millisecond
	Rest = Turn * 7 / 8

	// free is how many processors are idle, or do work of low priority, when nobody lacks any: services that wait for
	// each other all the time, and leave half of one idle, lose by all that comes between. others is which share of all
	// the processes of others use at least when they are what it is about. On an idle node with a fast link the
	// daemon itself leaves nothing idle.
	free   = 0.5
	others = 0.5

	// stale is after which time what was seen says nothing about now.
	stale = 4 * Turn
)

// Watch looks at the processors of a node. Its methods may be called on nil, for which nobody wants any.
type Watch struct {
	look func() (kernel.Processors, error)

	mu     locks.Mutex[locks.Leaf]
	last   kernel.Processors
	at     time.Time // of last; zero: never
	wanted bool
	turns  int64 // in which others wanted them
}

// New returns a watch that looks by a function, as kernel.Proc.Processors is one.
func New(look func() (kernel.Processors, error)) *Watch { return &Watch{look: look} }

// Wanted reports whether others want the processors: since a moment ago, as far as somebody has asked meanwhile.
func (w *Watch) Wanted() bool {
	if w == nil {
		return false
	}
	now := time.Now()
	w.mu.Lock()
	wanted, old := w.wanted, now.Sub(w.at) >= Turn/2
	w.mu.Unlock()
	if !old {
		return wanted
	}
	p, err := w.look()
	w.mu.Lock()
	defer w.mu.Unlock()
	switch elapsed := now.Sub(w.at); {
	case err != nil || w.at.IsZero() || elapsed >= stale:
		w.wanted = false
	case elapsed < Turn/2: // somebody else has just looked
		return w.wanted
	default:
		w.wanted = decide(w.last, p)
	}
	if w.wanted {
		w.turns++
	}
	w.last, w.at = p, now
	return w.wanted
}

// Turns is how often others were found to want the processors.
func (w *Watch) Turns() int64 {
	if w == nil {
		return 0
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.turns
}

// decide reports whether others wanted the processors from one look to the next.
func decide(before, after kernel.Processors) bool {
	d := kernel.Processors{
		Idle: after.Idle - before.Idle, Usual: after.Usual - before.Usual, Low: after.Low - before.Low,
		Own: after.Own - before.Own, OwnUser: after.OwnUser - before.OwnUser,
	}
	all := d.Idle + d.Usual + d.Low
	if all <= 0 {
		return false
	}
	// The daemon's own work of low priority is not somebody else's that would make room.
	low := max(0, d.Low-d.OwnUser)
	theirs := d.Usual + d.Low - low - d.Own
	return float64(d.Idle+low)*float64(after.Number) < free*float64(all) && float64(theirs) >= others*float64(all)
}
