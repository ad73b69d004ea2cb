package serve

import (
	"context"
	"errors"
	"time"

	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/holdings"
)

// bound has the catalog keep to the quotas and immutable tags of the file of access, and begins to apply its
// rules of retention. Of an accelerator all that is the upstream's.
func (s *Server) bound(p *parts) (catalog.Bounded, error) {
	if s.guard == nil {
		return nil, nil
	}
	if p.front != nil {
		if s.guard.Holdings().Any() {
			return nil, errors.New("[[quota]], [[immutable]] and [[retention]] are not for an accelerator, which holds what its upstream has: take them out of the file of access")
		}
		return nil, nil
	}
	p.local.SetPolicy(func() catalog.Policy { return s.guard.Holdings() })
	s.retainer = &retainer{
		catalog: p.local, rules: s.guard.Holdings, gone: s.untagged,
		failed: func(err error) { s.log.Error("rules of retention are not applied", "error", err) },
	}
	s.closers = append(s.closers, background(s.retainer.run))
	return p.local, nil
}

// untagged tells of a tag that a rule did not keep.
func (s *Server) untagged(repo string, g holdings.Gone) {
	s.guard.Untagged()
	s.log.Info("untagged", "repository", repo, "tag", g.Tag, "manifest", g.Target, "pushed", g.Pushed.UTC(), "rule", g.Rule)
	s.guard.Audit("retention", "repository", repo, "about", g.Tag, "manifest", g.Target.String(), "pushed", g.Pushed.UTC(), "decision", "untagged", "rule", g.Rule)
}

// retainer applies rules of retention from time to time.
type retainer struct {
	catalog interface {
		holdings.Tags
		Untag(ctx context.Context, repo string, tags []catalog.Tagged) ([]catalog.Tagged, error)
	}
	rules  func() *holdings.Rules
	gone   func(repo string, g holdings.Gone)
	failed func(error)
}

// asked is how often it is looked whether there are rules now, or others.
const asked = time.Minute

// clockStep is how far a clock may be set between two looks before ages are not believed until the next.
const clockStep = 10 * time.Minute

// errClock says that ages are not known.
var errClock = errors.New("the clock was set: ages are not believed until it has gone on for a while")

// run applies the rules once they have been there for their interval, and then each interval.
func (r *retainer) run(ctx context.Context) {
	last := time.Now()
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(asked):
		}
		now := time.Now()
		every := r.rules().Every()
		if every == 0 {
			last = now
			continue
		}
		// A clock that jumps makes everything old. Sub compares by one that nobody sets.
		step := now.Round(0).Sub(last.Round(0)) - now.Sub(last)
		if step.Abs() > clockStep {
			r.failed(errClock)
			last = now
			continue
		}
		if now.Sub(last) < every {
			continue
		}
		last = now
		if err := r.apply(ctx, now); err != nil && ctx.Err() == nil {
			r.failed(err)
		}
	}
}

// apply removes the tags that no rule keeps.
func (r *retainer) apply(ctx context.Context, now time.Time) error {
	rules := r.rules()
	return holdings.Each(ctx, r.catalog, rules, now, func(repo string, gone []holdings.Gone) error {
		tags, by := make([]catalog.Tagged, len(gone)), make(map[string]string, len(gone))
		for i, g := range gone {
			tags[i], by[g.Tag] = g.Tagged, g.Rule
		}
		done, err := r.catalog.Untag(ctx, repo, tags)
		for _, t := range done {
			r.gone(repo, holdings.Gone{Tagged: t, Rule: by[t.Tag]})
		}
		return err
	})
}
