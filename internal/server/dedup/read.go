package dedup

import (
	"context"
	"fmt"

	"hydrofoil.dev/foil/internal/server/catalog"
)

// ReadFrame returns a frame as it rests in its pack, encoded; it is not
// verified. Errors: objects.ErrNotFound.
func (s *Store) ReadFrame(ctx context.Context, f *catalog.Frame) ([]byte, error) {
	b, err := s.read(ctx, f.Pack, f.Offset, int64(f.Length))
	if err != nil {
		return nil, fmt.Errorf("read frame at %d of pack %s: %w", f.Offset, f.Pack, err)
	}
	return b, nil
}
