package stores_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/server/objects"
	"hydrofoil.dev/foil/internal/server/objects/objectstest"
	"hydrofoil.dev/foil/internal/server/stores"
)

func TestSet(t *testing.T) {
	t.Run("alone", func(t *testing.T) {
		objectstest.Run(t, func(t *testing.T) objects.Store { return stores.New(objectstest.NewMemory()) })
	})
	t.Run("with another", func(t *testing.T) {
		objectstest.Run(t, func(t *testing.T) objects.Store {
			return stores.New(objectstest.NewMemory(), stores.NewOther("other", objectstest.NewMemory()))
		})
	})
}

const key = "packs/abc"

// two is a set of two stores.
func two() (root, other *objectstest.Memory, s *stores.Set) {
	root, other = objectstest.NewMemory(), objectstest.NewMemory()
	return root, other, stores.New(root, stores.NewOther("other", other))
}

func TestOnlySomeIsShared(t *testing.T) {
	root, other, s := two()
	objectstest.Put(t, root, "blobs/b", []byte("bb"))
	objectstest.Put(t, root, "journal/1", []byte("new"))
	objectstest.Put(t, other, "blobs/a", []byte("a"))
	objectstest.Put(t, other, "blobs/b", []byte("cut"))
	objectstest.Put(t, other, "journal/0", []byte("what was deleted"))
	objectstest.Put(t, other, key, []byte("pack"))
	if diff := cmp.Diff([]string{"blobs/a", "blobs/b", "journal/1", key}, objectstest.Keys(t, s, "")); diff != "" {
		t.Errorf("keys (-want +got):\n%s", diff)
	}
	if got := objectstest.Get(t, s, "blobs/b"); string(got) != "bb" {
		t.Errorf("the root's does not come first: %q", got)
	}
	if got := objectstest.Get(t, s, "blobs/a"); string(got) != "a" {
		t.Errorf("what another store has: %q", got)
	}
	if _, err := s.Stat(t.Context(), "journal/0"); !errors.Is(err, objects.ErrNotFound) {
		t.Errorf("the journal of another store is read: %v", err)
	}
	if err := s.Delete(t.Context(), "blobs/b"); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Stat(t.Context(), "blobs/b"); !errors.Is(err, objects.ErrNotFound) {
		t.Errorf("deleted in one store only: %v", err)
	}
}

// What one store fails to read comes from the next, from where it failed.
func TestReadsFailOver(t *testing.T) {
	body := bytes.Repeat([]byte("0123456789"), 40_000)
	broken := errors.New("the disk is broken")
	for _, copied := range []bool{false, true} {
		for fails := range 5 {
			root, other, s := two()
			objectstest.Put(t, root, key, body)
			objectstest.Put(t, other, key, body)
			reads := 0
			root.Inject(func(_ int, op objectstest.Op, _ string) error {
				if op == objectstest.OpRead {
					if reads++; reads > fails {
						return broken
					}
				}
				return nil
			})
			r, err := s.Open(t.Context(), key, 5, int64(len(body)-10))
			if err != nil {
				t.Fatal(err)
			}
			var got []byte
			if copied {
				var b bytes.Buffer
				_, err = io.Copy(struct{ io.Writer }{&b}, r)
				got = b.Bytes()
			} else {
				for err == nil {
					buf := make([]byte, 70_000)
					var n int
					n, err = r.Read(buf)
					got = append(got, buf[:n]...)
				}
				if err == io.EOF {
					err = nil
				}
			}
			r.Close()
			if err != nil || !bytes.Equal(got, body[5:len(body)-5]) {
				t.Errorf("copied %v, failing after %d reads: %d bytes, %v", copied, fails, len(got), err)
			}
		}
	}
	root, other, s := two()
	objectstest.Put(t, other, key, body)
	root.Inject(objectstest.FailNth(1, broken))
	if n, err := s.Stat(t.Context(), key); err != nil || n != int64(len(body)) {
		t.Errorf("size by the other: %d, %v", n, err)
	}
	// What fails is no loss.
	root.Inject(func(_ int, op objectstest.Op, _ string) error {
		if op == objectstest.OpOpen {
			return broken
		}
		return nil
	})
	if _, err := s.Open(t.Context(), "packs/unknown", 0, -1); !errors.Is(err, broken) || errors.Is(err, objects.ErrNotFound) {
		t.Errorf("what the first store fails to look up: %v", err)
	}
}

// A client that goes away is no reason to read from elsewhere.
func TestWritersFail(t *testing.T) {
	root, other, s := two()
	objectstest.Put(t, root, key, make([]byte, 1<<20))
	objectstest.Put(t, other, key, make([]byte, 1<<20))
	other.Inject(func(_ int, op objectstest.Op, _ string) error { t.Errorf("the other: %s", op); return nil })
	r, err := s.Open(t.Context(), key, 0, -1)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if _, err := r.(io.WriterTo).WriteTo(full{}); !errors.Is(err, errFull) {
		t.Errorf("got %v", err)
	}
}

