package fetch

import (
	"slices"
	"sync"
	"time"
)

// MaxWaits is how many reads that waited are remembered: the first ones, since
// what a start waited for is what one wants to know.
const MaxWaits = 256

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
	Err      error
}

// Waits counts reads that waited, of one pull after the other, and keeps the
// first ones: some 25 KB of memory at most. The zero value has none. It is safe for
// concurrent use.
type Waits struct {
	mu    sync.Mutex
	count int64 // of those that have ended
	took  time.Duration
	first []Wait
	full  bool // none is remembered any more
}

// begin notes a read that waits, and returns its place in first; -1: it has none.
func (w *Waits) begin(one Wait) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.full {
		return -1
	}
	one.Waiting = true
	w.first = append(w.first, one)
	w.full = len(w.first) == MaxWaits
	return len(w.first) - 1
}

// end notes that it waits no more.
func (w *Waits) end(i int, took time.Duration, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.count++
	w.took += took
	if i >= 0 && i < len(w.first) {
		one := &w.first[i]
		one.Took, one.Waiting, one.Err = took, false, err
	}
}

// Total returns how many reads have waited, and for how long in sum.
func (w *Waits) Total() (count int64, took time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.count, w.took
}

// First returns the first reads that had to wait, at most MaxWaits, in the order
// in which they began to; some may wait still.
func (w *Waits) First() []Wait {
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
func (w *Waits) Forget() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.first, w.full = nil, true
}
