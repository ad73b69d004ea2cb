package bundles

import (
	"context"
	"slices"
	"testing"
	"testing/synctest"
	"time"

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
