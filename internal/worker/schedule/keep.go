package schedule

import (
	"slices"

	"hydrofoil.dev/foil/internal/worker/arena"
)

// A start needs only a few percent of the filled pages of its set, and of what a miss brings along.
// Written all the same they would be half as much again as the service touches, in the page cache and on
// the disk, and the processors would decode and hash them while the service waits. So while the
// server holds, such frames are kept as they came. What somebody reads of them is written at
// once; the rest when the hold ends.

// Kept is a frame that is to be written later, or of which a part is to be written now. Who keeps it sets what is
// exported, once.
type Kept struct {
	Blocks []arena.Range // where in the arena it belongs
	Bytes  int64         // of it, as it came
	Filled bool          // it is of a startup set, and holds filled pages; else it is of the plan
	Handle any           // the keeper's: what it takes to write the frame
	hits   int           // reads of it
}

// Around returns how many bytes are to be written around what a read lacks of a frame of the plan: four times as much
// with each read of the frame, since all of it is verified each time.
func (k *Kept) Around() int64 { return arena.BlockSize << min(2*k.hits, 16) }

// Keeps reports whether a frame of so many bytes is to be kept; ofSet: it is of a startup set; filled: and holds
// filled pages.
func (s *Schedule) Keeps(ofSet, filled bool, bytes int64) bool {
	h := &s.hold
	if !h.asked || h.released || !s.set.holds || s.held+bytes > keepMost {
		return false
	}
	if ofSet {
		return filled
	}
	return h.on
}

// Keep is told of a frame that is kept, and returns the reads that lack some of it: that is to be written now. It
// returns false if the hold has ended meanwhile: the frame is not kept.
func (s *Schedule) Keep(k *Kept) (reads []*Read, ok bool) {
	if s.hold.released {
		return nil, false
	}
	s.kept, s.held = append(s.kept, k), s.held+k.Bytes
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
func (k *Kept) has(r *Read) bool {
	return slices.ContainsFunc(k.Blocks, func(b arena.Range) bool { return r.Reaches(b.Off, b.Len) })
}

// keptFor returns the kept frames that have something of a read, and notes whether filled
// pages are all that it lacks.
func (s *Schedule) keptFor(r *Read) (parts []*Kept) {
	if r.Space != s.space {
		return nil
	}
	var pages []*Kept
	for _, k := range s.kept {
		if !k.has(r) {
			continue
		}
		if k.Filled {
			pages = append(pages, k)
		}
		k.hits++
		parts = append(parts, k)
	}
	// A frame of the plan that is here is not promoted; one that has these pages too would be.
	r.writing = len(parts) > 0
	for at := r.Off &^ (arena.BlockSize - 1); at < r.Off+r.Len; at += arena.BlockSize {
		block := &Read{Off: at, Len: 1}
		if !r.Space.Present(at, 1) && !slices.ContainsFunc(pages, func(k *Kept) bool { return k.has(block) }) {
			r.writing = false
		}
	}
	return parts
}

// Forget is told of a frame that turned out to be damaged, and is kept no more: it is asked for again. nil is none.
func (s *Schedule) Forget(k *Kept) {
	if i := slices.Index(s.kept, k); k != nil && i >= 0 {
		s.kept, s.held = slices.Delete(s.kept, i, i+1), s.held-k.Bytes
	}
}

// writeKept has what was kept written: nothing is held any more, or the stream is at its end.
func (s *Schedule) writeKept() {
	s.orders.Write = append(s.orders.Write, s.kept...)
	s.kept, s.held = nil, 0
}
