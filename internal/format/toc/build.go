package toc

import (
	"fmt"
	"slices"
	"strings"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/format/segment"
)

// File is one file of a tree that is still being put together. A hard link is
// one *File under several names.
type File struct {
	Mode         uint32 // type and permissions, as st_mode of stat(2)
	UID, GID     uint32
	Major, Minor uint32
	Mtime        int64
	MtimeNsec    uint32
	Xattrs       []Xattr          // in any order
	Target       string           // of a symlink
	Content      *Bytes           // of a regular file; nil when it is empty
	Children     map[string]*File // of a directory
}

// Bytes is a content and its segments. Files of equal bytes need not share one.
type Bytes struct {
	ID       segment.ID
	Size     int64
	Segments []Segment
}

// Build puts the tree into canonical order. It does not keep anything of it. The
// rules are 1; who made the tree by others says so in the TOC.
func Build(chainID digest.Digest, root *File) (*TOC, error) {
	b := builder{
		t:        &TOC{ChainID: chainID, Rules: 1, Xattrs: [][]Xattr{nil}},
		inodes:   map[*File]uint32{},
		contents: map[segment.ID]int32{},
		xattrs:   map[string]uint32{"\x00": 0},
	}
	b.add(root)
	var names []string
	for i := 0; i < len(b.files); i++ { // grows: breadth first
		f := b.files[i]
		if f.Mode&unix.S_IFMT != unix.S_IFDIR {
			continue
		}
		names = names[:0]
		for name := range f.Children {
			names = append(names, name)
		}
		slices.Sort(names)
		b.t.Inodes[i].FirstChild, b.t.Inodes[i].Children = uint32(len(b.t.Dirents)), uint32(len(names))
		for _, name := range names {
			child := f.Children[name]
			n, ok := b.inodes[child]
			if !ok {
				n = b.add(child)
			}
			b.t.Dirents = append(b.t.Dirents, Dirent{name, n})
		}
	}
	if err := b.t.Validate(); err != nil {
		return nil, fmt.Errorf("build TOC of %s: %w", chainID, err)
	}
	b.t.setNlink()
	return b.t, nil
}

type builder struct {
	t        *TOC
	files    []*File // in inode order
	inodes   map[*File]uint32
	contents map[segment.ID]int32
	xattrs   map[string]uint32 // by appendXattrs
}

func (b *builder) add(f *File) uint32 {
	n := Inode{
		Mode: f.Mode, UID: f.UID, GID: f.GID, Major: f.Major, Minor: f.Minor,
		Mtime: f.Mtime, MtimeNsec: f.MtimeNsec, Target: f.Target, Content: -1,
	}
	n.Size = int64(len(f.Target))
	if c := f.Content; c != nil {
		n.Size = c.Size
		at, ok := b.contents[c.ID]
		if !ok {
			at = int32(len(b.t.Contents))
			b.contents[c.ID] = at
			b.t.Contents = append(b.t.Contents, Content{c.ID, c.Size, uint32(len(b.t.Segments)), uint32(len(c.Segments))})
			b.t.Segments = append(b.t.Segments, c.Segments...)
		}
		n.Content = at
	}
	if len(f.Xattrs) > 0 {
		set := slices.Clone(f.Xattrs)
		slices.SortFunc(set, func(a, b Xattr) int { return strings.Compare(a.Name, b.Name) })
		key := string(appendXattrs(nil, set))
		at, ok := b.xattrs[key]
		if !ok {
			at = uint32(len(b.t.Xattrs))
			b.xattrs[key] = at
			b.t.Xattrs = append(b.t.Xattrs, set)
		}
		n.Xattrs = at
	}
	i := uint32(len(b.files))
	b.files = append(b.files, f)
	b.inodes[f] = i
	b.t.Inodes = append(b.t.Inodes, n)
	return i
}
