package schedule

import (
	"slices"
	"time"

	"hydrofoil.dev/foil/internal/worker/arena"
)

// comes reports whether a frame that a read lacks comes by itself, soon enough that nothing need
// be asked for.
func (s *Schedule) comes(now time.Time, r *Read, f uint32) bool {
	switch {
	case r.late(now):
		return false // whatever was believed
	case s.plan.frames[f].state&(promoted|elsewhere) != 0, r.writing, s.brings(r):
		return true
	case s.plan.frames[f].state&beside != 0:
		return s.nearAhead(f, 0) <= s.beyond
	case s.hold.on, s.set.blocks != nil, now.Before(s.rests):
		return false // the server sends nothing else in its turn
	}
	return s.ahead(f)+s.nearAhead(f, f+1) <= s.beyond
}

// nearAhead returns how many bytes of near come before a frame, or before the end of near, in
// frames from that number on.
func (s *Schedule) nearAhead(f, from uint32) (n int64) {
	for _, g := range s.near {
		if g == f {
			break
		}
		if g >= from && s.plan.frames[g].state&received == 0 {
			n += s.plan.frames[g].size
		}
	}
	return n
}

// ahead returns how many bytes of frames come before a frame in the order of the plan.
func (s *Schedule) ahead(f uint32) (n int64) {
	for i := s.plan.next; i < int(f); i++ {
		if s.plan.frames[i].state&(received|elsewhere) == 0 {
			n += s.plan.frames[i].size
		}
	}
	return n
}

// brings reports whether all that a read lacks comes with startup sets.
func (s *Schedule) brings(r *Read) bool {
	if r.Space != s.space {
		return false
	}
	return r.within(s.set.blocks) || slices.ContainsFunc(s.joins, func(j *Joining) bool { return j.asked || r.within(j.blocks) })
}

// late reports whether a read has waited longer than it should.
func (r *Read) late(now time.Time) bool { return !r.due.IsZero() && !now.Before(r.due) }

// within reports whether all that a read lacks is in a bitmap of the arena's blocks; nil has none.
func (r *Read) within(blocks []uint64) bool {
	if blocks == nil {
		return false
	}
	for b := r.Off / arena.BlockSize; b*arena.BlockSize < r.Off+r.Len; b++ {
		if !bit(blocks, b) && !r.Space.Present(b*arena.BlockSize, 1) {
			return false
		}
	}
	return true
}

func bit(m []uint64, i int64) bool { return int(i/64) < len(m) && m[i/64]>>(i%64)&1 != 0 }

// lacks returns the frames that a read lacks and that have not come, and whether something of it arrived
// damaged.
func (s *Schedule) lacks(r *Read) (frames []uint32, wrong bool) {
	if s.plan.frameOf == nil || r.Space != s.space {
		return nil, false
	}
	for _, i := range r.Space.AbsentSegments(nil, r.Off, r.Len) {
		f := s.plan.frameOf[i]
		switch {
		case f == NoFrame:
			wrong = wrong || s.plan.torn > 0 // its pages may be those that arrived damaged
		case s.plan.frames[f].state&damaged != 0:
			wrong = true
		case s.plan.frames[f].state&received == 0 && !slices.Contains(frames, f):
			frames = append(frames, f)
		}
	}
	return frames, wrong
}

// Lacking reports whether a read lacks what only a plan that is in use brings, and how many bytes of
// frames are planned, and have not come, up to the end of that, as if nothing were promoted.
func (s *Schedule) Lacking(r *Read) (planned bool, ahead int64) {
	if s.plan.frameOf == nil || r.writing || s.brings(r) {
		return false, 0
	}
	frames, _ := s.lacks(r)
	for _, f := range frames {
		ahead = max(ahead, s.ahead(f)+s.plan.frames[f].size)
	}
	return true, ahead
}

// ask has all promoted that reads lack, if something of it does not come by itself.
func (s *Schedule) ask(now time.Time) {
	due := s.hurried()
	before := int64(0) // bytes of the reads that began before
	var list []uint32
	for _, r := range s.reads {
		frames, wrong := s.lacks(r)
		s.orders.Restart = s.orders.Restart || wrong && !r.writing && !s.brings(r)
		missed := false
		for _, f := range frames {
			missed = missed || !s.comes(now, r, f)
		}
		late := r.late(now)
		if late || r.due.IsZero() {
			s.expect(now, r, frames, before, late)
		}
		if !late {
			frames = slices.DeleteFunc(frames, func(f uint32) bool { return s.plan.frames[f].state&elsewhere != 0 })
		}
		if missed {
			due = true
			far := false // from what other reads lacked
			for _, f := range frames {
				far = far || s.plan.frames[f].state&(promoted|beside) == 0
				s.plan.frames[f].state = s.plan.frames[f].state&^elsewhere | promoted
			}
			if far && !r.promoted {
				s.missed(r)
			}
			r.promoted = true
		}
		if r.writing || !missed && s.brings(r) {
			continue
		}
		for _, f := range frames {
			if !slices.Contains(list, f) {
				list = append(list, f)
				before += s.plan.frames[f].size
			}
		}
	}
	if !due {
		return
	}
	s.near = slices.DeleteFunc(s.near, func(f uint32) bool {
		return s.plan.frames[f].state&(received|elsewhere) != 0 || slices.Contains(list, f)
	})
	list = append(list, s.near...)
	for _, f := range list {
		if s.plan.frames[f].state&named == 0 {
			s.orders.Fresh++
		}
		s.plan.frames[f].state |= named
	}
	for _, f := range s.near {
		s.plan.frames[f].state |= beside
	}
	for _, f := range list[:len(list)-len(s.near)] {
		s.plan.frames[f].state |= promoted
	}
	s.number = max(s.number, BackNumber) + 1
	s.orders.Promote, s.orders.Number = list, s.number
}

// expect says how long a read should wait at most, once that is known, and when it has waited
// too long: each time twice as long after the last.
func (s *Schedule) expect(now time.Time, r *Read, frames []uint32, before int64, late bool) {
	if s.plan.frameOf == nil && !s.brings(r) {
		r.due = time.Time{} // nothing can be asked for
		return
	}
	bytes := before + s.set.bytes
	for _, f := range frames {
		bytes += s.plan.frames[f].size
	}
	most := s.link.most(bytes)
	if r.bound == 0 && most > 0 {
		r.bound = now.Sub(r.Began) + most
	}
	if most == 0 {
		most = unmeasured
	}
	most = min(most, askAgain)
	if late {
		most = max(most, 2*now.Sub(r.Began))
	}
	r.due = now.Add(most)
}
