package fetch

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/worker/arena"
	"hydrofoil.dev/foil/internal/worker/remote"
	"hydrofoil.dev/foil/internal/worker/remote/remotetest"
)

// with runs f with a server and a worker, and checks that no goroutine is left
// behind.
func with(t *testing.T, m *image, f func(t *testing.T, s *server, w *worker)) {
	t.Helper()
	s := newServer(m)
	w := newWorker(t, s, t.TempDir())
	f(t, s, w)
	w.close()
	s.Close()
	remotetest.NoneLeft(t, "worker/fetch.")
}

// until waits for a condition.
func until(t *testing.T, what string, f func() bool) {
	t.Helper()
	for range 12_000 {
		if f() {
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
	t.Fatalf("not in a minute: %s", what)
}

// arena waits until m has been opened.
func (w *worker) arena(t *testing.T, m *image) *arena.Arena {
	t.Helper()
	until(t, "opened", func() bool { w.mu.Lock(); defer w.mu.Unlock(); return w.arenas[m.ChainID] != nil })
	return w.arenas[m.ChainID]
}

// sentFrames waits until the server has sent n frames.
func sentFrames(t *testing.T, s *server, n int) {
	t.Helper()
	until(t, "frames sent", func() bool { s.Mu.Lock(); defer s.Mu.Unlock(); return s.Frames >= n })
}

// files returns n contents of some kilobytes.
func files(n int) [][]byte {
	var all [][]byte
	for i := range n {
		all = append(all, blob(uint64(i), 100+i*137%9000))
	}
	return all
}

func TestPull(t *testing.T) {
	m := newImage(t, append(files(50), blob(99, 3<<20), make([]byte, 5000))...)
	with(t, m, func(t *testing.T, s *server, w *worker) {
		c := s.Client(t, remote.Options{})
		defer c.Close()
		p := Start(t.Context(), w.options(c))
		if err := p.Wait(); err != nil {
			t.Fatal(err)
		}
		w.check()
		pr := p.Progress()
		if pr.Moved != pr.Total || pr.Moved == 0 || pr.ContentHere != pr.ContentTotal || pr.Resumes != 0 {
			t.Errorf("progress %+v", pr)
		}
		// What is complete is durable: it needs no presence map.
		a := w.arena(t, m)
		if err := a.Close(); err != nil {
			t.Fatal(err)
		}
		if err := os.Remove(filepath.Join(a.Dir(), "presence")); err != nil {
			t.Fatal(err)
		}
		durable, err := arena.Open(a.Dir(), a.Layout())
		if err != nil {
			t.Fatal(err)
		}
		w.arenas[m.ChainID] = durable
		if !durable.Complete() {
			t.Errorf("%d segments are not durable", durable.Missing())
		}
		// Another pull of the same finds nothing to do, on the same connection.
		o := w.options(c)
		o.Request.Have = []bundle.Have{{ChainID: m.ChainID, TOC: m.TOCDigest}}
		again := Start(t.Context(), o)
		if err := again.Wait(); err != nil {
			t.Fatal(err)
		}
		if n := again.Progress().Frames; n != 0 {
			t.Errorf("%d frames were sent again", n)
		}
	})
}

// TestResume breaks streams in every way and at every place of the protocol.
func TestResume(t *testing.T) {
	m := newImage(t, files(20)...)
	for _, how := range []string{"reset", "close", "stall"} {
		for _, at := range []int64{1, 10, 100, int64(len(m.TOC)), 15000, 20000} {
			t.Run(fmt.Sprintf("%s at %d", how, at), func(t *testing.T) {
				with(t, m, func(t *testing.T, s *server, w *worker) {
					s.Scripts = []script{{CutAt: at, How: how}, {CutAt: at + 3, How: how}}
					c := s.Client(t, remote.Options{StallTimeout: 50 * time.Millisecond})
					defer c.Close()
					p := Start(t.Context(), w.options(c))
					if err := p.Wait(); err != nil {
						t.Fatal(err)
					}
					w.check()
					if w.opened.Load() != 1 {
						t.Errorf("opened %d times", w.opened.Load())
					}
					if p.Progress().Resumes == 0 {
						t.Error("nothing was resumed")
					}
					for _, r := range s.Requests[1:] {
						if ref := r.Image.Reference; len(r.Have) > 0 && ref != m.Manifest.Digest.String() {
							t.Errorf("resumed as %q", ref)
						}
					}
				})
			})
		}
	}
}

// While a pull tries again, it says why; when something comes, or it has ended, no more.
func TestTrouble(t *testing.T) {
	m := newImage(t, files(20)...)
	with(t, m, func(t *testing.T, s *server, w *worker) {
		asked, answer := make(chan struct{}), make(chan struct{})
		s.Scripts = []script{{CutAt: 1, How: "close"}, {Header: func(*bundle.Writer) {
			close(asked)
			<-answer
		}}}
		c := s.Client(t, remote.Options{})
		defer c.Close()
		p := Start(t.Context(), w.options(c))
		<-asked
		if p.Progress().Trouble == "" { // an EOF, or a pipe that is closed
			t.Error("no trouble while the pull tries again")
		}
		close(answer)
		if err := p.Wait(); err != nil {
			t.Fatal(err)
		}
		if got := p.Progress().Trouble; got != "" {
			t.Errorf("trouble %q at the end", got)
		}
		w.check()
	})
}

// TestSlowServer has every stream bring nothing for longer than the client would
// wait at first: asked the same again, it is given more time.
func TestSlowServer(t *testing.T) {
	m := newImage(t, files(20)...)
	with(t, m, func(t *testing.T, s *server, w *worker) {
		for range 20 {
			s.Scripts = append(s.Scripts, script{Early: func() { time.Sleep(300 * time.Millisecond) }})
		}
		c := s.Client(t, remote.Options{StallTimeout: 50 * time.Millisecond})
		defer c.Close()
		p := Start(t.Context(), w.options(c))
		if err := p.Wait(); err != nil {
			t.Fatal(err)
		}
		w.check()
		if n := p.Progress().Resumes; n == 0 || n > 5 {
			t.Errorf("resumed %d times", n)
		}
	})
}

// TestServerAtWork: a pull reads over what says that the server is at work.
func TestServerAtWork(t *testing.T) {
	m := newImage(t, files(20)...)
	with(t, m, func(t *testing.T, s *server, w *worker) {
		s.Scripts = []script{{Header: func(out *bundle.Writer) {
			for range 300 {
				out.Alive() //nolint:errcheck // the worker, if it has gone, fails the test
			}
		}}}
		c := s.Client(t, remote.Options{})
		defer c.Close()
		p := Start(t.Context(), w.options(c))
		if err := p.Wait(); err != nil {
			t.Fatal(err)
		}
		w.check()
		if n := p.Progress().Resumes; n != 0 {
			t.Errorf("resumed %d times", n)
		}
	})
}

// TestNothingTwice checks that a resumed stream brings only what is missing.
func TestNothingTwice(t *testing.T) {
	m := newImage(t, files(100)...)
	with(t, m, func(t *testing.T, s *server, w *worker) {
		s.Scripts = []script{{CutAt: int64(len(m.TOC)) + 150000}, {CutAt: 100000}}
		c := s.Client(t, remote.Options{})
		defer c.Close()
		p := Start(t.Context(), w.options(c))
		if err := p.Wait(); err != nil {
			t.Fatal(err)
		}
		w.check()
		sent := map[segment.ID]int{}
		for _, id := range s.Sent {
			sent[id]++
		}
		twice := 0
		for _, n := range sent {
			twice += n - 1
		}
		if limit := 2 * s.Group; twice > limit {
			t.Errorf("%d segments were sent twice, at most the frames that were cut (%d segments) should be", twice, limit)
		}
	})
}

// TestAnything is the property: whatever goes wrong on the way, in the end the
// arena holds the contents.
func TestAnything(t *testing.T) {
	dir := t.TempDir()
	rapid.Check(t, func(t *rapid.T) {
		tmp, err := os.MkdirTemp(dir, "")
		if err != nil {
			t.Fatal(err)
		}
		defer os.RemoveAll(tmp)
		// Few seeds, so that contents are equal.
		type content struct {
			seed uint64 // 0: zeros
			size int
		}
		contents := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) content {
			return content{rapid.Uint64Range(0, 6).Draw(t, "seed"), rapid.SampledFrom([]int{1, 100, 4096, 5000, 20000, 1100000}).Draw(t, "size")}
		}), 1, 10)
		var files [][]byte
		for _, c := range contents.Draw(t, "files") {
			if c.seed == 0 {
				files = append(files, make([]byte, c.size))
			} else {
				files = append(files, blob(c.seed, c.size))
			}
		}
		m := newImage(t, files...)
		m.Startup = drawStartup(t, m)
		s := newServer(m)
		defer s.Close()
		s.Group = rapid.IntRange(1, 5).Draw(t, "group")
		s.Scripts = rapid.SliceOfN(rapid.Custom(func(t *rapid.T) script {
			sc := script{
				CutAt:   int64(rapid.OneOf(rapid.IntRange(1, 2000), rapid.IntRange(1, 1000000)).Draw(t, "cut")),
				How:     rapid.SampledFrom([]string{"reset", "close", "stall"}).Draw(t, "how"),
				Shuffle: rapid.Uint64Range(0, 3).Draw(t, "shuffle"),
				Behind:  rapid.IntRange(0, 3).Draw(t, "pages after the plan"),
			}
			if rapid.IntRange(0, 3).Draw(t, "damage") == 0 {
				sc.Damage = map[int]bool{rapid.IntRange(0, 5).Draw(t, "damaged"): true}
			}
			if rapid.IntRange(0, 3).Draw(t, "damage pages") == 0 {
				sc.Pages = damagePages(rapid.IntRange(0, 2).Draw(t, "damaged pages"))
			}
			return sc
		}), 0, 5).Draw(t, "scripts")
		c := s.Client(t, remote.Options{StallTimeout: stallTimeout})
		defer c.Close()
		w := newWorker(t, s, tmp)
		defer w.close()
		// A content may be used in place from elsewhere: the server sends it all
		// the same here, and it must not harm.
		left := rapid.IntRange(0, 7).Draw(t, "left out")
		w.in = func(_ *image, content int) bool { return content%8 != left }
		o := w.options(c)
		o.Request.Image.Startup = rapid.Bool().Draw(t, "startup")
		o.Attempts = 10
		p := Start(context.Background(), o)
		// Readers that come at any time get the right bytes.
		var readers sync.WaitGroup
		at := rapid.SliceOfN(rapid.IntRange(0, 100), 0, 10).Draw(t, "reads at percent")
		readers.Go(func() {
			for w.opened.Load() == 0 {
				select {
				case <-p.done:
					return
				case <-time.After(time.Millisecond):
				}
			}
			a := w.arenas[m.ChainID]
			want := w.contents(m)
			for _, percent := range at {
				off := int64(percent) * a.Layout().Size() / 101
				n := min(10000, a.Layout().Size()-off)
				readers.Go(func() {
					if err := p.Need(context.Background(), a, off, n); err != nil {
						t.Errorf("need: %v", err)
						return
					}
					got := make([]byte, n)
					if _, err := a.File().ReadAt(got, off); err != nil || !bytes.Equal(got, want[off:off+n]) {
						t.Errorf("bytes %d to %d are wrong: %v", off, off+n, err)
					}
				})
			}
		})
		err = p.Wait()
		readers.Wait()
		if err != nil {
			t.Fatal(err)
		}
		w.check()
	})
	remotetest.NoneLeft(t, "worker/fetch.")
}

