package share

import (
	"context"
	"slices"

	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/worker/arena"
	"hydrofoil.dev/foil/internal/worker/contents"
	"hydrofoil.dev/foil/internal/worker/locks"
	"hydrofoil.dev/foil/internal/worker/rootfs"
	"hydrofoil.dev/foil/internal/worker/store"
)

// expected are segments that a rootfs lacks, and that lie, or will lie, in the arena of
// another one that is being filled. They are copied when they are there. Each is
// compared with the digest that its own rootfs's TOC gives, as if it came from a server:
// what the other arena holds is never believed.
type expected struct {
	to   *arena.Arena
	from *store.Rootfs
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

// expect finds which of the absent segments of to the arena of from has a place for. src are the contents of from,
// which leases keep. It returns nil when there are none.
func expect(to *arena.Arena, from *store.Rootfs, src *rootfs.Contents, absent []int) *expected {
	want, id, length := to.Layout().ByID(absent)
	e := &expected{to: to, from: from, filled: from.Arena(), src: src}
	src.List.Join(want, id, length, func(i int32, off int64, _ contents.Kind) {
		if n := len(e.left); n == 0 || e.left[n-1].segment != int(i) { // one place is enough
			e.left = append(e.left, piece{int(i), off})
		}
	})
	if len(e.left) == 0 {
		return nil
	}
	slices.SortFunc(e.left, func(x, y piece) int { return x.segment - y.segment })
	return e
}

// Segments are those that have not come, ascending.
func (e *expected) Segments() []int {
	e.mu.Lock()
	defer e.mu.Unlock()
	list := make([]int, len(e.left))
	for k, p := range e.left {
		list[k] = p.segment
	}
	return list
}

// Length returns the bytes of a segment.
func (e *expected) Length(segment int) int64 { return int64(e.to.Layout().Segment(segment).Length) }

// There returns which segments of the arena that is being filled have some of these, in their order.
func (e *expected) There(segments []int) (list []int) {
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
func (e *expected) find(i int) (k int, ok bool) {
	return slices.BinarySearchFunc(e.left, i, func(p piece, i int) int { return p.segment - i })
}

// Filled is how many bytes have been written to the other arena: as long as that grows, what
// is expected may come.
func (e *expected) Filled() int64 {
	if e.filled == nil {
		return 0
	}
	return e.filled.Written()
}

// Copy copies what is in the other arena by now. An error says that nothing more should be
// expected of that.
func (e *expected) Copy(ctx context.Context) (copied int64, err error) {
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
		if err = e.src.CopySegment(e.to, p.segment, p.off, buf); err == nil {
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
func (e *expected) Bring(ctx context.Context, i int) error {
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
	return e.src.CopySegment(e.to, i, p.off, make([]byte, n))
}

// Close ends the use of the other arena. Nothing is copied any more.
func (e *expected) Close() { _ = e.src.Close() }
