package schedule

import "time"

const (
	// linkOver is over how long the rate of the link is measured at least. What has gathered in
	// buffers while nobody read comes faster than the link brings it; over so long it counts little.
	linkOver = time.Second
	// linkSoon is the same before anything has been measured.
	linkSoon = 100 * time.Millisecond
	// linkPause is how long nothing comes at most while the rate is measured.
	linkPause = 3 * time.Second
	// serverAhead is how many bytes the server has taken from its queue before the network
	// takes them.
	serverAhead = 512 << 10
	// workerTakes is what may pass between the last byte of a frame and the end of the read that lacks it: a
	// frame is decoded, hashed and written in some milliseconds, more while all processors are busy.
	workerTakes = 20 * time.Millisecond
	// unmeasured is how long a read waits before it is asked for again while the link is not known, and
	// askAgain how long it waits at most, whatever is known.
	unmeasured = time.Second
	askAgain   = 5 * time.Second
)

// link is what has been measured of the way to the server.
type link struct {
	trip time.Duration // the shortest round trip; 0: not known
	rate float64       // the highest rate, bytes a second; 0: not known

	since time.Time // the arrival with which the present measurement began
	moved int64     // bytes that had come by then
	at    time.Time // the last arrival
	last  int64     // bytes that had come by then
}

// answered notes how long the server took to answer.
func (l *link) answered(took time.Duration) {
	if took > 0 && (l.trip == 0 || took < l.trip) {
		l.trip = took
	}
}

// arrived notes how many bytes have come so far, of all streams. The rate is measured from one arrival
// to another, with no long pause between them: a line that is idle is not slow.
func (l *link) arrived(now time.Time, moved int64) {
	if moved == l.last {
		return
	}
	paused := now.Sub(l.at) > linkPause
	l.at, l.last = now, moved
	over := linkOver
	if l.rate == 0 {
		over = linkSoon
	}
	if took := now.Sub(l.since); l.since.IsZero() || paused {
		l.since, l.moved = now, moved
	} else if took >= over {
		l.rate = max(l.rate, float64(moved-l.moved)/took.Seconds())
		l.since, l.moved = now, moved
	}
}

// flight returns how many bytes the line brings in a round trip, and 0 while that is not known.
func (l *link) flight() int64 { return int64(l.rate * l.trip.Seconds()) }

// most returns the most that it should take until so many bytes have come that are asked for
// now: what is in flight comes before them. 0: not known.
func (l *link) most(bytes int64) time.Duration {
	if l.rate == 0 || l.trip == 0 {
		return 0
	}
	// In a round trip the request reaches the server and the first byte the worker; in another
	// one what was in flight arrives.
	return 2*l.trip + workerTakes + time.Duration(float64(bytes+serverAhead)/l.rate*float64(time.Second))
}
