package planner_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/format/trace"
	"hydrofoil.dev/foil/internal/server/planner"
)

// piece is a segment of a made-up content; kind 0 is a hole, equal kinds and
// lengths are equal segments.
type piece struct{ kind, length int }

func paged(t fataler, name string, contents ...[]piece) *toc.TOC {
	root := &toc.File{Mode: unix.S_IFDIR | 0o755, Children: map[string]*toc.File{}}
	for i, list := range contents {
		b := &toc.Bytes{}
		all := []byte("content")
		for _, p := range list {
			s := toc.Segment{Offset: b.Size, Length: uint32(p.length)}
			if p.kind > 0 {
				s.ID = segment.Sum(fmt.Append(nil, p))
			}
			b.Segments = append(b.Segments, s)
			b.Size += int64(p.length)
			all = binary.AppendUvarint(binary.AppendUvarint(all, uint64(p.kind)), uint64(p.length))
		}
		b.ID = segment.Sum(all)
		if len(list) == 1 && list[0].kind > 0 {
			b.ID = b.Segments[0].ID
		}
		root.Children[fmt.Sprint("f", i)] = &toc.File{Mode: unix.S_IFREG | 0o644, Content: b}
	}
	x, err := toc.Build(digest.FromString(name), root)
	if err != nil {
		t.Fatal(err)
	}
	return x
}

func drawPaged(t *rapid.T, name string) *toc.TOC {
	one := rapid.Custom(func(t *rapid.T) piece {
		return piece{rapid.IntRange(0, 4).Draw(t, "kind"), rapid.SampledFrom([]int{1, 4095, 4096, 4097, 10000, 12288}).Draw(t, "length")}
	})
	return paged(t, name, rapid.SliceOfN(rapid.SliceOfN(one, 1, 5), 1, 5).Draw(t, "contents")...)
}

func drawRuns(t *rapid.T, x *toc.TOC, label string) []trace.Run {
	return rapid.SliceOfN(rapid.Custom(func(t *rapid.T) trace.Run {
		c := rapid.IntRange(0, len(x.Contents)-1).Draw(t, "content")
		pages := trace.Pages(x.Contents[c].Size)
		first := rapid.Uint32Range(0, pages-1).Draw(t, "first")
		return trace.Run{Content: uint32(c), First: first, Blocks: rapid.Uint32Range(1, pages-first).Draw(t, "blocks")}
	}), 0, 8).Draw(t, label)
}

// pagesOf calls fn for each page that a segment has bytes of.
func pagesOf(x *toc.TOC, content, s int, fn func(page uint32)) {
	g := x.Segments[s]
	for p := uint32(g.Offset / trace.BlockSize); int64(p)*trace.BlockSize < g.Offset+int64(g.Length); p++ {
		fn(p)
	}
}

// What pages bring and the plan together are what is missing, and nothing is
// missing anywhere.
func TestPagesProperty(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := newPacker(1) // each segment a frame, so that nothing is planned for company
		x := drawPaged(t, "x")
		p.layer("packs/x", x.Segments)
		runs := drawRuns(t, x, "runs")
		old := drawPaged(t, "old")
		p.layer("packs/old", old.Segments)
		present := rapid.SliceOfN(rapid.Byte(), len(old.Segments)/8+1, len(old.Segments)/8+1).Draw(t, "present")
		here := map[segment.ID]bool{}
		for s, g := range old.Segments {
			here[g.ID] = here[g.ID] || present[s/8]>>(s%8)&1 != 0
		}
		here[segment.ID{}] = true // holes

		d := planner.NewDifference(p.index(t, x))
		d.Have(p.index(t, old), present)
		type page struct{ content, page int }
		arrived := map[page]bool{}
		for _, r := range runs {
			c := x.Contents[r.Content]
			lacks := false
			for s := c.First; s < c.First+c.Segments; s++ {
				pagesOf(x, int(r.Content), int(s), func(n uint32) {
					lacks = lacks || n >= r.First && n < r.End() && !here[x.Segments[s].ID]
				})
			}
			if got := d.Lacks(r); got != lacks {
				t.Fatalf("lacks %+v: %v, want %v", r, got, lacks)
			}
			for n := r.First; n < r.End(); n++ {
				arrived[page{int(r.Content), int(n)}] = true
			}
		}
		d.Arrive(runs)
		plan := d.Plan()
		if err := plan.Wire.Check(x); err != nil {
			t.Fatal(err)
		}
		planned := map[segment.ID]bool{}
		for _, n := range plan.Wire.Segments {
			planned[x.Segments[n].ID] = true
		}
		needed := map[segment.ID]bool{}
		for c := range x.Contents {
			for s := x.Contents[c].First; s < x.Contents[c].First+x.Contents[c].Segments; s++ {
				id, whole := x.Segments[s].ID, true
				pagesOf(x, c, int(s), func(n uint32) { whole = whole && arrived[page{c, int(n)}] })
				needed[id] = needed[id] || !whole && !here[id]
			}
		}
		for id, need := range needed {
			if need != planned[id] {
				t.Fatalf("segment %s: planned %v, needed %v", id, planned[id], need)
			}
		}
		for id := range planned {
			if !needed[id] {
				t.Fatalf("segment %s is planned, and no want needs it", id)
			}
		}
	})
}

