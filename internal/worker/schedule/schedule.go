// Package schedule decides for one pull what is asked for out of turn, what is kept and what is written,
// and when the server may send the rest. A Schedule is a value: its methods are the events, what they
// are told is all that it knows, and what is to be done is in Orders. It has no locks, no goroutines and no
// clock; who has these tells it of one event after the other, and takes its orders after each.
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
//
// The events are in schedule.go. What comes by itself, and what is promoted, is in promote.go; what a miss brings
// along, and when the hold ends, in hold.go; what is kept as it came while the server holds, in keep.go; how fast
// the way to the server is, in link.go.
package schedule

import (
	"slices"
	"time"
)

// Options say how a pull is scheduled.
type Options struct {
	Beyond int64         // bytes that may come before a frame that a read lacks without its being promoted; less than 0: none
	Hold   time.Duration // for how long the server is to hold after a startup set; 0: not at all
	Rate   float64       // of the link, bytes a second, as measured before; 0: not known
}

// Schedule is what is known of one pull, and what is to be done.
type Schedule struct {
	beyond int64 // Options.Beyond
	link   link
	space  Space      // nil: there is no arena
	reads  []*Read    // that wait, in the order in which they began
	set    coming     // of the stream that runs
	plan   course     // of the stream that runs
	joins  []*Joining // services that have joined
	hold   hold
	kept   []*Kept   // frames that came while the server holds, and are to be written
	held   int64     // bytes of them
	near   []uint32  // frames that lie next to what reads lacked, the most wanted first
	early  []int     // segments that another pull wants first, in its order; see Hurry
	number uint64    // of the last promotion; from BackNumber on
	retry  time.Time // when what could not be said to the server is said again; zero: nothing
	rests  time.Time // until when the server may rest; zero: it does not. See Yield

	orders Orders
}

// New returns the schedule of a pull that has not begun.
func New(o Options) Schedule {
	return Schedule{beyond: o.Beyond, link: link{rate: o.Rate}, hold: hold{most: o.Hold}}
}

// Orders is what is to be done.
type Orders struct {
	Promote []uint32      // frames, the most wanted first
	Fresh   int           // how many of them are promoted for the first time
	Number  uint64        // of that promotion
	Back    []uint32      // frames that are to be sent after all, behind those that reads lack
	Skip    []uint32      // frames that the server need not send
	Chosen  bool          // it need not wait for more of these
	Release bool          // the server is to hold nothing back any more
	Rest    time.Duration // the server is to send only what is promoted for so long
	Restart bool          // the stream is to end, so that what arrived damaged is asked for
	Write   []*Kept       // is written now, whole
}

// Take returns what events have ordered, and clears it. It is to be called after each event.
func (s *Schedule) Take() Orders {
	o := s.orders
	s.orders = Orders{}
	return o
}

// State is what can be seen of a schedule.
type State struct {
	Reads   int   // that wait
	Set     bool  // a startup set is to come
	Joined  int   // services that have joined, of which is known what comes
	Holds   bool  // the server holds back what is not promoted, unless it knows no holds
	Misses  int   // reads that were promoted while it held
	Brought int64 // with these, bytes of frames
	Kept    int   // frames
}

// State returns how things are now.
func (s *Schedule) State() State {
	v := State{Reads: len(s.reads), Set: s.set.blocks != nil, Holds: s.hold.on, Misses: s.hold.misses, Brought: s.hold.brought, Kept: len(s.kept)}
	for _, j := range s.joins {
		if j.blocks != nil {
			v.Joined++
		}
	}
	return v
}

// Space is what a schedule asks of the arena: what is here, and which segments a range has. Two of one arena are
// equal.
type Space interface {
	Present(off, n int64) bool
	AbsentSegments(dst []int, off, n int64) []int
	SegmentsIn(off, n int64) (first, end int)
	Neighbours(segment int) (first, end int) // of the same content
}

// Read is a read that waits. Who begins it sets what is exported, once.
type Read struct {
	Space    Space
	Off, Len int64 // bytes of the arena
	Began    time.Time

	bound time.Duration // what it should take at most; 0: not known yet
	due   time.Time     // when it has waited too long; zero: bound is not known
	// writing: frames that were kept have all of it, and are being written.
	writing  bool
	promoted bool // something of it was asked for out of turn
}

// Promoted reports whether something of the read was asked for out of turn.
func (r *Read) Promoted() bool { return r.promoted }

// Bound returns how long the read should take at most; 0: that is not known.
func (r *Read) Bound() time.Duration { return r.bound }

