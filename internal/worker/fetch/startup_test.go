package fetch

import (
	"bytes"
	"context"
	"errors"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/trace"
	"hydrofoil.dev/foil/internal/worker/arena"
	"hydrofoil.dev/foil/internal/worker/remote"
)

// drawStartup draws a startup set of an image.
func drawStartup(t *rapid.T, m *image) (frames [][]trace.Run) {
	if len(m.Tree.Contents) == 0 {
		return nil
	}
	run := rapid.Custom(func(t *rapid.T) trace.Run {
		r := trace.Run{Content: rapid.Uint32Range(0, uint32(len(m.Tree.Contents)-1)).Draw(t, "content")}
		pages := trace.Pages(m.Tree.Contents[r.Content].Size)
		r.First = rapid.Uint32Range(0, pages-1).Draw(t, "first")
		r.Blocks = rapid.Uint32Range(1, min(pages-r.First, 20)).Draw(t, "blocks")
		return r
	})
	return rapid.SliceOfN(rapid.SliceOfN(run, 1, 4), 0, 3).Draw(t, "startup")
}

// damagePages damages the n-th frame of startup sets.
func damagePages(n int) func(int, []byte) []byte {
	return func(frame int, data []byte) []byte {
		if frame == n {
			data = slices.Clone(data)
			data[len(data)*2/3] ^= 0x40
		}
		return data
	}
}

// startupImage has a startup set of two frames: a small file and pages of two
// large ones, of which the second is in the set with all of its pages.
func startupImage(t *testing.T) (m *image, small, large, whole uint32) {
	f := append(files(20), blob(98, 6000), blob(99, 3<<20), blob(100, 40_000))
	m = newImage(t, f...)
	small, large, whole = m.Index(f[20]), m.Index(f[21]), m.Index(f[22])
	m.Startup = [][]trace.Run{
		{{Content: large, First: 700, Blocks: 3}, {Content: small, First: 0, Blocks: 2}, {Content: whole, First: 3, Blocks: 7}},
		{{Content: large, First: 10, Blocks: 1}, {Content: whole, First: 0, Blocks: 3}},
	}
	return m, small, large, whole
}

func startupOptions(w *worker, c *remote.Client) Options {
	o := w.options(c)
	o.Request.Image.Startup, o.Request.Image.Args = true, []string{"serve"}
	return o
}

// has reports whether a run of m is present.
func (w *worker) has(m *image, r trace.Run) bool {
	w.mu.Lock()
	a := w.arenas[m.ChainID]
	w.mu.Unlock()
	at, _ := a.Layout().Offset(int(r.Content))
	off, n := r.Range(m.Tree.Contents[r.Content].Size)
	return a.Present(at+off, n)
}

func TestStartup(t *testing.T) {
	m, small, large, whole := startupImage(t)
	with(t, m, func(t *testing.T, s *server, w *worker) {
		c := s.Client(t, remote.Options{})
		defer c.Close()
		o := startupOptions(w, c)
		var told []trace.Run // all of which are there
		var telling sync.Mutex
		o.Pages = func(origin string, runs []trace.Run) {
			telling.Lock()
			defer telling.Unlock()
			if origin != bundle.OriginTraced {
				t.Errorf("pages of %s", origin)
			}
			for _, r := range runs {
				if !w.has(m, r) {
					t.Errorf("told of %+v, which is absent", r)
				}
			}
			told = append(told, runs...)
		}
		var early []Startup
		o.Early = func(s Startup) {
			telling.Lock()
			defer telling.Unlock()
			var all []trace.Run
			for _, runs := range m.Startup {
				all = append(all, runs...)
			}
			if !cmp.Equal(trace.Merge(slices.Clone(told)), trace.Merge(all)) {
				t.Errorf("told of %v, the set has %v", told, all)
			}
			early = append(early, s)
			for _, runs := range m.Startup {
				for _, r := range runs {
					if !w.has(m, r) {
						t.Errorf("%+v is absent when the plan has come", r)
					}
				}
			}
		}
		// Only pages of the set are waited for, from the beginning. They come
		// anyway: nothing is promoted, however little may be planned before.
		o.PromoteBeyond = -1
		read := make(chan error, 1)
		s.Scripts = []script{{Early: func() {
			if err := <-read; err != nil {
				t.Error(err)
			}
		}}}
		p := Start(t.Context(), o)
		a := w.arena(t, m)
		at, _ := a.Layout().Offset(int(large))
		go func() { read <- p.Need(context.Background(), a, at+10*4096, 4096) }()
		if err := p.Wait(); err != nil {
			t.Fatal(err)
		}
		w.check()
		const raw = 3*4096 + 6000 + 40_000 + 4096
		pr := p.Progress()
		if len(early) != 1 || early[0] != pr.Startup || pr.Startup.Origin != bundle.OriginTraced || pr.Startup.Raw != raw ||
			pr.Startup.Moved < 1000 || pr.Startup.Total != raw || pr.Moved != pr.Total || pr.Written < pr.ContentHere {
			t.Errorf("told of %+v, progress %+v", early, pr)
		}
		if len(s.Promotions) != 0 || pr.Promotions != 0 {
			t.Errorf("promotions: %v", s.Promotions)
		}
		for _, c := range []uint32{small, whole} {
			content := m.Tree.Contents[c]
			for _, seg := range m.Tree.Segments[content.First : content.First+content.Segments] {
				if slices.Contains(s.Sent, seg.ID) {
					t.Errorf("content %d came as pages and as segments", c)
				}
			}
		}
		if r := s.Requests[0].Image; !r.Startup || !slices.Equal(r.Args, []string{"serve"}) {
			t.Errorf("asked for %+v", r)
		}
	})
}

