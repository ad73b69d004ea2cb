package upstream

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/server/leftover"
)

// Downloads that nobody continues go after a week, but for those under way; one of a
// clock that was ahead counts from when that is known.
func TestDropLeft(t *testing.T) {
	dir := t.TempDir()
	a := &Accelerator{o: Options{Dir: dir}, downloads: map[string]*download{}}
	now := time.Now()
	part := func(name string, age time.Duration) string {
		d := digest.FromString(name)
		path := a.part(d)
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(path, now.Add(-age), now.Add(-age)); err != nil {
			t.Fatal(err)
		}
		return filepath.Base(path)
	}
	old, busy, ahead := part("old", leftFor+time.Hour), part("busy", 2*leftFor), part("ahead", -52*leftFor)
	a.downloads["busy"] = &download{digest: digest.FromString("busy")}
	ages := leftover.Ages{Keep: leftFor}
	look := func(later time.Duration, want ...string) {
		t.Helper()
		if err := a.dropLeft(&ages, now.Add(later), later); err != nil {
			t.Fatal(err)
		}
		entries, err := os.ReadDir(dir)
		if err != nil || len(entries) != len(want) {
			t.Errorf("after %v: %v, %v; want %v", later, entries, err, want)
		}
		for _, name := range want {
			if _, err := os.Stat(filepath.Join(dir, name)); err != nil {
				t.Errorf("after %v: %v", later, err)
			}
		}
	}
	look(0, old, busy, ahead)
	look(time.Hour, busy, ahead)
	look(2*time.Hour, busy, ahead)
	look(leftFor+3*time.Hour, busy)
}