// Reaches reports whether some of [off, off+n) of the arena is in the read.
func (r *Read) Reaches(off, n int64) bool { return r.Off < off+n && off < r.Off+r.Len }

// coming is a startup set that comes.
type coming struct {
	blocks []uint64 // of the arena; nil: none comes
	bytes  int64    // of its frames that have not come
	holds  bool     // the server may hold back what follows it
}

// Joining is what is known of the startup set of a service that has joined. The zero value is one that has not.
type Joining struct {
	asked  bool     // what comes is not known yet, and will be soon
	blocks []uint64 // that will come; nil: none
}

// course is a plan that is in use.
type course struct {
	frames  []frame
	frameOf []uint32 // by segment of the arena; NoFrame: in none. nil: no plan is in use
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
	named     // it was promoted before, and Orders.Fresh has counted it
)

// NoFrame is the number of no frame.
const NoFrame = ^uint32(0)

// BackNumber is the number of promotions of frames that no read lacks: they do not go before others.
const BackNumber = 1

// Begin is told of a new stream. It returns for how long that is to ask the server to hold; 0: not at all.
func (s *Schedule) Begin(now time.Time) time.Duration {
	left := s.hold.left(now)
	s.plan, s.set, s.near = course{}, coming{}, nil
	s.hold.asked, s.hold.on = left > 0, false
	return left
}

// Opened is told of the pull's arena.
func (s *Schedule) Opened(space Space) { s.space = space }

// Moved is told how many bytes have come over the network so far, of all streams. It is to be called before each
// other event.
func (s *Schedule) Moved(now time.Time, bytes int64) { s.link.arrived(now, bytes) }

// Answered is told how long the server took to answer.
func (s *Schedule) Answered(took time.Duration) { s.link.answered(took) }

// Startup is told of the stream's startup set: a bitmap of the blocks of the arena that it brings (nil: none), the
// bytes of its frames, and whether the server may hold back what follows it.
func (s *Schedule) Startup(blocks []uint64, bytes int64, holds bool) {
	s.set = coming{blocks: blocks, bytes: bytes, holds: holds}
}

// Pages is told of a frame of the startup set that has come.
func (s *Schedule) Pages(bytes int64) { s.set.bytes = max(0, s.set.bytes-bytes) }

// LacksPlan reports whether a read waits for what only the plan brings.
func (s *Schedule) LacksPlan() bool {
	return slices.ContainsFunc(s.reads, func(r *Read) bool { return !r.writing && !s.brings(r) })
}

// Plan is told of a plan that is in use from now on: how large its frames are at most, and which of them has each
// segment of the arena (NoFrame: none).
func (s *Schedule) Plan(now time.Time, sizes []int64, frameOf []uint32) {
	s.plan = course{frames: make([]frame, len(sizes)), frameOf: frameOf, torn: s.plan.torn}
	for i, n := range sizes {
		s.plan.frames[i].size = n
	}
	s.ask(now)
}

// PagesDone is told that the startup set has come, and a plan is in use.
func (s *Schedule) PagesDone(now time.Time) {
	s.set.blocks, s.set.bytes = nil, 0
	s.beginHold(now)
	s.ask(now)
}

// End is told that the stream has ended.
func (s *Schedule) End() {
	s.writeKept()
	s.plan, s.set.blocks, s.set.bytes, s.hold.on, s.near, s.rests = course{}, nil, 0, false, nil, time.Time{}
	for _, r := range s.reads {
		r.bound, r.due, r.promoted = 0, time.Time{}, false // by the next one
	}
}

