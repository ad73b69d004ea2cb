package planner

import (
	"math"
	"sort"

	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/format/trace"
)

// overlapped returns the segments of a table, first up to end, that a run of
// its pages has bytes of.
func overlapped(t *toc.TOC, r trace.Run) (first, end uint32) {
	c := &t.Contents[r.Content]
	off, n := r.Range(c.Size)
	list := t.Segments[c.First : c.First+c.Segments]
	a := sort.Search(len(list), func(i int) bool { return list[i].Offset+int64(list[i].Length) > off })
	b := sort.Search(len(list), func(i int) bool { return list[i].Offset >= off+n })
	return c.First + uint32(a), c.First + uint32(b)
}

// Lacks reports whether the worker lacks some bytes of a run of pages: whether it has
// bytes of a segment that is missing. The run must lie in its content.
func (d *Difference) Lacks(r trace.Run) bool {
	first, end := overlapped(d.x.table, r)
	for s := first; s < end; s++ {
		if !d.x.segments[s].ID.IsHole() && d.want[d.number[s]] {
			return true
		}
	}
	return false
}

// Arrive leaves out of the plan what pages bring: a segment all of whose pages
// are in runs, wherever it occurs. Runs must lie in their contents; they may
// come in any order and overlap.
func (d *Difference) Arrive(runs []trace.Run) {
	if len(runs) == 0 {
		return
	}
	covered := d.x.covered(runs)
	left := make([]uint32, len(d.number)) // by number: places that pages do not fill
	for s, n := range d.number {
		if !d.x.segments[s].ID.IsHole() && !covered[s] {
			left[n]++
		}
	}
	for s, n := range d.number {
		if left[n] == 0 {
			d.want[s] = false // a hole is not wanted anyway
		}
	}
}

// covered reports for each segment of the table whether all of its pages are in
// runs.
func (x *Index) covered(runs []trace.Run) []bool {
	out := make([]bool, len(x.segments))
	for _, r := range trace.Merge(runs) {
		c := &x.table.Contents[r.Content]
		from, n := r.Range(c.Size)
		to := from + n
		// Only the last page of a content is short: a run that ends elsewhere
		// covers the pages that its bytes are on.
		first, end := overlapped(x.table, r)
		for s := first; s < end; s++ {
			g := &x.segments[s]
			out[s] = g.Offset >= from && g.Offset+int64(g.Length) <= to
		}
	}
	return out
}

// OrderBy returns the order in which the segments that lists of page runs touch
// come first, list by list and run by run, and the others as in rest (nil: as in the TOC).
func (x *Index) OrderBy(rest Order, lists ...[]trace.Run) Order {
	const untouched = math.MaxUint32
	o := make(Order, len(x.segments))
	for s := range o {
		o[s] = untouched
	}
	next := uint32(0)
	for _, runs := range lists {
		for _, r := range runs {
			first, end := overlapped(x.table, r)
			for s := first; s < end; s++ {
				if o[s] == untouched {
					o[s] = next
					next++
				}
			}
		}
	}
	for s := range o {
		if o[s] != untouched {
			continue
		}
		rank := uint32(s)
		if s < len(rest) {
			rank = rest[s]
		}
		o[s] = rank + min(next, math.MaxUint32-rank)
	}
	return o
}
