package fetch

import (
	"slices"
	"time"

	"hydrofoil.dev/foil/internal/worker/arena"
)

// schedule decides for one pull what is asked for out of turn, what is kept and what is written,
// and when the server may send the rest. It is a value: its methods are the events, what they
// are told is all that it knows, and what is to be done is in orders. It has no locks, no goroutines and no
// clock; Pull has these.
//
// Where the stream is, is known from what has come: the server sends frames in the order of the
// plan, but for those that were promoted, and nothing goes along with those. So the stream is at the lowest
// frame that has not come, and before a frame come those below it that have not. (An older
// server may have sent more; then less comes first than is believed.)
//
// What a read lacks comes by itself, or is promoted: comes decides that, and nothing else does. A promotion
// names all that reads lack, in the order in which they began, and after it what lies next to it. So a
// read waits for what was in flight when it began, for a round trip, and for the bytes of
// the reads before it and its own. One that waits longer is promoted again, whatever was believed.
type schedule struct {
	beyond int64 // Options.PromoteBeyond
	link   link
	space  space      // nil: there is no arena
	reads  []*reading // that wait, in the order in which they began
	set    coming     // of the stream that runs
	plan   course     // of the stream that runs
	joins  []*joining // services that have joined
	hold   hold
	kept   []*kept   // frames that came while the server holds, and are to be written
	held   int64     // bytes of them
	near   []uint32  // frames that lie next to what reads lacked, the most wanted first
	early  []int     // segments that another pull wants first, in its order; see hurry
	number uint64    // of the last promotion; from backNumber on
	retry  time.Time // when what could not be said to the server is said again; zero: nothing

	orders orders
}

// orders is what is to be done. Whoever calls a method of schedule does it, and clears it.
type orders struct {
	promote []uint32 // frames, the most wanted first
	fresh   int      // how many of them are promoted for the first time
	number  uint64   // of that promotion
	back    []uint32 // frames that are to be sent after all, behind those that reads lack
	skip    []uint32 // frames that the server need not send
	chosen  bool     // it need not wait for more of these
	release bool     // the server is to hold nothing back any more
	restart bool     // the stream is to end, so that what arrived damaged is asked for
	write   []*kept  // is written now
}

// space is what a schedule asks of the arena: what is here, and which segments a range has.
type space interface {
	Present(off, n int64) bool
	AbsentSegments(dst []int, off, n int64) []int
	SegmentsIn(off, n int64) (first, end int)
	Neighbours(segment int) (first, end int) // of the same content
}

// reading is a read that waits.
type reading struct {
	space  space
	off, n int64
	began  time.Time
	bound  time.Duration // what it should take at most; 0: not known yet
	due    time.Time     // when it has waited too long; zero: bound is not known
	// writing: frames that were kept have all of it, and are being written.
	writing  bool
	promoted bool // something of it was asked for out of turn
}

// coming is a startup set that comes.
type coming struct {
	blocks []uint64 // of the arena; nil: none comes
	bytes  int64    // of its frames that have not come
	holds  bool     // the server may hold back what follows it
}

// joining is what is known of the startup set of a service that has joined.
type joining struct {
	asked  bool     // what comes is not known yet, and will be soon
	blocks []uint64 // that will come; nil: none
}

// course is a plan that is in use.
type course struct {
	frames  []frame
	frameOf []uint32 // by segment of the arena; noFrame: in none. nil: no plan is in use
	next    int      // the lowest frame that has not come
	torn    int      // frames of startup sets that arrived damaged
}

type frame struct {
	size  int64 // bytes, at most
	state frameState
}

type frameState uint8

const (
	received frameState = 1 << iota // it has come
	promoted                        // it was asked for out of turn, for a read that lacks it
	beside                          // the same, since it lies next to what a read lacks
	damaged
	elsewhere // it comes another way, and the server skips it
	named     // it was promoted before, and orders.fresh has counted it
)

const noFrame = ^uint32(0)

// backNumber is the number of promotions of frames that no read lacks: they do not go before others.
const backNumber = 1

// begin is told of a new stream, which asked the server to hold.
func (s *schedule) begin(asked bool) {
	s.plan, s.set, s.near = course{}, coming{}, nil
	s.hold.asked, s.hold.on = asked, false
}

// startup is told of the stream's startup set: blocks of the arena, and the bytes of its frames.
func (s *schedule) startup(blocks []uint64, bytes int64, holds bool) {
	s.set = coming{blocks: blocks, bytes: bytes, holds: holds}
}

// pages is told of a frame of the startup set that has come.
func (s *schedule) pages(bytes int64) { s.set.bytes = max(0, s.set.bytes-bytes) }

// lacksPlan reports whether a read waits for what only the plan brings.
func (s *schedule) lacksPlan() bool {
	return slices.ContainsFunc(s.reads, func(r *reading) bool { return !r.writing && !s.brings(r) })
}

