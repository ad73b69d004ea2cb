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

// Lacks reports whether the worker lacks some bytes of a run of pages of a
// want: whether it has bytes of a segment that is missing. The run must lie in
// its content.
func (d *Difference) Lacks(want int, r trace.Run) bool {
	if d.missing == nil {
		d.missing = make([]bool, d.total)
		for _, k := range d.wants {
			for s, w := range k.want {
				if w {
					d.missing[k.number[s]] = true
				}
			}
		}
	}
	k := d.wants[want]
	first, end := overlapped(k.Index.table, r)
	for s := first; s < end; s++ {
		if !k.Index.segments[s].ID.IsHole() && d.missing[k.number[s]] {
			return true
		}
	}
	return false
}

// Arrive leaves out of the plan what pages bring: a segment all of whose pages
// are in runs (by want), wherever it occurs in the wants. Runs must lie in their contents; they may
// come in any order and overlap.
func (d *Difference) Arrive(runs [][]trace.Run) {
	var covered [][]bool
	for k, list := range runs {
		if len(list) == 0 {
			continue
		}
		if covered == nil {
			covered = make([][]bool, len(d.wants))
		}
		covered[k] = d.wants[k].Index.covered(list)
	}
	if covered == nil {
		return
	}
	left := make([]uint32, d.total) // by number: places that pages do not fill
	for k, w := range d.wants {
		if w.Header {
			continue
		}
		for s := range w.number {
			if hole := w.Index.segments[s].ID.IsHole(); !hole && (covered[k] == nil || !covered[k][s]) {
				left[w.number[s]]++
			}
		}
	}
	for _, w := range d.wants {
		for s, n := range w.number {
			if left[n] == 0 {
				w.want[s] = false // a hole is not wanted anyway
			}
		}
	}
	d.missing = nil
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
