package startup

import (
	"math/bits"
	"testing"

	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/format/trace"
)

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
			if gone < togetherFrom {
				early++
			} else {
				late++
			}
			for p := r.First; p < r.End(); p++ {
				if seen[p] {
					t.Fatalf("page %d goes twice", p)
				}
				seen[p] = true
				if most := soonest[p] + soonest[p]/togetherShare + togetherTarget; gone > most {
					t.Fatalf("%d bytes go before page %d, of which %d are needed before it", gone, p, soonest[p])
				}
			}
		}
		gone += int64(frame.Raw)
	}
	if gone != pages*trace.BlockSize {
		t.Errorf("%d bytes go of %d", gone, pages*trace.BlockSize)
	}
	if want := int64(togetherFrom / trace.BlockSize); early != want {
		t.Errorf("%d runs go first, want %d in the order of need", early, want)
	}
	if late > 256 {
		t.Errorf("%d runs go later, of %d pages that all lie together", late, pages-early)
	}
}
