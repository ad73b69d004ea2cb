package sqlite_test

import (
	"errors"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/server/catalog"
)

// packNamed is a pack of frames with two segments each, which names say.
func packNamed(key string, frames ...[2]string) catalog.Pack {
	p := catalog.Pack{Key: key, Size: 1000}
	for i, names := range frames {
		f := catalog.Frame{Pack: key, Offset: int64(8 + 10*i), Length: 10, RawLength: 20}
		for _, n := range names {
			f.Segments = append(f.Segments, catalog.FrameSegment{ID: segment.Sum([]byte(n)), Length: 10})
		}
		p.Frames = append(p.Frames, f)
	}
	return p
}

// Packs are replaced in any order, and each time segments are found where they are now.
func TestReplacePack(t *testing.T) {
	c := open(t, filepath.Join(t.TempDir(), "catalog.db"))
	defer c.Close()
	ctx := t.Context()
	packs := map[string]catalog.Pack{}
	for _, p := range []catalog.Pack{
		packNamed("packs/c", [2]string{"c1", "c2"}, [2]string{"c3", "c4"}),
		packNamed("packs/a", [2]string{"a1", "a2"}, [2]string{"c1", "a4"}), // one is elsewhere already
		packNamed("packs/d", [2]string{"d1", "d2"}),
		packNamed("packs/b", [2]string{"b1", "b2"}, [2]string{"b3", "b4"}, [2]string{"b5", "b6"}),
	} {
		must(t, c.AddPack(ctx, p))
		packs[p.Key] = p
	}
	for key, want := range packs {
		got, of, err := c.Pack(ctx, key)
		if err != nil || got.Size != want.Size || !slices.Equal(of.Keys, []string{key}) || len(of.Damaged) > 0 {
			t.Errorf("%+v, %+v, %v", got, of, err)
		}
	}
	sound := packNamed("packs/e", [2]string{"a1", "a2"})
	must(t, c.ReplacePack(ctx, packs["packs/a"], &sound)) // leaves a gap
	must(t, c.ReplacePack(ctx, packs["packs/b"], nil))    // the last
	again := packNamed("packs/f", [2]string{"c3", "c4"}, [2]string{"f1", "f2"})
	must(t, c.ReplacePack(ctx, packs["packs/c"], &again)) // the first
	got := map[string]string{}
	for _, name := range []string{"a1", "a2", "a4", "b1", "b6", "c1", "c3", "c4", "d1", "d2", "f1"} {
		got[name] = place(t, c, segment.Sum([]byte(name)))
	}
	want := map[string]string{"a1": "packs/e", "a2": "packs/e", "a4": "", "b1": "", "b6": "", "c1": "", "c3": "packs/f", "c4": "packs/f",
		"d1": "packs/d", "d2": "packs/d", "f1": "packs/f"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	_, of, err := c.Pack(ctx, "packs/f")
	if c1 := (catalog.Resting{Pack: "packs/f", ID: segment.Sum([]byte("c1"))}); err != nil || !of.Damaged[c1] || len(of.Damaged) != 2 {
		t.Errorf("what the pack lost whose place it took: %+v, %v", of.Damaged, err)
	}
	if _, _, err := c.Pack(ctx, "packs/a"); !errors.Is(err, catalog.ErrNotFound) {
		t.Errorf("a pack that was replaced: %v", err)
	}
	if keys, err := c.PacksAfter(ctx, "packs/d", 10); err != nil || !cmp.Equal(keys, []string{"packs/e", "packs/f"}) {
		t.Errorf("%v, %v", keys, err)
	}
}
