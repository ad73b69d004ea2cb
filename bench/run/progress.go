package run

import (
	"fmt"
	"strings"
	"time"

	"hydrofoil.dev/foil/bench/engines"
	"hydrofoil.dev/foil/bench/results"
	"hydrofoil.dev/foil/bench/workloads"
)

// progress estimates how long the rest will take: as much longer than foreseen as
// the sessions so far.
type progress struct {
	left            int
	rest            time.Duration // foreseen of what is left
	foreseen, spent time.Duration // of what is done
}

func (p *progress) ended(foreseen, took time.Duration) {
	p.left--
	p.rest -= foreseen
	p.foreseen += foreseen
	p.spent += took
}

func (p *progress) String() string {
	rest := p.rest
	if p.foreseen > 0 {
		rest = time.Duration(float64(rest) * float64(p.spent) / float64(p.foreseen))
	}
	return fmt.Sprintf("[%d to go, about %v] ", p.left, rest.Round(time.Second))
}

// What a run takes besides its bytes: daemons start and stop, caches are dropped,
// every byte is verified, and the worker is removed. Measured on two cores.
const (
	aroundRun   = 4 * time.Second
	aroundRound = 20 * time.Second // the link is made and tried
	aroundWarm  = 2 * time.Second  // of an image in a round, whose warm start is measured
	localRate   = 1e9              // bits a second, of a link without limits
)

// untilReady is the part of an image that comes down the line until a lazy engine
// stops at ready: a guess, and on the safe side for most.
const untilReady = 0.25

// foresee is how long a session will take, if the machine is idle.
func (m *matrix) foresee(s session) (took time.Duration) {
	for i, k := range s.keys {
		layers := float64(s.versions[i].Built.LayerBytes())
		switch {
		case strings.HasPrefix(k.Engine, "hydrofoil") && k.Kind == results.Update:
			layers *= 0.3 // what differs
		case strings.HasPrefix(k.Engine, "hydrofoil"):
			layers *= 0.9
		}
		if m.stops(s, i) {
			layers *= untilReady
		}
		if workloads.For(k.Image, s.versions[i].Ready.Probe) != nil {
			took += m.Load
		}
		rate := float64(k.Rate)
		if rate == 0 || rate > localRate {
			rate = localRate
		}
		// Half a dozen round trips and the ends of transfers.
		if m.hurries(s, i) {
			took += time.Duration(layers * (1 - untilReady) * 8 / localRate * float64(time.Second))
			layers *= untilReady
		}
		took += aroundRun + 6*k.RTT + time.Duration(layers*8*1.1/rate*float64(time.Second))
		if k.Engine != "curl" {
			// What of unpacking and verifying comes after the transfer.
			took += time.Duration(layers / 100e6 * float64(time.Second))
		}
	}
	return took
}

// A second's worth of bytes that are pushed to the registry.
const pushRate = 100e6

// preparation is how long peers will take to prepare what they have not, if the
// machine is idle, and how many images are not prepared by all of them.
func (m *matrix) preparation() (took time.Duration, left int) {
	for _, versions := range m.images {
		for _, im := range versions {
			before := took
			for _, e := range m.unprepared(m.known(im)) {
				converter, ok := e.(engines.Converter)
				if !ok {
					continue
				}
				if _, kept := m.state.kept(converter, im, m.versions[e.Name()]); kept {
					took += time.Duration(float64(im.Built.LayerBytes()) / pushRate * float64(time.Second))
				} else {
					took += converter.Foresee(im.Built.LayerBytes())
				}
			}
			if took > before {
				left++
			}
		}
	}
	return took, left
}

// forecast says how much there is to do and how long it will take. unpushed are the
// images that are pushed and measured first.
func (m *matrix) forecast(rounds []round, unpushed []engines.Image) string {
	var sessions, runs int
	var took time.Duration
	for _, r := range rounds {
		took += aroundRound
		for i, s := range r.sessions {
			if i == 0 || s.keys[0].Image != r.sessions[i-1].keys[0].Image {
				took += aroundWarm
			}
			sessions++
			runs += len(s.keys)
			took += m.foresee(s)
		}
	}
	var first time.Duration
	for _, im := range unpushed {
		first += 10*time.Second + time.Duration(float64(im.Built.LayerBytes())/13e6*float64(time.Second))
	}
	prepare, left := m.preparation()
	return fmt.Sprintf("%d runs in %d sessions and %d rounds are to be made: about %v on an idle machine; before that, %d images are pushed and their floors measured: about %v, and peers prepare %d: about %v",
		runs, sessions, len(rounds), took.Round(10*time.Second), len(unpushed), first.Round(10*time.Second), left, prepare.Round(10*time.Second))
}

// tell is a run in one line.
func tell(r results.Run) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s, %s %s, rtt %v, %s, run %d: ", r.Engine, r.Image, r.Kind, r.RTT, rateText(r.Rate), r.Rep)
	if r.Err != "" {
		line, said, _ := strings.Cut(r.Err, "\n")
		if strings.HasSuffix(line, ":") { // what it said comes next
			next, _, _ := strings.Cut(strings.TrimSpace(said), "\n")
			line += " " + next
		}
		return b.String() + "FAILED: " + line
	}
	ready, quiet := r.Marks[engines.Ready], r.Marks[engines.Quiet]
	fmt.Fprintf(&b, "ready %.2f s, %.1f MB; ", ready.Time.Seconds(), float64(ready.Down)/1e6)
	if complete, ok := r.Marks[engines.Complete]; r.Stopped {
		b.WriteString("stopped")
	} else if ok {
		fmt.Fprintf(&b, "complete %.2f s, %.1f MB", complete.Time.Seconds(), float64(quiet.Down)/1e6)
	} else {
		fmt.Fprintf(&b, "not complete, %.1f MB", float64(quiet.Down)/1e6)
	}
	if w, ok := r.LongestWait(); ok {
		fmt.Fprintf(&b, "; longest wait %.2f s", w.Took.Seconds())
		if w.Bound > 0 {
			fmt.Fprintf(&b, " of %.2f at most", w.Bound.Seconds())
		}
	}
	if r.Stolen > results.MuchStolen {
		fmt.Fprintf(&b, "; %.0f%% of the processors' time until ready was stolen", 100*r.Stolen)
	}
	return b.String()
}

func rateText(rate int64) string {
	if rate == 0 {
		return "no limit"
	}
	return fmt.Sprintf("%g Mbit/s", float64(rate)/1e6)
}
