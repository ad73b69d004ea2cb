package store

import (
	"context"
	"slices"

	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/worker/arena"
	"hydrofoil.dev/foil/internal/worker/contents"
	"hydrofoil.dev/foil/internal/worker/locks"
	"hydrofoil.dev/foil/internal/worker/rootfs"
)

// Expected are segments that a rootfs lacks, and that lie, or will lie, in the arena of
// another one that is being filled. They are copied when they are there. Each is
// compared with the digest that its own rootfs's TOC gives, as if it came from a server:
// what the other arena holds is never believed.
type Expected struct {
	to   *arena.Arena
	from *Rootfs
	// filled is the arena of from; nil: it is complete.
	filled *arena.Arena
	src    *rootfs.Contents

	mu   locks.Mutex[locks.Leaf]
	left []piece // by segment; some may have come another way
}

// piece is a segment of an arena that another one has, too.
type piece struct {
	segment int
	off     int64 // in the other
}

// Expect finds which of r's absent segments the arena of from has a place for, and has leases
// keep that. It returns nil when there are none, and for rootfs of two origins.
func (s *Store) Expect(r, from *Rootfs, absent []int, leases *Leases) *Expected {
	a := r.Arena()
	if a == nil || r == from || len(absent) == 0 || !s.mayServe(from, r.Origin()) {
		return nil
	}
	s.mu.Lock()
	here := s.rootfs[from.Key()] == from
	if here {
		leases.Take(from)
	}
	s.mu.Unlock()
	if !here || from.Broken() != nil {
		return nil
	}
	src := from.Contents()
	if src == nil {
		return nil
	}
	if _, err := src.File(); err != nil { // before several goroutines read
		return nil
	}
	l := a.Layout()
	want, id := sorted32(l, absent)
	e := &Expected{to: a, from: from, filled: from.Arena(), src: src}
	src.List.Join(want, id, func(i int32, off int64, _ contents.Kind) {
		if n := len(e.left); n == 0 || e.left[n-1].segment != int(i) { // one place is enough
			e.left = append(e.left, piece{int(i), off})
		}
	})
	if len(e.left) == 0 {
		_ = src.Close()
		return nil
	}
	slices.SortFunc(e.left, func(x, y piece) int { return x.segment - y.segment })
	return e
}

// Segments are those that have not come, ascending.
func (e *Expected) Segments() []int {
	e.mu.Lock()
	defer e.mu.Unlock()
	list := make([]int, len(e.left))
	for k, p := range e.left {
		list[k] = p.segment
	}
	return list
}

// Length returns the bytes of a segment.
func (e *Expected) Length(segment int) int64 { return int64(e.to.Layout().Segment(segment).Length) }

// There returns which segments of the arena that is being filled have some of these, in their order.
func (e *Expected) There(segments []int) (list []int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.filled == nil {
		return nil
	}
	for _, i := range segments {
		if k, ok := e.find(i); ok {
			first, end := e.filled.Layout().SegmentsIn(e.left[k].off, e.Length(i))
			for ; first < end; first++ {
				list = append(list, first)
			}
		}
	}
	return list
}

// find returns where segment i is in left. mu is held.
func (e *Expected) find(i int) (k int, ok bool) {
	return slices.BinarySearchFunc(e.left, i, func(p piece, i int) int { return p.segment - i })
}

// Filled is how many bytes have been written to the other arena: as long as that grows, what
// is expected may come.
func (e *Expected) Filled() int64 {
	if e.filled == nil {
		return 0
	}
	return e.filled.Written()
}

// Copy copies what is in the other arena by now. An error says that nothing more should be
// expected of that.
func (e *Expected) Copy(ctx context.Context) (copied int64, err error) {
	e.mu.Lock()
	left := slices.Clone(e.left)
	e.mu.Unlock()
	var buf []byte
	left = slices.DeleteFunc(left, func(p piece) bool {
		n := int64(e.to.Layout().Segment(p.segment).Length)
		switch {
		case e.to.HasSegment(p.segment):
			return true
		case err != nil, ctx.Err() != nil, !e.src.Holds(p.off, n):
			return false
		}
		if buf == nil {
			buf = make([]byte, segment.MaxLength)
		}
		if err = copyTo(e.src, e.to, p.segment, p.off, buf); err == nil {
			copied += n
		}
		return err == nil
	})
	e.mu.Lock()
	e.left = left
	e.mu.Unlock()
	return copied, err
}

// Bring has segment i, if it is expected, come soon in the other arena, and copies it.
func (e *Expected) Bring(ctx context.Context, i int) error {
	e.mu.Lock()
	k, ok := e.find(i)
	var p piece
	if ok {
		p = e.left[k]
	}
	e.mu.Unlock()
	if !ok || e.to.HasSegment(i) {
		return nil
	}
	n := e.Length(i)
	if err := e.from.Await(ctx, p.off, n); err != nil {
		return err
	}
	return copyTo(e.src, e.to, i, p.off, make([]byte, n))
}

// Close ends the use of the other arena. Nothing is copied any more.
func (e *Expected) Close() { _ = e.src.Close() }
