package proof

import (
	"bytes"
	"context"
	"errors"
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"
	"pgregory.net/rapid"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/flatten"
	"hydrofoil.dev/foil/internal/format/layer/layertest"
	"hydrofoil.dev/foil/internal/format/recipe"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/format/toc/toctest"
	"hydrofoil.dev/foil/internal/worker/bundletest"
)

// rig is an image, its server and what is mounted of it, all in memory.
type rig struct {
	m        *bundletest.Image
	mounted  [][]byte // contents
	badMeta  bool
	dir      string
	recipes  int // asked for
	contents int // asked for
	blobs    int // asked for
	cut      int // the next so many answers of contents break off after a section
	known    func(digest.Digest) string
}

func newRig(t *testing.T, layers ...layertest.Layer) *rig {
	t.Helper()
	g := &rig{m: bundletest.NewLayers(t, layers...), dir: t.TempDir()}
	for i := range g.m.Tree.Contents {
		g.mounted = append(g.mounted, g.m.Content(uint32(i)))
	}
	return g
}

// image has files that upper layers hide, and some that are large, equal, holes and links.
func image() []layertest.Layer {
	zeros := strings.Repeat("\x00", 3<<20)
	return []layertest.Layer{
		{
			layertest.Dir("d", 0o755), layertest.File("d/a", 0o644, toctest.Blob(1, 200_000)), layertest.File("d/b", 0o644, toctest.Blob(2, 5000)),
			layertest.File("gone", 0o644, toctest.Blob(3, 2<<20)+zeros+toctest.Blob(4, 300_000)), layertest.File("zeros", 0o644, zeros),
			layertest.File("large", 0o644, toctest.Blob(5, 3<<20)), layertest.Link("link", "large").Xattr("user.a", "b"),
			layertest.File("again", 0o644, toctest.Blob(2, 5000)), layertest.File("empty", 0o644, ""),
		},
		{layertest.Whiteout("gone"), layertest.File("d/a", 0o644, "seen"), layertest.File("late", 0o644, "small"), layertest.Symlink("s", "d/a")},
		{layertest.Whiteout("late"), layertest.Dir("new", 0o755), layertest.File("zeros", 0o644, zeros+"x")},
	}
}

type answer struct {
	sections []any
	cut      bool
}

func (a *answer) Next() (any, error) {
	if len(a.sections) == 0 {
		return nil, io.EOF
	}
	s := a.sections[0]
	if a.sections = a.sections[1:]; a.cut {
		a.cut, a.sections = false, nil
	}
	return s, nil
}

func (a *answer) Close() error { return nil }

func (g *rig) Recipe(_ context.Context, n int) (Sections, error) {
	g.recipes++
	list, err := g.m.Sections(n, nil)
	return &answer{sections: list}, err
}

func (g *rig) Contents(_ context.Context, n int, runs []bundle.ContentRun) (Sections, error) {
	g.contents++
	list, err := g.m.Sections(n, runs)
	cut := g.cut > 0
	g.cut--
	return &answer{sections: list, cut: cut}, err
}

func (g *rig) Blob(_ context.Context, n int) (io.ReadCloser, error) {
	g.blobs++
	b := g.m.Layers[n].Blob.Bytes
	if b == nil {
		return nil, errors.New("no such blob")
	}
	return io.NopCloser(bytes.NewReader(b)), nil
}

func (g *rig) options() Options {
	o := Options{
		TOC: g.m.Tree, TOCDigest: g.m.TOCDigest, Server: g, Dir: g.dir, Known: g.known,
		ReadAt: func(n int, b []byte, off int64) error {
			copy(b, g.mounted[n][off:])
			return nil
		},
		Meta: func(context.Context) (bool, error) { return !g.badMeta, nil },
	}
	for _, l := range g.m.Layers {
		o.DiffIDs = append(o.DiffIDs, l.Blob.DiffID)
		o.Layers = append(o.Layers, l.Blob.Descriptor())
	}
	return o
}

func (g *rig) run(t *testing.T) error {
	t.Helper()
	return Run(t.Context(), g.options())
}

// why returns why a proof failed, or "".
func why(err error) string {
	if f, ok := errors.AsType[*Failed](err); ok {
		return f.Why
	}
	return ""
}

func TestProven(t *testing.T) {
	g := newRig(t, image()...)
	if err := g.run(t); err != nil {
		t.Fatal(err)
	}
	if g.blobs != 0 || g.recipes != 3 || g.contents != 2 {
		t.Errorf("%d blobs, %d recipes and %d lots of contents were asked for, want 0, 3 and 2", g.blobs, g.recipes, g.contents)
	}
}

// What a broken stream of hidden contents brought is not lost, and one that brings nothing ends.
func TestHiddenContentsAreAskedForAgain(t *testing.T) {
	g := newRig(t, image()...)
	g.cut = 2
	if err := g.run(t); err != nil || g.blobs != 0 || g.contents != 4 {
		t.Errorf("%v, %d blobs, contents asked for %d times", err, g.blobs, g.contents)
	}
	g = newRig(t, image()...)
	g.cut = 1000
	if err := g.run(t); err != nil || g.blobs == 0 {
		t.Errorf("%v, %d blobs", err, g.blobs)
	}
}

