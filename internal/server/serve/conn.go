package serve

import (
	"crypto/tls"
	"fmt"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/kernel"
)

// notSent is how many bytes a connection's socket takes beyond what is in
// flight. Left to itself Linux takes megabytes, and a frame that was promoted
// would wait behind them.
const notSent = 128 << 10

// listener prepares the connections that it accepts, which BBR controls where the
// kernel has it and nothing else was asked for: what a warm-up has taught one, it still
// knows when the pull comes (kernel.BBR). It takes back those that a
// stream took over from the HTTP server, and hands them out again.
type listener struct {
	*net.TCPListener
	others error // why what was asked for does not control them, or nil
	little error // why less than kernel.FlightBytes may be in flight, or nil
	next   chan accepted
	back   chan net.Conn
	closed chan struct{}
	once   sync.Once
	ended  sync.WaitGroup
}

type accepted struct {
	conn net.Conn
	err  error
}

func newListener(l *net.TCPListener, congestion string) *listener {
	var others error
	if congestion != SystemCongestion {
		// Asked once: with the right privileges each try may load a module.
		others = kernel.UseCongestion(l, congestion)
	}
	x := &listener{TCPListener: l, others: others, little: kernel.LetSend(l), next: make(chan accepted), back: make(chan net.Conn), closed: make(chan struct{})}
	x.ended.Go(func() {
		for {
			c, err := x.accept()
			select {
			case x.next <- accepted{c, err}:
			case <-x.closed:
				if err == nil {
					c.Close()
				}
				return
			}
		}
	})
	return x
}

// Accept implements net.Listener.
func (l *listener) Accept() (net.Conn, error) {
	select {
	case a := <-l.next:
		return a.conn, a.err
	case c := <-l.back:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

// giveBack has Accept return a connection that it returned before.
func (l *listener) giveBack(c net.Conn) {
	select {
	case l.back <- c:
	case <-l.closed:
		c.Close()
	}
}

// Close implements net.Listener.
func (l *listener) Close() error {
	l.once.Do(func() { close(l.closed) })
	err := l.TCPListener.Close()
	l.ended.Wait()
	return err
}

func (l *listener) accept() (net.Conn, error) {
	c, err := l.AcceptTCP()
	if err != nil {
		return nil, err
	}
	if raw, err := c.SyscallConn(); err == nil {
		// A connection that cannot be tuned is slower, not wrong.
		_ = raw.Control(func(fd uintptr) {
			_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_NOTSENT_LOWAT, notSent)
		})
	}
	return c, nil
}

// keyPair is a certificate in files that may be renewed while the server runs.
type keyPair struct {
	cert, key string // file names

	mu     sync.Mutex
	loaded *tls.Certificate // guarded by mu
	times  [2]time.Time     // guarded by mu: of the files when they were loaded
}

// get returns the certificate; if the files have changed, the new one. A pair
// that cannot be read, or does not match while it is being replaced, is no
// reason to stop serving with the old one.
func (p *keyPair) get(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	var times [2]time.Time
	for i, name := range []string{p.cert, p.key} {
		if info, err := os.Stat(name); err == nil {
			times[i] = info.ModTime()
		}
	}
	if p.loaded != nil && times == p.times {
		return p.loaded, nil
	}
	pair, err := tls.LoadX509KeyPair(p.cert, p.key)
	if err != nil {
		if p.loaded != nil {
			return p.loaded, nil
		}
		return nil, fmt.Errorf("certificate %s with key %s: %w", p.cert, p.key, err)
	}
	p.loaded, p.times = &pair, times
	return p.loaded, nil
}
