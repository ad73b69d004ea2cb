package run

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	digest "github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/bench/engines"
	"hydrofoil.dev/foil/bench/images"
	"hydrofoil.dev/foil/bench/link"
	"hydrofoil.dev/foil/bench/results"
	"hydrofoil.dev/foil/bench/site"
)

func small(t *testing.T) *matrix {
	m := &matrix{
		Options: Options{Runs: 3, Rates: []int64{1e8}, RTTs: []time.Duration{0, 50 * time.Millisecond}, Seed: 7},
		out:     results.Dir(t.TempDir()),
	}
	for _, name := range []string{"hydrofoil", "overlayfs", "curl"} {
		e, err := engines.Named(name)
		if err != nil {
			t.Fatal(err)
		}
		m.engines = append(m.engines, e)
	}
	built := &images.Built{Manifest: v1.Manifest{Layers: []v1.Descriptor{{Size: 50e6}}}}
	m.images = [][]engines.Image{{{Name: "redis:1", Built: built}, {Name: "redis:2", Built: built}}, {{Name: "debian:1", Built: built}}}
	return m
}

// left counts what a plan still has to do.
func left(rounds []round) (n int) {
	for _, r := range rounds {
		n += len(r.sessions)
	}
	return n
}

// What has been run is not run again, and an interrupted session is, whole.
func TestPlanGoesOn(t *testing.T) {
	m := small(t)
	rounds := series{m}.plan()
	if got, want := left(rounds), 3*2*2*3; got != want {
		t.Fatalf("%d sessions, want %d", got, want)
	}
	pair := rounds[0].sessions[0]
	for len(pair.keys) != 2 {
		rounds[0].sessions = rounds[0].sessions[1:]
		pair = rounds[0].sessions[0]
	}
	if pair.keys[0].Kind != results.Fresh || pair.keys[1].Kind != results.Update || pair.keys[1].Image != "redis" {
		t.Errorf("keys of a session: %v", pair.keys)
	}
	put := func(r results.Run) {
		t.Helper()
		if err := m.out.PutRun(r); err != nil {
			t.Fatal(err)
		}
	}
	put(results.Run{Key: pair.keys[0]})
	if got := left(series{m}.plan()); got != 36 {
		t.Errorf("after half a session %d are left, want 36", got)
	}
	put(results.Run{Key: pair.keys[1], Err: "it failed"})
	if got := left(series{m}.plan()); got != 35 {
		t.Errorf("after a session %d are left, want 35", got)
	}
	m.RetryFailed = true
	if got := left(series{m}.plan()); got != 36 {
		t.Errorf("with failed ones to be run again %d are left, want 36", got)
	}
	put(results.Run{Key: pair.keys[1], Stolen: results.MuchStolen})
	if got := left(series{m}.plan()); got != 35 {
		t.Errorf("after a session that was hardly disturbed %d are left, want 35", got)
	}
	put(results.Run{Key: pair.keys[1], Stolen: 2 * results.MuchStolen})
	if got := left(series{m}.plan()); got != 35 {
		t.Errorf("after a session that was disturbed %d are left, want 35", got)
	}
	m.RetryStolen = true
	if got := left(series{m}.plan()); got != 36 {
		t.Errorf("with disturbed ones to be run again %d are left, want 36", got)
	}
	m.ImageRates = map[string][]int64{"debian": {0, 1e9}}
	if got, want := left(series{m}.plan()), 36-18+2*18; got != want {
		t.Errorf("with two rates of its own for an image %d are left, want %d", got, want)
	}
	m.ImageRates = nil
	m.Runs, m.RTTs = 4, append(m.RTTs, 150*time.Millisecond)
	if got, want := left(series{m}.plan()), 4*3*2*3; got != want {
		t.Errorf("of a larger matrix %d are left, want %d", got, want)
	}
}

