package startup

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"hydrofoil.dev/foil/bench/engines"
	"hydrofoil.dev/foil/bench/link"
	"hydrofoil.dev/foil/bench/site"
)

// updates starts the second version of an image, of which the first was traced:
// on a worker with nothing, and on one that has the first version. Without any set, with the
// one that it inherits, with that and the report of one worker, and traced; each has a
// repository of its own, since sets belong to one, so that they can be measured in turns.
func (b *bench) updates(ctx context.Context, name string) (starts []Start, err error) {
	first, second, err := b.versions(ctx, name)
	if err != nil {
		return nil, err
	}
	type kind struct {
		what          string
		first, second engines.Image
	}
	traced := &engines.Hydrofoil{}
	kinds := []kind{{what: "no set"}, {what: "inherited"}, {what: "inherited and a report"}, {what: "traced"}}
	err = b.at(ctx, link.Options{RTT: b.RTT, Rate: b.Rate}, nil, func(s *site.Site) error {
		for i := range kinds {
			k := &kinds[i]
			k.first, k.second = first, second
			for _, im := range []*engines.Image{&k.first, &k.second} {
				im.Ref = fmt.Sprintf("%s/%d/%s", engines.RegistryAddr, i, im.Name)
				if err := b.push(ctx, s, *im); err != nil {
					return err
				}
				if k.what != "no set" && im == &k.first || k.what == "traced" {
					if _, err := traced.Prepare(ctx, s, b.Programs, *im); err != nil {
						return err
					}
				}
			}
			if k.what != "inherited and a report" {
				continue
			}
			err := b.fresh(ctx, s, &engines.Hydrofoil{Variant: engines.Learning}, func(w engines.Worker) error {
				if _, err := b.start(ctx, s, w, k.second, k.second.Name+", fresh, inherited, one that reports"); err != nil {
					return err
				}
				return w.(engines.Startups).Reported(ctx, k.second)
			})
			if err != nil {
				return err
			}
		}
		for range max(b.Rounds, 1) {
			for _, k := range kinds {
				for _, how := range []string{"fresh", "update"} {
					err := b.fresh(ctx, s, traced, func(w engines.Worker) error {
						if how == "update" {
							if err := b.have(ctx, s, w, k.first); err != nil {
								return err
							}
						}
						r, err := b.start(ctx, s, w, k.second, k.second.Name+", "+how+", "+k.what)
						starts = append(starts, r)
						return err
					})
					if err != nil {
						return err
					}
				}
			}
		}
		return nil
	})
	return medians(starts), err
}

// medians returns one start for all of one name: the one that took the median of their times.
func medians(starts []Start) (list []Start) {
	named := make(map[string][]Start)
	for _, s := range starts {
		named[s.What] = append(named[s.What], s)
	}
	for _, s := range starts {
		all := named[s.What]
		if len(all) == 0 {
			continue
		}
		delete(named, s.What)
		slices.SortFunc(all, func(a, b Start) int { return cmp.Compare(a.Ready, b.Ready) })
		middle := all[(len(all)-1)/2]
		middle.Runs, middle.Least, middle.Most = len(all), all[0].Ready, all[len(all)-1].Ready
		list = append(list, middle)
	}
	return list
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
