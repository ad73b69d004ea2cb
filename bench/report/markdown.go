package report

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"hydrofoil.dev/foil/bench/engines"
	"hydrofoil.dev/foil/bench/results"
	"hydrofoil.dev/foil/bench/stats"
)

// outlier is the image whose tiny working set in many bytes dominates any mean:
// means are given with it and without.
const outlier = "python"

// Markdown writes a result as tables for a document: for each rate and kind, the
// time to ready of each image with each engine at each round-trip time, beside the
// floor T*, and means of it; then what failed. Only engines that are named count,
// or all if none is. It is the same for the same result.
func Markdown(all results.Everything, only ...string) (string, error) {
	m := newModel(all)
	columns := slices.DeleteFunc(slices.Clone(m.engines), func(e string) bool { return len(only) > 0 && !slices.Contains(only, e) })
	if len(columns) == 0 {
		return "", fmt.Errorf("bench: none of the engines %q has a run that did not fail: nothing to write", only)
	}
	var b strings.Builder
	v := view{model: m}
	fmt.Fprintf(&b, "`%s`; %s. Commit %s; Linux %s, %d cores (%s).\n", v.Command(), v.Settings(), m.Matrix.Commit, m.Matrix.Host.Kernel, m.Matrix.Host.Cores, m.Matrix.Host.CPU)
	if m.Matrix.Note != "" {
		fmt.Fprintf(&b, "\n%s\n", m.Matrix.Note)
	}
	for _, rate := range m.rates {
		for _, kind := range m.kinds() {
			m.markdownTable(&b, columns, kind, rate)
			m.markdownWaits(&b, columns, kind, rate)
		}
	}
	m.markdownFailures(&b, only)
	return b.String(), nil
}

// markdownTable writes the times of one kind at one rate, and means of them.
func (m *model) markdownTable(b *strings.Builder, columns []string, kind results.Kind, rate int64) {
	var rtts []string
	for _, rtt := range m.Matrix.RTTs {
		rtts = append(rtts, fmt.Sprint(rtt.Milliseconds()))
	}
	// Engines that are asked for at other rates only, and images, have no line.
	columns = slices.DeleteFunc(slices.Clone(columns), func(e string) bool {
		return !m.any(func(c cell) bool { return c.engine == e && c.kind == kind && c.rate == rate })
	})
	var images []string
	for _, image := range m.Matrix.Images {
		if m.any(func(c cell) bool { return c.image == image && c.kind == kind && c.rate == rate }) {
			images = append(images, image)
		}
	}
	if len(columns) == 0 || len(images) == 0 {
		return
	}
	fmt.Fprintf(b, "\n**%s, %s**: seconds from the command to ready at a round-trip time of %s ms, medians; means of the speed-up over a fresh full pull by containerd, with 95%% intervals (bootstrap over images).\n\n",
		m.kindText(kind), rateText(rate), strings.Join(rtts, " / "))
	row := func(cells ...string) { fmt.Fprintf(b, "| %s |\n", strings.Join(cells, " | ")) }
	header, rule := []string{"image (compressed)", `floor T\*`}, []string{"---", "---"}
	for _, e := range columns {
		header, rule = append(header, label(e)), append(rule, "---")
	}
	row(header...)
	row(rule...)
	for _, image := range images {
		name := image
		if im, ok := m.version(image, kind); ok {
			name = fmt.Sprintf("%s (%.0f MB)", image, float64(sum(im.Layers))/1e6)
		}
		cells := []string{name}
		for _, e := range append([]string{"floor"}, columns...) {
			var times []string
			for _, rtt := range m.Matrix.RTTs {
				times = append(times, m.markdownTime(cell{e, image, kind, rtt, rate}))
			}
			cells = append(cells, strings.Join(times, " / "))
		}
		row(cells...)
	}
	for _, means := range []struct {
		name, of string
		mean     func([]float64) float64
		value    func(c cell) float64
		unit     string
	}{
		{"speed-up", "harmonic mean", stats.HarmonicMean, m.speedupOf, "×"},
		{"speed-up", "geometric mean", stats.GeometricMean, m.speedupOf, "×"},
		{`multiple of T\*`, "geometric mean", stats.GeometricMean, m.multipleOf, ""},
	} {
		name := means.name + ", " + means.of
		if len(images) == 1 { // all means are the same
			if name = means.name; means.of == "geometric mean" && means.unit != "" {
				continue
			}
		}
		m.markdownMeans(row, name, images, columns, kind, rate, means.mean, means.value, means.unit)
		if without := slices.DeleteFunc(slices.Clone(images), func(image string) bool { return image == outlier }); len(without) > 0 && len(without) < len(images) {
			m.markdownMeans(row, name+", without "+outlier, without, columns, kind, rate, means.mean, means.value, means.unit)
		}
	}
	for _, what := range moved {
		m.markdownBytes(row, what.name, what.mark, columns, kind, rate)
	}
}

// kindText begins a heading.
func (m *model) kindText(kind results.Kind) string {
	switch kind {
	case results.Update:
		return "Update"
	case results.Resumed:
		return fmt.Sprintf("Fresh, all connections cut once after %.0f%% of the layers' bytes", 100*m.Matrix.Cut)
	}
	return "Fresh"
}