var errFull = errors.New("full")

type full struct{}

func (full) Write([]byte) (int, error) { return 0, errFull }

func open(t *testing.T, root string, dirs ...string) *stores.Set {
	t.Helper()
	s, err := stores.Open(root, dirs)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// A directory whose disk is not mounted is away, not empty.
func TestAway(t *testing.T) {
	top := t.TempDir()
	root, dir, lost := filepath.Join(top, "root"), filepath.Join(top, "second"), filepath.Join(top, "lost")
	if err := os.Mkdir(root, 0o700); err != nil {
		t.Fatal(err)
	}
	s := open(t, root, dir)
	objectstest.Put(t, s.Here()[1], key, []byte("there"))
	if err := os.Rename(dir, lost); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if s.Others()[0].Look(); s.Away() == "" || len(s.Here()) != 1 {
		t.Fatal("the store is not away")
	}
	for _, s := range []*stores.Set{s, open(t, root, dir)} {
		if _, err := s.Open(t.Context(), key, 0, -1); !errors.Is(err, stores.ErrAway) || errors.Is(err, objects.ErrNotFound) {
			t.Errorf("what the store may have: %v", err)
		}
		if _, err := s.Stat(t.Context(), "tocs/x"); !errors.Is(err, objects.ErrNotFound) {
			t.Errorf("what no store but the root's has: %v", err)
		}
	}
	if view, err := stores.View(root); err != nil || len(view.Here()) != 1 {
		t.Errorf("seen by others: %v", err)
	}
	// It comes back.
	if err := errors.Join(os.Remove(dir), os.Rename(lost, dir)); err != nil {
		t.Fatal(err)
	}
	if !s.Others()[0].Look() || s.Away() != "" {
		t.Errorf("still away: %s", s.Away())
	}
	if got := objectstest.Get(t, s, key); string(got) != "there" {
		t.Errorf("%q", got)
	}
	// It is lost for good: only what somebody says is the new one is it.
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(dir, "lost+found"), 0o700); err != nil {
		t.Fatal(err)
	}
	s.Others()[0].Look()
	if err := stores.Renew(root, dir); err != nil {
		t.Fatal(err)
	}
	if !s.Others()[0].Look() || len(s.Here()) != 2 {
		t.Errorf("renewed, and still away: %s", s.Away())
	}
	if err := stores.Renew(root, top); err == nil {
		t.Error("a directory that is no store was renewed")
	}
}

func TestOpenRefuses(t *testing.T) {
	top := t.TempDir()
	root, other, used := filepath.Join(top, "root"), filepath.Join(top, "other"), filepath.Join(top, "used")
	for _, dir := range []string{root, filepath.Join(used, "something")} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	open(t, root, other)
	for want, dirs := range map[string][]string{
		"must be empty":           {used},
		"neither in the root nor": {filepath.Join(root, "x")},
		"around it":               {top},
		"named twice":             {other, other},
	} {
		if _, err := stores.Open(root, dirs); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", dirs, err, want)
		}
	}
	// The store of another server is not ours.
	second := filepath.Join(top, "second")
	if err := os.Mkdir(second, 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := stores.Open(second, []string{other}); err == nil {
		t.Error("two servers have one store")
	}
	// It was not forgotten meanwhile; without the flag it is.
	if s, err := stores.Recorded(root); err != nil || len(s.Here()) != 2 {
		t.Errorf("what is recorded: %v", err)
	}
	if len(open(t, root).Here()) != 1 {
		t.Error("it is a store though nobody names it")
	}
}

func TestMend(t *testing.T) {
	root, other, s := two()
	d := digest.FromString("right")
	if err := s.Mend(t.Context(), key, d); !errors.Is(err, stores.ErrNoCopy) {
		t.Errorf("from nothing: %v", err)
	}
	objectstest.Put(t, other, key, []byte("wrong"))
	if err := s.Mend(t.Context(), key, d); !errors.Is(err, stores.ErrNoCopy) {
		t.Errorf("from other bytes: %v", err)
	}
	if _, err := root.Stat(context.Background(), key); !errors.Is(err, objects.ErrNotFound) {
		t.Errorf("other bytes were put in its place: %v", err)
	}
	objectstest.Put(t, other, key, []byte("right"))
	if err := s.Mend(t.Context(), key, d); err != nil {
		t.Error(err)
	}
	if got := objectstest.Get(t, root, key); string(got) != "right" {
		t.Errorf("%q", got)
	}
}
