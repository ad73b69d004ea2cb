package results

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"hydrofoil.dev/foil/bench/engines"
)

func TestDir(t *testing.T) {
	dir := Dir(t.TempDir())
	if _, err := dir.Matrix(); !Missing(err) {
		t.Errorf("an empty directory has a matrix, or: %v", err)
	}
	want := Everything{
		Matrix: Matrix{Format: Format, Commit: "abc", Images: []string{"redis"}, RTTs: []time.Duration{time.Millisecond}},
		Images: []Image{{Name: "redis:1", Layers: []int64{5, 7}}},
		Checks: []Check{{RTT: time.Millisecond, Rep: 1, Measured: "as it should be"}},
		Warm:   []Warm{{Image: "redis", Kind: Fresh, RTT: time.Millisecond, Rate: 1e8, Rep: 1, Time: time.Second}},
		Runs: []Run{
			{Key: Key{Engine: "curl", Image: "redis", Kind: Fresh, RTT: time.Millisecond, Rate: 1e8, Rep: 1}, Disk: 9},
			{Key: Key{Engine: "curl", Image: "redis", Kind: Update, RTT: time.Millisecond, Rate: 1e8, Rep: 1}, Err: "no"},
		},
	}
	put := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	put(dir.PutMatrix(want.Matrix))
	put(dir.PutImage(want.Images[0]))
	put(dir.PutCheck(want.Checks[0]))
	put(dir.PutWarm(want.Warm[0]))
	for _, r := range want.Runs {
		put(dir.PutRun(r))
	}
	// What an interrupted write leaves is not read.
	put(os.WriteFile(filepath.Join(string(dir), "runs", "half.json.partial"), []byte("{"), 0o644))
	got, err := dir.Load()
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got, cmpopts.IgnoreUnexported(engines.Floor{})); diff != "" {
		t.Errorf("loaded (-put +got):\n%s", diff)
	}
	if r, err := dir.Run(want.Runs[0].Key); err != nil || r.Disk != 9 {
		t.Errorf("%+v, %v", r, err)
	}
	if w, err := dir.Warm(want.Runs[0].Key); err != nil || w.Time != time.Second {
		t.Errorf("%+v, %v", w, err)
	}
	if _, err := dir.Warm(want.Runs[1].Key); !Missing(err) {
		t.Errorf("an update has the warm start of a fresh worker: %v", err)
	}
	later := want.Matrix
	later.Format++
	put(dir.PutMatrix(later))
	if _, err := dir.Load(); err == nil {
		t.Error("a result of another format is read")
	}
}