// A recipe may be absent, or lie: only the blob decides.
func TestRecipesAreNotBelieved(t *testing.T) {
	for name, lie := range map[string]func(l *bundletest.Layer){
		"withheld":          func(l *bundletest.Layer) { l.Recipe = nil },
		"garbage":           func(l *bundletest.Layer) { l.Recipe = []byte("not a recipe") },
		"cut":               func(l *bundletest.Layer) { l.Recipe = l.Recipe[:len(l.Recipe)/2] },
		"of another layer":  func(l *bundletest.Layer) { l.Recipe = other(t) },
		"another place":     func(l *bundletest.Layer) { l.IDs[1] = l.IDs[4] },
		"a hidden content":  func(l *bundletest.Layer) { l.Contents[0] = []byte(toctest.Blob(99, len(l.Contents[0]))) },
		"hidden, too short": func(l *bundletest.Layer) { l.Contents[0] = l.Contents[0][:10] },
	} {
		t.Run(name, func(t *testing.T) {
			g := newRig(t, image()...)
			lie(g.m.Layers[0])
			if err := g.run(t); err != nil || g.blobs != 1 {
				t.Errorf("with the blob: %v, %d were fetched", err, g.blobs)
			}
			g.dir = t.TempDir()
			g.m.Layers[0].Blob.Bytes = nil
			if err := g.run(t); err == nil || why(err) != "" {
				t.Errorf("without it: %v, want that nothing is known", err)
			}
		})
	}
}

// other is a recipe of another layer, of literal bytes only.
func other(t *testing.T) []byte {
	var encoded bytes.Buffer
	w := recipe.NewWriter(&encoded)
	n, err := io.Copy(io.Discard, w.Tap(bytes.NewReader(layertest.Layer{layertest.Dir("x", 0o755)}.TarBytes(t))))
	if err := errors.Join(err, w.Close(recipe.End{Size: n, Contents: 6})); err != nil {
		t.Fatal(err)
	}
	return encoded.Bytes()
}

// What is mounted is not what the layers make.
func TestFailed(t *testing.T) {
	mode := func(x *toc.TOC, path string, bits uint32) {
		i, _ := x.Lookup(path)
		x.Inodes[i].Mode |= bits
	}
	for name, tc := range map[string]struct {
		change func(t *testing.T, g *rig)
		want   string
	}{
		"a mode": {func(t *testing.T, g *rig) { g.m.Change(t, func(x *toc.TOC) { mode(x, "/d/b", 0o4000) }) }, "/d/b is not as in the layers: its mode"},
		"an owner": {func(t *testing.T, g *rig) {
			g.m.Change(t, func(x *toc.TOC) { i, _ := x.Lookup("/new"); x.Inodes[i].UID = 7 })
		}, "/new is not as in the layers: its owner"},
		"a symlink": {func(t *testing.T, g *rig) {
			g.m.Change(t, func(x *toc.TOC) { i, _ := x.Lookup("/s"); x.Inodes[i].Target = "d/b" })
		}, "/s is not as in the layers: its target"},
		"another tree":  {func(t *testing.T, g *rig) { rogue(t, g, append(image()[2], layertest.File("evil", 0o755, "evil"))) }, "/evil is not as in the layers: the layers do not have it"},
		"one file less": {func(t *testing.T, g *rig) { rogue(t, g, image()[2][:2]) }, "/zeros is not as in the layers"},
		"another file": {func(t *testing.T, g *rig) {
			rogue(t, g, append(image()[2], layertest.File("d/b", 0o644, toctest.Blob(8, 5000))))
		}, "/d/b is not as in the layers: its content"},
		"mounted bytes": {func(_ *testing.T, g *rig) { g.mounted[g.m.Index([]byte("seen"))] = []byte("Seen") }, "/d/a has other bytes here"},
		"large bytes":   {func(_ *testing.T, g *rig) { g.mounted[g.m.Index([]byte(toctest.Blob(5, 3<<20)))][2<<20]++ }, "/large has other bytes here"},
		"metadata":      {func(_ *testing.T, g *rig) { g.badMeta = true }, "metadata image"},
		"the config":    {func(_ *testing.T, g *rig) { g.m.Layers[2].Blob.DiffID = digest.FromString("x") }, "layer 3 has another diff ID"},
	} {
		t.Run(name, func(t *testing.T) {
			g := newRig(t, image()...)
			tc.change(t, g)
			if err := g.run(t); !strings.Contains(why(err), tc.want) {
				t.Errorf("%v, want a failure with %q", err, tc.want)
			}
		})
	}
}

