package startup

import (
	"cmp"
	"context"
	"encoding/binary"
	"math/bits"
	"slices"
	"sort"

	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/server/planner"
)

// alignment says where what is in one content is in another one, a later build of
// the same file: points that belong together, increasing in both, the first at
// the beginning of both and the last at their end. What lies between two points
// lies between them there too, in proportion.
//
// The points are anchors: short strings that each of the contents has exactly
// once. Code that was compiled again has many, since a function that did not
// change differs in some addresses only; a table in which every entry differs, such
// as that of relocations, lies between the anchors around it. What kind of file it
// is need not be known, and no bytes can do worse than have a set lack pages.
type alignment []point

type point struct{ from, to int64 }

const (
	// anchorWindow is how many bytes an anchor has: fewer are less often unique, and
	// more have an address in them more often. Of the pages that the second
	// versions of registry, node and memcached touched, 8 bytes found 84, 95.7 and 100%,
	// 16 bytes 88, 98.2 and 99.1%, 32 bytes 78, 99.5 and 100%.
	anchorWindow = 16
	// anchorsWanted is about how many strings of a content are looked at, but not
	// more than one in 2^anchorSpacing bytes: looking at twice or half as many
	// finds the same pages.
	anchorsWanted = 1 << 18
	anchorSpacing = 5
	// anchorsMost bounds what a content takes that was made to have many.
	anchorsMost = 2 * anchorsWanted
	// alignSlack is by how many bytes points that are left out may differ from one
	// that stays: what lies between those may be wrong by twice as much, which is
	// little for a page.
	alignSlack = 32
)

// anchor is a string that a content has: a hash of it, and where it ends.
type anchor struct {
	hash uint64
	at   int64
}

// gear has a random number for each byte, of a rolling hash: SplitMix64.
var gear = func() (t [256]uint64) {
	for i := range t {
		z := uint64(i+1) * 0x9e3779b97f4a7c15
		z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
		z = (z ^ z>>27) * 0x94d049bb133111eb
		t[i] = z ^ z>>31
	}
	return t
}()

// align compares content a of from with content b of to. Without read nothing is
// read, and only the segments that both have tell something. Errors: those of
// reading.
func align(ctx context.Context, from, to *planner.Contents, a, b uint32, read bool) (alignment, error) {
	x, y := &from.TOC.Contents[a], &to.TOC.Contents[b]
	shared := map[segment.ID]bool{}
	for _, s := range segmentsOf(from.TOC, x) {
		shared[s.ID] = false
	}
	for _, s := range segmentsOf(to.TOC, y) {
		if _, ok := shared[s.ID]; ok {
			shared[s.ID] = true
		}
	}
	spacing := spacingOf(max(x.Size, y.Size))
	before, err := anchors(ctx, from, x, shared, spacing, read)
	if err != nil {
		return nil, err
	}
	now, err := anchors(ctx, to, y, shared, spacing, read)
	if err != nil {
		return nil, err
	}
	return match(before, now, x.Size, y.Size), nil
}

func segmentsOf(t *toc.TOC, c *toc.Content) []toc.Segment {
	return t.Segments[c.First : c.First+c.Segments]
}

// spacingOf returns, as a power of two, every how many bytes a content is looked at.
func spacingOf(size int64) int {
	return max(anchorSpacing, bits.Len64(uint64(size)/anchorsWanted))
}

// anchors returns what is looked at of a content. Of segments that the other
// content has as well these are their ends, and they are not read.
func anchors(ctx context.Context, contents *planner.Contents, c *toc.Content, shared map[segment.ID]bool, spacing int, read bool) ([]anchor, error) {
	var out []anchor
	for i, s := range segmentsOf(contents.TOC, c) {
		switch {
		case len(out) >= anchorsMost:
		case s.ID.IsHole():
		case shared[s.ID]:
			out = append(out, anchor{binary.LittleEndian.Uint64(s.ID[:]), s.Offset},
				anchor{binary.LittleEndian.Uint64(s.ID[8:]), s.Offset + int64(s.Length) - 1})
		case read:
			b, err := contents.Segment(ctx, c.First+uint32(i))
			if err != nil {
				return nil, err
			}
			out = appendAnchors(out, b, s.Offset, spacing)
		}
	}
	return out, nil
}

