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

// Groups have equal times, whatever they have waiting; within one clients have turns. Alone a group has all places.
func TestPlaces(t *testing.T) {
	type want struct {
		group, client string
		takes         time.Duration
	}
	for _, test := range []struct {
		name   string
		places int
		wants  []want
		order  []string // in which they begin
		took   time.Duration
	}{
		{"alone", 2, slices.Repeat([]want{{"a", "1", time.Millisecond}}, 8), slices.Repeat([]string{"a1"}, 8), 4 * time.Millisecond},
		{"another one finds a place, and has the next ones", 2, []want{
			{"a", "1", time.Millisecond}, {"a", "1", time.Millisecond}, {"a", "1", time.Millisecond}, {"a", "1", time.Millisecond}, {"b", "1", time.Millisecond}, {"b", "1", time.Millisecond},
		}, []string{"a1", "a1", "b1", "a1", "b1", "a1"}, 3 * time.Millisecond},
		{"clients of one come in turn", 1, []want{
			{"a", "1", time.Millisecond}, {"a", "1", time.Millisecond}, {"a", "1", time.Millisecond}, {"a", "2", time.Millisecond}, {"a", "3", time.Millisecond},
		}, []string{"a1", "a1", "a2", "a3", "a1"}, 5 * time.Millisecond},
		{"who takes long has fewer", 1, []want{
			{"a", "1", 3 * time.Millisecond}, {"a", "1", 3 * time.Millisecond}, {"b", "1", time.Millisecond}, {"b", "1", time.Millisecond}, {"b", "1", time.Millisecond}, {"b", "1", time.Millisecond},
		}, []string{"a1", "b1", "b1", "b1", "a1", "b1"}, 10 * time.Millisecond},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := limit.NewPlaces[string, string](test.places)
				var all sync.WaitGroup
				var mu sync.Mutex
				var order []string
				began := time.Now()
				for _, w := range test.wants {
					all.Go(func() {
						place, err := p.Enter(t.Context(), w.group, w.client)
						if err != nil {
							t.Error(err)
							return
						}
						mu.Lock()
						order = append(order, w.group+w.client)
						mu.Unlock()
						time.Sleep(w.takes)
						place.Leave()
						place.Leave() // once more does nothing
					})
					synctest.Wait()
				}
				all.Wait()
				// Those that begin at one moment do so in any order.
				if took := time.Since(began); took != test.took {
					t.Errorf("it took %v, want %v", took, test.took)
				}
				if test.places == 1 && !slices.Equal(order, test.order) {
					t.Errorf("%q, want %q", order, test.order)
				}
				if slices.Sort(order); !slices.Equal(order, slices.Sorted(slices.Values(test.order))) {
					t.Errorf("%q began", order)
				}
			})
		})
	}
}

// While another group is about, half of the places are left for it; a second later they are not.
func TestPlacesForOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := limit.NewPlaces[string, int](4)
		enter := func(group string) *limit.Place[string, int] {
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Microsecond)
			defer cancel()
			place, err := p.Enter(ctx, group, 1)
			if err != nil && !errors.Is(err, context.DeadlineExceeded) {
				t.Error(err)
			}
			return place
		}
		had := func(group string, n int) (all []*limit.Place[string, int]) {
			t.Helper()
			for range 5 {
				if x := enter(group); x != nil {
					all = append(all, x)
				}
			}
			if len(all) != n {
				t.Errorf("%s has %d places, want %d", group, len(all), n)
			}
			return all
		}
		leave := func(all []*limit.Place[string, int]) {
			for _, x := range all {
				x.Leave()
			}
		}
		leave(had("flood", 4))
		one := enter("one")
		leave(had("flood", 2))
		one.Leave()
		leave(had("flood", 2))
		leave([]*limit.Place[string, int]{enter("one")})
		time.Sleep(time.Second)
		all := had("flood", 4)
		if enter("one") != nil {
			t.Error("a fifth place of four")
		}
		all[0].Leave()
		next := enter("one")
		if next == nil {
			t.Error("no place for another group that is free")
		}
		all[1].Leave()
		if enter("flood") != nil {
			t.Error("half of the places are not left for others")
		}
		leave(all)
		next.Leave()
	})
}

// A place that is had for long does not count any more when somebody waits.
func TestPlacesLapse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := limit.NewPlaces[string, int](2)
		began := time.Now()
		for n, want := range []time.Duration{0, 0, limit.Lapse, limit.Lapse, 2 * limit.Lapse} {
			place, err := p.Enter(t.Context(), "a", n)
			if err != nil {
				t.Fatal(err)
			}
			if took := time.Since(began); took != want {
				t.Errorf("place %d after %v, want %v", n, took, want)
			}
			defer place.Leave()
		}
		time.Sleep(time.Hour)
		if _, err := p.Enter(t.Context(), "b", 0); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(began); took > time.Hour+3*limit.Lapse {
			t.Errorf("another group waits for %v", took)
		}
	})
}

// Whoever goes away has no place, and all others get theirs, no more at once than there are.
func TestPlacesOfMany(t *testing.T) {
	p := limit.NewPlaces[int, int](3)
	var inside, most, done atomic.Int32
	var all sync.WaitGroup
	for n := range 300 {
		all.Go(func() {
			defer done.Add(1)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			if n%3 == 0 {
				go cancel()
			}
			place, err := p.Enter(ctx, n%5, n%7)
			if err != nil {
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
			place.Leave()
		})
	}
	all.Wait()
	if most.Load() > 3 || done.Load() != 300 {
		t.Errorf("%d were inside at once, %d are done", most.Load(), done.Load())
	}
	for n := range 3 {
		if _, err := p.Enter(t.Context(), n, n); err != nil {
			t.Fatal(err)
		}
	}
	var none *limit.Places[int, int]
	place, err := none.Enter(t.Context(), 1, 1)
	if err != nil {
		t.Error(err)
	}
	place.Leave()
}

// BenchmarkPlaces is what a place costs whom nobody is beside.
func BenchmarkPlaces(b *testing.B) {
	p := limit.NewPlaces[string, int](2)
	for b.Loop() {
		place, err := p.Enter(b.Context(), "a", 1)
		if err != nil {
			b.Fatal(err)
		}
		place.Leave()
	}
}
