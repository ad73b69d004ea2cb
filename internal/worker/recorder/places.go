package recorder

import (
	"cmp"
	"slices"
	"time"

	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/format/trace"
)

// Places finds the content that lies at a place of an arena.
type Places struct {
	toc    *toc.TOC
	arenas [][]placedContent // by arena, sorted by offset
}

type placedContent struct {
	off     int64
	content uint32
}

// NewPlaces is of contents that lie, by place, in so many arenas, at offsets.
func NewPlaces(t *toc.TOC, place []uint16, offsets []int64, arenas int) *Places {
	p := &Places{toc: t, arenas: make([][]placedContent, arenas)}
	for c := range t.Contents {
		a := place[c]
		p.arenas[a] = append(p.arenas[a], placedContent{offsets[c], uint32(c)})
	}
	for _, list := range p.arenas {
		slices.SortFunc(list, func(a, b placedContent) int { return cmp.Compare(a.off, b.off) })
	}
	return p
}

// Touch appends the pages of a read, by content. What lies in no content of the
// TOC belongs to another image that has contents in the same arena.
func (p *Places) Touch(dst []trace.Touch, r Read, at time.Duration) []trace.Touch {
	list := p.arenas[r.Arena]
	end := r.Off + r.N
	i, found := slices.BinarySearchFunc(list, r.Off, func(c placedContent, off int64) int { return cmp.Compare(c.off, off) })
	if !found {
		i--
	}
	for i = max(i, 0); i < len(list) && list[i].off < end; i++ {
		c := list[i]
		pages := int64(trace.Pages(p.toc.Contents[c.content].Size))
		first := max(r.Off-c.off, 0) / trace.BlockSize
		last := min((end-c.off+trace.BlockSize-1)/trace.BlockSize, pages)
		if first >= last {
			continue
		}
		dst = append(dst, trace.Touch{At: at, Run: trace.Run{Content: c.content, First: uint32(first), Blocks: uint32(last - first)}})
	}
	return dst
}