func TestDamaged(t *testing.T) {
	m := newImage(t, files(30)...)
	with(t, m, func(t *testing.T, s *server, w *worker) {
		s.Scripts = []script{{Damage: map[int]bool{0: true, 4: true}}, {Damage: map[int]bool{0: true}}}
		c := s.Client(t, remote.Options{})
		defer c.Close()
		p := Start(t.Context(), w.options(c))
		if err := p.Wait(); err != nil {
			t.Fatal(err)
		}
		w.check()
		if pr := p.Progress(); pr.Damaged < 3 || len(s.Requests) != 3 {
			t.Errorf("%d damaged, %d requests", pr.Damaged, len(s.Requests))
		}
		// The server is told of each, once.
		for i, want := range []int{0, 2, 1} {
			damaged := s.Requests[i].Damaged
			if len(damaged) != want {
				t.Errorf("request %d names %d segments, want %d", i, len(damaged), want)
			}
			for _, id := range damaged {
				if !slices.Contains(s.Sent, id) {
					t.Errorf("request %d names %s, which nobody sent", i, id)
				}
			}
		}
	})
}

// TestDamagedAlways has one segment wrong on the server itself.
func TestDamagedAlways(t *testing.T) {
	m := newImage(t, files(30)...)
	bad := m.Tree.Segments[7].ID
	m.Data[bad] = append([]byte{1}, m.Data[bad][1:]...)
	m.Data[bad][0] ^= 0xff
	with(t, m, func(t *testing.T, s *server, w *worker) {
		c := s.Client(t, remote.Options{})
		defer c.Close()
		p := Start(t.Context(), w.options(c))
		err := p.Wait()
		if !errors.Is(err, arena.ErrWrongBytes) || !strings.Contains(err.Error(), bad.String()) ||
			!strings.Contains(err.Error(), "image0:latest") || !strings.Contains(err.Error(), "frame ") ||
			!errors.Is(err, ErrDamaged) || !strings.Contains(err.Error(), "push the image again") {
			t.Errorf("Wait: %v", err)
		}
		for i, want := range [][]segment.ID{nil, {bad}, {bad}} {
			if d := cmp.Diff(want, s.Requests[i].Damaged); d != "" {
				t.Errorf("request %d names (-want +got):\n%s", i, d)
			}
		}
		a := w.arena(t, m)
		k, _ := a.Layout().FromTOC(7)
		if a.HasSegment(k) {
			t.Error("the wrong segment is present")
		}
		piece := a.Layout().Segment(k)
		if err := a.Wait(t.Context(), piece.Offset, 1); !errors.Is(err, arena.ErrWrongBytes) {
			t.Errorf("a read of it: %v", err)
		}
	})
}

