package fetch

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"sync"
	"time"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/worker/arena"
	"hydrofoil.dev/foil/internal/worker/remote"
	"hydrofoil.dev/foil/internal/worker/schedule"
	"hydrofoil.dev/foil/internal/worker/waits"
)

// inArena is an arena as a schedule sees it.
type inArena struct{ *arena.Arena }

func (a inArena) SegmentsIn(off, n int64) (first, end int) { return a.Layout().SegmentsIn(off, n) }

func (a inArena) Neighbours(i int) (first, end int) { return a.Layout().Neighbours(i) }

// Need waits until [off, off+n) of a, the pull's arena, is present, and
// has what is queued far behind promoted. It fails when a fails or ctx ends;
// see arena.Wait. Of another arena it only waits.
func (p *Pull) Need(ctx context.Context, a *arena.Arena, off, n int64) error {
	if a.Present(off, n) {
		return nil
	}
	r := &schedule.Read{Space: inArena{a}, Off: off, Len: n, Began: time.Now()}
	w := waits.Wait{Offset: off, Length: n, Began: r.Began, Moved: p.counts.moved.Load()}
	var parts []job
	p.decide(func(s *schedule.Schedule, now time.Time) {
		for _, k := range s.Wanted(now, r) {
			j := part(k, []*schedule.Read{r})
			j.done = &j.stream.parts
			j.done.Add(1)
			parts = append(parts, j)
		}
		w.Planned, w.Ahead = s.Lacking(r)
		w.Promoted, w.Bound = r.Promoted(), r.Bound()
	})
	i := p.opts.Waits.Begin(w)
	if parts != nil {
		for _, j := range parts {
			p.pipe.writeJob(j, nil)
			j.done.Done()
		}
		// If a frame was damaged, what the read lacks comes another way.
		p.decide(func(s *schedule.Schedule, now time.Time) { s.Written(now, r) })
	}
	err := a.Wait(ctx, off, n)
	p.decide(func(s *schedule.Schedule, _ time.Time) { s.Ended(r) })
	w.Took, w.Promoted, w.Bound = time.Since(r.Began), r.Promoted(), r.Bound()
	if !errors.Is(err, arena.ErrAnother) {
		w.Err = err
	}
	p.opts.Waits.End(i, w)
	return err
}

const (
	// gather is how long promotions are collected before they are sent: a
	// reader that has just been answered asks for its next page within it.
	gather = time.Millisecond
	// underway bounds the promotions that are sent and not yet answered.
	underway = 16
)

// promoter tells the server what is to be sent, on the connection that the stream is on.
type promoter struct {
	p    *Pull
	kick chan struct{}

	// Guarded by p.mu.
	stream *stream
	orders schedule.Orders // of which what the server is told counts
}

func (r *promoter) init(p *Pull) { r.p, r.kick = p, make(chan struct{}, 1) }

// add queues what is ordered: a promotion takes the place of the one before it, which it contains.
// p.mu is held.
func (r *promoter) add(s *stream, o schedule.Orders) {
	if r.stream != s {
		r.stream, r.orders = s, schedule.Orders{}
	}
	if len(o.Promote) > 0 {
		r.orders.Promote, r.orders.Number = o.Promote, o.Number
		r.orders.Fresh += o.Fresh
	}
	r.orders.Back = append(r.orders.Back, o.Back...)
	r.orders.Skip = append(r.orders.Skip, o.Skip...)
	r.orders.Chosen = r.orders.Chosen || o.Chosen
	r.orders.Release = r.orders.Release || o.Release
	if o.Rest > 0 {
		r.orders.Rest = o.Rest
	}
	select {
	case r.kick <- struct{}{}:
	default:
	}
}

func (r *promoter) run() {
	var posts sync.WaitGroup
	defer posts.Wait()
	free := make(chan struct{}, underway)
	for {
		select {
		case <-r.kick:
		case <-r.p.ctx.Done():
			return
		}
		timer := time.NewTimer(gather)
		select {
		case <-timer.C:
		case <-r.p.ctx.Done():
			timer.Stop()
			return
		}
		select {
		case free <- struct{}{}:
		case <-r.p.ctx.Done():
			return
		}
		r.p.mu.Lock()
		s, o := r.stream, r.orders
		r.orders = schedule.Orders{}
		r.p.mu.Unlock()
		posts.Go(func() {
			r.post(s, o)
			<-free
		})
	}
}

func (r *promoter) post(s *stream, o schedule.Orders) {
	p := r.p
	if s == nil || len(o.Promote) == 0 && len(o.Back) == 0 && !o.Chosen && !o.Release && o.Rest == 0 {
		return
	}
	began := time.Now()
	err := p.opts.Client.Post(p.ctx, bundle.PromotePath, bundle.Promotion{
		Stream: s.id, Frames: slices.Concat(o.Promote, o.Back), Number: max(o.Number, schedule.BackNumber),
		Skip: o.Skip, Chosen: o.Chosen, Release: o.Release, Rest: o.Rest,
	}, nil)
	if err == nil {
		p.counts.promotions.Add(int64(o.Fresh))
		p.decide(func(d *schedule.Schedule, now time.Time) { d.Answered(now.Sub(began)) })
		return
	}
	status, ok := errors.AsType[*remote.StatusError](err)
	if ok && status.Status == http.StatusNotFound {
		return // the stream has ended: all of it is on its way, or it is resumed
	}
	if p.ctx.Err() != nil {
		return
	}
	// What was to be skipped comes all the same, after bundle.MaxChoice.
	p.log.Warn("promotion failed", "stream", s.id, "frames", len(o.Promote)+len(o.Back), "skipped", len(o.Skip), "release", o.Release, "error", err)
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.current == s {
		p.decideLocked(func(d *schedule.Schedule, now time.Time) { d.Unsaid(now, o.Release) })
	}
}
