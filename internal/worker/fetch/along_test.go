package fetch

import (
	"context"
	"slices"
	"testing"
	"time"

	"hydrofoil.dev/foil/internal/worker/remote"
)

// TestAlong has a server send frames along with one that was promoted, as older ones do, and then
// nothing until another one is: a read of what comes soon after these is far from where the
// stream is, however it looks, and is promoted.
func TestAlong(t *testing.T) {
	var files [][]byte
	for i := range 200 {
		files = append(files, blob(uint64(1000+i), 20_000))
	}
	m := newImage(t, files...)
	with(t, m, func(t *testing.T, s *server, w *worker) {
		s.Group = 1
		promoted := func(f uint32) bool {
			s.Mu.Lock()
			defer s.Mu.Unlock()
			return slices.ContainsFunc(s.Promotions, func(list []uint32) bool { return slices.Contains(list, f) })
		}
		s.Scripts = []script{{Along: 20, Before: func(pos int, v *serving) {
			for !t.Failed() && (!promoted(100) || pos > 0 && !promoted(130)) {
				select {
				case <-v.Arrived:
				case <-time.After(20 * time.Second):
					t.Errorf("%v are promoted after %d frames, and not what is read", s.Promotions, pos)
					return
				}
			}
		}}}
		c := s.Client(t, remote.Options{})
		defer c.Close()
		p := Start(t.Context(), w.options(c))
		a := w.arena(t, m)
		for _, i := range []int{100, 120, 130} {
			at, _ := a.Layout().Offset(i)
			if err := p.Need(context.Background(), a, at, 1); err != nil {
				t.Error(err)
			}
		}
		if err := p.Wait(); err != nil {
			t.Fatal(err)
		}
		w.check()
	})
}

// TestForgotten has a server forget promotions: what a read lacks is promoted again when it has waited
// longer than it should.
func TestForgotten(t *testing.T) {
	m := newImage(t, files(100)...)
	with(t, m, func(t *testing.T, s *server, w *worker) {
		s.Group, s.Deaf = 1, 2
		s.Scripts = []script{{Before: func(pos int, v *serving) {
			if pos == 1 {
				<-v.Arrived
			}
		}}}
		c := s.Client(t, remote.Options{})
		defer c.Close()
		o := w.options(c)
		o.PromoteBeyond = -1
		p := Start(t.Context(), o)
		a := w.arena(t, m)
		at, _ := a.Layout().Offset(99)
		if err := p.Need(context.Background(), a, at, 1); err != nil {
			t.Error(err)
		}
		if err := p.Wait(); err != nil {
			t.Fatal(err)
		}
		w.check()
		if len(s.Promotions) < 3 {
			t.Errorf("promoted %v", s.Promotions)
		}
		if first := p.opts.Waits.First(); len(first) != 1 || !first[0].Promoted {
			t.Errorf("waits %+v", first)
		}
	})
}
