package reread_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

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
	if err := os.WriteFile(path, []byte("one written over"), 0o600); err != nil {
		t.Fatal(err)
	}
	want("written in place", "one written over", 0, 1)
	// Moved away, with another in its place.
	if err := os.WriteFile(path+".other", []byte("two"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.Rename(path, path+".old"), os.Rename(path+".other", path)); err != nil {
		t.Fatal(err)
	}
	want("another", "two", 0, 2)
	write("bad")
	want("a bad one", "two", 1, 2)
	if !strings.Contains(failures[0], path+": it is bad") {
		t.Errorf("told %q", failures[0])
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	want("none", "two", 2, 2)
	write("new")
	want("it is back", "new", 2, 3)
}

// A path that leads elsewhere: by a symbolic link at once, by another directory soon.
func TestPath(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		for _, of := range []string{"one", "two"} {
			if err := errors.Join(os.Mkdir(filepath.Join(dir, of), 0o700), os.WriteFile(filepath.Join(dir, of, "file"), []byte(of), 0o600)); err != nil {
				t.Fatal(err)
			}
		}
		parse := func(b []byte) (string, error) { return string(b), nil }
		link := filepath.Join(dir, "link")
		if err := os.Symlink("one", link); err != nil {
			t.Fatal(err)
		}
		linked := &reread.File[string]{Path: filepath.Join(link, "file"), Parse: parse}
		direct := &reread.File[string]{Path: filepath.Join(dir, "one", "file"), Parse: parse}
		want := func(f *reread.File[string], value string) {
			t.Helper()
			if got, err := f.Get(); got != value || err != nil {
				t.Errorf("%s: %q, %v, want %q", f.Path, got, err, value)
			}
		}
		want(linked, "one")
		want(direct, "one")
		if err := errors.Join(os.Symlink("two", link+".new"), os.Rename(link+".new", link)); err != nil {
			t.Fatal(err)
		}
		want(linked, "two")
		if err := errors.Join(os.Rename(filepath.Join(dir, "one"), filepath.Join(dir, "old")), os.Rename(filepath.Join(dir, "two"), filepath.Join(dir, "one"))); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		want(direct, "two")
	})
}

// BenchmarkGet is what a file costs each request.
func BenchmarkGet(b *testing.B) {
	dir := b.TempDir()
	if err := errors.Join(os.WriteFile(filepath.Join(dir, "file"), []byte("x"), 0o600), os.Symlink("file", filepath.Join(dir, "link"))); err != nil {
		b.Fatal(err)
	}
	for _, name := range []string{"file", "link"} {
		b.Run(name, func(b *testing.B) {
			f := &reread.File[int]{Path: filepath.Join(dir, name), Parse: func(b []byte) (int, error) { return len(b), nil }}
			b.ReportAllocs()
			for b.Loop() {
				if _, err := f.Get(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
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
