package erofs

import (
	"encoding/binary"
	"errors"
	"fmt"

	"hydrofoil.dev/foil/internal/format/toc"
)

// planDirs lists the directories with parents and sizes.
func (img *Image) planDirs() error {
	t := img.t
	count := 0
	for i := range t.Inodes {
		if fileType(t.Inodes[i].Mode) == typeDir {
			count++
		}
	}
	img.dirs = make([]dir, 1, count)
	next := uint32(0) // first dirent that belongs to no directory yet
	for d := 0; d < len(img.dirs); d++ {
		self := img.dirs[d].inode
		n := &t.Inodes[self]
		// Both checks are cheap, and keep a TOC that is not canonical from
		// becoming an image with loops.
		if n.FirstChild != next && n.Children > 0 || uint64(next)+uint64(n.Children) > uint64(len(t.Dirents)) {
			return fmt.Errorf("%q: its children do not follow those of the directory before", img.path(self))
		}
		children := t.Dirents[next : next+n.Children]
		next += n.Children
		for i, e := range children {
			if int(e.Inode) >= len(t.Inodes) {
				return fmt.Errorf("%q: inode %d of %d", e.Name, e.Inode, len(t.Inodes))
			}
			if len(e.Name) == 0 || len(e.Name) > maxName {
				return fmt.Errorf("%q in %q: a name must have 1 to %d bytes", e.Name, img.path(self), maxName)
			}
			if i > 0 && children[i-1].Name >= e.Name {
				return fmt.Errorf("%q in %q: names are not sorted", e.Name, img.path(self))
			}
			if fileType(t.Inodes[e.Inode].Mode) == typeDir {
				if last := img.dirs[len(img.dirs)-1].inode; e.Inode <= last {
					return fmt.Errorf("%q in %q: directories are not in breadth-first order", e.Name, img.path(self))
				}
				img.dirs = append(img.dirs, dir{inode: e.Inode, parent: self})
			}
		}
		for b := (dirBlocks{children: children}); b.next(); {
			img.dirs[d].size = b.size
		}
	}
	if next != uint32(len(t.Dirents)) || len(img.dirs) != count {
		return errors.New("a directory or a name is not reachable from the root")
	}
	return nil
}

// dirBlocks divides the entries of a directory, "." and ".." merged in, into
// blocks. After each next that returns true, the block's entries are those from
// first to end.
type dirBlocks struct {
	children   []toc.Dirent
	first, end dirPos
	size       int64 // of the directory up to the end of this block's names
	used       int   // bytes of this block
	started    bool
}

// dirPos is a place among the merged entries.
type dirPos struct {
	child int // of children, those before have been passed
	dots  int // 0: neither, 1: "." passed, 2: both
}

var dotNames = [2]string{".", ".."}

// at returns the name at p, and which entry that is: an index of children, or
// -1 for "." and -2 for "..". ok is false at the end.
func (b *dirBlocks) at(p dirPos) (name string, which int, ok bool) {
	if p.dots < 2 && (p.child >= len(b.children) || dotNames[p.dots] < b.children[p.child].Name) {
		return dotNames[p.dots], -1 - p.dots, true
	}
	if p.child < len(b.children) {
		return b.children[p.child].Name, p.child, true
	}
	return "", 0, false
}

func (p *dirPos) advance(which int) {
	if which < 0 {
		p.dots++
	} else {
		p.child++
	}
}

func (b *dirBlocks) next() bool {
	if b.started {
		b.size = roundUp(b.size, BlockSize)
	}
	b.started = true
	b.first, b.used = b.end, 0
	for {
		name, which, ok := b.at(b.end)
		if !ok || b.used+direntSize+len(name) > BlockSize {
			break
		}
		b.used += direntSize + len(name)
		b.end.advance(which)
	}
	b.size += int64(b.used)
	return b.used > 0
}

// emitDir writes the blocks of a directory for which want returns true; block
// numbers start at 0.
func (img *Image) emitDir(out *writer, d *dir, want func(block int64) bool) {
	n := &img.t.Inodes[d.inode]
	b := dirBlocks{children: img.t.Dirents[n.FirstChild : n.FirstChild+n.Children]}
	for block := int64(0); b.next(); block++ {
		if !want(block) {
			continue
		}
		count := 0
		for p := b.first; p != b.end; count++ {
			_, which, _ := b.at(p)
			p.advance(which)
		}
		nameAt := count * direntSize
		for p := b.first; p != b.end; {
			name, which, _ := b.at(p)
			p.advance(which)
			inode := d.inode
			switch {
			case which >= 0:
				inode = b.children[which].Inode
			case which == -2:
				inode = d.parent
			}
			e := (*[direntSize]byte)(out.next(direntSize))
			binary.LittleEndian.PutUint32(e[0:], img.nids[inode])
			binary.LittleEndian.PutUint16(e[8:], uint16(nameAt))
			e[10] = fileType(img.t.Inodes[inode].Mode)
			nameAt += len(name)
		}
		for p := b.first; p != b.end; {
			name, which, _ := b.at(p)
			p.advance(which)
			out.str(name)
		}
	}
}
