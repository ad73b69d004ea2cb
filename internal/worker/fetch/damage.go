package fetch

import (
	"fmt"
	"slices"
	"time"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/worker/schedule"
)

// damage is what arrived with other bytes than it should have.
type damage struct {
	times  map[segment.ID]int // how often a segment or page run arrived damaged
	claims []segment.ID       // those of them that the server is to be told of
	wholly bool               // no more startup sets are asked for: segments alone
}

// told notes that the server has looked at what a request said arrived damaged.
func (d *damage) told(claims []segment.ID) {
	for _, id := range claims {
		if i := slices.Index(d.claims, id); i >= 0 { // once: it may have come damaged again since
			d.claims = slices.Delete(d.claims, i, i+1)
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
		s.index.segments(frame, func(id segment.ID, _, _, _ int) error {
			ids = append(ids, id)
			return nil
		})
	}
	p.log.Warn("damaged frame", "frame", frame, "stream", s.id, "error", err)
	p.mu.Lock()
	defer p.mu.Unlock()
	if s.countDamage(ids, fmt.Errorf("frame %d: %w", frame, err)) && !s.ended {
		p.decideLocked(func(d *schedule.Schedule, now time.Time) { d.Damaged(now, frame) })
	}
}

// countDamage counts a frame in which segments or page runs arrived damaged, and
// reports whether they may come again. The next request names one of them: the
// server looks at all of its frame. p.mu is held.
func (s *stream) countDamage(ids []segment.ID, err error) bool {
	p := s.p
	p.counts.bad.Add(1)
	s.bad++
	if len(ids) > 0 && len(p.damage.claims) < bundle.MaxDamaged {
		p.damage.claims = append(p.damage.claims, ids[0])
	}
	for _, id := range ids {
		p.damage.times[id]++
		if n := p.damage.times[id]; n >= p.opts.Attempts {
			p.cancel(fmt.Errorf("%s %w from %s %d times: %w: push the image again, the server then looks at all of its copy; if that does not help, something on the way changes bytes", id, ErrDamaged, p.opts.Client.Base(), n, err))
			return false
		}
	}
	return true
}

// tornPages counts a frame of a startup set that was damaged. Nothing of what was
// wrong was marked present, so it is asked for again when the stream has ended, or
// at once when a read needs it.
func (s *stream) tornPages(frame uint32, ids []segment.ID, err error) {
	p := s.p
	p.log.Warn("damaged pages", "frame", frame, "stream", s.id, "error", err)
	p.mu.Lock()
	defer p.mu.Unlock()
	if s.countDamage(ids, fmt.Errorf("frame %d of a startup set: %w", frame, err)) && !s.ended && !s.beside {
		p.decideLocked((*schedule.Schedule).TornPages)
	}
}