// Two builds are measured in turns, each as often first as the other, and a pair is made
// again whole.
func TestPlanTurns(t *testing.T) {
	before, after := small(t), small(t)
	before.side, after.side = Before, After
	s := series{before, after}
	rounds := s.plan()
	if got, want := left(rounds), 2*3*2*2*3; got != want {
		t.Fatalf("%d sessions, want %d", got, want)
	}
	first := map[string][]string{}
	for _, r := range rounds {
		for i := 0; i < len(r.sessions); i += 2 {
			a, b := r.sessions[i], r.sessions[i+1]
			if a.of == b.of || !slices.Equal(a.keys, b.keys) {
				t.Fatalf("round %d: %s of %s is followed by %s of %s", r.rep, a.keys[0], a.of.side, b.keys[0], b.of.side)
			}
			cell := fmt.Sprint(a.engine.Name(), a.keys[0].Image, r.rtt)
			first[cell] = append(first[cell], a.of.side)
		}
	}
	for cell, sides := range first {
		if len(sides) != 3 || sides[0] == sides[1] || sides[1] == sides[2] {
			t.Errorf("%s: first came %v", cell, sides)
		}
	}
	done := rounds[0].sessions[0]
	for _, k := range done.keys {
		if err := done.of.out.PutRun(results.Run{Key: k}); err != nil {
			t.Fatal(err)
		}
	}
	if got := left(s.plan()); got != 72 {
		t.Errorf("after one half of a pair %d are left, want 72", got)
	}
	for _, k := range done.keys {
		if err := rounds[0].sessions[1].of.out.PutRun(results.Run{Key: k}); err != nil {
			t.Fatal(err)
		}
	}
	if got := left(s.plan()); got != 70 {
		t.Errorf("after a pair %d are left, want 70", got)
	}
}

// Results of two builds lie beside each other; each serves itself, unless it is told otherwise.
func TestSeriesOf(t *testing.T) {
	o := Options{Out: "out", Programs: engines.Programs{Foil: "new", Peers: "peers"}}
	if s := seriesOf(o); len(s) != 1 || s[0].side != "" || s[0].out != "out" {
		t.Errorf("of one build: %+v", s)
	}
	o.Against = &engines.Programs{Foil: "old", Server: "new"}
	s := seriesOf(o)
	if len(s) != 2 || s[0].out != "out/before" || s[1].out != "out/after" {
		t.Fatalf("of two builds: %+v", s)
	}
	if b, a := s[0].Programs, s[1].Programs; b.Foil != "old" || b.Serves() != "new" || a.Foil != "new" || a.Serves() != "new" {
		t.Errorf("programs %+v and %+v", b, a)
	}
}

// The share is of what proc_stat(5) counts as time, in which guests' is already.
func TestStolen(t *testing.T) {
	for _, c := range []struct {
		before, now string
		want        float64
	}{
		{"cpu  100 0 100 700 50 5 5 40 0 0", "cpu  150 0 120 720 50 5 5 50 0 0", 0.1},
		{"cpu  100 0 100 700 50 5 5 40 0 0", "cpu  150 0 120 720 50 5 5 50 999 999", 0.1},
		{"cpu  100 0 100 700 50 5 5 40 0 0", "cpu  100 0 100 700 50 5 5 40 0 0", 0},
		{"cpu  100 0 100 700 50 5 5 40 0 0", "cpu  100 0 100 800 50 5 5 30 0 0", 0}, // moved to another host
		{"cpu 1 2 3 4", "cpu 5 6 7 8", 0},
		{"", "", 0},
		{"intr 1 2 3 4 5 6 7 8", "intr 1 2 3 4 5 6 7 9", 0},
		{"cpu 1 2 x", "cpu 1 2 y", 0},
	} {
		if got := parseTicks(c.before).share(parseTicks(c.now)); math.Abs(got-c.want) > 1e-9 {
			t.Errorf("from %q to %q: %v, want %v", c.before, c.now, got, c.want)
		}
	}
	if processorTime().all == 0 {
		t.Error("/proc/stat tells no time")
	}
}

