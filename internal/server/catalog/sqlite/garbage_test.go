package sqlite_test

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/catalog/catalogtest"
	"hydrofoil.dev/foil/internal/server/catalog/sqlite"
)

func packOf(key string, ids ...segment.ID) catalog.Pack {
	f := catalog.Frame{Offset: 8, Length: 100}
	for _, id := range ids {
		f.Segments = append(f.Segments, catalog.FrameSegment{ID: id, Length: 10})
		f.RawLength += 10
	}
	return catalog.Pack{Key: key, Size: 200, Frames: []catalog.Frame{f}}
}

func everything() catalog.Due { return catalog.Due{Now: time.Now(), Grace: -1, Limit: 100} }

// place returns the pack where a segment is found, and "" when there is none.
func place(t *testing.T, c *sqlite.Opened, id segment.ID) string {
	t.Helper()
	keep := c.Keep()
	defer keep.Release()
	found, err := keep.Find(t.Context(), []segment.ID{id})
	if err != nil {
		t.Fatal(err)
	}
	for _, key := range found.Keys {
		if !found.Damaged[catalog.Resting{Pack: key, ID: id}] {
			return key
		}
	}
	return ""
}

// A pack is not replaced while somebody relies on it, or came to need it since it was looked at; and what is replaced
// is found in the new one.
func TestReplacePacks(t *testing.T) {
	c := open(t, filepath.Join(t.TempDir(), "db"))
	defer c.Close()
	ctx := t.Context()
	a, b := catalogtest.ID(1), catalogtest.ID(2)
	must(t, c.AddPack(ctx, packOf("packs/old", a, b)))
	look := func() []catalog.PackUse {
		t.Helper()
		packs, err := c.PacksToReview(ctx, everything())
		must(t, err)
		return packs
	}
	packs := look()
	if len(packs) != 1 || packs[0].Key != "packs/old" || len(packs[0].Layers) != 0 {
		t.Fatalf("packs to review: %+v", packs)
	}
	keep := c.Keep()
	if found, err := keep.Find(ctx, []segment.ID{a}); err != nil || len(found.Keys) != 1 {
		t.Fatalf("%+v, %v", found, err)
	}
	if err := c.ReplacePacks(ctx, packs, nil); !errors.Is(err, catalog.ErrInUse) {
		t.Errorf("a pack that is kept: %v", err)
	}
	blob := digest.FromString("layer")
	must(t, c.LinkBlob(ctx, "r", catalog.Blob{Digest: blob, Size: 1}), c.PutLayer(ctx, catalog.Layer{Blob: blob, Entries: "entries/x"}, keep.Packs()...))
	keep.Release()
	if err := c.ReplacePacks(ctx, packs, nil); !errors.Is(err, catalog.ErrInUse) {
		t.Errorf("a pack that a layer needs since it was looked at: %v", err)
	}
	if packs = look(); len(packs) != 1 || !slices.Equal(packs[0].Layers, []digest.Digest{blob}) {
		t.Fatalf("packs to review: %+v", packs)
	}
	packs[0].Frames = packOf("packs/old", a, b).Frames
	by := packOf("packs/new", a)
	must(t, c.ReplacePacks(ctx, packs, &by))
	if got, gone := place(t, c, a), place(t, c, b); got != "packs/new" || gone != "" {
		t.Errorf("the live segment is in %q, the dead one in %q", got, gone)
	}
	if known, err := c.PacksKnown(ctx, []string{"packs/old"}); known || err != nil {
		t.Errorf("the old pack is known: %v, %v", known, err)
	}
	doomed, err := c.Doomed(ctx, time.Now().Add(time.Minute), 10)
	if err != nil || !slices.Equal(doomed, []string{"packs/old"}) {
		t.Errorf("doomed %q, %v", doomed, err)
	}
	if packs = look(); len(packs) != 1 || !slices.Equal(packs[0].Layers, []digest.Digest{blob}) {
		t.Errorf("the new pack is needed by %+v", packs)
	}
}

// Layers that need segments which were lost need the pack where somebody stores them again.
func TestLostSegmentsAreNeeded(t *testing.T) {
	c := open(t, filepath.Join(t.TempDir(), "db"))
	defer c.Close()
	ctx := t.Context()
	a := catalogtest.ID(1)
	must(t, c.AddPack(ctx, packOf("packs/old", a)))
	blob := digest.FromString("layer")
	must(t, c.PutLayer(ctx, catalog.Layer{Blob: blob, Entries: "entries/x"}, "packs/old"), c.Forget(ctx, []catalog.Resting{{Pack: "packs/old", ID: a}}), c.AddPack(ctx, packOf("packs/new", a)))
	packs, err := c.PacksToReview(ctx, everything())
	must(t, err)
	for _, p := range packs {
		if p.Key == "packs/new" && !slices.Equal(p.Layers, []digest.Digest{blob}) {
			t.Errorf("the new pack is needed by %v", p.Layers)
		}
	}
	if place(t, c, a) != "packs/new" {
		t.Error("it is not found where it was stored again")
	}
}

