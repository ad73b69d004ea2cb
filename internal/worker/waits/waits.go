// Package waits remembers reads that had to wait for absent blocks.
package waits

import (
	"slices"
	"sync"
	"time"
)

// Most is how many reads that waited are remembered: the first ones, since
// what a start waited for is what one wants to know.
const Most = 256

// Wait is one read that had to wait.
type Wait struct {
	Offset, Length int64 // in the arena, bytes
	Began          time.Time
	Took           time.Duration // so far, if it is Waiting
	Waiting        bool          // it waits still
	// Planned says that the plan was here when the read came: what it waits for was in no
	// startup set, or was damaged. Before that, it may be in the set.
	Planned  bool
	Moved    int64 // bytes that had come over the network by then
	Ahead    int64 // bytes planned before the end of what it needs, at most; Planned
	Promoted bool
	Bound    time.Duration // what it should have taken at most; 0: not known
	Err      error
}

// List counts reads that waited, of one pull after the other, and keeps the
// first ones: some 25 KB of memory at most. The zero value has none. It is safe for
// concurrent use.
type List struct {
	mu    sync.Mutex
	count int64 // of those that have ended
	took  time.Duration
	over  int64 // of them, those that took more than twice their bound
	worst Wait  // the one of them that took longest
	first []Wait
	full  bool // none is remembered any more
}

// Begin notes a read that waits, and returns its place in the list; -1: it has none.
func (w *List) Begin(one Wait) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.full {
		return -1
	}
	one.Waiting = true
	w.first = append(w.first, one)
	w.full = len(w.first) == Most
	return len(w.first) - 1
}

// End notes that it waits no more.
func (w *List) End(i int, one Wait) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.count++
	w.took += one.Took
	if one.Bound > 0 && one.Took > 2*one.Bound {
		w.over++
	}
	if one.Took > w.worst.Took {
		w.worst = one
	}
	if i >= 0 && i < len(w.first) {
		w.first[i] = one
	}
}

// Total returns how many reads have waited, and for how long in sum.
func (w *List) Total() (count int64, took time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.count, w.took
}

// Longest returns the longest wait, of which Took and Bound say how long it was and should have been
// at most, and how many reads took more than twice their bound. Reads that wait still count.
func (w *List) Longest() (longest Wait, over int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	longest, over = w.worst, w.over
	for _, one := range w.first {
		if !one.Waiting {
			continue
		}
		one.Took = time.Since(one.Began)
		if one.Bound > 0 && one.Took > 2*one.Bound {
			over++
		}
		if one.Took > longest.Took {
			longest = one
		}
	}
	return longest, over
}

// First returns the first reads that had to wait, at most Most, in the order
// in which they began to; some may wait still.
func (w *List) First() []Wait {
	w.mu.Lock()
	defer w.mu.Unlock()
	list := slices.Clone(w.first)
	for i := range list {
		if list[i].Waiting {
			list[i].Took = time.Since(list[i].Began)
		}
	}
	return list
}

// Forget frees what is remembered of each read; their number stays.
func (w *List) Forget() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.first, w.full = nil, true
}
