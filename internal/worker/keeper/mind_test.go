package keeper

import (
	"bytes"
	"io"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// listening makes a listening socket that a keeper is to have, as a daemon does.
func listening(t *testing.T) (path string, f *os.File) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "grpc")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	u := l.(*net.UnixListener)
	u.SetUnlinkOnClose(false)
	if f, err = u.File(); err != nil {
		t.Fatal(err)
	}
	l.Close()
	t.Cleanup(func() { f.Close() })
	return path, f
}

// caller connects, and says something once it was answered.
func caller(t *testing.T, path, says string) net.Conn {
	t.Helper()
	c, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, len(settings))
	if _, err := io.ReadFull(c, got); err != nil || !bytes.Equal(got, settings) {
		t.Fatalf("the keeper says %x, %v, want %x", got, err, settings)
	}
	if _, err := io.WriteString(c, says); err != nil {
		t.Fatal(err)
	}
	return c
}

// Who connects while there is no daemon is answered, and the next daemon hears what it said.
func TestMind(t *testing.T) {
	path, f := listening(t)
	o := options(t, t.TempDir())
	one := start(t, o)
	if err := one.Put(t.Context(), ListenPrefix+"x", f); err != nil {
		t.Fatal(err)
	}
	if got, err := one.Take(t.Context()); err != nil || len(got) > 0 {
		t.Fatalf("nobody has connected, and there wait %v, %v", got, err)
	}
	if err := one.Mind(t.Context()); err != nil {
		t.Fatal(err)
	}
	caller(t, path, "ending")
	one.Close()
	first := caller(t, path, "nobody")
	two := start(t, o)
	caller(t, path, "begins")
	got, err := two.Take(t.Context())
	if err != nil || len(got) != 1 || len(got[ListenPrefix+"x"]) != 3 {
		t.Fatalf("there wait %v, %v, want 3 connections", got, err)
	}
	for i, want := range []string{"ending", "nobody", "begins"} {
		c := got[ListenPrefix+"x"][i]
		b := make([]byte, len(want))
		if _, err := io.ReadFull(c, b); err != nil || string(b) != want {
			t.Errorf("connection %d says %q, %v, want %q", i, b, err, want)
		}
		c.Close()
	}
	// The keeper has no copies of them.
	if _, err := io.ReadAll(first); err != nil {
		t.Errorf("a connection that the daemon closed: %v", err)
	}
	// The daemon listens itself now.
	l, err := net.FileListener(two.Held()[ListenPrefix+"x"])
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := l.Accept(); err != nil {
		t.Error(err)
	}
}

// What no daemon takes is given up, and a keeper that holds nothing else ends.
func TestMindGivesUp(t *testing.T) {
	path, f := listening(t)
	socket := filepath.Join(t.TempDir(), "keeper")
	ready, ended := make(chan struct{}), make(chan error, 1)
	go func() { ended <- serve(t.Context(), socket, func() { close(ready) }, 200*time.Millisecond) }()
	<-ready
	c, _, err := dial(t.Context(), socket)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.put(t.Context(), ListenPrefix+"x", f); err != nil {
		t.Fatal(err)
	}
	f.Close()
	c.close()
	waits := caller(t, path, "hello")
	if b, err := io.ReadAll(waits); err == nil && len(b) > 0 {
		t.Errorf("it was told %q", b)
	}
	select {
	case err := <-ended:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(patience):
		t.Fatal("it did not end")
	}
	if c, err := net.Dial("unix", path); err == nil {
		c.Close()
		t.Error("somebody listens still")
	}
}
