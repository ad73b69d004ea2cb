package fetch

import (
	"context"
	"net/http"
	"slices"
	"testing"
	"time"

	"hydrofoil.dev/foil/internal/format/trace"
	"hydrofoil.dev/foil/internal/worker/arena"
	"hydrofoil.dev/foil/internal/worker/remote"
)

// held is a pull whose server holds back what follows the startup set.
type held struct {
	*Pull
	a      *arena.Arena
	absent []int64 // offsets of pages that are in no set, one of each segment
}

// hold starts a pull of startupImage, and returns when the plan has come.
func holding(t *testing.T, s *server, w *worker, change func(*Options)) *held {
	t.Helper()
	s.Group = 1
	c := s.Client(t, remote.Options{})
	t.Cleanup(c.Close)
	o := startupOptions(w, c)
	o.Hold = 20 * time.Second
	early := make(chan struct{}, 10)
	o.Early = func(Startup) { early <- struct{}{} }
	if change != nil {
		change(&o)
	}
	h := &held{Pull: Start(t.Context(), o)}
	t.Cleanup(func() { h.Stop(); <-h.done })
	<-early
	until(t, "it is told that the set has come", func() bool { return !h.state().Set })
	m := s.Image
	h.a = w.arena(t, m)
	l := h.a.Layout()
	for i := range l.Segments() {
		at := (l.Segment(i).Offset + arena.BlockSize - 1) / arena.BlockSize * arena.BlockSize
		if at < l.Segment(i).Offset+int64(l.Segment(i).Length) && !h.a.Present(at, 1) {
			h.absent = append(h.absent, at)
		}
	}
	if len(h.absent) < 10 {
		t.Fatalf("the test wants more absent pages than %d", len(h.absent))
	}
	return h
}

// miss reads the page at off.
func (h *held) miss(t *testing.T, off int64) {
	t.Helper()
	if err := h.Need(context.Background(), h.a, off, arena.BlockSize); err != nil {
		t.Fatal(err)
	}
}

// end waits for the pull's.
func (h *held) end(t *testing.T, w *worker) {
	t.Helper()
	if err := h.Wait(); err != nil {
		t.Fatal(err)
	}
	w.check()
}

// came returns how many frames were sent.
func came(s *server) int {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	return s.Frames
}

// asked returns how long the server was to hold.
func asked(s *server) []time.Duration {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	return slices.Clone(s.Holds)
}

// TestHold: what comes after a startup set waits for the end of the start; what is
// missed all the same comes alone.
func TestHold(t *testing.T) {
	m := newImage(t, append(files(10), blob(98, 6000), blob(99, 8<<20))...)
	m.Startup = [][]trace.Run{{{Content: m.Index(blob(98, 6000)), First: 0, Blocks: 2}}}
	run := func(name string, change func(*Options), fn func(t *testing.T, s *server, w *worker, h *held)) {
		t.Run(name, func(t *testing.T) {
			with(t, m, func(t *testing.T, s *server, w *worker) {
				h := holding(t, s, w, change)
				fn(t, s, w, h)
				h.end(t, w)
			})
		})
	}
	run("released", nil, func(t *testing.T, s *server, w *worker, h *held) {
		h.miss(t, h.absent[len(h.absent)/2])
		if n := came(s); n > 3 {
			t.Errorf("%d frames came for the first miss", n)
		}
		h.Release()
	})
	run("neighbours", nil, func(t *testing.T, s *server, w *worker, h *held) {
		n := len(h.absent)
		h.miss(t, h.absent[n/2])
		h.miss(t, h.absent[n/2+1])
		if v := h.state(); !v.Holds || v.Misses != 1 {
			t.Errorf("the hold goes on: %t; %d misses", v.Holds, v.Misses)
		}
		h.Release()
	})
	run("for some time", func(o *Options) { o.Hold = 10 * time.Millisecond }, func(*testing.T, *server, *worker, *held) {})
	run("after a while", nil, func(t *testing.T, s *server, w *worker, h *held) {
		h.ReleaseAfter(time.Hour)
		h.ReleaseAfter(10 * time.Millisecond)
		h.ReleaseAfter(time.Hour) // changes nothing
	})
	run("never, after a while", func(o *Options) { o.Hold = 0 }, func(t *testing.T, s *server, w *worker, h *held) { h.ReleaseAfter(time.Hour) })
	run("never", func(o *Options) { o.Hold = 0 }, func(t *testing.T, s *server, w *worker, h *held) {})
	run("released again", nil, func(t *testing.T, s *server, w *worker, h *held) { h.Release(); h.Release() })
}

