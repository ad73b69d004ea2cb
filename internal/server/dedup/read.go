package dedup

import (
	"context"
	"errors"
	"fmt"

	"hydrofoil.dev/foil/internal/format/segment"
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

// ReadSegment returns the bytes of one segment, verified. Errors: ErrNotStored;
// ErrBadPack when they are not what they should be.
func (s *Store) ReadSegment(ctx context.Context, id segment.ID) ([]byte, error) {
	var out []byte
	err := s.ReadSegments(ctx, []segment.ID{id}, func(_ int, b []byte) error {
		out = append(out, b...)
		return nil
	})
	return out, err
}

// ReadSegments calls fn with the index and the bytes of each segment, in the
// order of ids; the bytes, verified, are valid during the call. A frame that
// holds several segments in a row is read once. Errors: those of ReadSegment,
// and fn's.
func (s *Store) ReadSegments(ctx context.Context, ids []segment.ID, fn func(i int, b []byte) error) error {
	locations, err := s.Catalog.Locate(ctx, ids)
	if err != nil {
		return fmt.Errorf("read %d segments: %w", len(ids), err)
	}
	var last *catalog.Frame
	var raw []byte
	for i, l := range locations {
		if l.Frame == nil {
			return fmt.Errorf("read segment %s: %w", ids[i], ErrNotStored)
		}
		if l.Frame != last {
			frame, err := s.ReadFrame(ctx, l.Frame)
			if err != nil {
				return fmt.Errorf("read segment %s: %w", ids[i], err)
			}
			if raw, err = segment.DecodeFrame(raw[:0], frame, int(l.Frame.RawLength)); err != nil {
				return fmt.Errorf("read segment %s: frame at %d of pack %s: %w: %w", ids[i], l.Frame.Offset, l.Frame.Pack, ErrBadPack, err)
			}
			last = l.Frame
		}
		b := raw
		for _, fs := range l.Frame.Segments[:l.Index] {
			b = b[fs.Length:]
		}
		b = b[:l.Frame.Segments[l.Index].Length]
		if segment.Sum(b) != ids[i] {
			return fmt.Errorf("read segment %s: frame at %d of pack %s: %w: other bytes", ids[i], l.Frame.Offset, l.Frame.Pack, ErrBadPack)
		}
		if err := fn(i, b); err != nil {
			return err
		}
	}
	return nil
}

// Rebuild tells the catalog of every pack in the object store. It is how a
// catalog that was lost is made again; over a whole one it changes nothing but
// that packs which nobody knew are known. It goes on past damaged packs and
// returns how many packs it read, and the damage, joined.
func (s *Store) Rebuild(ctx context.Context) (packs int, err error) {
	var damage []error
	err = s.Objects.List(ctx, prefix, func(key string, _ int64) error {
		p, err := s.ReadPack(ctx, key)
		if err != nil {
			if ctx.Err() != nil {
				return err
			}
			damage = append(damage, err)
			return nil
		}
		if err := s.Catalog.AddPack(ctx, p); err != nil {
			return err
		}
		packs++
		return nil
	})
	if err != nil {
		return packs, fmt.Errorf("rebuild the catalog: %w", err)
	}
	return packs, errors.Join(damage...)
}

// Orphans calls fn for each pack that the catalog serves no segment from: one
// that a process left which died before it published it, or one all of whose
// segments other packs hold too. They may be deleted while nothing is being
// ingested.
func (s *Store) Orphans(ctx context.Context, fn func(key string, size int64) error) error {
	err := s.Objects.List(ctx, prefix, func(key string, size int64) error {
		p, err := s.ReadPack(ctx, key)
		if err != nil {
			return err
		}
		var ids []segment.ID
		for _, f := range p.Frames {
			for _, fs := range f.Segments {
				ids = append(ids, fs.ID)
			}
		}
		locations, err := s.Catalog.Locate(ctx, ids)
		if err != nil {
			return err
		}
		for _, l := range locations {
			if l.Frame != nil && l.Frame.Pack == key {
				return nil
			}
		}
		return fn(key, size)
	})
	if err != nil {
		return fmt.Errorf("look for packs that nothing uses: %w", err)
	}
	return nil
}
