package catalogtest

import (
	"encoding/binary"
	"slices"
	"testing"

	"github.com/opencontainers/go-digest"

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

// wantFound checks in which packs segments are found, and that the packs are kept.
func wantFound(t *testing.T, c catalog.Catalog, ids []segment.ID, packs ...string) {
	t.Helper()
	keep := c.Keep()
	defer keep.Release()
	got, err := keep.Find(t.Context(), ids)
	check(t, err)
	slices.Sort(got.Keys)
	wantEqual(t, "packs", packs, got.Keys)
	kept := keep.Packs()
	slices.Sort(kept)
	wantEqual(t, "packs that are kept", append([]string{}, packs...), kept)
}

// wantPacks checks which packs a layer needs, in their order, and what of them is damaged.
func wantPacks(t *testing.T, c catalog.Catalog, layer digest.Digest, packs []string, damaged ...catalog.Resting) {
	t.Helper()
	got, err := c.PacksOf(t.Context(), []digest.Digest{layer}, "")
	check(t, err)
	wantEqual(t, "packs of a layer", packs, got.Keys)
	wantEqual(t, "damaged segments", len(damaged), len(got.Damaged))
	for _, d := range damaged {
		if !got.Damaged[d] {
			t.Errorf("%+v is not damaged", d)
		}
	}
}

func testPacks(t *testing.T, c catalog.Catalog) {
	wantFound(t, c, nil)
	wantFound(t, c, []segment.ID{ID(1), ID(1)})
	p, q := Pack("packs/p", 1, 10, 3), Pack("packs/q", 11, 20, 100)
	check(t, c.AddPack(t.Context(), p))
	check(t, c.AddPack(t.Context(), q))
	check(t, c.AddPack(t.Context(), catalog.Pack{Key: "packs/empty"}))
	wantFound(t, c, []segment.ID{ID(9), ID(21)}, "packs/p")
	wantFound(t, c, []segment.ID{ID(9), ID(21), ID(1), ID(20), ID(1)}, "packs/p", "packs/q")
	wantFound(t, c, []segment.ID{ID(21)})
}

func testPackTwice(t *testing.T, c catalog.Catalog) {
	p := Pack("packs/p", 1, 10, 3)
	for range 2 {
		check(t, c.AddPack(t.Context(), p))
	}
	// The same segments in another pack, and twice in one pack: the newest is found.
	q := Pack("packs/q", 5, 12, 2)
	q.Frames = append(q.Frames, q.Frames...)
	check(t, c.AddPack(t.Context(), q))
	wantFound(t, c, []segment.ID{ID(1), ID(4), ID(13)}, "packs/p")
	wantFound(t, c, []segment.ID{ID(5), ID(12)}, "packs/q")
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
	wantFound(t, c, []segment.ID{ID(1), ID(10)}) // nothing of it is left
	p = Pack("packs/p", 1, 10, 3)
	check(t, c.AddPack(t.Context(), p))
	wantFound(t, c, []segment.ID{ID(1), ID(10)}, "packs/p")
}

// Layers need the packs that they were recorded with, those of an image are found by its rootfs, and what is damaged is told
// until another pack has it, which they need as well then.
func testForget(t *testing.T, c catalog.Catalog) {
	p, q, other := Pack("packs/p", 1, 10, 3), Pack("packs/q", 11, 12, 2), Pack("packs/z", 30, 31, 2)
	layer := digestOf("layer")
	check(t, c.AddPack(t.Context(), p))
	check(t, c.AddPack(t.Context(), q))
	check(t, c.AddPack(t.Context(), other))
	wantPacks(t, c, layer, nil)
	check(t, c.PutLayer(t.Context(), catalog.Layer{Blob: layer, Entries: "entries/x"}, "packs/q", "packs/p"))
	wantPacks(t, c, layer, []string{"packs/p", "packs/q"})
	check(t, c.Forget(t.Context(), nil))
	bad := catalog.Resting{Pack: "packs/p", ID: ID(5)}
	check(t, c.Forget(t.Context(), []catalog.Resting{bad, bad, {Pack: "packs/unknown", ID: ID(6)}, {ID: ID(7)}}))
	wantPacks(t, c, layer, []string{"packs/p", "packs/q"}, bad)
	keep := c.Keep()
	defer keep.Release()
	found, err := keep.Find(t.Context(), []segment.ID{ID(5)})
	check(t, err)
	if !found.Damaged[bad] {
		t.Errorf("found %+v, which does not say that it is damaged", found)
	}
	check(t, c.AddPack(t.Context(), Pack("packs/r", 5, 6, 2)))
	wantPacks(t, c, layer, []string{"packs/p", "packs/q", "packs/r"}, bad)
	check(t, c.AddPack(t.Context(), Pack("packs/s", 6, 7, 2)))
	wantPacks(t, c, layer, []string{"packs/p", "packs/q", "packs/r"}, bad)
}

func testManySegments(t *testing.T, c catalog.Catalog) {
	const n = 5000
	check(t, c.AddPack(t.Context(), Pack("packs/p", 0, n-1, 7)))
	check(t, c.AddPack(t.Context(), Pack("packs/q", n/2, 2*n, 11)))
	for i := range 3 * n / 100 { // the last third is not stored
		var want []string
		switch from := 100 * i; {
		case from < n/2:
			want = []string{"packs/p"}
		case from <= 2*n:
			want = []string{"packs/q"}
		}
		ids := make([]segment.ID, 100)
		for k := range ids {
			ids[k] = ID(100*i + k)
		}
		wantFound(t, c, ids, want...)
	}
}
