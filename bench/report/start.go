package report

import (
	"cmp"
	"fmt"
	"image/color"
	"math"
	"slices"
	"time"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"

	"hydrofoil.dev/foil/bench/engines"
	"hydrofoil.dev/foil/bench/results"
)

// Colours of reads that waited: for what may be in the startup set, which was still
// coming, and for what is in none.
var (
	comingColour  = color.RGBA{86, 180, 233, 255}
	unknownColour = color.RGBA{213, 94, 0, 255}
)

// before are the reads that began before a moment.
func before(reads []engines.Read, at time.Duration) (early []engines.Read) {
	for _, r := range reads {
		if r.Began < at {
			early = append(early, r)
		}
	}
	return early
}

// span is a time, in seconds.
type span struct{ from, to float64 }

func spanOf(r engines.Read) span { return span{r.Began.Seconds(), (r.Began + r.Took).Seconds()} }

// merged is when any read waited, in order, up to a limit.
func merged(reads []engines.Read, limit float64) (spans []span) {
	all := make([]span, 0, len(reads))
	for _, r := range reads {
		if s := spanOf(r); s.from < limit {
			all = append(all, span{s.from, min(s.to, limit)})
		}
	}
	slices.SortFunc(all, func(a, b span) int { return cmp.Compare(a.from, b.from) })
	for _, s := range all {
		if n := len(spans); n > 0 && s.from <= spans[n-1].to {
			spans[n-1].to = max(spans[n-1].to, s.to)
			continue
		}
		spans = append(spans, s)
	}
	return spans
}

// pieces cuts out of a line, whose points are in the order of X, what lies in spans.
func pieces(line plotter.XYs, spans []span) (cut []plotter.XYs) {
	for _, s := range spans {
		piece := plotter.XYs{{X: s.from, Y: heightAt(line, s.from)}}
		for _, pt := range line {
			if pt.X > s.from && pt.X < s.to {
				piece = append(piece, pt)
			}
		}
		cut = append(cut, append(piece, plotter.XY{X: s.to, Y: heightAt(line, s.to)}))
	}
	return cut
}

// heightAt is where a line is at x; beyond its ends, where it ends.
func heightAt(line plotter.XYs, x float64) float64 {
	i, _ := slices.BinarySearchFunc(line, x, func(p plotter.XY, x float64) int { return cmp.Compare(p.X, x) })
	switch {
	case i == 0:
		return line[0].Y
	case i == len(line):
		return line[i-1].Y
	}
	a, b := line[i-1], line[i]
	return a.Y + (b.Y-a.Y)*(x-a.X)/(b.X-a.X)
}

// least is how many lanes there are at least: reads that wait one after the other
// look like one in a single lane.
const least = 6

// lanes puts spans, in the order of their beginning, in one lane after the other, so
// that none lies over another: the lane of each, and how many there are.
func lanes(spans []span) (lane []int, n int) {
	free := make([]float64, least) // when each lane is
	for i := range free {
		free[i] = math.Inf(-1)
	}
	last := -1
	for _, s := range spans {
		next := -1
		for step := 1; step <= len(free); step++ {
			if i := (last + step) % len(free); free[i] <= s.from {
				next = i
				break
			}
		}
		if next < 0 {
			next = len(free)
			free = append(free, 0)
		}
		free[next], last = s.to, next
		lane = append(lane, next)
	}
	return lane, len(free)
}

// bars draws reads that waited, each from its beginning to its end, in the upper part
// of a plot.
type bars struct {
	reads []engines.Read // in the order of their beginning
	part  float64        // of the plot's height
}

func (b bars) Plot(c draw.Canvas, p *plot.Plot) {
	x, _ := p.Transforms(&c)
	spans := make([]span, len(b.reads))
	for i, r := range b.reads {
		spans[i] = spanOf(r)
	}
	lane, n := lanes(spans)
	high := vg.Length(b.part) * (c.Max.Y - c.Min.Y)
	step := high / vg.Length(n)
	for i, r := range b.reads {
		left, right := x(spans[i].from), min(x(spans[i].to), c.Max.X)
		right = max(right, left+vg.Points(1.2)) // a short wait can be seen, too
		top := c.Max.Y - vg.Length(lane[i])*step
		c.FillPolygon(readColour(r), []vg.Point{{X: left, Y: top}, {X: right, Y: top}, {X: right, Y: top - 0.8*step}, {X: left, Y: top - 0.8*step}})
	}
}

