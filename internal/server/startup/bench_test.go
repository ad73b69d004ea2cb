package startup

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/format/toc/toctest"
	"hydrofoil.dev/foil/internal/format/trace"
	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/planner"
)

func benchIndex(b *testing.B, t *toc.TOC) *planner.Index {
	b.Helper()
	x, err := planner.Build(context.Background(), t, "d", locator{t: t})
	if err != nil {
		b.Fatal(err)
	}
	return x
}

// locator stands in for packs: it says that segments rest in frames of up
// to segment.FrameTarget bytes, in the order in which they are asked for.
type locator struct {
	t *toc.TOC
}

func (l locator) Locate(_ context.Context, ids []segment.ID) ([]catalog.Location, error) {
	lengths := map[segment.ID]uint32{}
	for _, s := range l.t.Segments {
		lengths[s.ID] = s.Length
	}
	places := map[segment.ID]catalog.Location{}
	out := make([]catalog.Location, len(ids))
	var open *catalog.Frame
	offset := int64(0)
	for i, id := range ids {
		p, ok := places[id]
		if !ok {
			n := lengths[id]
			if open == nil || open.RawLength+n > segment.FrameTarget {
				open = &catalog.Frame{Pack: "packs/1", Offset: offset, Length: 2}
			}
			p = catalog.Location{Frame: open, Index: len(open.Segments)}
			places[id] = p
			open.Segments = append(open.Segments, catalog.FrameSegment{ID: id, Length: n})
			open.RawLength += n
			open.Length += n / 3
			offset = open.Offset + int64(open.Length)
		}
		out[i] = p
	}
	return out, nil
}

// randomRuns are n page runs of a TOC, no page twice, in random order.
func randomRuns(t *toc.TOC, n int) []trace.Run {
	r := rand.New(rand.NewPCG(1, 2))
	var runs []trace.Run
	for range n {
		c := uint32(r.IntN(len(t.Contents)))
		pages := trace.Pages(t.Contents[c].Size)
		first := r.Uint32N(pages)
		runs = append(runs, trace.Run{Content: c, First: first, Blocks: min(1+r.Uint32N(8), pages-first)})
	}
	runs = trace.Merge(runs)
	r.Shuffle(len(runs), func(i, k int) { runs[i], runs[k] = runs[k], runs[i] })
	return runs
}

// BenchmarkServe is what a pull of an image of 84,000 files does with a startup
// set of 10,000 runs, before the first page is sent and until the plan is made.
func BenchmarkServe(b *testing.B) {
	old, now := toctest.Synthetic(84000, 1), toctest.Update(84000, 1, 0.2, 2)
	oldIndex, index := benchIndex(b, old), benchIndex(b, now)
	table := index.Table()
	var v evidence
	touched := &trace.Trace{}
	for _, r := range randomRuns(now, 10000) {
		touched.Touched = append(touched.Touched, trace.Touch{Run: r})
	}
	v.recorded = voters([]*trace.Trace{touched}, []string{"x"})
	set, _ := v.choose(now)
	store := lay([]planned{{Service: Service{Origin: bundle.OriginTraced}, set: set}}, now)
	store.Digests = make([]segment.ID, len(store.Runs))
	guess := make(planner.Order, index.Len())
	for name, have := range map[string]*planner.Index{"fresh": nil, "update": oldIndex} {
		for _, until := range []string{"pages", "plan"} {
			b.Run(fmt.Sprintf("%s/until=%s", name, until), func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					d := planner.NewDifference(index)
					if have != nil {
						d.Have(have, nil)
					}
					s := &Set{store: store, frames: store.Services[0].Frames}
					delivery := s.Select(table, d.Lacks)
					d.Arrive(delivery.Wire.Runs)
					if until == "plan" {
						d.SetOrder(index.OrderBy(guess, s.Late, s.Runs()))
						d.Plan()
					}
					b.ReportMetric(float64(len(delivery.Wire.Runs)), "runs")
				}
			})
		}
	}
}

// BenchmarkChoose makes the set of a service of which 16 traces with 10,000 runs
// each are known.
func BenchmarkChoose(b *testing.B) {
	t := toctest.Synthetic(84000, 1)
	var v evidence
	var traces []*trace.Trace
	var clients []string
	for i := range 16 {
		one := &trace.Trace{}
		for _, r := range randomRuns(t, 10000)[i*10:] {
			one.Touched = append(one.Touched, trace.Touch{Run: r})
		}
		traces, clients = append(traces, one), append(clients, fmt.Sprint(i))
	}
	v.reports = voters(traces, clients)
	b.ReportAllocs()
	for b.Loop() {
		set, _ := v.choose(t)
		lay([]planned{{set: set}}, t)
	}
}
