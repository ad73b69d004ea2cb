package start

import (
	"log/slog"
	"sync"
	"testing"
	"time"

	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/recorder"
)

// TestJudge: when a start counts as ready, and which are given up.
func TestJudge(t *testing.T) {
	t0 := time.Unix(1000, 0)
	at := func(s float64) time.Time { return t0.Add(time.Duration(s * float64(time.Second))) }
	probed := api.Start{Args: []string{"x"}, Started: t0, Probe: true}
	ready := probed
	ready.Ready = at(2)
	for _, c := range []struct {
		name  string
		do    func(l *Learner)
		now   float64
		want  int
		ready time.Time
	}{
		{"nothing yet", func(*Learner) {}, 100, watching, time.Time{}},
		{"read just now", func(l *Learner) { l.read1(at(1)) }, 2, watching, time.Time{}},
		{"quiet, no container told of", func(l *Learner) { l.read1(at(1)) }, 5, givenUp, time.Time{}},
		{"gone, and nobody said what ran", func(l *Learner) { l.Created("a"); l.read1(at(1)); l.Removed("a") }, 5, givenUp, time.Time{}},
		{"being started", func(l *Learner) { l.Created("a"); l.read1(at(1)) }, 100, watching, time.Time{}},
		{"started, quiet", func(l *Learner) {
			l.Created("a")
			l.Started("a", api.Start{Started: t0})
			l.read1(at(1))
		}, 5, isReady, at(1)},
		{"probe, not ready", func(l *Learner) { l.Created("a"); l.Started("a", probed); l.read1(at(1)) }, 100, watching, time.Time{}},
		{"probe, ready", func(l *Learner) { l.Created("a"); l.Started("a", ready) }, 3.5, isReady, at(2)},
		{"probe, ready just now", func(l *Learner) { l.Created("a"); l.Started("a", ready) }, 2.5, watching, time.Time{}},
		{"told in the other order", func(l *Learner) { l.Created("a"); l.Started("a", ready); l.Started("a", probed) }, 3.5, isReady, at(2)},
		{"another is told of", func(l *Learner) { l.Created("a"); l.Started("b", ready) }, 2, watching, time.Time{}},
		{"probe, gone", func(l *Learner) { l.Created("a"); l.Started("a", probed); l.Removed("a") }, 2, givenUp, time.Time{}},
		{"ready and gone", func(l *Learner) { l.Created("a"); l.Started("a", ready); l.Removed("a") }, 2.5, isReady, at(2)},
		{"two", func(l *Learner) { l.Created("a"); l.Started("a", ready); l.Created("b") }, 3, givenUp, time.Time{}},
	} {
		l := &Learner{reads: recorder.NewLog(1, reportReads), woken: make(chan struct{})}
		c.do(l)
		if got, ready, _ := l.judge(at(c.now)); got != c.want || !ready.Equal(c.ready) {
			t.Errorf("%s: %d at %v, want %d at %v", c.name, got, ready, c.want, c.ready)
		}
	}
}

func (l *Learner) read1(at time.Time) { l.reads.Add(0, 0, 4096, at, false) }

// A learner is nobody's burden: none is wanted, or none has seen anything.
func TestLearnerEnds(t *testing.T) {
	var work sync.WaitGroup
	opts := Options{Set: true, Logger: slog.New(slog.DiscardHandler), Go: func(fn func()) bool { work.Go(fn); return true }}
	if o := New(t.Context(), opts).Learn(t.Context(), nil); o != nil {
		t.Error("a learner that nobody wants")
	}
	opts.Learning = true
	l, ok := New(t.Context(), opts).Learn(t.Context(), nil).(*Learner)
	if !ok {
		t.Fatal("no learner")
	}
	if l.Watched() != nil {
		t.Error("watched, and nothing was read")
	}
	<-l.done
	work.Wait()
	l.Stop()
	opts.Go = func(func()) bool { return false }
	if o := New(t.Context(), opts).Learn(t.Context(), nil); o != nil {
		t.Error("a learner of a daemon that ends")
	}
	var none *Learner
	none.Created("a")
	none.Removed("a")
	none.Started("a", api.Start{})
	if none.Watched() != nil {
		t.Error("no learner watches")
	}
}
