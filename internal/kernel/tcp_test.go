package kernel

import (
	"net"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
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
