package toc

import (
	"encoding/binary"
	"fmt"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/format/columns"
)

const (
	magic = "HFTOC\r\n"
	// A TOC by the first rules has no number of them.
	versionFirst = 1
	versionRules = 2

	maxRaw = 256 << 20 // bytes of all columns together
)

// Columns, in the order in which they are stored.
const (
	colChainID = iota
	colAttrs
	colAttr
	colMtime
	colNsec
	colDevice
	colTarget
	colChildren
	colNames
	colLinks
	colRefs
	colSizes
	colSegments
	colXattrs
	colDigests
	colCount
)

// Digest names an encoded TOC: the SHA-256 of its bytes.
func Digest(encoded []byte) digest.Digest {
	return digest.FromBytes(encoded)
}

// Encode encodes a TOC, which must be valid (see Validate).
func Encode(t *TOC) ([]byte, error) {
	if err := t.Validate(); err != nil {
		return nil, fmt.Errorf("encode TOC of %s: %w", t.ChainID, err)
	}
	var c [colCount][]byte
	c[colChainID] = []byte(t.ChainID)
	t.encodeInodes(&c)
	t.encodeTree(&c)
	t.encodeContents(&c)
	for _, set := range t.Xattrs[1:] {
		c[colXattrs] = appendXattrs(c[colXattrs], set)
	}

	out := append([]byte(magic), versionFirst)
	if t.Rules > 1 {
		out = append([]byte(magic), versionRules, t.Rules)
	}
	raw := 0
	for i, col := range c {
		raw += len(col)
		out = columns.Append(out, col, i != colDigests)
	}
	if raw > maxRaw {
		return nil, fmt.Errorf("encode TOC of %s: %d bytes of columns, at most %d", t.ChainID, raw, maxRaw)
	}
	return out, nil
}

// attrs is what many inodes have in common.
type attrs struct{ mode, uid, gid, xattrs uint32 }

func (t *TOC) encodeInodes(c *[colCount][]byte) {
	table := map[attrs]uint64{}
	nextContent := int32(0)
	mtime := int64(0)
	for i := range t.Inodes {
		n := &t.Inodes[i]
		a := attrs{n.Mode, n.UID, n.GID, n.Xattrs}
		k, ok := table[a]
		if !ok {
			k = uint64(len(table))
			table[a] = k
			for _, v := range []uint32{a.mode, a.uid, a.gid, a.xattrs} {
				c[colAttrs] = binary.AppendUvarint(c[colAttrs], uint64(v))
			}
		}
		c[colAttr] = binary.AppendUvarint(c[colAttr], k)
		c[colMtime] = binary.AppendVarint(c[colMtime], n.Mtime-mtime) // may wrap around
		mtime = n.Mtime
		c[colNsec] = binary.AppendUvarint(c[colNsec], uint64(n.MtimeNsec))
		switch n.Mode & unix.S_IFMT {
		case unix.S_IFDIR:
			c[colChildren] = binary.AppendUvarint(c[colChildren], uint64(n.Children))
		case unix.S_IFCHR, unix.S_IFBLK:
			c[colDevice] = binary.AppendUvarint(c[colDevice], uint64(n.Major))
			c[colDevice] = binary.AppendUvarint(c[colDevice], uint64(n.Minor))
		case unix.S_IFLNK:
			c[colTarget] = append(append(c[colTarget], n.Target...), 0)
		case unix.S_IFREG:
			ref := uint64(0)
			switch {
			case n.Content == nextContent:
				ref = 1
				nextContent++
			case n.Content >= 0:
				ref = uint64(nextContent-n.Content) + 1
			}
			c[colRefs] = binary.AppendUvarint(c[colRefs], ref)
		}
	}
}

func (t *TOC) encodeTree(c *[colCount][]byte) {
	next, before := uint32(1), -1
	for i, d := range t.Dirents {
		c[colNames] = append(append(c[colNames], d.Name...), 0)
		if d.Inode == next {
			next++
			continue
		}
		c[colLinks] = binary.AppendUvarint(c[colLinks], uint64(i-before))
		c[colLinks] = binary.AppendUvarint(c[colLinks], uint64(d.Inode))
		before = i
	}
}

func (t *TOC) encodeContents(c *[colCount][]byte) {
	c[colDigests] = make([]byte, 0, 32*len(t.Contents))
	for i := range t.Contents {
		n := &t.Contents[i]
		c[colDigests] = append(c[colDigests], n.ID[:]...)
		c[colSizes] = binary.AppendUvarint(c[colSizes], uint64(n.Size))
		c[colSegments] = binary.AppendUvarint(c[colSegments], uint64(n.Segments-1))
		for j := range n.Segments {
			s := &t.Segments[n.First+j]
			v := uint64(0)
			if s.ID.IsHole() {
				v = 1
			}
			if j < n.Segments-1 { // the last one takes what is left
				v |= uint64(s.Length) << 1
			}
			c[colSegments] = binary.AppendUvarint(c[colSegments], v)
		}
	}
	for i := range t.Contents {
		n := &t.Contents[i]
		if n.Segments == 1 {
			continue
		}
		for _, s := range t.Segments[n.First : n.First+n.Segments] {
			if !s.ID.IsHole() {
				c[colDigests] = append(c[colDigests], s.ID[:]...)
			}
		}
	}
}

func appendXattrs(b []byte, set []Xattr) []byte {
	b = binary.AppendUvarint(b, uint64(len(set)))
	for _, x := range set {
		b = binary.AppendUvarint(b, uint64(len(x.Name)))
		b = append(b, x.Name...)
		b = binary.AppendUvarint(b, uint64(len(x.Value)))
		b = append(b, x.Value...)
	}
	return b
}
