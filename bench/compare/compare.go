// Package compare says what became better or worse between two results of a
// benchmark, and whether that is more than noise.
//
// Runs are paired: the same engine, image, kind, link and repetition, so that
// what disturbs a round disturbs both of a pair alike only if the two results
// were made in turns; made one after the other, they share the machine alone.
// For each setting and measure it gives both medians, the median of the pairs'
// ratios, and a 95% interval of it (bootstrap). Over all settings of an engine, and over
// all engines, it gives the geometric mean of the pairs' ratios with its 95% upper bound
// (see stats.MeanRatio), the worst setting, and a sign test, which tells whether so many
// settings went the same way by chance.
package compare

import (
	"cmp"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"hydrofoil.dev/foil/bench/engines"
	"hydrofoil.dev/foil/bench/results"
	"hydrofoil.dev/foil/bench/stats"
)

// Measure is one thing that is compared; less is better.
type Measure struct {
	Name string
	of   func(r results.Run) float64
	late bool // it goes on until the image is complete, if that was waited for
}

// Measures are those that are compared.
var Measures = []Measure{
	{Name: "ready", of: func(r results.Run) float64 { return r.Marks[engines.Ready].Time.Seconds() }},
	{Name: "longest wait", of: longestWait},
	{Name: "complete", of: func(r results.Run) float64 { return r.Marks[engines.Complete].Time.Seconds() }},
	{Name: "bytes until ready", of: func(r results.Run) float64 { return float64(r.Marks[engines.Ready].Down) }},
	{Name: "bytes in all", of: func(r results.Run) float64 { return float64(r.Marks[engines.Quiet].Down) }},
	{Name: "cpu", of: func(r results.Run) float64 { return r.CPU.Seconds() }, late: true},
	{Name: "memory", of: func(r results.Run) float64 { return float64(r.Memory) }, late: true},
}

// longestWait is the longest wait of a read; 0 if none waited, and the pair does not count.
func longestWait(r results.Run) float64 {
	w, _ := r.LongestWait()
	return w.Took.Seconds()
}

// Verdict is what a difference amounts to.
type Verdict string

const (
	Better Verdict = "better"
	Worse  Verdict = "worse"
	Same   Verdict = "no difference"
	Few    Verdict = "too few runs"
)

// atLeast is the difference that is worth a word; a smaller one is none, however
// sure it is.
const atLeast = 0.02

// Line is one setting and one measure.
type Line struct {
	Key     results.Key // without Rep
	Measure string
	Pairs   int
	Before  float64 // medians
	After   float64
	Ratio   float64 // median of After over Before, pair by pair
	stats.Interval
	Verdict Verdict
	ratios  []float64 // of the pairs
}

// Summary is one engine, kind and measure over all its settings; without an engine and a
// kind, over all there are.
type Summary struct {
	Engine, Measure string
	Kind            results.Kind
	Settings        int
	Up, Down        int     // settings whose ratio is above, below 1
	Ratio           float64 // geometric mean of the pairs' ratios, in which each setting counts once
	Upper           float64 // its 95% upper bound; NaN if there are too few pairs
	Worst           Line    // the setting with the largest median of its ratios
	P               float64 // of the sign test
	Verdict         Verdict
}

// Report is a comparison.
type Report struct {
	Lines     []Line
	Summaries []Summary
	Unpaired  int // runs of one result that the other lacks, or that failed in either
	// Images are those that are not the same in both, by their digests: whatever
	// differs may be due to that.
	Images []string
	// What the results are of: commits, programs, machines.
	Before, After string
}

// differing are the images, NAME:TAG, that both results have and that are not the same.
func differing(before, after results.Everything) (names []string) {
	digests := map[string]string{}
	for _, im := range before.Images {
		digests[im.Name] = im.Digest
	}
	for _, im := range after.Images {
		if was, both := digests[im.Name]; both && was != im.Digest {
			names = append(names, im.Name)
		}
	}
	return names
}

func describe(m results.Matrix) string {
	s := fmt.Sprintf("commit %s, %s, Linux %s, %d cores, %s", m.Commit, cmp.Or(m.Foil, "no foil"), m.Host.Kernel, m.Host.Cores, m.Began.Format("2006-01-02 15:04 MST"))
	if m.Note != "" {
		s += ", " + m.Note
	}
	return s
}