// markdownBytes writes a line of what came down the line until a moment, as a part of
// the layers: the median over images, at each round-trip time and over all.
func (m *model) markdownBytes(row func(...string), name string, at engines.Mark, columns []string, kind results.Kind, rate int64) {
	cells, known := []string{fmt.Sprintf("*bytes %s over the layers', median*", name), "–"}, false
	for _, e := range columns {
		var medians []string
		for _, rtt := range m.Matrix.RTTs {
			var parts []float64
			for _, image := range m.Matrix.Images {
				if v := m.part(cell{e, image, kind, rtt, rate}, at); !math.IsNaN(v) {
					parts = append(parts, v)
				}
			}
			if len(parts) == 0 {
				medians = append(medians, "–")
			} else {
				medians = append(medians, percent(stats.Median(parts)))
			}
		}
		text := strings.Join(medians, " / ")
		if all := m.parts(e, kind, rate, at); len(all) > 0 {
			known = true
			if len(medians) > 1 {
				text += fmt.Sprintf("; all **%s**", percent(stats.Median(all)))
			}
		}
		cells = append(cells, text)
	}
	if known {
		row(cells...)
	}
}

// markdownWaits writes the longest wait of a read of each setting, for the engines that tell.
func (m *model) markdownWaits(b *strings.Builder, columns []string, kind results.Kind, rate int64) {
	tells := func(e, image string) bool {
		return slices.ContainsFunc(m.Matrix.RTTs, func(rtt time.Duration) bool {
			_, _, ok := m.longest(cell{e, image, kind, rtt, rate})
			return ok
		})
	}
	var images []string
	for _, image := range m.Matrix.Images {
		if slices.ContainsFunc(columns, func(e string) bool { return tells(e, image) }) {
			images = append(images, image)
		}
	}
	columns = slices.DeleteFunc(slices.Clone(columns), func(e string) bool {
		return !slices.ContainsFunc(images, func(image string) bool { return tells(e, image) })
	})
	if len(images) == 0 {
		return
	}
	fmt.Fprintf(b, "\nThe longest wait of a read in any of these runs, in seconds, and what it should have been at most (in parentheses, where it is known):\n\n")
	fmt.Fprintf(b, "| image |")
	for _, e := range columns {
		fmt.Fprintf(b, " %s |", label(e))
	}
	fmt.Fprintf(b, "\n| --- |%s\n", strings.Repeat(" --- |", len(columns)))
	over, known := make([]int64, len(columns)), false
	for _, image := range images {
		fmt.Fprintf(b, "| %s |", image)
		for i, e := range columns {
			var waits []string
			for _, rtt := range m.Matrix.RTTs {
				w, n, ok := m.longest(cell{e, image, kind, rtt, rate})
				over[i] += n
				known = known || w.Bound > 0
				if !ok {
					waits = append(waits, "–")
				} else {
					waits = append(waits, strings.Replace(waitText(w), " s", "", 1))
				}
			}
			fmt.Fprintf(b, " %s |", strings.Join(waits, " / "))
		}
		fmt.Fprintln(b)
	}
	if !known {
		return
	}
	fmt.Fprintf(b, "| *reads that waited longer than twice that* |")
	for _, n := range over {
		fmt.Fprintf(b, " %d |", n)
	}
	fmt.Fprintln(b)
}

// any reports whether a run, failed or not, is of a setting.
func (m *model) any(of func(c cell) bool) bool {
	return slices.ContainsFunc(m.Runs, func(r results.Run) bool { return of(cell{r.Engine, r.Image, r.Kind, r.RTT, r.Rate}) })
}

// value is the median time to ready of a setting in seconds, or a reference that is
// computed; NaN if there is none.
func (m *model) value(c cell) float64 {
	switch c.engine {
	case "floor":
		return m.floor(c.image, c.kind, c.rtt, c.rate)
	case "layers":
		return m.layers(c.image, c.kind, c.rtt, c.rate)
	}
	return stats.Median(m.ready(c))
}

// speedupOf is how many times as fast as a fresh full pull over the same link a
// setting is.
func (m *model) speedupOf(c cell) float64 {
	return m.value(cell{baseline, c.image, results.Fresh, c.rtt, c.rate}) / m.value(c)
}

// multipleOf is a setting's time in terms of the floor.
func (m *model) multipleOf(c cell) float64 {
	return m.value(c) / m.value(cell{"floor", c.image, c.kind, c.rtt, c.rate})
}

// markdownTime is one time, as many digits as say something, and how many runs
// failed: all is "failed", and a setting without a run a dash.
func (m *model) markdownTime(c cell) string {
	failed := 0
	for _, r := range m.failed {
		if (cell{r.Engine, r.Image, r.Kind, r.RTT, r.Rate}) == c {
			failed++
		}
	}
	s := m.value(c)
	switch {
	case math.IsNaN(s) && failed > 0:
		return "failed"
	case math.IsNaN(s):
		return "–"
	case failed > 0:
		return fmt.Sprintf("%s (%d failed)", threeDigits(s), failed)
	}
	return threeDigits(s)
}

