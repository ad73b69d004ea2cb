package node

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
			s, err := stage(path, []byte("new"))
			if err != nil {
				return err
			}
			if b, err := os.ReadFile(path); err != nil || string(b) != "old" {
				t.Errorf("before put: %q, %v", b, err)
			}
			return s.put()
		}, "new"},
		{"drop", func(path string) error {
			s, err := stage(path, []byte("new"))
			s.drop()
			return err
		}, "old"},
		{"writeFileAtomic", func(path string) error { return writeFileAtomic(path, []byte("new")) }, "new"},
		{"replaceFile", func(path string) error { return replaceFile(path, []byte("new")) }, "new"},
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
	if _, err := stage(filepath.Join(t.TempDir(), "none", "record.json"), nil); err == nil {
		t.Error("staged in a directory that is not there")
	}
}
