package fetch

import (
	"context"
	"net/http"
	"slices"
	"testing"
	"time"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/trace"
	"hydrofoil.dev/foil/internal/worker/remote"
)

// joined is startupImage with another service, whose set has a page and a file
// in common with the first one's.
func joined(t *testing.T) (m *image, large uint32) {
	m, small, large, _ := startupImage(t)
	m.Services = map[string][][]trace.Run{"other": {
		{{Content: small, First: 0, Blocks: 2}, {Content: large, First: 702, Blocks: 4}},
		{{Content: large, First: 300, Blocks: 2}},
	}}
	return m, large
}

// otherRaw are the bytes of the other service's set that the first one's lacks.
const otherRaw = 3*4096 + 2*4096

// TestJoin has a service join a pull whose plan has arrived: what its set has
// and the first one's has not comes in a stream of its own, while the first is kept
// waiting, and no read of it is promoted; one of something else is.
func TestJoin(t *testing.T) {
	m, large := joined(t)
	with(t, m, func(t *testing.T, s *server, w *worker) {
		brought, answer := make(chan struct{}), make(chan struct{})
		s.Scripts = []script{
			{Before: func(pos int, v *serving) {
				if pos == 0 {
					<-brought
					<-v.Arrived // the promotion
				}
			}},
			{Pages: func(frame int, data []byte) []byte {
				if frame == 0 {
					<-answer
				}
				return data
			}},
		}
		c := s.Client(t, remote.Options{})
		defer c.Close()
		o := startupOptions(w, c)
		o.PromoteBeyond, o.JoinPatience = -1, time.Hour
		p := Start(t.Context(), o)
		p.Join(nil, []string{"other"})
		a := w.arena(t, m)
		at, _ := a.Layout().Offset(int(large))
		first := p.Progress
		reads := make(chan error)
		read := func(page int64) { reads <- p.Need(context.Background(), a, at+page*4096, 4096) }
		go read(301)
		go read(702) // both sets have it
		go read(704)
		until(t, "they wait, and it is known what comes", func() bool {
			v := p.state()
			return v.Reads == 2 && v.Joined == 1
		})
		if len(s.Promotions) != 0 {
			t.Errorf("promoted: %v", s.Promotions)
		}
		go read(500) // no set has it
		until(t, "it is promoted", func() bool { s.Mu.Lock(); defer s.Mu.Unlock(); return len(s.Promotions) == 1 })
		close(answer)
		for range 3 {
			if err := <-reads; err != nil {
				t.Error(err)
			}
		}
		close(brought)
		if err := <-reads; err != nil {
			t.Error(err)
		}
		if err := p.Wait(); err != nil {
			t.Fatal(err)
		}
		w.check()
		if len(s.Requests) != 2 || len(s.Promotions) != 1 {
			t.Fatalf("%d requests, promotions %v", len(s.Requests), s.Promotions)
		}
		req := s.Requests[1]
		if v := req.Image; !v.Header || !v.Startup || !slices.Equal(v.Args, []string{"other"}) || v.Reference != m.Manifest.Digest.String() || req.Ahead != "stream0" {
			t.Errorf("asked for %+v", req)
		}
		if raw := first().Startup.Raw; raw != 3*4096+6000+40_000+4096+otherRaw {
			t.Errorf("%d bytes of pages were written", raw)
		}
		if pr := p.Progress(); pr.Startup.Raw != pr.Startup.Total || pr.Moved != pr.Total {
			t.Errorf("progress %+v", pr)
		}
	})
}

// TestJoinBreaks cuts and damages the streams of a service that has joined: its
// set is asked for again, and only what has not come.
func TestJoinBreaks(t *testing.T) {
	m, _ := joined(t)
	for name, pages := range map[string]func(int, []byte) []byte{
		"cut": func(frame int, data []byte) []byte {
			if frame == 1 {
				panic(http.ErrAbortHandler)
			}
			return data
		},
		"damaged": damagePages(1),
	} {
		t.Run(name, func(t *testing.T) {
			with(t, m, func(t *testing.T, s *server, w *worker) {
				brought := make(chan struct{})
				s.Scripts = []script{
					{Before: func(pos int, _ *serving) {
						if pos == 0 {
							<-brought
						}
					}},
					{Pages: pages},
				}
				c := s.Client(t, remote.Options{})
				defer c.Close()
				p := Start(t.Context(), startupOptions(w, c))
				p.Join(nil, []string{"other"})
				until(t, "all of it is here", func() bool {
					return p.Progress().Startup.Raw == 3*4096+6000+40_000+4096+otherRaw
				})
				close(brought)
				if err := p.Wait(); err != nil {
					t.Fatal(err)
				}
				w.check()
				if len(s.Requests) != 3 {
					t.Errorf("%d requests", len(s.Requests))
				}
			})
		})
	}
}

// TestJoinRefused: a server that has no set for it, or knows of no such
// requests, sends the rest as before.
func TestJoinRefused(t *testing.T) {
	m, large := joined(t)
	for name, refusal := range map[string]script{
		"invalid": {Said: &bundle.Error{Code: bundle.CodeInvalid, Message: "unknown field"}},
		"missing": {Status: http.StatusNotFound},
		"changed": {Image: func(v *bundle.Image) { v.TOCDigest = v.ChainID }},
	} {
		t.Run(name, func(t *testing.T) {
			with(t, m, func(t *testing.T, s *server, w *worker) {
				s.Scripts = []script{{Before: func(pos int, v *serving) {
					if pos == 0 {
						<-v.Arrived
					}
				}}, refusal}
				c := s.Client(t, remote.Options{})
				defer c.Close()
				o := startupOptions(w, c)
				o.PromoteBeyond = -1
				p := Start(t.Context(), o)
				p.Join(nil, []string{"other"})
				a := w.arena(t, m)
				at, _ := a.Layout().Offset(int(large))
				if err := p.Need(context.Background(), a, at+301*4096, 4096); err != nil {
					t.Error(err)
				}
				if err := p.Wait(); err != nil {
					t.Fatal(err)
				}
				w.check()
				p.Join(nil, []string{"late"}) // nobody listens
			})
		})
	}
}
