package report

import (
	"bytes"
	"fmt"
	"html/template"
	"image/color"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"

	"hydrofoil.dev/foil/bench/engines"
	"hydrofoil.dev/foil/bench/results"
	"hydrofoil.dev/foil/bench/stats"
	"hydrofoil.dev/foil/bench/workloads"
)

// figure is one drawing.
type figure struct {
	File    string // name of the PNG, without its ending
	Title   string
	Caption string
	Wide    bool // as wide as two others: it has many bars
	Log     bool // lines are drawn on a logarithmic axis if they are far apart
	Source  string
	SVG     template.HTML
	PNG     []byte
}

// figure is one that nothing has been drawn in.
func (m *model) figure(file, title string) figure {
	v := view{model: m}
	return figure{File: file, Title: title, Source: v.Source()}
}

// section is figures that belong together.
type section struct {
	ID, Title, Text string
	Figures         []figure
}

// Colours that people with any kind of sight tell apart (Okabe and Ito).
var colours = map[string]color.RGBA{
	"hydrofoil": {0, 114, 178, 255}, "overlayfs": {90, 90, 90, 255}, "erofs": {153, 112, 171, 255},
	"stargz": {213, 94, 0, 255}, "soci": {0, 158, 115, 255}, "nydus": {204, 121, 167, 255}, "starlight": {230, 159, 0, 255},
	"curl": {150, 150, 150, 255}, "layers": {150, 150, 150, 255}, "floor": {20, 20, 20, 255},
	"hydrofoil-untraced": {86, 180, 233, 255}, "hydrofoil-unconnected": {0, 60, 110, 255}, "hydrofoil-bare": {140, 160, 200, 255},
	"hydrofoil-containerd": {64, 176, 166, 255}, "hydrofoil-cri": {93, 58, 155, 255}, "hydrofoil-used": {40, 90, 70, 255}, "hydrofoil-proving": {120, 30, 30, 255}, "overlayfs-cri": {160, 120, 90, 255},
}

func colour(engine string) color.RGBA {
	if c, ok := colours[engine]; ok {
		return c
	}
	return color.RGBA{86, 180, 233, 255}
}

// Lines of references, which run nothing, are broken.
func dashes(engine string) []vg.Length {
	switch engine {
	case "floor":
		return []vg.Length{vg.Points(2), vg.Points(2)}
	case "curl", "layers":
		return []vg.Length{vg.Points(5), vg.Points(3)}
	}
	return nil
}

// line is a series of a figure.
type line struct {
	engine string
	points []point
}

// At this size text is readable on a phone, where a figure is as wide as the
// screen, and two fit beside each other on a desk.
const width, height = 5.2 * vg.Inch, 3.4 * vg.Inch

func newPlot(x, y string) *plot.Plot {
	p := plot.New()
	p.X.Label.Text, p.Y.Label.Text = x, y
	for _, style := range []*vg.Length{&p.X.Label.TextStyle.Font.Size, &p.Y.Label.TextStyle.Font.Size, &p.Legend.TextStyle.Font.Size} {
		*style = 12
	}
	p.X.Tick.Label.Font.Size, p.Y.Tick.Label.Font.Size = 11, 11
	for _, f := range []*font.Font{&p.X.Label.TextStyle.Font, &p.Y.Label.TextStyle.Font, &p.Legend.TextStyle.Font, &p.X.Tick.Label.Font, &p.Y.Tick.Label.Font} {
		f.Variant = "Sans"
	}
	p.Legend.Padding = vg.Points(1.5)
	p.Legend.ThumbnailWidth = vg.Points(22)
	p.Y.Min = 0
	p.X.Tick.Marker, p.Y.Tick.Marker = majors{}, majors{}
	grid := plotter.NewGrid()
	grid.Vertical.Width = 0
	grid.Horizontal.Color = color.Gray{220}
	p.Add(grid)
	return p
}

