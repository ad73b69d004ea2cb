// Package tcp has a server's connections send at the rate of their path.
//
// A pull sends megabytes on a connection that has been idle, and a container waits
// for the last of them. Linux's defaults are bad at that in five ways. This package
// mends each of them:
//
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
}

// NewListener makes a Listener of l. congestion names a congestion control, or is
// SystemCongestion.
func NewListener(l *net.TCPListener, congestion string) *Listener {
	x := &Listener{TCPListener: l, FlightErr: kernel.LetSend(l)}
	if congestion != SystemCongestion {
		// Asked once: with the right privileges each try may load a module.
		x.CongestionErr = kernel.UseCongestion(l, congestion)
	}
	return x
}

// Accept implements net.Listener. It returns a *net.TCPConn: who writes blobs to
// that uses sendfile(2).
func (l *Listener) Accept() (net.Conn, error) {
	c, err := l.AcceptTCP()
	if err != nil {
		return nil, err
	}
	if raw, err := c.SyscallConn(); err == nil {
		_ = raw.Control(func(fd uintptr) {
			_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_NOTSENT_LOWAT, notSent)
		})
	}
	return c, nil
}
