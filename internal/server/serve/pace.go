package serve

import (
	"context"
	"math"
	"net"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// pacer keeps a connection whose congestion control is BBR from overflowing the
// queue before its path while BBR starts up.
//
// Until BBR believes that the path is full it sends 2.9 times as fast as anything
// has arrived so far, and it believes that after three round trips that were
// no faster, each full of data. So a burst that is sent after the path has been filled
// for less than that, which is what a startup set after a warm-up is, goes
// out much too fast for a round trip, before any answer can come: what does not
// fit the queue is lost, and comes one or two round trips late. What is lost is
// the end of it, and the container waits for the end.
//
// Linux's other congestion controls end their slow start when the round trips grow
// longer (HyStart). So does the pacer: once there is a queue, the connection sends at
// most half as fast again as bytes have arrived, less the longer the queue is. If that was no
// queue of ours, the rate still grows by half each round trip; if it was, BBR
// finds that the path is full, and leaves its startup. Then the pacer has ended.
// What it knows survives idle times, as BBR's own estimate does.
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
	// paceTrip is the least round-trip time for which there is a pacer. Where it is
	// shorter, what is lost comes again before anybody has noticed, and round trips
	// vary for many reasons.
	paceTrip = 20 * time.Millisecond
	// A queue is one that is this long, in round trips of the path and in bytes. Less is
	// what a round trip varies by on a wireless link, or with a busy processor: then
	// the rate is low still, and has to grow.
	paceQueue, paceBytes = 0.25, 128 << 10
	// paceLoss is more of what was sent than links lose, and less than is lost when a
	// queue overflows that is too short to be noticed. It takes paceSent segments to tell.
	paceLoss, paceSent = 0.125, 64
)

// check is to be called before bytes are written, however often.
func (p *pacer) check(now time.Time) {
	if p == nil {
		return
	}
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

// gain takes a look at the path, and returns how many times as fast as anything has
// arrived it is good to send if it is full. With p.mu.
func (p *pacer) gain(s pathState) float64 {
	wait := s.trip - s.least
	queue := float64(wait) / float64(s.least)
	if queue < paceQueue || float64(s.rate)*wait.Seconds() < paceBytes {
		queue = 0
	}
	// Of all that was sent: losses come in clusters, and are counted when they are mended.
	lossy := s.sent >= paceSent && float64(s.resent) > paceLoss*float64(s.sent)
	p.full = p.full || queue > 0 || lossy
	if lossy {
		return 1
	}
	return max(1.5-queue, 1)
}

// pacerKey is the key of a connection's pacer in the contexts of its requests.
type pacerKey struct{}

// withPacer is for http.Server.ConnContext.
func withPacer(ctx context.Context, c net.Conn) context.Context {
	// Of tls.Conn.
	if below, ok := c.(interface{ NetConn() net.Conn }); ok {
		c = below.NetConn()
	}
	tcp, ok := c.(*net.TCPConn)
	if !ok {
		return ctx
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		return ctx
	}
	s := bbr{raw}
	if !s.inUse() {
		return ctx
	}
	return context.WithValue(ctx, pacerKey{}, &pacer{socket: s})
}

// pacerOf is the pacer of a request's connection, or nil.
func pacerOf(ctx context.Context) *pacer {
	p, _ := ctx.Value(pacerKey{}).(*pacer)
	return p
}

// bbr is a TCP connection that BBR controls.
type bbr struct{ raw syscall.RawConn }

func (b bbr) inUse() bool {
	var name string
	var err error
	cerr := b.raw.Control(func(fd uintptr) {
		name, err = unix.GetsockoptString(int(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION)
	})
	return cerr == nil && err == nil && name == "bbr"
}

// Gains are fractions of 256 (include/uapi/linux/inet_diag.h, tcp_bbr_info). That of the
// rate is 2.89 in the startup, 0 before anything has been acknowledged, below 1 while
// what was queued is drained, and 0.75 to 1.25 from then on. That of the window is 1
// while the shortest round trip is looked for.
const bbrUnit = 256

func (b bbr) state() (s pathState, err error) {
	var info *unix.TCPInfo
	var cc *unix.TCPBBRInfo
	cerr := b.raw.Control(func(fd uintptr) {
		if info, err = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO); err == nil {
			cc, err = unix.GetsockoptTCPCCBBRInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_CC_INFO)
		}
	})
	if cerr != nil {
		return s, cerr
	}
	if err != nil {
		return s, err
	}
	s.rate = uint64(cc.Bw_hi)<<32 | uint64(cc.Bw_lo)
	s.trip = time.Duration(info.Rtt) * time.Microsecond
	s.least = time.Duration(info.Min_rtt) * time.Microsecond
	s.sent, s.resent = info.Data_segs_out, info.Total_retrans
	switch {
	case cc.Pacing_gain > 2*bbrUnit, cc.Pacing_gain == 0:
		s.phase = starting
	case cc.Cwnd_gain == bbrUnit:
		s.phase = pausing
	default:
		s.phase = started
	}
	return s, nil
}

func (b bbr) limit(rate uint64) (err error) {
	cerr := b.raw.Control(func(fd uintptr) {
		err = unix.SetsockoptUint64(int(fd), unix.SOL_SOCKET, unix.SO_MAX_PACING_RATE, rate)
	})
	if cerr != nil {
		return cerr
	}
	return err
}

func (b bbr) idle() (idle bool, err error) {
	cerr := b.raw.Control(func(fd uintptr) {
		var info *unix.TCPInfo
		if info, err = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO); err == nil {
			idle = info.Unacked == 0
		}
	})
	if cerr != nil {
		return false, cerr
	}
	return idle, err
}

func (b bbr) cork(on bool) (err error) {
	value := 0
	if on {
		value = 1
	}
	cerr := b.raw.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_CORK, value)
	})
	if cerr != nil {
		return cerr
	}
	return err
}