func TestFinal(t *testing.T) {
	m := newImage(t, files(30)...)
	other := newImage(t, files(3)...)
	for name, tc := range map[string]struct {
		script   script
		want     string
		requests int
	}{
		"not found":     {script{Status: 404}, "no such image", 1},
		"refused":       {script{Said: &bundle.Error{Code: bundle.CodeUnauthorized, Message: "not you"}}, "not you", 1},
		"wrong TOC":     {script{Image: func(m *bundle.Image) { m.TOC = other.TOC }}, "TOC has digest", 3},
		"TOC of others": {script{Image: func(m *bundle.Image) { m.TOC, m.TOCDigest = other.TOC, other.TOCDigest }}, "want " + m.ChainID.String(), 3},
		"wrong config":  {script{Image: func(m *bundle.Image) { m.Config = other.Config }}, "config", 3},
		"wrong plan":    {script{Plan: func(p *bundle.Plan) { p.Segments[0], p.Segments[20] = p.Segments[20], p.Segments[0] }}, "plan", 3},
		"segments lost": {script{Leave: map[segment.ID]bool{m.Tree.Segments[3].ID: true}}, "lacks 1 segments", 3},
		"corrupt there": {script{Said: &bundle.Error{Code: bundle.CodeCorrupt, Message: "a pack is damaged"}}, "a pack is damaged", 3},
	} {
		t.Run(name, func(t *testing.T) {
			with(t, m, func(t *testing.T, s *server, w *worker) {
				for range 20 {
					s.Scripts = append(s.Scripts, tc.script)
				}
				c := s.Client(t, remote.Options{})
				defer c.Close()
				err := Start(t.Context(), w.options(c)).Wait()
				if err == nil || !strings.Contains(err.Error(), tc.want) || !strings.Contains(err.Error(), "pull image0:latest: ") {
					t.Errorf("Wait: %v, want %q", err, tc.want)
				}
				if len(s.Requests) != tc.requests {
					t.Errorf("%d requests, want %d", len(s.Requests), tc.requests)
				}
				for _, a := range w.arenas {
					if a.Failure() == nil {
						t.Error("reads go on waiting")
					}
				}
			})
		})
	}
}

