package serve

import (
	"net"
	"testing"

	"golang.org/x/sys/unix"
)

func TestListenerTunesConnections(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	client, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	c, err := (&listener{l.(*net.TCPListener)}).Accept()
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
