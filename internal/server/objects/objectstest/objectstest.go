// Package objectstest has the conformance suite of objects.Store, and Memory, a
// store for tests that fails on demand.
package objectstest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"hydrofoil.dev/foil/internal/server/objects"
)

// Run tests stores that open makes; each call returns an empty one.
func Run(t *testing.T, open func(t *testing.T) objects.Store) {
	tests := []struct {
		name string
		test func(t *testing.T, s objects.Store)
	}{
		{"Keys", testKeys},
		{"Missing", testMissing},
		{"Ranges", testRanges},
		{"Invisible", testInvisible},
		{"Replace", testReplace},
		{"AfterCommit", testAfterCommit},
		{"Delete", testDelete},
		{"OpenReaderSurvivesDelete", testOpenReaderSurvivesDelete},
		{"List", testList},
		{"ListError", testListError},
		{"Cancelled", testCancelled},
		{"Concurrent", testConcurrent},
		{"Adopt", testAdopt},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) { test.test(t, open(t)) })
	}
}

// Put stores b under key.
func Put(t *testing.T, s objects.Store, key string, b []byte) {
	t.Helper()
	w, err := s.Create(t.Context(), key)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	// In pieces, the way real writers do it.
	for chunk := range slices.Chunk(b, 1000) {
		if n, err := w.Write(chunk); err != nil || n != len(chunk) {
			t.Fatalf("write %s: %d, %v", key, n, err)
		}
	}
	if err := w.Commit(); err != nil {
		t.Fatal(err)
	}
}

