package catalogtest

import (
	"encoding/binary"
	"math/rand/v2"
	"testing"

	"github.com/google/go-cmp/cmp"

	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/server/catalog"
)

// ID is the ID of a made-up segment.
func ID(n int) segment.ID {
	var b [8]byte
	binary.BigEndian.PutUint64(b[:], uint64(n))
	return segment.Sum(b[:])
}

// Pack makes a pack of frames of perFrame made-up segments, first to last.
func Pack(key string, first, last, perFrame int) catalog.Pack {
	p := catalog.Pack{Key: key}
	for ; first <= last; first += perFrame {
		f := catalog.Frame{Pack: key, Offset: p.Size, Length: uint32(100 + first%7)}
		for n := first; n < min(first+perFrame, last+1); n++ {
			f.Segments = append(f.Segments, catalog.FrameSegment{ID: ID(n), Length: uint32(n%1000 + 1)})
			f.RawLength += uint32(n%1000 + 1)
		}
		p.Frames = append(p.Frames, f)
		p.Size += int64(f.Length)
	}
	return p
}

// wantLocated checks that the segments of ids are where packs say.
func wantLocated(t *testing.T, c catalog.Catalog, ids []segment.ID, packs ...catalog.Pack) {
	t.Helper()
	where := make(map[segment.ID]catalog.Location)
	for _, p := range packs {
		for i := range p.Frames {
			for j, s := range p.Frames[i].Segments {
				if _, ok := where[s.ID]; !ok {
					where[s.ID] = catalog.Location{Frame: &p.Frames[i], Index: j}
				}
			}
		}
	}
	got, err := c.Locate(t.Context(), ids)
	check(t, err)
	if len(got) != len(ids) {
		t.Fatalf("%d locations of %d segments", len(got), len(ids))
	}
	type key struct {
		pack   string
		offset int64
	}
	shared := make(map[key]*catalog.Frame)
	for i, id := range ids {
		if diff := cmp.Diff(where[id], got[i]); diff != "" {
			t.Fatalf("location of segment %d (-want +got):\n%s", i, diff)
		}
		if f := got[i].Frame; f != nil {
			k := key{f.Pack, f.Offset}
			if other, ok := shared[k]; ok && other != f {
				t.Fatalf("the frame %+v is there twice", k)
			}
			shared[k] = f
		}
	}
}

func testPacks(t *testing.T, c catalog.Catalog) {
	wantLocated(t, c, nil)
	wantLocated(t, c, []segment.ID{ID(1), {}, ID(1)})
	p, q := Pack("packs/p", 1, 10, 3), Pack("packs/q", 8, 20, 100)
	check(t, c.AddPack(t.Context(), p))
	check(t, c.AddPack(t.Context(), q))
	check(t, c.AddPack(t.Context(), catalog.Pack{Key: "packs/empty"}))
	ids := []segment.ID{ID(9), ID(21), ID(1), ID(20), {}, ID(1), ID(10), ID(11), ID(21), ID(3)}
	wantLocated(t, c, ids, p, q)
}

func testPackTwice(t *testing.T, c catalog.Catalog) {
	p := Pack("packs/p", 1, 10, 3)
	for range 2 {
		check(t, c.AddPack(t.Context(), p))
	}
	// The same segments in another pack, and twice in one pack.
	q := Pack("packs/q", 5, 12, 2)
	q.Frames = append(q.Frames, q.Frames...)
	check(t, c.AddPack(t.Context(), q))
	wantLocated(t, c, []segment.ID{ID(1), ID(5), ID(10), ID(11), ID(12), ID(13)}, p, q)
	p.Size++
	if err := c.AddPack(t.Context(), p); err == nil {
		t.Error("a pack of another size under a key that is taken is accepted")
	}
}

func testPackRefused(t *testing.T, c catalog.Catalog) {
	p := Pack("packs/p", 1, 10, 3)
	p.Frames[3].Segments[0].ID = segment.ID{}
	if err := c.AddPack(t.Context(), p); err == nil {
		t.Fatal("a pack with a hole is accepted")
	}
	wantLocated(t, c, []segment.ID{ID(1), ID(10)}) // nothing of it is left
	p = Pack("packs/p", 1, 10, 3)
	check(t, c.AddPack(t.Context(), p))
	wantLocated(t, c, []segment.ID{ID(1), ID(10)}, p)
}

func testForget(t *testing.T, c catalog.Catalog) {
	p, q := Pack("packs/p", 1, 10, 3), Pack("packs/q", 5, 12, 2)
	check(t, c.AddPack(t.Context(), p))
	check(t, c.Forget(t.Context(), nil))
	check(t, c.Forget(t.Context(), []segment.ID{ID(5), ID(6), ID(99), ID(5)}))
	wantLocated(t, c, []segment.ID{ID(5), ID(6)})
	wantLocated(t, c, []segment.ID{ID(4), ID(7), ID(10)}, p)
	// Another pack brings them back, and takes nothing else over.
	check(t, c.AddPack(t.Context(), q))
	wantLocated(t, c, []segment.ID{ID(5), ID(6)}, q)
	wantLocated(t, c, []segment.ID{ID(4), ID(7), ID(10)}, p)
}

func testManySegments(t *testing.T, c catalog.Catalog) {
	const n = 5000
	p, q := Pack("packs/p", 0, n-1, 7), Pack("packs/q", n/2, 2*n, 11)
	check(t, c.AddPack(t.Context(), p))
	check(t, c.AddPack(t.Context(), q))
	var ids []segment.ID
	for i := range 3 * n { // the last third is not stored
		ids = append(ids, ID(i))
	}
	r := rand.New(rand.NewPCG(1, 2))
	r.Shuffle(len(ids), func(i, j int) { ids[i], ids[j] = ids[j], ids[i] })
	wantLocated(t, c, ids, p, q)
}
