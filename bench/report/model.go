// Package report draws what a benchmark has measured: one HTML page that needs
// nothing else, the same figures as PNG files, and one JSON file with everything.
//
// The figures are those of the papers. Provisioning time against round-trip time,
// for each image and as normalised geometric means with 95% confidence intervals
// (Starlight, NSDI'22, figures 4 and 5); speed-ups over containerd as harmonic
// means (figure 4b); where the time of one start goes, and how much more is moved
// than is touched (FlacIO, FAST'25, table 1); and the line during one run.
//
// Every time is the median of a setting's runs. Runs that failed are in no
// figure: they are listed, with where their logs are.
package report

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"hydrofoil.dev/foil/bench/engines"
	"hydrofoil.dev/foil/bench/results"
	"hydrofoil.dev/foil/bench/stats"
)

// What engines are compared with: a full pull.
const baseline = "overlayfs"

// labels are what figures call engines.
var labels = map[string]string{
	"hydrofoil": "Hydrofoil", "overlayfs": "containerd", "erofs": "erofs", "stargz": "stargz", "soci": "SOCI", "starlight": "Starlight", "nydus": "Nydus",
	"hydrofoil-untraced": "Hydrofoil, untraced", "hydrofoil-unconnected": "Hydrofoil, unconnected", "hydrofoil-bare": "Hydrofoil, neither",
	"hydrofoil-containerd": "Hydrofoil, containerd", "hydrofoil-cri": "Hydrofoil, CRI", "hydrofoil-used": "Hydrofoil, used before", "hydrofoil-proving": "Hydrofoil, proven first", "overlayfs-cri": "containerd, CRI",
	"curl": "curl (layers)", "layers": "layers alone", "floor": "floor T*",
}

func label(engine string) string { return cmp.Or(labels[engine], engine) }

// cell is a setting: all repetitions of one run.
type cell struct {
	engine, image string
	kind          results.Kind
	rtt           time.Duration
	rate          int64
}

// model is a result, by setting.
type model struct {
	results.Everything
	runs   map[cell][]results.Run // that did not fail
	warm   map[cell][]float64     // warm starts in the rounds of a setting, in seconds
	failed []results.Run
	images map[string][]results.Image // by name without tag, its versions
	// engines that have runs, in the order of the matrix.
	engines []string
	rates   []int64 // of the matrix, and then those of single images
}

func newModel(all results.Everything) *model {
	m := &model{Everything: all, runs: map[cell][]results.Run{}, warm: map[cell][]float64{}, images: map[string][]results.Image{}}
	seen := map[string]bool{}
	for _, r := range all.Runs {
		if r.Err != "" {
			m.failed = append(m.failed, r)
			continue
		}
		c := cell{r.Engine, r.Image, r.Kind, r.RTT, r.Rate}
		m.runs[c] = append(m.runs[c], r)
		seen[r.Engine] = true
	}
	for _, w := range all.Warm {
		c := cell{"floor", w.Image, w.Kind, w.RTT, w.Rate}
		m.warm[c] = append(m.warm[c], w.Time.Seconds())
	}
	for _, e := range all.Matrix.Engines {
		if seen[e.Name] {
			m.engines = append(m.engines, e.Name)
		}
	}
	for _, im := range all.Images {
		name, _, _ := strings.Cut(im.Name, ":")
		m.images[name] = append(m.images[name], im)
	}
	slices.Sort(m.Matrix.RTTs)
	m.rates = slices.Clone(all.Matrix.Rates)
	for _, image := range all.Matrix.Images {
		for _, rate := range all.Matrix.ImageRates[image] {
			if !slices.Contains(m.rates, rate) {
				m.rates = append(m.rates, rate)
			}
		}
	}
	return m
}

// kinds are those that have runs.
func (m *model) kinds() (kinds []results.Kind) {
	for _, kind := range results.Kinds {
		for c := range m.runs {
			if c.kind == kind {
				kinds = append(kinds, kind)
				break
			}
		}
	}
	return kinds
}

// ready are the times to ready of a setting's runs, in seconds.
func (m *model) ready(c cell) (seconds []float64) {
	for _, r := range m.runs[c] {
		if p, ok := r.Marks[engines.Ready]; ok {
			seconds = append(seconds, p.Time.Seconds())
		}
	}
	return seconds
}