// rogue has the rig's rootfs made of another upper layer.
func rogue(t *testing.T, g *rig, upper layertest.Layer) {
	liar := newRig(t, append(image()[:2], upper)...)
	layers := g.m.Layers
	liar.m.As(t, g.m)
	liar.m.Layers = layers
	g.m, g.mounted = liar.m, liar.mounted
}

// A config that names no diff IDs, or others than there are layers, is said to be one.
func TestNoDiffIDs(t *testing.T) {
	for name, ids := range map[string][]digest.Digest{"none": nil, "one": {digest.FromString("x")}, "bad": {"sha256:1", "sha256:2", "sha256:3"}, "unknown": {"md5:d41d8cd98f00b204e9800998ecf8427e", "", ""}} {
		g := newRig(t, image()...)
		o := g.options()
		o.DiffIDs = ids
		if err := Run(t.Context(), o); !errors.Is(err, ErrNoDiffIDs) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Rules that this program does not have are no lie of anybody's.
func TestRulesOfANewerServer(t *testing.T) {
	g := newRig(t, image()...)
	o := g.options()
	later := *o.TOC
	later.Rules = flatten.Version + 1
	o.TOC = &later
	if err := Run(t.Context(), o); !errors.Is(err, flatten.ErrRules) || why(err) != "" || g.recipes > 0 {
		t.Errorf("%v, %d recipes were asked for", err, g.recipes)
	}
}

// A proof that was interrupted goes on with the layer at which it was.
func TestResumed(t *testing.T) {
	g := newRig(t, image()...)
	ctx, cancel := context.WithCancel(t.Context())
	g.m.Layers[2].Meets = cancel
	if err := Run(ctx, g.options()); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	g.recipes, g.contents, g.m.Layers[2].Meets = 0, 0, nil
	if err := g.run(t); err != nil || g.recipes != 1 || g.contents != 0 {
		t.Errorf("%v, %d recipes and %d lots of contents were asked for, want 1 and 0", err, g.recipes, g.contents)
	}
	// What is here is hashed all the same.
	g.mounted[0][0]++
	if err := g.run(t); why(err) == "" {
		t.Errorf("wrong bytes after all layers were proven: %v", err)
	}
}

// A layer that another rootfs has proven is not asked for, unless its list is damaged.
func TestKnownLayers(t *testing.T) {
	first := newRig(t, image()...)
	if err := first.run(t); err != nil {
		t.Fatal(err)
	}
	second := newRig(t, append(image()[:2], layertest.Layer{layertest.Dir("other", 0o755)})...)
	second.known = func(d digest.Digest) string { return ListPath(first.dir, d) }
	if err := second.run(t); err != nil || second.recipes != 1 {
		t.Errorf("%v, %d recipes were asked for", err, second.recipes)
	}
}

// A layer of 64 MiB, 64 files, with a file that an upper layer hides.
func BenchmarkRun(b *testing.B) {
	l := layertest.Layer{layertest.File("hidden", 0o644, toctest.Blob(100, 1<<20))}
	for i := range 64 {
		l = append(l, layertest.File(string(rune('A'+i)), 0o644, toctest.Blob(uint64(i), 1<<20)))
	}
	g := &rig{m: bundletest.NewLayers(b, l, layertest.Layer{layertest.Whiteout("hidden")})}
	for i := range g.m.Tree.Contents {
		g.mounted = append(g.mounted, g.m.Content(uint32(i)))
	}
	b.SetBytes(64 << 20)
	for b.Loop() {
		g.dir = b.TempDir()
		if err := Run(b.Context(), g.options()); err != nil || g.blobs > 0 {
			b.Fatal(err, g.blobs)
		}
	}
}

// Whatever the layers are, what they make is proven, and nothing else is.
func TestAnyImage(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		names := []string{"a", "b", "d/a", "d/b", "d/e/f"}
		var layers []layertest.Layer
		for range rapid.IntRange(1, 4).Draw(rt, "layers") {
			var l layertest.Layer
			for _, name := range names {
				switch rapid.IntRange(0, 4).Draw(rt, name) {
				case 0:
					l = append(l, layertest.File(name, 0o644, toctest.Blob(rapid.Uint64Range(1, 5).Draw(rt, "seed"), rapid.SampledFrom([]int{0, 1, 5000, 1<<20 + 1}).Draw(rt, "size"))))
				case 1:
					l = append(l, layertest.Whiteout(name))
				}
			}
			layers = append(layers, append(l, layertest.Dir("end", 0o755)))
		}
		g := newRig(t, layers...)
		if err := g.run(t); err != nil || g.blobs != 0 {
			rt.Fatalf("%v, %d blobs", err, g.blobs)
		}
		if n := len(g.mounted); n > 0 {
			i := rapid.IntRange(0, n-1).Draw(rt, "content")
			g.mounted[i] = slices.Clone(g.mounted[i])
			g.mounted[i][len(g.mounted[i])/2]++
			if err := g.run(t); why(err) == "" {
				rt.Fatalf("with a wrong byte: %v", err)
			}
		}
	})
}
