package report

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"gonum.org/v1/plot/plotter"

	"hydrofoil.dev/foil/bench/engines"
)

func TestSpans(t *testing.T) {
	read := func(from, to int) engines.Read {
		return engines.Read{Began: time.Duration(from) * time.Second, Took: time.Duration(to-from) * time.Second}
	}
	reads := []engines.Read{read(5, 6), read(1, 3), read(2, 4), read(4, 5), read(8, 20), read(30, 31)}
	if diff := cmp.Diff([]span{{1, 6}, {8, 10}}, merged(reads, 10), cmp.AllowUnexported(span{})); diff != "" {
		t.Errorf("merged:\n%s", diff)
	}
	line := plotter.XYs{{X: 0, Y: 0}, {X: 2, Y: 4}, {X: 4, Y: 4}}
	want := []plotter.XYs{{{X: 1, Y: 2}, {X: 2, Y: 4}, {X: 3, Y: 4}}, {{X: 3.5, Y: 4}, {X: 4, Y: 4}, {X: 9, Y: 4}}}
	if diff := cmp.Diff(want, pieces(line, []span{{1, 3}, {3.5, 9}})); diff != "" {
		t.Errorf("pieces:\n%s", diff)
	}
	lane, n := lanes([]span{{0, 1}, {1, 2}, {1, 9}, {3, 9}, {3, 9}, {4, 9}, {5, 9}, {6, 9}, {6, 9}, {9, 10}})
	if diff := cmp.Diff([]int{0, 1, 2, 3, 4, 5, 0, 1, 6, 0}, lane); diff != "" || n != least+1 {
		t.Errorf("%d lanes:\n%s", n, diff)
	}
	if got := before(reads, 4*time.Second); len(got) != 2 {
		t.Errorf("before 4 s began %v", got)
	}
}

// A result of a run that told when reads waited has a figure of its start; others,
// such as those of before that was told, have none.
func TestStartFigure(t *testing.T) {
	all := made()
	drawn := func() (starts []figure, captions string) {
		t.Helper()
		s, err := newModel(all).timelines(1e8)
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range s.Figures {
			if strings.HasPrefix(f.File, "start-") {
				starts = append(starts, f)
			}
			captions += f.Caption + "\n"
		}
		return starts, captions
	}
	starts, _ := drawn()
	if len(starts) != 4 || starts[0].File != "start-redis-fresh-100mbit" || len(starts[0].PNG) == 0 {
		t.Fatalf("%d figures of starts", len(starts))
	}
	want := "7 in 0.30 s until ready. The longest waited 0.15 s, from 0.65 s on, for page 3 of /usr/lib/<libc>.so.6."
	if !strings.HasSuffix(starts[0].Caption, want) {
		t.Errorf("caption %q, want %q at its end", starts[0].Caption, want)
	}
	// One bar has the colour of each kind; what came long after ready is not here.
	for colour, count := range map[string]int{"fill:#56B4E9": 2, "fill:#D55E00": 3} {
		if got := strings.Count(string(starts[0].SVG), colour); got != count {
			t.Errorf("%d of %s, want %d with the legend's: %s", got, colour, count, starts[0].SVG)
		}
	}
	for i := range all.Runs {
		all.Runs[i].Reads = nil
	}
	starts, captions := drawn()
	if len(starts) > 0 {
		t.Errorf("%s was drawn of nothing", starts[0].File)
	}
	if !strings.Contains(captions, "7 reads waited 0.30 s in sum") {
		t.Error("the number of waits is not told any more")
	}
}