// longest is the longest wait of a read in any run of a setting, and how many reads waited
// longer than twice what they should have; false if no read waited, or nobody told.
func (m *model) longest(c cell) (w engines.Wait, over int64, ok bool) {
	for _, r := range m.runs[c] {
		one, told := r.LongestWait()
		if told && one.Took >= w.Took {
			w = one
		}
		ok, over = ok || told, over+r.Over
	}
	return w, over, ok
}

// waitText is a wait in seconds, and in parentheses what it should have been at most.
func waitText(w engines.Wait) string {
	if w.Bound == 0 {
		return fmt.Sprintf("%.2f s", w.Took.Seconds())
	}
	return fmt.Sprintf("%.2f s (%.2f)", w.Took.Seconds(), w.Bound.Seconds())
}

// version is the image that a run of a kind provisions.
func (m *model) version(image string, kind results.Kind) (results.Image, bool) {
	i := 0
	if kind == results.Update {
		i = 1
	}
	if i >= len(m.images[image]) {
		return results.Image{}, false
	}
	return m.images[image][i], true
}

// floor is T* of an image over a link, in seconds, with the median of the warm starts of
// that setting's rounds; NaN if it was not measured.
func (m *model) floor(image string, kind results.Kind, rtt time.Duration, rate int64) float64 {
	im, ok := m.version(image, kind)
	if !ok || im.Floor.Warm == 0 {
		return math.NaN()
	}
	f := im.Floor
	if warm := m.warm[cell{"floor", image, kind, rtt, rate}]; len(warm) > 0 {
		f.Warm = time.Duration(stats.Median(warm) * float64(time.Second))
	}
	return f.At(rtt, rate).Seconds()
}

// point is a median with an interval.
type point struct {
	x, y float64
	stats.Interval
}

// readyLine is time to ready against RTT (in ms), with the range of the runs.
func (m *model) readyLine(engine, image string, kind results.Kind, rate int64) (line []point) {
	for _, rtt := range m.Matrix.RTTs {
		x := float64(rtt.Milliseconds())
		if engine == "floor" || engine == "layers" {
			if y := m.value(cell{engine, image, kind, rtt, rate}); !math.IsNaN(y) {
				line = append(line, point{x, y, stats.Interval{Low: y, High: y}})
			}
			continue
		}
		if s := m.ready(cell{engine, image, kind, rtt, rate}); len(s) > 0 {
			line = append(line, point{x, stats.Median(s), stats.Interval{Low: slices.Min(s), High: slices.Max(s)}})
		}
	}
	return line
}

// norm is what times of an image are divided by: a fresh full pull at the
// shortest round-trip time of the matrix.
func (m *model) norm(image string, rate int64) float64 {
	for _, rtt := range m.Matrix.RTTs {
		if s := m.ready(cell{baseline, image, results.Fresh, rtt, rate}); len(s) > 0 {
			return stats.Median(s)
		}
	}
	return math.NaN()
}

// covers are the images that an engine ran at every one of some round-trip times,
// and of which a full pull can be compared with.
func (m *model) covers(engine string, kind results.Kind, rtts []time.Duration, rate int64) (images []string) {
	for _, image := range m.Matrix.Images {
		lacks := func(rtt time.Duration) bool {
			return len(m.ready(cell{baseline, image, results.Fresh, rtt, rate})) == 0 || len(m.ready(cell{engine, image, kind, rtt, rate})) == 0
		}
		if !slices.ContainsFunc(rtts, lacks) {
			images = append(images, image)
		}
	}
	return images
}

// group is engines of which means can be compared: they are over the same images
// and round-trip times.
type group struct {
	engines []string
	images  []string
	rtts    []time.Duration
}