// key is what the legend of a figure says of one engine.
type key struct {
	text  string
	thumb plot.Thumbnailer
}

// compose draws a plot below its legend, which has three columns, or two if its
// texts are long: within the plot that of many engines would hide what they did.
func compose(c draw.Canvas, p *plot.Plot, keys []key) {
	across := c.Max.X - c.Min.X
	// A column is as wide as its longest text asks for.
	var widths []vg.Length
	var all vg.Length
	for _, columns := range []int{3, 2} {
		widths, all = make([]vg.Length, columns), 0
		for column := range columns {
			for i := column; i < len(keys); i += columns {
				widths[column] = max(widths[column], p.Legend.TextStyle.Width(keys[i].text))
			}
			// The page's reader may have a wider font than is measured here.
			widths[column] = 1.18*widths[column] + p.Legend.ThumbnailWidth + vg.Points(8)
			all += widths[column]
		}
		if all <= across {
			break
		}
	}
	columns := len(widths)
	// A legend of gonum's is as high as its letters, and so of rows that are not in
	// line with those of another: each key is one of its own.
	row := vg.Points(17)
	left := vg.Length(0)
	for column := range columns {
		if all > across {
			widths[column] *= across / all
		}
		for i := column; i < len(keys); i += columns {
			legend := plot.NewLegend()
			legend.TextStyle, legend.ThumbnailWidth = p.Legend.TextStyle, p.Legend.ThumbnailWidth
			legend.Top, legend.Left = true, true
			legend.Add(keys[i].text, keys[i].thumb)
			legend.Draw(draw.Crop(c, left, left+widths[column]-across, 0, -row*vg.Length(i/columns)))
		}
		left += widths[column]
	}
	rows := (len(keys) + columns - 1) / columns
	p.Draw(draw.Crop(c, 0, 0, 0, -row*vg.Length(rows)-vg.Points(3)))
}

// render draws a plot twice: for the page, and as a file.
func render(f figure, p *plot.Plot, keys []key) (figure, error) {
	width := width
	if f.Wide {
		width *= 2
	}
	svg := vgsvg.New(width, height)
	compose(margin(draw.New(svg)), p, keys)
	var page bytes.Buffer
	if _, err := svg.WriteTo(&page); err != nil {
		return f, fmt.Errorf("bench: draw %s: %w", f.File, err)
	}
	f.SVG = template.HTML(inline(page.String(), f.Title))
	var err error
	if f.PNG, err = file(f, p, keys, width); err != nil {
		return f, fmt.Errorf("bench: draw %s: %w", f.File, err)
	}
	return f, nil
}

func margin(c draw.Canvas) draw.Canvas {
	return draw.Crop(c, vg.Points(4), -vg.Points(8), vg.Points(4), -vg.Points(6))
}

var (
	svgSize = regexp.MustCompile(`<svg width="[^"]*" height="[^"]*"`)
	svgFont = regexp.MustCompile(`font-family:[^;"]*`)
)

// inline takes an SVG document apart for a page: no prologue, no size of its own,
// the page's font, and a name for those who do not see it.
func inline(svg, title string) string {
	if i := strings.Index(svg, "<svg"); i > 0 {
		svg = svg[i:]
	}
	svg = svgSize.ReplaceAllString(svg, `<svg role="img" aria-label="`+template.HTMLEscapeString(title)+`"`)
	return svgFont.ReplaceAllString(svg, "font-family:Liberation Sans,Arial,Helvetica,sans-serif")
}

