package reread_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"hydrofoil.dev/foil/internal/server/reread"
)

func TestFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	var failures []string
	changes := 0
	f := &reread.File[string]{
		Path: path,
		Parse: func(b []byte) (string, error) {
			if strings.HasPrefix(string(b), "bad") {
				return "", errors.New("it is bad")
			}
			return string(b), nil
		},
		Failed:  func(err error) { failures = append(failures, err.Error()) },
		Changed: func() { changes++ },
	}
	if _, err := f.Get(); err == nil || err.Error() != path+": no such file or directory" {
		t.Errorf("a file that is not there: %v", err)
	}
	want := func(what, value string, failed, changed int) {
		t.Helper()
		for range 2 {
			if got, err := f.Get(); got != value || err != nil {
				t.Errorf("%s: %q, %v, want %q", what, got, err, value)
			}
		}
		if len(failures) != failed || changes != changed {
			t.Errorf("%s: %d failures, %d changes, want %d and %d", what, len(failures), changes, failed, changed)
		}
	}
	write := func(s string) {
		t.Helper()
		if err := os.WriteFile(path+".new", []byte(s), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(path+".new", path); err != nil {
			t.Fatal(err)
		}
	}
	write("one")
	want("the first", "one", 0, 0)
	write("two")
	want("another", "two", 0, 1)
	write("bad")
	want("a bad one", "two", 1, 1)
	if !strings.Contains(failures[0], path+": it is bad") {
		t.Errorf("told %q", failures[0])
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	want("none", "two", 2, 1)
	write("new")
	want("it is back", "new", 2, 2)
}

// A file that cannot be used at first is an error until it can.
func TestBadAtFirst(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	f := &reread.File[int]{Path: path, Parse: func(b []byte) (int, error) {
		if len(b) == 0 {
			return 0, errors.New("empty")
		}
		return len(b), nil
	}}
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if _, err := f.Get(); err == nil {
			t.Error("an empty file was taken")
		}
	}
	if err := os.WriteFile(path, []byte("abc"), 0o600); err != nil {
		t.Fatal(err)
	}
	if n, err := f.Get(); n != 3 || err != nil {
		t.Errorf("%d, %v", n, err)
	}
}