// TestHere is told what of a startup set is here, before anything comes; not of pages
// that no file has.
func TestHere(t *testing.T) {
	m, small, large, _ := startupImage(t)
	for name, c := range map[string]struct {
		here []trace.Run
		want error
	}{
		"pages":         {here: []trace.Run{{Content: large, First: 20, Blocks: 7}, {Content: small, First: 1, Blocks: 1}}},
		"no such page":  {here: []trace.Run{{Content: small, First: 1, Blocks: 2}}, want: bundle.ErrCorrupt},
		"no such file":  {here: []trace.Run{{Content: 1 << 20, Blocks: 1}}, want: bundle.ErrCorrupt},
		"without pages": {here: []trace.Run{}},
	} {
		t.Run(name, func(t *testing.T) {
			m.Here = c.here
			with(t, m, func(t *testing.T, s *server, w *worker) {
				client := s.Client(t, remote.Options{})
				defer client.Close()
				o := startupOptions(w, client)
				var told []trace.Run
				var mu sync.Mutex
				o.Here = func(runs []trace.Run) {
					mu.Lock()
					defer mu.Unlock()
					told = append(told, runs...)
				}
				err := Start(t.Context(), o).Wait()
				if !errors.Is(err, c.want) || c.want == nil && !slices.Equal(told, c.here) || c.want != nil && told != nil {
					t.Errorf("told of %v, %v", told, err)
				}
			})
		})
	}
}

// TestStartupPromotes has a read wait for what is in no startup set: it is
// promoted as soon as the plan is there.
func TestStartupPromotes(t *testing.T) {
	m, _, large, _ := startupImage(t)
	with(t, m, func(t *testing.T, s *server, w *worker) {
		c := s.Client(t, remote.Options{})
		defer c.Close()
		o := startupOptions(w, c)
		o.PromoteBeyond = -1
		waiting := make(chan struct{})
		s.Scripts = []script{{
			Early: func() { <-waiting },
			Before: func(pos int, s *serving) {
				if pos == 0 {
					<-s.Arrived
				}
			},
		}}
		p := Start(t.Context(), o)
		a := w.arena(t, m)
		at, _ := a.Layout().Offset(int(large))
		read := make(chan error, 1)
		go func() { read <- p.Need(context.Background(), a, at+400*4096, 4096) }()
		until(t, "a read waits", func() bool { return p.state().Reads == 1 })
		close(waiting)
		if err := <-read; err != nil {
			t.Error(err)
		}
		if err := p.Wait(); err != nil {
			t.Fatal(err)
		}
		w.check()
	})
}

