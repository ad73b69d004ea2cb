package node

import "hydrofoil.dev/foil/internal/worker/api"

// status is the pull for `foil status`.
func (p *pull) status() api.PullStatus {
	s := api.PullStatus{Event: p.snapshot()}
	p.mu.Lock()
	f := p.fetch
	if len(p.milestones) > 0 {
		last := p.milestones[len(p.milestones)-1]
		s.Event.Event, s.Err, s.Code = last.Event, last.Err, last.Code
		if p.over {
			s.Time, s.Elapsed, s.Trouble = last.Time, last.Elapsed, ""
		}
	}
	over := p.over
	p.mu.Unlock()
	if f != nil && !over {
		s.Rate = f.Progress().Rate
	}
	return s
}
