package planner_test

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/format/toc/toctest"
	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/planner"
)

var update = flag.Bool("update", false, "write golden files anew")

// packer stands in for packs: it says that segments rest in frames of
// about target bytes, in the order in which they were added.
type packer struct {
	target uint32
	places map[segment.ID]catalog.Location
	pack   string
	offset int64
	open   *catalog.Frame
}

func newPacker(target uint32) *packer {
	return &packer{target: target, places: map[segment.ID]catalog.Location{}}
}

// layer packs what is new into another pack.
func (p *packer) layer(pack string, segments []toc.Segment) {
	p.pack, p.offset, p.open = pack, 0, nil
	for _, s := range segments {
		if _, ok := p.places[s.ID]; ok || s.ID.IsHole() {
			continue
		}
		if p.open == nil || p.open.RawLength+s.Length > p.target {
			p.open = &catalog.Frame{Pack: pack, Offset: p.offset, Length: 2}
		}
		f := p.open
		p.places[s.ID] = catalog.Location{Frame: f, Index: len(f.Segments)}
		f.Segments = append(f.Segments, catalog.FrameSegment{ID: s.ID, Length: s.Length})
		f.RawLength += s.Length
		f.Length += s.Length / 3
		p.offset = f.Offset + int64(f.Length)
	}
}

func (p *packer) Locate(_ context.Context, ids []segment.ID) ([]catalog.Location, error) {
	out := make([]catalog.Location, len(ids))
	for i, id := range ids {
		out[i] = p.places[id]
	}
	return out, nil
}

func (p *packer) index(t fataler, x *toc.TOC) *planner.Index {
	ix, err := planner.Build(context.Background(), x, digest.FromString(string(x.ChainID)), p)
	if err != nil {
		t.Fatal(err)
	}
	return ix
}

type fataler interface{ Fatal(...any) }

// rootfs makes a TOC of files that hold one byte value n times.
func rootfs(t fataler, name string, files ...string) *toc.TOC {
	root := &toc.File{Mode: unix.S_IFDIR | 0o755, Children: map[string]*toc.File{}}
	for i, f := range files {
		id := segment.Sum([]byte(f))
		root.Children[fmt.Sprintf("%03d", i)] = &toc.File{Mode: unix.S_IFREG, Content: &toc.Bytes{
			ID: id, Size: int64(len(f)), Segments: []toc.Segment{{ID: id, Length: uint32(len(f))}}}}
	}
	x, err := toc.Build(digest.FromString(name), root)
	if err != nil {
		t.Fatal(err)
	}
	return x
}

func TestBuildErrors(t *testing.T) {
	x := rootfs(t, "x", "a", "b")
	p := newPacker(10)
	p.layer("packs/1", x.Segments[:1])
	_, err := planner.Build(context.Background(), x, "d", p)
	if !errors.Is(err, planner.ErrMissing) {
		t.Errorf("a segment that is not stored: %v", err)
	}
	p.layer("packs/2", x.Segments)
	place := p.places[x.Segments[0].ID]
	place.Frame.RawLength++
	if _, err := planner.Build(context.Background(), x, "d", p); !errors.Is(err, planner.ErrCorrupt) {
		t.Errorf("a frame of another length: %v", err)
	}
}

func TestIndexRoundTrip(t *testing.T) {
	x := toctest.Synthetic(3000, 1)
	p := newPacker(segment.FrameTarget)
	p.layer("packs/b", x.Segments[:len(x.Segments)/3])
	p.layer("packs/a", x.Segments)
	want := p.index(t, x)
	b := want.Encode()
	got, err := planner.Decode(b, x, want.TOC())
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(want, got, cmp.Exporter(func(reflect.Type) bool { return true })); d != "" {
		t.Error(d)
	}
	if _, err := planner.Decode(b, x, digest.FromString("another")); !errors.Is(err, planner.ErrCorrupt) {
		t.Errorf("index of another TOC: %v", err)
	}
	for n := 0; n < len(b); n += 1 + n/20 {
		if _, err := planner.Decode(b[:n], x, want.TOC()); !errors.Is(err, planner.ErrCorrupt) {
			t.Errorf("cut after %d bytes: %v", n, err)
		}
	}
}

func small(t fataler) (*toc.TOC, *planner.Index) {
	x := rootfs(t, "small", "aaaa", "bb", "cccccc", "dd", "aaaa")
	p := newPacker(7)
	p.layer("packs/1", x.Segments[1:2])
	p.layer("packs/2", x.Segments)
	return x, p.index(t, x)
}