// Runs are stopped at ready where completion is not asked for, unless the pull is
// whole, or an update needs what the run leaves.
func TestStops(t *testing.T) {
	m := small(t)
	stops := func() (list []string) {
		for _, r := range (series{m}).plan() {
			for _, s := range r.sessions {
				for i, k := range s.keys {
					if r.rep == 1 && m.stops(s, i) {
						list = append(list, fmt.Sprintf("%s %s %s %v", k.Engine, k.Image, k.Kind, k.RTT))
					}
				}
			}
		}
		slices.Sort(list)
		return list
	}
	if got := stops(); len(got) != 0 {
		t.Errorf("stopped: %v", got)
	}
	m.CompleteAt = []time.Duration{50 * time.Millisecond}
	if got, want := stops(), []string{"hydrofoil debian fresh 0s", "hydrofoil redis update 0s"}; !slices.Equal(got, want) {
		t.Errorf("stopped: %v, want %v", got, want)
	}
	if whole, some := m.foresee(session{m, m.engines[0], m.images[1], []results.Key{{Engine: "hydrofoil", RTT: 50 * time.Millisecond, Rate: 1e8}}}),
		m.foresee(session{m, m.engines[0], m.images[1], []results.Key{{Engine: "hydrofoil", Rate: 1e8}}}); some >= whole {
		t.Errorf("a stopped run is foreseen to take %v, a whole one %v", some, whole)
	}
	m.CompleteAt = []time.Duration{}
	if got := len(stops()); got != 4 {
		t.Errorf("%d are stopped, want 4", got)
	}
}

// With a cut there is one run in each session, of an empty worker, and it goes on until the
// image is complete.
func TestPlanCuts(t *testing.T) {
	m := small(t)
	m.Cut, m.CompleteAt = 0.3, []time.Duration{}
	rounds := series{m}.plan()
	if got, want := left(rounds), 3*2*2*3; got != want {
		t.Errorf("%d sessions, want %d", got, want)
	}
	for _, s := range rounds[0].sessions {
		if len(s.keys) != 1 || s.keys[0].Kind != results.Resumed || m.stops(s, 0) {
			t.Errorf("%v of %v, stopped: %v", s.engine.Name(), s.keys, m.stops(s, 0))
		}
	}
	fresh := small(t)
	fresh.out = m.out
	if got, want := left(series{fresh}.plan()), 36; got != want {
		t.Errorf("%d fresh ones and updates, want %d", got, want)
	}
}

// The order is the same for a seed, and differs between repetitions.
func TestPlanShuffles(t *testing.T) {
	order := func(r round) (s string) {
		for _, session := range r.sessions {
			s += session.engine.Name() + " " + session.keys[0].Image + ", "
		}
		return s
	}
	a, b := series{small(t)}.plan(), series{small(t)}.plan()
	differ := false
	for i := range a {
		if order(a[i]) != order(b[i]) {
			t.Errorf("round %d: %s, then %s", i, order(a[i]), order(b[i]))
		}
		differ = differ || order(a[i]) != order(a[0])
	}
	if !differ {
		t.Error("all rounds have the same order")
	}
}

func TestMerge(t *testing.T) {
	before := results.Matrix{
		Format: results.Format, Commit: "abc", Images: []string{"redis"}, RTTs: []time.Duration{0}, Runs: 3, Cut: 0.1,
		Engines: []results.EngineInfo{{Name: "stargz", Absent: "not on PATH"}, {Name: "overlayfs", Version: "1.6"}},
	}
	now := before
	now.Images, now.RTTs, now.Runs = []string{"nginx", "redis"}, []time.Duration{50 * time.Millisecond}, 2
	now.Engines = []results.EngineInfo{{Name: "stargz", Version: "0.9"}, {Name: "hydrofoil", Version: "1"}}
	before.Command, now.Command, before.Note = []string{"bench", "run"}, []string{"bench", "run", "--runs", "2"}, "busy"
	got, err := merge(before, now)
	if err != nil {
		t.Fatal(err)
	}
	if fmt.Sprint(got.Images, got.RTTs, got.Runs, got.Engines) != "[redis nginx] [0s 50ms] 3 [{stargz 0.9 } {overlayfs 1.6 } {hydrofoil 1 }]" {
		t.Errorf("merged: %v %v %v %v", got.Images, got.RTTs, got.Runs, got.Engines)
	}
	if fmt.Sprint(got.Earlier, got.Command) != "[[bench run]] [bench run --runs 2]" || got.Note != "busy" {
		t.Errorf("merged: %v, %v, %s", got.Earlier, got.Command, got.Note)
	}
	for _, change := range []func(m *results.Matrix){
		func(m *results.Matrix) { m.Commit = "def" },
		func(m *results.Matrix) { m.Host.Kernel = "7.0" },
		func(m *results.Matrix) { m.Load = time.Second },
		func(m *results.Matrix) { m.Cut = 0.2 },
		func(m *results.Matrix) { m.Engines = []results.EngineInfo{{Name: "overlayfs", Version: "2.2"}} },
	} {
		now := before
		change(&now)
		if _, err := merge(before, now); err == nil {
			t.Errorf("merged with what does not belong: %+v", now)
		}
	}
}