// drawLines draws lines with bands between the ends of their intervals.
func drawLines(f figure, x, y string, lines []line) (figure, error) {
	p := newPlot(x, y)
	var keys []key
	top, bottom := 0.0, math.Inf(1)
	for _, l := range lines {
		c := colour(l.engine)
		var upper, lower plotter.XYs
		var middle plotter.XYs
		wide := false
		for _, pt := range l.points {
			middle = append(middle, plotter.XY{X: pt.x, Y: pt.y})
			upper = append(upper, plotter.XY{X: pt.x, Y: pt.High})
			lower = append(lower, plotter.XY{X: pt.x, Y: pt.Low})
			wide = wide || pt.High > pt.Low
			top, bottom = max(top, pt.High), min(bottom, pt.Low)
		}
		if wide && len(middle) > 1 {
			for i := len(lower) - 1; i >= 0; i-- {
				upper = append(upper, lower[i])
			}
			band, err := plotter.NewPolygon(upper)
			if err != nil {
				return f, fmt.Errorf("bench: draw %s: %w", f.File, err)
			}
			band.Color = color.NRGBA{c.R, c.G, c.B, 45}
			band.LineStyle.Width = 0
			p.Add(band)
		}
		drawn, dots, err := plotter.NewLinePoints(middle)
		if err != nil {
			return f, fmt.Errorf("bench: draw %s: %w", f.File, err)
		}
		drawn.Color, drawn.Width, drawn.Dashes = c, vg.Points(2), dashes(l.engine)
		dots.Color, dots.Shape, dots.Radius = c, draw.CircleGlyph{}, vg.Points(2.5)
		p.Add(drawn)
		if drawn.Dashes == nil || len(middle) == 1 {
			p.Add(dots)
		}
		keys = append(keys, key{label(l.engine), drawn})
	}
	p.X.Tick.Marker = marks(lines)
	if _, even := p.X.Tick.Marker.(majors); even {
		p.X.Min = 0
	}
	p.Y.Max = 1.08 * top
	if f.Log && bottom > 0 && top/bottom > apart {
		p.Y.Scale, p.Y.Tick.Marker = plot.LogScale{}, decades{}
		p.Y.Min, p.Y.Max = bottom/1.15, 1.15*top
	}
	return render(f, p, keys)
}

// marks are ticks where something was measured, if that was at whole numbers.
func marks(lines []line) plot.Ticker {
	var ticks plot.ConstantTicks
	for _, l := range lines {
		for _, pt := range l.points {
			if pt.x != math.Trunc(pt.x) {
				return majors{}
			}
			known := slices.ContainsFunc(ticks, func(t plot.Tick) bool { return t.Value == pt.x })
			if !known {
				ticks = append(ticks, plot.Tick{Value: pt.x, Label: fmt.Sprintf("%g", pt.x)})
			}
		}
	}
	return ticks
}

// majors are some five ticks at round numbers.
type majors struct{}

func (majors) Ticks(low, high float64) (ticks []plot.Tick) {
	span := high - low
	if !(span > 0) {
		return (plot.DefaultTicks{}).Ticks(low, high)
	}
	step := math.Pow(10, math.Floor(math.Log10(span)))
	for _, part := range []float64{0.1, 0.2, 0.25, 0.5, 1} {
		if span/(step*part) <= 6 {
			step *= part
			break
		}
	}
	for i := math.Ceil(low/step-1e-9) + 0; /* not -0 */ i*step <= high+1e-9*step; i++ {
		ticks = append(ticks, plot.Tick{Value: i * step, Label: strconv.FormatFloat(math.Round(i*step*1e6)/1e6, 'f', -1, 64)})
	}
	return ticks
}

// decades are ticks of a logarithmic axis, at 1, 2 and 5 times powers of ten; where
// that would crowd it, at 1 and 3.
type decades struct{}

func (decades) Ticks(low, high float64) (ticks []plot.Tick) {
	parts := []float64{1, 2, 5}
	if high/low > 1000 {
		parts = []float64{1, 3}
	}
	for power := math.Floor(math.Log10(low)); math.Pow(10, power) <= high; power++ {
		for _, part := range parts {
			if v := part * math.Pow(10, power); v >= low*0.999 && v <= high*1.001 {
				ticks = append(ticks, plot.Tick{Value: v, Label: strconv.FormatFloat(math.Round(v*1e6)/1e6, 'f', -1, 64)})
			}
		}
	}
	return ticks
}

