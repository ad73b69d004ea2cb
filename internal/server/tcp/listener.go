// Package tcp has a server's connections send at the rate of their path.
//
// A pull sends megabytes on a connection that has been idle, and a container waits
// for the last of them. Linux's defaults are bad at that in six ways. This package
// mends each of them:
//
//   - A new connection begins with ten packets, and needs a round trip for each doubling. A Listener's send more at
//     first, where BBR paces that.
//   - Connections forget their rate. After a few hundred idle milliseconds the usual
//     congestion controls begin slowly again. BBR keeps the rate, so what a warm-up has
//     learned of the path holds when the pull comes. A Listener gives its connections BBR.
//   - Too little may be in flight. Linux lets 4 MiB of a connection be on their way:
//     110 Mbit/s at a round trip of 300 ms. A Listener allows kernel.FlightBytes.
//   - Too much waits in the socket. Linux would take megabytes from the server before
//     they can be sent, and a promoted frame would wait behind them. A Listener's
//     connections take little more than what is in flight.
//   - BBR floods the path while it starts. It sends 2.9 times as fast as anything has
//     arrived, until it knows that the path is full. What overflows the queue is lost, and
//     comes a round trip or two late. A pacer bounds the rate until BBR knows.
//   - BBR pauses after idle times, for some 0.2 s, unless the first packet that it sends is
//     full. A cork holds the beginning of an answer back until it fills one.
//
// A server uses a Listener, ConnContext and Handler together. docs/network.md has the
// figures.
package tcp

import (
	"io"
	"net"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/kernel"
)

// SystemCongestion leaves the congestion control of a Listener's connections to the
// host, its routes and whatever else decides.
const SystemCongestion = "system"

// notSent is how many bytes a connection's socket takes beyond what is in flight.
const notSent = 128 << 10

// Listener tunes the connections that it accepts. What it could not do makes them
// slower, not wrong, and is told in its fields.
type Listener struct {
	*net.TCPListener
	// CongestionErr is why they do not have the congestion control that was asked for.
	CongestionErr error
	// FlightErr is why less than kernel.FlightBytes of each may be in flight.
	FlightErr error
	// Shared has it return a *Conn of each, for Pay.
	Shared bool
	// FirstErr is why they begin with as few packets as the route says.
	FirstErr error

	first io.Closer // nil: they do
}

// NewListener makes a Listener of l. congestion names a congestion control, or is
// SystemCongestion. first is the rate, bytes a second, of which a new connection's first round trip has as much as the path
// would hold (kernel.FirstFlight); 0 leaves that to the route. It counts for kernel.BBR alone: others send all of it at once, which is
// more than queues hold.
func NewListener(l *net.TCPListener, congestion string, first int64) *Listener {
	x := &Listener{TCPListener: l, FlightErr: kernel.LetSend(l)}
	if congestion != SystemCongestion {
		// Asked once: with the right privileges each try may load a module.
		x.CongestionErr = kernel.UseCongestion(l, congestion)
	}
	if congestion == kernel.BBR && x.CongestionErr == nil && first > 0 {
		x.first, x.FirstErr = kernel.FirstFlight(l, first)
	}
	return x
}

// Close implements net.Listener.
func (l *Listener) Close() error {
	if l.first != nil {
		_ = l.first.Close() // also the second time
	}
	return l.TCPListener.Close()
}

// Accept implements net.Listener. It returns a *net.TCPConn or a *Conn: who writes blobs to
// them uses sendfile(2).
func (l *Listener) Accept() (net.Conn, error) {
	c, err := l.AcceptTCP()
	if err != nil {
		return nil, err
	}
	raw, err := c.SyscallConn()
	if err != nil {
		return c, nil // whoever uses it will find out
	}
	_ = raw.Control(func(fd uintptr) {
		_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_NOTSENT_LOWAT, notSent)
	})
	if l.Shared {
		return &Conn{TCPConn: c, raw: raw}, nil
	}
	return c, nil
}
