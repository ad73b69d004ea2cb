package report

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"hydrofoil.dev/foil/bench/results"
)

// varied is made, with times that differ, a setting that failed in part, one that
// failed whole, and an image at a rate of its own.
func varied() results.Everything {
	all := made()
	all.Matrix.ImageRates = map[string][]int64{"pytorch": {1e9}}
	all.Matrix.Images = append(all.Matrix.Images, "pytorch")
	var kept []results.Run
	for _, r := range all.Runs {
		if r.Image == "python" && r.Engine == "hydrofoil" {
			for mark, p := range r.Marks {
				p.Time /= 5
				r.Marks[mark] = p
			}
			if r.RTT > 0 && (r.Kind == results.Update || r.Rep == 2) {
				r.Err = "it failed\nfor a reason"
			}
		}
		kept = append(kept, r)
		if r.Image == "redis" {
			r.Image, r.Rate = "pytorch", 1e9
			kept = append(kept, r)
		}
	}
	all.Runs = kept
	return all
}

func TestMarkdown(t *testing.T) {
	for name, only := range map[string][]string{"tables.md": nil, "tables-two.md": {"hydrofoil", "overlayfs"}} {
		got, err := Markdown(varied(), only...)
		if err != nil {
			t.Fatal(err)
		}
		golden := filepath.Join("testdata", name)
		if *update {
			if err := os.WriteFile(golden, []byte(got), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(golden)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(strings.Split(string(want), "\n"), strings.Split(got, "\n")); diff != "" {
			t.Errorf("%s (-want +got; -update writes it anew):\n%s", name, diff)
		}
		// Whatever order the files are read in.
		shuffled := varied()
		slices.Reverse(shuffled.Runs)
		again, err := Markdown(shuffled, only...)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(got, again); diff != "" {
			t.Errorf("%s depends on the order of runs:\n%s", name, diff)
		}
		// Every line of a table has as many cells as its header.
		bars := 0
		for line := range strings.Lines(got) {
			if !strings.HasPrefix(line, "|") {
				bars = 0
			} else if n := strings.Count(line, "|"); bars == 0 {
				bars = n
			} else if n != bars {
				t.Errorf("%s: %d bars instead of %d in %s", name, n, bars, line)
			}
		}
	}
	if _, err := Markdown(varied(), "nobody"); err == nil {
		t.Error("tables of no engine")
	}
}

// The means are those of docs/benchmarks.md, by hand: of two images, at 150 ms,
// hydrofoil has 5.8/1.3 and 5.8/0.26.
func TestMarkdownMeans(t *testing.T) {
	all := varied()
	for i := range all.Runs {
		all.Runs[i].Err = ""
	}
	m := newModel(all)
	redis := m.speedupOf(cell{"hydrofoil", "redis", results.Fresh, 150 * time.Millisecond, 1e8})
	python := m.speedupOf(cell{"hydrofoil", "python", results.Fresh, 150 * time.Millisecond, 1e8})
	if diff := cmp.Diff([]string{"4.46", "22.3"}, []string{threeDigits(redis), threeDigits(python)}); diff != "" {
		t.Error(diff)
	}
	got, err := Markdown(all, "hydrofoil", "overlayfs")
	if err != nil {
		t.Fatal(err)
	}
	// Harmonic: 2/(1.3/5.8+0.26/5.8). Geometric: the root of the product.
	for _, want := range []string{"7.44×", "9.98×"} {
		if !strings.Contains(got, want) {
			t.Errorf("no %s in\n%s", want, got)
		}
	}
}
