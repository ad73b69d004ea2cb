package fetch

import (
	"context"
	"slices"
	"testing"

	"hydrofoil.dev/foil/internal/worker/remote"
)

// What comes another way is skipped; where frames that are wanted hold some of it, the image is asked
// for once more. What does not come another way after all is asked for.
func TestElsewhere(t *testing.T) {
	m := newImage(t, files(60)...) // 20 frames of 3 segments
	third := func(absent []int) (list []int) {
		for i := range len(absent) / 3 {
			list = append(list, absent[3*i])
		}
		return list
	}
	for name, c := range map[string]struct {
		elsewhere func(absent []int) []int
		bring     bool // it does not come after all
		requests  int
		missing   int
	}{
		"nothing":               {elsewhere: func([]int) []int { return nil }, requests: 1},
		"all":                   {elsewhere: func(absent []int) []int { return absent }, requests: 1, missing: 60},
		"frames":                {elsewhere: func(absent []int) []int { return absent[:30] }, requests: 1, missing: 30},
		"frames, and not":       {elsewhere: func(absent []int) []int { return absent[:30] }, bring: true, requests: 1},
		"some of each":          {elsewhere: third, requests: 2, missing: 20},
		"some of each, and not": {elsewhere: third, bring: true, requests: 3},
	} {
		t.Run(name, func(t *testing.T) {
			with(t, m, func(t *testing.T, s *server, w *worker) {
				conn := s.Client(t, remote.Options{})
				defer conn.Close()
				var p *Pull
				var list []int
				started := make(chan struct{})
				if c.bring {
					s.Scripts = make([]script, c.requests)
					s.Scripts[min(1, c.requests-1)].Before = func(pos int, serving *serving) {
						if pos != 1 {
							return
						}
						<-started
						p.Bring(list)
						if c.requests == 1 {
							<-serving.Arrived // a promotion
						}
					}
				}
				o := w.options(conn)
				asked := 0
				o.Elsewhere = func(_ context.Context, absent []int) []int {
					asked++
					list = c.elsewhere(slices.Clone(absent))
					return list
				}
				p = Start(t.Context(), o)
				close(started)
				if err := p.Wait(); err != nil {
					t.Fatal(err)
				}
				a := w.arena(t, m)
				if n := a.Missing(); n != c.missing || len(s.Requests) != c.requests || asked != 1 {
					t.Errorf("%d segments are missing after %d requests, of which %d chose; want %d after %d", n, len(s.Requests), asked, c.missing, c.requests)
				}
				for _, i := range list {
					if c.missing > 0 && a.HasSegment(i) {
						t.Errorf("segment %d has come, which was to come another way", i)
					}
				}
				if c.missing == 0 {
					w.check()
				}
				if pr := p.Progress(); pr.Moved != pr.Total || pr.Resumes != 0 {
					t.Errorf("progress %+v", pr)
				}
			})
		})
	}
}

// What another pull wants first comes next, in its order, once there is a plan.
func TestHurry(t *testing.T) {
	m := newImage(t, files(60)...) // 20 frames of 3 segments
	with(t, m, func(t *testing.T, s *server, w *worker) {
		conn := s.Client(t, remote.Options{})
		defer conn.Close()
		started := make(chan *Pull, 1)
		s.Scripts = []script{{Before: func(pos int, serving *serving) {
			if pos != 2 {
				return
			}
			p := <-started
			p.Hurry([]int{50, 40, 41})
			<-serving.Arrived
		}}}
		p := Start(t.Context(), w.options(conn))
		started <- p
		if err := p.Wait(); err != nil {
			t.Fatal(err)
		}
		w.check()
		frame := func(i int) uint32 { return uint32(i / 3) }
		if len(s.Promotions) != 1 || !slices.Equal(s.Promotions[0], []uint32{frame(50), frame(40)}) {
			t.Errorf("promoted %v", s.Promotions)
		}
	})
}
