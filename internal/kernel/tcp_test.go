package kernel

import (
	"net"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/kernel/kerneltest"
)

// What a listening socket accepts is controlled by BBR, whatever was chosen before.
func TestUseCongestion(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	raw, err := l.(*net.TCPListener).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if cerr := raw.Control(func(fd uintptr) {
		err = unix.SetsockoptString(int(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION, "reno")
	}); cerr != nil || err != nil {
		t.Fatal(cerr, err)
	}
	want := "bbr"
	if err := UseCongestion(l.(*net.TCPListener), BBR); err != nil {
		t.Logf("this host does not let it: %v", err)
		want = "reno"
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
	if raw, err = c.(*net.TCPConn).SyscallConn(); err != nil {
		t.Fatal(err)
	}
	var got string
	if cerr := raw.Control(func(fd uintptr) {
		got, err = unix.GetsockoptString(int(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION)
	}); cerr != nil || err != nil || got != want {
		t.Errorf("the connection has %q, want %q; %v, %v", got, want, cerr, err)
	}
}

func TestIdleRestart(t *testing.T) {
	for text, want := range map[string]bool{"0\n": false, "1\n": true, "": true} {
		dir := t.TempDir()
		if err := os.MkdirAll(filepath.Join(dir, "net/ipv4"), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "net/ipv4/tcp_slow_start_after_idle"), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		if got := idleRestart(dir); got != want {
			t.Errorf("%q: %t", text, got)
		}
	}
	if !idleRestart(filepath.Join(t.TempDir(), "none")) {
		t.Error("a host that does not say keeps rates")
	}
}

// What a listening socket accepts may have a window in flight, and what is connected may
// be sent one, whatever the host's settings are.
func TestFlight(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if err := LetSend(l.(*net.TCPListener)); err != nil {
		if os.Geteuid() != 0 {
			t.Skip(err)
		}
		t.Fatal(err)
	}
	dialer := net.Dialer{Control: func(_, _ string, raw syscall.RawConn) error { return LetReceive(raw) }}
	client, err := dialer.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	server, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	for _, end := range []struct {
		name   string
		conn   net.Conn
		option int
	}{{"send", server, unix.SO_SNDBUF}, {"receive", client, unix.SO_RCVBUF}} {
		if got := kerneltest.SocketOption(t, end.conn.(*net.TCPConn), unix.SOL_SOCKET, end.option); got != 2*FlightBytes {
			t.Errorf("%s: a buffer of %d bytes, want %d", end.name, got, 2*FlightBytes)
		}
	}
}

// Who may not raise a limit need not, where it is high enough.
func TestFlightLimit(t *testing.T) {
	for text, want := range map[string]int64{"4096\t16384\t4194304\n": 4 << 20, "1 2 3": 3, "1 2": -1, "": -1, "1 2 x": -1} {
		file := filepath.Join(t.TempDir(), "tcp_wmem")
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		got, err := mostBytes(file)
		if err != nil {
			got = -1
		}
		if got != want {
			t.Errorf("%q: %d, %v", text, got, err)
		}
	}
	if _, err := mostBytes(filepath.Join(t.TempDir(), "none")); err == nil {
		t.Error("a host that does not say has no limit")
	}
}
