package run

import (
	"fmt"
	"strings"
	"time"

	"hydrofoil.dev/foil/bench/engines"
	"hydrofoil.dev/foil/bench/results"
)

// progress estimates how long the rest will take: as long, on average, as the
// sessions so far.
type progress struct {
	left, done int
	spent      time.Duration
	slowest    string
	most       time.Duration
}

func (p *progress) ended(engine string, took time.Duration) {
	p.left--
	p.done++
	p.spent += took
	if took > p.most {
		p.most, p.slowest = took, engine
	}
}

func (p *progress) String() string {
	if p.done == 0 {
		return fmt.Sprintf("[%d to go] ", p.left)
	}
	rest := p.spent / time.Duration(p.done) * time.Duration(p.left)
	return fmt.Sprintf("[%d to go, about %v] ", p.left, rest.Round(time.Second))
}

// tell is a run in one line.
func tell(r results.Run) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s, %s %s, rtt %v, %s, run %d: ", r.Engine, r.Image, r.Kind, r.RTT, rateText(r.Rate), r.Rep)
	if r.Err != "" {
		line, _, _ := strings.Cut(r.Err, "\n")
		return b.String() + "FAILED: " + line
	}
	ready, quiet := r.Marks[engines.Ready], r.Marks[engines.Quiet]
	fmt.Fprintf(&b, "ready %.2f s, %.1f MB; complete %.2f s, %.1f MB", ready.Time.Seconds(), float64(ready.Down)/1e6,
		r.Marks[engines.Complete].Time.Seconds(), float64(quiet.Down)/1e6)
	return b.String()
}

func rateText(rate int64) string {
	if rate == 0 {
		return "no limit"
	}
	return fmt.Sprintf("%g Mbit/s", float64(rate)/1e6)
}
