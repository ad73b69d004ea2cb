package fetch

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/worker/schedule"
)

// choice is what of a stream's plan comes another way: see Options.Elsewhere. Frames that bring nothing
// else are skipped, and can be had after all by a promotion. Where frames that are wanted bring much of
// it along, as when a worker pulls two versions of a layer, skipping is not enough: then the image is asked for once
// more, as if what comes another way were here, so that the server makes frames without it.
type choice struct {
	asked sync.WaitGroup
	stop  context.CancelFunc // ends asked

	// Guarded by Pull.mu.
	skipped int   // frames that the server was told to skip
	bytes   int64 // of them, at most
}

// begin asks what of the plan of s comes another way, in the background: the stream is read meanwhile.
func (c *choice) begin(ctx context.Context, s *stream) {
	ctx, c.stop = context.WithCancel(ctx)
	c.asked.Go(func() { c.make(ctx, s) })
}

// end waits until nothing is asked any more. The stream has ended.
func (c *choice) end() {
	if c.stop != nil {
		c.stop()
	}
	c.asked.Wait()
}

func (c *choice) make(ctx context.Context, s *stream) {
	p := s.p
	var absent []int
	if a := s.target.arena; a != nil {
		for i, f := range s.index.frameOf {
			if f != schedule.NoFrame && !a.HasSegment(i) {
				absent = append(absent, i)
			}
		}
	}
	first := slices.Clone(absent)
	slices.SortStableFunc(first, func(i, j int) int { return cmp.Compare(s.index.frameOf[i], s.index.frameOf[j]) })
	elsewhere := p.opts.Elsewhere(ctx, first)
	skip, along := s.index.without(absent, elsewhere)
	skip = skip[:min(len(skip), bundle.MaxSkip)]
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.current != s {
		return
	}
	if along > min(s.plan.ContentBytes/alongShare, alongMost) {
		p.log.Debug("asking once more, without what comes another way", "segments", len(elsewhere), "along", along)
		p.exact, p.elsewhere = true, elsewhere
		if s.begun {
			s.cancel(errReplan)
		} // else when the startup set has come
		return
	}
	p.decideLocked(func(d *schedule.Schedule, now time.Time) {
		for _, f := range d.Chosen(now, skip) {
			c.skipped++
			c.bytes += bundle.SectionLength(int(s.plan.Frames[f].MaxLength))
		}
	})
	if s.begun {
		p.counts.total.Add(-c.bytes)
	}
}

const (
	// What comes twice when frames are skipped, bytes of contents, before the image is asked for once more, which
	// costs a round trip: a share of what is planned, at most alongMost.
	alongShare = 32
	alongMost  = 2 << 20
)

// errReplan ends a stream so that what is to come is asked for anew.
var errReplan = errors.New("what is to come has changed")

// without returns the frames that bring nothing of what is absent but what comes another way, and how
// many bytes of that the other frames bring along.
func (x *index) without(absent, elsewhere []int) (frames []uint32, along int64) {
	wanted := make([]bool, len(x.plan.Frames))
	rest := elsewhere
	for _, i := range absent {
		if len(rest) > 0 && rest[0] == i {
			rest = rest[1:]
			continue
		}
		wanted[x.frameOf[i]] = true
	}
	for _, i := range elsewhere {
		if wanted[x.frameOf[i]] {
			along += int64(x.layout.Segment(i).Length)
		}
	}
	for f, w := range wanted {
		if !w {
			frames = append(frames, uint32(f))
		}
	}
	return frames, along
}

// claim adds to a bitmap of what is here of a target what comes another way. That includes what its
// arena has no place for: it lies in another arena.
func (t *target) claim(present []byte, claims []int) {
	l := t.arena.Layout()
	for n := range int(t.header.Segments) {
		i, ok := l.FromTOC(n)
		if ok {
			_, ok = slices.BinarySearch(claims, i)
			ok = !ok
		}
		if !ok {
			present[n/8] |= 1 << (n % 8)
		}
	}
}

// Bring has segments of the arena, ascending, sent that Options.Elsewhere said come another way. When the stream
// has ended it does nothing: another pull is to ask for them.
func (p *Pull) Bring(segments []int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if claimed := len(p.elsewhere); claimed > 0 {
		p.elsewhere = slices.DeleteFunc(slices.Clone(p.elsewhere), func(i int) bool {
			_, ok := slices.BinarySearch(segments, i)
			return ok
		})
		if len(p.elsewhere) < claimed {
			if p.running != nil {
				p.running.cancel(errReplan)
			}
			return
		}
	}
	s := p.current
	if s == nil {
		return
	}
	p.decideLocked(func(d *schedule.Schedule, now time.Time) {
		var frames []uint32
		for _, i := range segments {
			if f := s.index.frameOf[i]; f != schedule.NoFrame {
				frames = append(frames, f) // back takes each once
			}
		}
		d.Back(now, frames)
	})
}

// Hurry has segments of the arena come early, which another pull wants in this order and leaves to this one.
func (p *Pull) Hurry(segments []int) {
	p.decide(func(s *schedule.Schedule, now time.Time) { s.Hurry(now, segments) })
}

// Held reports whether the server sends nothing but what is promoted, since Options.Hold asks for that.
func (p *Pull) Held() bool { return p.state().Holds }

// chooses reports whether streams ask what comes another way.
func (p *Pull) chooses() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.opts.Elsewhere != nil && !p.exact
}
