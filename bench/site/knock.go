package site

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"strconv"
	"sync/atomic"
	"time"
	"unsafe"

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

// tick is how often somebody asks whether something has come to be.
const tick = 2 * time.Millisecond

// knocking knocks at each tick until somebody answers or stop is set. It sleeps in the kernel, on a thread of
// its own and without telling the runtime, which would look for other work for the processor at
// each tick and be in the container's way for longer than the try itself takes: 20 instead of 75 µs of
// processor time a try. For the runtime a processor is busy meanwhile; see Room.
func (k *knocker) knocking(stop *atomic.Bool) (net.Conn, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var next unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &next); err != nil {
		return nil, fmt.Errorf("bench: clock: %w", err)
	}
	for !stop.Load() {
		if conn, err := k.knock(); conn != nil || err != nil {
			return conn, err
		}
		next = unix.NsecToTimespec(next.Nano() + int64(tick))
		// When it was interrupted, or the tick has passed already, the next try comes early.
		unix.RawSyscall6(unix.SYS_CLOCK_NANOSLEEP, unix.CLOCK_MONOTONIC, unix.TIMER_ABSTIME, uintptr(unsafe.Pointer(&next)), 0, 0, 0)
	}
	return nil, nil
}

// Room has the runtime use one processor more than there are, for who knocks, until end is called.
func Room() (end func()) {
	before := runtime.GOMAXPROCS(runtime.NumCPU() + 1)
	return func() { runtime.GOMAXPROCS(before) }
}

// waitNetwork connects until whoever answers does so as the service does when it is ready.
func (r Readiness) waitNetwork(ctx context.Context, k *knocker, p *Process) error {
	defer k.close()
	what := "wait for " + r.Probe
	for {
		var stop atomic.Bool
		var conn net.Conn
		var failed error
		answered := make(chan struct{})
		go func() {
			defer close(answered)
			conn, failed = k.knocking(&stop)
		}()
		var over error
		select {
		case <-answered:
		case <-p.Done:
			over = p.endedEarly(what)
		case <-ctx.Done():
			over = p.gaveUp(ctx, what)
		}
		stop.Store(true)
		<-answered
		if conn == nil {
			return cmp.Or(over, failed)
		}
		// One that accepts and does not answer yet has until the next try.
		conn.SetDeadline(time.Now().Add(5 * time.Second))
		ready := over == nil && r.try(ctx, conn)
		conn.Close()
		if ready || over != nil {
			return over
		}
		select {
		case <-time.After(tick):
		case <-ctx.Done():
			return p.gaveUp(ctx, what)
		}
	}
}
