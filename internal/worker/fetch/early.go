package fetch

import (
	"context"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/trace"
	"hydrofoil.dev/foil/internal/worker/arena"
)

// The pages of a large startup set take a second on a slow line, and of one that was learned, or
// inherited, or is of a program whose reads vary, some are missing. A read that lacks one would
// wait for all of the set, and a round trip more, if only then it could be said which frame to
// promote. So the plan comes among the pages (bundle.Request.EarlyPlan), and what reads
// wait for is promoted at once, unless the set brings it. It takes the processors a while to find out where
// what is planned belongs, which a start that finds all of its pages can do without: it waits until a read
// needs it, or the pages have come.

// expectPages takes the plan, after which pages may come.
func (s *stream) expectPages(plan *bundle.Plan) {
	comes := make(map[*arena.Arena][]uint64)
	for _, set := range s.sets {
		if set.arena != nil {
			comes[set.arena] = markBlocks(comes[set.arena], set.arena, set.Runs)
		}
	}
	s.p.mu.Lock()
	defer s.p.mu.Unlock()
	s.early, s.comes = plan, comes
}

// goOn uses the plan when that is due: with the last frame of the startup sets, and for reads that
// lack what these do not bring.
func (s *stream) goOn(ctx context.Context) error {
	switch {
	case s.plan == nil && s.early == nil: // the plan comes later
		return nil
	case s.left > 0 && (s.early == nil || !s.lacksPages()):
		return nil
	}
	if s.left > 0 {
		return s.useEarly(ctx)
	}
	if s.early != nil {
		if err := s.index(ctx, s.early); err != nil {
			return err
		}
	}
	s.begin()
	return nil
}

// lacksPages reports whether a read waits for what does not come with startup sets.
func (s *stream) lacksPages() bool {
	p := s.p
	p.mu.Lock()
	defer p.mu.Unlock()
	for r := range p.wanted {
		if !r.kept && !s.bringsPages(r) && !p.brings(r) {
			return true
		}
	}
	return false
}

// useEarly has what reads wait for, and will wait for, promoted by the plan that came among pages.
func (s *stream) useEarly(ctx context.Context) error {
	if s.early == nil {
		return nil
	}
	if err := s.index(ctx, s.early); err != nil {
		return err
	}
	p := s.p
	p.mu.Lock()
	defer p.mu.Unlock()
	p.current = s
	p.promoteWaiting()
	return nil
}

// bringsPages reports whether all that a read lacks comes with the startup sets. p.mu is held.
func (s *stream) bringsPages(r *reading) bool {
	blocks, ok := s.comes[r.arena]
	return ok && r.within(blocks)
}

// within reports whether all that a read lacks is in a bitmap of its arena's blocks.
func (r *reading) within(blocks []uint64) bool {
	for b := r.off / arena.BlockSize; b*arena.BlockSize < r.off+r.n; b++ {
		if !bit(blocks, b) && !r.arena.Present(b*arena.BlockSize, 1) {
			return false
		}
	}
	return true
}

func bit(m []uint64, i int64) bool { return int(i/64) < len(m) && m[i/64]>>(i%64)&1 != 0 }

// markBlocks sets the bits of the blocks of an arena that runs are, in blocks or, if that is nil, in
// a new bitmap.
func markBlocks(blocks []uint64, a *arena.Arena, runs []trace.Run) []uint64 {
	l := a.Layout()
	if blocks == nil {
		blocks = make([]uint64, (l.Blocks()+63)/64)
	}
	for _, r := range runs {
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