// Compare compares two results.
func Compare(before, after results.Everything) Report {
	report := Report{Images: differing(before, after), Before: describe(before.Matrix), After: describe(after.Matrix)}
	old := map[results.Key]results.Run{}
	for _, r := range before.Runs {
		old[r.Key] = r
	}
	type pair struct{ before, after results.Run }
	pairs := map[results.Key][]pair{}
	paired := 0
	for _, r := range after.Runs {
		was, ok := old[r.Key]
		if !ok || was.Err != "" || r.Err != "" {
			continue
		}
		paired++
		k := r.Key
		k.Rep = 0
		pairs[k] = append(pairs[k], pair{was, r})
	}
	report.Unpaired = len(before.Runs) + len(after.Runs) - 2*paired
	keys := make([]results.Key, 0, len(pairs))
	for k := range pairs {
		keys = append(keys, k)
	}
	slices.SortFunc(keys, func(a, b results.Key) int {
		return cmp.Or(strings.Compare(a.Engine, b.Engine), strings.Compare(a.Image, b.Image), strings.Compare(string(a.Kind), string(b.Kind)),
			cmp.Compare(a.Rate, b.Rate), cmp.Compare(a.RTT, b.RTT))
	})
	for _, k := range keys {
		for _, measure := range Measures {
			var was, is, ratios []float64
			for _, p := range pairs[k] {
				if measure.late && p.before.Stopped != p.after.Stopped {
					continue
				}
				b, a := measure.of(p.before), measure.of(p.after)
				if b > 0 && a > 0 {
					was, is, ratios = append(was, b), append(is, a), append(ratios, a/b)
				}
			}
			if len(ratios) > 0 {
				report.Lines = append(report.Lines, judge(k, measure.Name, was, is, ratios))
			}
		}
	}
	report.summarise()
	return report
}

func judge(k results.Key, measure string, was, is, ratios []float64) Line {
	l := Line{
		Key: k, Measure: measure, Pairs: len(ratios), Before: stats.Median(was), After: stats.Median(is),
		Ratio: stats.Median(ratios), Interval: stats.Bootstrap(ratios, stats.Median), Verdict: Same, ratios: ratios,
	}
	switch {
	case len(ratios) < 3:
		l.Verdict = Few
	case l.Contains(1) || math.Abs(l.Ratio-1) < atLeast:
	case l.Ratio < 1:
		l.Verdict = Better
	default:
		l.Verdict = Worse
	}
	return l
}

func (r *Report) summarise() {
	type group struct {
		engine, measure string
		kind            results.Kind
	}
	lines := map[group][]Line{}
	var order []group
	add := func(g group, l Line) {
		if lines[g] == nil {
			order = append(order, g)
		}
		lines[g] = append(lines[g], l)
	}
	for _, l := range r.Lines {
		add(group{l.Key.Engine, l.Measure, l.Key.Kind}, l)
		add(group{"", l.Measure, ""}, l)
	}
	// What is over all says nothing new of one engine and kind.
	order = slices.DeleteFunc(order, func(g group) bool {
		first := lines[g][0].Key
		return g.engine == "" && !slices.ContainsFunc(lines[g], func(l Line) bool { return l.Key.Engine != first.Engine || l.Key.Kind != first.Kind })
	})
	slices.SortStableFunc(order, func(a, b group) int {
		return cmp.Or(strings.Compare(a.engine, b.engine), strings.Compare(string(a.kind), string(b.kind)))
	})
	for _, g := range order {
		s := Summary{Engine: g.engine, Measure: g.measure, Kind: g.kind, Settings: len(lines[g]), Verdict: Same}
		var pairs [][]float64
		for _, l := range lines[g] {
			pairs = append(pairs, l.ratios)
			switch {
			case l.Ratio > 1:
				s.Up++
			case l.Ratio < 1:
				s.Down++
			}
		}
		s.Ratio, s.Upper = stats.MeanRatio(pairs)
		s.Worst = slices.MaxFunc(lines[g], func(a, b Line) int { return cmp.Compare(a.Ratio, b.Ratio) })
		s.P = stats.SignTest(s.Up, s.Down)
		switch {
		case s.Settings < 6:
			// Even if all went the same way, that is chance in more than 5 of 100.
			s.Verdict = Few
		case s.P >= 0.05 || math.Abs(s.Ratio-1) < atLeast:
		case s.Ratio < 1:
			s.Verdict = Better
		default:
			s.Verdict = Worse
		}
		r.Summaries = append(r.Summaries, s)
	}
}

