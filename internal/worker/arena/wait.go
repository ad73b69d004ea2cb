package arena

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
)

// waits are the readers that wait for blocks. Each waits for one block at a
// time, the first of its range that is absent, so that a write looks only at
// those that wait for what it wrote.
type waits struct {
	n  atomic.Int64 // waiters registered; lets writers skip the lock
	mu sync.Mutex
	// byBlock holds the waiters of each block. Guarded by mu, like what follows.
	byBlock map[int][]*waiter
	failure error
	closed  bool
}

type waiter struct {
	wake chan struct{} // closed after err is set
	err  error
}

func (w *waits) init() { w.byBlock = make(map[int][]*waiter) }

// ErrAnother is the cause with which a read's context ends that is to wait by
// another stream: it has not failed.
var ErrAnother = errors.New("another stream brings it")

// Wait returns nil when every block of [off, off+n) is present, and an error
// when ctx ends, the arena is closed or it has failed (see Fail) before that.
func (a *Arena) Wait(ctx context.Context, off, n int64) error {
	block, to := a.blocks(off, n)
	for {
		w, err := a.register(&block, to)
		if w == nil || err != nil {
			return err
		}
		select {
		case <-w.wake:
			if w.err != nil {
				return fmt.Errorf("wait for bytes %d to %d of arena %s: %w", off, off+n, a.dir, w.err)
			}
		case <-ctx.Done():
			a.unregister(w, block)
			return fmt.Errorf("wait for bytes %d to %d of arena %s: %w", off, off+n, a.dir, context.Cause(ctx))
		}
	}
}

// register adds a waiter for the first absent block in [*block, to), which it
// stores in *block. It returns a nil waiter when there is none.
func (a *Arena) register(block *int, to int) (*waiter, error) {
	if !a.advance(block, to) {
		return nil, nil
	}
	w := &waiter{wake: make(chan struct{})}
	a.waits.mu.Lock()
	defer a.waits.mu.Unlock()
	// A writer sets bits, then looks at n. Counting first and looking at the
	// bits again means that one of the two sees the other.
	a.waits.n.Add(1)
	if !a.advance(block, to) {
		a.waits.n.Add(-1)
		return nil, nil
	}
	if a.waits.failure != nil {
		a.waits.n.Add(-1)
		return nil, a.waits.failure
	}
	a.waits.byBlock[*block] = append(a.waits.byBlock[*block], w)
	return w, nil
}

// advance moves *block to the first absent block in [*block, to); false when
// there is none.
func (a *Arena) advance(block *int, to int) bool {
	a.mu.RLock()
	defer a.mu.RUnlock()
	if a.closed {
		return true // register finds ErrClosed
	}
	*block = nextClear(a.maps.blocks, *block, to)
	return *block < to
}

func (a *Arena) unregister(w *waiter, block int) {
	a.waits.mu.Lock()
	defer a.waits.mu.Unlock()
	list := a.waits.byBlock[block]
	i := slices.Index(list, w)
	if i < 0 {
		return // woken meanwhile
	}
	a.waits.n.Add(-1)
	if len(list) == 1 {
		delete(a.waits.byBlock, block)
		return
	}
	a.waits.byBlock[block] = slices.Delete(list, i, i+1)
}

// wake wakes those that wait for blocks [from, to).
func (w *waits) wake(from, to int) {
	if from >= to || w.n.Load() == 0 {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.byBlock) < to-from {
		for block := range w.byBlock {
			if block >= from && block < to {
				w.release(block, nil)
			}
		}
		return
	}
	for block := from; block < to; block++ {
		w.release(block, nil)
	}
}

// release wakes those that wait for block. w.mu is held.
func (w *waits) release(block int, err error) {
	list, ok := w.byBlock[block]
	if !ok {
		return
	}
	delete(w.byBlock, block)
	w.n.Add(-int64(len(list)))
	for _, waiter := range list {
		waiter.err = err
		close(waiter.wake)
	}
}

func (w *waits) fail(err error, closed bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		return
	}
	w.failure, w.closed = err, closed
	if err == nil {
		return
	}
	for block := range w.byBlock {
		w.release(block, err)
	}
}

// Fail makes every wait for absent blocks end with err, those that come later
// too, until Resume. What is present stays so. It says that nothing will bring
// the missing bytes: reads of them fail instead of waiting for ever.
func (a *Arena) Fail(err error) { a.waits.fail(err, false) }

// Resume ends what Fail began: reads of absent blocks wait again.
func (a *Arena) Resume() { a.waits.fail(nil, false) }

// Failure returns the error that Fail was called with, or nil.
func (a *Arena) Failure() error {
	a.waits.mu.Lock()
	defer a.waits.mu.Unlock()
	return a.waits.failure
}
