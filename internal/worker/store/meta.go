package store

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/worker/arena"
	"hydrofoil.dev/foil/internal/worker/contents"
	"hydrofoil.dev/foil/internal/worker/erofs"
	"hydrofoil.dev/foil/internal/worker/mounts"
	"hydrofoil.dev/foil/internal/worker/rootfs"
)

// writeMeta writes meta.erofs and returns its SHA-256. The file is derived: it
// need not be durable, its digest is compared before it is believed. It replaces
// what is there, which an old mount may go on using. layout is that of the rootfs's own
// arena while that is made; nil: it is there.
func (s *Store) writeMeta(r *Rootfs, have *Files, layout *arena.Layout) (string, error) {
	opts := erofs.Options{}
	offsets, err := s.offsets(r, have, layout, func(_ int, other *Rootfs) error {
		if other == r && layout != nil {
			opts.Devices = append(opts.Devices, erofs.Device{Blocks: uint32(layout.Blocks())})
			return nil
		}
		fi, err := os.Stat(other.Path("arena"))
		if err != nil {
			return err
		}
		opts.Devices = append(opts.Devices, erofs.Device{Blocks: uint32(fi.Size() / arena.BlockSize)})
		return nil
	})
	if err != nil {
		return "", err
	}
	opts.Place = func(c int) erofs.Extent {
		return erofs.Extent{Device: int(have.Place[c]), Block: uint32(offsets[c] / arena.BlockSize)}
	}
	f, err := os.Create(r.Path(mounts.Image + ".new"))
	if err != nil {
		return "", err
	}
	h := sha256.New()
	err = erofs.Write(io.MultiWriter(f, h), have.TOC, opts)
	if err := errors.Join(err, f.Close()); err != nil {
		return "", err
	}
	if rootfs.FileIsOpen(r.Path(mounts.Image)) {
		// An old mount lives on somewhere: what it refers to stays (see isOpen).
		if err := os.Rename(r.Path(mounts.Image), r.Path(rootfs.OldMetaName)); err != nil {
			return "", err
		}
	}
	if err := os.Rename(f.Name(), r.Path(mounts.Image)); err != nil {
		return "", err
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// Offsets returns where each content of a rootfs lies in the arena in which it is
// placed, and the paths of the arenas.
func (s *Store) Offsets(r *Rootfs, have *Files) (offsets []int64, arenas []string, err error) {
	offsets, err = s.offsets(r, have, nil, func(_ int, other *Rootfs) error {
		arenas = append(arenas, other.Path("arena"))
		return nil
	})
	return offsets, arenas, err
}

// offsets returns where each content of a rootfs lies in the arena in which it
// is placed. visit is called for each arena, in their order, with whose it is. layout is
// as for writeMeta.
func (s *Store) offsets(r *Rootfs, have *Files, layout *arena.Layout, visit func(i int, other *Rootfs) error) ([]int64, error) {
	t := have.TOC
	offsets := make([]int64, len(t.Contents))
	for i, id := range r.Arenas() {
		other, own := r, layout
		if id != r.ID() {
			other, own = s.owner(id), nil
		} else if a := r.Arena(); own == nil && a != nil {
			own = a.Layout()
		}
		if other == nil {
			return nil, fmt.Errorf("the arena of rootfs %s, which holds some of its contents, is gone: pull the image again", id)
		}
		if err := visit(i, other); err != nil {
			return nil, err
		}
		here := have.Place.In(i)
		if own != nil {
			for _, c := range here {
				off, ok := own.Offset(int(c))
				if !ok {
					return nil, fmt.Errorf("the arena of rootfs %s has no place for content %d", r.ChainID(), c)
				}
				offsets[c] = off
			}
			continue
		}
		src := other.Contents()
		if src == nil {
			return nil, fmt.Errorf("what the arena of rootfs %s holds is not known: pull the image again", id)
		}
		contentID := func(c int32) *segment.ID { return &t.Contents[c].ID }
		segment.Sort(here, contentID)
		found := 0
		src.List.Join(here, contentID, func(c int32, off int64, kind contents.Kind) {
			if kind != contents.Piece {
				offsets[c] = off
				found++
			}
		})
		if found != len(here) {
			return nil, fmt.Errorf("the arena of rootfs %s holds %d of the %d contents placed in it: pull the image again", id, found, len(here))
		}
	}
	return offsets, nil
}

// devices returns the paths by which the arenas of a rootfs are to be mounted,
// and whether one of them is the gate's.
func (s *Store) devices(r *Rootfs) (paths []string, gated bool) {
	for _, id := range r.Arenas() {
		other := r
		if id != r.ID() {
			other = s.owner(id)
		}
		arena := filepath.Join(s.dir(), id.Encoded(), "arena") // it is gone, and the mount says so
		if other != nil {
			arena = other.Path("arena")
		}
		device := s.opts.Gate.Device(id.Encoded(), arena)
		gated = gated || device != arena
		paths = append(paths, device)
	}
	return paths, gated
}
