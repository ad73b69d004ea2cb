package tcp

import (
	"errors"
	"net"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/kernel"
	"hydrofoil.dev/foil/internal/kernel/kerneltest"
)

func TestListenerTunesConnections(t *testing.T) {
	plain, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l := NewListener(plain.(*net.TCPListener), kernel.BBR, 0)
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
	// Who writes blobs to a wrapped connection could not use sendfile(2).
	tcp, ok := c.(*net.TCPConn)
	if !ok {
		t.Fatalf("the connection is a %T", c)
	}
	for _, o := range []struct {
		name                string
		level, option, want int
		why                 error
	}{
		{"TCP_NOTSENT_LOWAT", unix.IPPROTO_TCP, unix.TCP_NOTSENT_LOWAT, notSent, nil},
		{"SO_SNDBUF", unix.SOL_SOCKET, unix.SO_SNDBUF, 2 * kernel.FlightBytes, l.FlightErr},
	} {
		if errors.Is(o.why, unix.EPERM) && os.Geteuid() != 0 {
			t.Logf("%s: this host does not let it: %v", o.name, o.why)
			continue
		}
		if got := kerneltest.SocketOption(t, tcp, o.level, o.option); got != o.want {
			t.Errorf("%s is %d, want %d; %v", o.name, got, o.want, o.why)
		}
	}
}

// What was asked for controls what is accepted, whatever the host's default is.
func TestListenerChoosesCongestion(t *testing.T) {
	for _, c := range []struct{ ask, want string }{{kernel.BBR, "bbr"}, {SystemCongestion, "reno"}, {"reno", "reno"}, {"no-such", "reno"}} {
		t.Run(c.ask, func(t *testing.T) {
			plain, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			if err := kernel.UseCongestion(plain.(*net.TCPListener), "reno"); err != nil {
				t.Fatal(err)
			}
			l := NewListener(plain.(*net.TCPListener), c.ask, 0)
			defer l.Close()
			if l.CongestionErr != nil && c.ask == kernel.BBR {
				t.Logf("this host does not let it: %v", l.CongestionErr)
				c.want = "reno"
			}
			if failed := l.CongestionErr != nil; failed != (c.ask != c.want && c.ask != SystemCongestion) {
				t.Errorf("choosing it: %v", l.CongestionErr)
			}
			client, err := net.Dial("tcp", l.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			defer client.Close()
			conn, err := l.Accept()
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			raw, err := conn.(*net.TCPConn).SyscallConn()
			if err != nil {
				t.Fatal(err)
			}
			var got string
			if cerr := raw.Control(func(fd uintptr) {
				got, err = unix.GetsockoptString(int(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION)
			}); cerr != nil || err != nil || got != c.want {
				t.Errorf("the connection has %q, want %q; %v, %v", got, c.want, cerr, err)
			}
			if paced := pacerOf(ConnContext(t.Context(), conn)) != nil; paced != (c.want == kernel.BBR) {
				t.Errorf("paced: %t", paced)
			}
		})
	}
}

// BBR paces a large first flight; no other congestion control has one.
func TestListenerFirstFlight(t *testing.T) {
	const first = 1e11 // bytes a second: loopback's round trip is short
	for _, congestion := range []string{kernel.BBR, "reno", SystemCongestion} {
		t.Run(congestion, func(t *testing.T) {
			plain, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			l := NewListener(plain.(*net.TCPListener), congestion, first)
			defer l.Close()
			if congestion == kernel.BBR && errors.Join(l.CongestionErr, l.FirstErr) != nil {
				t.Skip("skip: this host does not let it: ", errors.Join(l.CongestionErr, l.FirstErr))
			}
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
			raw, err := c.(*net.TCPConn).SyscallConn()
			if err != nil {
				t.Fatal(err)
			}
			var info *unix.TCPInfo
			if cerr := raw.Control(func(fd uintptr) { info, err = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO) }); cerr != nil || err != nil {
				t.Fatal(cerr, err)
			}
			if got := info.Snd_cwnd > 10; got != (congestion == kernel.BBR) {
				t.Errorf("a connection begins with %d packets", info.Snd_cwnd)
			}
		})
	}
}