// Arrived is told of a frame that has come.
func (s *Schedule) Arrived(f uint32) {
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

// Chosen is told which frames of the plan come another way. The server may send the others, and
// those that reads wait for already. What it is to skip is returned.
func (s *Schedule) Chosen(now time.Time, frames []uint32) (skipped []uint32) {
	var lacked []uint32
	for _, r := range s.reads {
		frames, _ := s.lacks(r)
		lacked = append(lacked, frames...)
	}
	for _, f := range frames {
		if s.plan.frames[f].state&^named == 0 && !slices.Contains(lacked, f) {
			s.plan.frames[f].state |= elsewhere
			skipped = append(skipped, f)
		}
	}
	s.orders.Skip, s.orders.Chosen = append(s.orders.Skip, skipped...), true
	s.plan.advance()
	s.ask(now)
	return skipped
}

// Back is told of frames that do not come another way after all.
func (s *Schedule) Back(now time.Time, frames []uint32) {
	for _, f := range frames {
		if s.plan.frames[f].state&elsewhere != 0 {
			s.plan.frames[f].state = s.plan.frames[f].state&^elsewhere | promoted
			s.orders.Back = append(s.orders.Back, f)
		}
	}
	s.ask(now)
}

// Hurry is told of segments that another pull, which leaves them to this one, wants first. They come
// after this pull's startup set and what reads lack, and before the rest.
func (s *Schedule) Hurry(now time.Time, segments []int) {
	s.early = append(s.early, segments...)
	s.ask(now)
}

// hurried moves the frames of early to near, once there is a plan. It reports whether there were any.
func (s *Schedule) hurried() (any bool) {
	if len(s.early) == 0 || s.plan.frameOf == nil || s.set.blocks != nil {
		return false
	}
	for _, i := range s.early {
		f := s.plan.frameOf[i]
		if f != NoFrame && s.plan.frames[f].state&^named == 0 && !slices.Contains(s.near, f) {
			s.near, any = append(s.near, f), true
		}
	}
	s.early = nil
	return any
}

// Damaged is told that a frame that has come is wrong.
func (s *Schedule) Damaged(now time.Time, f uint32) {
	s.plan.frames[f].state |= damaged
	s.ask(now)
}

// TornPages is told that a frame of the startup set is wrong.
func (s *Schedule) TornPages(now time.Time) {
	s.plan.torn++
	s.ask(now)
}

// Wanted is told of a read that waits. It returns the kept frames that have something of it: that is to be written
// now, and Written told.
func (s *Schedule) Wanted(now time.Time, r *Read) []*Kept {
	s.reads = append(s.reads, r)
	parts := s.keptFor(r)
	s.ask(now)
	return parts
}

// Written is told that what kept frames have of a read is written.
func (s *Schedule) Written(now time.Time, r *Read) {
	r.writing = false
	s.ask(now)
}

// Ended is told that a read waits no more.
func (s *Schedule) Ended(r *Read) {
	s.reads = slices.DeleteFunc(s.reads, func(o *Read) bool { return o == r })
}

// Joined is told of a service that joins, or that more is known of its startup set. asked: it will be known soon what
// comes; blocks: a bitmap of the arena's that will come; nil: none that is known.
func (s *Schedule) Joined(now time.Time, j *Joining, asked bool, blocks []uint64) {
	j.asked, j.blocks = asked, blocks
	if !slices.Contains(s.joins, j) {
		s.joins = append(s.joins, j)
	}
	s.ask(now)
}

// Left is told that the startup set of a service that has joined has come, or cannot be had.
func (s *Schedule) Left(now time.Time, j *Joining) {
	s.joins = slices.DeleteFunc(s.joins, func(o *Joining) bool { return o == j })
	s.ask(now)
}

// Yield is told that others want the processors: the server is to rest for a while, unless somebody waits for what it
// sends, or is about to.
func (s *Schedule) Yield(now time.Time, d time.Duration) {
	if s.plan.frameOf == nil || s.plan.next == len(s.plan.frames) || s.set.blocks != nil || s.hold.on || len(s.reads) > 0 || len(s.joins) > 0 {
		return
	}
	s.orders.Rest, s.rests = d, now.Add(d+2*s.link.trip+restSlack)
}

// restSlack is how much later than in half a round trip the server may hear that it is to rest. A read that is
// promoted without need costs a message.
const restSlack = 500 * time.Millisecond

// Unsaid is told that the server could not be told what was ordered; release: a release was.
func (s *Schedule) Unsaid(now time.Time, release bool) {
	for i := range s.plan.frames {
		s.plan.frames[i].state &^= promoted | beside
	}
	s.hold.unsaid = s.hold.unsaid || release
	s.retry = now.Add(retryAfter)
}

// retryAfter is how long after a failure the server is told again.
const retryAfter = 250 * time.Millisecond

// Tick is told the time. It is to be called at the time that Wake returns.
func (s *Schedule) Tick(now time.Time) {
	if h := &s.hold; !h.released && !h.ends.IsZero() && !now.Before(h.ends) {
		s.Release()
	}
	if !s.retry.IsZero() && !now.Before(s.retry) {
		s.retry = time.Time{}
		if s.hold.unsaid {
			s.orders.Release, s.hold.unsaid = s.plan.frameOf != nil, false
		}
	}
	s.ask(now)
}

// Wake returns when Tick is to be called; zero: not before something happens.
func (s *Schedule) Wake() (at time.Time) {
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
