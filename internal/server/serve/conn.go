package serve

import (
	"crypto/tls"
	"fmt"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// notSent is how many bytes a connection's socket takes beyond what is in
// flight. Left to itself Linux takes megabytes, and a frame that was promoted
// would wait behind them.
const notSent = 128 << 10

// listener prepares the connections that it accepts.
type listener struct{ *net.TCPListener }

func (l *listener) Accept() (net.Conn, error) {
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