// Get reads all of key.
func Get(t *testing.T, s objects.Store, key string) []byte {
	t.Helper()
	b, err := get(t.Context(), s, key, 0, -1)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func get(ctx context.Context, s objects.Store, key string, offset, length int64) ([]byte, error) {
	r, err := s.Open(ctx, key, offset, length)
	if err != nil {
		return nil, err
	}
	b, err := io.ReadAll(r)
	return b, errors.Join(err, r.Close())
}

// Keys lists the keys that start with prefix.
func Keys(t *testing.T, s objects.Store, prefix string) []string {
	t.Helper()
	var keys []string
	err := s.List(t.Context(), prefix, func(key string, _ int64) error {
		keys = append(keys, key)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return keys
}

func random(n int) []byte {
	b := make([]byte, n)
	rand.NewChaCha8([32]byte{byte(n)}).Read(b)
	return b
}

func testKeys(t *testing.T, s objects.Store) {
	for _, key := range []string{"a", "a-b/c_d/e.f", "0/1/2/3/4/5/6/7/8/9", strings.Repeat("k", 255)} {
		Put(t, s, key, []byte(key))
		if got := Get(t, s, key); string(got) != key {
			t.Errorf("object %s holds %q", key, got)
		}
	}
	for _, key := range []string{"", "/", "/a", "a/", "a//b", ".", "..", "a/../b", ".tmp/a", "a/.b", "A", "a b", "a\x00", "ä", `a\b`, "a:b",
		strings.Repeat("k", 256), strings.Repeat("k/", 256) + "k"} {
		if w, err := s.Create(t.Context(), key); err == nil {
			w.Close()
			t.Errorf("Create accepts the key %q", key)
		}
		if _, err := get(t.Context(), s, key, 0, -1); err == nil {
			t.Errorf("Open accepts the key %q", key)
		}
		if _, err := s.Stat(t.Context(), key); err == nil {
			t.Errorf("Stat accepts the key %q", key)
		}
		if err := s.Delete(t.Context(), key); err == nil {
			t.Errorf("Delete accepts the key %q", key)
		}
	}
}

func testMissing(t *testing.T, s objects.Store) {
	Put(t, s, "a/b", []byte("x"))
	for _, key := range []string{"b", "a", "a/c", "a/b/c"} {
		if _, err := get(t.Context(), s, key, 0, -1); !errors.Is(err, objects.ErrNotFound) {
			t.Errorf("open %s: %v, want ErrNotFound", key, err)
		}
		if _, err := s.Stat(t.Context(), key); !errors.Is(err, objects.ErrNotFound) {
			t.Errorf("stat %s: %v, want ErrNotFound", key, err)
		}
	}
}

func testRanges(t *testing.T, s objects.Store) {
	b := random(100_000)
	Put(t, s, "o", b)
	size := int64(len(b))
	for _, r := range []struct{ offset, length int64 }{
		{0, -1}, {0, 0}, {0, 1}, {0, size}, {1, -1}, {size - 1, 1}, {4096, 65_537}, {size, -1}, {size, 0},
	} {
		end := r.offset + r.length
		if r.length < 0 {
			end = size
		}
		got, err := get(t.Context(), s, "o", r.offset, r.length)
		if err != nil {
			t.Errorf("range %+v: %v", r, err)
		} else if !bytes.Equal(got, b[r.offset:end]) {
			t.Errorf("range %+v: wrong bytes", r)
		}
	}
	for _, r := range []struct{ offset, length int64 }{{-1, 1}, {size + 1, -1}, {size + 1, 0}, {size, 1}, {0, size + 1}} {
		if _, err := get(t.Context(), s, "o", r.offset, r.length); err == nil || errors.Is(err, objects.ErrNotFound) {
			t.Errorf("range %+v of %d bytes: %v, want an error that is not ErrNotFound", r, size, err)
		}
	}
	// A reader that is copied from takes whatever shortcut it has.
	rc, err := s.Open(t.Context(), "o", 7, 50_000)
	if err != nil {
		t.Fatal(err)
	}
	defer rc.Close()
	var buf bytes.Buffer
	if n, err := io.Copy(&buf, rc); n != 50_000 || err != nil || !bytes.Equal(buf.Bytes(), b[7:50_007]) {
		t.Errorf("copy: %d bytes, %v", n, err)
	}
	if got, err := s.Stat(t.Context(), "o"); got != size || err != nil {
		t.Errorf("stat: %d, %v, want %d", got, err, size)
	}
	Put(t, s, "empty", nil)
	if got := Get(t, s, "empty"); len(got) != 0 {
		t.Errorf("the empty object has %d bytes", len(got))
	}
}

func testInvisible(t *testing.T, s objects.Store) {
	w, err := s.Create(t.Context(), "a/b")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write([]byte("half")); err != nil {
		t.Fatal(err)
	}
	absent := func(when string) {
		t.Helper()
		if _, err := s.Stat(t.Context(), "a/b"); !errors.Is(err, objects.ErrNotFound) {
			t.Errorf("%s: stat: %v, want ErrNotFound", when, err)
		}
		if keys := Keys(t, s, ""); len(keys) != 0 {
			t.Errorf("%s: list: %q, want nothing", when, keys)
		}
	}
	absent("before commit")
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	absent("after close without commit")
	if err := w.Commit(); err == nil {
		t.Error("commit after close succeeds")
	}
	absent("after commit of a closed writer")
}

func testReplace(t *testing.T, s objects.Store) {
	Put(t, s, "o", []byte("one"))
	w, err := s.Create(t.Context(), "o")
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	if _, err := w.Write([]byte("and two")); err != nil {
		t.Fatal(err)
	}
	if got := Get(t, s, "o"); string(got) != "one" {
		t.Errorf("before commit: %q", got)
	}
	if err := w.Commit(); err != nil {
		t.Fatal(err)
	}
	if got := Get(t, s, "o"); string(got) != "and two" {
		t.Errorf("after commit: %q", got)
	}
}

func testAfterCommit(t *testing.T, s objects.Store) {
	w, err := s.Create(t.Context(), "o")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if err := w.Commit(); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write([]byte("y")); err == nil {
		t.Error("write after commit succeeds")
	}
	if err := w.Commit(); err == nil {
		t.Error("a second commit succeeds")
	}
	for range 2 {
		if err := w.Close(); err != nil {
			t.Errorf("close after commit: %v", err)
		}
	}
	if got := Get(t, s, "o"); string(got) != "x" {
		t.Errorf("object holds %q", got)
	}
}

func testDelete(t *testing.T, s objects.Store) {
	Put(t, s, "a/b", []byte("x"))
	Put(t, s, "a/c", []byte("y"))
	for range 2 {
		if err := s.Delete(t.Context(), "a/b"); err != nil {
			t.Fatal(err)
		}
	}
	for _, missing := range []string{"a", "a/c/d", "z/z"} {
		if err := s.Delete(t.Context(), missing); err != nil {
			t.Errorf("delete of the missing object %s: %v", missing, err)
		}
	}
	if diff := cmp.Diff([]string{"a/c"}, Keys(t, s, "")); diff != "" {
		t.Errorf("what is left (-want +got):\n%s", diff)
	}
}

func testOpenReaderSurvivesDelete(t *testing.T, s objects.Store) {
	b := random(300_000)
	Put(t, s, "o", b)
	r, err := s.Open(t.Context(), "o", 0, -1)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if err := s.Delete(t.Context(), "o"); err != nil {
		t.Fatal(err)
	}
	Put(t, s, "o", []byte("another"))
	if got, err := io.ReadAll(r); err != nil || !bytes.Equal(got, b) {
		t.Errorf("reading what was deleted: %d bytes, %v", len(got), err)
	}
}

func testList(t *testing.T, s objects.Store) {
	// In byte order '-' and '.' are before '/', which is before the digits.
	all := []string{"a-b/c", "a.b", "a/b", "a/b-c/d", "a/b.c", "a0", "b/a/a/a", "c"}
	for i, key := range all {
		Put(t, s, key, random(i))
	}
	if !slices.IsSorted(all) {
		t.Fatal("the test's keys are not sorted")
	}
	for _, prefix := range []string{"", "a", "a/", "a/b", "a/b-", "a/b-c/d", "a-", "b/a", "b/a/", "c", "c/", "d", "a/b-c/d/e"} {
		var want []string
		for _, key := range all {
			if strings.HasPrefix(key, prefix) {
				want = append(want, key)
			}
		}
		if diff := cmp.Diff(want, Keys(t, s, prefix)); diff != "" {
			t.Errorf("list %q (-want +got):\n%s", prefix, diff)
		}
	}
	err := s.List(t.Context(), "", func(key string, size int64) error {
		if i := slices.Index(all, key); int64(i) != size {
			return fmt.Errorf("object %s has %d bytes, want %d", key, size, i)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

func testListError(t *testing.T, s objects.Store) {
	Put(t, s, "a/a", nil)
	Put(t, s, "a/b", nil)
	stop := errors.New("stop")
	n := 0
	err := s.List(t.Context(), "", func(string, int64) error { n++; return stop })
	if !errors.Is(err, stop) || n != 1 {
		t.Errorf("list: %v after %d objects, want the error of the first", err, n)
	}
}

func testCancelled(t *testing.T, s objects.Store) {
	Put(t, s, "o", []byte("x"))
	ctx, cancel := context.WithCancel(t.Context())
	w, err := s.Create(ctx, "p")
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	cancel()
	if err := w.Commit(); !errors.Is(err, context.Canceled) {
		t.Errorf("commit: %v, want Canceled", err)
	}
	if w, err := s.Create(ctx, "q"); !errors.Is(err, context.Canceled) {
		t.Errorf("create: %v, want Canceled", err)
		if err == nil {
			w.Close()
		}
	}
	if _, err := get(ctx, s, "o", 0, -1); !errors.Is(err, context.Canceled) {
		t.Errorf("open: %v, want Canceled", err)
	}
	if _, err := s.Stat(ctx, "o"); !errors.Is(err, context.Canceled) {
		t.Errorf("stat: %v, want Canceled", err)
	}
	if err := s.Delete(ctx, "o"); !errors.Is(err, context.Canceled) {
		t.Errorf("delete: %v, want Canceled", err)
	}
	if err := s.List(ctx, "", func(string, int64) error { return nil }); !errors.Is(err, context.Canceled) {
		t.Errorf("list: %v, want Canceled", err)
	}
	if diff := cmp.Diff([]string{"o"}, Keys(t, s, "")); diff != "" {
		t.Errorf("what is left (-want +got):\n%s", diff)
	}
}

func testConcurrent(t *testing.T, s objects.Store) {
	const writers, keys = 8, 20
	var wg sync.WaitGroup
	for range writers {
		wg.Go(func() {
			for k := range keys {
				key := fmt.Sprintf("dir-%d/sub/%d", k%3, k)
				w, err := s.Create(t.Context(), key)
				if err != nil {
					t.Error(err)
					return
				}
				if _, err := w.Write(random(1000 + k)); err != nil {
					t.Error(err)
				}
				if err := w.Commit(); err != nil {
					t.Error(err)
				}
				if got, err := get(t.Context(), s, key, 0, -1); err != nil || !bytes.Equal(got, random(1000+k)) {
					t.Errorf("object %s right after its commit: %d bytes, %v", key, len(got), err)
				}
			}
		})
	}
	wg.Wait()
	if got := len(Keys(t, s, "")); got != keys {
		t.Errorf("%d objects, want %d", got, keys)
	}
}

func testAdopt(t *testing.T, s objects.Store) {
	b := random(70_000)
	path := filepath.Join(t.TempDir(), "file")
	for range 2 { // the second one replaces
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := objects.Adopt(t.Context(), s, "a/b/c", path); err != nil {
			t.Fatal(err)
		}
		if got := Get(t, s, "a/b/c"); !bytes.Equal(got, b) {
			t.Error("the adopted object has other bytes")
		}
		if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the adopted file is still there: %v", err)
		}
	}
	if err := objects.Adopt(t.Context(), s, "A", path); err == nil {
		t.Error("Adopt accepts the key A")
	}
	if err := objects.Adopt(t.Context(), s, "a/d", path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("adopting a file that is not there: %v", err)
	}
}
