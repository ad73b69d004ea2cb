package bundles

import (
	"bytes"
	"context"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/server/objects"
	"hydrofoil.dev/foil/internal/server/planner"
)

// newQueue returns a queue of n frames that lie one after the other in one pack.
func newQueue(n int) *queue {
	q := &queue{}
	sources := make([]planner.Source, n)
	for i := range sources {
		sources[i].Parts = []planner.Part{{Pack: "p", Offset: int64(1000 * i), Length: 1000}}
	}
	q.start(sources)
	return q
}

// TestQueueHeld: what was not promoted waits for the end of the hold, unless there is
// nothing else.
func TestQueueHeld(t *testing.T) {
	for name, c := range map[string]struct {
		do   func(q *queue)
		want [][]uint32
		took time.Duration
	}{
		"for its time":       {func(*queue) {}, [][]uint32{{0, 1, 2, 3, 4}}, 10 * time.Second},
		"released":           {func(q *queue) { q.release() }, [][]uint32{{0, 1, 2, 3, 4}}, time.Second},
		"promoted":           {func(q *queue) { q.promote([]uint32{3, 0, 1}) }, [][]uint32{{3}, {0, 1}, {2}, {4}}, 10 * time.Second},
		"all promoted":       {func(q *queue) { q.promote([]uint32{4, 3, 2, 1, 0}) }, [][]uint32{{4}, {3}, {2}, {1}, {0}}, time.Second},
		"out of its range":   {func(q *queue) { q.promote([]uint32{5, 1 << 31}); q.release() }, [][]uint32{{0, 1, 2, 3, 4}}, time.Second},
		"released and again": {func(q *queue) { q.release(); q.hold(time.Hour) }, [][]uint32{{0, 1, 2, 3, 4}}, time.Second},
		"another goes ahead": {func(q *queue) { q.pause(); q.release(); time.Sleep(time.Minute); q.resume() }, [][]uint32{{0, 1, 2, 3, 4}}, 61 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				q := newQueue(5)
				defer q.hold(10 * time.Second)()
				go func() {
					time.Sleep(time.Second)
					c.do(q)
				}()
				began := time.Now()
				var got [][]uint32
				for {
					run, err := q.wait(context.Background(), nil)
					if err != nil {
						t.Fatal(err)
					}
					if len(run) == 0 {
						break
					}
					got = append(got, run)
				}
				if !slices.EqualFunc(got, c.want, slices.Equal) || time.Since(began) != c.took {
					t.Errorf("%v after %v, want %v after %v", got, time.Since(began), c.want, c.took)
				}
			})
		})
	}
}

// TestAliveWhileHeld: a worker hears of a stream that waits for another one.
func TestAliveWhileHeld(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := objects.NewMemory()
		w, err := store.Create(t.Context(), "p")
		if err != nil {
			t.Fatal(err)
		}
		defer w.Close()
		if _, err := w.Write(make([]byte, 5000)); err != nil {
			t.Fatal(err)
		}
		if err := w.Commit(); err != nil {
			t.Fatal(err)
		}
		q := newQueue(5)
		q.pause()
		time.AfterFunc(10*time.Minute, q.resume)
		var b bytes.Buffer
		last, silence := time.Now(), time.Duration(0)
		flush := func() error {
			silence, last = max(silence, time.Since(last)), time.Now()
			return nil
		}
		if err := q.send(t.Context(), source{store: store}, nil, bundle.NewWriter(&b), flush, 15*time.Second); err != nil {
			t.Fatal(err)
		}
		if silence != 15*time.Second {
			t.Errorf("silent for %v", silence)
		}
	})
}
