package tcp

import (
	"math"
	"sync"
	"time"
)

// pacer keeps a connection that BBR controls from overflowing the queue before its
// path while BBR starts up.
//
// Until BBR believes that the path is full it sends 2.9 times as fast as anything has
// arrived so far. It believes that after three round trips that were no faster, each
// full of data. A startup set after a warm-up is a burst on a path that was filled for
// less than that. It goes out much too fast for a round trip, before any answer
// can come. What does not fit the queue is lost and comes one or two round trips late:
// the end of the set, and the container waits for the end.
//
// Linux's other congestion controls end their slow start when the round trips grow
// longer (HyStart). So does the pacer. Once there is a queue, the connection sends at
// most half as fast again as bytes have arrived, and less the longer the queue is.
// If the queue was somebody else's, the rate still grows by half each round trip. If
// it was ours, BBR finds that the path is full and ends its startup. Then the
// pacer has ended too. What it knows survives idle times, as BBR's own estimate does.
type pacer struct {
	socket socket

	mu   sync.Mutex
	next time.Time // when the socket is looked at next
	full bool      // there has been a queue, or much was lost
	done bool      // there is nothing more to do
}

// socket is the connection, as a pacer sees it.
type socket interface {
	state() (pathState, error)
	// limit bounds the rate, bytes a second; unlimited is no bound.
	limit(rate uint64) error
	// idle is whether nothing is in flight.
	idle() (bool, error)
	// cork holds packets back that are not full, for 200 ms at most, or sends them.
	cork(on bool) error
}

const unlimited = math.MaxUint64

// pathState is the state of a connection that BBR controls.
type pathState struct {
	phase  phase
	rate   uint64        // at which bytes have arrived, at most, a second
	trip   time.Duration // smoothed round-trip time, with what is waited in the queue
	least  time.Duration // the shortest one: of the path
	sent   uint32        // segments with data, those sent again included
	resent uint32        // those sent again
}

type phase int

const (
	starting phase = iota // the path is not known to be full
	pausing               // looks for the shortest round trip, sends next to nothing
	started               // the path has been found full
)

const (
	// paceEvery is how often the socket is looked at.
	paceEvery = 5 * time.Millisecond
	// paceTrip is the shortest round trip of a path that is paced. On a shorter one
	// lost bytes come again before anybody has noticed, and round trips vary for
	// many reasons.
	paceTrip = 20 * time.Millisecond
	// A queue has to be this long to count, in round trips of the path and in bytes. By
	// less a round trip varies on a wireless link, or with a busy processor. Then the rate
	// is still low, and has to grow.
	paceQueue, paceBytes = 0.25, 128 << 10
	// paceLoss is a share of what was sent. Links lose less. A queue that overflows, though
	// it is too short to be noticed, loses more. It takes paceSent segments to tell.
	paceLoss, paceSent = 0.125, 64
)

// check is to be called before bytes are written, however often.
func (p *pacer) check(now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.done || now.Before(p.next) {
		return
	}
	p.next = now.Add(paceEvery)
	s, err := p.socket.state()
	switch {
	case err != nil:
		p.done = true // closed
	case s.phase == started:
		p.done = true
		if p.full {
			_ = p.socket.limit(unlimited)
		}
	case s.phase == starting && s.least >= paceTrip:
		gain := p.gain(s)
		if p.full {
			_ = p.socket.limit(uint64(float64(s.rate) * gain))
		}
	}
}

// gain notes whether the path is full, and returns how fast to send if it is: as a
// multiple of the rate at which bytes have arrived. Called with p.mu held.
func (p *pacer) gain(s pathState) float64 {
	wait := s.trip - s.least
	queue := float64(wait) / float64(s.least)
	if queue < paceQueue || float64(s.rate)*wait.Seconds() < paceBytes {
		queue = 0
	}
	// A share of all that was sent, since losses come in clusters, and are counted when
	// they are mended.
	lossy := s.sent >= paceSent && float64(s.resent) > paceLoss*float64(s.sent)
	p.full = p.full || queue > 0 || lossy
	if lossy {
		return 1
	}
	return max(1.5-queue, 1)
}
