package store

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/durable"
	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/worker/arena"
	"hydrofoil.dev/foil/internal/worker/contents"
	"hydrofoil.dev/foil/internal/worker/mounts"
	"hydrofoil.dev/foil/internal/worker/rootfs"
)

// becomeLender makes a rootfs that nothing names one that cannot be mounted. It
// reports whether it is one now. Called with Store.layout held.
func (s *Store) becomeLender(ctx context.Context, r *Rootfs, borrowers []*Rootfs) (bool, error) {
	if !r.Complete() && len(borrowers) > 0 {
		if ok, err := s.keepLent(ctx, r, borrowers); !ok || err != nil {
			return false, err
		}
	}
	s.mu.Lock()
	undo, ok := r.Lend()
	if !ok {
		s.mu.Unlock()
		return false, nil
	}
	delete(s.rootfs, r.Key())
	s.lent[r.ID()] = r
	s.mu.Unlock()
	err := os.Rename(r.Path(rootfs.RecordName), r.Path(rootfs.LenderName))
	if err == nil {
		err = durable.Sync(r.Dir())
	}
	if errors.Is(err, os.ErrNotExist) {
		err = nil // its record was lost: nobody would find it again
	}
	if err != nil {
		s.mu.Lock()
		undo()
		delete(s.lent, r.ID())
		s.rootfs[r.Key()] = r
		s.mu.Unlock()
		return false, fmt.Errorf("rootfs %s, which nothing names any more: %w", r.ChainID(), err)
	}
	s.opts.At("lender")
	return true, nil
}

// keepLent makes durable what an incomplete rootfs lends: it must be found again
// when nothing but the list says that it is here. ok is false when it is not known
// what that is.
func (s *Store) keepLent(ctx context.Context, r *Rootfs, borrowers []*Rootfs) (ok bool, err error) {
	a := r.Arena()
	if a == nil || r.Contents() == nil {
		return false, nil
	}
	keep, err := needed(r, borrowers)
	if err != nil {
		return false, err
	}
	for _, k := range keep {
		if !a.Present(k.Off, k.Len) {
			return false, fmt.Errorf("rootfs %s lends what is not here any more", r.ChainID())
		}
	}
	return true, a.Sync(ctx)
}

// needed returns what borrowers use of the arena of r, in the order of its
// places. No borrower can be removed meanwhile: Store.layout is held.
func needed(r *Rootfs, borrowers []*Rootfs) ([]arena.Range, error) {
	src := r.Contents()
	if src == nil {
		return nil, errors.New("what it holds is not known")
	}
	var keep []arena.Range
	for _, b := range borrowers {
		have, err := b.Read()
		if err != nil {
			return nil, fmt.Errorf("what rootfs %s uses of it is not known: %w", b.ChainID(), err)
		}
		t := have.TOC
		here := have.Place.In(slices.Index(b.Arenas(), r.ID()))
		id, size := contents.Of(t)
		segment.Sort(here, id)
		found := 0
		src.List.Join(here, id, size, func(c int32, off int64, kind contents.Kind) {
			if kind != contents.Piece {
				found++
				keep = append(keep, arena.Range{Off: off, Len: t.Contents[c].Size})
			}
		})
		if found != len(here) {
			return nil, fmt.Errorf("it holds %d of %d contents that rootfs %s uses", found, len(here), b.ChainID())
		}
	}
	slices.SortFunc(keep, func(a, b arena.Range) int { return cmp.Compare(a.Off, b.Off) })
	return slices.Compact(keep), nil
}

