package ingest

import (
	"context"
	"errors"
	"sync"
)

var errClosed = errors.New("the server is shutting down")

// flights lets callers who want the same thing at the same time share one run.
// A run has its own goroutine and ends early only when nobody waits for it any
// more: the caller who came first may leave without spoiling it for the others.
type flights struct {
	mu     sync.Mutex
	runs   map[string]*flight // guarded by mu
	closed bool               // guarded by mu
	wg     sync.WaitGroup
}

type flight struct {
	waiting int // guarded by flights.mu
	cancel  context.CancelFunc
	done    chan struct{} // closed when value and err are set
	value   any
	err     error
}

func (f *flights) do(ctx context.Context, key string, run func(context.Context) (any, error)) (any, error) {
	r, err := f.join(ctx, key, run)
	if err != nil {
		return nil, err
	}
	select {
	case <-r.done:
		return r.value, r.err
	case <-ctx.Done():
		f.mu.Lock()
		defer f.mu.Unlock()
		if r.waiting--; r.waiting == 0 {
			r.cancel()
		}
		return nil, ctx.Err()
	}
}

// join waits with those who wait for the key, or starts its run.
func (f *flights) join(ctx context.Context, key string, run func(context.Context) (any, error)) (*flight, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for {
		if f.closed {
			return nil, errClosed
		}
		r, ok := f.runs[key]
		if !ok {
			return f.start(ctx, key, run), nil
		}
		if r.waiting > 0 {
			r.waiting++
			return r, nil
		}
		// Nobody waited, so it was cancelled. Two runs of one key at a time
		// would be in each other's way: let it clean up first.
		f.mu.Unlock()
		select {
		case <-r.done:
		case <-ctx.Done():
		}
		f.mu.Lock()
		if err := ctx.Err(); err != nil {
			return nil, err
		}
	}
}

// start is called with mu held.
func (f *flights) start(ctx context.Context, key string, run func(context.Context) (any, error)) *flight {
	own, cancel := context.WithCancel(context.WithoutCancel(ctx))
	r := &flight{waiting: 1, cancel: cancel, done: make(chan struct{})}
	if f.runs == nil {
		f.runs = map[string]*flight{}
	}
	f.runs[key] = r
	f.wg.Go(func() {
		defer cancel()
		r.value, r.err = run(own)
		f.mu.Lock()
		delete(f.runs, key)
		f.mu.Unlock()
		close(r.done)
	})
	return r
}

// close ends all runs and waits for them.
func (f *flights) close() {
	f.mu.Lock()
	f.closed = true
	for _, r := range f.runs {
		r.cancel()
	}
	f.mu.Unlock()
	f.wg.Wait()
}