func readColour(r engines.Read) color.Color {
	if r.Planned {
		return unknownColour
	}
	return comingColour
}

// swatch is a bar in a legend.
type swatch struct{ color.Color }

func (s swatch) Thumbnail(c *draw.Canvas) {
	middle, half := (c.Min.Y+c.Max.Y)/2, vg.Points(3)
	c.FillPolygon(s.Color, []vg.Point{{X: c.Min.X, Y: middle - half}, {X: c.Max.X, Y: middle - half}, {X: c.Max.X, Y: middle + half}, {X: c.Min.X, Y: middle + half}})
}

// upright is a line from the bottom of a plot to its top.
type upright struct {
	at    float64
	style draw.LineStyle
}

func (u upright) Plot(c draw.Canvas, p *plot.Plot) {
	x, _ := p.Transforms(&c)
	c.StrokeLine2(u.style, x(u.at), c.Min.Y, x(u.at), c.Max.Y)
}

func (u upright) Thumbnail(c *draw.Canvas) {
	middle := (c.Min.X + c.Max.X) / 2
	c.StrokeLine2(u.style, middle, c.Min.Y, middle, c.Max.Y)
}

// drawStart draws one start by itself, from the command until soon after ready: what
// came down the line, each read that waited, and the moments.
func drawStart(f figure, engine string, r results.Run) (figure, error) {
	p := newPlot("time since the command (s)", "megabytes")
	ready := r.Marks[engines.Ready].Time
	p.X.Min, p.X.Max = 0, 1.12*ready.Seconds()
	var line plotter.XYs
	for _, pt := range r.Timeline {
		line = append(line, plotter.XY{X: pt.Time.Seconds(), Y: megabytes(pt.Down)})
		if pt.Time.Seconds() > p.X.Max {
			break
		}
	}
	const part = 0.3 // of the height, for the reads
	top := max(heightAt(line, p.X.Max), 0.01)
	p.Y.Max = 1.1 * top / (1 - part)
	l, err := plotter.NewLine(line)
	if err != nil {
		return f, fmt.Errorf("bench: draw %s: %w", f.File, err)
	}
	l.Color, l.Width = colour(engine), vg.Points(2)
	keys := []key{{"bytes", l}}
	for _, moment := range []struct {
		mark   engines.Mark
		dashes []vg.Length
		width  vg.Length
	}{
		{engines.Pulled, []vg.Length{vg.Points(1.5), vg.Points(2.5)}, vg.Points(1)},
		{engines.Started, []vg.Length{vg.Points(5), vg.Points(3)}, vg.Points(1)},
		{engines.Ready, nil, vg.Points(1.6)},
	} {
		if at, ok := r.Marks[moment.mark]; ok {
			u := upright{at.Time.Seconds(), draw.LineStyle{Color: color.Gray{60}, Width: moment.width, Dashes: moment.dashes}}
			p.Add(u)
			keys = append(keys, key{string(moment.mark), u})
		}
	}
	reads := slices.SortedFunc(slices.Values(before(r.Reads, time.Duration(p.X.Max*float64(time.Second)))), func(a, b engines.Read) int { return cmp.Compare(a.Began, b.Began) })
	p.Add(l, bars{reads, part})
	for _, planned := range []bool{false, true} {
		i := slices.IndexFunc(reads, func(r engines.Read) bool { return r.Planned == planned })
		if i < 0 {
			continue
		}
		text := "waits: set coming"
		if planned {
			text = "waits: in no set"
		}
		keys = append(keys, key{text, swatch{readColour(reads[i])}})
	}
	f.Caption = told(r, reads)
	return render(f, p, keys)
}

// told says what waited.
func told(r results.Run, reads []engines.Read) string {
	longest := slices.MaxFunc(reads, func(a, b engines.Read) int { return cmp.Compare(a.Took, b.Took) })
	what := "something"
	if longest.Path != "" {
		what = fmt.Sprintf("page %d of %s", longest.Page, longest.Path)
		if longest.Pages > 1 {
			what = fmt.Sprintf("pages %d to %d of %s", longest.Page, longest.Page+longest.Pages-1, longest.Path)
		}
	}
	return fmt.Sprintf("The bars at the top are reads of the container that waited, each from its beginning to its end: %d in %.2f s until ready. The longest waited %.2f s, from %.2f s on, for %s.",
		r.Waits, r.Waited.Seconds(), longest.Took.Seconds(), longest.Began.Seconds(), what)
}
