package serve

import (
	"sync/atomic"
	"time"
)

// cork holds the beginning of an answer back until it fills a packet, so that BBR
// does not pause in the middle of it.
//
// BBR believes the shortest round trip for ten seconds. Then it has four packets in
// flight, for 200 ms and a round trip, to see the path without a queue. After idle
// time it need not: the first acknowledgement says how long the path is. But if that is of
// one packet, which was not full, BBR does not believe it, since the receiver may have
// waited for a second one. The next acknowledgement is none of a restart any more, and BBR
// pauses (Linux: bbr_update_min_rtt, FLAG_ACK_MAYBE_DELAYED). Pings are such packets,
// so that nothing renews the round trip of a connection that idles; and so is the head of an
// HTTP/2 response, which Go sends before it has more. So a pull came to a
// pause just when its startup set was on the way: 0.3 s at a round trip of 100 ms.
//
// What is in flight cannot be helped: a pull that comes in the round trip after
// a ping.
type cork struct {
	socket socket
	timer  *time.Timer
	out    atomic.Bool
	bytes  int64 // of the handler that answers
}

const (
	// corkMost is how long something may wait, also of other streams on the
	// connection: a header that has to be made takes milliseconds, one that needs an
	// ingest takes long anyhow.
	corkMost = 200 * time.Millisecond
	// corkFull is more than a packet and what HTTP servers keep in their buffers, bytes;
	// corkHello more than a stream's first section, which is sent before there is a header.
	corkFull, corkHello = 20 << 10, 1 << 10
)

// cork returns nil unless the connection has nothing in flight. Its owner calls release
// before the handler returns.
func (p *pacer) cork() *cork {
	if p == nil {
		return nil
	}
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
