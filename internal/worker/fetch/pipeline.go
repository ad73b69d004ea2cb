package fetch

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/kernel"
	"hydrofoil.dev/foil/internal/worker/arena"
)

// job is one frame for a worker.
type job struct {
	stream *stream
	set    *set   // that it is a frame of; nil: of the plan
	frame  uint32 // its index there
	data   []byte
	buffer *buffer         // that data is in; nil: in none
	done   *sync.WaitGroup // to be told; the stream's jobs or parts
	reads  []*reading      // what of the frame is to be written; nil: all
	kept   *kept           // what it is a part of, if reads is not nil
	shift  int             // how much around these, of a frame of the plan: as a power of two, blocks
}

// buffer holds one compressed frame. counted of its bytes are of inFlight.
type buffer struct {
	bytes   []byte
	counted int64
}

// getBuffer returns a buffer of n bytes, once fewer than inFlight are in use.
// When ctx ends first it returns one all the same: the stream is read no
// further.
func (p *Pull) getBuffer(ctx context.Context, n int) *buffer {
	b, _ := p.buffers.Get().(*buffer)
	if b == nil {
		b = new(buffer)
	}
	if cap(b.bytes) < n {
		b.bytes = make([]byte, n, max(n, 256<<10))
	}
	b.bytes, b.counted = b.bytes[:n], 0
	if p.room.Acquire(ctx, int64(n)) == nil {
		b.counted = int64(n)
	}
	return b
}

func (p *Pull) putBuffer(b *buffer) {
	if b != nil {
		p.room.Release(b.counted)
		p.buffers.Put(b)
	}
}

// worker decodes frames and writes their segments. While no read waits for any of them the
// processors are the containers': a service that starts, and finds its pages, does not wait
// for those that come next to be written.
func (p *Pull) worker() {
	priority := kernel.OwnPriority()
	defer priority.End()
	// One that grows with the frames would be memory that nothing has touched yet again and again, and
	// each page of it a page fault. Of this one no more is touched than the largest frame has.
	raw := make([]byte, 0, segment.DecodeCap)
	for j := range p.jobs {
		switch {
		case p.ctx.Err() != nil:
		default:
			priority.SetLow(!p.waitedFor())
			raw = p.writeJob(j, raw)
		}
		p.putBuffer(j.buffer)
		j.done.Done()
	}
}

// waitedFor reports whether a read waits.
func (p *Pull) waitedFor() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.wanted) > 0
}

// writeJob writes what a job says. It returns raw, which it may have replaced by a
// larger buffer.
func (p *Pull) writeJob(j job, raw []byte) []byte {
	if j.set != nil {
		return p.writePages(j, raw)
	}
	return p.write(j, raw)
}

// write writes one frame. It returns raw, which it may have replaced by a
// larger buffer.
func (p *Pull) write(j job, raw []byte) []byte {
	s := j.stream
	raw, err := segment.DecodeFrame(raw[:0], j.data, int(s.plan.Frames[j.frame].RawLength))
	if err != nil {
		p.forget(j.kept)
		s.damaged(j.frame, nil, err)
		return raw
	}
	written, wrong := int64(0), segment.ID{}
	err = s.segments(j.frame, func(id segment.ID, from, to int, a *arena.Arena, i int) error {
		if id == wrong || a.HasSegment(i) && !a.Layout().Repeated(i) {
			return nil
		}
		var err error
		if j.reads == nil {
			err = a.WriteSegment(i, raw[from:to])
		} else {
			err = j.writeParts(a, i, raw[from:to])
		}
		if errors.Is(err, arena.ErrWrongBytes) {
			p.forget(j.kept)
			s.damaged(j.frame, &id, err)
			wrong = id
			return nil // the others may be right
		}
		written += int64(to - from)
		return err
	})
	if err != nil {
		// The disk, not the server: another stream would not help.
		p.cancel(err)
		return raw
	}
	if j.reads != nil {
		return raw // counted when all of it is written
	}
	if wrong == (segment.ID{}) {
		p.frames.Add(1)
	}
	p.wrote(written)
	return raw
}

// wrote counts bytes of contents that were written from frames of the plan.
func (p *Pull) wrote(n int64) {
	p.stored.Add(n)
	if p.unsync.Add(n) >= p.opts.SyncBytes {
		select {
		case p.kick <- struct{}{}:
		default:
		}
	}
}

// damaged counts a frame that did not decode (id nil), or in which a segment
// was wrong. Nothing of it was marked present, so it is asked for again.
func (s *stream) damaged(frame uint32, id *segment.ID, err error) {
	p := s.p
	var ids []segment.ID
	if id != nil {
		ids = []segment.ID{*id}
	} else {
		s.segments(frame, func(id segment.ID, _, _ int, _ *arena.Arena, _ int) error {
			ids = append(ids, id)
			return nil
		})
	}
	p.log.Warn("damaged frame", "frame", frame, "stream", s.id, "error", err)
	p.mu.Lock()
	defer p.mu.Unlock()
	s.state[frame] |= damaged
	if !s.countDamage(ids, fmt.Errorf("frame %d: %w", frame, err)) {
		return
	}
	for r := range p.wanted {
		s.wantAll(r)
	}
}

// countDamage counts a frame in which segments or page runs arrived damaged, and
// reports whether they may come again. The next request names one of them: the
// server looks at all of its frame. p.mu is held.
func (s *stream) countDamage(ids []segment.ID, err error) bool {
	p := s.p
	p.bad.Add(1)
	s.bad++
	if len(ids) > 0 && len(p.claims) < bundle.MaxDamaged {
		p.claims = append(p.claims, ids[0])
	}
	for _, id := range ids {
		p.damaged[id]++
		if n := p.damaged[id]; n >= p.opts.Attempts {
			p.cancel(fmt.Errorf("%s %w from %s %d times: %w: push the image again, the server then looks at all of its copy; if that does not help, something on the way changes bytes", id, ErrDamaged, p.opts.Client.Base(), n, err))
			return false
		}
	}
	return true
}

// again ends the stream, to ask for frames that arrived damaged and that a
// read waits for. p.mu is held.
func (s *stream) again() {
	if !s.ended {
		s.cancel(errAgain)
	}
}