// Only leaves out what is not of these measures, by name; without any it leaves out nothing.
func (r Report) Only(measures ...string) (Report, error) {
	if len(measures) == 0 {
		return r, nil
	}
	for _, name := range measures {
		if !slices.ContainsFunc(Measures, func(m Measure) bool { return m.Name == name }) {
			var known []string
			for _, m := range Measures {
				known = append(known, m.Name)
			}
			return r, fmt.Errorf("bench: nothing measured is called %q; there are: %s", name, strings.Join(known, ", "))
		}
	}
	r.Lines = slices.DeleteFunc(slices.Clone(r.Lines), func(l Line) bool { return !slices.Contains(measures, l.Measure) })
	r.Summaries = slices.DeleteFunc(slices.Clone(r.Summaries), func(s Summary) bool { return !slices.Contains(measures, s.Measure) })
	return r, nil
}

// Write writes a comparison as text. Unless all is set, settings without a
// difference are left out.
func (r Report) Write(w io.Writer, all bool) error {
	if _, err := fmt.Fprintf(w, "before: %s\nafter:  %s\n", r.Before, r.After); err != nil {
		return err
	}
	if len(r.Images) > 0 {
		if _, err := fmt.Fprintf(w, "not the same images (their digests differ): %s\n", strings.Join(r.Images, ", ")); err != nil {
			return err
		}
	}
	if _, err := fmt.Fprintln(w); err != nil {
		return err
	}
	t := tabwriter.NewWriter(w, 0, 4, 2, ' ', 0)
	fmt.Fprintln(t, "engine\tkind\tmeasure\tsettings\tafter/before\t95% upper bound\tworst setting\tup, down\tp\tverdict")
	for _, s := range r.Summaries {
		verdict := string(s.Verdict)
		if s.Verdict == Few {
			verdict = "too few settings"
		}
		upper := "–"
		if !math.IsNaN(s.Upper) {
			upper = fmt.Sprintf("%.3f", s.Upper)
		}
		worst := s.Worst.Key
		where := fmt.Sprintf("%.3f (%s, %v)", s.Worst.Ratio, worst.Image, worst.RTT.Round(time.Millisecond))
		if s.Engine == "" {
			where = fmt.Sprintf("%.3f (%s, %s, %s, %v)", s.Worst.Ratio, worst.Engine, worst.Image, worst.Kind, worst.RTT.Round(time.Millisecond))
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%d\t%.3f\t%s\t%s\t%d, %d\t%.3f\t%s\n", cmp.Or(s.Engine, "all"), cmp.Or(string(s.Kind), "all"), s.Measure, s.Settings, s.Ratio, upper, where, s.Up, s.Down, s.P, verdict)
	}
	fmt.Fprintln(t)
	fmt.Fprintln(t, "engine\timage\tkind\trtt\trate\tmeasure\tpairs\tbefore\tafter\tafter/before\t95% interval\tverdict")
	left := 0
	for _, l := range r.Lines {
		if !all && (l.Verdict == Same || l.Verdict == Few) {
			left++
			continue
		}
		k := l.Key
		fmt.Fprintf(t, "%s\t%s\t%s\t%v\t%g Mbit/s\t%s\t%d\t%s\t%s\t%.3f\t%.3f to %.3f\t%s\n", k.Engine, k.Image, k.Kind, k.RTT.Round(time.Millisecond),
			float64(k.Rate)/1e6, l.Measure, l.Pairs, amount(l.Measure, l.Before), amount(l.Measure, l.After), l.Ratio, l.Low, l.High, l.Verdict)
	}
	if left > 0 {
		fmt.Fprintf(t, "\n%d more settings show no difference, or have too few runs to tell (--all lists them)\n", left)
	}
	if r.Unpaired > 0 {
		fmt.Fprintf(t, "\n%d runs have no partner in the other result, or failed there\n", r.Unpaired)
	}
	return t.Flush()
}

func amount(measure string, v float64) string {
	if measure == "memory" || strings.HasPrefix(measure, "bytes") {
		return fmt.Sprintf("%.2f MB", v/1e6)
	}
	return fmt.Sprintf("%.3f s", v)
}
