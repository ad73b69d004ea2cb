package fetch

import (
	"time"

	"hydrofoil.dev/foil/internal/worker/schedule"
	"hydrofoil.dev/foil/internal/worker/yield"
)

// yield has the server rest while others want the processors, until the pull has ended.
func (p *Pull) yield() {
	turn := time.NewTicker(yield.Turn)
	defer turn.Stop()
	for {
		select {
		case <-turn.C:
		case <-p.ctx.Done():
			return
		}
		if p.opts.Yields() {
			p.decide(func(s *schedule.Schedule, now time.Time) { s.Yield(now, yield.Rest) })
		}
	}
}
