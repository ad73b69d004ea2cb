package fetch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/trace"
	"hydrofoil.dev/foil/internal/worker/arena"
)

// A service that joins a pull has a startup set too, of which most is likely to
// be here: that of the service that the pull began with has arrived. So it is asked for
// after that has, with what is here by then, and only what is new comes: in a
// stream of its own, ahead of what the pull's stream still has (bundle.Request.Ahead).
// That stream's plan is as it was: a segment that the pages complete comes
// again, and is compared.

// join is one service that has joined.
type join struct {
	p       *Pull
	image   int // index in the request
	service bundle.ImageRequest

	// The rest is guarded by p.mu.
	asked  bool // what comes is not known yet, and will be soon
	arena  *arena.Arena
	blocks []uint64 // of the arena that will come; nil: none
}

// Join has what the worker lacks of the startup set of another service come as
// soon as the first one's has arrived. The service is what runs in a container of the
// pull's image with the given index: see bundle.ImageRequest. A set that cannot
// be had is no failure: its pages come with the rest.
func (p *Pull) Join(image int, entrypoint, args []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.over {
		return
	}
	j := &join{p: p, image: image, service: bundle.ImageRequest{Entrypoint: entrypoint, Args: args}, asked: true}
	p.joins = append(p.joins, j)
	p.joining.Go(j.run)
}

// endJoins ends them, and waits for that. None comes any more.
func (p *Pull) endJoins() {
	p.mu.Lock()
	p.over = true
	p.mu.Unlock()
	p.leave()
	p.joining.Wait()
}

// brings reports whether all that a read lacks comes with the startup sets of the
// current stream, or with that of a service that has joined: then nothing is promoted for it.
// p.mu is held.
func (p *Pull) brings(r *reading) bool {
	if p.current != nil && p.current.bringsPages(r) {
		return true
	}
	return slices.ContainsFunc(p.joins, func(j *join) bool {
		if j.asked {
			return j.arena == nil || j.arena == r.arena
		}
		if j.blocks == nil || j.arena != r.arena {
			return false
		}
		return r.within(j.blocks)
	})
}

// expect says what comes: by runs, or, when nothing is known, nothing. What
// waits for something else is promoted.
func (j *join) expect(runs []trace.Run) {
	p := j.p
	var blocks []uint64
	p.mu.Lock()
	defer p.mu.Unlock()
	if j.arena != nil && len(runs) > 0 {
		blocks = markBlocks(nil, j.arena, runs)
	}
	j.asked, j.blocks = false, blocks
	p.promoteWaiting()
}

// promoteWaiting has what reads wait for promoted, unless it is about to come.
// p.mu is held.
func (p *Pull) promoteWaiting() {
	if p.current == nil {
		return
	}
	for r := range p.wanted {
		if !r.kept && !p.brings(r) {
			p.current.wantAll(r)
		}
	}
}

func (j *join) run() {
	p := j.p
	ctx := p.joinCtx
	defer func() {
		p.mu.Lock()
		p.joins = slices.DeleteFunc(p.joins, func(k *join) bool { return k == j })
		p.promoteWaiting()
		p.mu.Unlock()
	}()
	select {
	case <-p.planned:
	case <-ctx.Done():
		return
	}
	p.mu.Lock()
	t := p.targets[j.image]
	j.arena = t.arena
	p.mu.Unlock()
	if t.arena == nil {
		return // all of it is elsewhere, and here
	}
	faults := 0
	for pause := time.Duration(0); ; {
		err := j.ask(ctx, t)
		j.expect(nil)
		if err == nil || ctx.Err() != nil {
			return
		}
		if isFault(err) {
			faults++
		}
		if isFinal(err) || faults >= p.opts.Attempts {
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
	want := p.images[j.image]
	if p.current != nil {
		req.Ahead = p.current.id
	}
	j.asked = true
	p.mu.Unlock()
	want.Header, want.Startup = true, true
	want.Entrypoint, want.Args = j.service.Entrypoint, j.service.Args
	req.Images = []bundle.ImageRequest{want}
	timer := time.AfterFunc(p.opts.JoinPatience, func() { j.expect(nil) })
	defer timer.Stop()
	resp, err := p.opts.Client.post(ctx, bundle.PullPath, &req)
	if err != nil {
		return err
	}
	defer resp.Close()
	resp.moved = &p.moved
	s := &stream{p: p, cancel: cancel}
	err = j.read(ctx, s, resp, &req, t, timer)
	s.jobs.Wait()
	p.mu.Lock()
	defer p.mu.Unlock()
	if err == nil {
		p.told(req.Damaged)
	}
	if err == nil && s.bad > 0 {
		return errAgain
	}
	return err
}

func (j *join) read(ctx context.Context, s *stream, resp io.Reader, req *bundle.Request, t *target, unknown *time.Timer) error {
	p := j.p
	var held *buffer // a frame's buffer, until a worker has it
	defer func() { p.putBuffer(held) }()
	r := bundle.NewReader(resp, bundle.ReaderOptions{Request: req, Buffer: func(n int) []byte {
		p.putBuffer(held)
		held = p.getBuffer(ctx, n)
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
			p.pagesTotal.Add(v.ContentBytes())
			if p.total.Load() > 0 {
				p.total.Add(v.MaxBytes())
			}
			j.expect(v.Runs)
		case *bundle.Here:
			// The image is that of the pull, whatever its place in this request.
			v.Index = j.image
			if err := p.here(ctx, t, v); err != nil {
				return err
			}
		case *bundle.Pages:
			p.pagesMoved.Add(int64(len(v.Data)))
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
