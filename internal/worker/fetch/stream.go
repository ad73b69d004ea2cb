package fetch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/format/trace"
	"hydrofoil.dev/foil/internal/worker/arena"
	"hydrofoil.dev/foil/internal/worker/schedule"
)

// stream is one answer of the server.
type stream struct {
	p      *Pull
	id     string
	due    due
	cancel context.CancelCauseFunc
	jobs   sync.WaitGroup // frames handed to workers
	parts  sync.WaitGroup // what is written of frames that were kept
	choice choice

	beside bool         // of a service that has joined, and not of the pull
	target *target      // once its Image section has been read
	set    *set         // the startup set; nil: none has come
	left   int          // frames of it that are still to come
	plan   *bundle.Plan // nil until it has come
	// index says where what is planned belongs. It takes the processors a while to make it, which a start
	// that finds all of its pages can do without: it waits until a read needs it, or the pages have come.
	index *index
	// claims are what the request said arrived damaged.
	claims []segment.ID

	// The rest is guarded by p.mu.
	bad   int // frames that were damaged
	begun bool
	ended bool
}

// stream sends a request and reads its answer to the end. It returns nil when
// nothing is left to ask for. For each of stalls it is twice as patient.
func (p *Pull) stream(stalls int) (err error) {
	ctx, cancel := context.WithCancelCause(p.ctx)
	defer cancel(nil)
	s := &stream{p: p, cancel: cancel}
	p.mu.Lock()
	p.running = s // before it is said what comes another way
	p.mu.Unlock()
	req := p.request()
	req.EarlyPlan, req.Choose = true, p.chooses()
	s.claims = req.Damaged
	asked := time.Now()
	p.decide(func(d *schedule.Schedule, now time.Time) { req.Hold = d.Begin(now) })
	resp, err := p.opts.Client.Stream(ctx, bundle.PullPath, &req, p.headerWithin())
	if err != nil {
		s.end()
		if errors.Is(context.Cause(ctx), errReplan) {
			return errReplan
		}
		return err
	}
	defer resp.Close()
	p.decide(func(d *schedule.Schedule, now time.Time) { d.Answered(now.Sub(asked)) })
	stall := p.opts.Client.StallTimeout()
	resp.Patience(min(stall<<stalls, max(stall, p.opts.GiveUp/2)))
	s.due = p.due(resp)
	moved := p.counts.moved.Load()
	err = s.read(ctx, counted{resp, &p.counts.moved}, &req)
	if errors.Is(err, io.ErrUnexpectedEOF) && p.counts.moved.Load() == moved {
		err = ErrEmpty
	}
	// What has been read may still be on its way to the arena; the next
	// request must know it.
	s.end()
	s.choice.end()
	s.parts.Wait()
	s.jobs.Wait()
	if p.ctx.Err() == nil {
		if err := p.pipe.settle(); err != nil {
			return finalError{err}
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case errors.Is(context.Cause(ctx), errReplan):
		return errReplan
	case errors.Is(context.Cause(ctx), errRestart), err == nil && s.bad > 0:
		return errRestart
	case err != nil && p.ctx.Err() == nil && !isFault(err) && !isFinal(err) && !errors.As(err, new(*bundle.Error)):
		resp.Broken()
	}
	if err == nil {
		if err = s.lacks(&req); err != nil {
			p.damage.wholly = true // what a set brings, the plan leaves out
		}
	}
	return err
}

// lacks checks that everything has come when the server had no reason to leave
// something out: the worker said of no other rootfs that it is here, and skipped nothing. What is
// left out because of one, the owner of the arenas copies. p.mu is held.
func (s *stream) lacks(req *bundle.Request) error {
	if s.choice.skipped > 0 || s.p.exact {
		return nil
	}
	for _, h := range req.Have {
		if h.ChainID != s.target.header.ChainID || h.TOC != s.target.header.TOCDigest {
			return nil
		}
	}
	if a := s.target.arena; a != nil && !a.Complete() {
		return fmt.Errorf("%w: the plan lacks %d segments of rootfs %s", bundle.ErrCorrupt, a.Missing(), s.target.header.ChainID)
	}
	return nil
}

// end takes the stream from those who would promote.
func (s *stream) end() {
	p := s.p
	p.mu.Lock()
	defer p.mu.Unlock()
	p.decideLocked(func(d *schedule.Schedule, _ time.Time) { d.End() })
	s.ended = true
	p.running = nil
	if p.current == s {
		p.current = nil
	}
}

func (s *stream) read(ctx context.Context, resp io.Reader, req *bundle.Request) error {
	p := s.p
	var held *buffer // a frame's buffer, until a worker has it
	defer func() { p.pipe.putBuffer(held) }()
	r := bundle.NewReader(resp, bundle.ReaderOptions{Request: req, Head: p.head, Buffer: func(n int) []byte {
		s.due.coming(n, &s.jobs)
		p.pipe.putBuffer(held)
		held = p.pipe.getBuffer(ctx, n)
		return held.bytes
	}})
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
			if err := s.image(ctx, v); err != nil {
				return err
			}
		case *bundle.Plan:
			s.plan = v
			if err := s.goOn(ctx); err != nil {
				return err
			}
		case *bundle.Startup:
			if err := s.startup(ctx, v); err != nil {
				return err
			}
		case *bundle.Here:
			if err := p.here(ctx, s.target, v); err != nil {
				return err
			}
		case *bundle.Pages:
			p.counts.pagesMoved.Add(int64(len(v.Data)))
			p.decide(func(d *schedule.Schedule, _ time.Time) { d.Pages(int64(s.set.Frames[v.Frame].MaxLength)) })
			if err := s.keepOrHand(ctx, job{stream: s, set: s.set, frame: v.Frame, data: v.Data, buffer: held}, &held); err != nil {
				return err
			}
			s.left--
			if err := s.goOn(ctx); err != nil {
				return err
			}
		case *bundle.Frame:
			if err := s.use(ctx); err != nil {
				return err
			}
			p.decide(func(d *schedule.Schedule, _ time.Time) { d.Arrived(v.Index) })
			if err := s.keepOrHand(ctx, job{stream: s, frame: v.Index, data: v.Data, buffer: held}, &held); err != nil {
				return err
			}
		}
	}
}

