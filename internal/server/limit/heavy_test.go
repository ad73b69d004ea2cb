package limit_test

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"hydrofoil.dev/foil/internal/server/limit"
)

// Clients have their turns one after the other, however much one of them wants, and who goes away has none.
func TestHeavy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := limit.NewHeavy[string](1)
		var all sync.WaitGroup
		var mu sync.Mutex
		var order []string
		gone, leave := context.WithCancel(t.Context())
		work := func(ctx context.Context, client string) {
			all.Go(func() {
				end, err := h.Enter(ctx, client)
				if err != nil {
					if ctx == gone && errors.Is(err, context.Canceled) {
						return
					}
					t.Error(err)
					return
				}
				mu.Lock()
				order = append(order, client)
				mu.Unlock()
				time.Sleep(time.Second)
				end()
			})
			synctest.Wait()
		}
		for range 4 {
			work(t.Context(), "many")
		}
		work(gone, "gone")
		work(t.Context(), "one")
		work(t.Context(), "two")
		work(gone, "two")
		leave()
		all.Wait()
		if want := []string{"many", "many", "one", "two", "many", "many"}; !slices.Equal(order, want) {
			t.Errorf("%q, want %q", order, want)
		}
		work(t.Context(), "later")
		all.Wait()
		if len(order) != 7 {
			t.Error("there is no place left")
		}
	})
}

// No more are inside than there are places, and all get in, whoever goes away.
func TestHeavyPlaces(t *testing.T) {
	h := limit.NewHeavy[int](3)
	var inside, most, done atomic.Int32
	var all sync.WaitGroup
	for n := range 200 {
		all.Go(func() {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			if n%3 == 0 {
				go cancel()
			}
			end, err := h.Enter(ctx, n%7)
			if err != nil {
				done.Add(1)
				return
			}
			for now := inside.Add(1); ; {
				old := most.Load()
				if now <= old || most.CompareAndSwap(old, now) {
					break
				}
			}
			time.Sleep(100 * time.Microsecond)
			inside.Add(-1)
			end()
			done.Add(1)
		})
	}
	all.Wait()
	if most.Load() > 3 || done.Load() != 200 {
		t.Errorf("%d were inside at once, %d are done", most.Load(), done.Load())
	}
	for range 3 {
		if _, err := h.Enter(t.Context(), 1); err != nil {
			t.Fatal(err)
		}
	}
	var none *limit.Heavy[int]
	if end, err := none.Enter(t.Context(), 1); err != nil {
		t.Error(err)
	} else {
		end()
	}
}
