package erofs

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
)

// node is a file of a tree that build turns into a TOC.
type node struct {
	inode    toc.Inode
	xattrs   []toc.Xattr
	data     []byte           // of a regular file
	hole     bool             // data is all zeros, as long as inode.Size
	children map[string]*node // of a directory
}

func newDir(mode uint32) *node {
	return &node{inode: toc.Inode{Mode: 0o040000 | mode}, children: map[string]*node{}}
}

func newFile(mode uint32, data []byte) *node {
	return &node{inode: toc.Inode{Mode: 0o100000 | mode, Size: int64(len(data))}, data: data}
}

func newSymlink(target string) *node {
	return &node{inode: toc.Inode{Mode: 0o120777, Target: target, Size: int64(len(target))}}
}

func (n *node) isDir() bool { return n.children != nil }

// built is a TOC with the bytes of its contents.
type built struct {
	toc  *toc.TOC
	data map[int][]byte // by content; nil for holes
}

// build makes the canonical TOC of a tree. A node with several names is a hard
// link.
func build(root *node) built {
	t := &toc.TOC{ChainID: digest.FromString("a rootfs"), Xattrs: [][]toc.Xattr{nil}}
	out := built{toc: t, data: map[int][]byte{}}
	numbers := map[*node]uint32{}
	contents := map[segment.ID]int32{}
	sets := map[string]uint32{"": 0}
	var queue []*node
	add := func(n *node) uint32 {
		if i, ok := numbers[n]; ok {
			t.Inodes[i].Nlink++
			return i
		}
		i := uint32(len(t.Inodes))
		numbers[n] = i
		in := n.inode
		in.Nlink, in.Content = 1, -1
		if in.Mode>>12 == 0o010 && in.Size > 0 {
			id := segment.ID(sha256.Sum256(n.data))
			if n.hole {
				id = segment.ID{}
				binary.BigEndian.PutUint64(id[:], uint64(in.Size))
			}
			c, ok := contents[id]
			if !ok {
				c = int32(len(t.Contents))
				contents[id] = c
				seg := toc.Segment{ID: id, Length: uint32(in.Size)}
				if n.hole {
					seg.ID = segment.ID{}
				}
				t.Contents = append(t.Contents, toc.Content{ID: id, Size: in.Size, First: uint32(len(t.Segments)), Segments: 1})
				t.Segments = append(t.Segments, seg)
				if !n.hole {
					out.data[int(c)] = n.data
				}
			}
			in.Content = c
		}
		slices.SortFunc(n.xattrs, func(a, b toc.Xattr) int { return cmp.Compare(a.Name, b.Name) })
		key := ""
		for _, x := range n.xattrs {
			key += fmt.Sprintf("%q=%q,", x.Name, x.Value)
		}
		set, ok := sets[key]
		if !ok {
			set = uint32(len(t.Xattrs))
			sets[key] = set
			t.Xattrs = append(t.Xattrs, n.xattrs)
		}
		in.Xattrs = set
		t.Inodes = append(t.Inodes, in)
		queue = append(queue, n)
		return i
	}
	add(root)
	for len(queue) > 0 {
		n := queue[0]
		queue = queue[1:]
		if !n.isDir() {
			continue
		}
		i := numbers[n]
		t.Inodes[i].Nlink = 2
		t.Inodes[i].FirstChild = uint32(len(t.Dirents))
		t.Inodes[i].Children = uint32(len(n.children))
		names := make([]string, 0, len(n.children))
		for name := range n.children {
			names = append(names, name)
		}
		slices.Sort(names)
		for _, name := range names {
			c := n.children[name]
			t.Dirents = append(t.Dirents, toc.Dirent{Name: name, Inode: add(c)})
			if c.isDir() {
				t.Inodes[i].Nlink++
			}
		}
	}
	return out
}
