package objects_test

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/server/objects"
	"hydrofoil.dev/foil/internal/server/objects/objectstest"
)

func TestDir(t *testing.T) {
	objectstest.Run(t, func(t *testing.T) objects.Store { return openDir(t, t.TempDir()) })
}

func TestMemory(t *testing.T) {
	objectstest.Run(t, func(t *testing.T) objects.Store { return objectstest.NewMemory() })
}

func openDir(t *testing.T, dir string) *objects.Dir {
	t.Helper()
	s, err := objects.OpenDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestDirReopen(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "made", "anew")
	s := openDir(t, dir)
	objectstest.Put(t, s, "a/b", []byte("kept"))
	w, err := s.Create(t.Context(), "a/c")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write([]byte("never committed: the process dies here")); err != nil {
		t.Fatal(err)
	}

	s = openDir(t, dir)
	if got := objectstest.Get(t, s, "a/b"); string(got) != "kept" {
		t.Errorf("after reopening the object holds %q", got)
	}
	left, err := os.ReadDir(filepath.Join(dir, ".tmp"))
	if err != nil || len(left) != 0 {
		t.Errorf("unfinished objects left behind: %v, %v", left, err)
	}
	if err := w.Commit(); err == nil {
		t.Error("a writer whose file was removed commits")
	}
	if diff := cmp.Diff([]string{"a/b"}, objectstest.Keys(t, s, "")); diff != "" {
		t.Errorf("keys (-want +got):\n%s", diff)
	}
}

func TestDirRefusesWhatIsNoDirectory(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := objects.OpenDir(file); err == nil {
		t.Error("OpenDir accepts a file")
	}
}

// A key that continues another one has no place in a directory.
func TestDirKeyBelowObject(t *testing.T) {
	s := openDir(t, t.TempDir())
	objectstest.Put(t, s, "a", []byte("x"))
	w, err := s.Create(t.Context(), "a/b")
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	if err := w.Commit(); err == nil {
		t.Error("an object below an object was committed")
	}
	if got := objectstest.Get(t, s, "a"); string(got) != "x" {
		t.Errorf("the first object holds %q", got)
	}
}

// A file that was cut short by a fault of the disk is an error, not a short
// object.
func TestDirTruncated(t *testing.T) {
	dir := t.TempDir()
	s := openDir(t, dir)
	objectstest.Put(t, s, "o", make([]byte, 100_000))
	for _, copyTo := range []bool{false, true} {
		r, err := s.Open(t.Context(), "o", 0, -1)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Truncate(filepath.Join(dir, "o"), 10); err != nil {
			t.Fatal(err)
		}
		if copyTo {
			_, err = io.Copy(io.Discard, r)
		} else {
			_, err = io.ReadAll(r)
		}
		if !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("reading a truncated object: %v, want ErrUnexpectedEOF", err)
		}
		r.Close()
		objectstest.Put(t, s, "o", make([]byte, 100_000))
	}
}

func TestDirDiskFull(t *testing.T) {
	dir := t.TempDir()
	s := openDir(t, dir)
	w, err := s.Create(t.Context(), "o")
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Skipf("no /dev/full: %v", err)
	}
	defer full.Close()
	redirect(t, dir, full)
	if _, err := w.Write([]byte("x")); !errors.Is(err, syscall.ENOSPC) {
		t.Fatalf("write: %v, want ENOSPC", err)
	}
	if err := w.Commit(); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("commit after a failed write: %v, want ENOSPC", err)
	}
	if keys := objectstest.Keys(t, s, ""); len(keys) != 0 {
		t.Errorf("objects %q, want none", keys)
	}
}

// redirect makes this process's descriptor of the only unfinished object one
// of file.
func redirect(t *testing.T, dir string, file *os.File) {
	t.Helper()
	unfinished, err := filepath.Glob(filepath.Join(dir, ".tmp", "*"))
	if err != nil || len(unfinished) != 1 {
		t.Fatalf("unfinished objects: %q, %v, want one", unfinished, err)
	}
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, fd := range fds {
		target, err := os.Readlink("/proc/self/fd/" + fd.Name())
		if err == nil && target == unfinished[0] {
			n, err := strconv.Atoi(fd.Name())
			if err != nil {
				t.Fatal(err)
			}
			if err := unix.Dup3(int(file.Fd()), n, unix.O_CLOEXEC); err != nil {
				t.Fatal(err)
			}
			return
		}
	}
	t.Fatal("no descriptor of the unfinished object")
}

func TestMemoryFails(t *testing.T) {
	boom := errors.New("boom")
	put := func(m *objectstest.Memory) error {
		w, err := m.Create(t.Context(), "o") // 1
		if err != nil {
			return err
		}
		defer w.Close()
		if _, err := w.Write([]byte("x")); err != nil { // 2
			return err
		}
		return w.Commit() // 3
	}
	for n := 1; n <= 3; n++ {
		m := objectstest.NewMemory()
		m.Inject(objectstest.FailNth(n, boom))
		if err := put(m); !errors.Is(err, boom) {
			t.Errorf("operation %d: %v, want boom", n, err)
		}
		if _, err := m.Stat(t.Context(), "o"); !errors.Is(err, objects.ErrNotFound) {
			t.Errorf("after operation %d failed: %v, want ErrNotFound", n, err)
		}
		if m.Used() != 0 {
			t.Errorf("after operation %d failed %d bytes are used", n, m.Used())
		}
		if err := put(m); err != nil {
			t.Errorf("once more: %v", err)
		}
	}
}

func TestMemoryLimit(t *testing.T) {
	m := objectstest.NewMemory()
	objectstest.Put(t, m, "a", make([]byte, 900))
	m.SetLimit(1000)
	w, err := m.Create(t.Context(), "b")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write(make([]byte, 101)); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("write: %v, want ENOSPC", err)
	}
	if err := w.Commit(); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("commit: %v, want ENOSPC", err)
	}
	w.Close()
	objectstest.Put(t, m, "b", make([]byte, 100))
	if err := m.Delete(t.Context(), "a"); err != nil {
		t.Fatal(err)
	}
	objectstest.Put(t, m, "c", make([]byte, 900))
}

func TestMemorySlow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := objectstest.NewMemory()
		m.Inject(func(int, objectstest.Op, string) error { time.Sleep(time.Second); return nil })
		start := time.Now()
		if _, err := m.Stat(t.Context(), "o"); !errors.Is(err, objects.ErrNotFound) {
			t.Error(err)
		}
		if took := time.Since(start); took != time.Second {
			t.Errorf("a slow store answered in %v", took)
		}
		if m.Ops() != 1 {
			t.Errorf("%d operations, want 1", m.Ops())
		}
	})
}
