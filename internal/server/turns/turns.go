// Package turns lets the streams of one server take turns, so that many pulls at once do not
// slow each other's starts.
//
// What a container waits for is urgent: the startup set and the plan of a pull that has just begun, and
// frames that were promoted because a read waits for them. Urgent bytes wait for nobody here. All else is the rest of
// an image, which goes on while containers run. A stream asks for a turn for each run of its
// rest, some 256 KiB. While nothing is urgent it has it at once. Else few turns are under way at a
// time, and none on the connection of what is urgent, whose path it would share.
//
// Nobody who takes his bytes slowly holds the others up. A turn counts for Lapse, whether or not the
// bytes have gone by then: who needs longer waits for his own path. And urgent things count for UrgentFor, however
// long they take. So a rest waits for at most UrgentFor and one Lapse for every `beside` streams
// that wait as well.
package turns

import (
	"sync"
	"time"
)

const (
	// UrgentFor is how long something urgent has rests wait: a pull's first second.
	UrgentFor = time.Second
	// Lapse is how long a turn counts: what it takes to send a run at 100 Mbit/s.
	Lapse = 20 * time.Millisecond
)

// Turns are those of one server's streams. The zero value has one turn beside what is urgent.
type Turns struct {
	mu       sync.Mutex
	schedule schedule // guarded by mu
}

// New returns Turns of which so many, at least one, are under way beside what is urgent.
func New(beside int) *Turns { return &Turns{schedule: schedule{beside: max(1, beside)}} }

// Stream is the rest of one pull. Close it.
type Stream struct {
	turns *Turns
	conn  string

	// Of the schedule.
	had    int64  // bytes in turns, and what others had while it had nothing to send
	number uint64 // of its question
	place  int    // in the queue; -1: not there

	granted func() // guarded by Turns.mu: what it asked with; nil: it does not wait
}

// Stream adds a stream over a connection, which may have any name that no other has.
func (t *Turns) Stream(conn string) *Stream { return &Stream{turns: t, conn: conn, place: -1} }

// change changes the schedule and tells those whose turn has come. What it tells waits for nothing.
func (t *Turns) change(fn func(*schedule)) {
	t.mu.Lock()
	if t.schedule.beside == 0 {
		t.schedule.beside = 1
	}
	fn(&t.schedule)
	var granted []func()
	for x := t.schedule.next(); x != nil; x = t.schedule.next() {
		granted = append(granted, x.granted)
		x.granted = nil
	}
	t.mu.Unlock()
	for _, fn := range granted {
		fn()
	}
}

// Ask asks for a turn, once at a time. granted is called when it has come, perhaps before Ask
// returns; from then on it is under way until Turn.Done is called.
func (s *Stream) Ask(granted func(*Turn)) {
	s.turns.change(func(x *schedule) {
		s.granted = func() { granted(s.turns.begin(s)) }
		x.ask(s)
	})
}

// Close withdraws what the stream asked for.
func (s *Stream) Close() {
	s.turns.change(func(x *schedule) {
		if s.granted != nil {
			s.granted = nil
			x.withdraw(s)
		}
	})
}

// Turn is a turn under way.
type Turn struct {
	stream *Stream
	timer  *time.Timer
	once   sync.Once
}

func (t *Turns) begin(s *Stream) *Turn {
	turn := &Turn{stream: s}
	turn.timer = time.AfterFunc(Lapse, turn.over)
	return turn
}

// over has the turn count no more.
func (t *Turn) over() {
	t.once.Do(func() { t.stream.turns.change((*schedule).over) })
}

// Done ends the turn, in which n bytes were sent.
func (t *Turn) Done(n int) {
	t.timer.Stop()
	t.stream.turns.change(func(s *schedule) { s.charge(t.stream, int64(n)) })
	t.over()
}

// Urgent begins something urgent on a connection. end must be called, once; after UrgentFor it makes
// no difference to others any more.
func (t *Turns) Urgent(conn string) (end func()) {
	t.change(func(s *schedule) {
		if c := s.begin(conn); c != nil {
			// A connection on which something is always urgent is not for that alone.
			time.AfterFunc(UrgentFor, func() { t.change(func(s *schedule) { s.tire(c) }) })
		}
	})
	var once sync.Once
	over := func() { once.Do(func() { t.change(func(s *schedule) { s.end(conn) }) }) }
	timer := time.AfterFunc(UrgentFor, over)
	return func() {
		timer.Stop()
		over()
	}
}
