// Package toc is the table of contents of a rootfs: every name, inode and
// attribute of the flattened filesystem, and for regular files the content and
// its segments, but no file data.
//
// # Encoded
//
// An encoded TOC is the seven bytes "HFTOC\r\n", the version (one byte), which
// is 1 or 2, in version 2 the rules (one byte), and the columns below, each once
// and in this order, as package columns codes them; nothing follows the last
// one. A varint is a uvarint in zigzag form.
//
// The rules are the version of the rules by which layers became this TOC: of
// reading their entries (package layer) and of flattening these (package
// flatten). Who flattens the layers anew to compare does it by the same rules.
// In version 1 they are 1, as in all TOCs that were made before there was a
// version 2; in version 2 they are 2 to 255.
//
//	chain ID  its text
//	attrs     the distinct (mode, uid, gid, xattr set) of inodes, four uvarints
//	          each, in the order in which inodes first use them
//	attr      per inode, uvarint: index into attrs
//	mtime     per inode, varint: seconds, less those of the inode before (0
//	          before the first), modulo 2^64
//	nsec      per inode, uvarint: nanoseconds of the mtime
//	device    per device inode: major, minor, uvarints
//	target    per symlink inode: the target and a zero byte
//	children  per directory inode, uvarint: number of names in it
//	names     per name: the name and a zero byte
//	links     per name that is not its inode's first: two uvarints, the index
//	          of the name less that of the one before in this column (-1 before
//	          the first), and the inode's number
//	refs      per regular inode, uvarint: 0 it is empty, 1 it has the next
//	          content that no inode before it had, n > 1: it has the content
//	          that is n-1 before that one
//	sizes     per content, uvarint: bytes
//	segments  per content, uvarints: the number of its segments less one, then
//	          per segment 2*length + hole, where hole is 1 for a hole and else
//	          0, and the length of a content's last segment is written as 0
//	xattrs    per set but the empty one: uvarint count; per xattr, uvarint
//	          length and name, uvarint length and value
//	digests   32 bytes per content, then 32 bytes per segment that is no hole of
//	          the contents with more than one segment; never compressed
//
// All columns together are at most 256 MiB, which bounds what decoding takes;
// further limits are those of Validate. An encoded TOC is named by the SHA-256
// of its bytes (Digest). Which bytes the compressor makes is not specified: the
// server encodes a TOC once and keeps it.
package toc

import (
	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/segment"
)

// TOC is one rootfs in memory. It is canonical: two equal filesystems have
// equal TOCs, and equal TOCs encode to equal bytes.
//
// Order. Inodes are numbered in breadth-first order of their first name:
// Inodes[0] is the root directory; Dirents lists the children of every
// directory, directory by directory in inode order, each directory's children
// sorted by name bytewise. An inode's number is the order in which it is first
// named by Dirents. Contents are in the order in which inodes first use them,
// and Segments in the order of Contents; Xattrs after the first are in the order
// in which inodes first use them. Validate checks all of this.
type TOC struct {
	// ChainID is the OCI chain ID of the layers this rootfs was made from.
	ChainID digest.Digest
	// Rules is the version of the rules that it was made by, at least 1.
	Rules    uint8
	Inodes   []Inode
	Dirents  []Dirent
	Contents []Content // distinct, none empty
	Segments []Segment // grouped by content
	Xattrs   [][]Xattr // distinct sets, each sorted by name; Xattrs[0] is empty
}

// Inode is one file of any type. Hard links are several Dirents of one Inode.
type Inode struct {
	Mode         uint32 // type and permissions, as st_mode of stat(2)
	UID, GID     uint32
	Nlink        uint32 // names (directories: 2 + subdirectories); derived, not encoded
	Major, Minor uint32 // device numbers of character and block devices
	Mtime        int64  // seconds since the epoch, may be negative
	MtimeNsec    uint32 // 0..999,999,999
	Xattrs       uint32 // index into TOC.Xattrs
	Size         int64  // bytes of a regular file or of a symlink's target, else 0
	Content      int32  // index into TOC.Contents; -1 if not regular, or empty
	FirstChild   uint32 // directories: first of Children entries in TOC.Dirents
	Children     uint32
	Target       string // of a symlink
}

// Dirent is one name in one directory: any bytes but '/' and NUL, 1 to 255 of
// them; "." and ".." are not listed.
type Dirent struct {
	Name  string
	Inode uint32
}

// Content is the bytes of one or more regular files.
type Content struct {
	ID       segment.ID // SHA-256 of all its bytes
	Size     int64      // bytes, > 0
	First    uint32     // its segments are TOC.Segments[First:First+Segments]
	Segments uint32     // at least 1
}

// Segment is one piece of a content. A content of one segment that is not a
// hole has that segment's ID.
type Segment struct {
	ID     segment.ID // the zero ID: a hole
	Offset int64      // in its content, bytes
	Length uint32     // bytes, > 0, at most segment.MaxLength
}

// Xattr is one extended attribute with its full name ("security.capability").
type Xattr struct {
	Name  string
	Value []byte
}