// apart is how many times as high the highest lines are than the lowest from where
// on a linear axis would show the low ones as one.
const apart = 8

// drawBars draws groups of bars, a group for each name, a bar for each series.
func drawBars(f figure, y string, names []string, series []line) (figure, error) {
	p := newPlot("", y)
	p.X.Tick.Length = 0
	var keys []key
	f.Wide = len(names) > 6 || len(names)*len(series) > 30
	room := 250.0
	if f.Wide {
		room, p.X.Tick.Label.Font.Size = 620, 9.5
	}
	if len(names) > 10 {
		p.X.Tick.Label.Rotation, p.X.Tick.Label.XAlign, p.X.Tick.Label.YAlign = math.Pi/8, text.XRight, text.YCenter
	}
	barWidth := vg.Points(min(26, room/float64(max(1, len(names)*(len(series)+1)))))
	top := 0.0
	for i, s := range series {
		var values plotter.Values
		var points plotter.XYs
		var errs plotter.YErrors
		for j, pt := range s.points {
			if math.IsNaN(pt.y) {
				values = append(values, 0)
				continue
			}
			values = append(values, pt.y)
			if pt.High > pt.Low {
				points = append(points, plotter.XY{X: float64(j), Y: pt.y})
				errs = append(errs, struct{ Low, High float64 }{pt.y - pt.Low, pt.High - pt.y})
			}
			top = max(top, pt.y, pt.High)
		}
		bars, err := plotter.NewBarChart(values, barWidth)
		if err != nil {
			return f, fmt.Errorf("bench: draw %s: %w", f.File, err)
		}
		bars.Color, bars.LineStyle.Width = colour(s.engine), 0
		bars.Offset = barWidth * vg.Length(float64(i)-float64(len(series)-1)/2)
		p.Add(bars)
		keys = append(keys, key{label(s.engine), bars})
		if len(points) > 0 {
			whiskers, err := plotter.NewYErrorBars(struct {
				plotter.XYs
				plotter.YErrors
			}{points, errs})
			if err != nil {
				return f, fmt.Errorf("bench: draw %s: %w", f.File, err)
			}
			p.Add(shifted{whiskers, bars.Offset})
		}
	}
	p.NominalX(names...)
	p.X.Min, p.X.Max = -0.6, float64(len(names))-0.4
	p.Y.Max = 1.08 * max(top, 1e-9)
	return render(f, p, keys)
}

// shifted draws whiskers where the bars are that they belong to.
type shifted struct {
	plot.Plotter
	by vg.Length
}

func (s shifted) Plot(c draw.Canvas, p *plot.Plot) {
	c.Rectangle = c.Rectangle.Add(vg.Point{X: s.by})
	s.Plotter.Plot(c, p)
}

// withReferences are engines and what they are seen against: the floor, and how long
// the layers alone take, unless curl was asked.
func (m *model) withReferences(engines []string) []string {
	all := slices.Clone(engines)
	if !slices.Contains(all, "curl") {
		all = append(all, "layers")
	}
	return append(all, "floor")
}

// sections are all figures.
func (m *model) sections() (all []section, err error) {
	for _, rate := range m.rates {
		builds := []func(int64) (section, error){m.byImage, m.bytes, m.timelines, m.loads}
		if slices.Contains(m.Matrix.Rates, rate) { // else a mean would be over one image
			builds = append([]func(int64) (section, error){m.means, m.speedups}, builds...)
		}
		for _, build := range builds {
			s, err := build(rate)
			if err != nil {
				return nil, err
			}
			if len(s.Figures) > 0 {
				all = append(all, s)
			}
		}
	}
	return all, nil
}

