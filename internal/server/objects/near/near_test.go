package near_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/server/objects"
	"hydrofoil.dev/foil/internal/server/objects/near"
	"hydrofoil.dev/foil/internal/server/objects/objectstest"
)

func open(t *testing.T, inner objects.Store, limit int64) *near.Store {
	t.Helper()
	s, err := near.Open(inner, near.Options{Dir: filepath.Join(t.TempDir(), "cache"), Limit: limit})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func TestNear(t *testing.T) {
	for _, limit := range []int64{1 << 30, 600 << 10, 0} {
		t.Run(fmt.Sprint(limit), func(t *testing.T) {
			objectstest.Run(t, func(t *testing.T) objects.Store { return open(t, objectstest.NewMemory(), limit) })
		})
	}
}

func fill(n int) []byte {
	b := make([]byte, n)
	rand.NewChaCha8([32]byte{1}).Read(b)
	return b
}

// put writes behind the cache.
func put(t *testing.T, s objects.Store, key string, b []byte) {
	t.Helper()
	if err := objects.Put(t.Context(), s, key, b); err != nil {
		t.Fatal(err)
	}
}

func part(ctx context.Context, s objects.Store, key string, offset, length int64) ([]byte, error) {
	r, err := s.Open(ctx, key, offset, length)
	if err != nil {
		return nil, err
	}
	b, err := io.ReadAll(r)
	return b, errors.Join(err, r.Close())
}

func want(t *testing.T, s objects.Store, key string, offset, length int64, whole []byte) {
	t.Helper()
	got, err := part(t.Context(), s, key, offset, length)
	if length < 0 {
		length = int64(len(whole)) - offset
	}
	if err != nil || !bytes.Equal(got, whole[offset:offset+length]) {
		t.Errorf("%d bytes from %d: %d came, %v", length, offset, len(got), err)
	}
}

// opens counts how often the store behind is asked for bytes.
func opens(m *objectstest.Memory) func() int {
	var mu sync.Mutex
	n := 0
	m.Inject(func(_ int, op objectstest.Op, _ string) error {
		mu.Lock()
		defer mu.Unlock()
		if op == objectstest.OpOpen {
			n++
		}
		return nil
	})
	return func() int {
		mu.Lock()
		defer mu.Unlock()
		was := n
		n = 0
		return was
	}
}

// What is read in order comes in few, large pieces; what was read comes from here; what was written is here.
func TestReadsAreSpared(t *testing.T) {
	m := objectstest.NewMemory()
	s := open(t, m, 1<<30)
	pack := fill(40 << 20)
	put(t, m, "packs/a", pack)
	count := opens(m)
	const run = 256 << 10
	for at := int64(0); at < int64(len(pack)); at += run {
		want(t, s, "packs/a", at, run, pack)
	}
	if n := count(); n < 5 || n > 12 {
		t.Errorf("a pack of 40 MiB that was read in 160 runs was asked for %d times", n)
	}
	want(t, s, "packs/a", 0, -1, pack)
	want(t, s, "packs/a", 12345, 1<<20, pack)
	if n := count(); n != 0 {
		t.Errorf("what is here was asked for %d times", n)
	}
	r, err := s.Open(t.Context(), "packs/a", 5, 10)
	if err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 100)
	if in, ok := r.(objects.InFile); !ok {
		t.Error("what is here as a whole is in no file")
	} else if _, err := in.File().ReadAt(b, 1<<20); err != nil || !bytes.Equal(b, pack[1<<20:1<<20+100]) {
		t.Errorf("the file has other bytes: %v", err)
	}
	r.Close()

	put(t, s, "packs/b", pack[:1<<20])
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, pack[:3<<20], 0o600); err != nil {
		t.Fatal(err)
	}
	blob := "blobs/sha256/ab/abc"
	if err := objects.Adopt(t.Context(), s, blob, path); err != nil {
		t.Fatal(err)
	}
	want(t, s, "packs/b", 0, -1, pack[:1<<20])
	want(t, s, blob, 0, -1, pack[:3<<20])
	if n := count(); n != 0 {
		t.Errorf("what was written was asked for %d times", n)
	}
	if err := s.Delete(t.Context(), blob); err != nil {
		t.Fatal(err)
	}
	if _, err := part(t.Context(), s, blob, 0, -1); !errors.Is(err, objects.ErrNotFound) {
		t.Errorf("a blob that was deleted: %v", err)
	}
	put(t, m, blob, pack[:1000])
	count()
	want(t, s, blob, 0, -1, pack[:1000])
	want(t, s, blob, 0, -1, pack[:1000])
	want(t, s, blob, 100, 100, pack[:1000])
	if n := count(); n != 1 {
		t.Errorf("a small blob that was read was asked for %d times, want 1", n)
	}
	put(t, m, blob+"2", pack[:1<<20])
	count()
	want(t, s, blob+"2", 0, -1, pack[:1<<20])
	want(t, s, blob+"2", 0, 1<<20, pack[:1<<20])
	if n := count(); n != 2 {
		t.Errorf("a blob that was not written here was asked for %d times, want 2", n)
	}
}

