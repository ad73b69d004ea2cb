// Package layer reads layer blobs, as any OCI client pushes them, and keeps
// what they say as an entry list.
//
// # Blobs
//
// A blob is a tar stream, plain, in gzip or in zstd; which of them is seen from
// its first bytes, whatever its media type says. Gzip blobs may have any number
// of members (eStargz and other seekable forms are plain gzip to us), zstd
// blobs any number of frames, also skippable ones (zstd:chunked). An empty blob
// is an empty layer. Reader computes the digests of blob and tar stream on the
// way and compares both.
//
// A tar stream may end with or without its two zero blocks, as containerd has
// it; zeros may follow, anything else is refused. So is a stream that ends
// inside an entry.
//
// # Entries
//
// What an entry means is what containerd's archive.Apply makes of it; package
// flatten replays it. Reader keeps the entries in the order of the tar stream,
// and refuses a layer with one of these:
//
//   - a name that is absolute or has a ".." element, except that "/" and "."
//     (and the like) name the root itself: such entries are dropped, as
//     containerd ignores them; "./a", "a//b" and "a/" are taken as "a", "a/b"
//     and "a". containerd would take "/a" for "a": we do not, because the names
//     a layer shows to people and to scanners should be those it makes;
//   - a hard link whose target has a ".." element. An absolute target is taken
//     from the root of the rootfs (some builders write them) and cannot leave it;
//   - an element of a name longer than 255 bytes, a path longer than 4095, an
//     empty symlink target or one longer than 4095;
//   - a type other than file, hard link, symlink, directory, device and FIFO (PAX
//     global headers name a file of their own; what containerd does with it, we
//     do), and device numbers that Linux does not have;
//   - extended attributes that no Linux takes (see CheckXattr). Attributes that
//     containerd passes over are dropped: trusted.* and unknown name spaces;
//   - anything above a limit of Options.
//
// Symlinks may have any target: they are resolved inside the rootfs.
//
// # Memory
//
// Reader holds some buffers of 128 KiB, the decompressor's window (at most
// 128 MiB for zstd blobs that ask for it, 32 KiB for gzip), and the one tar
// header at hand (at most some MiB). Neither entries nor file sizes add to it.
package layer

import (
	"fmt"
	"strings"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
)

// Type says what an entry is.
type Type byte

// The types. Their numbers are part of the entry list format.
const (
	Regular Type = 1 + iota
	HardLink
	Symlink
	Directory
	CharDevice
	BlockDevice
	Fifo
	// Global is a PAX global header. It makes no file, but containerd removes
	// a file of its name, if there is one.
	Global
)

// String names the type.
func (t Type) String() string {
	names := [...]string{"", "file", "hard link", "symlink", "directory",
		"character device", "block device", "FIFO", "global header"}
	if t == 0 || int(t) >= len(names) {
		return fmt.Sprintf("type %d", byte(t))
	}
	return names[t]
}

// Entry is one entry of a layer.
type Entry struct {
	Type Type
	// Name is a clean path relative to the root: elements other than "." and
	// ".." joined by single slashes; any bytes but NUL. Whiteouts are entries
	// like others here.
	Name string
	// Link is a symlink's target as it stands, or the clean path, relative to
	// the root, of what a hard link names.
	Link         string
	Mode         uint32 // the lower 12 bits of st_mode
	UID, GID     uint32 // 4294967295: leave as it is, as for chown(2)
	Mtime        int64  // seconds since the epoch
	MtimeNsec    uint32
	Major, Minor uint32
	Xattrs       []toc.Xattr // sorted by name, names distinct
	Size         int64       // bytes of a regular file, else 0
	// Content and Segments are of a regular file that is not empty. Reader
	// leaves them to whoever reads the file.
	Content  segment.ID
	Segments []Segment
}

// Segment is one segment of a content; its offset is the sum of the lengths
// before it.
type Segment struct {
	ID     segment.ID // the zero ID: a hole
	Length uint32
}

// RefusedError says why a layer is not taken. It is the layer's own doing:
// reading it again ends the same.
type RefusedError struct {
	Layer  digest.Digest // the blob
	Entry  string        // the name as the layer has it, or the last one read; may be empty
	Reason string
	Err    error // its cause, or nil
}

func (e *RefusedError) Error() string {
	return fmt.Sprintf("layer %s refused: %s", e.Layer, e.Detail())
}

// Detail is the error without the layer's name.
func (e *RefusedError) Detail() string {
	var s strings.Builder
	if e.Entry != "" {
		fmt.Fprintf(&s, "entry %q: ", shorten(e.Entry))
	}
	s.WriteString(e.Reason)
	if e.Err != nil {
		s.WriteString(": ")
		s.WriteString(e.Err.Error())
	}
	return s.String()
}

func (e *RefusedError) Unwrap() error { return e.Err }

func shorten(s string) string {
	const most = 300
	if len(s) <= most {
		return s
	}
	return s[:most/2] + "..." + s[len(s)-most/2:]
}

// DigestError says that a layer's bytes do not have the digest that was
// expected. That is no property of the layer that was asked for: the blob is
// damaged, or the image config names another diff ID.
type DigestError struct {
	Layer     digest.Digest
	What      string // "blob" or "diff ID"
	Got, Want digest.Digest
}

func (e *DigestError) Error() string {
	return fmt.Sprintf("layer %s refused: its %s is %s, want %s", e.Layer, e.What, e.Got, e.Want)
}

// Options are the limits of one layer. A zero field takes the default.
type Options struct {
	MaxEntries int64 // default 2,000,000
	// MaxFile bounds one file, MaxContent all files of a layer together, in
	// bytes with holes counted. Defaults: 256 GiB, 1 TiB.
	MaxFile, MaxContent int64
	// A layer may grow to Expansion bytes whatever its blob is, and from there
	// to MaxRatio times the bytes of its blob. Defaults: 2 GiB, 250. Gzip
	// reaches 1,032, so images that carry a few GiB of zeros pass.
	Expansion int64
	MaxRatio  int64
	// MaxXattrs bounds the names and values of all attributes of one file, in
	// bytes. Default 64 KiB.
	MaxXattrs int
}

// Paths and names are bounded by what Linux takes.
const (
	maxPath = 4095
	maxName = 255
)

func (o Options) withDefaults() Options {
	set := func(v *int64, d int64) {
		if *v == 0 {
			*v = d
		}
	}
	set(&o.MaxEntries, 2_000_000)
	set(&o.MaxFile, 256<<30)
	set(&o.MaxContent, 1<<40)
	set(&o.Expansion, 2<<30)
	set(&o.MaxRatio, 250)
	if o.MaxXattrs == 0 {
		o.MaxXattrs = 64 << 10
	}
	return o
}
