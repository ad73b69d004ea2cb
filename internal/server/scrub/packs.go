package scrub

import (
	"context"
	"errors"
	"fmt"

	"hydrofoil.dev/foil/internal/server/catalog"
)

func (s *Scrubber) everyPack(ctx context.Context, after string) error {
	for {
		page, err := s.o.Catalog.PacksAfter(ctx, after, pageSize)
		if err != nil || len(page) == 0 {
			return err
		}
		for _, key := range page {
			after = key
			n, err := s.pack(ctx, key)
			if err != nil {
				return err
			}
			if err := s.done("packs", after, 1, n); err != nil {
				return err
			}
		}
	}
}

// pack looks at one pack. What it lost is brought again by the next phase.
func (s *Scrubber) pack(ctx context.Context, key string) (read int64, err error) {
	defer s.o.Readers.Begin()()
	p, err := s.o.Catalog.Pack(ctx, key)
	if errors.Is(err, catalog.ErrNotFound) {
		return 0, nil // it was replaced meanwhile
	}
	if err != nil {
		return 0, err
	}
	x, err := s.packs.Examine(ctx, p)
	if err != nil {
		return 0, err
	}
	for _, f := range x.Sound {
		read += int64(f.Length)
	}
	if x.Wrong == nil {
		return read, nil
	}
	f := Finding{Key: key, Why: x.Wrong.Error()}
	if s.o.Check {
		for _, id := range x.Lost {
			if len(s.missing) < maxMissing {
				s.missing[id] = true
			}
		}
		return read, s.found(f)
	}
	if mended, err := s.fromCopy(ctx, key); err != nil {
		return read, err
	} else if mended {
		f.Mended = "copied from another store"
		return read, s.found(f)
	}
	if away := s.o.Objects.Away(); away != "" {
		f.Why += "; it may be whole in a store that is not here: " + away
		return read, s.found(f)
	}
	var with *catalog.Pack
	if len(x.Sound) > 0 {
		moved, err := s.packs.Salvage(ctx, x.Sound)
		if err != nil {
			return read, err
		}
		with = &moved
	}
	s.o.At("salvaged")
	err = s.o.Catalog.ReplacePack(ctx, p, with)
	if errors.Is(err, catalog.ErrInUse) {
		f.Why += "; an ingest relies on the pack: the next pass mends it"
		return read, s.found(f)
	}
	if err != nil {
		return read, err
	}
	s.o.At("replaced")
	if err := s.o.Objects.Delete(ctx, key); err != nil {
		return read, err
	}
	f.Mended = fmt.Sprintf("%d frames moved to another pack; %d segments are taken from their layers again, or those are named below", len(x.Sound), len(x.Lost))
	return read, s.found(f)
}
