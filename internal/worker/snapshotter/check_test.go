package snapshotter

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// A damaged database of snapshots is an error: the daemon, which containers wait
// for, does not die of it, and removes nothing.
func TestADamagedDatabaseIsAnError(t *testing.T) {
	const page = 4096
	for name, damage := range map[string]func(b []byte) []byte{
		"pages of zeros":  func(b []byte) []byte { clear(b[2*page:]); return b },
		"pages of noise":  func(b []byte) []byte { return append(b[:2*page], bytes.Repeat([]byte{0xa5}, len(b)-2*page)...) },
		"cut short":       func(b []byte) []byte { return b[:3*page] },
		"cut in the head": func(b []byte) []byte { return b[:page+100] },
		"another file":    func(b []byte) []byte { return bytes.Repeat([]byte("text\n"), len(b)/5) },
		"empty":           func([]byte) []byte { return nil },
		"gone":            nil,
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			s, err := Open(t.Context(), Options{Dir: dir})
			if err != nil {
				t.Fatal(err)
			}
			for _, key := range []string{"one", "two", "three"} {
				if _, err := s.Prepare(t.Context(), key, ""); err != nil {
					t.Fatal(err)
				}
			}
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			made, err := filepath.Glob(filepath.Join(dir, "snapshots/*/fs"))
			if err != nil || len(made) != 3 {
				t.Fatalf("%v, %v", made, err)
			}
			// What containers have written.
			for _, fs := range made {
				if err := os.WriteFile(filepath.Join(fs, "written"), nil, 0o600); err != nil {
					t.Fatal(err)
				}
			}
			db := filepath.Join(dir, "metadata.db")
			good, err := os.ReadFile(db)
			if err != nil {
				t.Fatal(err)
			}
			if damage == nil {
				err = os.Remove(db)
			} else {
				err = os.WriteFile(db, damage(bytes.Clone(good)), 0o600)
			}
			if err != nil {
				t.Fatal(err)
			}
			if s, err := Open(t.Context(), Options{Dir: dir}); err == nil {
				t.Errorf("opened, %v", s.Close())
			} else if !strings.Contains(err.Error(), db+" is damaged") {
				t.Error(err)
			}
			if err := os.WriteFile(db, good, 0o600); err != nil {
				t.Fatal(err)
			}
			s = open(t, dir, nil)
			for _, key := range []string{"one", "two", "three"} {
				if _, err := s.Mounts(t.Context(), key); err != nil {
					t.Error(err)
				}
			}
			if left, err := filepath.Glob(filepath.Join(dir, "snapshots/*/fs/written")); err != nil || len(left) != 3 {
				t.Errorf("left of what containers wrote: %v, %v", left, err)
			}
		})
	}
}