func TestIndexGolden(t *testing.T) {
	x, want := small(t)
	name := filepath.Join("testdata", "small.index")
	if *update {
		if err := os.WriteFile(name, want.Encode(), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	got, err := planner.Decode(b, x, want.TOC())
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got.Encode(), want.Encode()) {
		t.Error("the golden file holds another index")
	}
}

func FuzzDecode(f *testing.F) {
	x, ix := small(f)
	f.Add(ix.Encode())
	f.Fuzz(func(t *testing.T, b []byte) {
		got, err := planner.Decode(b, x, ix.TOC())
		if err != nil {
			if !errors.Is(err, planner.ErrCorrupt) {
				t.Fatal(err)
			}
			return
		}
		check(t, got, nil, x, nil)
	})
}

type have struct {
	x       *toc.TOC
	index   *planner.Index
	present []byte
}

// check plans, and holds the plan against what it must be by definition.
func check(t interface {
	Fatal(...any)
	Fatalf(string, ...any)
}, index *planner.Index, order planner.Order, x *toc.TOC, haves []have) *planner.Plan {
	d := planner.NewDifference(index)
	d.SetOrder(order)
	for _, h := range haves {
		d.Have(h.index, h.present)
	}
	p := d.Plan()
	if err := p.Wire.Check(x); err != nil {
		t.Fatal(err)
	}
	if _, err := bundle.DecodePlan(bundle.AppendPlan(nil, &p.Wire)); err != nil {
		t.Fatal(err)
	}

	here := map[segment.ID]bool{{}: true}
	for _, h := range haves {
		for i, s := range h.x.Segments {
			if h.present == nil || h.present[i/8]>>(i%8)&1 != 0 {
				here[s.ID] = true
			}
		}
	}
	missing := map[segment.ID]bool{}
	for _, s := range x.Segments {
		if !here[s.ID] {
			missing[s.ID] = true
		}
	}
	sent := map[segment.ID]bool{}
	for i, f := range p.Wire.Frames {
		numbers := p.Wire.Segments[f.First : f.First+f.Segments]
		useful, at := uint32(0), 0
		for _, part := range p.Sources[i].Parts {
			from := uint32(0)
			for _, pick := range part.Picks {
				if x.Segments[numbers[at]].ID != pick.ID || pick.From < from || pick.From+pick.Length > part.RawLength {
					t.Fatalf("frame %d: pick %+v for segment %d of %d bytes", i, pick, numbers[at], part.RawLength)
				}
				from = pick.From + pick.Length
				at++
			}
		}
		if p.Sources[i].Whole() != (at == 0) || at > 0 && at != len(numbers) {
			t.Fatalf("frame %d: %d picks for %d segments", i, at, len(numbers))
		}
		for _, n := range numbers {
			sent[x.Segments[n].ID] = true
			if missing[x.Segments[n].ID] {
				useful += x.Segments[n].Length
			}
		}
		if 2*useful < f.RawLength || at > 0 && useful != f.RawLength {
			t.Fatalf("frame %d: %d of %d bytes are wanted", i, useful, f.RawLength)
		}
	}
	for id := range missing {
		if !sent[id] {
			t.Fatalf("segment %s is missing and not sent", id)
		}
	}
	return p
}

func TestPlanProperty(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := newPacker(rapid.Uint32Range(1, 40).Draw(t, "target"))
		word := rapid.StringMatching(`[ab]{1,6}`)
		var tocs []*toc.TOC
		for i := range rapid.IntRange(1, 5).Draw(t, "rootfs") {
			x := rootfs(t, fmt.Sprint(i), rapid.SliceOfN(word, 0, 20).Draw(t, "files")...)
			p.layer(fmt.Sprintf("packs/%d", i), x.Segments)
			tocs = append(tocs, x)
		}
		var haves []have
		for _, x := range tocs[1:] {
			h := have{x: x, index: p.index(t, x)}
			if rapid.Bool().Draw(t, "partial") {
				h.present = rapid.SliceOfN(rapid.Byte(), len(x.Segments)/8+1, len(x.Segments)/8+1).Draw(t, "present")
			}
			haves = append(haves, h)
		}
		var order planner.Order
		if rapid.Bool().Draw(t, "ordered") {
			order = make(planner.Order, len(tocs[0].Segments))
			for s := range order {
				order[s] = rapid.Uint32Range(0, 5).Draw(t, "rank")
			}
		}
		check(t, p.index(t, tocs[0]), order, tocs[0], haves)
	})
}

func TestPlanOrder(t *testing.T) {
	x := rootfs(t, "x", "a1", "b22", "c333", "d4444")
	p := newPacker(1)
	p.layer("packs/1", x.Segments)
	plan := check(t, p.index(t, x), planner.Order{3, 1, 0, 2}, x, nil)
	if want := []uint32{2, 1, 3, 0}; !slices.Equal(plan.Wire.Segments, want) {
		t.Errorf("segments %v, want %v", plan.Wire.Segments, want)
	}
}

