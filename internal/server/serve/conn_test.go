package serve

import (
	"errors"
	"io"
	"net"
	"testing"

	"golang.org/x/sys/unix"
)

func TestListenerTunesConnections(t *testing.T) {
	plain, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l := newListener(plain.(*net.TCPListener))
	defer l.Close()
	client, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	c, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	// A wrapped connection would cost the way to sendfile(2).
	tcp, ok := c.(*net.TCPConn)
	if !ok {
		t.Fatalf("the connection is a %T", c)
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var got int
	if cerr := raw.Control(func(fd uintptr) {
		got, err = unix.GetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_NOTSENT_LOWAT)
	}); cerr != nil || err != nil {
		t.Fatal(cerr, err)
	}
	if got != notSent {
		t.Errorf("TCP_NOTSENT_LOWAT is %d, want %d", got, notSent)
	}
}

// BBR controls what is accepted, if this host has it, whatever its default is.
func TestListenerChoosesBBR(t *testing.T) {
	plain, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	raw, err := plain.(*net.TCPListener).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if cerr := raw.Control(func(fd uintptr) {
		err = unix.SetsockoptString(int(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION, "reno")
	}); cerr != nil || err != nil {
		t.Fatal(cerr, err)
	}
	l := newListener(plain.(*net.TCPListener))
	defer l.Close()
	client, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	c, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if chosen := pacerOf(withPacer(t.Context(), c)) != nil; chosen != (l.others == nil) {
		t.Errorf("controlled by BBR: %t; %v", chosen, l.others)
	}
}

// What is given back is handed out again; after Close it is closed.
func TestListenerGivesBack(t *testing.T) {
	plain, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l := newListener(plain.(*net.TCPListener))
	defer l.Close()
	client, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	c, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	given := make(chan struct{})
	go func() {
		defer close(given)
		l.giveBack(c)
	}()
	again, err := l.Accept()
	if err != nil || again != c {
		t.Fatalf("%v, %v, want the connection that was given back", again, err)
	}
	<-given
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := l.Accept(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("Accept after Close: %v", err)
	}
	l.giveBack(c)
	if _, err := client.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("a connection given back after Close: %v", err)
	}
}
