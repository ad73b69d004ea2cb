package fetch

import (
	"slices"
	"time"

	"hydrofoil.dev/foil/internal/worker/arena"
)

// After the startup set of a service, a start needs next to nothing. What follows would only
// compete with it for the processors and the disk, and stand in the way of the page that is missing
// all the same. So the server is asked to hold back what is not promoted
// (bundle.Request.Hold), and a miss costs one round trip.
//
// Who misses once is likely to miss again nearby: a file that is read from one end to the other, the
// tables of a large program. The line has nothing else to do before the next miss. So what lies
// around a miss comes after it, twice as much each time: of the same file as much as the line brings in a round trip,
// since another miss in it would cost that. Misses do not end the hold: a start that has
// the processors to itself, and waits now and then, is ready before one that shares them with the rest of its
// image. Only when misses have brought as much as the set of a large service was the set wrong.
const (
	// aroundFirst is how much comes with the first miss of a start, bytes of frames, and with each
	// one while the server does not hold.
	aroundFirst = 256 << 10
	// aroundMost is how much comes with one miss at most.
	aroundMost = 2 << 20
	// aroundAll is how much misses bring before the hold ends.
	aroundAll = 16 << 20
	// keepMost bounds what is kept of a pull, bytes of frames: as much as misses bring before the
	// hold ends. What comes beyond it is written as everything is.
	keepMost = aroundAll
)

// hold is what Options.Hold has become.
type hold struct {
	most     time.Duration // Options.Hold
	asked    bool          // the server was asked to hold in this stream
	on       bool          // it holds back what is not promoted, unless it knows no holds
	released bool
	unsaid   bool      // the server could not be told that it is released
	ends     time.Time // once it has begun, in whichever stream
	misses   int
	brought  int64 // with misses, bytes of frames
}

// left is for how long the server is to hold in the next stream.
func (h *hold) left(now time.Time) time.Duration {
	switch {
	case h.released:
		return 0
	case h.ends.IsZero():
		return h.most
	}
	return max(0, h.ends.Sub(now))
}

// release ends the hold, before it has begun as well.
func (s *schedule) release() {
	s.orders.release = s.orders.release || s.hold.on
	s.hold.on, s.hold.released = false, true
	s.writeKept()
}

// releaseAt has the hold end at a time, unless it ends before.
func (s *schedule) releaseAt(ends time.Time) {
	h := &s.hold
	switch {
	case h.most == 0:
		s.release()
	case h.released, !h.ends.IsZero() && h.ends.Before(ends):
	default:
		h.ends = ends
	}
}

// beginHold notes that the server holds.
func (s *schedule) beginHold(now time.Time) {
	h := &s.hold
	if !h.asked || !s.set.holds {
		return
	}
	h.on = true
	if h.released {
		s.release()
	} else if h.ends.IsZero() {
		h.ends = now.Add(h.most)
	}
}

// missed has what lies next to what a read lacks come after it. While the server holds it counts
// the reads that missed.
func (s *schedule) missed(r *reading) {
	h := &s.hold
	if !h.on {
		if s.set.blocks == nil { // else it would go before pages of the set
			s.around(r, aroundFirst)
		}
		return
	}
	most := int64(aroundMost)
	if h.misses < 8 {
		most = min(most, aroundFirst<<h.misses)
	}
	h.brought += s.around(r, most)
	h.misses++
	if h.brought >= aroundAll {
		s.release()
	}
}

// around adds to near the frames that lie next to what a read lacks: of the file about as many bytes as
// a round trip is worth, and of the files next to it, together with these, about most. It returns how many.
func (s *schedule) around(r *reading, most int64) (n int64) {
	frameOf := s.plan.frameOf
	first, end := r.space.SegmentsIn(r.off, r.n)
	var list []uint32
	add := func(from, to int, most int64) {
		for before, after := first-1, end; n < most && (before >= from || after < to); before, after = before-1, after+1 {
			for _, i := range [...]int{after, before} {
				if i < from || i >= to || frameOf[i] == noFrame {
					continue
				}
				f := frameOf[i]
				if s.plan.frames[f].state&^named != 0 || slices.Contains(list, f) || n >= most {
					continue
				}
				list = append(list, f)
				n += s.plan.frames[f].size
			}
		}
	}
	if first < end {
		from, to := r.space.Neighbours(first)
		add(from, to, max(most, min(s.link.flight(), aroundMost)))
	}
	add(0, len(frameOf), most)
	older := slices.DeleteFunc(s.near, func(f uint32) bool { return slices.Contains(list, f) })
	s.near = append(list, older...)
	return n
}

// A start needs only a few percent of the filled pages of its set, and of what a miss brings along.
// Written all the same they would be half as much again as the service touches, in the page cache and on
// the disk, and the processors would decode and hash them while the service waits. So while the
// server holds, such frames are kept as they came. What somebody reads of them is written at
// once; the rest when the hold ends.

// kept is a frame that is to be written later, or of which a part is to be written now.
type kept struct {
	job
	blocks []span // where in the arena it belongs
	hits   int    // reads of it
}

// span is a range of the arena, bytes.
type span struct{ off, end int64 }

// keeps reports whether a frame of so many bytes is kept; filled: it is of a startup set, and holds
// filled pages.
func (s *schedule) keeps(ofSet, filled bool, bytes int64) bool {
	h := &s.hold
	if !h.asked || h.released || !s.set.holds || s.held+bytes > keepMost {
		return false
	}
	if ofSet {
		return filled
	}
	return h.on
}

// keep keeps a frame, unless the hold has ended, and returns the reads that lack some of it.
func (s *schedule) keep(k *kept) (reads []*reading, ok bool) {
	if s.hold.released {
		return nil, false
	}
	s.kept, s.held = append(s.kept, k), s.held+int64(len(k.data))
	for _, r := range s.reads {
		if k.has(r) {
			reads = append(reads, r)
		}
	}
	if reads != nil {
		k.hits++
	}
	return reads, true
}

// has reports whether some of what a read lacks is in the frame.
func (k *kept) has(r *reading) bool {
	return slices.ContainsFunc(k.blocks, func(s span) bool { return s.off < r.off+r.n && r.off < s.end })
}

// keptFor returns the kept frames that have something of a read, and notes whether filled
// pages are all that it lacks.
func (s *schedule) keptFor(r *reading) (parts []*kept) {
	if r.space != s.space {
		return nil
	}
	var pages []*kept
	for _, k := range s.kept {
		if !k.has(r) {
			continue
		}
		if k.set != nil {
			pages = append(pages, k)
		}
		k.hits++
		parts = append(parts, k)
	}
	// A frame of the plan that is here is not promoted; one that has these pages too would be.
	r.writing = len(parts) > 0
	for at := r.off &^ (arena.BlockSize - 1); at < r.off+r.n; at += arena.BlockSize {
		block := &reading{off: at, n: 1}
		if !r.space.Present(at, 1) && !slices.ContainsFunc(pages, func(k *kept) bool { return k.has(block) }) {
			r.writing = false
		}
	}
	return parts
}

// forget lets go of a frame that turned out to be damaged: it is asked for again.
func (s *schedule) forget(k *kept) {
	if i := slices.Index(s.kept, k); k != nil && i >= 0 {
		s.kept, s.held = slices.Delete(s.kept, i, i+1), s.held-int64(len(k.data))
	}
}

// writeKept has what was kept written: nothing is held any more, or the stream is at its end.
func (s *schedule) writeKept() {
	s.orders.write = append(s.orders.write, s.kept...)
	s.kept, s.held = nil, 0
}