// shrink takes from a lender's arena what none of its borrowers needs, unless
// that was done for them before. It returns the bytes that it freed. Called with
// Store.layout held.
func (s *Store) shrink(r *Rootfs, borrowers []*Rootfs) (freed int64, err error) {
	ids := make([]digest.Digest, len(borrowers))
	for i, b := range borrowers {
		ids[i] = b.ID()
	}
	slices.Sort(ids)
	src := r.Contents()
	if r.Used() || r.ShrunkFor(ids) || src == nil || r.IsOpen() {
		return 0, nil
	}
	keep, err := needed(r, borrowers)
	if err != nil {
		return 0, err
	}
	before, _ := usage(r.Dir())
	// Nobody waits for what it lacks: it is not mounted. Its borrowers' mounts may go on through the gate, that of the
	// next daemon as well.
	r.LendsOnly()
	if err := s.leaveGate(r); err != nil {
		return 0, err
	}
	if r.Stranded() {
		return 0, errors.New("it may be behind the gate still")
	}
	// Derived, or of use for a mount only. They make room for the list.
	if err := os.RemoveAll(ProofDir(r)); err != nil {
		return 0, err
	}
	layers, err := filepath.Glob(r.Path(rootfs.LayerPrefix + "*"))
	if err != nil {
		return 0, err
	}
	for _, path := range layers {
		if err := os.Remove(path); err != nil {
			return 0, err
		}
	}
	for _, name := range append([]string{mounts.Image, mounts.Image + ".new", rootfs.OldMetaName, rootfs.TOCName, rootfs.PlacementName, rootfs.BorrowersName}, mounts.Files...) {
		if err := os.Remove(r.Path(name)); err != nil && !errors.Is(err, os.ErrNotExist) {
			return 0, err
		}
	}
	kept, err := src.List.Only(keep)
	if err != nil {
		return 0, err
	}
	if err := durable.Replace(r.Path(rootfs.KeptName), kept); err != nil {
		return 0, err
	}
	s.opts.At("kept")
	list, err := contents.Open(r.Path(rootfs.KeptName))
	if err != nil {
		return 0, err
	}
	r.Shrunk(list)
	if err := os.Remove(r.Path(rootfs.ContentsName)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return 0, err
	}
	if _, err := arena.Punch(r.Dir(), keep); err != nil {
		return 0, err
	}
	s.opts.At("punched")
	r.SetBorrowers(ids)
	var lines bytes.Buffer
	for _, id := range ids {
		fmt.Fprintln(&lines, id)
	}
	if err := durable.Replace(r.Path(rootfs.BorrowersName), lines.Bytes()); err != nil {
		s.log.Debug("note for whom an arena was punched", "rootfs", r.ChainID(), "error", err)
	}
	after, _ := usage(r.Dir())
	return max(0, before-after), nil
}

// borrowers returns the rootfs that can be mounted, or are, and have contents in
// the arena of r, oldest first.
func (s *Store) borrowers(r *Rootfs) []*Rootfs {
	list := slices.DeleteFunc(s.List(), func(b *Rootfs) bool { return b == r || !slices.Contains(b.Arenas(), r.ID()) })
	slices.SortFunc(list, func(a, b *Rootfs) int {
		return cmp.Or(a.Record().Created.Compare(b.Record().Created), strings.Compare(string(a.ChainID()), string(b.ChainID())))
	})
	return list
}

// usage returns what the files of a directory take on the disk, bytes, and how
// many there are. What is mounted in it does not count.
func usage(dir string) (size, inodes int64) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return 0, 0
	}
	for _, e := range entries {
		var st unix.Stat_t
		if e.Type().IsRegular() && unix.Stat(filepath.Join(dir, e.Name()), &st) == nil {
			size += st.Blocks * 512
			inodes++
		}
	}
	return size, inodes
}

// Lender returns what the arena of from holds, for r to copy from while from is filled, and has leases keep it. It
// returns nil if that may not be: for r itself, across origins, and when from is gone or broken.
func (s *Store) Lender(from, r *Rootfs, leases *Leases) *rootfs.Contents {
	if r == from || !s.mayServe(from, r.Origin()) {
		return nil
	}
	s.mu.Lock()
	here := s.rootfs[from.Key()] == from
	if here {
		leases.Take(from)
	}
	s.mu.Unlock()
	if !here {
		return nil
	}
	src := from.Contents()
	if src != nil && from.Broken() == nil {
		if _, err := src.File(); err == nil { // opened before several goroutines read
			return src
		}
	}
	return nil
}