// TestEarlyPlan has reads wait while a startup set comes: what is not in it is promoted by the plan that
// came among its pages, and comes before the last of them; what is in it is not promoted.
func TestEarlyPlan(t *testing.T) {
	m, small, large, whole := startupImage(t)
	m.Startup = [][]trace.Run{
		{{Content: small, First: 0, Blocks: 2}}, {{Content: whole, First: 0, Blocks: 3}}, {{Content: large, First: 10, Blocks: 1}},
	}
	with(t, m, func(t *testing.T, s *server, w *worker) {
		c := s.Client(t, remote.Options{})
		defer c.Close()
		o := startupOptions(w, c)
		var p *Pull
		need := func(page int64) chan error {
			a := w.arena(t, m)
			at, _ := a.Layout().Offset(int(large))
			done := make(chan error, 1)
			go func() { done <- p.Need(context.Background(), a, at+page*4096, 4096) }()
			return done
		}
		start := make(chan struct{})
		var brought, lacking, another chan error
		s.Scripts = []script{{
			Behind: 3,
			Between: func(left int, serving *serving) {
				switch left {
				case 3:
					<-start
				case 2:
					<-serving.Arrived // since the first frame has come
				case 1:
					if err := <-lacking; err != nil {
						t.Error(err)
					}
					another = need(200)
					<-serving.Arrived // at once
				}
			},
			Before: func(pos int, _ *serving) {
				if pos < 2 {
					t.Errorf("%d frames came among the pages, want 2", pos)
				}
			},
		}}
		p = Start(t.Context(), o)
		brought, lacking = need(10), need(400)
		until(t, "two reads wait", func() bool { return p.state().Reads == 2 })
		close(start)
		err := p.Wait()
		if err := errors.Join(err, <-brought, <-another); err != nil {
			t.Fatal(err)
		}
		w.check()
		if len(s.Promotions) != 2 || len(s.Promotions[0]) != 1 || len(s.Promotions[1]) != 1 {
			t.Errorf("promoted %v, want two frames", s.Promotions)
		}
		if first := s.Requests[0]; !first.EarlyPlan {
			t.Error("the plan was not asked for early")
		}
	})
}

// TestEarlyPlanUnused: nothing waits, and nothing is different.
func TestEarlyPlanUnused(t *testing.T) {
	m, _, _, _ := startupImage(t)
	for behind := range 3 {
		with(t, m, func(t *testing.T, s *server, w *worker) {
			c := s.Client(t, remote.Options{})
			defer c.Close()
			s.Scripts = []script{{Behind: behind}}
			o := startupOptions(w, c)
			told := 0
			o.Early = func(startup Startup) {
				told++
				if startup.Raw != startup.Total {
					t.Errorf("told that the set has come when %d of %d bytes had", startup.Raw, startup.Total)
				}
			}
			p := Start(t.Context(), o)
			if err := p.Wait(); err != nil {
				t.Fatal(err)
			}
			w.check()
			if told != 1 || len(s.Promotions) > 0 {
				t.Errorf("told %d times, promoted %v", told, s.Promotions)
			}
		})
	}
}

// TestStartupResume cuts a stream in its startup set: what has arrived is said,
// and not sent again, also when the header leaves the TOC out.
func TestStartupResume(t *testing.T) {
	m, _, large, whole := startupImage(t)
	with(t, m, func(t *testing.T, s *server, w *worker) {
		cut := make(chan struct{})
		var p *Pull
		s.Scripts = []script{{Pages: func(frame int, data []byte) []byte {
			if frame == 1 {
				<-cut
				panic(http.ErrAbortHandler)
			}
			return data
		}}}
		c := s.Client(t, remote.Options{})
		defer c.Close()
		o := startupOptions(w, c)
		p = Start(t.Context(), o)
		w.arena(t, m)
		until(t, "first frame written", func() bool { return w.has(m, trace.Run{Content: whole, First: 3, Blocks: 7}) })
		close(cut)
		if err := p.Wait(); err != nil {
			t.Fatal(err)
		}
		w.check()
		if len(s.Requests) != 2 || len(s.Requests[1].Have) != 1 {
			t.Fatalf("requests %+v", s.Requests)
		}
		runs, _, err := trace.NextRuns(s.Requests[1].Have[0].Pages)
		if err != nil {
			t.Fatal(err)
		}
		want := []trace.Run{{Content: large, First: 700, Blocks: 3}, {Content: whole, First: 3, Blocks: 7}}
		slices.SortFunc(want, func(a, b trace.Run) int { return int(a.Content) - int(b.Content) })
		if !slices.Equal(runs, want) {
			t.Errorf("said to have %v, want %v", runs, want)
		}
		if raw := p.Progress().Startup.Raw; raw != 3*4096+6000+40_000+4096 {
			t.Errorf("%d bytes of pages were written", raw)
		}
	})
}

