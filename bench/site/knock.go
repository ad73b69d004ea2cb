package site

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/bench/link"
)

// knocker tries again and again to connect to a port of the edge's loopback. One socket serves
// for all tries that are refused: it is made in the edge's network namespace and stays there,
// so that a try is one system call instead of a thread that goes there, a socket and what
// the runtime needs to wait for it. The cores are the container's.
type knocker struct {
	in   func(fn func() error) error // runs fn in the network namespace
	addr unix.SockaddrInet4
	fd   int // -1: none
}

func newKnocker(l *link.Link, port string) (*knocker, error) {
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil {
		return nil, fmt.Errorf("bench: port %q: %w", port, err)
	}
	return &knocker{
		in:   func(fn func() error) error { return l.Do(link.Edge, fn) },
		addr: unix.SockaddrInet4{Port: int(n), Addr: [4]byte{127, 0, 0, 1}}, fd: -1,
	}, nil
}

// knock gives a connection, or nil if nobody has answered so far. It waits for nothing.
func (k *knocker) knock() (net.Conn, error) {
	if k.fd < 0 {
		err := k.in(func() (err error) {
			k.fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
			return err
		})
		if err != nil {
			k.fd = -1
			return nil, fmt.Errorf("bench: socket: %w", err)
		}
	}
	// Of a socket whose connection was refused Linux lets connect(2) be called again; when a
	// handshake is under way, as when the service has a full backlog, it says EALREADY, and nil
	// or EISCONN when it is over.
	switch err := unix.Connect(k.fd, &k.addr); {
	case err == nil, errors.Is(err, unix.EISCONN):
		f := os.NewFile(uintptr(k.fd), "probe")
		k.fd = -1
		defer f.Close()
		return net.FileConn(f)
	case errors.Is(err, unix.ECONNREFUSED), errors.Is(err, unix.EALREADY), errors.Is(err, unix.EINPROGRESS), errors.Is(err, unix.EINTR):
		return nil, nil
	default:
		k.close()
		return nil, nil // as ETIMEDOUT: with another socket next time
	}
}

func (k *knocker) close() {
	if k.fd >= 0 {
		unix.Close(k.fd)
		k.fd = -1
	}
}

// waitNetwork connects until whoever answers does so as the service does when it is ready.
func (r Readiness) waitNetwork(ctx context.Context, k *knocker, p *Process) error {
	defer k.close()
	var failed error
	err := p.Until(ctx, "wait for "+r.Probe, func() bool {
		conn, err := k.knock()
		if conn == nil {
			failed = err
			return err != nil
		}
		defer conn.Close()
		// One that accepts and does not answer yet has until the next try.
		conn.SetDeadline(time.Now().Add(5 * time.Second))
		return r.try(ctx, conn)
	})
	return errors.Join(err, failed)
}
