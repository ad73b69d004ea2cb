package toc

import (
	"errors"
	"fmt"
	"hash/maphash"
	"math"
	"strings"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/format/segment"
)

// Limits of a TOC. What goes beyond them is refused by Encode and Decode alike.
const (
	MaxInodes   = 1 << 21
	MaxDirents  = 1 << 22
	MaxSegments = 1 << 22
	MaxSize     = 1 << 53 // bytes of one content
	MaxName     = 255     // bytes
	MaxTarget   = 4095    // bytes of a symlink's target
	MaxXattr    = 1 << 16 // bytes of an xattr's value
)

// Validate checks everything that the comments of TOC promise, and sets
// nothing; Encode and Decode call it.
func (t *TOC) Validate() error {
	return inTurn(t.validateHead, t.validateTree, t.validateInodes, t.validateContents, t.validateXattrs)
}

// inTurn calls functions until one fails: those that come later rely on the earlier ones.
func inTurn(steps ...func() error) error {
	for _, step := range steps {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

// validateHead checks the chain ID, the rules, and how many there are of everything.
func (t *TOC) validateHead() error {
	if err := t.ChainID.Validate(); err != nil {
		return fmt.Errorf("chain ID %q: %w", t.ChainID, err)
	}
	if t.Rules == 0 {
		return errors.New("rules of version 0")
	}
	if len(t.Inodes) == 0 || len(t.Inodes) > MaxInodes || len(t.Dirents) > MaxDirents || len(t.Segments) > MaxSegments {
		return fmt.Errorf("%d inodes, %d names, %d segments: want at least 1 and at most %d, %d, %d",
			len(t.Inodes), len(t.Dirents), len(t.Segments), MaxInodes, MaxDirents, MaxSegments)
	}
	return nil
}

// validateTree checks that the names make one tree in canonical order. A
// directory is named once, before it is listed, by a directory listed earlier:
// so there are no cycles and everything hangs from the root.
func (t *TOC) validateTree() error {
	if !t.Inodes[0].IsDir() {
		return fmt.Errorf("the root is no directory (mode %o)", t.Inodes[0].Mode)
	}
	next, first := uint32(1), uint64(0)
	for i := range t.Inodes {
		n := &t.Inodes[i]
		if uint32(i) >= next {
			return fmt.Errorf("inode %d has no name", i)
		}
		if !n.IsDir() {
			if n.Children != 0 || n.FirstChild != 0 {
				return fmt.Errorf("inode %d is no directory and has children", i)
			}
			continue
		}
		if uint64(n.FirstChild) != first || first+uint64(n.Children) > uint64(len(t.Dirents)) {
			return fmt.Errorf("directory %d lists names %d to %d, want them from %d, of %d",
				i, n.FirstChild, uint64(n.FirstChild)+uint64(n.Children), first, len(t.Dirents))
		}
		before := ""
		for _, d := range t.Dirents[first : first+uint64(n.Children)] {
			if err := validateName(d.Name); err != nil {
				return fmt.Errorf("in directory %d: %w", i, err)
			}
			if before >= d.Name {
				return fmt.Errorf("in directory %d: name %q after %q", i, d.Name, before)
			}
			before = d.Name
			switch {
			case d.Inode == next && int(next) < len(t.Inodes):
				next++
			case d.Inode >= next:
				return fmt.Errorf("in directory %d: name %q has inode %d, want at most %d", i, d.Name, d.Inode, next)
			case t.Inodes[d.Inode].IsDir():
				return fmt.Errorf("in directory %d: %q is a second name of directory %d", i, d.Name, d.Inode)
			}
		}
		first += uint64(n.Children)
	}
	if first != uint64(len(t.Dirents)) || int(next) != len(t.Inodes) {
		return fmt.Errorf("%d of %d names are listed, %d of %d inodes named", first, len(t.Dirents), next, len(t.Inodes))
	}
	return nil
}

func validateName(s string) error {
	if len(s) == 0 || len(s) > MaxName || s == "." || s == ".." || strings.IndexByte(s, '/') >= 0 || strings.IndexByte(s, 0) >= 0 {
		return fmt.Errorf("illegal name %q", s)
	}
	return nil
}

func (t *TOC) validateInodes() error {
	nextContent, nextXattrs := int32(0), uint32(1)
	for i := range t.Inodes {
		n := &t.Inodes[i]
		bad := func(what string) error { return fmt.Errorf("inode %d (mode %o): %s", i, n.Mode, what) }
		if n.Mode&^(unix.S_IFMT|0o7777) != 0 || n.MtimeNsec > 999_999_999 {
			return bad("illegal mode or time")
		}
		size, device := int64(0), false
		switch n.Mode & unix.S_IFMT {
		case unix.S_IFREG:
			if n.Content >= 0 {
				if int(n.Content) >= len(t.Contents) || n.Content > nextContent {
					return bad("content out of order")
				}
				if n.Content == nextContent {
					nextContent++
				}
				size = t.Contents[n.Content].Size
			}
		case unix.S_IFLNK:
			if len(n.Target) == 0 || len(n.Target) > MaxTarget || strings.IndexByte(n.Target, 0) >= 0 {
				return bad(fmt.Sprintf("illegal target %q", n.Target))
			}
			size = int64(len(n.Target))
		case unix.S_IFCHR, unix.S_IFBLK:
			device = true
		case unix.S_IFDIR, unix.S_IFIFO, unix.S_IFSOCK:
		default:
			return bad("unknown type")
		}
		if n.Size != size {
			return bad(fmt.Sprintf("size %d, want %d", n.Size, size))
		}
		if !n.IsRegular() && n.Content != -1 || n.Content < -1 {
			return bad("illegal content")
		}
		if !n.IsSymlink() && n.Target != "" || !device && (n.Major != 0 || n.Minor != 0) {
			return bad("target or device number of another type")
		}
		if n.Xattrs > nextXattrs || int(n.Xattrs) >= max(1, len(t.Xattrs)) {
			return bad("xattrs out of order")
		}
		if n.Xattrs == nextXattrs {
			nextXattrs++
		}
	}
	if int(nextContent) != len(t.Contents) || int(nextXattrs) != len(t.Xattrs) {
		return fmt.Errorf("%d of %d contents and %d of %d xattr sets are used", nextContent, len(t.Contents), nextXattrs, len(t.Xattrs))
	}
	return nil
}

func (t *TOC) validateContents() error {
	ids := newIDSet(len(t.Contents))
	first := uint64(0)
	for i := range t.Contents {
		c := &t.Contents[i]
		if c.ID.IsHole() || !ids.add(t.Contents, i) {
			return fmt.Errorf("content %d: ID %s is zero or not the first", i, c.ID)
		}
		if c.Size <= 0 || c.Size > MaxSize || uint64(c.First) != first || c.Segments == 0 || first+uint64(c.Segments) > uint64(len(t.Segments)) {
			return fmt.Errorf("content %d: %d bytes, segments %d to %d", i, c.Size, c.First, uint64(c.First)+uint64(c.Segments))
		}
		at := int64(0)
		for j := first; j < first+uint64(c.Segments); j++ {
			s := &t.Segments[j]
			if s.Offset != at || s.Length == 0 || s.Length > segment.MaxLength {
				return fmt.Errorf("content %d: segment %d: %d bytes at %d, want 1 to %d at %d", i, j, s.Length, s.Offset, segment.MaxLength, at)
			}
			at += int64(s.Length)
		}
		if at != c.Size {
			return fmt.Errorf("content %d: %d bytes, its segments %d", i, c.Size, at)
		}
		if s := &t.Segments[first]; c.Segments == 1 && !s.ID.IsHole() && s.ID != c.ID {
			return fmt.Errorf("content %d: its only segment has another ID", i)
		}
		first += uint64(c.Segments)
	}
	if first != uint64(len(t.Segments)) {
		return fmt.Errorf("%d of %d segments belong to contents", first, len(t.Segments))
	}
	return nil
}

func (t *TOC) validateXattrs() error {
	if len(t.Xattrs) == 0 || len(t.Xattrs[0]) != 0 {
		return fmt.Errorf("the first xattr set is not the empty one")
	}
	seen := make(map[string]bool, len(t.Xattrs))
	var key []byte
	for i, set := range t.Xattrs {
		before := ""
		for _, x := range set {
			if len(x.Name) == 0 || len(x.Name) > MaxName || strings.IndexByte(x.Name, 0) >= 0 || x.Name <= before || len(x.Value) > MaxXattr {
				return fmt.Errorf("xattr set %d: illegal xattr %q of %d bytes after %q", i, x.Name, len(x.Value), before)
			}
			before = x.Name
		}
		key = appendXattrs(key[:0], set)
		if i > 0 && len(set) == 0 || seen[string(key)] {
			return fmt.Errorf("xattr set %d is not the first of its kind", i)
		}
		seen[string(key)] = true
	}
	return nil
}

// idSet is a set of content IDs as a table of indices: a map would cost 60
// bytes a content.
type idSet struct {
	seed  maphash.Seed // IDs in a foreign TOC may be chosen to collide
	table []uint32     // index+1, 0: free
}

func newIDSet(n int) *idSet {
	size := 16
	for size < 2*n {
		size *= 2
	}
	return &idSet{maphash.MakeSeed(), make([]uint32, size)}
}

// add adds contents[i].ID and reports whether it was new.
func (s *idSet) add(contents []Content, i int) bool {
	mask := uint64(len(s.table) - 1)
	for h := maphash.Bytes(s.seed, contents[i].ID[:]) & mask; ; h = (h + 1) & mask {
		switch at := s.table[h]; {
		case at == 0:
			s.table[h] = uint32(i) + 1
			return true
		case contents[at-1].ID == contents[i].ID:
			return false
		}
	}
}

// setNlink derives Nlink of every inode. The tree must be valid.
func (t *TOC) setNlink() {
	for i := range t.Inodes {
		n := &t.Inodes[i]
		if n.Nlink = 0; n.IsDir() {
			n.Nlink = 2
		}
	}
	for i := range t.Inodes {
		n := &t.Inodes[i]
		for _, d := range t.Children(i) {
			if t.Inodes[d.Inode].IsDir() {
				n.Nlink++
			} else if l := &t.Inodes[d.Inode].Nlink; *l < math.MaxUint32 {
				*l++
			}
		}
	}
}