func TestProgress(t *testing.T) {
	p := progress{left: 10, rest: 100 * time.Second}
	p.ended(5*time.Second, 20*time.Second)
	p.ended(15*time.Second, 20*time.Second)
	if got := p.String(); got != "[8 to go, about 2m40s] " {
		t.Errorf("%q", got)
	}
}

// A whole matrix of one image of some megabytes, in both versions: everything is
// as it is in earnest but for the image. It is interrupted, and goes on.
func TestEndToEnd(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: namespaces, mounts and containers")
	}
	if !site.Confined() {
		args := os.Args
		os.Args = []string{args[0], "-test.run=^TestEndToEnd$", "-test.count=1"}
		defer func() { os.Args = args }()
		if err := site.Confine(); err != nil {
			t.Fatalf("in namespaces of its own: %v", err)
		}
		return
	}
	for _, program := range []string{"skopeo", "containerd", "runc", "mkfs.erofs", "busybox", "curl"} {
		if _, err := exec.LookPath(program); err != nil {
			t.Skipf("needs %s", program)
		}
	}
	// A socket's path has room for 107 bytes, and engines have theirs deep below.
	dir, err := os.MkdirTemp("", "e2e")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	foil := filepath.Join(dir, "foil")
	if out, err := exec.Command("go", "build", "-C", "../..", "-o", foil, "./cmd/foil").CombinedOutput(); err != nil {
		t.Fatalf("build foil: %v\n%s", err, out)
	}
	if err := site.Furnish(); err != nil {
		t.Fatal(err)
	}
	// The first version says that it is ready, and ends; the second stays, and is
	// looked into.
	var ready [2]site.Readiness
	for i, probe := range []string{"stdout:^ready$", "exec:[ \"$UP\" = yes ] && test -e /up"} {
		var err error
		if ready[i], err = site.ParseReadiness(probe, false); err != nil {
			t.Fatal(err)
		}
	}
	programs, names := engines.Programs{Foil: foil}, []string{"hydrofoil", "hydrofoil-untraced", "overlayfs", "curl"}
	// Pods need containerd 2, which is not what is installed everywhere.
	if dir := os.Getenv("FOIL_TEST_CONTAINERD2"); dir != "" {
		programs.Containerd = filepath.Join(dir, "containerd")
		names = append(names, "hydrofoil-containerd", "hydrofoil-cri", "overlayfs-cri")
	}
	ctx, cancel := context.WithTimeout(context.Background(), 8*time.Minute)
	defer cancel()
	begin := func(ctx context.Context, runs int) error {
		m := &matrix{Options: Options{
			Programs: programs, Engines: names, Images: []string{"tiny"},
			RTTs: []time.Duration{20 * time.Millisecond}, Rates: []int64{2e8}, Runs: runs, Seed: 1, SkipCheck: true, Timeout: time.Minute,
			Out: filepath.Join(dir, "out"), Cache: filepath.Join(dir, "cache"), Commit: "test", Log: func(line string) { t.Log(line) },
		}}
		m.out = results.Dir(m.Out)
		for i := 1; i <= 2; i++ {
			tag := fmt.Sprint(i)
			m.images = append(m.images, nil)[:1]
			m.images[0] = append(m.images[0], engines.Image{
				Name: "tiny:" + tag, Ref: engines.RegistryAddr + "/tiny:" + tag, Built: tiny(t, filepath.Join(dir, "tiny-"+tag), i), Ready: ready[i-1],
			})
		}
		if err := m.record(ctx); err != nil {
			return err
		}
		return series{m}.measure(ctx)
	}
	interrupted, interrupt := context.WithCancel(ctx)
	interrupt()
	if err := begin(interrupted, 1); err == nil {
		t.Fatal("an interrupted matrix reports no error")
	}
	if err := begin(ctx, 1); err != nil {
		t.Fatal(err)
	}
	all, err := results.Dir(filepath.Join(dir, "out")).Load()
	if err != nil {
		t.Fatal(err)
	}
	if want := 2 * len(names); len(all.Runs) != want {
		t.Errorf("%d runs, want %d", len(all.Runs), want)
	}
	for _, r := range all.Runs {
		if r.Err != "" {
			t.Errorf("%s: %s", r.Key, r.Err)
			continue
		}
		at, quiet := r.Marks[engines.Ready], r.Marks[engines.Quiet]
		if at.Time < 40*time.Millisecond || quiet.Down < 1000 || len(r.Timeline) < 2 {
			t.Errorf("%s: ready %v, %d bytes, %d points", r.Key, at.Time, quiet.Down, len(r.Timeline))
		}
		if r.Engine == "overlayfs" && (r.CPU == 0 || r.Memory < 1<<20 || r.Disk < 1<<20) {
			t.Errorf("%s: cpu %v, memory %d, disk %d", r.Key, r.CPU, r.Memory, r.Disk)
		}
		if r.Engine == "hydrofoil" && r.Kind == results.Fresh && (r.ArenaReady < 100<<10 || r.Touched < 100<<10) {
			t.Errorf("%s: %d bytes in arenas at ready, %d touched", r.Key, r.ArenaReady, r.Touched)
		}
		if r.Waits > 0 && len(r.Reads) == 0 || len(r.Reads) > 0 && (r.Reads[0].Path == "" || r.Reads[0].Began > quiet.Time) {
			t.Errorf("%s: %d reads waited, of which are told %+v", r.Key, r.Waits, r.Reads)
		}
		// One question on the connection that is kept, also if it is containerd that is
		// asked to pull; else one for each of the manifest, the config and the layer.
		if pulled := r.Marks[engines.Pulled]; strings.HasPrefix(r.Engine, "hydrofoil") {
			if diff := cmp.Diff(link.Capture{Requests: 1, RoundTrips: 1}, pulled.Capture); diff != "" {
				t.Errorf("%s: until pulled:\n%s", r.Key, diff)
			}
		} else if r.Engine != "curl" && (pulled.Requests < 3 || pulled.Connections < 1 || pulled.RoundTrips < 3) {
			t.Errorf("%s: until pulled: %+v", r.Key, pulled.Capture)
		}
		if r.Engine != "curl" && (r.Marks[engines.Started].Time == 0 || r.Marks[engines.Pulled].Time > at.Time) {
			t.Errorf("%s: marks %v", r.Key, r.Marks)
		}
	}
	if len(all.Warm) != 2 || all.Warm[0].Time < 5*time.Millisecond || all.Warm[1].Kind != results.Update {
		t.Errorf("warm starts in the round: %+v", all.Warm)
	}
	for _, im := range all.Images {
		if im.FloorErr != "" || im.Floor.Touched < 100<<10 {
			t.Errorf("%s: floor %+v %s", im.Name, im.Floor, im.FloorErr)
		}
	}
	// A second matrix finds on the server what the first has left there.
	kept, err := stateOf(filepath.Join(dir, "cache"), foil)
	if err != nil {
		t.Fatal(err)
	}
	unlock, err := open(kept)
	if err != nil {
		t.Fatal(err)
	}
	defer unlock()
	if _, err := open(kept); err == nil || !strings.Contains(err.Error(), "another benchmark") {
		t.Errorf("the server's state is used twice: %v", err)
	}
	for _, im := range all.Images {
		p, ok := kept.image(im.Name, im.Digest)
		if !ok || p.Floor.Warm == 0 || p.Storage < 1<<20 || len(p.Prepared) != len(names) {
			t.Errorf("kept of %s: %v, %+v", im.Name, ok, p)
		}
		if f, ok := kept.floor(im.Name, im.Digest); !ok || !slices.Contains(f.Touched, "/bin/busybox") {
			t.Errorf("kept of %s's floor: %v, %+v", im.Name, ok, f)
		}
		if _, ok := kept.image(im.Name, "sha256:other"); ok {
			t.Errorf("%s is found by another digest", im.Name)
		}
	}
	testKept(t, ctx, kept, foil, dir, all.Images[0])
	rest, err := filepath.Glob(filepath.Join(dir, "cache", "*"))
	if err != nil || len(rest) != 2 || filepath.Base(rest[0]) != "made" || filepath.Base(rest[1]) != "servers" {
		t.Errorf("left behind: %v (%v)", rest, err)
	}
}

