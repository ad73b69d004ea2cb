package kernel

import (
	"context"
	"net"
	"testing"

	"golang.org/x/sys/unix"
)

// Connections that are accepted on a port begin with what the rate and their round trip say; those of other ports, and those that come when
// it is closed, with what Linux says.
func TestFirstFlight(t *testing.T) {
	listen := func() *net.TCPListener {
		l, err := new(net.ListenConfig).Listen(context.Background(), "tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { l.Close() })
		return l.(*net.TCPListener)
	}
	window := func(l *net.TCPListener) (packets uint32, trip uint32) {
		t.Helper()
		out, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer out.Close()
		in, err := l.AcceptTCP()
		if err != nil {
			t.Fatal(err)
		}
		defer in.Close()
		raw, err := in.SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		var info *unix.TCPInfo
		if cerr := raw.Control(func(fd uintptr) {
			info, err = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
		}); cerr != nil || err != nil {
			t.Fatal(cerr, err)
		}
		return info.Snd_cwnd, info.Rtt
	}
	l, other := listen(), listen()
	before, _ := window(l)
	for _, divisor := range []int64{1, 2, 1000} { // of eight times the round trip, in microseconds
		c, err := FirstFlight(l, 8e6*packetBytes/divisor)
		if err != nil {
			t.Skip("skip: ", err)
		}
		got, trip := window(l)
		least, most := int64(8*trip)/divisor, int64(8*trip+7)/divisor
		if least <= linuxFlight {
			least = int64(before)
		}
		if least, most = min(least, mostFlight), min(max(most, int64(before)), mostFlight); int64(got) < least || int64(got) > most {
			t.Errorf("divisor %d, round trip %d µs: a connection begins with %d packets, want %d to %d", divisor, trip, got, least, most)
		}
		if other, _ := window(other); other != before {
			t.Errorf("one of another port begins with %d packets, want %d", other, before)
		}
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
		if got, _ := window(l); got != before {
			t.Errorf("after it was closed a connection begins with %d packets, want %d", got, before)
		}
	}
}
