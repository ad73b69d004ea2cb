package store

import (
	"context"
	"errors"
	"fmt"
	"time"

	"hydrofoil.dev/foil/internal/durable"
	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/contents"
	"hydrofoil.dev/foil/internal/worker/mounts"
	"hydrofoil.dev/foil/internal/worker/rootfs"
)

// Finish makes a rootfs durable and complete: everything of it has arrived. Its
// arena stays behind the gate until LeaveGate.
func (s *Store) Finish(ctx context.Context, r *Rootfs) error {
	if r.Complete() {
		return nil
	}
	what := func(err error) error { return fmt.Errorf("make rootfs %s durable: %w", r.ChainID(), err) }
	if a := r.Arena(); a != nil {
		if err := a.Sync(ctx); err != nil {
			return what(err)
		}
	}
	if err := s.syncLenders(ctx, r); err != nil {
		return what(err)
	}
	if err := errors.Join(syncFiles(r), durable.Sync(r.Path(mounts.Image)), durable.Sync(s.dir())); err != nil {
		return what(err)
	}
	s.opts.At("synced")
	hashed, err := s.hash(ctx, r)
	if err != nil {
		return what(err)
	}
	rec := r.Record()
	rec.Complete, rec.Hashed = true, hashed
	if err := r.Save(&rec, durable.Replace); err != nil {
		return what(err)
	}
	s.opts.At("recorded")
	r.Completed(hashed, time.Now().Add(s.opts.KeepWarm))
	s.keepWarm()
	return nil
}

// syncLenders makes durable what r uses in place of rootfs that are incomplete
// themselves: it must survive a power cut as well, and be found again after it.
func (s *Store) syncLenders(ctx context.Context, r *Rootfs) error {
	incomplete := false
	for _, id := range r.Arenas() {
		if id == r.ID() {
			continue
		}
		other := s.owner(id)
		if other != nil && (other.Complete() || other.State() == rootfs.Lending) {
			continue
		}
		incomplete = true
		if other == nil {
			continue // Absent says so
		}
		if a := other.Arena(); a != nil {
			if err := a.Sync(ctx); err != nil {
				return err
			}
		}
		if err := syncFiles(other); err != nil {
			return err
		}
	}
	if !incomplete {
		return nil
	}
	if err := s.lentAbsent(r, nil); err != nil {
		r.Break(err)
		return err
	}
	return nil
}

// syncFiles makes the files durable without which the arena would be of no use.
func syncFiles(r *Rootfs) error {
	var errs []error
	for _, name := range []string{rootfs.TOCName, rootfs.PlacementName, rootfs.ContentsName, rootfs.RecordName} {
		errs = append(errs, durable.Sync(r.Path(name)))
	}
	return errors.Join(append(errs, durable.Sync(r.Dir()))...)
}

// LeaveGate takes a complete rootfs from behind the gate, if it is there. Its arena
// is closed when nobody reads it any more through its own descriptor.
func (s *Store) LeaveGate(r *Rootfs) {
	s.layout.Lock()
	defer s.layout.Unlock()
	if s.Get(r.Key()) != r {
		return // it was removed
	}
	if err := s.leaveGate(r); err != nil {
		// It is complete all the same, and every read of it is allowed.
		s.log.Warn("take a complete arena from behind the gate; reads of it go through the daemon until it is restarted", "rootfs", r.ChainID(), "error", err)
	}
}

// leaveGate is LeaveGate with Store.layout held; also for a lender.
func (s *Store) leaveGate(r *Rootfs) error {
	if r.Arena() == nil {
		return nil
	}
	if err := s.opts.Gate.Release(r.Name()); err != nil {
		return err
	}
	s.opts.At("released")
	r.Retire()
	return nil
}

// lentAbsent returns an error unless every content that r uses in place is where
// it was placed: each was hashed whole before. That whoever lends was found out, or failed, since then changes nothing of
// that: what its arena has is what counts. have is what is on the disk of r; nil: it is read.
func (s *Store) lentAbsent(r *Rootfs, have *Files) error {
	for i, id := range r.Arenas() {
		if id == r.ID() {
			continue
		}
		var src *rootfs.Contents
		if other := s.owner(id); other != nil {
			src = other.Contents()
		}
		if src == nil {
			return api.Errorf(api.CodeCorrupt, "rootfs %s, which holds some contents of rootfs %s, is gone or damaged: remove the image with `foil rm` and pull it again", id, r.ChainID())
		}
		if have == nil {
			var err error
			if have, err = r.Read(); err != nil {
				return err
			}
		}
		if absent := lent(have, i, src); absent > 0 {
			return api.Errorf(api.CodeCorrupt, "rootfs %s, which holds some contents of rootfs %s, lacks %d of them: remove the image with `foil rm` and pull it again", id, r.ChainID(), absent)
		}
	}
	return nil
}

// lent returns how many of the contents that are placed in arena i, which is
// src, are not there.
func lent(have *Files, i int, src *rootfs.Contents) (absent int) {
	t := have.TOC
	here := have.Place.In(i)
	id, size := contents.Of(t)
	segment.Sort(here, id)
	absent = len(here)
	src.List.Join(here, id, size, func(c int32, off int64, kind contents.Kind) {
		if kind != contents.Piece && src.Holds(off, t.Contents[c].Size) {
			absent--
		}
	})
	return absent
}