// TestChangedTOC has the server make another TOC of the same rootfs between two
// streams.
func TestChangedTOC(t *testing.T) {
	m := newImage(t, files(30)...)
	changed := newImage(t, files(29)...)
	changed.As(t, m)
	with(t, m, func(t *testing.T, s *server, w *worker) {
		s.Scripts = []script{{CutAt: 50000}, {Image: func(i *bundle.Image) {
			i.TOC, i.TOCDigest, i.Segments = changed.TOC, changed.TOCDigest, changed.Segments
		}}}
		c := s.Client(t, remote.Options{})
		defer c.Close()
		err := Start(t.Context(), w.options(c)).Wait()
		if err == nil || !strings.Contains(err.Error(), "the server now has TOC") {
			t.Errorf("Wait: %v", err)
		}
	})
}

func TestGiveUp(t *testing.T) {
	m := newImage(t, files(30)...)
	t.Run("after the header", func(t *testing.T) {
		with(t, m, func(t *testing.T, s *server, w *worker) {
			s.Scripts = []script{{CutAt: 60000, How: "close", Before: func(pos int, _ *serving) {
				if pos == 3 {
					s.Pipes.Close() // nobody answers any more
				}
			}}}
			c := s.Client(t, remote.Options{})
			defer c.Close()
			began := time.Now()
			o := w.options(c)
			o.GiveUp = time.Second
			p := Start(t.Context(), o)
			a := w.arena(t, m)
			read := make(chan error, 1)
			go func() { read <- p.Need(t.Context(), a, 0, a.Layout().Size()) }()
			err := p.Wait()
			if !errors.Is(err, unix.ECONNREFUSED) || !errors.Is(err, ErrUnreachable) || !strings.Contains(err.Error(), "for 1s") {
				t.Errorf("Wait: %v", err)
			}
			if took := time.Since(began); took < time.Second {
				t.Errorf("gave up after %v", took)
			}
			if err := <-read; !errors.Is(err, unix.ECONNREFUSED) {
				t.Errorf("the read: %v", err)
			}
			if w := p.opts.Waits.First(); len(w) != 1 || w[0].Err == nil {
				t.Errorf("waits %v", w)
			}
			// The pull can be started again.
			s2 := newServer(m)
			defer s2.Close()
			c2 := s2.Client(t, remote.Options{})
			defer c2.Close()
			o = w.options(c2)
			o.Request.Have = []bundle.Have{{ChainID: m.ChainID, TOC: m.TOCDigest, Present: a.PresentBitmap()}}
			if err := Start(t.Context(), o).Wait(); err != nil {
				t.Fatal(err)
			}
			w.check()
			if a.Failure() != nil {
				t.Error("the arena is still failed")
			}
		})
	})
	t.Run("before the header", func(t *testing.T) {
		with(t, m, func(t *testing.T, s *server, w *worker) {
			s.Pipes.Close()
			c := s.Client(t, remote.Options{})
			defer c.Close()
			o := w.options(c)
			o.GiveUpUnopened = 100 * time.Millisecond
			err := Start(t.Context(), o).Wait()
			if !errors.Is(err, unix.ECONNREFUSED) || !strings.Contains(err.Error(), "http://server.test") {
				t.Errorf("Wait: %v", err)
			}
		})
	})
}

