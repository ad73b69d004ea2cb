package fetch

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/format/trace"
	"hydrofoil.dev/foil/internal/worker/arena"
)

// set is a startup set that a stream brings.
type set struct {
	*bundle.Startup
	arena    *arena.Arena  // nil: all of the rootfs is elsewhere
	contents []toc.Content // of the runs
}

// startup takes a startup set over: its frames follow.
func (s *stream) startup(ctx context.Context, v *bundle.Startup) error {
	p := s.p
	t := p.target(v.Index)
	p.mu.Lock()
	if p.origin == "" {
		p.origin = v.Origin
	}
	p.mu.Unlock()
	taken, err := p.take(ctx, t, v)
	if err != nil {
		return err
	}
	if s.sets == nil {
		s.sets = make(map[int]*set)
		p.pagesTotal.Store(p.pagesRaw.Load()) // of earlier streams
	}
	p.pagesTotal.Add(v.ContentBytes())
	s.sets[v.Index] = taken
	s.left += len(v.Frames)
	return nil
}

// target returns the image with an index in the request, whose header has arrived.
func (p *Pull) target(image int) *target {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.targets[image]
}

// here passes on which pages of a startup set are here.
func (p *Pull) here(ctx context.Context, t *target, v *bundle.Here) error {
	if p.opts.Here == nil {
		return nil
	}
	if err := p.needTOC(ctx, t); err != nil {
		return err
	}
	if err := trace.Check(v.Runs, t.toc); err != nil {
		return fmt.Errorf("%w: pages that are here: %w", bundle.ErrCorrupt, err)
	}
	p.opts.Here(v.Index, v.Runs)
	return nil
}

// take checks a startup set of a target.
func (p *Pull) take(ctx context.Context, t *target, v *bundle.Startup) (*set, error) {
	if err := p.needTOC(ctx, t); err != nil {
		return nil, err
	}
	if err := v.Resolve(t.toc); err != nil {
		return nil, err
	}
	taken := &set{Startup: v, arena: t.arena, contents: make([]toc.Content, len(v.Runs))}
	for i, r := range v.Runs {
		taken.contents[i] = t.toc.Contents[r.Content]
	}
	return taken, nil
}

// writePages writes one frame of a startup set. It returns raw, which it may
// have replaced by a larger buffer.
func (p *Pull) writePages(j job, raw []byte) []byte {
	s, f := j.stream, &j.set.Frames[j.frame]
	runs, ids := j.set.Runs[f.First:f.First+f.Count], j.set.Digests[f.First:f.First+f.Count]
	raw, err := segment.DecodeFrame(raw[:0], j.data, int(f.RawLength))
	if err != nil {
		p.forget(j.kept)
		s.tornPages(j.frame, ids, err)
		return raw
	}
	if j.set.arena == nil {
		return raw
	}
	var wrong []segment.ID
	here := make([]trace.Run, 0, len(runs))
	written, at := int64(0), int64(0)
	for i, r := range runs {
		content := &j.set.contents[int(f.First)+i]
		_, n := r.Range(content.Size)
		data := raw[at : at+n]
		at += n
		// What is used in place from another arena is here already.
		base, ok := j.set.arena.Layout().Offset(int(r.Content))
		if !ok || j.reads != nil && !j.reaches(j.set.arena, base+int64(r.First)*trace.BlockSize, n) {
			continue
		}
		completed, werr := j.set.arena.WriteRun(r, ids[i], data)
		if werr == nil {
			werr = p.spread(j.set.arena, completed)
		}
		switch {
		case errors.Is(werr, arena.ErrWrongBytes):
			wrong, err = append(wrong, ids[i]), werr
		case werr != nil:
			// The disk, or a server that says two things: another stream would
			// not help.
			p.cancel(fmt.Errorf("content %s: %w", content.ID, werr))
			return raw
		default:
			written += n
			here = append(here, r)
		}
	}
	if len(p.opts.Request.Images) > 1 {
		// What the pages have completed may be all that another image waits for.
		if err := p.settle(); err != nil {
			p.cancel(err)
			return raw
		}
	}
	if j.reads != nil && len(wrong) == 0 {
		return raw // counted when all of it is written; it goes to who reads it
	}
	// Filled pages are not in anybody's way into the page cache.
	if filled := int(j.frame) >= len(j.set.Frames)-j.set.Filled; p.opts.Pages != nil && len(here) > 0 && !filled {
		p.opts.Pages(j.set.Index, j.set.Origin, here)
	}
	// The pages wait for the next sync that is due by time or for other bytes: it costs
	// the processors and the disk about as much as writing them did, while a start is
	// short of both.
	p.pagesRaw.Add(written)
	p.stored.Add(written)
	if len(wrong) > 0 {
		p.forget(j.kept)
		s.tornPages(j.frame, wrong, err)
		return raw
	}
	if written > 0 { // else it is no step forward
		p.frames.Add(1)
	}
	return raw
}

// settle has what pages of startup sets have completed verified, and counted as segments.
func (p *Pull) settle() error {
	p.mu.Lock()
	targets := slices.Clone(p.targets)
	p.mu.Unlock()
	for _, t := range targets {
		if t == nil || t.arena == nil {
			continue
		}
		completed, err := t.arena.Settle()
		if err == nil {
			err = p.spread(t.arena, completed)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// spread copies segments that page runs completed to the pull's other arenas
// that want them: the plan leaves them out for all.
func (p *Pull) spread(from *arena.Arena, segments []int) error {
	if len(segments) == 0 || len(p.opts.Request.Images) == 1 {
		return nil
	}
	p.mu.Lock()
	targets := slices.Clone(p.targets)
	p.mu.Unlock()
	var places []int
	for _, t := range targets {
		if t == nil || t.arena == nil || t.arena == from {
			continue
		}
		for _, i := range segments {
			places = t.layout().Find(places[:0], from.Layout().Segment(i).ID)
			if len(places) == 0 || t.arena.HasSegment(places[0]) {
				continue
			}
			if err := t.arena.CopyFrom(from, i, places[0]); err != nil {
				return err
			}
		}
	}
	return nil
}

// tornPages counts a frame of a startup set that was damaged. Nothing of what was
// wrong was marked present, so it is asked for again when the stream has ended, or
// at once when a read needs it.
func (s *stream) tornPages(frame uint32, ids []segment.ID, err error) {
	p := s.p
	p.log.Warn("damaged pages", "frame", frame, "stream", s.id, "error", err)
	p.mu.Lock()
	defer p.mu.Unlock()
	s.torn++
	s.countDamage(ids, fmt.Errorf("frame %d of a startup set: %w", frame, err))
}
