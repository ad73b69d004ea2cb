package site

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"
)

// A line is found whenever it is written: before anybody waits, in pieces, and as the last words of a
// process that ends.
func TestWaitLine(t *testing.T) {
	r, err := ParseReadiness("stdout:^ready$", false)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name   string
		before string
		parts  []string
		ends   bool
		fails  bool
	}{
		{name: "before", before: "hello\nready\n"},
		{name: "pieces", before: "not ready\n", parts: []string{"re", "a", "dy\nmore\n"}},
		{name: "last words", parts: []string{"ready"}, ends: true},
		{name: "nothing", before: "not ready\n", ends: true, fails: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := &Process{name: "test", Log: filepath.Join(t.TempDir(), "log"), Done: make(chan struct{}), Err: errors.New("gone")}
			if err := os.WriteFile(p.Log, []byte(c.before), 0o600); err != nil {
				t.Fatal(err)
			}
			waited := make(chan error, 1)
			go func() { waited <- r.Wait(t.Context(), nil, p) }()
			log, err := os.OpenFile(p.Log, os.O_WRONLY|os.O_APPEND, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer log.Close()
			for _, part := range c.parts {
				if _, err := log.WriteString(part); err != nil {
					t.Fatal(err)
				}
			}
			if c.ends {
				close(p.Done)
			}
			if err := <-waited; (err != nil) != c.fails {
				t.Errorf("waited: %v", err)
			}
		})
	}
}

// One socket is refused again and again, and then connects; the next try has another.
func TestKnock(t *testing.T) {
	// A port that nobody has: bound, and not listened at.
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatal(err)
	}
	at, err := unix.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	k, err := newKnocker(nil, strconv.Itoa(at.(*unix.SockaddrInet4).Port))
	if err != nil {
		t.Fatal(err)
	}
	entered := 0
	k.in = func(fn func() error) error { entered++; return fn() }
	defer k.close()
	for range 100 {
		if conn, err := k.knock(); conn != nil || err != nil {
			t.Fatalf("nobody listens: %v, %v", conn, err)
		}
	}
	if entered != 1 {
		t.Errorf("the namespace was entered %d times", entered)
	}
	var stop atomic.Bool
	gone := make(chan net.Conn)
	go func() {
		conn, _ := k.knocking(&stop)
		gone <- conn
	}()
	stop.Store(true)
	if conn := <-gone; conn != nil {
		t.Error("nobody listens, and there is a connection")
	}
	if err := unix.Listen(fd, 8); err != nil {
		t.Fatal(err)
	}
	stop.Store(false)
	for range 2 {
		conn, err := k.knocking(&stop)
		if err != nil {
			t.Fatal(err)
		}
		accepted, _, err := unix.Accept(fd)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := unix.Write(accepted, []byte("+PONG\r\n")); err != nil {
			t.Fatal(err)
		}
		if !tryRedis(t.Context(), conn) {
			t.Error("the connection does not work")
		}
		conn.Close()
		unix.Close(accepted)
	}
	if entered != 2 {
		t.Errorf("the namespace was entered %d times", entered)
	}
	for _, port := range []string{"", "x", "65536"} {
		if _, err := newKnocker(nil, port); err == nil {
			t.Errorf("port %q was taken", port)
		}
	}
}

// A service is ready when it answers as a ready one does, not when it only accepts; and who waits for it is told
// when it ends.
func TestWaitNetwork(t *testing.T) {
	r, err := ParseReadiness("tcp:1", true)
	if err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	_, port, err := net.SplitHostPort(listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	knock := func() *knocker {
		k, err := newKnocker(nil, port)
		if err != nil {
			t.Fatal(err)
		}
		k.in = func(fn func() error) error { return fn() }
		return k
	}
	go func() {
		for _, answer := range []string{"", "-LOADING\r\n", "+PONG\r\n"} {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			conn.Read(make([]byte, 64))
			conn.Write([]byte(answer))
			conn.Close()
		}
		listener.Close()
	}()
	p := &Process{name: "test", Done: make(chan struct{}), Err: errors.New("gone")}
	if err := r.waitNetwork(t.Context(), knock(), p); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := r.waitNetwork(ctx, knock(), p); !errors.Is(err, context.Canceled) {
		t.Errorf("when nobody waits any more: %v", err)
	}
	close(p.Done)
	if err := r.waitNetwork(t.Context(), knock(), p); err == nil || !strings.Contains(err.Error(), "ended too early") {
		t.Errorf("of a process that has ended: %v", err)
	}
}