// A frame that holds bytes of an image that was not asked for is never sent as
// it is, however little of it that is.
func TestPlanKeepsOthersBytes(t *testing.T) {
	secret := rootfs(t, "secret", "shared by both of them", "s")
	x := rootfs(t, "x", "shared by both of them")
	p := newPacker(1000)
	p.layer("packs/secret", secret.Segments)
	plan := check(t, p.index(t, x), nil, x, nil)
	if len(plan.Sources) != 1 || plan.Sources[0].Whole() {
		t.Errorf("sources %+v", plan.Sources)
	}
}

// Small picks that follow each other share a frame.
func TestPlanMergesPicks(t *testing.T) {
	var old, now []string
	for i := range 40 {
		s := fmt.Sprintf("%090d", i)
		old = append(old, s)
		if i%4 == 0 {
			s = "new" + s
		}
		now = append(now, s)
	}
	a, b := rootfs(t, "a", old...), rootfs(t, "b", now...)
	p := newPacker(1000)
	p.layer("packs/b", b.Segments)
	p.layer("packs/a", a.Segments)
	plan := check(t, p.index(t, b), nil, b, []have{{x: a, index: p.index(t, a)}})
	if len(plan.Sources) != 1 || len(plan.Sources[0].Parts) < 3 || len(plan.Wire.Segments) != 10 {
		t.Errorf("%d frames from %d parts, %d segments", len(plan.Sources), len(plan.Sources[0].Parts), len(plan.Wire.Segments))
	}
}

const benchFiles = 84_000

// BenchmarkPlan plans an image of 84,000 files, with the indices in memory:
// fresh, and as an update of an image from which it differs in a fifth of its
// files and in every layer.
func BenchmarkPlan(b *testing.B) {
	old := toctest.Synthetic(benchFiles, 1)
	now := toctest.Update(benchFiles, 1, 0.2, 2)
	if old.ChainID == now.ChainID {
		b.Fatal("one chain ID for both versions")
	}
	p := newPacker(segment.FrameTarget)
	p.layer("packs/old", old.Segments)
	p.layer("packs/now", now.Segments)
	oldIndex, nowIndex := p.index(b, old), p.index(b, now)
	order := make(planner.Order, len(now.Segments))
	for i := range order {
		order[i] = uint32(i*7919) % uint32(len(order))
	}
	run := func(b *testing.B, want *planner.Index, order planner.Order, have *planner.Index) {
		var plan *planner.Plan
		b.ReportAllocs()
		for b.Loop() {
			d := planner.NewDifference(want)
			d.SetOrder(order)
			if have != nil {
				d.Have(have, nil)
			}
			plan = d.Plan()
			_ = bundle.AppendPlan(nil, &plan.Wire)
		}
		b.ReportMetric(float64(len(plan.Wire.Frames)), "frames")
		b.ReportMetric(float64(plan.Wire.ContentBytes)/1e6, "MB")
	}
	b.Run("fresh", func(b *testing.B) { run(b, oldIndex, order[:min(len(order), oldIndex.Len())], nil) })
	b.Run("update", func(b *testing.B) { run(b, nowIndex, order, oldIndex) })
	b.Run("decode-index", func(b *testing.B) {
		encoded := nowIndex.Encode()
		for b.Loop() {
			if _, err := planner.Decode(encoded, now, nowIndex.TOC()); err != nil {
				b.Fatal(err)
			}
		}
		b.ReportMetric(float64(len(encoded)), "bytes")
	})
}

// TestFind finds each segment by its ID, with the frame that has it, and no other.
func TestFind(t *testing.T) {
	x := toctest.Synthetic(300, 1)
	p := newPacker(64 << 10)
	p.layer("packs/a", x.Segments[:len(x.Segments)/2])
	p.layer("packs/b", x.Segments)
	ix := p.index(t, x)
	for i, s := range x.Segments {
		n, ok := ix.Find(s.ID)
		if s.ID.IsHole() {
			if ok {
				t.Errorf("hole %d was found", i)
			}
			continue
		}
		if !ok || x.Segments[n].ID != s.ID || int(n) > i {
			t.Fatalf("segment %d: %d, %v", i, n, ok)
		}
		f, want := ix.Frame(n), p.places[s.ID].Frame
		if f.Pack != want.Pack || f.Offset != want.Offset || f.Length != want.Length || f.RawLength != want.RawLength {
			t.Fatalf("segment %d: frame %+v, want %+v", i, f, want)
		}
	}
	for _, id := range []segment.ID{{}, {1}, segment.Sum([]byte("another")), bytes32(0xff)} {
		if n, ok := ix.Find(id); ok {
			t.Errorf("%s: %d", id, n)
		}
	}
}

func bytes32(v byte) (id segment.ID) {
	for i := range id {
		id[i] = v
	}
	return id
}
