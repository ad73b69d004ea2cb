package report

import (
	"bytes"
	_ "embed"
	"encoding/json"
	"fmt"
	"html/template"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"hydrofoil.dev/foil/bench/engines"
	"hydrofoil.dev/foil/bench/link"
	"hydrofoil.dev/foil/bench/results"
	"hydrofoil.dev/foil/bench/stats"
)

//go:embed page.html
var pageText string

var pageTemplate = template.Must(template.New("page").Parse(pageText))

// Write draws a result directory: below out, index.html, results.json and a PNG
// for each figure.
func Write(from results.Dir, out string) (page string, err error) {
	all, err := from.Load()
	if err != nil {
		return "", err
	}
	html, figures, err := Render(all)
	if err != nil {
		return "", err
	}
	if err := os.MkdirAll(out, 0o755); err != nil {
		return "", fmt.Errorf("bench: %w", err)
	}
	text, err := json.Marshal(all)
	if err != nil {
		return "", fmt.Errorf("bench: %w", err)
	}
	files := map[string][]byte{"index.html": html, "results.json": text}
	for name, png := range figures {
		files[name+".png"] = png
	}
	for name, data := range files {
		if err := os.WriteFile(filepath.Join(out, name), data, 0o644); err != nil {
			return "", fmt.Errorf("bench: %w", err)
		}
	}
	return filepath.Join(out, "index.html"), nil
}

// Render draws a result: the page, and the figures as PNG by name.
func Render(all results.Everything) (html []byte, figures map[string][]byte, err error) {
	m := newModel(all)
	if len(m.runs) == 0 {
		return nil, nil, fmt.Errorf("bench: there is no run that did not fail: nothing to draw")
	}
	v := view{model: m}
	if v.Sections, err = m.sections(); err != nil {
		return nil, nil, err
	}
	for _, rate := range m.rates {
		v.Breakdowns = append(v.Breakdowns, m.breakdowns(rate)...)
	}
	figures = map[string][]byte{}
	for _, s := range v.Sections {
		for _, f := range s.Figures {
			figures[f.File] = f.PNG
		}
	}
	var b bytes.Buffer
	if err := pageTemplate.Execute(&b, &v); err != nil {
		return nil, nil, fmt.Errorf("bench: %w", err)
	}
	return b.Bytes(), figures, nil
}

// view is what the template shows.
type view struct {
	*model
	Sections   []section
	Breakdowns []breakdown
}

// Source is where everything on the page comes from.
func (v *view) Source() string {
	h := v.Matrix.Host
	return fmt.Sprintf("commit %s; Linux %s, %s, %d cores (%s), %.0f GiB; TCP %s; %s; by %s",
		v.Matrix.Commit, h.Kernel, h.Distribution, h.Cores, h.CPU, float64(h.Memory)/(1<<30), h.Congestion, v.Settings(), v.Command())
}

// Command is how the benchmark was called, each time.
func (v *view) Command() string {
	var commands []string
	for _, words := range append(slices.Clone(v.Matrix.Earlier), v.Matrix.Command) {
		if len(words) > 0 {
			words = slices.Clone(words)
			words[0] = filepath.Base(words[0])
			for i, word := range words {
				words[i] = quoted(word)
			}
		}
		commands = append(commands, strings.Join(words, " "))
	}
	return strings.Join(commands, "; then ")
}

// quoted is a word of a command as a shell reads it.
func quoted(word string) string {
	if word != "" && !strings.ContainsFunc(word, func(r rune) bool {
		return !strings.ContainsRune("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-+=,./:@%", r)
	}) {
		return word
	}
	return "'" + strings.ReplaceAll(word, "'", `'\''`) + "'"
}

// Settings are those of the matrix, in words.
func (v *view) Settings() string {
	var rtts, rates []string
	for _, rtt := range v.Matrix.RTTs {
		rtts = append(rtts, fmt.Sprint(rtt.Milliseconds()))
	}
	for _, rate := range v.Matrix.Rates {
		rates = append(rates, rateText(rate))
	}
	for _, image := range slices.Sorted(maps.Keys(v.Matrix.ImageRates)) {
		for _, rate := range v.Matrix.ImageRates[image] {
			rates = append(rates, image+" "+rateText(rate))
		}
	}
	runs := "1 run"
	if v.Matrix.Runs != 1 {
		runs = fmt.Sprintf("%d runs", v.Matrix.Runs)
	}
	load := "no load after ready"
	if v.Matrix.Load > 0 {
		load = fmt.Sprintf("%v of load after ready", v.Matrix.Load)
	}
	return fmt.Sprintf("%s, RTT %s ms, %s, page caches dropped, %s", strings.Join(rates, " and "), strings.Join(rtts, ", "), runs, load)
}

