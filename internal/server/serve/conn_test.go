package serve

import (
	"errors"
	"io"
	"net"
	"os"
	"strings"
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
	l := newListener(plain.(*net.TCPListener), kernel.BBR)
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
	for _, o := range []struct {
		name                string
		level, option, want int
		why                 error
	}{
		{"TCP_NOTSENT_LOWAT", unix.IPPROTO_TCP, unix.TCP_NOTSENT_LOWAT, notSent, nil},
		{"SO_SNDBUF", unix.SOL_SOCKET, unix.SO_SNDBUF, 2 * kernel.FlightBytes, l.little},
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
			l := newListener(plain.(*net.TCPListener), c.ask)
			defer l.Close()
			if l.others != nil && c.ask == kernel.BBR {
				t.Logf("this host does not let it: %v", l.others)
				c.want = "reno"
			}
			if failed := l.others != nil; failed != (c.ask != c.want && c.ask != SystemCongestion) {
				t.Errorf("choosing it: %v", l.others)
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
			if paced := pacerOf(withPacer(t.Context(), conn)) != nil; paced != (c.want == kernel.BBR) {
				t.Errorf("paced: %t", paced)
			}
		})
	}
}

// One that the host does not have is said, unless it is the default.
func TestCongestionThatIsNotThere(t *testing.T) {
	_, err := Start(t.Context(), Options{Root: t.TempDir(), Listen: "127.0.0.1:0", Congestion: "no-such"})
	if err == nil || !strings.Contains(err.Error(), "choose congestion control no-such") || !strings.Contains(err.Error(), "modprobe") {
		t.Errorf("%v, want an error that says what there is", err)
	}
}

// What is given back is handed out again; after Close it is closed.
func TestListenerGivesBack(t *testing.T) {
	plain, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l := newListener(plain.(*net.TCPListener), kernel.BBR)
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
