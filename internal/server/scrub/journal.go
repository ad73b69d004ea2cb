package scrub

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/catalog/sqlcat"
	"hydrofoil.dev/foil/internal/server/catalog/sqlite"
	"hydrofoil.dev/foil/internal/server/journal"
	"hydrofoil.dev/foil/internal/server/objects"
)

// journal reads all of the journal into a catalog beside, as a rebuild would, and compares that with the one that serves. So
// it finds objects that are lost as well as those that are damaged. What the journal lacks is logged again, at its present value; then
// damaged objects are deleted.
func (s *Scrubber) journal(ctx context.Context) error {
	state, err := s.o.Catalog.LogState(ctx)
	if err != nil {
		return err
	}
	in := "" // a check writes nothing below the root
	if !s.o.Check {
		in = s.o.Root
	}
	dir, err := os.MkdirTemp(in, besidePrefix)
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir) //nolint:errcheck // a leftover below the directory for such
	beside, err := sqlite.Open(ctx, filepath.Join(dir, "catalog.db"))
	if err != nil {
		return err
	}
	defer beside.Close()
	damaged, whole, err := s.replay(ctx, beside)
	if err != nil {
		return err
	}
	if !state.Whole {
		s.o.Log.Info("scrub: the journal is still being written for the first time: it is compared with the catalog by the next pass")
		return s.nameDamaged(damaged, "")
	}
	lacks, err := s.compare(ctx, beside)
	if err != nil {
		return err
	}
	if lacks > 0 {
		// Changes that were made since are in objects that are newer.
		if _, whole, err = s.replay(ctx, beside); err != nil {
			return err
		}
		if lacks, err = s.compare(ctx, beside); err != nil {
			return err
		}
	}
	if !whole {
		lacks++
	}
	how := ""
	if !s.o.Check {
		if lacks > 0 {
			if err := s.logAgain(ctx, beside); err != nil {
				return err
			}
		}
		s.o.At("logged")
		for _, d := range damaged {
			if err := s.o.Objects.Delete(ctx, d.Key); err != nil {
				return err
			}
		}
		how = fmt.Sprintf("%d values that the journal lacked were written to it again", lacks)
	}
	if lacks > 0 && len(damaged) == 0 {
		return s.found(Finding{Key: journal.Prefix, Why: fmt.Sprintf("objects of the journal are lost: it lacks %d values of the catalog", lacks), Mended: how})
	}
	return s.nameDamaged(damaged, how)
}

func (s *Scrubber) nameDamaged(damaged []journal.Damaged, how string) error {
	for _, d := range damaged {
		if err := s.found(Finding{Key: d.Key, Why: d.Err.Error(), Mended: how}); err != nil {
			return err
		}
	}
	return nil
}

// replay makes the changes of the journal in a catalog, with those that are about to be written to it, and reports whether it says that it is whole. Compaction may take objects
// away meanwhile.
func (s *Scrubber) replay(ctx context.Context, to *sqlcat.Catalog) (damaged []journal.Damaged, whole bool, err error) {
	j := journal.New(s.store, journal.Options{Fan: 1 << 30, Log: s.o.Log}) // that compacts nothing
	defer j.Close()                                                        //nolint:errcheck // it only reads
	replay := func(changes []catalog.Change) error {
		s.progress()
		for i := range changes {
			whole = whole || changes[i].Kind == catalog.ChangesWhole && !changes[i].Gone
		}
		return to.Replay(ctx, changes)
	}
	// First: what is written meanwhile is read twice.
	if err := s.o.Catalog.Unwritten(ctx, replay); err != nil {
		return nil, false, err
	}
	for {
		var n, bytes int64
		damaged, err = j.Read(ctx, func(_ string, changes []catalog.Change) error {
			n++
			return replay(changes)
		})
		if errors.Is(err, objects.ErrNotFound) && ctx.Err() == nil {
			continue
		}
		if err != nil {
			return nil, false, err
		}
		sum, err := j.Summary(ctx)
		if err == nil {
			err = to.EndReplay(ctx, 0, whole) // repositories that were deleted go
		}
		if err == nil {
			bytes = sum.Bytes
			err = s.done("journal", "", n, bytes)
		}
		return damaged, whole, err
	}
}

// compare counts what the catalog has and the one made of the journal has not, or otherwise, and the reverse.
func (s *Scrubber) compare(ctx context.Context, beside *sqlcat.Catalog) (lacks int, err error) {
	return lacks, errors.Join(
		each(ctx, s.o.Catalog, beside, func(other []catalog.Change) error { lacks += len(other); return nil }),
		each(ctx, beside, s.o.Catalog, func(other []catalog.Change) error { lacks += len(other); return nil }))
}

// each calls fn with what a has, and b has not or otherwise.
func each(ctx context.Context, a, b *sqlcat.Catalog, fn func(other []catalog.Change) error) error {
	return a.EachLogged(ctx, func(changes []catalog.Change) error {
		other, err := b.Differs(ctx, changes)
		if err != nil || len(other) == 0 {
			return err
		}
		return fn(other)
	})
}

// logAgain logs what differs, at its present value: what changed meanwhile is no worse for it.
func (s *Scrubber) logAgain(ctx context.Context, beside *sqlcat.Catalog) error {
	again := func(other []catalog.Change) error { return s.o.Catalog.LogAgain(ctx, other) }
	return errors.Join(each(ctx, s.o.Catalog, beside, again), each(ctx, beside, s.o.Catalog, again),
		again([]catalog.Change{{Kind: catalog.ChangesWhole}}))
}