func TestOpenFails(t *testing.T) {
	m := newImage(t, files(3)...)
	with(t, m, func(t *testing.T, s *server, w *worker) {
		c := s.Client(t, remote.Options{})
		defer c.Close()
		o := w.options(c)
		o.Open = func(context.Context, *bundle.Image, *toc.TOC) (*arena.Arena, error) { return nil, fs.ErrPermission }
		if err := Start(t.Context(), o).Wait(); !errors.Is(err, fs.ErrPermission) || len(s.Requests) != 1 {
			t.Errorf("Wait: %v after %d requests", err, len(s.Requests))
		}
		// Nothing is to be fetched.
		o.Open = func(context.Context, *bundle.Image, *toc.TOC) (*arena.Arena, error) { return nil, nil }
		if err := Start(t.Context(), o).Wait(); err != nil {
			t.Errorf("Wait: %v", err)
		}
	})
}

func TestStop(t *testing.T) {
	m := newImage(t, files(30)...)
	with(t, m, func(t *testing.T, s *server, w *worker) {
		s.Scripts = []script{{CutAt: 60000, How: "stall"}}
		c := s.Client(t, remote.Options{})
		defer c.Close()
		p := Start(t.Context(), w.options(c))
		until(t, "opened", func() bool { return w.opened.Load() == 1 })
		p.Stop()
		if err := p.Wait(); !errors.Is(err, ErrStopped) {
			t.Errorf("Wait: %v", err)
		}
		a := w.arena(t, m)
		if a.Failure() != nil || a.Complete() {
			t.Errorf("failure %v, complete %v", a.Failure(), a.Complete())
		}
	})
}

