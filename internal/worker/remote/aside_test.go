package remote

import (
	"context"
	"io"
	"net"
	"net/http"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"hydrofoil.dev/foil/internal/worker/remote/remotetest"
)

// What is asked aside never comes over the connection of other requests, which counts for Keep, and its connection goes
// when nobody uses it.
func TestAside(t *testing.T) { synctest.Test(t, testAside) }

func testAside(t *testing.T) {
	type connKey struct{}
	p := remotetest.NewPipes()
	var mu sync.Mutex
	var open, served int // connections
	over := make(map[string]map[int]bool)
	s := &http.Server{
		Protocols: new(http.Protocols),
		ConnContext: func(ctx context.Context, _ net.Conn) context.Context {
			mu.Lock()
			defer mu.Unlock()
			served++
			return context.WithValue(ctx, connKey{}, served)
		},
		ConnState: func(_ net.Conn, state http.ConnState) {
			mu.Lock()
			defer mu.Unlock()
			switch state {
			case http.StateNew:
				open++
			case http.StateClosed:
				open--
			}
		},
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			mu.Lock()
			if over[r.URL.Path] == nil {
				over[r.URL.Path] = make(map[int]bool)
			}
			over[r.URL.Path][r.Context().Value(connKey{}).(int)] = true
			mu.Unlock()
			io.Copy(w, r.Body)
		}),
	}
	s.Protocols.SetUnencryptedHTTP2(true)
	go s.Serve(p)
	defer s.Close()
	c, err := New(Options{Base: "http://server", Dial: p.Dial})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for range 3 {
		if err := c.Post(t.Context(), "/pull", "hello", nil); err != nil {
			t.Fatal(err)
		}
		r, err := c.StreamAside(t.Context(), "/recipe", "hello")
		if err != nil {
			t.Fatal(err)
		}
		if b, err := io.ReadAll(r); err != nil || string(b) != `"hello"` {
			t.Errorf("%q, %v", b, err)
		}
		r.Close()
	}
	mu.Lock()
	for n := range over["/recipe"] {
		if over["/pull"][n] {
			t.Errorf("connection %d had both: %v", n, over)
		}
	}
	if n := c.dials.Load(); int(n) != len(over["/pull"]) {
		t.Errorf("%d connections count, and there are %v", n, over)
	}
	mu.Unlock()
	time.Sleep(2 * asideTimeout)
	synctest.Wait()
	mu.Lock()
	if open != len(over["/pull"]) {
		t.Errorf("%d connections are left of %v", open, over)
	}
	mu.Unlock()
	if err := c.Post(t.Context(), "/pull", "hello", nil); err != nil {
		t.Error(err)
	}
}
