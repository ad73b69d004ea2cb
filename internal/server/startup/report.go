package startup

import (
	"context"
	"errors"
	"fmt"
	"time"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/format/trace"
	"hydrofoil.dev/foil/internal/server/catalog"
)

// ErrUnknown is returned, wrapped, for a service that there is none of.
var ErrUnknown = errors.New("no such service")

// Report says what there is of an image's sets.
func (s *Sets) Report(ctx context.Context, m Image, table *toc.TOC) (*bundle.StartupReport, error) {
	report, _, err := s.report(ctx, m, table)
	return report, err
}

// Service says what there is of the set of one service. Errors: ErrUnknown.
func (s *Sets) Service(ctx context.Context, m Image, table *toc.TOC, id string) (*bundle.ServiceReport, error) {
	report, store, err := s.report(ctx, m, table)
	if err != nil {
		return nil, err
	}
	for _, v := range report.Services {
		if v.ID != id {
			continue
		}
		out := &bundle.ServiceReport{Service: v, TOC: m.TOC}
		var runs []trace.Run
		if store != nil {
			if stored := store.find(v.Args); stored != nil {
				runs = (&Set{store: store, frames: stored.Frames}).Runs()
			}
		}
		out.Runs = trace.AppendRuns(nil, runs)
		return out, nil
	}
	return nil, fmt.Errorf("%w: %s; the image's report lists those there are", ErrUnknown, id)
}

// Forget forgets the traces of one service of an image, or, without one, of all.
// Errors: ErrUnknown, also when a service is inherited from another version.
func (s *Sets) Forget(ctx context.Context, m Image, id string) error {
	err := s.o.Catalog.DeleteTraces(ctx, m.Repository, m.ChainID, id)
	if errors.Is(err, catalog.ErrNotFound) {
		if id == "" {
			return nil
		}
		return fmt.Errorf("%w: nobody traced %s on this version of the image; a set that is inherited goes with its traces, where they were taken", ErrUnknown, id)
	}
	if err != nil {
		return err
	}
	s.heirs(ctx, m)
	return s.wait(ctx, s.build(m, true))
}

func (s *Sets) report(ctx context.Context, m Image, table *toc.TOC) (*bundle.StartupReport, *Store, error) {
	report := &bundle.StartupReport{ChainID: m.ChainID, TOC: m.TOC, Services: []bundle.Service{}}
	for i := range table.Contents {
		report.ImageBytes += table.Contents[i].Size
	}
	row, store, err := s.current(ctx, m, table)
	if errors.Is(err, catalog.ErrNotFound) {
		return report, nil, nil
	}
	if err != nil {
		return nil, nil, err
	}
	if store != nil {
		report.StoreRawBytes, _ = store.size()
		report.StoreBytes = store.bytes
	}
	traces, err := s.evidence(ctx, m)
	if err != nil {
		return nil, nil, err
	}
	updated, err := s.updated(ctx, m)
	if err != nil {
		return nil, nil, err
	}
	known := map[string]*service{}
	for _, v := range traces {
		known[trace.Service(v.args)] = v
	}
	add := func(id string, v bundle.Service) {
		v.ID, v.Updated = id, row.Noted
		if t := known[id]; t != nil {
			v.Traces, v.Reports, v.Updated = len(t.recorded), len(t.reports), updated[id]
			delete(known, id)
		}
		report.Services = append(report.Services, v)
	}
	if store != nil {
		shared := make([]int, len(store.Frames)) // by frame: services
		for _, v := range store.Services {
			for _, f := range v.Frames {
				shared[f]++
			}
		}
		for _, v := range store.Services {
			out := bundle.Service{Args: v.Args, Origin: v.Origin}
			for _, n := range v.Frames {
				f := &store.Frames[n]
				out.Bytes, out.Stored = out.Bytes+int64(f.Raw), out.Stored+int64(f.Length)
				if shared[n] > 1 {
					out.Shared += int64(f.Raw)
				}
				for _, r := range store.Runs[f.First : f.First+f.Count] {
					out.Pages += int64(r.Blocks)
				}
			}
			add(trace.Service(v.Args), out)
		}
	}
	for _, v := range traces { // those that are not built yet
		if id := trace.Service(v.args); known[id] != nil {
			add(id, bundle.Service{Args: v.args, Origin: v.origin()})
		}
	}
	return report, store, nil
}

// updated returns when the last trace of each service came.
func (s *Sets) updated(ctx context.Context, m Image) (map[string]time.Time, error) {
	rows, err := s.o.Catalog.Traces(ctx, m.Repository, m.ChainID)
	if err != nil {
		return nil, err
	}
	out := map[string]time.Time{}
	for _, row := range rows {
		out[row.Service] = row.Received
	}
	return out, nil
}
