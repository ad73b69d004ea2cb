package site

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"strconv"
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
	if err := unix.Listen(fd, 8); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		var conn net.Conn
		for conn == nil {
			if conn, err = k.knock(); err != nil {
				t.Fatal(err)
			}
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
