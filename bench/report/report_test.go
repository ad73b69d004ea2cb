package report

import (
	"bytes"
	"flag"
	"image/png"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"gonum.org/v1/plot"

	"hydrofoil.dev/foil/bench/engines"
	"hydrofoil.dev/foil/bench/link"
	"hydrofoil.dev/foil/bench/results"
	"hydrofoil.dev/foil/bench/workloads"
)

var update = flag.Bool("update", false, "write the golden files")

// made is a result of two images, three engines, one that is absent and one that ran
// only one of the images, and was stopped at ready; with failed runs and one link
// that was not held. It was made by two commands.
func made() results.Everything {
	all := results.Everything{Matrix: results.Matrix{
		Format: results.Format, Command: []string{"/somewhere/bench", "run", "--images", "redis,python"}, Earlier: [][]string{{"bench", "run"}}, Commit: "0123abc",
		Began: time.Date(2026, 11, 21, 20, 0, 0, 0, time.UTC), Images: []string{"redis", "python"}, Runs: 3,
		Host: results.Host{Kernel: "6.18.0", Distribution: "Debian GNU/Linux 12", CPU: "EPYC", Cores: 2, Memory: 24 << 30, Congestion: "bbr"},
		RTTs: []time.Duration{0, 150 * time.Millisecond}, Rates: []int64{1e8}, Note: "The machine was <busy>.",
		Engines: []results.EngineInfo{
			{Name: "hydrofoil", Version: "foil v1"}, {Name: "overlayfs", Version: "containerd 1.6.20"},
			{Name: "nydus", Version: "nydusd v2"}, {Name: "curl", Version: "curl 7"}, {Name: "stargz", Absent: "containerd-stargz-grpc is not on PATH"},
		},
	}}
	for _, name := range all.Matrix.Images {
		for _, tag := range []string{"1", "2"} {
			all.Images = append(all.Images, results.Image{
				Name: name + ":" + tag, Layers: []int64{30e6, 6e6}, Probe: "tcp:6379",
				Floor:    engines.Floor{Warm: 100 * time.Millisecond, Touched: 6e6, Compressed: 2e6},
				Prepared: map[string]engines.Preparation{"hydrofoil": {What: "ingested", Time: time.Second, Storage: 7e6}, "overlayfs": {What: "none"}},
			})
		}
	}
	all.Checks = []results.Check{{RTT: 150 * time.Millisecond, Rate: 1e8, Rep: 2, Load1: 7, Measured: "too slow", Err: "link: 40.0 Mbit/s instead of 100"}}
	seconds := map[string]float64{"hydrofoil": 0.5, "overlayfs": 5, "nydus": 2, "curl": 3}
	for _, image := range all.Matrix.Images {
		for _, kind := range []results.Kind{results.Fresh, results.Update} {
			for _, rtt := range all.Matrix.RTTs {
				for engine, base := range seconds {
					for rep := 1; rep <= 3; rep++ {
						ready := time.Duration((base + 4*rtt.Seconds() + 0.1*float64(rep)) * 1e9)
						r := results.Run{Key: results.Key{Engine: engine, Image: image, Kind: kind, RTT: rtt, Rate: 1e8, Rep: rep}}
						r.Marks = map[engines.Mark]engines.Point{
							engines.Pulled: {Time: ready / 2}, engines.Started: {Time: ready * 3 / 4},
							engines.Ready:    {Time: ready, Down: 9e6, DownPackets: 6000, UpPackets: 400},
							engines.Complete: {Time: 2 * ready, Down: 36e6}, engines.Quiet: {Time: 2 * ready, Down: 36e6},
						}
						r.Timeline = []engines.Point{{}, {Time: ready, Down: 9e6}, {Time: 2 * ready, Down: 36e6}}
						r.CPU, r.Memory, r.Disk = time.Second, 40e6, 100e6
						if engine == "hydrofoil" {
							for mark, c := range map[engines.Mark]link.Capture{engines.Pulled: {Requests: 1, RoundTrips: 1}, engines.Ready: {Requests: 3, RoundTrips: 2}} {
								p := r.Marks[mark]
								p.Capture = c
								r.Marks[mark] = p
							}
							r.Waits, r.Waited, r.ArenaReady = 7, 300*time.Millisecond, 15e6
							if kind == results.Update {
								r.Longest, r.Over = &engines.Wait{Took: time.Second, Bound: 400 * time.Millisecond}, 2
							}
							r.Reads = []engines.Read{
								{Began: ready / 3, Took: 80 * time.Millisecond, Path: "/usr/bin/redis-server", Page: 7, Pages: 2},
								{Began: ready / 2, Took: 150 * time.Millisecond, Path: "/usr/lib/<libc>.so.6", Page: 3, Pages: 1, Planned: true},
								{Began: ready/2 + 10*time.Millisecond, Took: 70 * time.Millisecond, Pages: 1, Planned: true},
								{Began: 2 * ready, Took: time.Second, Path: "/late", Pages: 1, Planned: true},
							}
							r.Load = &workloads.Load{Tool: "redis-benchmark", Rate: 20000, P99: 2 * time.Millisecond, Seconds: []workloads.Second{{End: time.Second, Rate: 15000, Average: time.Millisecond}, {End: 2 * time.Second, Rate: 25000, Average: 500 * time.Microsecond}}}
						}
						if engine == "nydus" {
							delete(r.Marks, engines.Complete)
							delete(r.Marks, engines.Quiet)
							r.Stopped, r.Disk = true, 0
							if image == "python" {
								r.Outcome, r.Err = engines.Outcome{}, "nydusd has not mounted it"
							}
						}
						all.Runs = append(all.Runs, r)
					}
				}
			}
		}
	}
	all.Runs = append(all.Runs, results.Run{Key: results.Key{Engine: "overlayfs", Image: "python", Kind: results.Update, Rate: 1e8, Rep: 4}, Err: "it did not start\nat all", Stolen: 0.3})
	return all
}

