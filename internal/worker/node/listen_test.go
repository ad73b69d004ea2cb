package node

import (
	"io"
	"net"
	"os"
	"path/filepath"
	"testing"
)

// A socket goes from daemon to daemon with what waits at it, unless its file was removed or another path is asked for.
func TestListen(t *testing.T) {
	h := newHost(t)
	path := filepath.Join(t.TempDir(), "grpc.sock")
	accept := func(l net.Listener) net.Conn {
		t.Helper()
		c, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return c
	}
	dial := func(path, says string) {
		t.Helper()
		c, err := net.Dial("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		if _, err := io.WriteString(c, says); err != nil {
			t.Fatal(err)
		}
	}
	listen := func(path string) net.Listener {
		t.Helper()
		l, err := h.n.Listen(t.Context(), path)
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	hears := func(l net.Listener, want string) {
		t.Helper()
		b := make([]byte, len(want))
		if _, err := io.ReadFull(accept(l), b); err != nil || string(b) != want {
			t.Fatalf("the daemon hears %q, %v, want %q", b, err, want)
		}
	}
	restart := func(l net.Listener) {
		t.Helper()
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
		h.stop()
	}
	l := listen(path)
	restart(l)
	if pids := h.keepers(); len(pids) > 0 {
		t.Errorf("nobody has connected, nothing is incomplete, and there are keepers: %v", pids)
	}
	if _, err := os.Stat(path); err == nil {
		t.Error("the socket is there still")
	}
	h.start()
	l = listen(path)
	dial(path, "first")
	hears(l, "first")
	restart(l)
	dial(path, "meanwhile")
	h.start()
	dial(path, "early")
	l = listen(path)
	hears(l, "meanwhile")
	hears(l, "early")
	dial(path, "late")
	hears(l, "late")
	restart(l)
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	h.start()
	l = listen(path)
	dial(path, "anew")
	hears(l, "anew")
	restart(l)
	h.start()
	other := path + "2"
	l = listen(other)
	dial(other, "elsewhere")
	hears(l, "elsewhere")
	if len(h.n.sockets) > 0 {
		t.Errorf("sockets that nobody listens at: %v", h.n.sockets)
	}
	restart(l)
}