// goOn takes the plan into use when that is due: with the last frame of the startup set, or for reads that
// lack what that does not bring.
func (s *stream) goOn(ctx context.Context) error {
	if s.plan == nil {
		return nil // it comes later
	}
	lacking := s.left == 0 || s.p.chooses()
	s.p.decide(func(d *schedule.Schedule, _ time.Time) { lacking = lacking || d.LacksPlan() })
	if !lacking {
		return nil
	}
	if err := s.use(ctx); err != nil {
		return err
	}
	if s.left == 0 {
		s.begin()
	}
	return nil
}

// use has what reads wait for, and will wait for, promoted by the plan.
func (s *stream) use(ctx context.Context) error {
	if s.index != nil {
		return nil
	}
	if s.target == nil {
		return fmt.Errorf("%w: a plan of no image", bundle.ErrCorrupt)
	}
	var err error
	if s.index, err = newIndex(s.plan, s.target.layout(), func() (*toc.TOC, error) { return s.p.toc(ctx, s.target) }); err != nil {
		return err
	}
	p := s.p
	choose := p.chooses()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.current = s
	p.decideLocked(func(d *schedule.Schedule, now time.Time) { d.Plan(now, s.index.sizes(), s.index.frameOf) })
	if choose {
		s.choice.begin(ctx, s)
	}
	return nil
}

