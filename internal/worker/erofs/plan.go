package erofs

import (
	"errors"
	"fmt"

	"hydrofoil.dev/foil/internal/format/toc"
)

// Image is an image that is planned and can be written: plan finds every place, emit then writes
// front to back. Between the two it keeps four bytes for an inode and a few
// words for a directory or an xattr set.
type Image struct {
	t *toc.TOC
	o Options

	nids   []uint32 // by inode, units of nidUnit from the start of the inode area
	dirs   []dir    // in the order of inodes
	xattrs xattrPlan

	// Addresses in blocks.
	xattrStart, inodeStart, dataStart, blocks uint32
	chunked                                   bool
}

// dir is one directory.
type dir struct {
	parent uint32 // inode
	inode  uint32
	size   int64
}

func (img *Image) plan() error {
	t, o := img.t, img.o
	if len(o.Devices) > maxDevices {
		return fmt.Errorf("%d devices, at most %d are possible", len(o.Devices), maxDevices)
	}
	if len(t.Inodes) == 0 || fileType(t.Inodes[0].Mode) != typeDir {
		return errors.New("the first inode is no directory")
	}
	if err := img.planXattrs(); err != nil {
		return err
	}
	if err := img.planDirs(); err != nil {
		return err
	}

	img.nids = make([]uint32, len(t.Inodes))
	var pos, data int64 // bytes into the inode area, blocks into the data area
	nextDir := 0
	for i := range t.Inodes {
		n := &t.Inodes[i]
		if err := img.check(i, n); err != nil {
			return fmt.Errorf("%q: %w", img.path(uint32(i)), err)
		}
		size := n.Size
		if fileType(n.Mode) == typeDir {
			size = img.dirs[nextDir].size
			nextDir++
		}
		s := img.shape(n, size)
		if s.bytes <= BlockSize && pos%BlockSize+s.bytes > BlockSize {
			pos = roundUp(pos, BlockSize)
		} else if pos%BlockSize+inodeSize > BlockSize {
			pos = roundUp(pos, BlockSize)
		}
		if pos/nidUnit > nullBlock {
			return errors.New("the inodes take more than 128 GiB")
		}
		img.nids[i] = uint32(pos / nidUnit)
		pos = roundUp(pos+s.bytes, nidUnit)
		data += s.blocks
		img.chunked = img.chunked || s.layout == layoutChunks
	}

	at := roundUp(int64(superOffset+superSize+slotSize*len(o.Devices)), BlockSize) / BlockSize
	img.xattrStart = uint32(at)
	at += roundUp(img.xattrs.sharedSize, BlockSize) / BlockSize
	img.inodeStart = uint32(at)
	at += roundUp(pos, BlockSize) / BlockSize
	img.dataStart = uint32(at)
	at += data
	if at >= nullBlock {
		return fmt.Errorf("the image takes %d blocks, at most %d are possible", at, nullBlock-1)
	}
	img.blocks = uint32(at)
	return nil
}

// shape is how one inode is laid out.
type shape struct {
	layout int
	bytes  int64 // inode, xattrs, and what follows in the inode area
	blocks int64 // in the data area
}

// shape decides the layout of n, whose data (dirents, for a directory) has size
// bytes.
func (img *Image) shape(n *toc.Inode, size int64) shape {
	bytes := inodeSize + img.xattrs.size(n.Xattrs)
	switch fileType(n.Mode) {
	case typeRegular:
		if n.Content < 0 {
			break
		}
		_, chunks := chunkBits(size)
		return shape{layoutChunks, roundUp(bytes, indexSize) + indexSize*chunks, 0}
	case typeDir, typeSymlink:
		tail := size % BlockSize
		if bytes+tail <= BlockSize && tail > 0 {
			return shape{layoutInline, bytes + tail, size / BlockSize}
		}
		return shape{layoutPlain, bytes, roundUp(size, BlockSize) / BlockSize}
	}
	return shape{layoutPlain, bytes, 0}
}

// check returns why n cannot be expressed.
func (img *Image) check(i int, n *toc.Inode) error {
	if n.MtimeNsec >= 1e9 {
		return fmt.Errorf("%d nanoseconds are no part of a second", n.MtimeNsec)
	}
	if n.Mode>>16 != 0 {
		return fmt.Errorf("mode %o has more than 16 bits", n.Mode)
	}
	if n.Nlink == 0 && i != 0 {
		return errors.New("no links")
	}
	switch fileType(n.Mode) {
	case 0:
		return fmt.Errorf("mode %o is of no known file type", n.Mode)
	case typeChar, typeBlock:
		if n.Major >= 1<<12 || n.Minor >= 1<<20 {
			return fmt.Errorf("device %d:%d does not exist on Linux", n.Major, n.Minor)
		}
	case typeSymlink:
		if len(n.Target) == 0 || len(n.Target) > maxTarget || int64(len(n.Target)) != n.Size {
			return fmt.Errorf("symlink target of %d bytes (size %d), it must have 1 to %d", len(n.Target), n.Size, maxTarget)
		}
	case typeRegular:
		if n.Content < 0 {
			if n.Size != 0 {
				return fmt.Errorf("%d bytes, but no content", n.Size)
			}
			break
		}
		if int(n.Content) >= len(img.t.Contents) || img.t.Contents[n.Content].Size != n.Size || n.Size <= 0 {
			return fmt.Errorf("%d bytes do not agree with content %d", n.Size, n.Content)
		}
		if n.Size > nullBlock*BlockSize {
			return fmt.Errorf("%d bytes, at most %d are possible", n.Size, int64(nullBlock)*BlockSize)
		}
		if img.isHole(n.Content) {
			break
		}
		e := img.o.Place(int(n.Content))
		if e.Device == Hole {
			break
		}
		if e.Device < 0 || e.Device >= len(img.o.Devices) {
			return fmt.Errorf("placed on device %d of %d", e.Device, len(img.o.Devices))
		}
		if blocks := uint32(roundUp(n.Size, BlockSize) / BlockSize); uint64(e.Block)+uint64(blocks) > uint64(img.o.Devices[e.Device].Blocks) {
			return fmt.Errorf("placed at blocks %d to %d of device %d, which has %d", e.Block, uint64(e.Block)+uint64(blocks), e.Device, img.o.Devices[e.Device].Blocks)
		}
	}
	return nil
}

// isHole reports whether a content has no bytes but zeros.
func (img *Image) isHole(content int32) bool {
	c := &img.t.Contents[content]
	if uint64(c.First)+uint64(c.Segments) > uint64(len(img.t.Segments)) {
		return false
	}
	for _, s := range img.t.Segments[c.First : c.First+c.Segments] {
		if !s.ID.IsHole() {
			return false
		}
	}
	return c.Segments > 0
}

// path returns the first path of an inode, for errors. It is slow.
func (img *Image) path(inode uint32) string {
	path := ""
	for inode != 0 {
		found := false
	search:
		for _, d := range img.dirs {
			n := &img.t.Inodes[d.inode]
			for _, e := range img.t.Dirents[n.FirstChild : n.FirstChild+n.Children] {
				if e.Inode == inode {
					path = "/" + e.Name + path
					inode, found = d.inode, true
					break search
				}
			}
		}
		if !found {
			return fmt.Sprintf("inode %d%s", inode, path)
		}
	}
	if path == "" {
		return "/"
	}
	return path
}