// converter has made an image under another name.
type converter struct{ engines.Engine }

func (converter) Name() string                        { return "converter" }
func (converter) Converted(im engines.Image) []string { return []string{im.Ref + "-converted"} }
func (converter) Foresee(layers int64) time.Duration  { return time.Duration(layers/1e6) * time.Second }

// What peers have yet to prepare is foreseen: nothing of what they have, or have
// failed to; of what was kept for another server, its push.
func TestForeseesPreparation(t *testing.T) {
	m := small(t)
	m.state = state{dir: t.TempDir(), made: t.TempDir()}
	m.engines, m.versions = append(m.engines, converter{}), map[string]string{"converter": "1"}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	want := func(when string, took time.Duration, left int) {
		t.Helper()
		gotTook, gotLeft := m.preparation()
		if gotTook != took || gotLeft != left {
			t.Errorf("%s: %v for %d images, want %v for %d", when, gotTook, gotLeft, took, left)
		}
	}
	const each, push = 50 * time.Second, time.Second / 2
	want("nothing is prepared", 3*each, 3)
	kept1 := filepath.Join(m.state.of("redis:1"), "converter.json")
	must(write(kept1, kept{Preparation: engines.Preparation{Version: "0"}}))
	want("one was kept, by another version", 3*each, 3)
	must(write(kept1, kept{Preparation: engines.Preparation{Version: "1"}}))
	want("one was kept", 2*each+push, 3)
	must(m.state.put(results.Image{Name: "redis:2", Prepared: map[string]engines.Preparation{"converter": {Version: "1"}}}))
	want("and one is prepared", each+push, 2)
	must(m.out.PutImage(results.Image{Name: "debian:1", PrepareErr: map[string]string{"converter": "it failed"}}))
	want("and one cannot be", push, 1)
	m.RetryFailed = true
	want("but is tried again", each+push, 2)
	if got := m.forecast(series{m}.plan(), nil); !strings.HasSuffix(got, "and peers prepare 2: about 50s") {
		t.Errorf("forecast: %s", got)
	}
}

