package fetch

import (
	"fmt"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/worker/arena"
	"hydrofoil.dev/foil/internal/worker/schedule"
)

// index says where the frames' segments belong. It takes the place of
// Plan.Check: every segment is verified against the arena's layout when it is
// written, so the plan need only be consistent.
type index struct {
	plan   *bundle.Plan
	layout *arena.Layout // nil: there is no arena
	// foreign are planned segments that the arena has no place for by their number.
	foreign map[uint32]toc.Segment
	// frameOf says which frame holds each of the arena's segments; schedule.NoFrame: none.
	frameOf []uint32
}

// newIndex makes the index of a plan. It calls table only if there are segments that the layout has no
// place for.
func newIndex(plan *bundle.Plan, l *arena.Layout, table func() (*toc.TOC, error)) (*index, error) {
	x := &index{plan: plan, layout: l, frameOf: []uint32{}}
	if l != nil {
		x.frameOf = make([]uint32, l.Segments())
		for i := range x.frameOf {
			x.frameOf[i] = schedule.NoFrame
		}
	}
	var places []int
	for frame, f := range plan.Frames {
		raw := int64(0)
		for _, n := range plan.Segments[f.First : f.First+f.Segments] {
			places = places[:0]
			var id segment.ID
			if i, ok := x.home(n); ok {
				piece := l.Segment(i)
				id, raw = piece.ID, raw+int64(piece.Length)
				places = l.Same(places, i)
			} else {
				t, err := table()
				if err != nil {
					return nil, err
				}
				if x.foreign == nil {
					x.foreign = make(map[uint32]toc.Segment)
				}
				piece := t.Segments[n]
				x.foreign[n] = piece
				id, raw = piece.ID, raw+int64(piece.Length)
				if l != nil {
					places = l.Find(places, piece.ID)
				}
			}
			if id.IsHole() {
				return nil, fmt.Errorf("%w: frame %d of the plan names a hole", bundle.ErrCorrupt, frame)
			}
			for _, k := range places {
				x.frameOf[k] = uint32(frame)
			}
		}
		if raw != int64(f.RawLength) {
			return nil, fmt.Errorf("%w: frame %d of the plan has %d bytes, its segments %d", bundle.ErrCorrupt, frame, f.RawLength, raw)
		}
	}
	return x, nil
}

// home returns the number in the arena of segment n of the plan; false when it has no place for it.
func (x *index) home(n uint32) (int, bool) {
	if x.layout == nil {
		return 0, false
	}
	return x.layout.FromTOC(int(n))
}

// sizes returns how large the plan's frames are at most.
func (x *index) sizes() []int64 {
	sizes := make([]int64, len(x.plan.Frames))
	for i, f := range x.plan.Frames {
		sizes[i] = int64(f.MaxLength)
	}
	return sizes
}

// places returns where in the arena the bytes of a frame belong.
func (x *index) places(frame uint32) (out []arena.Range) {
	for i, f := range x.frameOf {
		if f == frame {
			g := x.layout.Segment(i)
			out = append(out, arena.Range{Off: g.Offset, Len: int64(g.Length)})
		}
	}
	return out
}

// segments calls fn for each segment of a frame that the arena has a place for, with its place in
// the decoded frame, and its number in the arena.
func (x *index) segments(frame uint32, fn func(id segment.ID, from, to, i int) error) error {
	f := &x.plan.Frames[frame]
	at := 0
	var places []int
	for _, n := range x.plan.Segments[f.First : f.First+f.Segments] {
		var id segment.ID
		var length int
		i, ok := x.home(n)
		if ok {
			piece := x.layout.Segment(i)
			id, length = piece.ID, piece.Length
		} else {
			piece := x.foreign[n]
			id, length = piece.ID, int(piece.Length)
			if x.layout != nil {
				if places = x.layout.Find(places[:0], id); len(places) > 0 {
					i, ok = places[0], true
				}
			}
		}
		if ok {
			if err := fn(id, at, at+length, i); err != nil {
				return err
			}
		}
		at += length
	}
	return nil
}
