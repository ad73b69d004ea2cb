package startup

import (
	"context"
	"path/filepath"

	"hydrofoil.dev/foil/bench/engines"
	"hydrofoil.dev/foil/bench/link"
	"hydrofoil.dev/foil/bench/site"
)

// updates starts the second version of an image, of which the first was traced:
// on a worker with nothing, and on one that has the first version. Without any set, with the
// one that it inherits, with that and the report of one worker, and traced.
func (b *bench) updates(ctx context.Context, name string) (starts []Start, err error) {
	first, second, err := b.versions(ctx, name)
	if err != nil {
		return nil, err
	}
	err = b.at(ctx, link.Options{RTT: b.RTT, Rate: b.Rate}, []engines.Image{first}, func(s *site.Site) error {
		traced := &engines.Hydrofoil{}
		if _, err := traced.Prepare(ctx, s, b.Programs, first); err != nil {
			return err
		}
		if err := engines.Push(ctx, s, second); err != nil {
			return err
		}
		if _, err := engines.Settle(ctx, filepath.Join(s.Dir, "serve")); err != nil {
			return err
		}
		both := func(e *engines.Hydrofoil, what string) error {
			err := b.fresh(ctx, s, e, func(w engines.Worker) error {
				r, err := b.start(ctx, s, w, second, second.Name+", fresh, "+what)
				starts = append(starts, r)
				return err
			})
			if err != nil {
				return err
			}
			return b.fresh(ctx, s, e, func(w engines.Worker) error {
				if err := b.have(ctx, s, w, first); err != nil {
					return err
				}
				r, err := b.start(ctx, s, w, second, second.Name+", update, "+what)
				starts = append(starts, r)
				return err
			})
		}
		if err := both(&engines.Hydrofoil{Variant: engines.Untraced}, "no set"); err != nil {
			return err
		}
		if err := both(traced, "inherited"); err != nil {
			return err
		}
		err := b.fresh(ctx, s, &engines.Hydrofoil{Variant: engines.Learning}, func(w engines.Worker) error {
			if _, err := b.start(ctx, s, w, second, second.Name+", fresh, inherited, one that reports"); err != nil {
				return err
			}
			return w.(engines.Startups).Reported(ctx, second)
		})
		if err != nil {
			return err
		}
		if err := both(traced, "inherited and a report"); err != nil {
			return err
		}
		if _, err := traced.Prepare(ctx, s, b.Programs, second); err != nil {
			return err
		}
		return both(traced, "traced")
	})
	return starts, err
}

// have gives a worker an image, complete, and starts its daemon anew.
func (b *bench) have(ctx context.Context, s *site.Site, w engines.Worker, im engines.Image) error {
	t := engines.Begin(s, w.Processes())
	defer t.End()
	c, err := w.Provision(ctx, im, t)
	if err == nil {
		err = im.Ready.Wait(ctx, s.Link, c.Process)
	}
	if err == nil {
		err = w.Complete(ctx, im, t)
	}
	if serr := c.Stop(); err == nil {
		err = serr
	}
	if err == nil {
		err = w.Stop()
	}
	if err == nil {
		err = w.Start(ctx)
	}
	return err
}
