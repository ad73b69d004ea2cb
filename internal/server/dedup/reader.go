package dedup

import (
	"context"
	"fmt"

	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/server/catalog"
)

// keptFrames is how many decoded frames a Reader keeps. Small files of a layer lie in
// its own frames, in their order, and, those that other layers had before, in theirs.
const keptFrames = 16

// Reader reads segments one by one. It keeps the frames that it read last, decoded:
// 16 of up to 1 MiB. It is for one goroutine.
type Reader struct {
	store *Store
	kept  []keptFrame // the last used first
}

type keptFrame struct {
	pack   string
	offset int64
	raw    []byte
}

// NewReader returns a Reader.
func (s *Store) NewReader() *Reader { return &Reader{store: s} }

// Segment returns the bytes of a segment that is stored, valid until the next call. They
// are not compared with its ID. Errors: objects.ErrNotFound; segment.ErrCorrupt.
func (r *Reader) Segment(ctx context.Context, l catalog.Location) ([]byte, error) {
	raw, err := r.frame(ctx, l.Frame)
	if err != nil {
		return nil, err
	}
	for _, before := range l.Frame.Segments[:l.Index] {
		raw = raw[min(len(raw), int(before.Length)):]
	}
	n := int(l.Frame.Segments[l.Index].Length)
	if n > len(raw) {
		return nil, fmt.Errorf("frame at %d of pack %s: %w: its segments are longer than it", l.Frame.Offset, l.Frame.Pack, segment.ErrCorrupt)
	}
	return raw[:n], nil
}

func (r *Reader) frame(ctx context.Context, f *catalog.Frame) ([]byte, error) {
	for i, k := range r.kept {
		if k.pack == f.Pack && k.offset == f.Offset {
			copy(r.kept[1:i+1], r.kept[:i])
			r.kept[0] = k
			return k.raw, nil
		}
	}
	encoded, err := r.store.ReadFrame(ctx, f)
	if err != nil {
		return nil, err
	}
	if len(r.kept) < keptFrames {
		r.kept = append(r.kept, keptFrame{})
	}
	buf := r.kept[len(r.kept)-1].raw[:0]
	copy(r.kept[1:], r.kept)
	r.kept[0] = keptFrame{raw: buf}
	raw, err := segment.DecodeFrame(buf, encoded, int(f.RawLength))
	if err != nil {
		return nil, fmt.Errorf("frame at %d of pack %s: %w", f.Offset, f.Pack, err)
	}
	r.kept[0] = keptFrame{f.Pack, f.Offset, raw}
	return raw, nil
}
