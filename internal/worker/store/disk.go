package store

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"syscall"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/kernel"
	"hydrofoil.dev/foil/internal/worker/arena"
	"hydrofoil.dev/foil/internal/worker/ledger"
	"hydrofoil.dev/foil/internal/worker/origin"
)

// Space is what images take of the filesystem, bytes.
type Space struct {
	Used    int64 // by everything below rootfs; only Disk looks
	Pending int64 // that pulls which have begun will add
	Free    int64 // of the filesystem, for whoever comes
	Size    int64 // of the filesystem
}

// Reserve is what is to stay free on a filesystem, for metadata of a pull that
// begins and for what containers write.
func (d Space) Reserve() int64 { return min(d.Size/20, 64<<20) }

// Left is what is left for pulls that have not begun.
func (d Space) Left() int64 { return d.Free - d.Pending - d.Reserve() }

// Space looks at the filesystem, and at what pulls lack.
func (s *Store) Space() (Space, error) { return s.spaceBut(nil) }

// spaceBut is Space, as if but were not pulled.
func (s *Store) spaceBut(but *Rootfs) (Space, error) {
	space, err := kernel.StatSpace(s.opts.Root)
	if err != nil {
		return Space{}, err
	}
	d := Space{Free: space.Free, Size: space.Size}
	for _, r := range s.List() {
		if r != but {
			d.Pending += r.Pending()
		}
	}
	return d, nil
}

// Disk is Space with what is used, which takes a look at every file. each, when not
// nil, is told of each directory.
func (s *Store) Disk(each func(dir string, size int64)) (Space, error) {
	d, err := s.Space()
	if err != nil {
		return Space{}, err
	}
	dirs, err := os.ReadDir(s.dir())
	if err != nil {
		return Space{}, err
	}
	for _, e := range dirs {
		dir := filepath.Join(s.dir(), e.Name())
		size, _ := usage(dir)
		d.Used += size
		if each != nil {
			each(dir, size)
		}
	}
	return d, nil
}

// Shortage says that the disk has no room for what a rootfs lacks. It is ENOSPC.
type Shortage struct {
	Rootfs  digest.Digest
	Need    int64 // bytes
	Free    int64 // for images
	Reserve int64 // for everything else
}

func (s *Shortage) Error() string {
	return fmt.Sprintf("rootfs %s needs %d more bytes, %d are left for images and %d are kept free: %v", s.Rootfs, s.Need, max(0, s.Free), s.Reserve, syscall.ENOSPC)
}

func (s *Shortage) Unwrap() error { return syscall.ENOSPC }

// Fits returns a *Shortage when the disk has no room for what a rootfs lacks: a
// pull that cannot succeed would fill the disk for everybody.
func (s *Store) Fits(r *Rootfs) error {
	a := r.Arena()
	if a == nil {
		return nil
	}
	l := a.Layout()
	var need int64
	for i := range l.Segments() {
		if s := l.Segment(i); !s.ID.IsHole() && !a.HasSegment(i) {
			need += int64(s.Length)
		}
	}
	return s.fits(r, need)
}

// lengths is how many bytes an arena will take, nil's none.
func lengths(l *arena.Layout) (n int64) {
	if l == nil {
		return 0
	}
	for i := range l.Segments() {
		if s := l.Segment(i); !s.ID.IsHole() {
			n += int64(s.Length)
		}
	}
	return n
}

// fits is Fits of a rootfs that lacks so many bytes.
func (s *Store) fits(r *Rootfs, need int64) error {
	d, err := s.spaceBut(r)
	if err != nil {
		return err
	}
	if free := d.Left(); need > free {
		return &Shortage{r.ChainID(), need, free, d.Reserve()}
	}
	return nil
}

// Usage returns what a rootfs takes on the disk: bytes that are allocated,
// and files. What is shared counts once: what it uses in the arena of another
// rootfs there, and a lender's at the oldest of those that borrow from it. ok is
// false when it is not here.
func (s *Store) Usage(key origin.Key) (size, inodes int64, ok bool) {
	r := s.Get(key)
	if r == nil {
		return 0, 0, false
	}
	dirs := []string{r.Dir()}
	for _, l := range s.lenders() {
		if b := s.borrowers(l); len(b) > 0 && b[0] == r {
			dirs = append(dirs, l.Dir())
		}
	}
	for _, dir := range dirs {
		s, i := usage(dir)
		size, inodes = size+s, inodes+i
	}
	return size, inodes, true
}

// Counts is how many rootfs there are in each of four states, and which directory is in
// which: complete, incomplete, broken, lender.
func (s *Store) Counts() (n map[string]int, stateOf map[string]string) {
	n = map[string]int{"complete": 0, "incomplete": 0, "broken": 0, "lender": 0}
	stateOf = make(map[string]string)
	count := func(r *Rootfs, state string) {
		n[state]++
		stateOf[r.Dir()] = state
	}
	for _, r := range s.List() {
		switch {
		case r.Broken() != nil:
			count(r, "broken")
		case r.Complete():
			count(r, "complete")
		default:
			count(r, "incomplete")
		}
	}
	for _, r := range s.lenders() {
		count(r, "lender")
	}
	return n, stateOf
}

// Leftovers returns directories that have no record. Nothing is being made while it
// looks.
func (s *Store) Leftovers() (paths []string) {
	s.layout.Lock()
	defer s.layout.Unlock()
	known := make(map[string]bool)
	for _, r := range s.all() {
		known[r.Dir()] = true
	}
	dirs, _ := filepath.Glob(filepath.Join(s.dir(), "*"))
	return slices.DeleteFunc(dirs, func(dir string) bool { return known[dir] })
}

// DirSize is what a directory, or a file, takes on the disk.
func DirSize(path string) (size int64) {
	if fi, err := os.Lstat(path); err == nil && fi.Mode().IsRegular() {
		return fi.Sys().(*syscall.Stat_t).Blocks * 512
	}
	size, _ = usage(path)
	return size
}

// Ledger looks at everything that is here.
func (s *Store) Ledger(ctx context.Context) (*ledger.Ledger, error) {
	s.layout.Lock()
	defer s.layout.Unlock()
	l := new(ledger.Ledger)
	enter := func(list []*Rootfs, lends bool) error {
		for _, r := range list {
			if err := ctx.Err(); err != nil {
				return err
			}
			e := ledger.Entry{Open: r.Mount().Mounted() || r.IsOpen(), Needed: make(map[*Rootfs][]arena.Range)}
			e.Size, _ = usage(r.Dir())
			for _, b := range s.borrowers(r) {
				keep, err := needed(r, []*Rootfs{b})
				e.Blind = e.Blind || err != nil
				e.Needed[b] = keep
			}
			l.Enter(r, lends, e)
		}
		return nil
	}
	return l, errors.Join(enter(s.List(), false), enter(s.lenders(), true))
}
