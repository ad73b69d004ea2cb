package running

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"hydrofoil.dev/foil/bench/engines"
	"hydrofoil.dev/foil/bench/link"
	"hydrofoil.dev/foil/bench/stats"
)

func TestLook(t *testing.T) {
	tree := t.TempDir()
	for name, size := range map[string]int{"usr/bin/true": 5000, "large": 100 << 10, "larger": 200 << 10, "small": 100} {
		path := filepath.Join(tree, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, bytes.Repeat([]byte("x"), size), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	in, err := look(tree)
	if err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(in.largest, " "); got != "/larger /large /usr/bin/true" || in.bytes != 300<<10+5000 || in.program != "/usr/bin/true" {
		t.Errorf("largest %s, %d bytes, program %s", got, in.bytes, in.program)
	}
	for _, op := range operations {
		if op.name == "exec" {
			continue // what is there is no program
		}
		if err := op.do(tree, in); err != nil {
			t.Errorf("%s: %v", op.name, err)
		}
	}
	if _, err := look(t.TempDir()); err == nil {
		t.Error("an empty tree is taken")
	}
}

func TestWrite(t *testing.T) {
	var out bytes.Buffer
	r := Result{Image: "redis:1", Files: 4000, Bytes: 60e6, Shared: []Share{{"hydrofoil", 1}}, Memory: []Memory{{"hydrofoil", 60e6, 1e6, 30e6}},
		Rows: []Row{{What: "find", Cache: "cold",
			Wall: Pair{Hydrofoil: 0.05, Overlayfs: 0.1, Ratio: 0.5, Interval: stats.Interval{Low: 0.4, High: 0.6}},
			CPU:  Pair{Hydrofoil: 0.03, Overlayfs: 0.04, Ratio: 0.75, Interval: stats.Interval{Low: 0.7, High: 0.8}}}}}
	if err := r.Write(&out); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"50.0 ms", "100.0 ms", "0.50", "0.40 to 0.60", "30.0 ms", "40.0 ms", "0.75", "0.70 to 0.80", "finds 100% in memory", "60.0 MB", "+1.0 MB", "+30.0 MB"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q is missing in:\n%s", want, out.String())
		}
	}
}

func TestWriteArriving(t *testing.T) {
	var out bytes.Buffer
	r := Result{Image: "redis:1", Link: describe(link.Options{Rate: 100e6, RTT: 50 * time.Millisecond}), Arriving: []Arriving{{"find", 0.25, 1, 3}}}
	if err := r.Write(&out); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"over 100 Mbit/s, 50ms", "find       250 ms     3       1"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q is missing in:\n%s", want, out.String())
		}
	}
}

func TestWithTask(t *testing.T) {
	for name, want := range map[string]int{"redis:1": 1, "postgres:2": 1, "gcc:1": 1, "nginx:1": 0} {
		if got := len(withTask(engines.Image{Name: name})) - len(operations); got != want {
			t.Errorf("%s has %d tasks, want %d", name, got, want)
		}
	}
}

func TestPair(t *testing.T) {
	// Ratios are of rounds: 2, 0.5 and 0.5.
	p := pair([]float64{2, 3, 4}, []float64{1, 6, 8})
	if p.Hydrofoil != 3 || p.Overlayfs != 6 || p.Ratio != 0.5 || !p.Interval.Contains(0.5) {
		t.Errorf("%+v", p)
	}
}

func TestTimed(t *testing.T) {
	failed := errors.New("failed")
	if _, _, err := timed(func() error { return failed }); !errors.Is(err, failed) {
		t.Errorf("an error is %v", err)
	}
	// What a process has cost that was waited for is in it.
	_, cost, err := timed(func() error {
		return exec.Command("sh", "-c", "i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done").Run()
	})
	if err != nil || cost <= 0 {
		t.Errorf("cost %v, %v", cost, err)
	}
}

func TestCached(t *testing.T) {
	if n, err := cached(); n <= 0 || err != nil {
		t.Errorf("the page cache has %d bytes, %v", n, err)
	}
}
