package node

import (
	"io"
	"log/slog"
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
		do    func(l *learner)
		now   float64
		want  int
		ready time.Time
	}{
		{"nothing yet", func(*learner) {}, 100, watching, time.Time{}},
		{"read just now", func(l *learner) { l.read1(at(1)) }, 2, watching, time.Time{}},
		{"quiet, no container told of", func(l *learner) { l.read1(at(1)) }, 5, isReady, at(1)},
		{"being started", func(l *learner) { l.created("a"); l.read1(at(1)) }, 100, watching, time.Time{}},
		{"started, quiet", func(l *learner) {
			l.created("a")
			l.told("a", api.Start{Started: t0})
			l.read1(at(1))
		}, 5, isReady, at(1)},
		{"probe, not ready", func(l *learner) { l.created("a"); l.told("a", probed); l.read1(at(1)) }, 100, watching, time.Time{}},
		{"probe, ready", func(l *learner) { l.created("a"); l.told("a", ready) }, 3.5, isReady, at(2)},
		{"probe, ready just now", func(l *learner) { l.created("a"); l.told("a", ready) }, 2.5, watching, time.Time{}},
		{"told in the other order", func(l *learner) { l.created("a"); l.told("a", ready); l.told("a", probed) }, 3.5, isReady, at(2)},
		{"another is told of", func(l *learner) { l.created("a"); l.told("b", ready) }, 2, watching, time.Time{}},
		{"probe, gone", func(l *learner) { l.created("a"); l.told("a", probed); l.removed("a") }, 2, givenUp, time.Time{}},
		{"ready and gone", func(l *learner) { l.created("a"); l.told("a", ready); l.removed("a") }, 2.5, isReady, at(2)},
		{"two", func(l *learner) { l.created("a"); l.told("a", ready); l.created("b") }, 3, givenUp, time.Time{}},
	} {
		l := &learner{log: recorder.NewLog(1, reportReads), woken: make(chan struct{})}
		c.do(l)
		if got, ready, _ := l.judge(at(c.now)); got != c.want || !ready.Equal(c.ready) {
			t.Errorf("%s: %d at %v, want %d at %v", c.name, got, ready, c.want, c.ready)
		}
	}
}

func (l *learner) read1(at time.Time) { l.log.Add(0, 0, 4096, at, false) }

// A learner is nobody's burden: none is wanted, or none has seen anything.
func TestLearnerEnds(t *testing.T) {
	n := &Node{opts: Options{NoReports: true}, log: slog.New(slog.NewTextHandler(io.Discard, nil)), ctx: t.Context()}
	if l := n.learn(&rootfs{}, &pull{}); l != nil || l.underway() {
		t.Error("a learner that nobody wants")
	}
	n.opts.NoReports = false
	r := &rootfs{}
	l := n.learn(r, &pull{})
	if l == nil || r.learning != l {
		t.Fatal("no learner")
	}
	if l.underway() {
		t.Error("underway, and nothing was read")
	}
	<-l.done
	n.work.Wait()
	var none *learner
	none.created("a")
	none.removed("a")
	none.stop()
}
