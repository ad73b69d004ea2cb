package dedup

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/catalog/sqlite"
	"hydrofoil.dev/foil/internal/server/objects/objectstest"
)

var update = flag.Bool("update", false, "write the golden files")

func newStore(t testing.TB) *Store {
	t.Helper()
	return &Store{Objects: objectstest.NewMemory(), Catalog: newCatalog(t)}
}

func newCatalog(t testing.TB) catalog.Catalog {
	t.Helper()
	c, err := sqlite.Open(context.Background(), filepath.Join(t.TempDir(), "catalog"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// pieces makes segments of the lengths given, all different.
func pieces(seed uint64, lengths ...int) (ids []segment.ID, bodies [][]byte) {
	r := rand.New(rand.NewPCG(seed, 0))
	for _, n := range lengths {
		b := make([]byte, n)
		for i := range b {
			b[i] = "segment "[r.IntN(8)]
		}
		ids, bodies = append(ids, segment.Sum(b)), append(bodies, b)
	}
	return ids, bodies
}

func add(t testing.TB, w *Writer, ids []segment.ID, bodies [][]byte) {
	t.Helper()
	for i := range ids {
		if err := w.Add(ids[i], bodies[i]); err != nil {
			t.Fatal(err)
		}
	}
}

func publish(t testing.TB, s *Store, o Options, ids []segment.ID, bodies [][]byte) Stats {
	t.Helper()
	w := s.NewWriter(context.Background(), o)
	defer w.Close()
	add(t, w, ids, bodies)
	if err := w.Publish(); err != nil {
		t.Fatal(err)
	}
	return w.Stats()
}

// wantStored checks that the store has the bytes of all of ids.
func wantStored(t testing.TB, s *Store, ids []segment.ID) {
	t.Helper()
	if bad := verify(t, s, ids); len(bad) > 0 {
		t.Fatalf("%d of %d segments are not stored", len(bad), len(ids))
	}
}

// verify returns the segments whose bytes the store does not have.
func verify(t interface {
	Helper()
	Fatal(args ...any)
}, s *Store, ids []segment.ID) (bad []segment.ID) {
	t.Helper()
	keep := s.Catalog.Keep()
	defer keep.Release()
	found, err := s.Verify(context.Background(), s.NewFinder(keep), ids)
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range found {
		bad = append(bad, b.ID)
	}
	return bad
}

// locate returns where segments are, of all packs.
func locate(t testing.TB, s *Store, ids []segment.ID) []catalog.Location {
	t.Helper()
	keep := s.Catalog.Keep()
	defer keep.Release()
	places, err := s.NewFinder(keep).Locate(context.Background(), ids)
	if err != nil {
		t.Fatal(err)
	}
	return places
}

// served returns the packs that are found to have some segment.
func served(t testing.TB, s *Store, ids []segment.ID) map[string]bool {
	t.Helper()
	locations := locate(t, s, ids)
	packs := map[string]bool{}
	for _, l := range locations {
		if l.Frame != nil {
			packs[l.Frame.Pack] = true
		}
	}
	return packs
}

func keys(t testing.TB, s *Store) []string {
	t.Helper()
	var keys []string
	err := s.Objects.List(context.Background(), "", func(key string, _ int64) error {
		keys = append(keys, key)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return keys
}

func lengths(n, each int) []int {
	l := make([]int, n)
	for i := range l {
		l[i] = each + i%7
	}
	return l
}

func TestWhatWasAddedIsRead(t *testing.T) {
	s := newStore(t)
	ids, bodies := pieces(1, append(lengths(2000, 900), segment.MaxLength, 1, segment.FrameAlone, segment.FrameAlone-1, 300_000)...)
	ids, bodies = append(ids, segment.ID{}), append(bodies, make([]byte, 5)) // a hole: not stored
	stats := publish(t, s, Options{PackSize: 256 << 10, Workers: 3}, ids, bodies)
	if n := int64(len(ids) - 1); stats.Segments != n || stats.NewSegments != n {
		t.Errorf("%+v, want %d segments", stats, n)
	}
	wantStored(t, s, ids[:len(ids)-1])
	if n := len(keys(t, s)); n < 3 {
		t.Errorf("%d packs: they do not roll", n)
	}
	unknown := segment.Sum([]byte("unknown"))
	if bad := verify(t, s, []segment.ID{ids[0], unknown}); !slices.Equal(bad, []segment.ID{unknown}) {
		t.Errorf("of a segment and an unknown one %d are not stored", len(bad))
	}
}

func TestFramesAreGathered(t *testing.T) {
	s := newStore(t)
	ids, bodies := pieces(2, append(lengths(1000, 1000), 500_000)...)
	publish(t, s, Options{}, ids, bodies)
	p, err := s.ReadPack(context.Background(), keys(t, s)[0])
	if err != nil {
		t.Fatal(err)
	}
	next := 0
	for i, f := range p.Frames {
		alone := len(f.Segments) == 1 && f.RawLength == 500_000
		if !alone && f.RawLength < segment.FrameTarget && i != len(p.Frames)-1 {
			t.Errorf("frame %d holds %d bytes", i, f.RawLength)
		}
		if alone {
			continue
		}
		for _, fs := range f.Segments {
			if fs.ID != ids[next] {
				t.Fatalf("frame %d: segment %d is not where it came", i, next)
			}
			next++
		}
	}
	if next != 1000 {
		t.Errorf("%d small segments", next)
	}
}

func TestOnlyUnseenSegmentsAreStored(t *testing.T) {
	s := newStore(t)
	ids, bodies := pieces(3, lengths(500, 2000)...)
	publish(t, s, Options{}, ids[:300], bodies[:300])
	twice := append(append([]segment.ID{}, ids[200:]...), ids...)
	stats := publish(t, s, Options{}, twice, append(append([][]byte{}, bodies[200:]...), bodies...))
	if stats.Segments != 500 || stats.NewSegments != 200 {
		t.Errorf("%+v", stats)
	}
	wantStored(t, s, ids)
	before := keys(t, s)
	if stats := publish(t, s, Options{}, ids, bodies); stats.NewSegments != 0 {
		t.Errorf("%+v", stats)
	}
	if d := cmp.Diff(before, keys(t, s)); d != "" {
		t.Errorf("a pack without anything new:\n%s", d)
	}
}

func TestNothingIsKnownBeforePublishAndNothingLeftAfterClose(t *testing.T) {
	s := newStore(t)
	ctx, cancel := context.WithCancel(context.Background())
	ids, bodies := pieces(4, lengths(3000, 3000)...)
	w := s.NewWriter(ctx, Options{PackSize: 64 << 10})
	add(t, w, ids, bodies)
	locations := locate(t, s, ids)
	for _, l := range locations {
		if l.Frame != nil {
			t.Fatal("a segment is known before Publish")
		}
	}
	if len(keys(t, s)) == 0 {
		t.Fatal("no pack was committed yet: the test shows nothing")
	}
	cancel()
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if k := keys(t, s); len(k) != 0 {
		t.Errorf("left: %v", k)
	}
	if err := w.Publish(); err == nil {
		t.Error("Publish after Close succeeded")
	}
}

func TestEveryFailureOfTheStoreIsCleanedUp(t *testing.T) {
	ids, bodies := pieces(5, lengths(400, 3000)...)
	full := fmt.Errorf("write: %w", syscall.ENOSPC)
	for n := 1; ; n++ {
		s := newStore(t)
		memory := s.Objects.(*objectstest.Memory)
		var hit atomic.Bool
		memory.Inject(func(at int, op objectstest.Op, _ string) error {
			if at == n && op != objectstest.OpDelete {
				hit.Store(true)
				return full
			}
			return nil
		})
		w := s.NewWriter(context.Background(), Options{PackSize: 100 << 10})
		var err error
		for i := range ids {
			if err = w.Add(ids[i], bodies[i]); err != nil {
				break
			}
		}
		if err == nil {
			err = w.Publish()
		}
		if hit.Load() != errors.Is(err, syscall.ENOSPC) {
			t.Fatalf("operation %d failed, and the error was %v", n, err)
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		memory.Inject(nil)
		if !hit.Load() {
			wantStored(t, s, ids)
			return
		}
		packs := served(t, s, ids)
		for _, key := range keys(t, s) {
			if !packs[key] {
				t.Fatalf("after operation %d failed, pack %s is left", n, key)
			}
		}
	}
}

func TestVerifyFindsDamage(t *testing.T) {
	ctx := context.Background()
	s := newStore(t)
	ids, bodies := pieces(7, lengths(400, 3000)...)
	publish(t, s, Options{}, ids, bodies)
	key := keys(t, s)[0]
	good, err := s.read(ctx, key, 0, must(s.Objects.Stat(ctx, key)))
	if err != nil {
		t.Fatal(err)
	}
	p, err := s.ReadPack(ctx, key)
	if err != nil {
		t.Fatal(err)
	}
	bad := bytes.Clone(good)
	bad[p.Frames[1].Offset+100] ^= 1
	put(t, s, key, bad)
	of := map[segment.ID]bool{} // the damaged frame
	for _, fs := range p.Frames[1].Segments {
		of[fs.ID] = true
	}
	wrong := verify(t, s, ids)
	if len(wrong) == 0 || slices.ContainsFunc(wrong, func(id segment.ID) bool { return !of[id] }) {
		t.Errorf("%d segments did not verify; the damaged frame has %d", len(wrong), len(of))
	}
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func put(t testing.TB, s *Store, key string, b []byte) {
	t.Helper()
	w, err := s.Objects.Create(context.Background(), key)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write(b); err != nil {
		t.Fatal(err)
	}
	if err := w.Commit(); err != nil {
		t.Fatal(err)
	}
}

func parse(b []byte) (catalog.Pack, error) {
	return parsePack("packs/x", int64(len(b)), func(offset, length int64) ([]byte, error) {
		return b[offset : offset+length], nil
	})
}

// samplePack is a pack made by hand, as the format says.
func samplePack() []byte {
	b := []byte(magic)
	one := must(segment.AppendFrame(nil, segment.Stored, []byte("first"), []byte("second")))
	two := must(segment.AppendFrame(nil, segment.Stored, []byte("third")))
	b = append(append(b, one...), two...)
	table := appendTable(nil, len(one), []catalog.FrameSegment{{ID: segment.Sum([]byte("first")), Length: 5}, {ID: segment.Sum([]byte("second")), Length: 6}})
	table = appendTable(table, len(two), []catalog.FrameSegment{{ID: segment.Sum([]byte("third")), Length: 5}})
	return appendTrailer(append(b, table...), table, 2)
}

func TestPackGolden(t *testing.T) {
	path := filepath.Join("testdata", "pack.v1")
	if *update {
		if err := os.WriteFile(path, samplePack(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(want, samplePack()) {
		t.Error("the format has changed")
	}
	p, err := parse(want)
	if err != nil {
		t.Fatal(err)
	}
	d := cmp.Diff(catalog.Pack{Key: "packs/x", Size: int64(len(want)), Frames: []catalog.Frame{
		{Pack: "packs/x", Offset: 8, Length: 12, RawLength: 11, Segments: []catalog.FrameSegment{
			{ID: sha256.Sum256([]byte("first")), Length: 5}, {ID: sha256.Sum256([]byte("second")), Length: 6},
		}},
		{Pack: "packs/x", Offset: 20, Length: 6, RawLength: 5, Segments: []catalog.FrameSegment{{ID: sha256.Sum256([]byte("third")), Length: 5}}},
	}}, p)
	if d != "" {
		t.Error(d)
	}
}

func TestDamagedPacks(t *testing.T) {
	good := samplePack()
	p := must(parse(good))
	end := p.Frames[1].Offset + int64(p.Frames[1].Length)
	for i := range good {
		if i >= 8 && int64(i) < end {
			continue // bytes of frames, which have their own IDs
		}
		bad := bytes.Clone(good)
		bad[i] ^= 4
		if _, err := parse(bad); !errors.Is(err, ErrBadPack) {
			t.Fatalf("byte %d changed: %v", i, err)
		}
	}
	for n := range good {
		if _, err := parse(good[:n]); !errors.Is(err, ErrBadPack) {
			t.Fatalf("the first %d bytes: %v", n, err)
		}
	}
	id := segment.Sum([]byte("x"))
	for name, table := range map[string][]byte{
		"empty frame":     appendTable(nil, 6, nil),
		"hole":            appendTable(nil, 6, []catalog.FrameSegment{{Length: 5}}),
		"empty segment":   appendTable(nil, 6, []catalog.FrameSegment{{ID: id}}),
		"large segment":   appendTable(nil, 6, []catalog.FrameSegment{{ID: id, Length: segment.MaxLength + 1}}),
		"longer than raw": appendTable(nil, 8, []catalog.FrameSegment{{ID: id, Length: 5}}),
		"past the table":  appendTable(nil, 7, []catalog.FrameSegment{{ID: id, Length: 6}}),
		"bytes left over": append(appendTable(nil, 6, []catalog.FrameSegment{{ID: id, Length: 5}}), 0),
	} {
		b := append([]byte(magic), "\x00first"...)
		b = appendTrailer(append(b, table...), table, 1)
		if _, err := parse(b); !errors.Is(err, ErrBadPack) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func FuzzPack(f *testing.F) {
	f.Add(samplePack()[8:])
	f.Fuzz(func(t *testing.T, table []byte) {
		// The checksum would keep the fuzzer from the table.
		frames := 0
		for rest := table; len(rest) > 0; frames++ {
			var err error
			if _, rest, err = parseFrame(rest); err != nil {
				break
			}
		}
		b := appendTrailer(append([]byte(magic), table...), table, frames)
		p, err := parse(b)
		if err != nil {
			if !errors.Is(err, ErrBadPack) {
				t.Fatal(err)
			}
			return
		}
		for _, f := range p.Frames {
			if f.RawLength == 0 || f.RawLength > segment.MaxFrameRaw || f.Offset+int64(f.Length) > p.Size {
				t.Fatalf("%+v", f)
			}
		}
	})
}

// Whatever is added in whatever order, by whoever, is read back.
func TestStoreProperty(t *testing.T) {
	ids, bodies := pieces(8, lengths(64, 50_000)...)
	s := newStore(t)
	stored := map[int]bool{}
	rapid.Check(t, func(t *rapid.T) {
		w := s.NewWriter(context.Background(), Options{PackSize: int64(rapid.IntRange(1, 1<<20).Draw(t, "pack")), Workers: rapid.IntRange(1, 3).Draw(t, "workers")})
		defer w.Close()
		picked := rapid.SliceOf(rapid.IntRange(0, len(ids)-1)).Draw(t, "picked")
		for _, i := range picked {
			if err := w.Add(ids[i], bodies[i]); err != nil {
				t.Fatal(err)
			}
		}
		if rapid.Bool().Draw(t, "publish") {
			if err := w.Publish(); err != nil {
				t.Fatal(err)
			}
			for _, i := range picked {
				stored[i] = true
			}
		} else if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		bad := verify(t, s, ids)
		for i, id := range ids {
			if stored[i] == slices.Contains(bad, id) {
				t.Fatalf("segment %d, stored %v", i, stored[i])
			}
		}
	})
}

func BenchmarkWriter(b *testing.B) {
	ids, bodies := pieces(9, lengths(4000, 8000)...)
	n := 0
	for _, x := range bodies {
		n += len(x)
	}
	b.SetBytes(int64(n))
	for b.Loop() {
		publish(b, newStore(b), Options{}, ids, bodies)
	}
}