// groups are, first, the engines that ran most images at all round-trip times, with
// those images; and then, if others ran fewer, all that ran any, with the images and
// the round-trip times at which each of them did.
func (m *model) groups(kind results.Kind, rate int64) (groups []group) {
	first := group{rtts: m.Matrix.RTTs}
	for _, e := range m.engines {
		ran := m.covers(e, kind, first.rtts, rate)
		switch {
		case len(ran) > len(first.images):
			first.engines, first.images = []string{e}, ran
		case len(ran) > 0 && slices.Equal(ran, first.images):
			first.engines = append(first.engines, e)
		}
	}
	if len(first.images) > 0 {
		groups = append(groups, first)
	}
	var all group
	for _, e := range m.engines {
		if slices.ContainsFunc(m.Matrix.RTTs, func(rtt time.Duration) bool {
			return len(m.covers(e, kind, []time.Duration{rtt}, rate)) > 0
		}) {
			all.engines = append(all.engines, e)
		}
	}
	if len(all.engines) <= len(first.engines) {
		return groups
	}
	// Round-trip times are taken one by one as long as that leaves an image, those
	// with most images first.
	common := func(rtts []time.Duration) []string {
		images := slices.Clone(m.Matrix.Images)
		for _, e := range all.engines {
			ran := m.covers(e, kind, rtts, rate)
			images = slices.DeleteFunc(images, func(image string) bool { return !slices.Contains(ran, image) })
		}
		return images
	}
	order := slices.Clone(m.Matrix.RTTs)
	slices.SortStableFunc(order, func(a, b time.Duration) int {
		return cmp.Compare(len(common([]time.Duration{b})), len(common([]time.Duration{a})))
	})
	for _, rtt := range order {
		if images := common(append(slices.Clone(all.rtts), rtt)); len(images) > 0 {
			all.rtts, all.images = append(all.rtts, rtt), images
		}
	}
	if slices.Sort(all.rtts); len(all.images) > 0 {
		groups = append(groups, all)
	}
	return groups
}

// layers is how long the compressed layers of an image take on the link alone, after
// one round trip, in seconds; NaN without a limit.
func (m *model) layers(image string, kind results.Kind, rtt time.Duration, rate int64) float64 {
	im, ok := m.version(image, kind)
	if !ok || rate == 0 {
		return math.NaN()
	}
	return rtt.Seconds() + float64(8*sum(im.Layers))/float64(rate)
}

// normalisedLine is the geometric mean over images of normalised time to ready,
// against RTT.
func (m *model) normalisedLine(engine string, images []string, kind results.Kind, rtts []time.Duration, rate int64) (line []point) {
	for _, rtt := range rtts {
		var values []float64
		for _, image := range images {
			own := m.value(cell{engine, image, kind, rtt, rate})
			if math.IsNaN(own) {
				return nil
			}
			values = append(values, own/m.norm(image, rate))
		}
		line = append(line, point{float64(rtt.Milliseconds()), stats.GeometricMean(values), stats.Bootstrap(values, stats.GeometricMean)})
	}
	return line
}

// speedup is the harmonic mean over images of how many times as fast as a fresh
// full pull over the same link an engine is.
func (m *model) speedup(engine string, images []string, kind results.Kind, rtt time.Duration, rate int64) (point, bool) {
	var values []float64
	for _, image := range images {
		full := stats.Median(m.ready(cell{baseline, image, results.Fresh, rtt, rate}))
		own := m.value(cell{engine, image, kind, rtt, rate})
		if math.IsNaN(full) || math.IsNaN(own) {
			return point{}, false
		}
		values = append(values, full/own)
	}
	if len(values) == 0 {
		return point{}, false
	}
	return point{float64(rtt.Milliseconds()), stats.HarmonicMean(values), stats.Bootstrap(values, stats.HarmonicMean)}, true
}

// middle is the run of a setting whose time to ready is the median, or next to it.
func (m *model) middle(c cell) (results.Run, bool) {
	runs := slices.Clone(m.runs[c])
	if len(runs) == 0 {
		return results.Run{}, false
	}
	slices.SortFunc(runs, func(a, b results.Run) int {
		return cmp.Compare(a.Marks[engines.Ready].Time, b.Marks[engines.Ready].Time)
	})
	return runs[(len(runs)-1)/2], true
}

// typicalRTT is that of figures that show only one: 150 ms, or the nearest.
func (m *model) typicalRTT() time.Duration {
	return slices.MinFunc(m.Matrix.RTTs, func(a, b time.Duration) int {
		return cmp.Compare((a - 150*time.Millisecond).Abs(), (b - 150*time.Millisecond).Abs())
	})
}

func rateText(rate int64) string {
	switch {
	case rate == 0:
		return "no limit"
	case rate >= 1e9:
		return fmt.Sprintf("%g Gbit/s", float64(rate)/1e9)
	}
	return fmt.Sprintf("%g Mbit/s", float64(rate)/1e6)
}
