package bundles

import (
	"bytes"
	"context"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/server/objects/objectstest"
	"hydrofoil.dev/foil/internal/server/planner"
	"hydrofoil.dev/foil/internal/server/turns"
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

// TestList holds what is sent against the order that the list promises, whatever is promoted
// and held, and whenever.
func TestList(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 30).Draw(t, "frames")
		sources := make([]planner.Source, n)
		at := int64(0)
		for i := range sources {
			length := rapid.Uint32Range(1, runBytes*2/3).Draw(t, "length")
			if rapid.IntRange(0, 5).Draw(t, "gap") == 0 {
				at++
			}
			sources[i].Parts = []planner.Part{{Pack: "p", Offset: at, Length: length}}
			if rapid.IntRange(0, 5).Draw(t, "made") == 0 {
				sources[i].Parts[0].Picks = []planner.Pick{{}}
			}
			at += int64(length)
		}
		var l list
		l.start(sources)
		var wanted []uint32 // what the newest promotion named, and then older ones
		sent, skipped := make([]bool, n), make([]bool, n)
		for steps := 0; l.left > 0 && steps < 200; steps++ {
			switch rapid.IntRange(0, 4).Draw(t, "step") {
			case 0:
				frames := rapid.SliceOfN(rapid.Uint32Range(0, uint32(n)+1), 0, 5).Draw(t, "promoted")
				l.promote(uint64(steps+1), frames)
				wanted = append(slices.Clone(frames), wanted...)
				for _, f := range frames {
					if int(f) < n {
						skipped[f] = false
					}
				}
			case 1:
				l.held = !l.held
			case 2:
				frames := rapid.SliceOfN(rapid.Uint32Range(0, uint32(n)+1), 0, 5).Draw(t, "skipped")
				l.skip(frames)
				for _, f := range frames {
					if int(f) < n && !sent[f] && !slices.Contains(wanted, f) {
						skipped[f] = true
					}
				}
			default:
				run := l.take(nil)
				wanted = slices.DeleteFunc(wanted, func(f uint32) bool { return int(f) >= n || sent[f] })
				lowest := 0
				for lowest < n && (sent[lowest] || skipped[lowest]) {
					lowest++
				}
				if len(run) == 0 && (len(wanted) > 0 || !l.held) {
					t.Fatalf("nothing is sent, wanted %v, held %v", wanted, l.held)
				}
				bytes := uint32(0)
				for k, f := range run {
					switch {
					case sent[f], skipped[f]:
						t.Fatalf("frame %d twice, or although it was skipped", f)
					case len(wanted) > 0:
						if f != wanted[0] {
							t.Fatalf("frame %d goes before %v", f, wanted)
						}
					case k > 0 && f != run[k-1]+1, k == 0 && int(f) != lowest, l.held:
						t.Fatalf("frames %v, the lowest that is left is %d, held %v", run, lowest, l.held)
					}
					sent[f] = true
					bytes += sources[f].Parts[0].Length
					promoted := len(wanted) > 0
					wanted = slices.DeleteFunc(wanted, func(w uint32) bool { return int(w) >= n || sent[w] })
					if promoted && len(wanted) == 0 && k < len(run)-1 {
						t.Fatalf("frames go along with those that were promoted: %v", run)
					}
				}
				if len(run) > 1 && bytes > runBytes {
					t.Fatalf("a run of %d bytes", bytes)
				}
			}
		}
	})
}

// A promotion that another one has overtaken does not go before it.
func TestListOvertaken(t *testing.T) {
	q := newQueue(6)
	q.promote(2, []uint32{5, 1})
	q.promote(1, []uint32{1, 3, 0})
	for _, want := range []uint32{5, 1, 3, 0} {
		if run := q.list.take(nil); !slices.Equal(run, []uint32{want}) {
			t.Errorf("%v, want %d", run, want)
		}
	}
}