var (
	drawing = regexp.MustCompile(`(?s)<svg.*?</svg>`)
	style   = regexp.MustCompile(`(?s)<style>.*?</style>`)
	tag     = regexp.MustCompile(`<[^>]*>`)
	row     = regexp.MustCompile(`</t[dh]>`)
	blank   = regexp.MustCompile(`[ \t]+`)
)

// visible is what a reader sees of a page, line by line, without the drawings.
func visible(html []byte) string {
	s := drawing.ReplaceAllString(string(html), "[drawing]")
	s = tag.ReplaceAllString(row.ReplaceAllString(style.ReplaceAllString(s, ""), " | "), "")
	var lines []string
	for line := range strings.Lines(s) {
		if line = strings.TrimSpace(blank.ReplaceAllString(line, " ")); line != "" {
			lines = append(lines, line)
		}
	}
	return strings.Join(lines, "\n") + "\n"
}

func TestPage(t *testing.T) {
	html, figures, err := Render(made())
	if err != nil {
		t.Fatal(err)
	}
	golden := filepath.Join("testdata", "page.txt")
	if *update {
		if err := os.WriteFile(golden, []byte(visible(html)), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(strings.Split(string(want), "\n"), strings.Split(visible(html), "\n")); diff != "" {
		t.Errorf("page (-want +got; -update writes it anew):\n%s", diff)
	}
	// It needs no other file, and no network.
	for _, outside := range []string{"src=", "<link", "@import", "url(", "<script"} {
		if bytes.Contains(html, []byte(outside)) {
			t.Errorf("the page holds %q", outside)
		}
	}
	if got := bytes.Count(html, []byte("<svg role")); got != len(figures) || got < 10 {
		t.Errorf("%d drawings and %d files", got, len(figures))
	}
	for name, file := range figures {
		img, err := png.Decode(bytes.NewReader(file))
		if err != nil {
			t.Errorf("%s: %v", name, err)
		} else if img.Bounds().Dx() < 900 {
			t.Errorf("%s: only %d pixels wide", name, img.Bounds().Dx())
		}
		// A file tells by itself where it comes from.
		for _, want := range []string{"iTXtTitle\x00", "iTXtSource\x00", "commit 0123abc", "Linux 6.18.0", "bench run --images redis,python"} {
			if !bytes.Contains(file, []byte(want)) {
				t.Errorf("%s.png does not say %q", name, want)
			}
		}
	}
	if _, err := describe([]byte("GIF89a"), "Title", "a"); err == nil {
		t.Error("something else than a PNG file was described")
	}
}

func TestWrite(t *testing.T) {
	dir := results.Dir(t.TempDir())
	all := made()
	if err := dir.PutMatrix(all.Matrix); err != nil {
		t.Fatal(err)
	}
	for _, r := range all.Runs {
		if err := dir.PutRun(r); err != nil {
			t.Fatal(err)
		}
	}
	// Without images there is no floor, and still a page.
	page, err := Write(dir, filepath.Join(t.TempDir(), "report"))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"index.html", "results.json", "normalised-fresh-100mbit.png"} {
		if info, err := os.Stat(filepath.Join(filepath.Dir(page), name)); err != nil || info.Size() < 1000 {
			t.Errorf("%s: %v, %v", name, info, err)
		}
	}
	if _, _, err := Render(results.Everything{}); err == nil {
		t.Error("nothing was drawn without an error")
	}
}

// The means are those that the text promises.
func TestMeans(t *testing.T) {
	all := made()
	m := newModel(all)
	groups := m.groups(results.Fresh, 1e8)
	rtts := []time.Duration{0, 150 * time.Millisecond}
	want := []group{{[]string{"hydrofoil", "overlayfs", "curl"}, []string{"redis", "python"}, rtts}, {[]string{"hydrofoil", "overlayfs", "nydus", "curl"}, []string{"redis"}, rtts}}
	if diff := cmp.Diff(want, groups, cmp.AllowUnexported(group{})); diff != "" {
		t.Fatalf("groups (-want +got):\n%s", diff)
	}
	line := m.normalisedLine("hydrofoil", groups[0].images, results.Fresh, rtts, 1e8)
	if len(line) != 2 {
		t.Fatalf("%d points", len(line))
	}
	// The median repetition, over that of containerd at 0 ms.
	if want := 0.7 / 5.2; math.Abs(line[0].y-want) > 1e-9 {
		t.Errorf("at 0 ms %v, want %v", line[0].y, want)
	}
	if p, ok := m.speedup("hydrofoil", groups[0].images, results.Fresh, 150*time.Millisecond, 1e8); !ok || math.Abs(p.y-5.8/1.3) > 1e-9 {
		t.Errorf("speed-up %v, want %v", p.y, 5.8/1.3)
	}
	// 100 ms warm, no round trip, 2 MB at 12.5 MB/s.
	if got := m.floor("redis", results.Fresh, 0, 1e8); math.Abs(got-0.26) > 1e-9 {
		t.Errorf("floor %v, want 0.26", got)
	}
	// Where warm starts were measured in the rounds, their median stands for the first.
	for i, warm := range []time.Duration{150, 110, 900} {
		all.Warm = append(all.Warm, results.Warm{Image: "redis", Kind: results.Fresh, Rate: 1e8, Rep: i + 1, Time: warm * time.Millisecond})
	}
	m = newModel(all)
	for image, want := range map[string]float64{"redis": 0.31, "python": 0.26} {
		if got := m.floor(image, results.Fresh, 0, 1e8); math.Abs(got-want) > 1e-9 {
			t.Errorf("floor of %s among the runs %v, want %v", image, got, want)
		}
	}
	if !math.IsNaN(m.floor("unknown", results.Fresh, 0, 1e8)) {
		t.Error("an unknown image has a floor")
	}
}

// Engines that ran at some round-trip times only are compared with the others there.
func TestGroupsOfSomeRoundTrips(t *testing.T) {
	all := made()
	all.Runs = slices.DeleteFunc(all.Runs, func(r results.Run) bool { return r.Engine == "nydus" && r.RTT == 0 })
	want := []group{
		{[]string{"hydrofoil", "overlayfs", "curl"}, []string{"redis", "python"}, []time.Duration{0, 150 * time.Millisecond}},
		{[]string{"hydrofoil", "overlayfs", "nydus", "curl"}, []string{"redis"}, []time.Duration{150 * time.Millisecond}},
	}
	if diff := cmp.Diff(want, newModel(all).groups(results.Fresh, 1e8), cmp.AllowUnexported(group{})); diff != "" {
		t.Errorf("groups (-want +got):\n%s", diff)
	}
	m := newModel(all)
	for _, build := range []func(int64) (section, error){m.means, m.speedups} {
		s, err := build(1e8)
		if err != nil {
			t.Fatal(err)
		}
		if !slices.ContainsFunc(s.Figures, func(f figure) bool { return strings.HasSuffix(f.File, "-fresh-100mbit-all-engines") }) {
			t.Errorf("%s: no figure of all engines", s.Title)
		}
	}
}

func TestTicks(t *testing.T) {
	for _, c := range []struct {
		ticker    plot.Ticker
		low, high float64
		want      []string
	}{
		{majors{}, 0, 27, []string{"0", "5", "10", "15", "20", "25"}},
		{majors{}, 0, 1.1, []string{"0", "0.2", "0.4", "0.6", "0.8", "1"}},
		{majors{}, 0, 0.3, []string{"0", "0.05", "0.1", "0.15", "0.2", "0.25", "0.3"}},
		{majors{}, 0, 52000, []string{"0", "10000", "20000", "30000", "40000", "50000"}},
		{decades{}, 0.04, 1.2, []string{"0.05", "0.1", "0.2", "0.5", "1"}},
		{decades{}, 0.5, 2000, []string{"1", "3", "10", "30", "100", "300", "1000"}},
	} {
		var got []string
		for _, tick := range c.ticker.Ticks(c.low, c.high) {
			got = append(got, tick.Label)
		}
		if diff := cmp.Diff(c.want, got); diff != "" {
			t.Errorf("%T from %g to %g (-want +got):\n%s", c.ticker, c.low, c.high, diff)
		}
	}
}

func TestQuoted(t *testing.T) {
	for word, want := range map[string]string{"--rate": "--rate", "100mbit,pytorch=1gbit": "100mbit,pytorch=1gbit", "": "''", "a b": "'a b'", "it's": `'it'\''s'`, "$HOME": "'$HOME'"} {
		if got := quoted(word); got != want {
			t.Errorf("%q became %s, want %s", word, got, want)
		}
	}
}

func TestFirstLine(t *testing.T) {
	for text, want := range map[string]string{"it failed\nfor a reason": "it failed", "\nit said:\n\n no device \nand more": "it said: no device", "it said:": "it said:"} {
		if got := firstLine(text); got != want {
			t.Errorf("%q became %q, want %q", text, got, want)
		}
	}
}