// TestHoldMissedOften: a start that misses much was given the wrong set.
func TestHoldMissedOften(t *testing.T) {
	m := newImage(t, append(files(10), blob(98, 6000), blob(99, 24<<20))...)
	m.Startup = [][]trace.Run{{{Content: m.Index(blob(98, 6000)), First: 0, Blocks: 2}}}
	with(t, m, func(t *testing.T, s *server, w *worker) {
		h := holding(t, s, w, nil)
		for _, at := range h.absent {
			h.miss(t, at)
			if v := h.state(); !v.Holds {
				if v.Brought < 16<<20 || v.Brought > 20<<20 || v.Misses > 12 {
					t.Errorf("the hold ended after %d misses, with which %d bytes had come", v.Misses, v.Brought)
				}
				h.end(t, w)
				return
			}
		}
		t.Error("the hold has not ended")
	})
}

// TestHoldReleasedBefore: the server was asked to hold when there is a need for it no more.
func TestHoldReleasedBefore(t *testing.T) {
	m, _, _, _ := startupImage(t)
	with(t, m, func(t *testing.T, s *server, w *worker) {
		var p *Pull
		started := make(chan struct{})
		s.Scripts = []script{{Early: func() { <-started; p.Release() }}}
		c := s.Client(t, remote.Options{})
		defer c.Close()
		o := startupOptions(w, c)
		o.Hold = 20 * time.Second
		p = Start(t.Context(), o)
		close(started)
		if err := p.Wait(); err != nil {
			t.Fatal(err)
		}
		w.check()
	})
}

// TestHoldUnknown: a server that knows no holds sends all, and what is promoted first.
func TestHoldUnknown(t *testing.T) {
	m, _, _, _ := startupImage(t)
	with(t, m, func(t *testing.T, s *server, w *worker) {
		s.Scripts = []script{{NoHold: true, Before: func(pos int, s *serving) {
			if pos == 0 {
				<-s.Arrived
			}
		}}}
		h := holding(t, s, w, nil)
		h.miss(t, h.absent[len(h.absent)-1])
		h.end(t, w)
	})
}

// TestHoldWithoutSet: there is nothing to wait for.
func TestHoldWithoutSet(t *testing.T) {
	m, _, _, _ := startupImage(t)
	m.Startup = nil
	with(t, m, func(t *testing.T, s *server, w *worker) {
		c := s.Client(t, remote.Options{})
		defer c.Close()
		o := startupOptions(w, c)
		o.Request.Image.Startup = false
		o.Hold = time.Hour
		if err := Start(t.Context(), o).Wait(); err != nil {
			t.Fatal(err)
		}
		w.check()
	})
}

// TestHoldResumed cuts the stream while the server holds: the hold goes on, for what
// is left of its time; and does not begin again when it was over.
func TestHoldResumed(t *testing.T) {
	m, _, _, _ := startupImage(t)
	for name, release := range map[string]bool{"held": false, "released": true} {
		t.Run(name, func(t *testing.T) {
			with(t, m, func(t *testing.T, s *server, w *worker) {
				cut := make(chan struct{})
				s.Scripts = []script{{NoHold: true, Before: func(int, *serving) {
					<-cut
					panic(http.ErrAbortHandler)
				}}}
				h := holding(t, s, w, nil)
				if release {
					h.Release()
				}
				close(cut)
				until(t, "the stream is resumed", func() bool { return len(asked(s)) == 2 })
				if !release {
					h.miss(t, h.absent[0])
					h.Release()
				}
				h.end(t, w)
				holds := asked(s)
				if release && holds[1] != 0 || !release && (holds[1] <= 0 || holds[1] >= holds[0]) {
					t.Errorf("asked to hold for %v", holds)
				}
			})
		})
	}
}

// TestHoldMost: the server is not asked for more than it gives, nor for what
// would be taken for a stream that stalled.
func TestHoldMost(t *testing.T) {
	for _, c := range []struct{ stall, want time.Duration }{{0, 30 * time.Second}, {10 * time.Second, 5 * time.Second}} {
		client, err := remote.New(remote.Options{Base: "http://server.test", StallTimeout: c.stall})
		if err != nil {
			t.Fatal(err)
		}
		o := Options{Client: client, Hold: time.Hour}
		o.defaults()
		if o.Hold != c.want {
			t.Errorf("stall timeout %v: held for %v, want %v", c.stall, o.Hold, c.want)
		}
		client.Close()
	}
}
