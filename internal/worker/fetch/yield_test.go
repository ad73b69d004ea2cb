package fetch

import (
	"sync/atomic"
	"testing"

	"hydrofoil.dev/foil/internal/worker/remote"
	"hydrofoil.dev/foil/internal/worker/yield"
)

// TestYields: while others want the processors the server is told to rest, again and again, and not before.
func TestYields(t *testing.T) {
	m := newImage(t, files(100)...)
	with(t, m, func(t *testing.T, s *server, w *worker) {
		s.Group = 1
		resume := make(chan struct{})
		s.Scripts = []script{{Before: func(pos int, _ *serving) {
			if pos == 3 {
				<-resume
			}
		}}}
		c := s.Client(t, remote.Options{})
		defer c.Close()
		o := w.options(c)
		var wanted atomic.Bool
		var asked atomic.Int64
		o.Yields = func() bool { asked.Add(1); return wanted.Load() }
		p := Start(t.Context(), o)
		sentFrames(t, s, 3)
		rests := func() int { s.Mu.Lock(); defer s.Mu.Unlock(); return len(s.Rests) }
		until(t, "it is asked whether others want them", func() bool { return asked.Load() > 1 })
		if n := rests(); n > 0 {
			t.Errorf("the server was told %d times to rest, and nobody wants the processors", n)
		}
		wanted.Store(true)
		until(t, "the server is told to rest, and again", func() bool { return rests() > 1 })
		close(resume)
		if err := p.Wait(); err != nil {
			t.Fatal(err)
		}
		w.check()
		for _, d := range s.Rests {
			if d != yield.Rest {
				t.Errorf("the server was told to rest for %v", d)
			}
		}
	})
}
