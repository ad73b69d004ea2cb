package keeper

import (
	"context"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// ListenPrefix begins the names of listening Unix sockets at which gRPC is spoken. The
// keeper answers there while no daemon does: see the package comment.
const ListenPrefix = "listen/"

// maxWaiting is how many connections wait at most; further ones wait in the kernel. They
// fit in one message.
const maxWaiting = 200

// settings is an empty SETTINGS frame of HTTP/2 (RFC 9113, 6.5). With it a server has
// said what it must before it is asked anything; it may say more later.
var settings = []byte{0, 0, 0, 4, 0, 0, 0, 0, 0}

// minder answers at listening sockets.
type minder struct {
	listeners []net.Listener
	wg        sync.WaitGroup
	lapse     *time.Timer

	mu      sync.Mutex
	waiting []waiting // guarded by mu
}

// waiting is a connection that was answered, and the name of the socket it came to.
type waiting struct {
	name string
	fd   int
}

// mindLocked begins to answer, unless nobody listens or it is done already. What waits is
// given up when no daemon has taken it within the patience.
func (s *store) mindLocked() {
	if s.minder != nil {
		return
	}
	m := new(minder)
	for name, fd := range s.fds {
		if !strings.HasPrefix(name, ListenPrefix) {
			continue
		}
		l, err := listenerOf(fd, name)
		if err != nil {
			continue // what waits there finds the next daemon, or gives up
		}
		m.listeners = append(m.listeners, l)
		m.wg.Go(func() { m.accept(l, name) })
	}
	if len(m.listeners) == 0 {
		return
	}
	s.minder = m
	m.lapse = time.AfterFunc(s.patience, func() { s.giveUp(m) })
}

// listenerOf returns a listener on a duplicate of a descriptor.
func listenerOf(fd int, name string) (net.Listener, error) {
	dup, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(dup), name)
	defer f.Close()
	return net.FileListener(f)
}

// accept answers whoever connects, until the listener is closed.
func (m *minder) accept(l net.Listener, name string) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		full := m.keep(c.(*net.UnixConn), name)
		c.Close()
		if full {
			return
		}
	}
}

// keep answers on a connection and keeps it. It reports whether there are enough.
func (m *minder) keep(c *net.UnixConn, name string) (full bool) {
	// A connection that is new has room for it.
	if _, err := c.Write(settings); err != nil {
		return false
	}
	rc, err := c.SyscallConn()
	if err != nil {
		return false
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	rc.Control(func(fd uintptr) {
		if dup, err := unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 0); err == nil {
			m.waiting = append(m.waiting, waiting{name, dup})
		}
	})
	return len(m.waiting) >= maxWaiting
}

// stop ends answering and returns what waits, which is the caller's.
func (m *minder) stop() []waiting {
	m.lapse.Stop()
	for _, l := range m.listeners {
		l.Close()
	}
	m.wg.Wait()
	return m.waiting
}

// takeLocked ends answering, and sends what waits.
func (s *store) takeLocked(p *packets) error {
	m := message{kind: kindItems}
	var fds []int
	if s.minder != nil {
		for _, w := range s.minder.stop() {
			m.names, fds = append(m.names, w.name), append(fds, w.fd)
		}
		s.minder = nil
	}
	defer closeAll(fds)
	return p.send(m, fds...)
}

// giveUp closes what waits, and the sockets: who connects is refused from now on. Without
// them, and without a daemon, there may be nothing to live for.
func (s *store) giveUp(m *minder) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.minder != m {
		return
	}
	for _, w := range m.stop() {
		unix.Close(w.fd)
	}
	s.minder = nil
	for name, fd := range s.fds {
		if strings.HasPrefix(name, ListenPrefix) {
			unix.Close(fd)
			delete(s.fds, name)
		}
	}
	s.told = s.told || s.owner == nil && len(s.fds) == 0
	s.maybeStopLocked()
}

// Mind has the keeper answer at the listening sockets that it holds, until Take.
func (c *Client) Mind(ctx context.Context) error {
	return c.do(ctx, func(ctx context.Context) error {
		if _, _, err := c.conn.ask(ctx, message{kind: kindMind}); err != nil {
			return fmt.Errorf("have the keeper answer: %w", err)
		}
		return nil
	})
}

// Take has the keeper answer no more, and returns the connections that wait, by the name
// of their socket. They are the caller's.
func (c *Client) Take(ctx context.Context) (waiting map[string][]*os.File, err error) {
	err = c.do(ctx, func(ctx context.Context) error {
		m, fds, err := c.conn.ask(ctx, message{kind: kindTake})
		if err == nil && (m.kind != kindItems || len(m.names) != len(fds)) {
			err = fmt.Errorf("keeper answers with a message of type %d, %d names and %d descriptors", m.kind, len(m.names), len(fds))
		}
		if err != nil {
			closeAll(fds)
			return fmt.Errorf("take connections from the keeper: %w", err)
		}
		waiting = make(map[string][]*os.File)
		for i, name := range m.names {
			waiting[name] = append(waiting[name], os.NewFile(uintptr(fds[i]), name))
		}
		return nil
	})
	return waiting, err
}
