package tcp

import (
	"sync/atomic"
	"time"
)

// cork holds the beginning of an answer back until it fills a packet, so that BBR
// does not pause in the middle of the answer.
//
// BBR believes the shortest round trip that it has seen for ten seconds. Then it
// measures anew: for 200 ms and a round trip it has four packets in flight, to see the
// path without a queue. After idle time it can do without the pause, since the first
// acknowledgement says how long the path is. But it does not believe the acknowledgement
// of a single packet that was not full: the receiver may have waited for a second
// one. The next acknowledgement no longer counts as the first, and BBR pauses (Linux:
// bbr_update_min_rtt, FLAG_ACK_MAYBE_DELAYED).
//
// Two such packets are common. Pings renew nothing on a connection that idles. The head
// of an HTTP/2 response, which Go sends before it has more, is the first packet of an
// answer. So a pull came to a pause just when its startup set was on the way: 0.3 s at
// a round trip of 100 ms.
//
// A pull that comes in the round trip after a ping still pauses: the ping is in flight.
type cork struct {
	socket socket
	timer  *time.Timer
	out    atomic.Bool
	bytes  int64 // of the handler that answers
}

const (
	// corkMost is how long bytes may wait, those of other streams of the connection
	// included. A header that has to be made takes milliseconds. One that needs an ingest
	// takes long anyhow.
	corkMost = 200 * time.Millisecond
	// corkFull is more bytes than a packet has and HTTP servers keep in their buffers.
	// corkHello is more than a stream's first section, which is sent before there is a header.
	corkFull, corkHello = 20 << 10, 1 << 10
)

// cork holds back what is written from now on. It returns nil, which holds nothing
// back, when something is in flight. Its owner calls release before the handler returns.
func (p *pacer) cork() *cork {
	if idle, err := p.socket.idle(); err != nil || !idle || p.socket.cork(true) != nil {
		return nil
	}
	c := &cork{socket: p.socket}
	c.timer = time.AfterFunc(corkMost, c.open)
	return c
}

// wrote is to be called after n bytes were written.
func (c *cork) wrote(n int64) {
	if c == nil {
		return
	}
	if c.bytes += n; c.bytes >= corkFull {
		c.release()
	}
}

// flushed is to be called after a flush: nothing may come for a while.
func (c *cork) flushed() {
	if c != nil && c.bytes >= corkHello {
		c.release()
	}
}

// release sends what was held back.
func (c *cork) release() {
	if c != nil {
		c.timer.Stop()
		c.open()
	}
}

// open is release, for the timer.
func (c *cork) open() {
	if !c.out.Swap(true) {
		_ = c.socket.cork(false) // fails for a closed one
	}
}