func (m *model) means(rate int64) (s section, err error) {
	s = section{
		ID: fmt.Sprintf("means-%s", rateName(rate)), Title: "Normalised provisioning time, " + rateText(rate),
		Text: "Geometric mean over images of the time to ready, as a multiple of that of a fresh full pull of the same image at the shortest round-trip time. Bands are 95% confidence intervals (bootstrap over images). Lower is better. Engines in one figure ran the same images, at the same round-trip times. Axes are logarithmic where the highest is more than eight times the lowest.",
	}
	for _, kind := range m.kinds() {
		for i, g := range m.groups(kind, rate) {
			var lines []line
			for _, e := range m.withReferences(g.engines) {
				if points := m.normalisedLine(e, g.images, kind, g.rtts, rate); len(points) > 0 {
					lines = append(lines, line{e, points})
				}
			}
			f := m.figure("normalised-"+g.name(i, kind, rate), g.title("Normalised time", kind))
			f.Caption, f.Log = g.caption(), true
			if len(g.rtts) == 1 {
				f, err = drawBars(f, "normalised time", g.at(), lines)
			} else {
				f, err = drawLines(f, "round-trip time (ms)", "normalised time", lines)
			}
			if err != nil {
				return s, err
			}
			s.Figures = append(s.Figures, f)
		}
	}
	return s, nil
}

// name is that of the file of a mean over the images of the group with index i.
func (g group) name(i int, kind results.Kind, rate int64) string {
	name := fmt.Sprintf("%s-%s", kind, rateName(rate))
	if i > 0 {
		name += "-all-engines"
	}
	return name
}

func (g group) title(what string, kind results.Kind) string {
	if len(g.images) == 1 {
		return fmt.Sprintf("%s, %s, %s", what, kind, g.images[0])
	}
	return fmt.Sprintf("%s, %s, %d images", what, kind, len(g.images))
}

func (g group) caption() string { return "Images: " + strings.Join(g.images, ", ") + "." }

// at are the round-trip times, as bars are named.
func (g group) at() (names []string) {
	for _, rtt := range g.rtts {
		names = append(names, fmt.Sprintf("%d ms", rtt.Milliseconds()))
	}
	return names
}

func (m *model) speedups(rate int64) (s section, err error) {
	s = section{
		ID: fmt.Sprintf("speedups-%s", rateName(rate)), Title: "Speed-up over a full pull, " + rateText(rate),
		Text: "Harmonic mean over images of the time to ready of a fresh full pull by containerd, divided by the engine's, over the same link. Whiskers are 95% confidence intervals (bootstrap over images). Higher is better; T* is the most that can be had. Engines in one figure ran the same images.",
	}
	for _, kind := range m.kinds() {
		for i, g := range m.groups(kind, rate) {
			names := g.at()
			var series []line
			for _, e := range g.engines {
				if e == baseline && kind == results.Fresh {
					continue // 1, by definition
				}
				var points []point
				for _, rtt := range g.rtts {
					if p, ok := m.speedup(e, g.images, kind, rtt, rate); ok {
						points = append(points, p)
					}
				}
				series = append(series, line{e, points})
			}
			if len(series) == 0 {
				continue
			}
			var floors []string
			for i, rtt := range g.rtts {
				if p, ok := m.speedup("floor", g.images, kind, rtt, rate); ok {
					floors = append(floors, fmt.Sprintf("%s: %.1f", names[i], p.y))
				}
			}
			f := m.figure("speedup-"+g.name(i, kind, rate), g.title("Speed-up", kind))
			f.Caption = g.caption()
			if len(floors) > 0 {
				f.Caption += " T* would be " + strings.Join(floors, ", ") + "."
			}
			if f, err = drawBars(f, "times as fast", names, series); err != nil {
				return s, err
			}
			s.Figures = append(s.Figures, f)
		}
	}
	return s, nil
}

