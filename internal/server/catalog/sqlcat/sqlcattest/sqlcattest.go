// Package sqlcattest is what every catalog in a database that speaks SQL must do, besides package catalogtest.
package sqlcattest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/catalog/catalogtest"
	"hydrofoil.dev/foil/internal/server/catalog/sqlcat"
)

// Run tests catalogs. Open makes a new, empty one, which is closed by who asked for it.
func Run(t *testing.T, open func(t *testing.T) *sqlcat.Catalog) {
	for _, test := range []struct {
		name string
		test func(t *testing.T, open func(t *testing.T) *sqlcat.Catalog)
	}{
		{"ReplacePacks", testReplacePacks},
		{"ReplacePack", testReplacePack},
		{"LostSegmentsAreNeeded", testLostSegmentsAreNeeded},
		{"MendedPacksAreNeeded", testMendedPacksAreNeeded},
		{"Links", testLinks},
		{"Usage", testUsage},
		{"NamesAreBounded", testNamesAreBounded},
		{"Undelete", testUndelete},
		{"Strays", testStrays},
		{"Collect", testCollect},
	} {
		t.Run(test.name, func(t *testing.T) { test.test(t, open) })
	}
}

func must(t testing.TB, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

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
func place(t *testing.T, c *sqlcat.Catalog, id segment.ID) string {
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
func testReplacePacks(t *testing.T, open func(t *testing.T) *sqlcat.Catalog) {
	c := open(t)
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
func testLostSegmentsAreNeeded(t *testing.T, open func(t *testing.T) *sqlcat.Catalog) {
	c := open(t)
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
func testMendedPacksAreNeeded(t *testing.T, open func(t *testing.T) *sqlcat.Catalog) {
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
			c := open(t)
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
func testLinks(t *testing.T, open func(t *testing.T) *sqlcat.Catalog) {
	c := open(t)
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
func testReplacePack(t *testing.T, open func(t *testing.T) *sqlcat.Catalog) {
	c := open(t)
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

func usagesOf(t *testing.T, c *sqlcat.Catalog) []catalog.RepositoryUsage {
	t.Helper()
	all, err := c.Usages(t.Context(), "", 1000)
	must(t, err)
	return all
}

// held is what a repository holds, counted in the plainest way.
type held struct {
	blobs     map[digest.Digest]int64
	manifests map[digest.Digest][]digest.Digest // what they name
	sizes     map[digest.Digest]int64
}

func (h *held) usage(repo string) catalog.RepositoryUsage {
	u := catalog.RepositoryUsage{Repository: repo}
	named := map[digest.Digest]bool{}
	for d, names := range h.manifests {
		u.Manifests++
		u.Bytes += h.sizes[d]
		for _, n := range names {
			named[n] = true
		}
	}
	for d, size := range h.blobs {
		if named[d] {
			u.Bytes += size
		} else {
			u.Loose += size
		}
	}
	return u
}

// memoryLog keeps what is logged.
type memoryLog struct{ changes []catalog.Change }

func (l *memoryLog) Append(_ context.Context, changes []catalog.Change) error {
	l.changes = append(l.changes, changes...)
	return nil
}

// Whatever is added and removed, in any order, and replayed in any order: the numbers are those of what is there.
func testUsage(t *testing.T, open func(t *testing.T) *sqlcat.Catalog) {
	c := open(t)
	log := new(memoryLog)
	must(t, c.SetLog(t.Context(), log))
	random := rand.New(rand.NewPCG(1, 2))
	repos := map[string]*held{}
	for _, name := range []string{"a", "a/b", "z"} {
		repos[name] = &held{map[digest.Digest]int64{}, map[digest.Digest][]digest.Digest{}, map[digest.Digest]int64{}}
		must(t, c.LinkBlob(t.Context(), name, catalog.Blob{Digest: digest.FromString("first"), Size: 1}))
		repos[name].blobs[digest.FromString("first")] = 1
	}
	names := []string{"a", "a/b", "z"}
	documents := []string{"no JSON", `{"layers": 7, "config": []}`, `{"layers": ["x", {"digest": 5}, {"digest": "sha256:1"}, null], "config": {"digest": null}}`, `[]`, `"x"`, ``}
	for range 400 {
		name := names[random.IntN(len(names))]
		h := repos[name]
		b := catalog.Blob{Digest: digest.FromString(fmt.Sprint("blob", random.IntN(8))), Size: 1 + random.Int64N(1000)}
		switch random.IntN(6) {
		case 0, 1:
			must(t, c.LinkBlob(t.Context(), name, b)) // also with another size
			h.blobs[b.Digest] = b.Size
		case 2:
			err := c.UnlinkBlob(t.Context(), name, b.Digest)
			if _, ok := h.blobs[b.Digest]; ok {
				must(t, err)
			} else if !errors.Is(err, catalog.ErrNotFound) {
				t.Fatal(err)
			}
			delete(h.blobs, b.Digest)
		case 3, 4:
			var of []digest.Digest
			for range random.IntN(4) {
				of = append(of, digest.FromString(fmt.Sprint("blob", random.IntN(8))))
			}
			m := catalogtest.Naming(of...)
			if random.IntN(5) == 0 {
				of = nil
				m.Bytes = []byte(documents[random.IntN(len(documents))])
				m.Digest = digest.FromBytes(m.Bytes)
			}
			must(t, c.PutManifest(t.Context(), name, m, "t"))
			h.manifests[m.Digest], h.sizes[m.Digest] = of, int64(len(m.Bytes))
		case 5:
			for d := range h.manifests {
				must(t, c.DeleteManifest(t.Context(), name, d))
				delete(h.manifests, d)
				break
			}
		}
	}
	var want []catalog.RepositoryUsage
	for _, name := range names {
		want = append(want, repos[name].usage(name))
	}
	if diff := cmp.Diff(want, usagesOf(t, c)); diff != "" {
		t.Errorf("usage (-want +got):\n%s", diff)
	}

	must(t, c.Close()) // the log has all then
	random.Shuffle(len(log.changes), func(i, j int) { log.changes[i], log.changes[j] = log.changes[j], log.changes[i] })
	replayed := open(t)
	defer replayed.Close()
	for part := range slices.Chunk(log.changes, 100) {
		must(t, replayed.Replay(t.Context(), part))
	}
	if diff := cmp.Diff(want, usagesOf(t, replayed)); diff != "" {
		t.Errorf("usage after a replay (-want +got):\n%s", diff)
	}
}

// A manifest that names more than anybody reads is counted in part, and can be deleted.
func testNamesAreBounded(t *testing.T, open func(t *testing.T) *sqlcat.Catalog) {
	c := open(t)
	defer c.Close()
	var names []digest.Digest
	for i := range 5000 {
		names = append(names, digest.FromString(fmt.Sprint(i)))
	}
	m := catalogtest.Naming(names...)
	must(t, c.PutManifest(t.Context(), "r", m))
	must(t, c.LinkBlob(t.Context(), "r", catalog.Blob{Digest: names[0], Size: 1}), c.LinkBlob(t.Context(), "r", catalog.Blob{Digest: names[4999], Size: 1}))
	if u := usagesOf(t, c)[0].Usage; u.Loose > 2 || u.Bytes > int64(len(m.Bytes))+2 || u.Bytes+u.Loose != int64(len(m.Bytes))+2 {
		t.Errorf("usage %+v", u)
	}
	must(t, c.DeleteManifest(t.Context(), "r", m.Digest))
	if u := usagesOf(t, c)[0].Usage; u != (catalog.Usage{Loose: 2}) {
		t.Errorf("usage %+v when nothing names a blob", u)
	}
}

// What was deleted is brought back as it was, unless blobs of it are gone.
func testUndelete(t *testing.T, open func(t *testing.T) *sqlcat.Catalog) {
	c := open(t)
	defer c.Close()
	ctx := t.Context()
	c.SetLease(1)
	layer, config := digest.FromString("layer"), digest.FromString("config")
	whole := catalog.Manifest{Bytes: []byte(`{"config":{"digest":"` + config.String() + `"},"layers":[{"digest":"` + layer.String() +
		`"},{"digest":"` + digest.FromString("foreign").String() + `","urls":["https://x"]}],"annotations":{"digest":"sha256:0"}}`), Pushed: time.Unix(5, 0)}
	whole.Digest = digest.FromBytes(whole.Bytes)
	for _, b := range []digest.Digest{layer, config} {
		must(t, c.LinkBlob(ctx, "r", catalog.Blob{Digest: b, Size: 4}))
	}
	must(t, c.PutManifest(ctx, "r", whole, "a", "b"), c.DeleteManifest(ctx, "r", whole.Digest))
	items, err := c.Deleted(ctx, "r")
	must(t, err)
	if len(items) != 3 {
		t.Fatalf("deleted: %+v", items)
	}
	got, err := c.Undelete(ctx, "r", items)
	must(t, err)
	if diff := cmp.Diff(items, got); diff != "" {
		t.Errorf("brought back (-want +got):\n%s", diff)
	}
	if m, err := c.Manifest(ctx, "r", whole.Digest); err != nil || !cmp.Equal(m, whole) {
		t.Errorf("%+v, %v", m, err)
	}
	f, err := c.Family(ctx, "r", whole.Digest)
	if err != nil || !f.Named {
		t.Errorf("%+v, %v", f, err)
	}
	must(t, c.DeleteManifest(ctx, "r", whole.Digest), c.UnlinkBlob(ctx, "r", config))
	if got, err := c.Undelete(ctx, "r", items); err != nil || len(got) != 0 {
		t.Errorf("without its config: %+v, %v", got, err)
	}
}

// Strays are objects that nothing names, and that nothing named when it was asked for the first time.
func testStrays(t *testing.T, open func(t *testing.T) *sqlcat.Catalog) {
	c := open(t)
	defer c.Close()
	ctx := t.Context()
	toc := digest.FromString("toc")
	must(t, c.AddPack(ctx, packOf("packs/a", catalogtest.ID(1))), c.PutRootfs(ctx, catalog.Rootfs{ChainID: digest.FromString("chain"), TOC: toc, Key: "tocs/a", Index: "indexes/a"}))
	keys := []string{"packs/a", "packs/b", "tocs/a", "indexes/a", "orders/sha256/" + toc.Encoded() + "-1", "orders/sha256/0-1"}
	first, err := c.Strays(ctx, keys, time.Now().Add(-time.Second))
	must(t, err)
	second, err := c.Strays(ctx, keys, time.Now().Add(time.Second))
	must(t, err)
	slices.Sort(second)
	if len(first) != 0 || !slices.Equal(second, []string{"orders/sha256/0-1", "packs/b"}) {
		t.Errorf("at once %q, later %q", first, second)
	}
	must(t, c.Gone(ctx, second))
	if again, err := c.Strays(ctx, keys, time.Now().Add(-time.Second)); err != nil || len(again) != 0 {
		t.Errorf("after they were removed: %q, %v", again, err)
	}
}

// When all is deleted nothing is left.
func testCollect(t *testing.T, open func(t *testing.T) *sqlcat.Catalog) {
	c := open(t)
	defer c.Close()
	ctx := t.Context()
	c.SetLease(1)
	c.SetWindow(0)
	layer, chain := digest.FromString("layer"), digest.FromString("chain")
	m := catalogtest.Naming(layer)
	image := catalog.StartupImage{Repository: "r", ChainID: chain, TOC: digest.FromString("toc"), Platform: "p", Noted: time.Unix(1, 0)}
	must(t, c.LinkBlob(ctx, "r", catalog.Blob{Digest: layer, Size: 4}), c.PutManifest(ctx, "r", m, "a"), c.AddPack(ctx, packOf("packs/a", catalogtest.ID(1))),
		c.PutLayer(ctx, catalog.Layer{Blob: layer, Entries: "entries/a"}, "packs/a"), c.PutRootfs(ctx, catalog.Rootfs{ChainID: chain, TOC: image.TOC, Key: "tocs/a", Index: "indexes/a"}),
		c.NoteImage(ctx, image), c.PutTrace(ctx, catalog.Trace{Repository: "r", ChainID: chain, TOC: image.TOC, Service: "s", Body: []byte("b")}, catalog.TraceLimits{Traces: 2, Services: 2}))
	unindexed, err := c.Unindexed(ctx, 10)
	if err != nil || len(unindexed) != 1 || unindexed[0].Manifest.Digest != m.Digest {
		t.Fatalf("%+v, %v", unindexed, err)
	}
	must(t, c.PutImage(ctx, unindexed[0], chain))
	collect := func() (dead int) {
		t.Helper()
		_, layers, err := c.CollectLayers(ctx, everything())
		must(t, err)
		dead = layers.Dead
		for _, fn := range []func(context.Context, catalog.Due) (catalog.Collected, error){c.CollectLinks, c.CollectRootfs, c.CollectStartup, c.CollectRepositories} {
			done, err := fn(ctx, everything())
			must(t, err)
			dead += done.Dead
		}
		return dead
	}
	if n := collect(); n != 0 {
		t.Errorf("%d things are dead that an image needs", n)
	}
	must(t, c.DeleteManifest(ctx, "r", m.Digest))
	dead := 0
	for range 4 {
		dead += collect()
	}
	if dead != 5 { // link, layer, rootfs, startup image, repository
		t.Errorf("%d things are dead, want 5", dead)
	}
	packs, err := c.PacksToReview(ctx, everything())
	if err != nil || len(packs) != 1 || len(packs[0].Layers) != 0 {
		t.Fatalf("packs %+v, %v", packs, err)
	}
	must(t, c.PutDead(ctx, packs[0], packs[0].Size))
	if packs, err = c.PacksToCompact(ctx, 0.5, 10); err != nil || len(packs) != 1 {
		t.Fatalf("packs %+v, %v", packs, err)
	}
	must(t, c.Postpone(ctx, packs, time.Now().Add(-time.Hour)))
	packs[0].Frames = packOf("packs/a", catalogtest.ID(1)).Frames
	must(t, c.ReplacePacks(ctx, packs, nil))
	doomed, err := c.Doomed(ctx, time.Now().Add(time.Minute), 100)
	slices.Sort(doomed)
	if want := []string{"entries/a", "indexes/a", "orders/sha256/" + image.TOC.Encoded() + "-*", "packs/a", "tocs/a"}; err != nil || !slices.Equal(doomed, want) {
		t.Errorf("doomed %q, %v", doomed, err)
	}
	s, err := c.Stats(ctx)
	if err != nil || s != (sqlcat.Stats{}) {
		t.Errorf("left: %+v, %v", s, err)
	}
	stats, err := c.GarbageStats(ctx, everything())
	must(t, err)
	if stats.Packs != 0 || stats.DeletedThings != 0 || stats.Unnamed != 0 {
		t.Errorf("%+v", stats)
	}
	if _, err := c.Tidy(ctx); err != nil {
		t.Error(err)
	}
}