// Layers that need a pack which a scrub replaced need the new one, and the pack where what was lost is stored again: else a
// collector would take these for nobody's.
func TestMendedPacksAreNeeded(t *testing.T) {
	a, b := catalogtest.ID(1), catalogtest.ID(2)
	salvaged := packOf("packs/salvaged", a)
	for name, test := range map[string]struct {
		with *catalog.Pack
		want []string
	}{
		"a part is sound": {&salvaged, []string{"packs/again", "packs/salvaged"}},
		"all is lost":     {nil, []string{"packs/again"}},
	} {
		t.Run(name, func(t *testing.T) {
			c := open(t, filepath.Join(t.TempDir(), "db"))
			defer c.Close()
			ctx := t.Context()
			old := packOf("packs/old", a, b)
			blob := digest.FromString("layer")
			must(t, c.AddPack(ctx, old), c.PutLayer(ctx, catalog.Layer{Blob: blob, Entries: "entries/x"}, old.Key))
			keep := c.Keep()
			if found, err := keep.Find(ctx, []segment.ID{a}); err != nil || len(found.Keys) != 1 {
				t.Fatalf("%+v, %v", found, err)
			}
			if err := c.ReplacePack(ctx, old, test.with); !errors.Is(err, catalog.ErrInUse) {
				t.Errorf("while an ingest relies on it: %v", err)
			}
			keep.Release()
			must(t, c.ReplacePack(ctx, old, test.with), c.AddPack(ctx, packOf("packs/again", a, b)))
			packs, err := c.PacksToReview(ctx, everything())
			must(t, err)
			var needed []string
			for _, p := range packs {
				if slices.Equal(p.Layers, []digest.Digest{blob}) {
					needed = append(needed, p.Key)
				}
			}
			slices.Sort(needed)
			if !slices.Equal(needed, test.want) {
				t.Errorf("the layer needs %q, want %q", needed, test.want)
			}
			if got := place(t, c, b); got != "packs/again" {
				t.Errorf("what was lost is in %q", got)
			}
		})
	}
}

// A blob stays while a manifest names it, can be brought back, or a client was told that it is there.
func TestLinks(t *testing.T) {
	c := open(t, filepath.Join(t.TempDir(), "db"))
	defer c.Close()
	ctx := t.Context()
	c.SetLease(1)
	d := digest.FromString("blob")
	m := catalog.Manifest{MediaType: "m/t", Bytes: []byte(`{"layers":[{"digest":"` + d.String() + `"}]}`), Pushed: time.Now()}
	m.Digest = digest.FromBytes(m.Bytes)
	must(t, c.LinkBlob(ctx, "r", catalog.Blob{Digest: d, Size: 4}), c.PutManifest(ctx, "r", m, "latest"))
	stays := func(why string, want bool) {
		t.Helper()
		if _, err := c.CollectLinks(ctx, everything()); err != nil {
			t.Fatal(err)
		}
		if _, err := c.Blob(ctx, "r", d); (err == nil) != want {
			t.Errorf("%s: %v", why, err)
		}
	}
	stays("a manifest names it", true)
	must(t, c.DeleteManifest(ctx, "r", m.Digest))
	stays("the manifest can be brought back", true)
	c.SetLease(time.Hour)
	if _, err := c.Exists(ctx, "r", d); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Purge(ctx, time.Now().Add(time.Minute), 10); err != nil {
		t.Fatal(err)
	}
	stays("a client was told that it is there", true)
	due := everything()
	due.Now = due.Now.Add(2 * time.Hour)
	if done, err := c.CollectLinks(ctx, due); err != nil || done.Dead != 1 {
		t.Errorf("after the lease: %+v, %v", done, err)
	}
	stays("nothing needs it", false)
	items, err := c.Deleted(ctx, "")
	if err != nil || len(items) != 0 {
		t.Errorf("what can be brought back of what was purged: %+v, %v", items, err)
	}
}

// A catalog of before knows what its manifests name, and has everything reviewed.
func TestGarbageOfOldCatalogs(t *testing.T) {
	path := filepath.Join(t.TempDir(), "db")
	named, orphan := digest.FromString("named").String(), digest.FromString("orphan").String()
	older(t, path, 4, `INSERT INTO repositories VALUES (1, 'r')`,
		`INSERT INTO blobs VALUES (1, '`+named+`', 1, ''), (1, '`+orphan+`', 1, '')`,
		`INSERT INTO manifests VALUES (1, 1, 'sha256:m', 'm/t', '', '', '', CAST('{"config":{"digest":"`+named+`"}}' AS BLOB), 0)`,
		`INSERT INTO packs VALUES (1, 'packs/x', 10)`)
	c := open(t, path)
	defer c.Close()
	done, err := c.CollectLinks(t.Context(), everything())
	if err != nil || done.Dead != 1 {
		t.Errorf("collected %+v, %v", done, err)
	}
	if _, err := c.Blob(t.Context(), "r", digest.Digest(named)); err != nil {
		t.Errorf("a blob that a manifest names: %v", err)
	}
	packs, err := c.PacksToReview(t.Context(), everything())
	if err != nil || len(packs) != 1 {
		t.Errorf("packs to review: %+v, %v", packs, err)
	}
}

// What was collected makes the catalog's file smaller.
func TestShrink(t *testing.T) {
	path := filepath.Join(t.TempDir(), "db")
	c := open(t, path)
	defer c.Close()
	ctx := t.Context()
	big := catalog.Manifest{MediaType: "m/t", Bytes: make([]byte, 4<<20), Pushed: time.Now()}
	big.Digest = digest.FromBytes(big.Bytes)
	must(t, c.PutManifest(ctx, "r", big), c.DeleteManifest(ctx, "r", big.Digest))
	if _, err := c.Purge(ctx, time.Now().Add(time.Minute), 10); err != nil {
		t.Fatal(err)
	}
	for more := true; more; {
		var err error
		if more, err = c.Shrink(ctx); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{path, path + "-wal"} {
		if info, err := os.Stat(name); err != nil || info.Size() > 1<<20 {
			t.Errorf("%s: %v, %v", filepath.Base(name), info, err)
		}
	}
}