// A frame here and there brings no more than a few blocks.
func TestSinglesAreSmall(t *testing.T) {
	m := objectstest.NewMemory()
	s := open(t, m, 1<<30)
	pack := fill(32 << 20)
	put(t, m, "packs/a", pack)
	count := opens(m)
	for _, at := range []int64{20 << 20, 3 << 20, 30<<20 - 5, 11 << 20} {
		want(t, s, "packs/a", at, 1000, pack)
	}
	if n := count(); n != 4 {
		t.Errorf("4 places were asked for %d times", n)
	}
	if n := held(t, s); n > 4*(1<<20)+(512<<10) {
		t.Errorf("4 places of 1,000 bytes brought %d bytes", n)
	}
}

// held is what is on the disk.
func held(t *testing.T, s *near.Store) (n int64) {
	t.Helper()
	entries, err := os.ReadDir(s.Dir())
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		n += allocated(t, filepath.Join(s.Dir(), e.Name()))
	}
	return n
}

func allocated(t *testing.T, path string) int64 {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		t.Fatal(err)
	}
	return st.Blocks * 512
}

// Many readers of the same bytes are one; the limit holds; all get the right bytes.
func TestManyReaders(t *testing.T) {
	m := objectstest.NewMemory()
	const limit = 6 << 20
	s := open(t, m, limit)
	bodies := map[string][]byte{}
	for i := range 4 {
		key := fmt.Sprintf("packs/%d", i)
		bodies[key] = fill(3<<20 + i*1000)
		put(t, m, key, bodies[key])
	}
	var wg sync.WaitGroup
	for g := range 12 {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(uint64(g), 0))
			for range 60 {
				key := fmt.Sprintf("packs/%d", r.IntN(4))
				whole := bodies[key]
				offset := r.Int64N(int64(len(whole)))
				length := r.Int64N(int64(len(whole)) - offset + 1)
				got, err := part(t.Context(), s, key, offset, length)
				if err != nil || !bytes.Equal(got, whole[offset:offset+length]) {
					t.Errorf("%s: %d bytes from %d: %d came, %v", key, length, offset, len(got), err)
				}
			}
		})
	}
	wg.Wait()
	if n := held(t, s); n > limit+4<<20 { // what was being read last stays
		t.Errorf("%d bytes are kept, the limit is %d", n, limit)
	}
}

// What fails fails for those who wait for it, and is asked for again by who comes next.
func TestFailures(t *testing.T) {
	m := objectstest.NewMemory()
	s := open(t, m, 1<<30)
	body := fill(2 << 20)
	put(t, m, "packs/a", body)
	boom := errors.New("boom")
	for _, op := range []objectstest.Op{objectstest.OpOpen, objectstest.OpRead} {
		m.Inject(func(_ int, is objectstest.Op, _ string) error {
			if is == op {
				return boom
			}
			return nil
		})
		if _, err := part(t.Context(), s, "packs/a", 0, -1); !errors.Is(err, boom) {
			t.Errorf("%s fails: %v", op, err)
		}
		m.Inject(nil)
		want(t, s, "packs/a", 0, -1, body)
		if err := s.Delete(t.Context(), "packs/a"); err != nil {
			t.Fatal(err)
		}
		put(t, m, "packs/a", body)
	}
	if _, err := part(t.Context(), s, "packs/b", 0, -1); !errors.Is(err, objects.ErrNotFound) {
		t.Errorf("what is not there: %v", err)
	}
	put(t, m, "packs/b", body)
	want(t, s, "packs/b", 100, 1000, body)
}

// A disk that fails is gone without.
func TestDiskFails(t *testing.T) {
	m := objectstest.NewMemory()
	s := open(t, m, 1<<30)
	body := fill(2 << 20)
	put(t, m, "packs/a", body)
	if err := os.RemoveAll(s.Dir()); err != nil {
		t.Fatal(err)
	}
	want(t, s, "packs/a", 0, -1, body)
	want(t, s, "packs/a", 500_000, 1_000_000, body)
	put(t, s, "packs/b", body)
	want(t, s, "packs/b", 0, -1, body)
}

// Whoever is cut off does not end what others wait for.
func TestCancelled(t *testing.T) {
	m := objectstest.NewMemory()
	s := open(t, m, 1<<30)
	body := fill(2 << 20)
	put(t, m, "packs/a", body)
	begun, goOn := make(chan struct{}), make(chan struct{})
	var once sync.Once
	m.Inject(func(_ int, op objectstest.Op, _ string) error {
		if op == objectstest.OpRead {
			once.Do(func() { close(begun) })
			<-goOn
		}
		return nil
	})
	ctx, cancel := context.WithCancel(t.Context())
	first := make(chan error, 1)
	go func() {
		_, err := part(ctx, s, "packs/a", 0, -1)
		first <- err
	}()
	<-begun
	cancel()
	if err := <-first; !errors.Is(err, context.Canceled) {
		t.Errorf("who was cut off: %v", err)
	}
	close(goOn)
	want(t, s, "packs/a", 0, -1, body)
}
