package dedup

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/server/catalog"
)

// Verify reads segments and returns those that rest nowhere, or whose bytes
// are lost or not what they should be: of no pack, or of the one where at says that they are. It fails only when at does, or
// ctx ends.
func (s *Store) Verify(ctx context.Context, at catalog.Locator, ids []segment.ID) (bad []catalog.Resting, err error) {
	locations, err := at.Locate(ctx, ids)
	if err != nil {
		return nil, fmt.Errorf("verify %d segments: %w", len(ids), err)
	}
	stored := make([]int, 0, len(ids)) // into ids, as they lie in packs
	for i, l := range locations {
		if l.Frame == nil {
			bad = append(bad, catalog.Resting{ID: ids[i]})
		} else {
			stored = append(stored, i)
		}
	}
	slices.SortFunc(stored, func(a, b int) int {
		x, y := locations[a].Frame, locations[b].Frame
		return cmp.Or(cmp.Compare(x.Pack, y.Pack), cmp.Compare(x.Offset, y.Offset))
	})
	var raw []byte
	whole := false // raw is all of the frame at hand
	for n, i := range stored {
		l := locations[i]
		if n == 0 || l.Frame != locations[stored[n-1]].Frame {
			frame, err := s.ReadFrame(ctx, l.Frame)
			if ctx.Err() != nil {
				return nil, ctx.Err()
			}
			if err == nil {
				raw, err = segment.DecodeFrame(raw[:0], frame, int(l.Frame.RawLength))
			}
			whole = err == nil
		}
		b := raw
		for _, fs := range l.Frame.Segments[:l.Index] {
			b = b[min(len(b), int(fs.Length)):]
		}
		b = b[:min(len(b), int(l.Frame.Segments[l.Index].Length))]
		if !whole || segment.Sum(b) != ids[i] {
			bad = append(bad, catalog.Resting{Pack: l.Frame.Pack, ID: ids[i]})
		}
	}
	return bad, nil
}
