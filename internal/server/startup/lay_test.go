package startup

import (
	"math/bits"
	"testing"

	"github.com/google/go-cmp/cmp"

	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/format/trace"
)

// Filled pages come after all others, in frames of their own and short runs; what is filled for
// one service and touched by another is each of both.
func TestFilledPagesComeLast(t *testing.T) {
	table := &toc.TOC{Contents: []toc.Content{{Size: 1000 * trace.BlockSize}}}
	run := func(first, n, at uint32) ranked { return ranked{trace.Run{First: first, Blocks: n}, at} }
	s := lay([]planned{
		{set: []ranked{run(0, 10, 0), run(21, 100, filledAt), run(121, 9, 10)}},
		{set: []ranked{run(0, 10, 5), run(100, 10, 0)}},
	}, table)
	s.Digests = make([]segment.ID, len(s.Runs))
	pages := func(frames []uint32) (out []trace.Run) {
		for _, f := range frames {
			out = append(out, s.Runs[s.Frames[f].First:][:s.Frames[f].Count]...)
		}
		return out
	}
	first, second := &s.Services[0], &s.Services[1]
	touched := first.Frames[:len(first.Frames)-first.Filled]
	if d := cmp.Diff([]trace.Run{{First: 0, Blocks: 10}, {First: 121, Blocks: 9}}, trace.Merge(pages(touched))); d != "" {
		t.Errorf("touched (want, got):\n%s", d)
	}
	filled := pages(first.Frames[len(touched):])
	if d := cmp.Diff([]trace.Run{{First: 21, Blocks: 100}}, trace.Merge(filled)); d != "" {
		t.Errorf("filled (want, got):\n%s", d)
	}
	short := 0
	for _, r := range filled {
		if r.Blocks <= filledRun {
			short += int(r.Blocks)
		}
	}
	if short < 90 { // but those that the other service touched
		t.Errorf("runs of filled pages: %v", filled)
	}
	if d := cmp.Diff([]trace.Run{{First: 0, Blocks: 10}, {First: 100, Blocks: 10}}, trace.Merge(pages(second.Frames))); d != "" || second.Filled != 0 {
		t.Errorf("of the other service, %d filled (want, got):\n%s", second.Filled, d)
	}
	for _, r := range trace.Merge(pages(s.Common)) {
		if r.First > 20 && r.First != 100 && r.First != 121 {
			t.Errorf("common: %v", r)
		}
	}

	for name, n := range map[string]int{"all": 1000, "none": 0, "the first pages": 20, "filled": 500} {
		d := (&Set{store: s, frames: first.Frames, filled: first.Filled}).Select(table, func(r trace.Run) bool {
			return int(r.First) < n && (name != "filled" || r.First > 20 && r.First < 121)
		})
		at := d.Wire.Frames[len(d.Wire.Frames)-d.Wire.Filled:]
		for i, r := range d.Wire.Runs {
			if is := r.First > 20 && r.First < 121; is != (len(at) > 0 && i >= int(at[0].First)) {
				t.Errorf("%s: run %v of frames of which %d are filled", name, r, d.Wire.Filled)
			}
		}
	}
}

// A service that goes back and forth gets what lies together in one go, once so much
// has gone that nobody waits much longer for it.
func TestWhatLiesTogetherGoesTogether(t *testing.T) {
	const pages = 16 << 10 // 64 MiB
	table := &toc.TOC{Contents: []toc.Content{{Size: pages * trace.BlockSize}}}
	// Of 256 pages each, every fourth comes before the others, and so on.
	var set []ranked
	for i := range uint32(pages) {
		page := i&^255 | uint32(bits.Reverse8(uint8(i)))
		set = append(set, ranked{trace.Run{First: page, Blocks: 1}, i})
	}
	s := lay([]planned{{set: set}}, table)

	soonest := make([]int64, pages) // bytes that go before
	for _, r := range set {
		soonest[r.First] = int64(r.at) * trace.BlockSize
	}
	var gone, early, late int64 // early, late: runs before and after
	seen := make([]bool, pages)
	for _, f := range s.Services[0].Frames {
		frame := s.Frames[f]
		for _, r := range s.Runs[frame.First : frame.First+frame.Count] {
			if gone < batchFrom {
				early++
			} else {
				late++
			}
			for p := r.First; p < r.End(); p++ {
				if seen[p] {
					t.Fatalf("page %d goes twice", p)
				}
				seen[p] = true
				if most := soonest[p] + soonest[p]/batchShare + batchTarget; gone > most {
					t.Fatalf("%d bytes go before page %d, of which %d are needed before it", gone, p, soonest[p])
				}
			}
		}
		gone += int64(frame.Raw)
	}
	if gone != pages*trace.BlockSize {
		t.Errorf("%d bytes go of %d", gone, pages*trace.BlockSize)
	}
	if want := int64(batchFrom / trace.BlockSize); early != want {
		t.Errorf("%d runs go first, want %d in the order of need", early, want)
	}
	if late > 256 {
		t.Errorf("%d runs go later, of %d pages that all lie together", late, pages-early)
	}
}
