package fetch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sort"
	"sync"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/worker/arena"
)

const noFrame = ^uint32(0)

// stream is one answer of the server.
type stream struct {
	p      *Pull
	id     string
	cancel context.CancelCauseFunc
	jobs   sync.WaitGroup // frames handed to workers
	parts  sync.WaitGroup // what is written of frames that were kept

	order []*target // of the Image sections
	bases []int     // the number in the plan of each one's first segment
	plan  *bundle.Plan
	sets  map[int]*set // startup sets, by index in the request
	hold  bool         // the server was asked to hold the plan's frames back
	left  int          // frames of startup sets that are still to come
	early *bundle.Plan // came among them, and nothing of it was needed so far (early.go)
	// claims are what the request said arrived damaged.
	claims []segment.ID
	// foreign are planned segments whose own arena has no place for them. They
	// may have one in another arena, or be there for nobody.
	foreign map[uint32]toc.Segment
	// frameOf says for each arena which frame holds each of its segments.
	frameOf map[*arena.Arena][]uint32

	// The rest is guarded by p.mu.
	// comes are the blocks of arenas that are in startup sets, while these come; nil after that.
	comes map[*arena.Arena][]uint64
	state []frameState // of the plan's frames
	next  int          // frames before it have been sent, but for those promoted
	bad   int          // frames that were damaged
	torn  int          // those of them that were of startup sets
	ended bool
}

type frameState uint8

const (
	received frameState = 1 << iota // it has been read from the stream
	promoted                        // asked for ahead of its turn
	damaged
)

