package fetch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/worker/remote"
	"hydrofoil.dev/foil/internal/worker/schedule"
)

// A service that joins a pull has a startup set too, of which most is likely to
// be here: that of the service that the pull began with has arrived. So it is asked for
// after that has, with what is here by then, and only what is new comes: in a
// stream of its own, ahead of what the pull's stream still has (bundle.Request.Ahead).
// That stream's plan is as it was: a segment that the pages complete comes
// again, and is compared.

// services are those that have joined a pull.
type services struct {
	p       *Pull
	planned chan struct{}  // closed when the first plan, and what came before it, is here
	asked   sync.WaitGroup // their goroutines
	ctx     context.Context
	leave   context.CancelFunc // ends ctx

	// Guarded by p.mu.
	begun bool // planned is closed
	over  bool // nobody joins any more
}

func (v *services) init(p *Pull) {
	v.p, v.planned = p, make(chan struct{})
	v.ctx, v.leave = context.WithCancel(p.ctx)
}

// plannedLocked has the sets of services asked for. p.mu is held.
func (v *services) plannedLocked() {
	if !v.begun {
		v.begun = true
		close(v.planned)
	}
}

// end ends them, and waits for that. None comes any more.
func (v *services) end() {
	v.p.mu.Lock()
	v.over = true
	v.p.mu.Unlock()
	v.leave()
	v.asked.Wait()
}

// join is one service that has joined.
type join struct {
	p       *Pull
	service bundle.ImageRequest
	set     schedule.Joining // guarded by p.mu
}

// Join has what the worker lacks of the startup set of another service come as
// soon as the first one's has arrived. The service is what runs in a container of the
// pull's image: see bundle.ImageRequest. A set that cannot
// be had is no failure: its pages come with the rest.
func (p *Pull) Join(entrypoint, args []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.services.over {
		return
	}
	j := &join{p: p, service: bundle.ImageRequest{Entrypoint: entrypoint, Args: args}}
	p.decideLocked(func(s *schedule.Schedule, now time.Time) { s.Joined(now, &j.set, true, nil) })
	p.services.asked.Go(j.run)
}

// expect says what comes: these blocks; nil: nothing that is known.
func (j *join) expect(blocks []uint64) {
	j.p.decide(func(s *schedule.Schedule, now time.Time) { s.Joined(now, &j.set, false, blocks) })
}

func (j *join) run() {
	p := j.p
	ctx := p.services.ctx
	defer p.decide(func(s *schedule.Schedule, now time.Time) { s.Left(now, &j.set) })
	select {
	case <-p.services.planned:
	case <-ctx.Done():
		return
	}
	p.mu.Lock()
	t := p.target
	p.mu.Unlock()
	if t.arena == nil {
		return // all of it is elsewhere, and here
	}
	faults, stalls := 0, 0
	for pause := time.Duration(0); ; {
		err := j.ask(ctx, t)
		j.expect(nil)
		if err == nil || ctx.Err() != nil {
			return
		}
		if isFault(err) {
			faults++
		}
		if errors.Is(err, remote.ErrStall) {
			stalls++
		}
		if isFinal(err) || faults >= p.opts.Attempts || stalls >= p.opts.Attempts {
			p.log.Info("no startup set for a service that joined the pull: its pages come with the rest", "error", err)
			return
		}
		pause = min(max(2*pause, p.opts.Pause), 5*time.Second)
		p.log.Debug("the startup set of a service that joined the pull broke off", "error", err, "pause", pause)
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return
		}
	}
}

// ask sends one request and reads its answer to the end.
func (j *join) ask(ctx context.Context, t *target) (err error) {
	p := j.p
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	req := p.request()
	p.mu.Lock()
	want := p.image
	if p.current != nil {
		req.Ahead = p.current.id
	}
	p.decideLocked(func(s *schedule.Schedule, now time.Time) { s.Joined(now, &j.set, true, nil) })
	p.mu.Unlock()
	want.Header, want.Startup = true, true
	want.Entrypoint, want.Args = j.service.Entrypoint, j.service.Args
	req.Image = want
	timer := time.AfterFunc(p.opts.JoinPatience, func() { j.expect(nil) })
	defer timer.Stop()
	resp, err := p.opts.Client.Stream(ctx, bundle.PullPath, &req, p.headerWithin())
	if err != nil {
		return err
	}
	defer resp.Close()
	s := &stream{p: p, cancel: cancel, beside: true, due: p.due(resp)}
	err = j.read(ctx, s, counted{resp, &p.counts.moved}, &req, t, timer)
	s.jobs.Wait()
	p.mu.Lock()
	defer p.mu.Unlock()
	if err == nil {
		p.damage.told(req.Damaged)
	}
	if err == nil && s.bad > 0 {
		return errRestart
	}
	return err
}

func (j *join) read(ctx context.Context, s *stream, resp io.Reader, req *bundle.Request, t *target, unknown *time.Timer) error {
	p := j.p
	var held *buffer // a frame's buffer, until a worker has it
	defer func() { p.pipe.putBuffer(held) }()
	r := bundle.NewReader(resp, bundle.ReaderOptions{Request: req, Buffer: func(n int) []byte {
		s.due.coming(n, &s.jobs)
		p.pipe.putBuffer(held)
		held = p.pipe.getBuffer(ctx, n)
		return held.bytes
	}})
	t = &target{header: t.header, arena: t.arena} // its TOC is the other stream's
	var taken *set
	for {
		section, err := r.Next()
		if errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
			return nil
		}
		if err != nil {
			return err
		}
		s.due.came(section, &s.jobs)
		switch v := section.(type) {
		case *bundle.Hello:
			s.id = v.Stream
		case *bundle.Image:
			if v.ChainID != t.header.ChainID || v.TOCDigest != t.header.TOCDigest {
				return finalError{fmt.Errorf("the server now has TOC %s for rootfs %s, this pull began with %s of %s",
					v.TOCDigest, v.ChainID, t.header.TOCDigest, t.header.ChainID)}
			}
			if v.TOC != nil {
				if t.toc, err = v.DecodeTOC(nil); err != nil {
					return err
				}
			}
		case *bundle.Startup:
			if taken, err = p.take(ctx, t, v); err != nil {
				return err
			}
			unknown.Stop()
			p.counts.pagesTotal.Add(v.ContentBytes())
			if p.counts.total.Load() > 0 {
				p.counts.total.Add(v.MaxBytes())
			}
			j.expect(taken.blocks())
		case *bundle.Here:
			if err := p.here(ctx, t, v); err != nil {
				return err
			}
		case *bundle.Pages:
			p.counts.pagesMoved.Add(int64(len(v.Data)))
			one := job{stream: s, set: taken, frame: v.Frame, data: v.Data, buffer: held}
			held = nil
			if err := s.hand(ctx, one); err != nil {
				return err
			}
		case *bundle.Frame:
			return fmt.Errorf("%w: frame %d of a plan, where only a startup set was asked for", bundle.ErrCorrupt, v.Index)
		}
	}
}