// begin goes on from the startup set to the plan.
func (s *stream) begin() {
	p := s.p
	// Whoever waits for pages of the startup set has them once the workers are
	// done with what has been read; nothing is promoted for it.
	s.jobs.Wait()
	if p.opts.Early != nil {
		p.opts.Early(p.startup())
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	s.begun = true
	if p.exact && s.choice.stop != nil {
		s.cancel(errReplan) // it waited for the startup set
	}
	p.counts.total.Store(p.counts.moved.Load() + s.plan.MaxBytes - s.choice.bytes)
	s.target.toc = nil
	p.trouble = trouble{}
	p.damage.told(s.claims)
	p.decideLocked((*schedule.Schedule).PagesDone)
	p.services.plannedLocked()
}

// keepOrHand keeps a frame, or gives it to a worker, who gets its buffer: held is nil then.
func (s *stream) keepOrHand(ctx context.Context, j job, held **buffer) error {
	if later, now := s.p.pipe.keep(j); !later {
		*held = nil
	} else if j = now; j.reads == nil {
		return nil
	}
	return s.hand(ctx, j)
}

// hand gives a job to a worker.
func (s *stream) hand(ctx context.Context, j job) error {
	j.done = &s.jobs
	s.jobs.Add(1)
	select {
	case s.p.pipe.jobs <- j:
		return nil
	case <-ctx.Done():
		s.p.pipe.putBuffer(j.buffer)
		s.jobs.Done()
		return context.Cause(ctx)
	}
}

// image opens the image, unless an earlier stream has.
func (s *stream) image(ctx context.Context, img *bundle.Image) error {
	p := s.p
	p.mu.Lock()
	t := p.target
	p.mu.Unlock()
	if t == nil {
		var err error
		if t, err = p.open(ctx, img); err != nil {
			return err
		}
	} else if t.header.TOCDigest != img.TOCDigest || t.header.ChainID != img.ChainID {
		return finalError{fmt.Errorf("the server now has TOC %s for rootfs %s, this pull began with %s of %s: remove the image and pull it again",
			img.TOCDigest, img.ChainID, t.header.TOCDigest, t.header.ChainID)}
	}
	s.target = t
	return nil
}

// head tells of the image, whose TOC is still to come.
func (p *Pull) head(img *bundle.Image) error {
	if p.opts.Head == nil {
		return nil
	}
	if err := p.opts.Head(img); err != nil {
		return finalError{err}
	}
	return nil
}

func (p *Pull) open(ctx context.Context, img *bundle.Image) (*target, error) {
	t := &target{header: *img}
	if img.TOC != nil {
		var err error
		if t.toc, err = img.DecodeTOC(nil); err != nil {
			return nil, err
		}
	}
	a, err := p.opts.Open(ctx, img, t.toc)
	if err != nil {
		return nil, finalError{err}
	}
	t.header.TOC, t.header.Manifest.Bytes, t.header.Config.Bytes, t.header.Chosen = nil, nil, nil, nil
	if a != nil {
		if n := a.Layout().TOCSegments(); n != int(img.Segments) {
			return nil, finalError{fmt.Errorf("arena %s is of a TOC of %d segments, the image has %d", a.Dir(), n, img.Segments)}
		}
		a.Resume() // an earlier pull may have failed
		t.arena = a
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.target = t
	if a != nil {
		p.schedule.Opened(inArena{a})
	}
	// The tag may name something else by the time a stream is resumed.
	p.image.Reference = img.Manifest.Digest.String()
	p.counts.opened.Add(1)
	return t, nil
}

// toc returns the TOC of a target, which has it until the plan has been read.
func (p *Pull) toc(ctx context.Context, t *target) (*toc.TOC, error) {
	if t.toc != nil {
		return t.toc, nil
	}
	if p.opts.TOC == nil {
		return nil, finalError{fmt.Errorf("the TOC of rootfs %s is needed, and not at hand", t.header.ChainID)}
	}
	b, err := p.opts.TOC(ctx, &t.header)
	if err != nil {
		return nil, finalError{err}
	}
	if t.toc, err = t.header.DecodeTOC(b); err != nil {
		return nil, finalError{err}
	}
	return t.toc, nil
}

// set is a startup set that a stream brings.
type set struct {
	*bundle.Startup
	arena    *arena.Arena  // nil: all of the rootfs is elsewhere
	contents []toc.Content // of the runs
}

// blocks returns the bitmap of the arena's blocks that the set brings; nil: none.
func (v *set) blocks() []uint64 {
	if v.arena == nil || len(v.Runs) == 0 {
		return nil
	}
	l := v.arena.Layout()
	blocks := make([]uint64, (l.Blocks()+63)/64)
	for _, r := range v.Runs {
		at, ok := l.Offset(int(r.Content))
		if !ok {
			continue
		}
		for b := at/arena.BlockSize + int64(r.First); b < at/arena.BlockSize+int64(r.End()); b++ {
			blocks[b/64] |= 1 << (b % 64)
		}
	}
	return blocks
}

// startup takes the startup set over: its frames follow.
func (s *stream) startup(ctx context.Context, v *bundle.Startup) error {
	p := s.p
	taken, err := p.take(ctx, s.target, v)
	if err != nil {
		return err
	}
	p.counts.pagesTotal.Store(p.counts.pagesRaw.Load() + v.ContentBytes()) // with those of earlier streams
	s.set, s.left = taken, len(v.Frames)
	bytes := int64(0)
	for _, f := range v.Frames {
		bytes += int64(f.MaxLength)
	}
	blocks := taken.blocks()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.origin == "" {
		p.origin = v.Origin
	}
	p.decideLocked(func(d *schedule.Schedule, _ time.Time) { d.Startup(blocks, bytes, v.Held()) })
	return nil
}

// here passes on which pages of a startup set are here.
func (p *Pull) here(ctx context.Context, t *target, v *bundle.Here) error {
	if p.opts.Here == nil {
		return nil
	}
	x, err := p.toc(ctx, t)
	if err != nil {
		return err
	}
	if err := trace.Check(v.Runs, x); err != nil {
		return fmt.Errorf("%w: pages that are here: %w", bundle.ErrCorrupt, err)
	}
	p.opts.Here(v.Runs)
	return nil
}

// take checks a startup set of a target.
func (p *Pull) take(ctx context.Context, t *target, v *bundle.Startup) (*set, error) {
	x, err := p.toc(ctx, t)
	if err != nil {
		return nil, err
	}
	if err := v.Resolve(x); err != nil {
		return nil, err
	}
	taken := &set{Startup: v, arena: t.arena, contents: make([]toc.Content, len(v.Runs))}
	for i, r := range v.Runs {
		taken.contents[i] = x.Contents[r.Content]
	}
	return taken, nil
}