// TestNeed has a reader ask for the last content while the server is at the
// first.
func TestNeed(t *testing.T) {
	m := newImage(t, files(100)...)
	with(t, m, func(t *testing.T, s *server, w *worker) {
		s.Group = 1
		resume := make(chan struct{})
		s.Scripts = []script{{Before: func(pos int, sv *serving) {
			if pos == 1 {
				<-sv.Arrived
			}
			if pos >= 3 { // promoted frames count
				<-resume
			}
		}}}
		c := s.Client(t, remote.Options{})
		defer c.Close()
		o := w.options(c)
		o.PromoteBeyond = 1000
		p := Start(t.Context(), o)
		sentFrames(t, s, 1)
		a := w.arena(t, m)
		l := a.Layout()
		at := func(i int) int64 { off, _ := l.Offset(i); return off }
		var readers sync.WaitGroup
		for range 10 {
			readers.Go(func() {
				if err := p.Need(t.Context(), a, at(99), 10); err != nil {
					t.Error(err)
				}
			})
		}
		readers.Go(func() {
			if err := p.Need(t.Context(), a, at(1), 1); err != nil { // comes anyway
				t.Error(err)
			}
		})
		readers.Wait()
		if !a.Present(at(99), 10) || a.Complete() {
			t.Error("the last content did not come first")
		}
		close(resume)
		if err := p.Wait(); err != nil {
			t.Fatal(err)
		}
		w.check()
		pr := p.Progress()
		// One promotion for all ten. What lies next to the last content comes before the second one, so
		// that this is promoted as well when it is read later.
		if waits, _ := p.opts.Waits.Total(); waits != 11 || len(s.Promotions) == 0 || len(s.Promotions) > 2 {
			t.Errorf("%d waits, %d promotions in %v", waits, pr.Promotions, s.Promotions)
		}
		for _, frames := range s.Promotions {
			if !slices.Contains(frames[:2], 99) {
				t.Errorf("promoted %v, want the last content first", frames)
			}
		}
		if err := p.Need(t.Context(), a, 0, l.Size()); err != nil {
			t.Errorf("Need of what is here: %v", err)
		}
	})
}

// TestNeedAfterCut checks that what readers wait for is asked for first when a
// stream is resumed.
func TestNeedAfterCut(t *testing.T) {
	m := newImage(t, files(100)...)
	with(t, m, func(t *testing.T, s *server, w *worker) {
		s.Group = 1
		cut, resume := make(chan struct{}), make(chan struct{})
		s.Scripts = []script{
			{Before: func(pos int, _ *serving) {
				if pos == 2 {
					<-cut
				}
			}, CutAt: int64(len(m.TOC)) + 5000},
			{Before: func(pos int, sv *serving) {
				if pos == 0 {
					<-sv.Arrived
				}
				if pos == 2 {
					<-resume
				}
			}},
		}
		c := s.Client(t, remote.Options{})
		defer c.Close()
		o := w.options(c)
		o.PromoteBeyond = 1000
		p := Start(t.Context(), o)
		sentFrames(t, s, 2)
		a := w.arena(t, m)
		off, _ := a.Layout().Offset(99)
		read := make(chan error, 1)
		go func() { read <- p.Need(t.Context(), a, off, 1) }()
		until(t, "promoted", func() bool { s.Mu.Lock(); defer s.Mu.Unlock(); return len(s.Promotions) == 1 })
		close(cut)
		if err := <-read; err != nil {
			t.Error(err)
		}
		if a.Complete() {
			t.Error("it did not come first")
		}
		close(resume)
		if err := p.Wait(); err != nil {
			t.Fatal(err)
		}
		w.check()
	})
}

