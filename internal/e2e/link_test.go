// Package e2e holds the tests of the whole: the real program, as processes that
// can be killed, over real mounts, with a link that can be slowed and cut.
package e2e

import (
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"
)

// link is a slow way to a server that a test can cut. Clients use its address.
type link struct {
	t      testing.TB
	addr   string
	target string
	l      net.Listener

	mu    sync.Mutex
	rate  int64 // bytes a second towards the client; 0: unlimited
	cut   bool  // refuse and drop everything
	stall bool  // accept, pass nothing
	conns map[net.Conn]bool
	wg    sync.WaitGroup
	moved int64
	until int64 // stall when so many bytes have moved; 0: never
	// corrupt, when set, may change a chunk that goes to the client.
	corrupt func(b []byte)
}

func newLink(t testing.TB, target string, rate int64) *link {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	k := &link{t: t, addr: l.Addr().String(), target: target, l: l, rate: rate, conns: make(map[net.Conn]bool)}
	k.wg.Go(k.accept)
	t.Cleanup(func() {
		l.Close()
		k.setCut(true)
		k.wg.Wait()
	})
	return k
}

func (k *link) accept() {
	for {
		c, err := k.l.Accept()
		if err != nil {
			return
		}
		k.wg.Go(func() { k.serve(c) })
	}
}

func (k *link) serve(c net.Conn) {
	defer c.Close()
	s, err := net.Dial("tcp", k.target)
	if err != nil {
		return
	}
	defer s.Close()
	k.mu.Lock()
	if k.cut {
		k.mu.Unlock()
		return
	}
	k.conns[c], k.conns[s] = true, true
	k.mu.Unlock()
	// Small buffers: what is cut must not be on its way already.
	for _, x := range []net.Conn{c, s} {
		_ = x.(*net.TCPConn).SetReadBuffer(64 << 10)
		_ = x.(*net.TCPConn).SetWriteBuffer(64 << 10)
	}
	done := make(chan struct{}, 2)
	k.wg.Go(func() { _, _ = io.Copy(s, c); c.Close(); s.Close(); done <- struct{}{} })
	k.wg.Go(func() { k.down(c, s); c.Close(); s.Close(); done <- struct{}{} })
	<-done
	<-done
	k.mu.Lock()
	delete(k.conns, c)
	delete(k.conns, s)
	k.mu.Unlock()
}

// down passes bytes from the server to the client at the rate.
func (k *link) down(c, s net.Conn) {
	buf := make([]byte, 16<<10)
	for {
		n, err := s.Read(buf)
		if n > 0 {
			for {
				k.mu.Lock()
				stall, cut := k.stall, k.cut
				k.mu.Unlock()
				if cut {
					return
				}
				if !stall {
					break
				}
				time.Sleep(5 * time.Millisecond)
			}
			k.mu.Lock()
			rate, corrupt := k.rate, k.corrupt
			k.moved += int64(n)
			if k.until > 0 && k.moved >= k.until {
				k.stall, k.until = true, 0
			}
			k.mu.Unlock()
			if corrupt != nil {
				corrupt(buf[:n])
			}
			if _, err := c.Write(buf[:n]); err != nil {
				return
			}
			if rate > 0 {
				time.Sleep(time.Duration(int64(n) * int64(time.Second) / rate))
			}
		}
		if err != nil {
			return
		}
	}
}

func (k *link) setRate(rate int64) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.rate = rate
}

// setCut drops all connections and refuses new ones, or lets them through again.
func (k *link) setCut(cut bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.cut = cut
	if cut {
		for c := range k.conns {
			c.Close()
		}
	}
}

func (k *link) setStall(stall bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.stall = stall
}

// stallAfter lets so many more bytes through, and then none: what is here when a
// test looks does not depend on how quick this machine is.
func (k *link) stallAfter(n int64) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.until = k.moved + n
}

// open lets everything through, as fast as it goes.
func (k *link) open() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.rate, k.stall, k.until = 0, false, 0
}

func (k *link) setCorrupt(fn func([]byte)) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.corrupt = fn
}

func (k *link) bytesMoved() int64 {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.moved
}

// via is the reference of an image through the link.
func (k *link) via(ref string) string {
	_, rest, _ := strings.Cut(ref, "/")
	return k.addr + "/" + rest
}