// appendAnchors appends those in b, which is at an offset of its content: where
// the hash of the last anchorWindow bytes begins with zeros.
func appendAnchors(out []anchor, b []byte, offset int64, spacing int) []anchor {
	const shift = 64 / anchorWindow // what a byte adds has left the hash anchorWindow bytes later
	h := uint64(0)
	for i, c := range b {
		h = h<<shift + gear[c]
		if h>>(64-spacing) == 0 && i >= anchorWindow-1 && len(out) < anchorsMost {
			out = append(out, anchor{h, offset + int64(i)})
		}
	}
	return out
}

// match aligns contents of so many bytes by their anchors, which it sorts.
func match(from, to []anchor, fromSize, toSize int64) alignment {
	from, to = unique(from), unique(to)
	var both []point
	for len(from) > 0 && len(to) > 0 {
		switch {
		case from[0].hash < to[0].hash:
			from = from[1:]
		case from[0].hash > to[0].hash:
			to = to[1:]
		default:
			both = append(both, point{from[0].at, to[0].at})
			from, to = from[1:], to[1:]
		}
	}
	slices.SortFunc(both, func(a, b point) int { return cmp.Or(cmp.Compare(a.from, b.from), cmp.Compare(b.to, a.to)) })

	out := alignment{{0, 0}}
	began := 0 // the first point of those that are as far from each other as the last one
	for _, p := range append(rising(both), point{fromSize, toSize}) {
		last := len(out) - 1
		if p.from <= out[last].from || p.to <= out[last].to {
			continue
		}
		d := (p.to - p.from) - (out[began].to - out[began].from)
		switch {
		case d < -alignSlack || d > alignSlack || p.from == fromSize:
			began = len(out)
		case last > began:
			out[last] = p
			continue
		}
		out = append(out, p)
	}
	return slices.Clip(slices.Clone(out))
}

// unique sorts anchors by hash and returns those that are there once.
func unique(list []anchor) []anchor {
	slices.SortFunc(list, func(a, b anchor) int { return cmp.Compare(a.hash, b.hash) })
	once := list[:0]
	for i := 0; i < len(list); {
		end := i + 1
		for end < len(list) && list[end].hash == list[i].hash {
			end++
		}
		if end == i+1 {
			once = append(once, list[i])
		}
		i = end
	}
	return once
}

// rising returns as many of points, which increase in from, as can be had that
// increase in to as well: what moved past something else is left out.
func rising(points []point) []point {
	var ends []int                   // by length, less 1, of a sequence: its last point, the least in to
	prev := make([]int, len(points)) // by point: the one before it
	for i, p := range points {
		n := sort.Search(len(ends), func(k int) bool { return points[ends[k]].to >= p.to })
		prev[i] = -1
		if n > 0 {
			prev[i] = ends[n-1]
		}
		if n == len(ends) {
			ends = append(ends, i)
		} else {
			ends[n] = i
		}
	}
	out := make([]point, len(ends))
	for n := len(ends); n > 0; n-- {
		i := ends[n-1]
		out[n-1] = points[i]
		if n > 1 {
			ends[n-2] = prev[i]
		}
	}
	return out
}

// at returns where a byte is there.
func (a alignment) at(from int64) int64 {
	i := sort.Search(len(a), func(i int) bool { return a[i].from > from })
	if i == len(a) {
		return a[i-1].to
	}
	p, q := a[i-1], a[i]
	if q.to-p.to == q.from-p.from {
		return p.to + from - p.from
	}
	return p.to + int64(float64(q.to-p.to)/float64(q.from-p.from)*float64(from-p.from))
}

// memory returns how many bytes an alignment takes.
func (a alignment) memory() int64 { return 100 + 16*int64(cap(a)) }