// TestNeedDamaged checks that a read does not wait for the end of the stream
// when its frame arrived damaged.
func TestNeedDamaged(t *testing.T) {
	m := newImage(t, files(100)...)
	with(t, m, func(t *testing.T, s *server, w *worker) {
		s.Group = 1
		s.Scripts = []script{{Damage: map[int]bool{0: true}, Before: func(pos int, sv *serving) {
			if pos == 5 {
				<-sv.Arrived // never: the worker ends this stream
			}
		}}}
		// The server's handler waits without looking at its request.
		unblock := func() {
			s.Mu.Lock()
			defer s.Mu.Unlock()
			for _, sv := range s.Running {
				sv.Arrived <- struct{}{}
			}
		}
		c := s.Client(t, remote.Options{})
		defer c.Close()
		p := Start(t.Context(), w.options(c))
		sentFrames(t, s, 5)
		a := w.arena(t, m)
		if err := p.Need(t.Context(), a, 0, 1); err != nil {
			t.Error(err)
		}
		unblock()
		if err := p.Wait(); err != nil {
			t.Fatal(err)
		}
		w.check()
	})
}

// TestFullDisk has the arena on a filesystem that fills up.
func TestFullDisk(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=1m"); err != nil {
		t.Skipf("mounting a small filesystem needs root: %v", err)
	}
	defer unix.Unmount(dir, unix.MNT_DETACH)
	m := newImage(t, blob(1, 1<<20), blob(2, 1<<20), blob(3, 1<<20))
	s := newServer(m)
	defer s.Close()
	w := newWorker(t, s, dir)
	defer w.close()
	c := s.Client(t, remote.Options{})
	defer c.Close()
	err := Start(t.Context(), w.options(c)).Wait()
	if !errors.Is(err, unix.ENOSPC) || !strings.Contains(err.Error(), "foil rm") {
		t.Errorf("Wait: %v", err)
	}
	a := w.arena(t, m)
	if err := a.Verify(t.Context(), func(c arena.Checked) error { return c.Err }); err != nil {
		t.Errorf("what is present is wrong: %v", err)
	}
	if err := a.Wait(t.Context(), 0, a.Layout().Size()); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("a read: %v", err)
	}
}

// FuzzStream has a server that sends anything. Whatever it is, the worker comes
// to an end, and what it then has is right.
func FuzzStream(f *testing.F) {
	m := newImage(f, append(files(6), blob(9, 1100000), make([]byte, 5000))...)
	s := newServer(m)
	f.Cleanup(s.Close)
	var whole bytes.Buffer
	out := bundle.NewWriter(&whole)
	out.Hello(bundle.Hello{Version: 1, Stream: "s"})
	out.Image(&m.Image)
	plan, frames := s.Plan(m, &bundle.Request{}, nil)
	out.Plan(plan)
	for i, frame := range frames {
		out.Frame(uint32(i), frame.Bytes)
	}
	out.End()
	header := bytes.Index(whole.Bytes(), m.TOC) + len(m.TOC)
	f.Add(uint32(0), []byte{}, uint32(0))
	f.Add(uint32(header+5), []byte{1, 2, 3}, uint32(0))
	f.Add(uint32(header+6), []byte{0xff}, uint32(1))
	f.Add(uint32(whole.Len()-1000), []byte("other bytes"), uint32(3))
	// Fuzzed bytes replace some of a stream that is right, so that they get far.
	f.Fuzz(func(t *testing.T, at uint32, b []byte, drop uint32) {
		from := min(int(at), whole.Len())
		to := min(from+int(drop), whole.Len())
		data := slices.Concat(whole.Bytes()[:from], b, whole.Bytes()[to:])
		w := newWorker(t, s, t.TempDir())
		defer w.close()
		p := newPull(t.Context(), w.options(nil))
		p.pipe.work.Go(p.pipe.worker)
		st := &stream{p: p, cancel: p.cancel, due: due{p: p, resp: new(remote.Stream)}}
		err := st.read(p.ctx, bytes.NewReader(data), &p.opts.Request)
		st.end()
		st.jobs.Wait()
		close(p.pipe.jobs)
		p.pipe.work.Wait()
		for _, a := range w.arenas {
			if err := a.Verify(t.Context(), func(c arena.Checked) error { return c.Err }); err != nil {
				t.Error(err)
			}
			if err == nil && st.bad == 0 && p.ctx.Err() == nil && !a.Complete() {
				t.Errorf("the stream came to its end, %d segments are missing", a.Missing())
			}
		}
	})
}