func (v *view) Began() string { return v.Matrix.Began.Format("2 January 2006, 15:04 MST") }

// headline is one sentence of what came out.
type headline struct{ Number, Text string }

func (v *view) Headlines() (lines []headline) {
	rate := v.Matrix.Rates[0]
	for _, kind := range v.kinds() {
		var values, floors []float64
		for _, image := range v.Matrix.Images {
			for _, rtt := range v.Matrix.RTTs {
				full := v.ready(cell{baseline, image, results.Fresh, rtt, rate})
				own := v.ready(cell{"hydrofoil", image, kind, rtt, rate})
				if len(full) > 0 && len(own) > 0 {
					values = append(values, stats.Median(full)/stats.Median(own))
				}
				if floor := v.floor(image, kind, rtt, rate); len(own) > 0 && floor > 0 {
					floors = append(floors, stats.Median(own)/floor)
				}
			}
		}
		if len(values) > 0 {
			lines = append(lines, headline{fmt.Sprintf("%.1f×", stats.HarmonicMean(values)),
				fmt.Sprintf("as fast as a full pull from nothing: %s, harmonic mean over images and round-trip times", kind)})
		}
		if len(floors) > 0 {
			lines = append(lines, headline{fmt.Sprintf("%.2f × T*", stats.GeometricMean(floors)),
				fmt.Sprintf("is the time to ready in terms of the floor: %s, geometric mean", kind)})
		}
		for _, what := range moved {
			if parts := v.parts("hydrofoil", kind, rate, what.mark); len(parts) > 0 {
				lines = append(lines, headline{percent(stats.Median(parts)),
					fmt.Sprintf("of the layers’ bytes came down the line %s: %s, median over images and round-trip times", what.name, kind)})
			}
		}
	}
	return lines
}

// moved are the moments at which bytes are told.
var moved = []struct {
	mark engines.Mark
	name string
}{{engines.Ready, "until ready"}, {engines.Quiet, "in all"}}

// part is what came down the line until a moment, as a part of the image's compressed
// layers: the median of a setting's runs; NaN if it is not known.
func (m *model) part(c cell, at engines.Mark) float64 {
	im, ok := m.version(c.image, c.kind)
	if !ok || len(im.Layers) == 0 {
		return math.NaN()
	}
	var parts []float64
	for _, r := range m.runs[c] {
		if p, marked := r.Marks[at]; marked {
			parts = append(parts, float64(p.Down)/float64(sum(im.Layers)))
		}
	}
	return stats.Median(parts)
}

// parts are those of an engine, over images and round-trip times.
func (m *model) parts(engine string, kind results.Kind, rate int64, at engines.Mark) (parts []float64) {
	for _, image := range m.Matrix.Images {
		for _, rtt := range m.Matrix.RTTs {
			if v := m.part(cell{engine, image, kind, rtt, rate}, at); !math.IsNaN(v) {
				parts = append(parts, v)
			}
		}
	}
	return parts
}

func percent(v float64) string { return fmt.Sprintf("%.3g%%", 100*v) }

// breakdown says where the time of one start goes, for each engine.
type breakdown struct {
	Title string
	Rows  []breakdownRow
}

type breakdownRow struct {
	Engine, Failed                                             string // why it has no figures
	Range                                                      string // of Total
	Complete                                                   string
	Deploy, Running, Ready, Total, OfFloor, Amplified, Packets string
	Written                                                    string
	// Until pulled and until ready.
	Connections, Requests, RoundTrips                              string
	Bytes, All, CPU, Memory, Disk, Waits, LoadRate, LoadP99, Count string
}

func (m *model) breakdowns(rate int64) (all []breakdown) {
	rtt := m.typicalRTT()
	for _, image := range m.Matrix.Images {
		for _, kind := range m.kinds() {
			b := breakdown{Title: fmt.Sprintf("%s, %s, %d ms, %s", image, kind, rtt.Milliseconds(), rateText(rate))}
			im, _ := m.version(image, kind)
			for _, e := range m.engines {
				c := cell{e, image, kind, rtt, rate}
				if len(m.ready(c)) > 0 {
					b.Rows = append(b.Rows, m.row(c, im))
				} else if r, ok := m.failure(c); ok {
					b.Rows = append(b.Rows, breakdownRow{Engine: label(e), Failed: "failed: " + firstLine(r.Err)})
				}
			}
			if len(b.Rows) > 0 {
				all = append(all, b)
			}
		}
	}
	return all
}

