package schedule

import (
	"slices"
	"time"
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

// Release ends the hold, before it has begun as well.
func (s *Schedule) Release() {
	s.orders.Release = s.orders.Release || s.hold.on
	s.hold.on, s.hold.released = false, true
	s.writeKept()
}

// ReleaseAt has the hold end at a time, unless it ends before.
func (s *Schedule) ReleaseAt(ends time.Time) {
	h := &s.hold
	switch {
	case h.most == 0:
		s.Release()
	case h.released, !h.ends.IsZero() && h.ends.Before(ends):
	default:
		h.ends = ends
	}
}

// beginHold notes that the server holds.
func (s *Schedule) beginHold(now time.Time) {
	h := &s.hold
	if !h.asked || !s.set.holds {
		return
	}
	h.on = true
	if h.released {
		s.Release()
	} else if h.ends.IsZero() {
		h.ends = now.Add(h.most)
	}
}

// missed has what lies next to what a read lacks come after it. While the server holds it counts
// the reads that missed.
func (s *Schedule) missed(r *Read) {
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
		s.Release()
	}
}

// around adds to near the frames that lie next to what a read lacks: of the file about as many bytes as
// a round trip is worth, and of the files next to it, together with these, about most. It returns how many.
func (s *Schedule) around(r *Read, most int64) (n int64) {
	frameOf := s.plan.frameOf
	first, end := r.Space.SegmentsIn(r.Off, r.Len)
	var list []uint32
	add := func(from, to int, most int64) {
		for before, after := first-1, end; n < most && (before >= from || after < to); before, after = before-1, after+1 {
			for _, i := range [...]int{after, before} {
				if i < from || i >= to || frameOf[i] == NoFrame {
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
		from, to := r.Space.Neighbours(first)
		add(from, to, max(most, min(s.link.flight(), aroundMost)))
	}
	add(0, len(frameOf), most)
	older := slices.DeleteFunc(s.near, func(f uint32) bool { return slices.Contains(list, f) })
	s.near = append(list, older...)
	return n
}