func threeDigits(v float64) string {
	switch {
	case v < 9.995:
		return fmt.Sprintf("%.2f", v)
	case v < 99.95:
		return fmt.Sprintf("%.1f", v)
	}
	return fmt.Sprintf("%.0f", v)
}

// markdownMeans writes a line of means over images, at each round-trip time and
// over all. An image counts where both it and what it is compared with have run;
// how many did is said where some did not.
func (m *model) markdownMeans(row func(...string), name string, images, columns []string, kind results.Kind, rate int64, mean func([]float64) float64, of func(cell) float64, unit string) {
	cells := []string{fmt.Sprintf("*%s*", name)}
	for _, e := range append([]string{"floor"}, columns...) {
		var at []string
		var everything []float64
		own := map[string][]float64{} // by image
		for _, rtt := range m.Matrix.RTTs {
			var values []float64
			for _, image := range images {
				if v := of(cell{e, image, kind, rtt, rate}); !math.IsNaN(v) && v > 0 {
					values, own[image] = append(values, v), append(own[image], v)
				}
			}
			everything = append(everything, values...)
			at = append(at, meanText(values, mean, unit, len(images)))
		}
		text := strings.Join(at, " / ")
		if len(at) > 1 && len(everything) > 0 {
			text += fmt.Sprintf("; all **%s%s**", threeDigits(mean(everything)), unit)
		}
		// Images are what is drawn from: one image's times at several round-trip
		// times say the same thing.
		var drawn []float64
		for _, image := range images {
			if len(own[image]) > 0 {
				drawn = append(drawn, mean(own[image]))
			}
		}
		if interval := stats.Bootstrap(drawn, mean); len(drawn) > 2 && interval.High > interval.Low {
			text += fmt.Sprintf(" (%s to %s)", threeDigits(interval.Low), threeDigits(interval.High))
		}
		cells = append(cells, text)
	}
	row(cells...)
}

func meanText(values []float64, mean func([]float64) float64, unit string, of int) string {
	if len(values) == 0 {
		return "–"
	}
	text := threeDigits(mean(values)) + unit
	if len(values) < of {
		text += fmt.Sprintf(" (%d of %d)", len(values), of)
	}
	return text
}

// markdownFailures lists runs that failed, engines that are absent, preparations
// that failed, and links that were not held.
func (m *model) markdownFailures(b *strings.Builder, only []string) {
	v := view{model: m}
	counts := func(e string) bool { return len(only) == 0 || slices.Contains(only, e) }
	var lines []string
	for _, e := range m.Matrix.Engines {
		if !counts(e.Name) {
			continue
		}
		for _, image := range m.Matrix.Images {
			for _, kind := range results.Kinds {
				for _, rate := range m.rates {
					lines = append(lines, m.markdownFailed(e.Name, image, kind, rate)...)
				}
			}
		}
	}
	for _, im := range m.Images {
		for _, e := range m.Matrix.Engines {
			if why, failed := im.PrepareErr[e.Name]; failed && counts(e.Name) {
				lines = append(lines, fmt.Sprintf("%s was not prepared for %s: %s", im.Name, label(e.Name), firstLine(why)))
			}
		}
	}
	for _, e := range m.Matrix.Engines {
		if e.Absent != "" && counts(e.Name) {
			lines = append(lines, fmt.Sprintf("%s is absent: %s", label(e.Name), firstLine(e.Absent)))
		}
	}
	for _, line := range v.BadLinks() {
		lines = append(lines, "the machine did not hold the link: "+line)
	}
	if len(lines) == 0 {
		fmt.Fprintf(b, "\nNo run failed.\n")
		return
	}
	fmt.Fprintf(b, "\nWhat failed, and is in no mean:\n\n")
	for _, line := range lines {
		fmt.Fprintf(b, "- %s\n", line)
	}
}

// markdownFailed says which runs failed of an engine with an image, a line for each
// way in which they did.
func (m *model) markdownFailed(engine, image string, kind results.Kind, rate int64) (lines []string) {
	runs := map[string]int{}
	rtts := map[string][]time.Duration{}
	for _, r := range m.failed {
		if r.Engine != engine || r.Image != image || r.Kind != kind || r.Rate != rate {
			continue
		}
		why := firstLine(r.Err)
		runs[why]++
		if !slices.Contains(rtts[why], r.RTT) {
			rtts[why] = append(rtts[why], r.RTT)
		}
	}
	for _, why := range slices.Sorted(maps.Keys(runs)) {
		var at []string
		for _, rtt := range slices.Sorted(slices.Values(rtts[why])) {
			at = append(at, fmt.Sprint(rtt.Milliseconds()))
		}
		count := "1 run"
		if runs[why] > 1 {
			count = fmt.Sprintf("%d runs", runs[why])
		}
		lines = append(lines, fmt.Sprintf("%s, %s, %s, %s: %s at %s ms: %s", label(engine), image, kind, rateText(rate), count, strings.Join(at, ", "), why))
	}
	return lines
}
