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
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/arena"
	"hydrofoil.dev/foil/internal/worker/contents"
	"hydrofoil.dev/foil/internal/worker/erofs"
	"hydrofoil.dev/foil/internal/worker/mounts"
	"hydrofoil.dev/foil/internal/worker/rootfs"
)

const (
	// A metadata image may take metaBase bytes, metaInode for each inode, and a half of what the files
	// hold. Those of real images take 100 to 200 bytes an inode, and a hundredth of the files. What takes more
	// has extended attributes, names or symlinks that repeat themselves: they travel as next to
	// nothing, and are written out for each file.
	metaBase  = 64 << 20
	metaInode = 256
)

// tooLarge is the error of a metadata image that would take more bytes than it may, or nil. By its code
// containerd unpacks such an image itself.
func tooLarge(t *toc.TOC, size int64) error {
	most := int64(metaBase + metaInode*len(t.Inodes))
	for i := range t.Segments {
		if s := &t.Segments[i]; !s.ID.IsHole() {
			most += int64(s.Length) / 2
		}
	}
	if size <= most {
		return nil
	}
	return api.Errorf(api.CodeUnsupported, "the names and attributes of rootfs %s's %d files would take %d bytes here, at most %d are allowed for what they hold: use another snapshotter for this image",
		t.ChainID, len(t.Inodes), size, most)
}

// planMeta plans meta.erofs. layout is that of the rootfs's own arena while that is made; nil: it is there.
func (s *Store) planMeta(r *Rootfs, have *Files, layout *arena.Layout) (*erofs.Image, error) {
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
		return nil, err
	}
	opts.Place = func(c int) erofs.Extent {
		return erofs.Extent{Device: int(have.Place[c]), Block: uint32(offsets[c] / arena.BlockSize)}
	}
	return erofs.Plan(have.TOC, opts)
}

// writeMeta writes meta.erofs and returns its SHA-256. The file is derived: it
// need not be durable, its digest is compared before it is believed. It replaces
// what is there, which an old mount may go on using.
func writeMeta(r *Rootfs, img *erofs.Image) (string, error) {
	f, err := os.Create(r.Path(mounts.Image + ".new"))
	if err != nil {
		return "", err
	}
	h := sha256.New()
	err = img.Write(io.MultiWriter(f, h))
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
// as for planMeta.
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
		contentID, size := contents.Of(t)
		segment.Sort(here, contentID)
		found := 0
		src.List.Join(here, contentID, size, func(c int32, off int64, kind contents.Kind) {
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
