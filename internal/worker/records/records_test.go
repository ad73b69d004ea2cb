package records

import (
	"os"
	"path/filepath"
	"testing"
)

// Whatever becomes of a staged file, the place has what was there or what was
// staged, and nothing lies beside it.
func TestStaged(t *testing.T) {
	for _, test := range []struct {
		name string
		fn   func(path string) error
		want string
	}{
		{"put", func(path string) error {
			s, err := Stage(path, []byte("new"))
			if err != nil {
				return err
			}
			if b, err := os.ReadFile(path); err != nil || string(b) != "old" {
				t.Errorf("before put: %q, %v", b, err)
			}
			return s.Put()
		}, "new"},
		{"drop", func(path string) error {
			s, err := Stage(path, []byte("new"))
			s.Drop()
			return err
		}, "old"},
		{"Replace", func(path string) error { return Replace(path, []byte("new")) }, "new"},
	} {
		t.Run(test.name, func(t *testing.T) {
			dir := t.TempDir()
			path := filepath.Join(dir, "record.json")
			if err := os.WriteFile(path, []byte("old"), 0o600); err != nil {
				t.Fatal(err)
			}
			if err := test.fn(path); err != nil {
				t.Fatal(err)
			}
			if b, err := os.ReadFile(path); err != nil || string(b) != test.want {
				t.Errorf("got %q, %v; want %q", b, err, test.want)
			}
			names, err := os.ReadDir(dir)
			if err != nil || len(names) != 1 {
				t.Errorf("left: %v, %v", names, err)
			}
		})
	}
	if _, err := Stage(filepath.Join(t.TempDir(), "none", "record.json"), nil); err == nil {
		t.Error("staged in a directory that is not there")
	}
}
