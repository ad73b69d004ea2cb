package cache

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
)

func TestCacheForgetsTheOldest(t *testing.T) {
	c := New(100, func(v int) int64 { return int64(v) })
	loads := map[string]int{}
	get := func(key string, v int) {
		t.Helper()
		got, err := c.Get(context.Background(), key, func(context.Context) (int, error) { loads[key]++; return v, nil })
		if err != nil || got != v {
			t.Fatalf("%s: %d, %v", key, got, err)
		}
	}
	get("a", 40)
	get("b", 40)
	get("a", 40)
	get("c", 40) // b goes
	get("a", 40)
	get("b", 40) // c goes
	get("large", 101)
	get("large", 101) // never kept
	if !c.Has("a") || c.Has("c") || c.Has("large") {
		t.Error("Has says another thing than Get")
	}
	c.Drop("a")
	get("a", 40)
	for key, want := range map[string]int{"a": 2, "b": 2, "c": 1, "large": 2} {
		if loads[key] != want {
			t.Errorf("%s was loaded %d times, want %d", key, loads[key], want)
		}
	}
	if c.used > c.limit {
		t.Errorf("%d bytes, at most %d", c.used, c.limit)
	}
}

func TestCacheLoadsOnce(t *testing.T) {
	c := New(100, func(int) int64 { return 1 })
	var loads atomic.Int32
	begun, finish := make(chan struct{}), make(chan struct{})
	load := func(context.Context) (int, error) {
		if loads.Add(1) == 1 {
			close(begun)
		}
		<-finish
		return 7, nil
	}
	// Whoever came first may go: the others still get the value.
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		if _, err := c.Get(ctx, "k", load); !errors.Is(err, context.Canceled) {
			t.Errorf("cancelled: %v", err)
		}
	})
	<-begun
	cancel()
	wg.Wait()
	for range 5 {
		wg.Go(func() {
			if v, err := c.Get(context.Background(), "k", load); v != 7 || err != nil {
				t.Errorf("%d, %v", v, err)
			}
		})
	}
	close(finish)
	wg.Wait()
	if n := loads.Load(); n != 1 {
		t.Errorf("loaded %d times", n)
	}
	if _, err := c.Get(context.Background(), "bad", func(context.Context) (int, error) { return 0, fmt.Errorf("no") }); err == nil {
		t.Error("an error was swallowed")
	}
	if v, err := c.Get(context.Background(), "bad", load); v != 7 || err != nil {
		t.Errorf("after an error: %d, %v", v, err)
	}
}

// Close ends a load for which nobody waits any more, and waits for it. After it nothing is loaded.
func TestCacheCloses(t *testing.T) {
	c := New(100, func(int) int64 { return 1 })
	loading, left := make(chan struct{}), false
	load := func(ctx context.Context) (int, error) {
		close(loading)
		<-ctx.Done()
		left = true
		return 0, ctx.Err()
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		_, err := c.Get(ctx, "a", load)
		ended <- err
	}()
	<-loading
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("who gives up gets %v", err)
	}
	if c.Close(); !left {
		t.Error("the load goes on")
	}
	if _, err := c.Get(t.Context(), "b", func(context.Context) (int, error) { return 1, nil }); !errors.Is(err, ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
}
