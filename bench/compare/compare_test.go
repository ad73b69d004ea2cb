package compare

import (
	"bytes"
	"math"
	"strings"
	"testing"
	"time"

	"hydrofoil.dev/foil/bench/engines"
	"hydrofoil.dev/foil/bench/results"
)

// made is a result whose times to ready, in milliseconds, are those given for
// each of eight settings.
func made(settings int, ready func(setting, rep int) int) (all results.Everything) {
	for setting := range settings {
		for rep := 1; rep <= 5; rep++ {
			r := results.Run{Key: results.Key{Engine: "hydrofoil", Image: "redis", Kind: results.Fresh, RTT: time.Duration(setting) * time.Millisecond, Rep: rep}}
			r.Marks = map[engines.Mark]engines.Point{engines.Ready: {Time: time.Duration(ready(setting, rep)) * time.Millisecond}}
			all.Runs = append(all.Runs, r)
		}
	}
	return all
}

// noise is up to 4% either way, and the same in no two repetitions.
func noise(setting, rep int) int { return (setting*7 + rep*13) % 9 * 10 }

func TestCompare(t *testing.T) {
	before := made(8, func(s, r int) int { return 1000 + noise(s, r) })
	for _, c := range []struct {
		name  string
		after results.Everything
		line  Verdict // of the first setting
		all   Verdict
	}{
		{"the same", before, Same, Same},
		{"noise", made(8, func(s, r int) int { return 1000 + noise(s+4, r+2) }), Same, Same},
		{"20% less", made(8, func(s, r int) int { return 800 + noise(s, r) }), Better, Better},
		{"30% more", made(8, func(s, r int) int { return 1300 + noise(s+1, r) }), Worse, Worse},
		{"sure, but too little", made(8, func(s, r int) int { return 1005 + noise(s, r) }), Same, Same},
		{"few settings", made(3, func(s, r int) int { return 800 + noise(s, r) }), Better, Few},
	} {
		report := Compare(before, c.after)
		if len(report.Lines) == 0 || len(report.Summaries) != 1 {
			t.Fatalf("%s: %d lines, %d summaries", c.name, len(report.Lines), len(report.Summaries))
		}
		if got := report.Lines[0].Verdict; got != c.line {
			t.Errorf("%s: setting is %s, want %s (%+v)", c.name, got, c.line, report.Lines[0])
		}
		if got := report.Summaries[0].Verdict; got != c.all {
			t.Errorf("%s: all is %s, want %s (%+v)", c.name, got, c.all, report.Summaries[0])
		}
	}
}

// A failed run, and one that the other result lacks, are said to be missing.
func TestUnpaired(t *testing.T) {
	before := made(1, func(_, _ int) int { return 100 })
	after := made(1, func(_, _ int) int { return 50 })
	after.Runs = after.Runs[:4]
	after.Runs[0].Err = "it did not start"
	report := Compare(before, after)
	if report.Unpaired != 3 || report.Lines[0].Pairs != 3 {
		t.Errorf("%d unpaired, %d pairs; want 3 and 3", report.Unpaired, report.Lines[0].Pairs)
	}
	var out bytes.Buffer
	if err := report.Write(&out, false); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"0.100 s", "0.050 s", "0.500", "better", "3 runs have no partner"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q is missing in:\n%s", want, out.String())
		}
	}
}

// Over all engines and kinds each setting counts once, and the worst is named.
func TestOverAll(t *testing.T) {
	before := made(1, func(_, _ int) int { return 1000 })
	after := made(1, func(_, rep int) int { return 1000 + 2*rep })
	for i := range before.Runs {
		// Another engine, by a tenth slower, and a run of it less.
		b, a := before.Runs[i], after.Runs[i]
		b.Engine, a.Engine = "hydrofoil-untraced", "hydrofoil-untraced"
		b.Kind, a.Kind = results.Update, results.Update
		a.Marks = map[engines.Mark]engines.Point{engines.Ready: {Time: 1100 * time.Millisecond}}
		before.Runs = append(before.Runs, b)
		if i > 0 {
			after.Runs = append(after.Runs, a)
		}
	}
	report, err := Compare(before, after).Only("ready")
	if err != nil {
		t.Fatal(err)
	}
	if len(report.Summaries) != 3 {
		t.Fatalf("%d summaries, want one for each engine and one for all: %+v", len(report.Summaries), report.Summaries)
	}
	all := report.Summaries[0]
	if all.Engine != "" || all.Settings != 2 || all.Worst.Key.Engine != "hydrofoil-untraced" {
		t.Errorf("over all: %+v", all)
	}
	if math.Abs(all.Ratio-math.Sqrt(1.006*1.1)) > 1e-4 || all.Upper <= all.Ratio || all.Upper > all.Ratio*1.003 {
		t.Errorf("over all %.5f, at most %.5f", all.Ratio, all.Upper)
	}
	var out bytes.Buffer
	if err := report.Write(&out, true); err != nil {
		t.Fatal(err)
	}
	if want := "1.100 (hydrofoil-untraced, redis, update, 0s)"; !strings.Contains(out.String(), want) {
		t.Errorf("%q is missing in:\n%s", want, out.String())
	}
	if _, err := Compare(before, after).Only("speed"); err == nil || !strings.Contains(err.Error(), "longest wait") {
		t.Errorf("of what is not measured: %v", err)
	}
}

// What is compared is said, and that images differ, which may explain everything.
func TestSaysWhatIsCompared(t *testing.T) {
	before, after := made(1, func(_, _ int) int { return 100 }), made(1, func(_, _ int) int { return 100 })
	before.Matrix.Commit, after.Matrix.Commit = "0123abc", "4567def"
	before.Images = []results.Image{{Name: "redis:1", Digest: "sha256:1"}, {Name: "nginx:1", Digest: "sha256:2"}, {Name: "node:1", Digest: "sha256:3"}}
	after.Images = []results.Image{{Name: "redis:1", Digest: "sha256:1"}, {Name: "nginx:1", Digest: "sha256:4"}, {Name: "gcc:1", Digest: "sha256:5"}}
	var out bytes.Buffer
	if err := Compare(before, after).Write(&out, true); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"before: commit 0123abc", "after:  commit 4567def", "digests differ): nginx:1\n"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q is missing in:\n%s", want, out.String())
		}
	}
}