func (m *model) byImage(rate int64) (s section, err error) {
	s = section{
		ID: fmt.Sprintf("images-%s", rateName(rate)), Title: "Provisioning time by image, " + rateText(rate),
		Text: "Time from the command until the container is ready: the median of the runs; bands reach from the fastest to the slowest. T* is the floor: a warm start, one round trip, and the bytes that are touched before ready at the link's rate. Layers alone is what a plain download takes at least: one round trip, and the compressed layers at the link's rate. Where the slowest takes more than eight times as long as the fastest, the axis is logarithmic.",
	}
	for _, image := range m.Matrix.Images {
		for _, kind := range m.kinds() {
			var lines []line
			for _, e := range m.withReferences(m.engines) {
				if points := m.readyLine(e, image, kind, rate); len(points) > 0 {
					lines = append(lines, line{e, points})
				}
			}
			// References alone are no measurement.
			if !slices.ContainsFunc(lines, func(l line) bool { return slices.Contains(m.engines, l.engine) }) {
				continue
			}
			f := m.figure(fmt.Sprintf("time-%s-%s-%s", image, kind, rateName(rate)), fmt.Sprintf("%s, %s", image, kind))
			f.Log = true
			if im, ok := m.version(image, kind); ok {
				f.Caption = fmt.Sprintf("%s: %.0f MB in %d layers; ready when %s.", im.Name, megabytes(sum(im.Layers)), len(im.Layers), im.Probe)
			}
			if failed := m.failedOf(image, kind, rate); failed != "" {
				f.Caption += " Failed: " + failed + "."
			}
			if f, err = drawLines(f, "round-trip time (ms)", "time to ready (s)", lines); err != nil {
				return s, err
			}
			s.Figures = append(s.Figures, f)
		}
	}
	return s, nil
}

func (m *model) bytes(rate int64) (s section, err error) {
	rtt := m.typicalRTT()
	s = section{
		ID: fmt.Sprintf("bytes-%s", rateName(rate)), Title: fmt.Sprintf("Bytes moved, %s, %d ms", rateText(rate), rtt.Milliseconds()),
		Text: "What had come down the line, IP headers included, when the container was ready, and in all, as a part of the image's compressed layers.",
	}
	for _, kind := range m.kinds() {
		for _, what := range []struct {
			mark engines.Mark
			name string
		}{{engines.Ready, "until ready"}, {engines.Quiet, "in all"}} {
			var names []string
			series := make([]line, len(m.engines))
			for i, e := range m.engines {
				series[i].engine = e
			}
			for _, image := range m.Matrix.Images {
				im, ok := m.version(image, kind)
				if !ok {
					continue
				}
				points, found := make([]point, len(m.engines)), false
				for i, e := range m.engines {
					points[i].y = math.NaN()
					r, ok := m.middle(cell{e, image, kind, rtt, rate})
					if at, marked := r.Marks[what.mark]; ok && marked {
						points[i].y, found = float64(at.Down)/float64(sum(im.Layers)), true
					}
				}
				if !found {
					continue
				}
				names = append(names, image)
				for i := range series {
					series[i].points = append(series[i].points, points[i])
				}
			}
			// An engine of which nothing is known here has no place.
			series = slices.DeleteFunc(series, func(l line) bool {
				return !slices.ContainsFunc(l.points, func(p point) bool { return !math.IsNaN(p.y) })
			})
			if len(names) == 0 {
				continue
			}
			f := m.figure(fmt.Sprintf("bytes-%s-%s-%s", kind, what.mark, rateName(rate)), fmt.Sprintf("Bytes %s, %s", what.name, kind))
			if f, err = drawBars(f, "part of the layers", names, series); err != nil {
				return s, err
			}
			s.Figures = append(s.Figures, f)
		}
	}
	return s, nil
}