// What was skipped and what was promoted does not depend on which message came first.
func TestListSkip(t *testing.T) {
	for name, c := range map[string]struct {
		do   func(l *list)
		want []uint32
	}{
		"some":                   {func(l *list) { l.skip([]uint32{1, 3}) }, []uint32{0, 2, 4}},
		"all":                    {func(l *list) { l.skip([]uint32{0, 1, 2, 3, 4}) }, nil},
		"twice":                  {func(l *list) { l.skip([]uint32{1, 1}); l.skip([]uint32{1}) }, []uint32{0, 2, 3, 4}},
		"out of range":           {func(l *list) { l.skip([]uint32{5, 1 << 31}) }, []uint32{0, 1, 2, 3, 4}},
		"then promoted":          {func(l *list) { l.skip([]uint32{1, 3}); l.promote(1, []uint32{3}) }, []uint32{3, 0, 2, 4}},
		"promoted before":        {func(l *list) { l.promote(1, []uint32{3}); l.skip([]uint32{1, 3}) }, []uint32{3, 0, 2, 4}},
		"promoted when passed":   {func(l *list) { l.skip([]uint32{0}); l.take(nil); l.promote(1, []uint32{0}) }, []uint32{0}},
		"sent":                   {func(l *list) { l.take(nil); l.skip([]uint32{0}) }, nil},
		"all, and then promoted": {func(l *list) { l.skip([]uint32{0, 1, 2, 3, 4}); l.promote(1, []uint32{4, 2}) }, []uint32{4, 2}},
	} {
		t.Run(name, func(t *testing.T) {
			q := newQueue(5)
			c.do(&q.list)
			var got []uint32
			for q.list.left > 0 {
				got = append(got, q.list.take(nil)...)
			}
			if !slices.Equal(got, c.want) {
				t.Errorf("%v, want %v", got, c.want)
			}
		})
	}
}

// TestQueueChoice: a queue waits for the worker's choice, but not for ever.
func TestQueueChoice(t *testing.T) {
	for name, c := range map[string]struct {
		before bool // the choice comes before the wait for it
		after  time.Duration
		took   time.Duration
	}{
		"comes":       {after: time.Second, took: time.Second},
		"came before": {before: true},
		"never comes": {after: time.Hour, took: bundle.MaxChoice},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				q := newQueue(5)
				choice := func() {
					q.skip([]uint32{0, 1})
					q.choice()
				}
				if c.before {
					choice()
				} else {
					timer := time.AfterFunc(c.after, choice)
					defer timer.Stop()
				}
				defer q.choose(bundle.MaxChoice)()
				began := time.Now()
				var taken chunk
				err := q.wait(t.Context(), &taken)
				run := taken.frames
				want := []uint32{2, 3, 4}
				if c.after == time.Hour {
					want = []uint32{0, 1, 2, 3, 4}
				}
				if err != nil || !slices.Equal(run, want) || time.Since(began) != c.took {
					t.Errorf("%v after %v, %v; want %v after %v", run, time.Since(began), err, want, c.took)
				}
			})
		})
	}
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
		"promoted":           {func(q *queue) { q.promote(0, []uint32{3, 0, 1}) }, [][]uint32{{3}, {0, 1}, {2}, {4}}, 10 * time.Second},
		"all promoted":       {func(q *queue) { q.promote(0, []uint32{4, 3, 2, 1, 0}) }, [][]uint32{{4}, {3}, {2}, {1}, {0}}, time.Second},
		"out of its range":   {func(q *queue) { q.promote(0, []uint32{5, 1 << 31}); q.release() }, [][]uint32{{0, 1, 2, 3, 4}}, time.Second},
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
				got := drained(t, q)
				if !slices.EqualFunc(got, c.want, slices.Equal) || time.Since(began) != c.took {
					t.Errorf("%v after %v, want %v after %v", got, time.Since(began), c.want, c.took)
				}
			})
		})
	}
}

// drained waits for all that a queue sends, and returns the frames of each chunk.
func drained(t *testing.T, q *queue) (got [][]uint32) {
	t.Helper()
	for {
		var c chunk
		if err := q.wait(t.Context(), &c); err != nil {
			t.Fatal(err)
		}
		if len(c.frames) == 0 {
			return got
		}
		got = append(got, c.frames)
	}
}

// TestQueueRest: what was not promoted waits for the end of the last rest that was asked for.
func TestQueueRest(t *testing.T) {
	for name, c := range map[string]struct {
		do   func(q *queue)
		want [][]uint32
		took time.Duration
	}{
		"once": {func(q *queue) { q.rest(400 * time.Millisecond) }, [][]uint32{{0, 1, 2, 3, 4}}, 400 * time.Millisecond},
		"again": {func(q *queue) {
			q.rest(400 * time.Millisecond)
			time.Sleep(300 * time.Millisecond)
			q.rest(400 * time.Millisecond)
		}, [][]uint32{{0, 1, 2, 3, 4}}, 700 * time.Millisecond},
		"shorter":        {func(q *queue) { q.rest(time.Second); q.rest(time.Millisecond) }, [][]uint32{{0, 1, 2, 3, 4}}, time.Millisecond},
		"promoted":       {func(q *queue) { q.rest(time.Second); q.promote(0, []uint32{3}) }, [][]uint32{{3}, {0, 1, 2}, {4}}, time.Second},
		"a hold as well": {func(q *queue) { q.hold(2 * time.Second); q.rest(time.Second) }, [][]uint32{{0, 1, 2, 3, 4}}, 2 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				q := newQueue(5)
				began := time.Now()
				q.pause()
				c.do(q)
				q.resume()
				got := drained(t, q)
				if !slices.EqualFunc(got, c.want, slices.Equal) || time.Since(began) != c.took {
					t.Errorf("%v after %v, want %v after %v", got, time.Since(began), c.want, c.took)
				}
				time.Sleep(time.Second)
			})
		})
	}
}