// use takes a plan into use: how large its frames are, and which of them has each segment.
func (s *schedule) use(now time.Time, sizes []int64, frameOf []uint32) {
	s.plan = course{frames: make([]frame, len(sizes)), frameOf: frameOf, torn: s.plan.torn}
	for i, n := range sizes {
		s.plan.frames[i].size = n
	}
	s.ask(now)
}

// pagesDone is told that the startup set has come, and a plan is in use.
func (s *schedule) pagesDone(now time.Time) {
	s.set.blocks, s.set.bytes = nil, 0
	s.beginHold(now)
	s.ask(now)
}

// end is told that the stream has ended.
func (s *schedule) end() {
	s.writeKept()
	s.plan, s.set.blocks, s.set.bytes, s.hold.on, s.near = course{}, nil, 0, false, nil
	for _, r := range s.reads {
		r.bound, r.due, r.promoted = 0, time.Time{}, false // by the next one
	}
}

// arrived is told of a frame that has come.
func (s *schedule) arrived(f uint32) {
	c := &s.plan
	c.frames[f].state |= received
	c.advance()
}

// advance moves next to the lowest frame that is to come.
func (c *course) advance() {
	for c.next < len(c.frames) && c.frames[c.next].state&(received|elsewhere) != 0 {
		c.next++
	}
}

// chosen is told which frames of the plan come another way. The server may send the others, and
// those that reads wait for already.
func (s *schedule) chosen(now time.Time, frames []uint32) {
	var lacked []uint32
	for _, r := range s.reads {
		frames, _ := s.lacks(r)
		lacked = append(lacked, frames...)
	}
	for _, f := range frames {
		if s.plan.frames[f].state&^named == 0 && !slices.Contains(lacked, f) {
			s.plan.frames[f].state |= elsewhere
			s.orders.skip = append(s.orders.skip, f)
		}
	}
	s.orders.chosen = true
	s.plan.advance()
	s.ask(now)
}

// back is told of frames that do not come another way after all.
func (s *schedule) back(now time.Time, frames []uint32) {
	for _, f := range frames {
		if s.plan.frames[f].state&elsewhere != 0 {
			s.plan.frames[f].state = s.plan.frames[f].state&^elsewhere | promoted
			s.orders.back = append(s.orders.back, f)
		}
	}
	s.ask(now)
}

// hurry is told of segments that another pull, which leaves them to this one, wants first. They come
// after this pull's startup set and what reads lack, and before the rest.
func (s *schedule) hurry(now time.Time, segments []int) {
	s.early = append(s.early, segments...)
	s.ask(now)
}

// hurried moves the frames of early to near, once there is a plan. It reports whether there were any.
func (s *schedule) hurried() (any bool) {
	if len(s.early) == 0 || s.plan.frameOf == nil || s.set.blocks != nil {
		return false
	}
	for _, i := range s.early {
		f := s.plan.frameOf[i]
		if f != noFrame && s.plan.frames[f].state&^named == 0 && !slices.Contains(s.near, f) {
			s.near, any = append(s.near, f), true
		}
	}
	s.early = nil
	return any
}

// damaged is told that a frame that has come is wrong.
func (s *schedule) damaged(now time.Time, f uint32) {
	s.plan.frames[f].state |= damaged
	s.ask(now)
}

// tornPages is told that a frame of the startup set is wrong.
func (s *schedule) tornPages(now time.Time) {
	s.plan.torn++
	s.ask(now)
}

// wanted is told of a read that waits. It returns the kept frames that have something of it.
func (s *schedule) wanted(now time.Time, r *reading) []*kept {
	s.reads = append(s.reads, r)
	parts := s.keptFor(r)
	s.ask(now)
	return parts
}

// written is told that what kept frames have of a read is written.
func (s *schedule) written(now time.Time, r *reading) {
	r.writing = false
	s.ask(now)
}

// ended is told that a read waits no more.
func (s *schedule) ended(r *reading) {
	s.reads = slices.DeleteFunc(s.reads, func(o *reading) bool { return o == r })
}

// joined is told of a service that joins, or that more is known of its startup set.
func (s *schedule) joined(now time.Time, j *joining, asked bool, blocks []uint64) {
	j.asked, j.blocks = asked, blocks
	if !slices.Contains(s.joins, j) {
		s.joins = append(s.joins, j)
	}
	s.ask(now)
}

// left is told that the startup set of a service that has joined has come, or cannot be had.
func (s *schedule) left(now time.Time, j *joining) {
	s.joins = slices.DeleteFunc(s.joins, func(o *joining) bool { return o == j })
	s.ask(now)
}

// unsaid is told that the server could not be told what was ordered.
func (s *schedule) unsaid(now time.Time, release bool) {
	for i := range s.plan.frames {
		s.plan.frames[i].state &^= promoted | beside
	}
	s.hold.unsaid = s.hold.unsaid || release
	s.retry = now.Add(retryAfter)
}

// retryAfter is how long after a failure the server is told again.
const retryAfter = 250 * time.Millisecond