func TestOrderBy(t *testing.T) {
	x := paged(t, "x", []piece{{1, 4096}, {2, 4096}, {3, 4096}}, []piece{{4, 100}}, []piece{{5, 100}})
	ix := newPacker(1)
	ix.layer("packs/1", x.Segments)
	index := ix.index(t, x)
	got := index.OrderBy(planner.Order{9, 8, 7, 6, 5},
		[]trace.Run{{Content: 1, Blocks: 1}}, []trace.Run{{Content: 0, First: 2, Blocks: 1}, {Content: 0, First: 1, Blocks: 2}})
	// Two lists, three segments: 3, then 2 and 1, then 4 before 0.
	if want := (planner.Order{9 + 3, 2, 1, 0, 5 + 3}); !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	if got := index.OrderBy(nil); !slices.Equal(got, planner.Order{0, 1, 2, 3, 4}) {
		t.Errorf("of nothing: %v", got)
	}
}

func goldenOrder() (o planner.Order, config, tocDigest digest.Digest) {
	return planner.Order{5, 4, 3, 1 << 31, 1<<32 - 1, 0}, digest.FromString("config"), digest.FromString("toc")
}

func TestOrderObject(t *testing.T) {
	o, config, x := goldenOrder()
	b := o.Encode(config, x)
	file := filepath.Join("testdata", "order.golden")
	if *update {
		if err := os.WriteFile(file, b, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	golden, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(b, golden) {
		t.Error("the format has changed: it needs another version")
	}
	got, err := planner.DecodeOrder(golden, config, x, len(o))
	if err != nil || !slices.Equal(got, o) {
		t.Errorf("got %v, %v", got, err)
	}
	for name, decode := range map[string]func() (planner.Order, error){
		"another TOC":    func() (planner.Order, error) { return planner.DecodeOrder(golden, config, config, len(o)) },
		"another config": func() (planner.Order, error) { return planner.DecodeOrder(golden, x, x, len(o)) },
		"more segments":  func() (planner.Order, error) { return planner.DecodeOrder(golden, config, x, len(o)+1) },
		"more bytes":     func() (planner.Order, error) { return planner.DecodeOrder(append(golden, 0), config, x, len(o)) },
		"cut":            func() (planner.Order, error) { return planner.DecodeOrder(golden[:len(golden)-1], config, x, len(o)) },
	} {
		if _, err := decode(); !errors.Is(err, planner.ErrCorrupt) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func FuzzDecodeOrder(f *testing.F) {
	o, config, x := goldenOrder()
	f.Add(o.Encode(config, x))
	f.Fuzz(func(t *testing.T, b []byte) {
		got, err := planner.DecodeOrder(b, config, x, len(o))
		if err != nil {
			if !errors.Is(err, planner.ErrCorrupt) {
				t.Fatal(err)
			}
			return
		}
		again, err := planner.DecodeOrder(got.Encode(config, x), config, x, len(o))
		if err != nil || !slices.Equal(again, got) {
			t.Fatalf("%v, %v, want %v", again, err, got)
		}
	})
}
