package dedup

import (
	"context"
	"fmt"

	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/server/catalog"
)

// Compact writes a pack with those segments of others that are live, each once, durable when it returns; the catalog is not told.
// Frames that are live as a whole are copied as they are. Of the others live segments are compared with their IDs. wait is
// called before bytes are read or written. Errors: segment.ErrCorrupt; those of the object store.
func (s *Store) Compact(ctx context.Context, packs []catalog.PackUse, live func(pack int, id segment.ID) bool, wait func(ctx context.Context, bytes int) error) (catalog.Pack, error) {
	c := compaction{ctx: ctx, store: s, wait: wait}
	copied := make(map[segment.ID]bool) // from the packs before
	defer func() {
		if c.out.w != nil {
			c.out.w.Close()
		}
	}()
	for i, p := range packs {
		for n := range p.Frames {
			f := &p.Frames[n]
			if err := c.frame(f, func(id segment.ID) bool { return live(i, id) && !copied[id] }); err != nil {
				return catalog.Pack{}, fmt.Errorf("compact pack %s: %w", p.Key, err)
			}
			for _, s := range f.Segments {
				if live(i, s.ID) {
					copied[s.ID] = true
				}
			}
		}
	}
	if err := c.flush(); err != nil {
		return catalog.Pack{}, fmt.Errorf("compact packs: %w", err)
	}
	if c.out.w == nil {
		return catalog.Pack{}, fmt.Errorf("compact packs: nothing in them is live")
	}
	if err := c.out.end(); err != nil {
		return catalog.Pack{}, err
	}
	if err := c.out.w.Commit(); err != nil {
		return catalog.Pack{}, fmt.Errorf("commit pack %s: %w", c.out.key, err)
	}
	return s.ReadPack(ctx, c.out.key)
}

// compaction is a pack that is being written.
type compaction struct {
	ctx   context.Context
	store *Store
	wait  func(ctx context.Context, bytes int) error
	out   packWriter
	small frame // segments of frames that are live in part
	raw   []byte
}

// frame copies what is live of a frame.
func (c *compaction) frame(f *catalog.Frame, live func(segment.ID) bool) error {
	n := 0
	for _, s := range f.Segments {
		if live(s.ID) {
			n++
		}
	}
	if n == 0 {
		return nil
	}
	if err := c.wait(c.ctx, 2*int(f.Length)); err != nil {
		return err
	}
	encoded, err := c.store.ReadFrame(c.ctx, f)
	if err != nil {
		return err
	}
	if n == len(f.Segments) {
		return c.out.add(c.ctx, c.store.Objects, encoded, f.Segments)
	}
	if c.raw, err = segment.DecodeFrame(c.raw[:0], encoded, int(f.RawLength)); err != nil {
		return fmt.Errorf("frame at %d: %w", f.Offset, err)
	}
	rest := c.raw
	for _, s := range f.Segments {
		b := rest[:s.Length]
		rest = rest[s.Length:]
		if !live(s.ID) {
			continue
		}
		if segment.Sum(b) != s.ID {
			return fmt.Errorf("frame at %d: segment %s: %w", f.Offset, s.ID, segment.ErrCorrupt)
		}
		if len(c.small.raw) > 0 && len(c.small.raw)+len(b) > segment.FrameTarget {
			if err := c.flush(); err != nil {
				return err
			}
		}
		c.small.add(s, b)
	}
	return nil
}

func (c *compaction) flush() error {
	if len(c.small.raw) == 0 {
		return nil
	}
	var err error
	if c.small.encoded, err = segment.AppendFrame(c.small.encoded[:0], segment.Zstd, c.small.raw); err != nil {
		return err
	}
	err = c.out.add(c.ctx, c.store.Objects, c.small.encoded, c.small.segments)
	c.small.raw, c.small.segments = c.small.raw[:0], c.small.segments[:0]
	return err
}
