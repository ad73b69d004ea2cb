package running

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

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
	r := Result{Image: "redis:1", Files: 4000, Bytes: 60e6, Shared: []Share{{"hydrofoil", 1}},
		Rows: []Row{{What: "find", Cache: "cold", Hydrofoil: 0.05, Overlayfs: 0.1, Ratio: 0.5, Interval: stats.Interval{Low: 0.4, High: 0.6}}}}
	if err := r.Write(&out); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"50.0 ms", "100.0 ms", "0.50", "0.40 to 0.60", "finds 100% in memory"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q is missing in:\n%s", want, out.String())
		}
	}
}