// stream sends a request and reads its answer to the end. It returns nil when
// nothing is left to ask for. For each of stalls it is twice as patient.
func (p *Pull) stream(stalls int) (err error) {
	ctx, cancel := context.WithCancelCause(p.ctx)
	defer cancel(nil)
	req := p.request()
	req.Hold, req.EarlyPlan = p.holdLeft(), true
	resp, err := p.opts.Client.post(ctx, bundle.PullPath, &req)
	if err != nil {
		return err
	}
	defer resp.Close()
	resp.moved = &p.moved
	resp.most = min(resp.most<<stalls, max(resp.most, p.opts.GiveUp/2))
	s := &stream{p: p, cancel: cancel, hold: req.Hold > 0, claims: req.Damaged, frameOf: make(map[*arena.Arena][]uint32)}
	err = s.read(ctx, resp, &req)
	// What has been read may still be on its way to the arenas; the next
	// request must know it.
	s.end()
	s.parts.Wait()
	s.jobs.Wait()
	if p.ctx.Err() == nil {
		if err := p.settle(); err != nil {
			return finalError{err}
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case errors.Is(context.Cause(ctx), errAgain), err == nil && s.bad > 0:
		return errAgain
	case err != nil && p.ctx.Err() == nil && !isFault(err) && !isFinal(err) && !errors.As(err, new(*bundle.Error)):
		resp.broken()
	}
	if err == nil {
		if err = s.lacks(&req); err != nil {
			// What a set brings, the plan leaves out for all images; one that uses the
			// content in place from elsewhere has no pages to give to the others.
			p.wholly = true
		}
	}
	return err
}

// lacks checks that everything has come when the server had no reason to leave
// something out: the worker said of no other rootfs that it is here. What is
// left out because of one, the owner of the arenas copies.
func (s *stream) lacks(req *bundle.Request) error {
	for _, h := range req.Have {
		if !slices.ContainsFunc(s.order, func(t *target) bool { return t.header.ChainID == h.ChainID }) {
			return nil
		}
	}
	for _, t := range s.order {
		if t.arena != nil && !t.arena.Complete() {
			return fmt.Errorf("%w: the plan lacks %d segments of rootfs %s", bundle.ErrCorrupt, t.arena.Missing(), t.header.ChainID)
		}
	}
	return nil
}

// end takes the stream from those who would promote.
func (s *stream) end() {
	s.p.mu.Lock()
	defer s.p.mu.Unlock()
	s.p.writeKept()
	s.ended = true
	if s.p.current == s {
		s.p.current, s.p.hold.on = nil, false
	}
}

func (s *stream) read(ctx context.Context, resp io.Reader, req *bundle.Request) error {
	p := s.p
	var held *buffer // a frame's buffer, until a worker has it
	defer func() { p.putBuffer(held) }()
	r := bundle.NewReader(resp, bundle.ReaderOptions{Request: req, Head: p.head, Buffer: func(n int) []byte {
		p.putBuffer(held)
		held = p.getBuffer(ctx, n)
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
		switch v := section.(type) {
		case *bundle.Hello:
			s.id = v.Stream
		case *bundle.Image:
			if err := s.image(ctx, v); err != nil {
				return err
			}
		case *bundle.Plan:
			s.expectPages(v)
			if err := s.goOn(ctx); err != nil {
				return err
			}
		case *bundle.Startup:
			if err := s.startup(ctx, v); err != nil {
				return err
			}
		case *bundle.Here:
			if err := p.here(ctx, p.target(v.Index), v); err != nil {
				return err
			}
		case *bundle.Pages:
			p.pagesMoved.Add(int64(len(v.Data)))
			err := s.keepOrHand(ctx, job{stream: s, set: s.sets[v.Image], frame: v.Frame, data: v.Data, buffer: held}, &held)
			if err != nil {
				return err
			}
			s.left--
			if err := s.goOn(ctx); err != nil {
				return err
			}
		case *bundle.Frame:
			if err := s.useEarly(ctx); err != nil {
				return err
			}
			s.arrived(v.Index)
			if err := s.keepOrHand(ctx, job{stream: s, frame: v.Index, data: v.Data, buffer: held}, &held); err != nil {
				return err
			}
		}
	}
}

// keepOrHand keeps a frame, or gives it to a worker, who gets its buffer: held is nil then.
func (s *stream) keepOrHand(ctx context.Context, j job, held **buffer) error {
	if later, now := s.p.keep(j); !later {
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
	case s.p.jobs <- j:
		return nil
	case <-ctx.Done():
		s.p.putBuffer(j.buffer)
		s.jobs.Done()
		return context.Cause(ctx)
	}
}

// image opens an image, or finds the one that an earlier stream opened.
func (s *stream) image(ctx context.Context, img *bundle.Image) error {
	p := s.p
	base := 0
	if n := len(s.order); n > 0 {
		base = s.bases[n-1] + int(s.order[n-1].header.Segments)
	}
	p.mu.Lock()
	t := p.targets[img.Index]
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
	s.order, s.bases = append(s.order, t), append(s.bases, base)
	return nil
}

// head tells of an image whose TOC is still to come.
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
	p.targets[img.Index] = t
	// The tag may name something else by the time a stream is resumed.
	p.images[img.Index].Reference = img.Manifest.Digest.String()
	p.opened.Add(1)
	return t, nil
}

// index finds out where the frames' segments belong. It takes the place of
// Plan.Check: every segment is verified against the arena's layout when it is
// written, so the plan need only be consistent.
func (s *stream) index(ctx context.Context, plan *bundle.Plan) error {
	s.plan, s.early = plan, nil
	for _, t := range s.order {
		if t.arena != nil && s.frameOf[t.arena] == nil {
			f := make([]uint32, t.layout().Segments())
			for i := range f {
				f[i] = noFrame
			}
			s.frameOf[t.arena] = f
		}
	}
	var places []int
	for frame, f := range plan.Frames {
		raw := int64(0)
		for _, n := range plan.Segments[f.First : f.First+f.Segments] {
			home, i := s.home(n)
			if home == nil {
				id, length, err := s.addForeign(ctx, n)
				if err != nil {
					return err
				}
				if id.IsHole() {
					return errHole(frame)
				}
				raw += int64(length)
				for a, frameOf := range s.frameOf {
					places = a.Layout().Find(places[:0], id)
					for _, k := range places {
						frameOf[k] = uint32(frame)
					}
				}
				continue
			}
			l := home.layout()
			piece := l.Segment(i)
			if piece.ID.IsHole() {
				return errHole(frame)
			}
			raw += int64(piece.Length)
			places = l.Same(places[:0], i)
			for _, k := range places {
				s.frameOf[home.arena][k] = uint32(frame)
			}
			for a, frameOf := range s.frameOf {
				if a == home.arena {
					continue
				}
				places = a.Layout().Find(places[:0], piece.ID)
				for _, k := range places {
					frameOf[k] = uint32(frame)
				}
			}
		}
		if raw != int64(f.RawLength) {
			return fmt.Errorf("%w: frame %d of the plan has %d bytes, its segments %d", bundle.ErrCorrupt, frame, f.RawLength, raw)
		}
	}
	s.p.mu.Lock()
	defer s.p.mu.Unlock()
	s.state = make([]frameState, len(plan.Frames))
	return nil
}

// begin goes on from the startup sets to the plan.
func (s *stream) begin() {
	p := s.p
	p.total.Store(p.moved.Load() + s.plan.MaxBytes)
	// Whoever waits for pages of a startup set has them once the workers are
	// done with what has been read; nothing is promoted for it.
	s.jobs.Wait()
	if p.opts.Early != nil {
		p.opts.Early(p.startup())
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, t := range s.order {
		t.toc = nil
	}
	s.comes = nil
	p.current, p.trouble = s, trouble{}
	p.told(s.claims)
	s.beginHold()
	p.planOnce.Do(func() { close(p.planned) })
	p.promoteWaiting()
}

func errHole(frame int) error {
	return fmt.Errorf("%w: frame %d of the plan names a hole", bundle.ErrCorrupt, frame)
}

// home returns the target that segment n of the plan is numbered for, and its
// number in the target's arena; nil when that has no place for it.
func (s *stream) home(n uint32) (*target, int) {
	t, k := s.owner(n)
	if t.arena == nil {
		return nil, 0
	}
	i, ok := t.layout().FromTOC(k)
	if !ok {
		return nil, 0
	}
	return t, i
}

// owner returns the target that segment n of the plan is numbered for, and its
// index in the target's TOC.
func (s *stream) owner(n uint32) (*target, int) {
	k := sort.Search(len(s.bases), func(k int) bool { return s.bases[k] > int(n) }) - 1
	return s.order[k], int(n) - s.bases[k]
}

// addForeign finds out what segment n of the plan is, which no layout says.
func (s *stream) addForeign(ctx context.Context, n uint32) (segment.ID, uint32, error) {
	t, k := s.owner(n)
	if err := s.p.needTOC(ctx, t); err != nil {
		return segment.ID{}, 0, err
	}
	if s.foreign == nil {
		s.foreign = make(map[uint32]toc.Segment)
	}
	piece := t.toc.Segments[k]
	s.foreign[n] = piece
	return piece.ID, piece.Length, nil
}

// needTOC makes sure that a target has its TOC, until the plan has been read.
func (p *Pull) needTOC(ctx context.Context, t *target) error {
	if t.toc != nil {
		return nil
	}
	if p.opts.TOC == nil {
		return finalError{fmt.Errorf("the TOC of rootfs %s is needed, and not at hand", t.header.ChainID)}
	}
	b, err := p.opts.TOC(ctx, &t.header)
	if err != nil {
		return finalError{err}
	}
	if t.toc, err = t.header.DecodeTOC(b); err != nil {
		return finalError{err}
	}
	return nil
}

// arrived notes that a frame has been read.
func (s *stream) arrived(frame uint32) {
	p := s.p
	p.mu.Lock()
	defer p.mu.Unlock()
	// A frame that was promoted says nothing about those planned before it.
	if s.state[frame]&promoted == 0 && int(frame) >= s.next {
		s.next = int(frame) + 1
	}
	s.state[frame] |= received
}

// segments calls fn for each segment of a frame with its place in the decoded
// frame, and where it belongs: the arenas, each with one of its numbers there.
func (s *stream) segments(frame uint32, fn func(id segment.ID, from, to int, a *arena.Arena, i int) error) error {
	f := &s.plan.Frames[frame]
	at := 0
	var places []int
	for _, n := range s.plan.Segments[f.First : f.First+f.Segments] {
		var id segment.ID
		var length int
		home, i := s.home(n)
		if home != nil {
			piece := home.layout().Segment(i)
			id, length = piece.ID, piece.Length
			if err := fn(id, at, at+length, home.arena, i); err != nil {
				return err
			}
		} else {
			piece := s.foreign[n]
			id, length = piece.ID, int(piece.Length)
		}
		if home == nil || len(s.frameOf) > 1 {
			for a := range s.frameOf {
				if home != nil && a == home.arena {
					continue
				}
				if places = a.Layout().Find(places[:0], id); len(places) > 0 {
					if err := fn(id, at, at+length, a, places[0]); err != nil {
						return err
					}
				}
			}
		}
		at += length
	}
	return nil
}