// tick is told the time. It is to be called at the time that wake says.
func (s *schedule) tick(now time.Time) {
	if h := &s.hold; !h.released && !h.ends.IsZero() && !now.Before(h.ends) {
		s.release()
	}
	if !s.retry.IsZero() && !now.Before(s.retry) {
		s.retry = time.Time{}
		if s.hold.unsaid {
			s.orders.release, s.hold.unsaid = s.plan.frameOf != nil, false
		}
	}
	s.ask(now)
}

// wake returns when tick is to be called; zero: not before something happens.
func (s *schedule) wake() (at time.Time) {
	earlier := func(t time.Time) {
		if !t.IsZero() && (at.IsZero() || t.Before(at)) {
			at = t
		}
	}
	if !s.hold.released {
		earlier(s.hold.ends)
	}
	earlier(s.retry)
	for _, r := range s.reads {
		earlier(r.due)
	}
	return at
}

// comes reports whether a frame that a read lacks comes by itself, soon enough that nothing need
// be asked for.
func (s *schedule) comes(now time.Time, r *reading, f uint32) bool {
	switch {
	case r.late(now):
		return false // whatever was believed
	case s.plan.frames[f].state&(promoted|elsewhere) != 0, r.writing, s.brings(r):
		return true
	case s.plan.frames[f].state&beside != 0:
		return s.nearAhead(f, 0) <= s.beyond
	case s.hold.on, s.set.blocks != nil:
		return false // the server sends nothing else in its turn
	}
	return s.ahead(f)+s.nearAhead(f, f+1) <= s.beyond
}

// nearAhead returns how many bytes of near come before a frame, or before the end of near, in
// frames from that number on.
func (s *schedule) nearAhead(f, from uint32) (n int64) {
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
func (s *schedule) ahead(f uint32) (n int64) {
	for i := s.plan.next; i < int(f); i++ {
		if s.plan.frames[i].state&(received|elsewhere) == 0 {
			n += s.plan.frames[i].size
		}
	}
	return n
}

// brings reports whether all that a read lacks comes with startup sets.
func (s *schedule) brings(r *reading) bool {
	if r.space != s.space {
		return false
	}
	return r.within(s.set.blocks) || slices.ContainsFunc(s.joins, func(j *joining) bool { return j.asked || r.within(j.blocks) })
}

// late reports whether a read has waited longer than it should.
func (r *reading) late(now time.Time) bool { return !r.due.IsZero() && !now.Before(r.due) }

// within reports whether all that a read lacks is in a bitmap of the arena's blocks; nil has none.
func (r *reading) within(blocks []uint64) bool {
	if blocks == nil {
		return false
	}
	for b := r.off / arena.BlockSize; b*arena.BlockSize < r.off+r.n; b++ {
		if !bit(blocks, b) && !r.space.Present(b*arena.BlockSize, 1) {
			return false
		}
	}
	return true
}

func bit(m []uint64, i int64) bool { return int(i/64) < len(m) && m[i/64]>>(i%64)&1 != 0 }

// lacks returns the frames that a read lacks and that have not come, and whether something of it arrived
// damaged.
func (s *schedule) lacks(r *reading) (frames []uint32, wrong bool) {
	if s.plan.frameOf == nil || r.space != s.space {
		return nil, false
	}
	for _, i := range r.space.AbsentSegments(nil, r.off, r.n) {
		f := s.plan.frameOf[i]
		switch {
		case f == noFrame:
			wrong = wrong || s.plan.torn > 0 // its pages may be those that arrived damaged
		case s.plan.frames[f].state&damaged != 0:
			wrong = true
		case s.plan.frames[f].state&received == 0 && !slices.Contains(frames, f):
			frames = append(frames, f)
		}
	}
	return frames, wrong
}

// lacking reports whether a read lacks what only a plan that is in use brings, and how many bytes of
// frames are planned, and have not come, up to the end of that, as if nothing were promoted.
func (s *schedule) lacking(r *reading) (planned bool, ahead int64) {
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
func (s *schedule) ask(now time.Time) {
	due := s.hurried()
	before := int64(0) // bytes of the reads that began before
	var list []uint32
	for _, r := range s.reads {
		frames, wrong := s.lacks(r)
		s.orders.restart = s.orders.restart || wrong && !r.writing && !s.brings(r)
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
			s.orders.fresh++
		}
		s.plan.frames[f].state |= named
	}
	for _, f := range s.near {
		s.plan.frames[f].state |= beside
	}
	for _, f := range list[:len(list)-len(s.near)] {
		s.plan.frames[f].state |= promoted
	}
	s.number = max(s.number, backNumber) + 1
	s.orders.promote, s.orders.number = list, s.number
}

// expect says how long a read should wait at most, once that is known, and when it has waited
// too long: each time twice as long after the last.
func (s *schedule) expect(now time.Time, r *reading, frames []uint32, before int64, late bool) {
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
		r.bound = now.Sub(r.began) + most
	}
	if most == 0 {
		most = unmeasured
	}
	most = min(most, askAgain)
	if late {
		most = max(most, 2*now.Sub(r.began))
	}
	r.due = now.Add(most)
}