// failure is a run of a setting that failed.
func (m *model) failure(c cell) (results.Run, bool) {
	i := slices.IndexFunc(m.failed, func(r results.Run) bool {
		return c == cell{r.Engine, r.Image, r.Kind, r.RTT, r.Rate}
	})
	if i < 0 {
		return results.Run{}, false
	}
	return m.failed[i], true
}

// failedOf says which engines failed with an image, and at which round-trip times.
func (m *model) failedOf(image string, kind results.Kind, rate int64) string {
	var told []string
	for _, e := range m.Matrix.Engines {
		var at []string
		for _, rtt := range m.Matrix.RTTs {
			runs := 0
			for _, r := range m.failed {
				if r.Engine == e.Name && r.Image == image && r.Kind == kind && r.RTT == rtt && r.Rate == rate {
					runs++
				}
			}
			switch {
			case runs == 1:
				at = append(at, fmt.Sprint(rtt.Milliseconds()))
			case runs > 1:
				at = append(at, fmt.Sprintf("%d (%d runs)", rtt.Milliseconds(), runs))
			}
		}
		if len(at) > 0 {
			told = append(told, fmt.Sprintf("%s at %s ms", label(e.Name), strings.Join(at, ", ")))
		}
	}
	return strings.Join(told, "; ")
}

// row is the medians of a setting's runs.
func (m *model) row(c cell, im results.Image) breakdownRow {
	median := func(of func(r results.Run) float64) float64 {
		var values []float64
		for _, r := range m.runs[c] {
			values = append(values, of(r))
		}
		return stats.Median(values)
	}
	// Of runs that were stopped at ready nothing is known that ends later.
	stopped := slices.ContainsFunc(m.runs[c], func(r results.Run) bool { return r.Stopped })
	partly := ""
	if stopped {
		partly = " †"
	}
	at := func(mark engines.Mark) float64 {
		return median(func(r results.Run) float64 { return r.Marks[mark].Time.Seconds() })
	}
	r := breakdownRow{
		Engine: label(c.engine), Count: fmt.Sprint(len(m.runs[c])),
		Deploy: secs(at(engines.Pulled)), Running: secs(at(engines.Started) - at(engines.Pulled)),
		Ready: secs(at(engines.Ready) - at(engines.Started)), Total: secs(at(engines.Ready)),
		Range: "–", Complete: "–", All: "–", OfFloor: "–", Amplified: "–", Written: "–", Waits: "–", LoadRate: "–", LoadP99: "–", Memory: "–", Disk: "–",
		Packets: fmt.Sprintf("%.1f K", median(func(r results.Run) float64 {
			p := r.Marks[engines.Ready]
			return float64(p.DownPackets + p.UpPackets)
		})/1e3),
		CPU: secs(median(func(r results.Run) float64 { return r.CPU.Seconds() })) + partly,
	}
	// Until the pull has returned, and until ready.
	captured := func(of func(c link.Capture) int64) string {
		at := func(mark engines.Mark) float64 {
			return median(func(r results.Run) float64 { return float64(of(r.Marks[mark].Capture)) })
		}
		return fmt.Sprintf("%g, %g", at(engines.Pulled), at(engines.Ready))
	}
	if ready := m.ready(c); len(ready) > 1 {
		r.Range = fmt.Sprintf("%.2f to %.2f", slices.Min(ready), slices.Max(ready))
	}
	r.Connections, r.Requests, r.RoundTrips = "–", "–", "–"
	// Results from before these were counted have none.
	if median(func(r results.Run) float64 { return float64(r.Marks[engines.Ready].RoundTrips) }) > 0 {
		r.Connections = captured(func(c link.Capture) int64 { return c.Connections })
		r.Requests = captured(func(c link.Capture) int64 { return c.Requests })
		r.RoundTrips = captured(func(c link.Capture) int64 { return c.RoundTrips })
	}
	bytes := median(func(r results.Run) float64 { return float64(r.Marks[engines.Ready].Down) })
	r.Bytes = megs(bytes)
	if !stopped {
		r.All = megs(median(func(r results.Run) float64 { return float64(r.Marks[engines.Quiet].Down) }))
	}
	if complete := at(engines.Complete); complete > 0 && (!stopped) {
		r.Complete = secs(complete)
	}
	if floor := m.floor(c.image, c.kind, c.rtt, c.rate); floor > 0 {
		r.OfFloor = fmt.Sprintf("%.2f", at(engines.Ready)/floor)
	}
	if im.Floor.Touched > 0 {
		r.Amplified = fmt.Sprintf("%.2f", bytes/float64(im.Floor.Touched))
	}
	if written := median(func(r results.Run) float64 { return float64(r.ArenaReady) }); written > 0 && im.Floor.Touched > 0 {
		r.Written = fmt.Sprintf("%.2f", written/float64(im.Floor.Touched))
	}
	if memory := median(func(r results.Run) float64 { return float64(r.Memory) }); memory > 0 {
		r.Memory = megs(memory) + partly
	}
	if disk := median(func(r results.Run) float64 { return float64(r.Disk) }); disk > 0 {
		r.Disk = megs(disk)
	}
	if waits := median(func(r results.Run) float64 { return float64(r.Waits) }); waits > 0 {
		r.Waits = fmt.Sprintf("%.0f, %s", waits, secs(median(func(r results.Run) float64 { return r.Waited.Seconds() })))
	}
	if longest, _, ok := m.longest(c); ok {
		r.Waits += "; " + waitText(longest)
	}
	var rates, p99 []float64
	for _, run := range m.runs[c] {
		if run.Load != nil && run.Load.Err == "" {
			rates = append(rates, run.Load.Rate)
			if run.Load.P99 > 0 {
				p99 = append(p99, float64(run.Load.P99)/1e6)
			}
		}
	}
	if len(rates) > 0 {
		r.LoadRate = fmt.Sprintf("%.0f/s", stats.Median(rates))
	}
	if len(p99) > 0 {
		r.LoadP99 = fmt.Sprintf("%.1f ms", stats.Median(p99))
	}
	return r
}

