package remote

import (
	"context"
	"encoding/json"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"hydrofoil.dev/foil/internal/format/bundle"
)

// warmServer answers bundle.WarmPath, each answer after the delay that delay
// gives for its size, and counts what it was asked for.
type warmServer struct {
	delay func(n int64) time.Duration

	mu    sync.Mutex
	asked []int64
	more  chan struct{} // told of every request
}

func (s *warmServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var ask bundle.Warm
	if r.URL.Path != bundle.WarmPath || json.NewDecoder(r.Body).Decode(&ask) != nil {
		http.Error(w, "no", http.StatusNotFound)
		return
	}
	s.mu.Lock()
	s.asked = append(s.asked, ask.Bytes)
	s.mu.Unlock()
	if s.delay != nil {
		time.Sleep(s.delay(ask.Bytes))
	}
	w.Write(make([]byte, ask.Bytes))
	select {
	case s.more <- struct{}{}:
	default:
	}
}

func (s *warmServer) all() []int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]int64(nil), s.asked...)
}

func TestWarmStopsWhenThePathIsFull(t *testing.T) { synctest.Test(t, testWarmStopsWhenThePathIsFull) }

func testWarmStopsWhenThePathIsFull(t *testing.T) {
	// One answer takes as long as the other up to 256 KiB; beyond, twice the bytes take
	// much more than twice the time.
	s := &warmServer{delay: func(n int64) time.Duration {
		if n <= 256<<10 {
			return 20 * time.Millisecond
		}
		return 2 * time.Second
	}}
	c, err := New(Options{Base: "http://server.test", Dial: pipeServer(t, s.ServeHTTP)})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	w, err := c.Warm(t.Context(), 8<<20)
	if err != nil {
		t.Fatal(err)
	}
	// Then once more, for BBR to notice that it is full.
	asked := s.all()
	n := len(asked)
	if n < 3 || asked[n-2] > 512<<10 || asked[n-1] != 2*asked[n-2] || w.Bytes > 2<<20 {
		t.Errorf("asked for %v, %d bytes", asked, w.Bytes)
	}
	if w.Rate <= 0 {
		t.Errorf("rate %v", w.Rate)
	}
}

func TestWarmIsBounded(t *testing.T) {
	var faster atomic.Int64
	s := &warmServer{delay: func(int64) time.Duration { return max(0, 200-40*time.Duration(faster.Add(1))) * time.Millisecond }}
	c, err := New(Options{Base: h2cServer(t, s.ServeHTTP)})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for _, most := range []int64{0, warmStep - 1, 3*warmStep + 1, 1 << 20} {
		if w, err := c.Warm(t.Context(), most); err != nil || w.Bytes > most {
			t.Errorf("%d bytes of at most %d, %v", w.Bytes, most, err)
		}
	}
}

func TestKeep(t *testing.T) {
	s := &warmServer{more: make(chan struct{}, 100)}
	c, err := New(Options{Base: h2cServer(t, s.ServeHTTP)})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); c.Keep(ctx, Keeping{WarmUp: 3 * warmStep}) }()
	for range 3 { // the first use, and the warm-up's two steps
		<-s.more
	}
	for {
		if w, ok := c.Kept(); ok {
			if w.Bytes != 3*warmStep {
				t.Errorf("warmed up with %d bytes", w.Bytes)
			}
			break
		}
		time.Sleep(time.Millisecond)
	}
	cancel()
	<-done
	if _, ok := c.Kept(); ok {
		t.Error("kept after the end")
	}
	if got := s.all(); !slices.Equal(got, []int64{0, warmStep, 2 * warmStep}) {
		t.Errorf("asked for %v", got)
	}
	// One, or two: see TestClientOneConnection.
	if n := c.dials.Load(); n > 2 {
		t.Errorf("%d connections", n)
	}
}

// A server that knows no warming is a connection all the same, and one that is
// not there is tried again.
func TestKeepWithoutWarming(t *testing.T) {
	hits := make(chan struct{}, 100)
	c, err := New(Options{Base: h2cServer(t, func(w http.ResponseWriter, _ *http.Request) {
		http.Error(w, "no", http.StatusNotFound)
		hits <- struct{}{}
	})})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); c.Keep(ctx, Keeping{WarmUp: 1 << 20}) }()
	<-hits
	cancel()
	<-done
	if len(hits) > 0 {
		t.Errorf("%d more requests", len(hits))
	}
}

// A server that sends more than it was asked for is not listened to.
func TestWarmTakesNoMore(t *testing.T) {
	c, err := New(Options{Base: h2cServer(t, func(w http.ResponseWriter, r *http.Request) {
		for r.Context().Err() == nil {
			if _, err := w.Write(make([]byte, 32<<10)); err != nil {
				return
			}
		}
	})})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Warm(t.Context(), 1<<20); err == nil {
		t.Error("no error")
	}
}

// What a pull has connected is kept as it is: a warm-up would have to share with the pull.
func TestKeepWhatAPullConnected(t *testing.T) { synctest.Test(t, testKeepWhatAPullConnected) }

func testKeepWhatAPullConnected(t *testing.T) {
	s := &warmServer{}
	c, err := New(Options{Base: "http://server.test", Dial: pipeServer(t, s.ServeHTTP)})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.padding(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	go c.Keep(ctx, Keeping{WarmUp: 1 << 20})
	time.Sleep(2*keepEvery + time.Second)
	if _, ok := c.Kept(); !ok {
		t.Error("not kept")
	}
	cancel()
	synctest.Wait()
	if got := s.all(); !slices.Equal(got, []int64{1, 0, 0, 0}) {
		t.Errorf("asked for %v", got)
	}
}

// A server that drops the connection after each warm-up gets no more than one in the time
// that Keeping says.
func TestKeepWarmsSeldom(t *testing.T) { synctest.Test(t, testKeepWarmsSeldom) }

func testKeepWarmsSeldom(t *testing.T) {
	s := &warmServer{}
	var c *Client
	dropping := func(w http.ResponseWriter, r *http.Request) {
		s.ServeHTTP(w, r)
		c.Renew()
	}
	c, err := New(Options{Base: "http://server.test", Dial: pipeServer(t, dropping)})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	ctx, cancel := context.WithCancel(t.Context())
	go c.Keep(ctx, Keeping{WarmUp: warmStep, Least: time.Hour})
	time.Sleep(3*time.Hour - time.Minute)
	cancel()
	synctest.Wait()
	warmed := 0
	for _, n := range s.all() {
		if n > 0 {
			warmed++
		}
	}
	if dials := c.dials.Load(); warmed != 3 || dials < 1000 {
		t.Errorf("warmed up %d times on %d connections, want 3 times", warmed, dials)
	}
}
