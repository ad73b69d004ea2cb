package servers

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"hydrofoil.dev/foil/internal/worker/remote"
	"hydrofoil.dev/foil/internal/worker/remote/remotetest"
)

// world has one server, in memory, which answers for all addresses, and counts.
type world struct {
	pipes    *remotetest.Pipes
	requests atomic.Int64
	dials    atomic.Int64
	shown    atomic.Bool // a request had credentials
}

func newWorld(t *testing.T) *world {
	w := &world{pipes: remotetest.NewPipes()}
	s := &http.Server{Protocols: new(http.Protocols), Handler: http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.requests.Add(1)
		if r.Header.Get("Authorization") != "" {
			w.shown.Store(true)
		}
	})}
	s.Protocols.SetUnencryptedHTTP2(true)
	go s.Serve(w.pipes)
	t.Cleanup(func() { s.Close() })
	return w
}

// open makes a Set that keeps connections to two servers.
func (w *world) open(t *testing.T, path string, named ...string) *Set {
	s := Open(Options{
		Path: path, Most: 2, Named: named,
		Client: func(_ context.Context, s Server) (*remote.Client, error) {
			if s.Registry == "gone" {
				return nil, errors.New("it is not configured any more")
			}
			c, err := remote.New(remote.Options{Base: s.Base, Dial: func(ctx context.Context, network, address string) (net.Conn, error) {
				w.dials.Add(1)
				return w.pipes.Dial(ctx, network, address)
			}})
			if err == nil {
				t.Cleanup(c.Close)
			}
			return c, err
		},
	})
	t.Cleanup(s.Close)
	return s
}

func bases(s *Set) (list []string) {
	for _, c := range s.Clients() {
		list = append(list, c.Base())
	}
	return list
}

func plain(name string) Server {
	return Server{Registry: name, PlainHTTP: true, Base: "http://" + name}
}

// The two that are used most are connected to, also by the daemon that comes after, until they were
// not used for days.
func TestSet(t *testing.T) { synctest.Test(t, testSet) }

func testSet(t *testing.T) {
	w := newWorld(t)
	path := filepath.Join(t.TempDir(), "servers.json")
	s := w.open(t, path)
	for _, name := range []string{"a", "b", "b", "c", "c"} {
		s.Used(plain(name))
		time.Sleep(time.Minute)
	}
	want := []string{"http://b", "http://c"}
	if diff := cmp.Diff(want, bases(s)); diff != "" {
		t.Error(diff)
	}
	s.Close()
	before := w.requests.Load()
	time.Sleep(time.Hour)
	if n := w.requests.Load(); n != before {
		t.Errorf("%d requests after the end", n-before)
	}

	s = w.open(t, path)
	synctest.Wait()
	if diff := cmp.Diff([]string{"http://c", "http://b"}, bases(s)); diff != "" {
		t.Error("of the next daemon:", diff)
	}
	before = w.requests.Load()
	time.Sleep(time.Hour)
	if n := w.requests.Load() - before; n < 2*390 || n > 2*410 {
		t.Errorf("%d requests an hour, want one every nine seconds to each of two", n)
	}
	if w.shown.Load() {
		t.Error("credentials were shown")
	}
	s.Close()

	time.Sleep(ForgetAfter)
	s = w.open(t, path)
	synctest.Wait()
	if list := bases(s); list != nil {
		t.Errorf("still connected to %v", list)
	}
}

// A connection ends while the daemon runs, too, when its server was not used for days.
func TestSetGivesUp(t *testing.T) { synctest.Test(t, testSetGivesUp) }

func testSetGivesUp(t *testing.T) {
	w := newWorld(t)
	w.pipes.Close() // nobody answers any more: three days of failures, not of requests
	s := w.open(t, filepath.Join(t.TempDir(), "servers.json"))
	s.Used(plain("a"))
	time.Sleep(ForgetAfter - time.Minute)
	if len(bases(s)) != 1 {
		t.Error("given up too early")
	}
	time.Sleep(2 * lookEvery)
	if list := bases(s); len(list) > 0 {
		t.Errorf("still connected to %v", list)
	}
	before := w.dials.Load()
	time.Sleep(time.Hour)
	if n := w.dials.Load(); before < 1000 || n != before {
		t.Errorf("%d connections before, %d after that", before, n-before)
	}
}

// Servers that somebody else connects to take no place; one that is gone harms nobody.
func TestSetLeavesOut(t *testing.T) { synctest.Test(t, testSetLeavesOut) }

func testSetLeavesOut(t *testing.T) {
	w := newWorld(t)
	s := w.open(t, filepath.Join(t.TempDir(), "servers.json"), "http://named")
	for range 3 {
		s.Used(plain("named"))
		s.Used(plain("gone"))
	}
	s.Used(plain("a"))
	s.Used(Server{Registry: "b", Base: "http://user:secret@b"})
	time.Sleep(time.Second)
	if diff := cmp.Diff([]string{"http://a"}, bases(s)); diff != "" {
		t.Error(diff)
	}
}

// A record that cannot be read is begun anew, and one that cannot be written is no failure.
func TestSetBadRecord(t *testing.T) { synctest.Test(t, testSetBadRecord) }

func testSetBadRecord(t *testing.T) {
	w := newWorld(t)
	path := filepath.Join(t.TempDir(), "servers.json")
	if err := os.WriteFile(path, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	s := w.open(t, path)
	s.Used(plain("a"))
	time.Sleep(time.Second)
	s.Close()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if m, err := decodeMemory(b); err != nil || len(m.uses) != 1 {
		t.Errorf("%s: %v", b, err)
	}
	if strings.Contains(string(b), "secret") {
		t.Errorf("%s", b)
	}
	nowhere := w.open(t, filepath.Join(path, "below", "a file"))
	nowhere.Used(plain("a"))
	time.Sleep(time.Second)
	if len(bases(nowhere)) != 1 {
		t.Error("not connected")
	}
}

// None is kept where none is to be, and nothing is written.
func TestSetOff(t *testing.T) {
	path := filepath.Join(t.TempDir(), "servers.json")
	s := Open(Options{Path: path})
	s.Used(plain("a"))
	s.Close()
	if _, err := os.Stat(path); err == nil || len(s.Clients()) > 0 {
		t.Errorf("%v, %v", err, s.Clients())
	}
}
