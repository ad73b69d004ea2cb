package startup

import (
	"context"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/trace"
	"hydrofoil.dev/foil/internal/server/planner"
)

// services returns the services of an image with their sets: first those that it
// has traces of, the latest first, then those that it inherits.
func (s *Sets) services(ctx context.Context, m Image, contents *planner.Contents) ([]planned, error) {
	t := contents.TOC
	own, err := s.evidence(ctx, m)
	if err != nil {
		return nil, err
	}
	inherited, err := s.inherit(ctx, m, contents, own)
	if err != nil {
		return nil, err
	}
	image := int64(0)
	for i := range t.Contents {
		image += t.Contents[i].Size
	}
	most, pieces := s.o.Max.Of(image), maxPieces
	var out []planned
	for _, list := range [][]*service{own, inherited} {
		for _, v := range list {
			if len(out) == maxServices {
				break
			}
			set, late := v.choose(t)
			if len(set) > pieces {
				set = set[:pieces]
			}
			pieces -= len(set)
			set, rest := limit(set, t, most)
			if len(rest) > 0 {
				s.o.Log.Warn("startup set is larger than --startup-max: what is needed last stays out",
					"repository", m.Repository, "chain_id", m.ChainID, "service", trace.Service(v.args), "limit", most, "pages", pages(set), "dropped", pages(rest))
			}
			late = append(rest, append(v.late, late...)...)
			if len(late) > maxLate {
				late = late[:maxLate]
			}
			p := planned{Service: Service{Args: v.args, Origin: v.origin(), Late: bare(late)}, set: set}
			out = append(out, p)
		}
	}
	return out, nil
}

// service is what is known of a service.
type service struct {
	args []string
	evidence
	late []ranked // inherited
}

func (v *service) origin() string {
	switch {
	case len(v.recorded) > 0:
		return bundle.OriginTraced
	case len(v.reports) > 0:
		return bundle.OriginLearned
	}
	return bundle.OriginInherited
}

// evidence reads the traces of an image, by service, the one heard of last
// first. Traces that do not belong to its TOC are passed over.
func (s *Sets) evidence(ctx context.Context, m Image) ([]*service, error) {
	rows, err := s.o.Catalog.Traces(ctx, m.Repository, m.ChainID)
	if err != nil {
		return nil, err
	}
	type lists struct {
		traces  [2][]*trace.Trace // recorded, reports
		clients [2][]string
	}
	known := map[string]*lists{}
	var order []string
	for i := len(rows) - 1; i >= 0; i-- {
		row := &rows[i]
		t, err := trace.Decode(row.Body)
		if err != nil {
			s.o.Log.Warn("a trace cannot be read", "repository", m.Repository, "chain_id", m.ChainID, "service", row.Service, "error", err)
			continue
		}
		if t.TOC != m.TOC {
			continue
		}
		l := known[row.Service]
		if l == nil {
			l = &lists{}
			known[row.Service] = l
			order = append(order, row.Service)
		}
		kind := 1
		if row.Recorded {
			kind = 0
		}
		l.traces[kind], l.clients[kind] = append(l.traces[kind], t), append(l.clients[kind], row.Client)
	}
	var out []*service
	for _, id := range order {
		l := known[id]
		v := &service{evidence: evidence{recorded: voters(l.traces[0], l.clients[0]), reports: voters(l.traces[1], l.clients[1])}}
		if len(v.recorded) > 0 {
			v.args = v.recorded[0].Args
		} else {
			v.args = v.reports[0].Args
		}
		out = append(out, v)
	}
	return out, nil
}

// inherit returns the services that other versions of an image have and own does
// not, with the sets they have there, and gives those of own that nobody recorded
// theirs. Only traces are inherited from, so that what was inherited is not
// inherited again.
func (s *Sets) inherit(ctx context.Context, m Image, contents *planner.Contents, own []*service) ([]*service, error) {
	known := map[string]*service{}
	for _, v := range own {
		known[trace.Service(v.args)] = v
	}
	images, err := s.o.Catalog.StartupImages(ctx, m.Repository)
	if err != nil {
		return nil, err
	}
	var out []*service
	done := map[string]bool{}
	asked := 0
	for _, row := range images {
		if row.ChainID == m.ChainID || row.Platform != m.Platform {
			continue
		}
		before := imageOf(row)
		theirs, err := s.evidence(ctx, before)
		if err != nil {
			return nil, err
		}
		if len(theirs) == 0 {
			continue
		}
		if asked++; asked > versionsAsked {
			break
		}
		var h *heir
		for _, v := range theirs {
			id := trace.Service(v.args)
			mine := known[id]
			if done[id] || mine != nil && len(mine.recorded) > 0 {
				continue
			}
			done[id] = true
			if h == nil {
				from, x, err := s.o.Load(ctx, before.ChainID)
				if err != nil || x.TOC() != before.TOC {
					s.o.Log.Warn("startup sets: nothing is inherited from a version", "repository", m.Repository, "chain_id", before.ChainID, "error", err)
					break
				}
				h = newHeir(&planner.Contents{TOC: from, Index: x, Objects: s.o.Objects}, contents, s.aligned, s.o.Log)
			}
			chosen, besides := v.choose(h.from.TOC)
			set, late, err := h.carry(ctx, chosen, besides)
			if err != nil {
				return nil, err
			}
			if mine == nil {
				mine = &service{args: v.args}
				out = append(out, mine)
			}
			mine.inherited, mine.late = set, late
		}
	}
	return out, nil
}