func TestStartupDamaged(t *testing.T) {
	m, _, large, _ := startupImage(t)
	t.Run("twice", func(t *testing.T) {
		with(t, m, func(t *testing.T, s *server, w *worker) {
			s.Scripts = []script{{Pages: damagePages(0)}, {Pages: damagePages(0)}}
			c := s.Client(t, remote.Options{})
			defer c.Close()
			p := Start(t.Context(), startupOptions(w, c))
			a := w.arena(t, m)
			at, _ := a.Layout().Offset(int(large))
			if err := p.Need(context.Background(), a, at+700*4096, 3*4096); err != nil {
				t.Error(err)
			}
			if err := p.Wait(); err != nil {
				t.Fatal(err)
			}
			w.check()
			if pr := p.Progress(); pr.Damaged == 0 || pr.Resumes == 0 {
				t.Errorf("progress %+v", pr)
			}
			if n := len(s.Requests[1].Damaged); n != 1 {
				t.Errorf("the second request names %d page runs", n)
			}
		})
	})
	t.Run("always", func(t *testing.T) {
		with(t, m, func(t *testing.T, s *server, w *worker) {
			for range 10 {
				s.Scripts = append(s.Scripts, script{Pages: damagePages(0)})
			}
			c := s.Client(t, remote.Options{})
			defer c.Close()
			err := Start(t.Context(), startupOptions(w, c)).Wait()
			if err == nil || !strings.Contains(err.Error(), "startup set") || !strings.Contains(err.Error(), "damaged") {
				t.Errorf("Wait: %v", err)
			}
		})
	})
}

// TestContradiction has a server whose pages, by a digest of their own, are not
// those of the segments.
func TestContradiction(t *testing.T) {
	m, _, large, _ := startupImage(t)
	with(t, m, func(t *testing.T, s *server, w *worker) {
		s.Scripts = []script{{Lie: true}}
		c := s.Client(t, remote.Options{})
		defer c.Close()
		err := Start(t.Context(), startupOptions(w, c)).Wait()
		if !errors.Is(err, arena.ErrContradiction) || !strings.Contains(err.Error(), "content ") || !strings.Contains(err.Error(), "image0:latest") {
			t.Errorf("Wait: %v", err)
		}
		a := w.arena(t, m)
		if !errors.Is(a.Failure(), arena.ErrContradiction) {
			t.Errorf("reads fail with %v", a.Failure())
		}
		at, _ := a.Layout().Offset(int(large))
		for i := range a.Layout().Segments() {
			seg := a.Layout().Segment(i)
			if seg.Offset <= at+700*4096 && seg.Offset+int64(seg.Length) > at+700*4096 && a.HasSegment(i) {
				t.Error("the segment is marked")
			}
		}
	})
}

// TestStartupWithoutTOC resumes in another process: the header leaves the TOC out from
// the beginning, and no pages come that were said to be here.
func TestStartupWithoutTOC(t *testing.T) {
	m, _, large, _ := startupImage(t)
	with(t, m, func(t *testing.T, s *server, w *worker) {
		l, err := arena.NewLayout(m.Tree, nil)
		if err != nil {
			t.Fatal(err)
		}
		a, err := arena.Create(filepath.Join(w.dir, m.ChainID.Encoded()), l)
		if err != nil {
			t.Fatal(err)
		}
		w.arenas[m.ChainID] = a
		content := m.Content(large)
		r := trace.Run{Content: large, First: 700, Blocks: 3}
		data := content[700*4096:][:3*4096]
		if _, err := a.WriteRun(r, segment.Sum(data), data); err != nil {
			t.Fatal(err)
		}
		c := s.Client(t, remote.Options{})
		defer c.Close()
		o := startupOptions(w, c)
		o.Request.Have = []bundle.Have{{ChainID: m.ChainID, TOC: m.TOCDigest, Present: a.PresentBitmap(), Pages: Pages(a)}}
		p := Start(t.Context(), o)
		if err := p.Wait(); err != nil {
			t.Fatal(err)
		}
		w.check()
		if raw := p.Progress().Startup.Raw; raw != 6000+40_000+4096 {
			t.Errorf("%d bytes of pages were written", raw)
		}
		b, err := os.ReadFile(filepath.Join(a.Dir(), arena.FileName))
		if err != nil || !bytes.Equal(b, w.contents(m)) {
			t.Errorf("the arena is wrong: %v", err)
		}
		// Nobody has the TOC.
		o.TOC = func(context.Context, *bundle.Image) ([]byte, error) { return nil, errors.New("no TOC") }
		o.Request.Have[0].Present, o.Request.Have[0].Pages = make([]byte, (len(m.Tree.Segments)+7)/8), nil
		if err := Start(t.Context(), o).Wait(); err == nil || !strings.Contains(err.Error(), "no TOC") {
			t.Errorf("without the TOC: %v", err)
		}
	})
}