func secs(s float64) string { return fmt.Sprintf("%.2f s", s) }
func megs(n float64) string { return fmt.Sprintf("%.1f MB", n/1e6) }

// preparation is what an engine asked for before an image could be pulled.
type preparation struct{ Image, Engine, What, Time, Storage string }

func (v *view) Preparations() (rows []preparation) {
	for _, im := range v.Images {
		for _, e := range v.Matrix.Engines {
			if why, failed := im.PrepareErr[e.Name]; failed {
				rows = append(rows, preparation{im.Name, label(e.Name), "failed: " + firstLine(why), "–", "–"})
				continue
			}
			p, ok := im.Prepared[e.Name]
			if !ok || p.Time == 0 && p.Storage == 0 {
				continue
			}
			rows = append(rows, preparation{im.Name, label(e.Name), p.What, secs(p.Time.Seconds()), megs(float64(p.Storage))})
		}
	}
	return rows
}

// floorRow is T* of an image.
type floorRow struct{ Image, Layers, Warm, Touched, Compressed string }

func (v *view) Floors() (rows []floorRow) {
	for _, im := range v.Images {
		if im.Floor.Warm == 0 {
			rows = append(rows, floorRow{im.Name, megs(float64(sum(im.Layers))), "not measured", firstLine(im.FloorErr), ""})
			continue
		}
		rows = append(rows, floorRow{im.Name, megs(float64(sum(im.Layers))), secs(im.Floor.Warm.Seconds()), megs(float64(im.Floor.Touched)), megs(float64(im.Floor.Compressed))})
	}
	return rows
}

// FailedRuns are those that are in no figure.
func (v *view) FailedRuns() (rows []string) {
	for _, r := range v.failed {
		rows = append(rows, fmt.Sprintf("%s: %s (logs/%s)", r.Key, firstLine(r.Err), r.Key))
	}
	return rows
}

// BadLinks are rounds at whose beginning the machine did not hold the link.
func (v *view) BadLinks() (rows []string) {
	for _, c := range v.Checks {
		if c.Err != "" {
			rows = append(rows, fmt.Sprintf("%d ms, %s, round %d (load average %.1f): %s", c.RTT.Milliseconds(), rateText(c.Rate), c.Rep, c.Load1, firstLine(c.Err)))
		}
	}
	return rows
}

// LateRuns are those during which the emulator was behind by more than 10 ms.
func (v *view) LateRuns() (n int) {
	for _, r := range v.Runs {
		if r.Late > 10*time.Millisecond {
			n++
		}
	}
	return n
}

// StolenRuns are those that had less of the processors than they should have.
func (v *view) StolenRuns() (n int) {
	for _, r := range v.Runs {
		if r.Stolen > results.MuchStolen {
			n++
		}
	}
	return n
}

// firstLine is the first line of an error, with the next one if that is what it
// announces.
func firstLine(text string) string {
	line, rest, _ := strings.Cut(strings.TrimSpace(text), "\n")
	line = strings.TrimSpace(line)
	if rest = strings.TrimSpace(rest); strings.HasSuffix(line, ":") && rest != "" {
		line += " " + firstLine(rest)
	}
	return line
}
