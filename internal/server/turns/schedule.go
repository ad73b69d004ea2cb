package turns

import (
	"container/heap"
	"slices"
)

// schedule says whose turn it is. It is a value without locks or clocks; Turns guards it and tells
// it when time has passed.
//
// What a stream may rely on:
//
//   - While nothing urgent is under way, whoever asks has a turn at once.
//   - While something urgent is, at most beside turns are under way. Of those who wait it is the
//     turn of who has had the fewest bytes since he had something to send, and then of who has waited longest. So
//     nobody is passed over for ever, and streams that go on have equally many bytes.
//   - While something urgent is under way on its own connection, a stream waits for that, since both
//     share the path: for as long as Turns says (tire), at most.
type schedule struct {
	beside  int
	urgent  int   // under way, on all connections
	out     int   // turns under way that count
	clock   int64 // bytes that who had the last turn had had
	asked   uint64
	waiting queue
	conns   map[string]*conn // those with something urgent
}

// conn is a connection with something urgent under way.
type conn struct {
	urgent  int
	tired   bool // its streams have waited long enough
	blocked []*Stream
}

// begin notes that something urgent begins. It returns the connection if it is the first there.
func (s *schedule) begin(name string) (first *conn) {
	c := s.conns[name]
	if c == nil {
		c = &conn{}
		if s.conns == nil {
			s.conns = map[string]*conn{}
		}
		s.conns[name] = c
		first = c
	}
	c.urgent++
	s.urgent++
	return first
}

// end notes that something urgent has ended.
func (s *schedule) end(name string) {
	c := s.conns[name]
	c.urgent--
	s.urgent--
	if c.urgent == 0 {
		delete(s.conns, name)
		s.unblock(c)
	}
}

// tire ends that streams of a connection wait for what is urgent there, until nothing is.
func (s *schedule) tire(c *conn) {
	c.tired = true
	s.unblock(c)
}

func (s *schedule) unblock(c *conn) {
	for _, x := range c.blocked {
		heap.Push(&s.waiting, x)
	}
	c.blocked = nil
}

// ask notes that a stream waits for a turn. What others had while it had nothing to send is
// not made up for.
func (s *schedule) ask(x *Stream) {
	x.had = max(x.had, s.clock)
	s.asked++
	x.number = s.asked
	heap.Push(&s.waiting, x)
}

// withdraw ends that a stream waits.
func (s *schedule) withdraw(x *Stream) {
	if x.place >= 0 {
		heap.Remove(&s.waiting, x.place)
		return
	}
	if c := s.conns[x.conn]; c != nil {
		c.blocked = slices.DeleteFunc(c.blocked, func(o *Stream) bool { return o == x })
	}
}

// next takes who has the next turn, which is under way from then on; nil: nobody now.
func (s *schedule) next() *Stream {
	for len(s.waiting) > 0 && (s.urgent == 0 || s.out < s.beside) {
		x := heap.Pop(&s.waiting).(*Stream)
		if c := s.conns[x.conn]; c != nil && !c.tired {
			c.blocked = append(c.blocked, x)
			continue
		}
		s.out++
		s.clock = max(s.clock, x.had)
		return x
	}
	return nil
}

// over notes that a turn does not count any more.
func (s *schedule) over() { s.out-- }

// charge notes what a stream has sent in its turn, bytes.
func (s *schedule) charge(x *Stream, n int64) { x.had += n }

// queue is a heap of those who wait, whose turn is next first.
type queue []*Stream

func (q queue) Len() int { return len(q) }
func (q queue) Less(i, j int) bool {
	if q[i].had != q[j].had {
		return q[i].had < q[j].had
	}
	return q[i].number < q[j].number
}
func (q queue) Swap(i, j int) {
	q[i], q[j] = q[j], q[i]
	q[i].place, q[j].place = i, j
}
func (q *queue) Push(x any) {
	s := x.(*Stream)
	s.place = len(*q)
	*q = append(*q, s)
}
func (q *queue) Pop() any {
	old := *q
	s := old[len(old)-1]
	old[len(old)-1] = nil
	*q = old[:len(old)-1]
	s.place = -1
	return s
}