// TestAliveWhileHeld: a worker hears of a stream that waits for another one.
func TestAliveWhileHeld(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := objectstest.NewMemory()
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
		if err := q.send(t.Context(), source{store: store}, bundle.NewWriter(&b), flush, 15*time.Second); err != nil {
			t.Fatal(err)
		}
		if silence != 15*time.Second {
			t.Errorf("silent for %v", silence)
		}
	})
}

// TestQueueTakesTurns: a rest waits while something is urgent on its connection, promoted
// frames do not, and others wait for those.
func TestQueueTakesTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		all := turns.New(1)
		q := newQueue(6)
		q.urgent, q.favour = func() func() { return all.Urgent("conn") }, 3000
		stream := all.Stream("conn")
		defer stream.Close()
		q.settle(stream)
		end := all.Urgent("conn")
		time.AfterFunc(100*time.Millisecond, func() { q.promote(0, []uint32{5}) })
		time.AfterFunc(300*time.Millisecond, end)
		began := time.Now()
		next := func(want []uint32, after time.Duration) *chunk {
			t.Helper()
			var c chunk
			if err := q.wait(t.Context(), &c); err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(c.frames, want) || time.Since(began) != after {
				t.Errorf("%v after %v, want %v after %v", c.frames, time.Since(began), want, after)
			}
			return &c
		}
		c := next([]uint32{5}, 100*time.Millisecond)
		if c.urgent == nil || c.turn != nil {
			t.Error("what was promoted is not urgent")
		}
		c.sent(1000)
		if c = next([]uint32{0, 1, 2, 3, 4}, 300*time.Millisecond); c.urgent != nil || c.turn == nil {
			t.Error("a rest goes without a turn")
		}
		c.sent(1000)
	})
}

// TestFavourIsBounded: who promotes all there is has others wait for some of it.
func TestFavourIsBounded(t *testing.T) {
	store := objectstest.NewMemory()
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
	var began, ended atomic.Int64
	q.urgent, q.favour = func() func() { began.Add(1); return func() { ended.Add(1) } }, 2000
	q.promote(0, []uint32{4, 3, 2, 1, 0})
	var b bytes.Buffer
	if err := q.send(t.Context(), source{store: store}, bundle.NewWriter(&b), func() error { return nil }, time.Minute); err != nil {
		t.Fatal(err)
	}
	if began.Load() != 2 || ended.Load() != 2 {
		t.Errorf("%d began, %d ended, want two of each", began.Load(), ended.Load())
	}
}

// TestStreamMemory: whatever the frames are, a stream holds two runs of them.
func TestStreamMemory(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		store := objectstest.NewMemory()
		w, err := store.Create(context.Background(), "p")
		if err != nil {
			t.Fatal(err)
		}
		defer w.Close()
		var sources []planner.Source
		offset := int64(0)
		for range rapid.IntRange(1, 8).Draw(t, "frames") {
			n := rapid.OneOf(rapid.Uint32Range(1, 4<<10), rapid.Uint32Range(1, bundle.MaxFrame)).Draw(t, "length")
			sources = append(sources, planner.Source{Parts: []planner.Part{{Pack: "p", Offset: offset, Length: n}}})
			offset += int64(n)
		}
		if _, err := w.Write(make([]byte, offset)); err != nil {
			t.Fatal(err)
		}
		if err := w.Commit(); err != nil {
			t.Fatal(err)
		}
		q := &queue{}
		q.start(sources)
		var c chunk
		defer c.close()
		for {
			if err := q.wait(context.Background(), &c); err != nil {
				t.Fatal(err)
			}
			if len(c.frames) == 0 {
				break
			}
			if err := (source{store: store}).fill(context.Background(), sources, &c); err != nil {
				t.Fatal(err)
			}
			if cap(c.buf) > chunkMost {
				t.Fatalf("%d bytes for %d frames, at most %d", cap(c.buf), len(c.frames), chunkMost)
			}
		}
	})
}
