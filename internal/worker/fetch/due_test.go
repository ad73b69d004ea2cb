package fetch

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/worker/remote"
)

// TestAliveIsNoProgress: a server that says for ever that it is at work, and brings nothing, is given up.
func TestAliveIsNoProgress(t *testing.T) {
	m := newImage(t, files(20)...)
	for name, stall := range map[string]func(i int, alive func()) script{
		"after the header": func(_ int, alive func()) script { return script{Early: alive} },
		"among the frames": func(i int, alive func()) script {
			return script{Before: func(pos int, _ *serving) {
				if i > 0 || pos == 1 {
					alive()
				}
			}}
		},
		"before a header that came once": func(i int, alive func()) script {
			if i == 0 {
				return script{Early: alive}
			}
			return script{Header: func(*bundle.Writer) { alive() }}
		},
	} {
		t.Run(name, func(t *testing.T) {
			with(t, m, func(t *testing.T, s *server, w *worker) {
				for i := range 100 {
					var out *bundle.Writer
					sc := stall(i, func() {
						for out.Alive() == nil {
							time.Sleep(time.Millisecond)
						}
					})
					then := sc.Header
					sc.Header = func(o *bundle.Writer) {
						if out = o; then != nil {
							then(o)
						}
					}
					s.Scripts = append(s.Scripts, sc)
				}
				c := s.Client(t, remote.Options{})
				defer c.Close()
				o := w.options(c)
				o.GiveUp = 2 * time.Second
				p := Start(t.Context(), o)
				a := w.arena(t, m)
				read := make(chan error, 1)
				go func() { read <- p.Need(t.Context(), a, 0, a.Layout().Size()) }()
				err := p.Wait()
				if !errors.Is(err, ErrUnreachable) || !errors.Is(err, remote.ErrStall) || !strings.Contains(err.Error(), "nothing but signs of life") {
					t.Errorf("Wait: %v", err)
				}
				if err := <-read; !errors.Is(err, ErrUnreachable) {
					t.Errorf("the read: %v", err)
				}
			})
		})
	}
}

// TestWhatIsHereIsNoProgress: a server that sends the same again and again is given up, in whatever way it ends its
// answers.
func TestWhatIsHereIsNoProgress(t *testing.T) {
	m := newImage(t, files(20)...)
	for name, test := range map[string]struct {
		times int    // that the frame is sent in each answer
		then  func() // nil: the protocol is broken
		want  error
	}{
		"out of turn":   {1, nil, bundle.ErrCorrupt},
		"cut":           {1, func() { panic(http.ErrAbortHandler) }, ErrUnreachable},
		"in one answer": {10_000, nil, ErrUnreachable},
	} {
		t.Run(name, func(t *testing.T) {
			with(t, m, func(t *testing.T, s *server, w *worker) {
				plan, frames := s.Plan(m, &bundle.Request{}, nil)
				first := plan.Frames[0]
				again := &bundle.Plan{
					Frames: slices.Repeat(plan.Frames[:1], test.times), Segments: slices.Repeat(plan.Segments[:first.Segments], test.times),
					ContentBytes: int64(first.RawLength) * int64(test.times),
				}
				for i := range again.Frames {
					again.Frames[i].First = uint32(i) * first.Segments
				}
				for range 1000 {
					s.Scripts = append(s.Scripts, script{Header: func(out *bundle.Writer) {
						header := m.Image
						_ = out.Image(&header)
						_ = out.Plan(again)
						for i := range again.Frames {
							if out.Frame(uint32(i), frames[0].Bytes) != nil || out.Flush() != nil {
								return
							}
							if i > 0 {
								time.Sleep(5 * time.Millisecond) // a server that takes its time
							}
						}
						if test.then != nil {
							test.then()
						}
					}})
				}
				c := s.Client(t, remote.Options{})
				defer c.Close()
				o := w.options(c)
				o.GiveUp = 2 * time.Second
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				if err := Start(ctx, o).Wait(); !errors.Is(err, test.want) {
					t.Errorf("Wait: %v, want %v", err, test.want)
				}
			})
		})
	}
}

// For an image that it has to ingest first, a server has an hour, in all its answers.
func TestIngestIsBounded(t *testing.T) {
	const giveUp = 4 * time.Minute
	for _, test := range []struct {
		elapsed time.Duration
		opened  bool
		want    time.Duration
	}{
		{0, false, time.Hour}, {50 * time.Minute, false, 10 * time.Minute}, {2 * time.Hour, false, giveUp / 2},
		{0, true, giveUp / 2}, {2 * time.Hour, true, giveUp / 2},
	} {
		if first, most := allowed(giveUp, test.elapsed, test.opened); first != test.want || most != giveUp/2 {
			t.Errorf("%+v: %v, then %v", test, first, most)
		}
	}
}

// TestEmptyAnswer: a server that answers and says nothing is asked again, and it is told why meanwhile.
func TestEmptyAnswer(t *testing.T) {
	m := newImage(t, files(20)...)
	with(t, m, func(t *testing.T, s *server, w *worker) {
		told := make(chan struct{})
		var p *Pull
		s.Scripts = []script{{Empty: true}, {Header: func(*bundle.Writer) { <-told }}}
		c := s.Client(t, remote.Options{})
		defer c.Close()
		p = Start(t.Context(), w.options(c))
		until(t, "why it is asked again is told", func() bool { return p.Progress().Trouble == ErrEmpty.Error() })
		close(told)
		if err := p.Wait(); err != nil {
			t.Fatal(err)
		}
		w.check()
	})
}