// What an engine has made of an image is pushed to the next registry as it is.
func testKept(t *testing.T, ctx context.Context, s state, foil, dir string, image results.Image) {
	m := &matrix{Options: Options{Programs: engines.Programs{Foil: foil}}, state: s, dir: t.TempDir()}
	im := engines.Image{Name: image.Name, Ref: engines.RegistryAddr + "/" + image.Name, Built: tiny(t, filepath.Join(dir, "again"), 1)}
	other := tiny(t, filepath.Join(dir, "other-image"), 2)
	made := engines.Preparation{Version: "1", What: "converted", Storage: 7}
	err := m.at(ctx, link.Options{}, func(at *site.Site) error {
		if _, err := at.Run(ctx, link.Cloud, "skopeo", "copy", "--src-tls-verify=false", "--dest-tls-verify=false", other.Source(), "docker://"+im.Ref+"-converted"); err != nil {
			return err
		}
		if _, ok, err := s.restore(ctx, at, converter{}, im, "1"); ok || err != nil {
			t.Errorf("restored what was not kept: %v, %v", ok, err)
		}
		return s.keep(ctx, at, converter{}, im, made)
	})
	if err != nil {
		t.Fatal(err)
	}
	m.state.dir = filepath.Join(dir, "other") // the next program's
	err = m.at(ctx, link.Options{}, func(at *site.Site) error {
		if _, ok, err := s.restore(ctx, at, converter{}, im, "2"); ok || err != nil {
			t.Errorf("restored what another version has made: %v, %v", ok, err)
		}
		if err := engines.Push(ctx, at, im); err != nil {
			return err
		}
		got, ok, err := s.restore(ctx, at, converter{}, im, "1")
		if !ok || got != made {
			t.Errorf("restored: %v, %+v", ok, got)
		}
		if err != nil {
			return err
		}
		out, err := at.Run(ctx, link.Cloud, "skopeo", "inspect", "--tls-verify=false", "--format", "{{.Digest}}", "docker://"+im.Ref+"-converted")
		if strings.TrimSpace(out) != other.Digest.String() {
			t.Errorf("the other registry has %q, not %s", out, other.Digest)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// tiny is an image of busybox, a script, and some megabytes that nothing reads.
func tiny(t *testing.T, dir string, version int) *images.Built {
	t.Helper()
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		t.Fatal(err)
	}
	program, err := os.ReadFile(busybox)
	if err != nil {
		t.Fatal(err)
	}
	ballast := make([]byte, 3<<20)
	dice := rand.NewChaCha8([32]byte{byte(version)})
	dice.Read(ballast)
	var layer, unpacked bytes.Buffer
	w := tar.NewWriter(&unpacked)
	for _, d := range []string{"bin/", "proc/", "sys/", "dev/", "etc/"} {
		if err := w.WriteHeader(&tar.Header{Name: d, Typeflag: tar.TypeDir, Mode: 0o755}); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.WriteHeader(&tar.Header{Name: "bin/sh", Linkname: "busybox", Typeflag: tar.TypeSymlink, Mode: 0o777}); err != nil {
		t.Fatal(err)
	}
	for _, file := range []struct {
		name string
		data []byte
	}{
		{"bin/busybox", program}, {"ballast", ballast},
		{"run.sh", []byte(fmt.Sprintf("echo version %d\necho ready\n", version) + []string{"", "", ": >/up; exec /bin/busybox sleep 600\n"}[version])},
	} {
		if err := w.WriteHeader(&tar.Header{Name: file.name, Typeflag: tar.TypeReg, Mode: 0o755, Size: int64(len(file.data))}); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(file.data); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	diffID := digest.FromBytes(unpacked.Bytes())
	z := gzip.NewWriter(&layer)
	if _, err := z.Write(unpacked.Bytes()); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	blobs := filepath.Join(dir, "blobs", "sha256")
	if err := os.MkdirAll(blobs, 0o755); err != nil {
		t.Fatal(err)
	}
	write := func(path string, data []byte) {
		if err := os.WriteFile(path, data, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	blob := func(mediaType string, data []byte) v1.Descriptor {
		d := digest.FromBytes(data)
		write(filepath.Join(blobs, d.Encoded()), data)
		return v1.Descriptor{MediaType: mediaType, Digest: d, Size: int64(len(data))}
	}
	text := func(v any) []byte {
		b, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	config := blob(v1.MediaTypeImageConfig, text(v1.Image{
		Platform: v1.Platform{Architecture: runtime.GOARCH, OS: "linux"},
		Config:   v1.ImageConfig{Entrypoint: []string{"/bin/busybox", "sh", "/run.sh"}, Env: []string{"PATH=/bin", "UP=yes"}},
		RootFS:   v1.RootFS{Type: "layers", DiffIDs: []digest.Digest{diffID}},
	}))
	manifest := blob(v1.MediaTypeImageManifest, text(v1.Manifest{
		Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: v1.MediaTypeImageManifest,
		Config: config, Layers: []v1.Descriptor{blob(v1.MediaTypeImageLayerGzip, layer.Bytes())},
	}))
	manifest.Annotations = map[string]string{v1.AnnotationRefName: "tiny"}
	write(filepath.Join(dir, "index.json"), text(v1.Index{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: v1.MediaTypeImageIndex, Manifests: []v1.Descriptor{manifest}}))
	write(filepath.Join(dir, "oci-layout"), text(v1.ImageLayout{Version: v1.ImageLayoutVersion}))
	built, err := images.Open(dir, "tiny")
	if err != nil {
		t.Fatal(err)
	}
	return built
}

func TestKeepLogs(t *testing.T) {
	from, to := t.TempDir(), filepath.Join(t.TempDir(), "logs", "key")
	if err := os.WriteFile(filepath.Join(from, "containerd-1.log"), []byte("it broke\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := keepLogs(from, to); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(to, "containerd-1.log"))
	if err != nil || !strings.Contains(string(text), "broke") {
		t.Errorf("%q, %v", text, err)
	}
}