func (m *model) timelines(rate int64) (s section, err error) {
	rtt := m.typicalRTT()
	s = section{
		ID: fmt.Sprintf("timelines-%s", rateName(rate)), Title: fmt.Sprintf("The line during one run, %s, %d ms", rateText(rate), rtt.Milliseconds()),
		Text: "What has come down the line since the command, in the run whose time to ready is the median. Dots are when the container was ready; strokes across a line when the worker asked for something, counted from the packets: a new connection or request, which somebody may have waited for. Pale pieces of a line are when reads of the container waited, of engines that tell; the figure of such a start by itself has a bar for each read.",
	}
	for _, image := range m.Matrix.Images {
		for _, kind := range m.kinds() {
			f := m.figure(fmt.Sprintf("timeline-%s-%s-%s", image, kind, rateName(rate)), fmt.Sprintf("%s, %s", image, kind))
			var told []string
			p := newPlot("time since the command (s)", "megabytes")
			top := 0.0
			var slowest, last float64
			var keys []key // in the reverse order
			p.X.Min = 0
			// The first engine is drawn last: lines that are as fast as the link hide
			// each other.
			for _, e := range m.engines {
				if r, ok := m.middle(cell{e, image, kind, rtt, rate}); ok {
					slowest = max(slowest, r.Marks[engines.Ready].Time.Seconds())
					last = max(last, r.Marks[engines.Ready].Time.Seconds(), r.Marks[engines.Quiet].Time.Seconds())
				}
			}
			// What comes in the background long after the slowest start would hide
			// the starts.
			limit := min(last, 1.6*slowest)
			for _, e := range slices.Backward(m.engines) {
				r, ok := m.middle(cell{e, image, kind, rtt, rate})
				if !ok || len(r.Timeline) < 2 {
					continue
				}
				end := max(r.Marks[engines.Quiet].Time, r.Marks[engines.Ready].Time)
				var xys, asked plotter.XYs
				for i, pt := range r.Timeline {
					if i > 0 && pt.Time <= end && pt.Requests+pt.Connections > r.Timeline[i-1].Requests+r.Timeline[i-1].Connections {
						asked = append(asked, plotter.XY{X: pt.Time.Seconds(), Y: megabytes(pt.Down)})
					}
					if i == 0 || pt.Time <= end+100*time.Millisecond {
						xys = append(xys, plotter.XY{X: pt.Time.Seconds(), Y: megabytes(pt.Down)})
						if pt.Time.Seconds() <= limit {
							top = max(top, megabytes(pt.Down))
						}
					}
				}
				// The line is silent from its last point on.
				if final := xys[len(xys)-1]; final.X < end.Seconds() {
					xys = append(xys, plotter.XY{X: end.Seconds(), Y: final.Y})
				}
				l, err := plotter.NewLine(xys)
				if err != nil {
					return s, fmt.Errorf("bench: draw %s: %w", f.File, err)
				}
				l.Color, l.Width, l.Dashes = colour(e), vg.Points(1.8), dashes(e)
				for _, piece := range pieces(xys, merged(r.Reads, limit)) {
					pale, err := plotter.NewLine(piece)
					if err != nil {
						return s, fmt.Errorf("bench: draw %s: %w", f.File, err)
					}
					c := colour(e)
					pale.Color, pale.Width = color.NRGBA{c.R, c.G, c.B, 70}, vg.Points(9)
					p.Add(pale)
				}
				p.Add(l)
				if len(asked) > 0 {
					strokes, err := plotter.NewScatter(asked)
					if err != nil {
						return s, fmt.Errorf("bench: draw %s: %w", f.File, err)
					}
					strokes.Color, strokes.Shape, strokes.Radius = colour(e), stroke{}, vg.Points(5)
					p.Add(strokes)
				}
				ready := r.Marks[engines.Ready]
				dot, err := plotter.NewScatter(plotter.XYs{{X: ready.Time.Seconds(), Y: megabytes(ready.Down)}})
				if err != nil {
					return s, fmt.Errorf("bench: draw %s: %w", f.File, err)
				}
				dot.Color, dot.Shape, dot.Radius = colour(e), draw.CircleGlyph{}, vg.Points(4.5)
				p.Add(dot)
				keys = append(keys, key{label(e), l})
				if r.Waits > 0 {
					told = append(told, fmt.Sprintf("%s: %d reads waited %.2f s in sum before it was ready.", label(e), r.Waits, r.Waited.Seconds()))
				}
				if w, ok := r.LongestWait(); ok {
					told = append(told, fmt.Sprintf("%s: the longest wait of a read was %s.", label(e), waitText(w)))
				}
			}
			if len(keys) == 0 {
				continue
			}
			slices.Reverse(keys)
			p.X.Max = limit
			p.Y.Max = 1.08 * top
			f.Caption = strings.Join(told, " ")
			if f, err = render(f, p, keys); err != nil {
				return s, err
			}
			s.Figures = append(s.Figures, f)
			for _, e := range m.engines {
				r, ok := m.middle(cell{e, image, kind, rtt, rate})
				if !ok || len(before(r.Reads, r.Marks[engines.Ready].Time)) == 0 || len(r.Timeline) < 2 {
					continue
				}
				f := m.figure(fmt.Sprintf("start-%s-%s-%s", image, kind, rateName(rate)), fmt.Sprintf("%s, %s: one start with %s", image, kind, label(e)))
				if f, err = drawStart(f, e, r); err != nil {
					return s, err
				}
				s.Figures = append(s.Figures, f)
				break
			}
		}
	}
	return s, nil
}

