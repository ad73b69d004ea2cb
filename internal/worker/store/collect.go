package store

import (
	"fmt"
	"time"

	"hydrofoil.dev/foil/internal/backoff"
)

// Collect frees what nothing needs. A rootfs that no image, container or pull
// names is unmounted and becomes a lender; a lender gives back what nobody
// borrows; one without borrowers goes. What the kernel or a process of the host
// has in use stays until the next time. It returns the bytes that it freed.
func (s *Store) Collect() (freed int64) {
	s.layout.Lock()
	defer s.layout.Unlock()
	inUse := false
	// What is named later than this belongs to something that is named, or used, now.
	named := s.opts.Names.Named()
	for _, r := range s.List() {
		if named[r.Key()] != "" || r.InUse() || !s.unmounted(r) {
			continue
		}
		// A container that the daemon does not know, or a process that has just
		// copied the host's mounts. Unlinking harms neither; but while it lasts
		// what the rootfs refers to must be known.
		if (len(s.borrowers(r)) > 0 || r.Borrows()) && r.IsOpen() {
			inUse = true
			continue
		}
		before, _ := usage(r.Dir())
		if ok, err := s.becomeLender(s.ctx, r, s.borrowers(r)); err != nil {
			s.log.Warn("a rootfs that nothing names stays", "rootfs", r.ChainID(), "error", err)
		} else if ok && len(s.borrowers(r)) == 0 {
			s.drop(r)
			freed += before
		}
	}
	// Every rootfs that can be mounted now is still known: what those do not refer
	// to, nobody does.
	for _, r := range s.lenders() {
		borrowers := s.borrowers(r)
		if len(borrowers) == 0 {
			before, _ := usage(r.Dir())
			if s.drop(r) {
				freed += before
			}
			continue
		}
		if why := s.unknown(); why != "" {
			s.log.Debug("nothing is punched", "why", why)
			continue
		}
		got, err := s.shrink(r, borrowers)
		if err != nil {
			s.log.Warn("an arena keeps what nobody may need any more", "rootfs", r.ChainID(), "error", err)
		} else if got > 0 {
			s.log.Info("what only removed images needed was freed", "rootfs", r.ChainID(), "bytes", got)
		}
		freed += got
	}
	s.collectLater(inUse)
	return freed
}

// collectLater tries again, again and again while something is in use that
// nothing names: nobody says when that ends.
func (s *Store) collectLater(inUse bool) {
	pauses := backoff.Backoff{First: 100 * time.Millisecond, Most: time.Minute}
	s.mu.Lock()
	defer s.mu.Unlock()
	if !inUse {
		s.inUse = 0
		return
	}
	if s.closing || s.later {
		return
	}
	s.later = true
	s.inUse++
	pause := pauses.Pause(s.inUse)
	s.work.Go(func() {
		if backoff.Wait(s.ctx, pause) != nil {
			return
		}
		s.mu.Lock()
		s.later = false
		s.mu.Unlock()
		s.Collect()
	})
}

// unmounted reports whether a rootfs is not mounted any more. Called with
// Store.layout held.
func (s *Store) unmounted(r *Rootfs) bool {
	if !r.Mount().Mounted() {
		return true
	}
	err := s.unmount(r, false)
	if err == nil {
		return true
	}
	s.log.Warn("unmount a rootfs that nothing uses", "rootfs", r.ChainID(), "error", err)
	r.Fail(errUnnamed)
	return false
}

// drop removes a lender without borrowers, unless somebody uses it. Called with
// Store.layout held.
func (s *Store) drop(r *Rootfs) bool {
	s.mu.Lock()
	used := r.Used()
	if !used {
		delete(s.lent, r.ID())
	}
	s.mu.Unlock()
	if !used {
		s.discard(r)
	}
	return !used
}

// unknown says why it is not known which blocks a rootfs refers to that may be
// in use; empty when that is known of all.
func (s *Store) unknown() string {
	for _, r := range s.List() {
		if r.Record().Version == 0 && (r.Mount().Mounted() || r.IsOpen()) {
			return fmt.Sprintf("the record of rootfs %s cannot be read, and the rootfs is in use", r.ChainID())
		}
	}
	return ""
}
