package engines

import (
	"os"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"hydrofoil.dev/foil/internal/worker/api"
)

// Thinned lines keep their ends and their shape: never off by more than a step
// and what came in one tick.
func TestThin(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		deltas := rapid.SliceOfN(rapid.Int64Range(0, 100_000), 1, 2000).Draw(t, "deltas")
		var line []Point
		var down int64
		for i, d := range deltas {
			down += d
			line = append(line, Point{Time: time.Duration(i) * tick, Down: down})
		}
		out := thin(line, 50)
		if out[0] != line[0] || out[len(out)-1] != line[len(line)-1] {
			t.Fatalf("ends %v and %v, want %v and %v", out[0], out[len(out)-1], line[0], line[len(line)-1])
		}
		if len(out) > 2*52 {
			t.Fatalf("%d points are left of %d", len(out), len(line))
		}
		step := (line[len(line)-1].Down + 1) / 50
		for i := 1; i < len(out); i++ {
			if out[i].Time <= out[i-1].Time {
				t.Fatalf("point %d is not after the one before it", i)
			}
			if out[i].Time-out[i-1].Time > 2*tick && out[i].Down-out[i-1].Down > step+100_000 {
				t.Fatalf("a step of %d bytes in %v", out[i].Down-out[i-1].Down, out[i].Time-out[i-1].Time)
			}
		}
	})
	if thin(nil, 50) != nil {
		t.Error("something is left of nothing")
	}
}

// Reads are told on the clock of the trial.
func TestReads(t *testing.T) {
	trial := &Trial{began: time.Now(), marks: map[Mark]Point{Ready: {Time: time.Second}}}
	at := func(ms int, took float64) api.Read {
		return api.Read{Began: trial.began.Add(time.Duration(ms) * time.Millisecond).Round(0), Took: took, Bound: 0.3, Path: "/x", Page: 1, Pages: 2, Planned: true}
	}
	trial.Reads([]api.Read{at(-5, 1), at(100, 0.25), at(900, 0.5), at(1500, 0.125)})
	want := []Read{
		{100 * time.Millisecond, 250 * time.Millisecond, 300 * time.Millisecond, "/x", 1, 2, true},
		{900 * time.Millisecond, 500 * time.Millisecond, 300 * time.Millisecond, "/x", 1, 2, true},
		{1500 * time.Millisecond, 125 * time.Millisecond, 300 * time.Millisecond, "/x", 1, 2, true},
	}
	if diff := cmp.Diff(want, trial.reads); diff != "" {
		t.Error(diff)
	}
	trial.waitsUntilReady()
	if n, sum := trial.Waited(); n != 1 || sum != 250*time.Millisecond {
		t.Errorf("%d waited %v until ready", n, sum)
	}
}

// What the daemon tells of the longest wait counts; else the reads that are known.
func TestLongestWait(t *testing.T) {
	reads := []Read{{Took: time.Second, Bound: 2 * time.Second}, {Took: 3 * time.Second, Bound: time.Second}, {Took: 2 * time.Second}}
	for _, c := range []struct {
		outcome Outcome
		want    Wait
		ok      bool
	}{
		{Outcome{}, Wait{}, false},
		{Outcome{Reads: reads}, Wait{3 * time.Second, time.Second}, true},
		{Outcome{Reads: reads, Longest: &Wait{4 * time.Second, 5 * time.Second}}, Wait{4 * time.Second, 5 * time.Second}, true},
	} {
		if got, ok := c.outcome.LongestWait(); got != c.want || ok != c.ok {
			t.Errorf("%+v: %v, %v; want %v, %v", c.outcome, got, ok, c.want, c.ok)
		}
	}
}

func TestProcessorTime(t *testing.T) {
	before := ProcessorTime(os.Getpid())
	for began := time.Now(); ProcessorTime(os.Getpid()) < before+30*time.Millisecond; {
		if time.Since(began) > time.Minute {
			t.Fatalf("after a minute of work it is still %v", ProcessorTime(os.Getpid()))
		}
	}
	if got := ProcessorTime(1 << 30); got != 0 {
		t.Errorf("of no process: %v", got)
	}
	if got := peak([]int{os.Getpid(), 1 << 30}); got < 1<<20 {
		t.Errorf("peak of the resident set: %d bytes", got)
	}
}

func TestNamed(t *testing.T) {
	for _, e := range All() {
		if found, err := Named(e.Name()); err != nil || found.Name() != e.Name() {
			t.Errorf("%s: %v", e.Name(), err)
		}
	}
	if _, err := Named("dadi"); err == nil {
		t.Error("an engine that is not there was found")
	}
}

func TestFloor(t *testing.T) {
	f := Floor{Warm: 100 * time.Millisecond, Compressed: 1e6}
	if got, want := f.At(50*time.Millisecond, 8e6), 1150*time.Millisecond; got != want {
		t.Errorf("%v, want %v", got, want)
	}
	if got, want := f.At(50*time.Millisecond, 0), 150*time.Millisecond; got != want {
		t.Errorf("without a limit %v, want %v", got, want)
	}
}