// stroke is a short upright line.
type stroke struct{}

func (stroke) DrawGlyph(c *draw.Canvas, style draw.GlyphStyle, at vg.Point) {
	c.StrokeLine2(draw.LineStyle{Color: style.Color, Width: vg.Points(1)}, at.X, at.Y-style.Radius, at.X, at.Y+style.Radius)
}

// loads are what servers did under load, second by second.
func (m *model) loads(rate int64) (s section, err error) {
	rtt := m.typicalRTT()
	s = section{
		ID: fmt.Sprintf("loads-%s", rateName(rate)), Title: fmt.Sprintf("Under load just after ready, %s, %d ms", rateText(rate), rtt.Milliseconds()),
		Text: "What a server did in each second since it was ready, while the rest of its image may still have been arriving, in the run whose time to ready is the median. The load comes from the worker itself.",
	}
	for _, image := range m.Matrix.Images {
		for _, kind := range m.kinds() {
			for _, what := range []struct {
				name, axis string
				of         func(second workloads.Second) float64
			}{
				{"throughput", "operations a second", func(second workloads.Second) float64 { return second.Rate }},
				{"latency", "average latency (ms)", func(second workloads.Second) float64 { return float64(second.Average) / 1e6 }},
			} {
				var lines []line
				var tool string
				for _, e := range m.engines {
					r, ok := m.middle(cell{e, image, kind, rtt, rate})
					if !ok || r.Load == nil || len(r.Load.Seconds) < 2 {
						continue
					}
					tool = r.Load.Tool
					l := line{engine: e}
					for _, second := range r.Load.Seconds {
						y := what.of(second)
						l.points = append(l.points, point{second.End.Seconds(), y, stats.Interval{Low: y, High: y}})
					}
					lines = append(lines, l)
				}
				if len(lines) == 0 {
					continue
				}
				f := m.figure(fmt.Sprintf("load-%s-%s-%s-%s", what.name, image, kind, rateName(rate)), fmt.Sprintf("%s, %s: %s", image, kind, what.name))
				f.Caption = "By " + tool + "."
				if f, err = drawLines(f, "time since ready (s)", what.axis, lines); err != nil {
					return s, err
				}
				s.Figures = append(s.Figures, f)
			}
		}
	}
	return s, nil
}

// rateName is a rate in names of files.
func rateName(rate int64) string {
	return strings.NewReplacer(" ", "", "/s", "").Replace(strings.ToLower(rateText(rate)))
}

func megabytes(n int64) float64 { return float64(n) / 1e6 }

func sum(x []int64) (n int64) {
	for _, v := range x {
		n += v
	}
	return n
}
