// Package remotetest helps tests of what talks to a server.
package remotetest

import (
	"context"
	"net"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Pipes is a listener whose connections are made by Dial, in memory: in a test whose time is
// that of a synctest bubble they take none.
type Pipes struct {
	conns  chan net.Conn
	closed chan struct{}
	once   sync.Once
}

func NewPipes() *Pipes {
	return &Pipes{conns: make(chan net.Conn), closed: make(chan struct{})}
}

// Dial connects to the listener, whatever the address is.
func (p *Pipes) Dial(ctx context.Context, _, _ string) (net.Conn, error) {
	here, there := net.Pipe()
	select {
	case p.conns <- there:
		return here, nil
	case <-p.closed:
		return nil, unix.ECONNREFUSED
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (p *Pipes) Accept() (net.Conn, error) {
	select {
	case c := <-p.conns:
		return c, nil
	case <-p.closed:
		return nil, net.ErrClosed
	}
}

func (p *Pipes) Close() error   { p.once.Do(func() { close(p.closed) }); return nil }
func (p *Pipes) Addr() net.Addr { return &net.UnixAddr{Name: "pipes"} }

// NoneLeft fails when goroutines of connections, or with one of the words in their stacks, go on.
func NoneLeft(t *testing.T, words ...string) {
	t.Helper()
	var left string
	for range 6000 {
		left = ""
		buf := make([]byte, 1<<20)
		for _, g := range strings.Split(string(buf[:runtime.Stack(buf, true)]), "\n\n")[1:] {
			ours := strings.Contains(g, "http2")
			for _, w := range words {
				ours = ours || strings.Contains(g, w) && !strings.Contains(g, "testing.(*T).Run")
			}
			if ours {
				left += g + "\n\n"
			}
		}
		if left == "" {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Errorf("goroutines are left:\n%s", left)
}
