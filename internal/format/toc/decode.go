package toc

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"strings"

	"github.com/klauspost/compress/zstd"
	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/format/segment"
)

// ErrCorrupt is returned, wrapped, for bytes that are no TOC.
var ErrCorrupt = errors.New("corrupt TOC")

// Decode reads what Encode wrote and checks everything that Validate does. It
// does not keep encoded. Errors: ErrCorrupt.
func Decode(encoded []byte) (*TOC, error) {
	t, err := decode(encoded)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrCorrupt, err)
	}
	return t, nil
}

func decode(encoded []byte) (*TOC, error) {
	rest, ok := bytes.CutPrefix(encoded, []byte(magic))
	if !ok || len(rest) == 0 {
		return nil, errors.New("it does not start like one")
	}
	if rest[0] != version {
		return nil, fmt.Errorf("version %d, this program reads %d", rest[0], version)
	}
	d := decoder{rest: rest[1:]}
	if err := d.readColumns(); err != nil {
		return nil, err
	}
	t := &TOC{ChainID: digest.Digest(d.col[colChainID])}
	for _, step := range []func(*TOC) error{d.xattrs, d.contents, d.inodes, d.tree} {
		if err := step(t); err != nil {
			return nil, err
		}
	}
	for i := range d.col {
		if i != colChainID && len(d.col[i]) > 0 {
			return nil, fmt.Errorf("column %d: %d bytes too many", i, len(d.col[i]))
		}
	}
	if err := t.Validate(); err != nil {
		return nil, err
	}
	t.setNlink()
	return t, nil
}

type decoder struct {
	rest []byte
	col  [columns][]byte // what has not been read yet
}

// readColumns decompresses all columns. Every element of the TOC takes at least
// one byte of a column, so what is allocated later is bounded by maxRaw, too.
func (d *decoder) readColumns() error {
	z := decoders.Get().(*zstd.Decoder)
	defer decoders.Put(z)
	total := uint64(0)
	for i := range d.col {
		if len(d.rest) == 0 {
			return fmt.Errorf("column %d is missing", i)
		}
		encoding := d.rest[0]
		head := d.rest[1:]
		raw, n := binary.Uvarint(head)
		length, m := binary.Uvarint(head[max(n, 0):])
		if n <= 0 || m <= 0 || raw > maxRaw || length > uint64(len(head)-n-m) {
			return fmt.Errorf("column %d is cut", i)
		}
		if total += raw; total > maxRaw {
			return fmt.Errorf("more than %d bytes of columns", maxRaw)
		}
		payload := head[n+m:][:length]
		d.rest = head[n+m:][length:]
		switch encoding {
		case stored:
			if length != raw {
				return fmt.Errorf("column %d: %d bytes stored, want %d", i, length, raw)
			}
			d.col[i] = payload
		case compressed:
			out, err := inflate(z, payload, int(raw))
			if err != nil {
				return fmt.Errorf("column %d: %w", i, err)
			}
			d.col[i] = out
		default:
			return fmt.Errorf("column %d: unknown encoding %d", i, encoding)
		}
	}
	if len(d.rest) > 0 {
		return fmt.Errorf("%d bytes too many", len(d.rest))
	}
	return nil
}

func inflate(z *zstd.Decoder, payload []byte, raw int) ([]byte, error) {
	out, err := z.DecodeAll(payload, make([]byte, 0, raw))
	if err != nil {
		return nil, err
	}
	if len(out) != raw {
		return nil, fmt.Errorf("decodes to %d bytes, want %d", len(out), raw)
	}
	return out, nil
}

// uint takes the next number of a column, at most limit.
func (d *decoder) uint(col int, limit uint64) (uint64, error) {
	b := d.col[col]
	if len(b) > 0 && b[0] < 0x80 && uint64(b[0]) <= limit {
		d.col[col] = b[1:]
		return uint64(b[0]), nil
	}
	v, n := binary.Uvarint(b)
	if n <= 0 || v > limit || n > 1 && b[n-1] == 0 {
		return 0, fmt.Errorf("column %d: no number of at most %d, with %d bytes left", col, limit, len(b))
	}
	d.col[col] = b[n:]
	return v, nil
}

// bytes takes the next n bytes of a column.
func (d *decoder) bytes(col int, n uint64) ([]byte, error) {
	b := d.col[col]
	if n > uint64(len(b)) {
		return nil, fmt.Errorf("column %d: want %d bytes, %d left", col, n, len(b))
	}
	d.col[col] = b[n:]
	return b[:n:n], nil
}

func (d *decoder) xattrs(t *TOC) error {
	t.Xattrs = append(t.Xattrs, nil)
	for len(d.col[colXattrs]) > 0 {
		n, err := d.uint(colXattrs, uint64(len(d.col[colXattrs])))
		if err != nil {
			return err
		}
		var set []Xattr
		for range n {
			length, err := d.uint(colXattrs, MaxName)
			if err != nil {
				return err
			}
			name, err := d.bytes(colXattrs, length)
			if err != nil {
				return err
			}
			if length, err = d.uint(colXattrs, MaxXattr); err != nil {
				return err
			}
			value, err := d.bytes(colXattrs, length)
			if err != nil {
				return err
			}
			set = append(set, Xattr{string(name), bytes.Clone(value)})
		}
		t.Xattrs = append(t.Xattrs, set)
	}
	return nil
}

func (d *decoder) contents(t *TOC) error {
	n := numbers(d.col[colSizes])
	if n > MaxInodes || n*segment.IDLength > len(d.col[colDigests]) {
		return fmt.Errorf("%d contents, %d bytes of IDs", n, len(d.col[colDigests]))
	}
	// Each content has one number for its count, one for each of its segments.
	segments := numbers(d.col[colSegments]) - n
	if segments < n || segments > MaxSegments {
		return fmt.Errorf("%d contents, %d segments", n, segments)
	}
	t.Contents = make([]Content, n)
	t.Segments = make([]Segment, 0, segments)
	for i := range t.Contents {
		c := &t.Contents[i]
		id, err := d.bytes(colDigests, segment.IDLength)
		if err != nil {
			return err
		}
		c.ID = segment.ID(id)
		size, err := d.uint(colSizes, MaxSize)
		if err != nil {
			return err
		}
		more, err := d.uint(colSegments, uint64(segments-len(t.Segments)))
		if err != nil {
			return err
		}
		c.Size, c.First, c.Segments = int64(size), uint32(len(t.Segments)), uint32(more)+1
		at := uint64(0)
		for j := range c.Segments {
			v, err := d.uint(colSegments, segment.MaxLength<<1|1)
			if err != nil {
				return err
			}
			s := Segment{Offset: int64(at)}
			length := v >> 1
			if j == c.Segments-1 {
				if length != 0 || size <= at {
					return fmt.Errorf("content %d: segments of %d bytes before the last, content of %d", i, at, size)
				}
				length = size - at
			}
			if length == 0 || length > segment.MaxLength {
				return fmt.Errorf("content %d: segment of %d bytes", i, length)
			}
			s.Length = uint32(length)
			at += length
			if v&1 == 0 {
				s.ID = c.ID // of a content of several segments: read below
			}
			t.Segments = append(t.Segments, s)
		}
	}
	for i := range t.Contents {
		c := &t.Contents[i]
		if c.Segments == 1 {
			continue
		}
		for j := range c.Segments {
			s := &t.Segments[c.First+j]
			if s.ID.IsHole() {
				continue
			}
			id, err := d.bytes(colDigests, segment.IDLength)
			if err != nil {
				return err
			}
			if s.ID = segment.ID(id); s.ID.IsHole() {
				return fmt.Errorf("content %d: segment %d has the zero ID and is no hole", i, j)
			}
		}
	}
	return nil
}

// numbers counts the varints in b.
func numbers(b []byte) int {
	n := 0
	for _, c := range b {
		n += int(1 - c>>7)
	}
	return n
}

func (d *decoder) inodes(t *TOC) error {
	var table []attrs
	for len(d.col[colAttrs]) > 0 {
		var v [4]uint32
		for i := range v {
			x, err := d.uint(colAttrs, math.MaxUint32)
			if err != nil {
				return err
			}
			v[i] = uint32(x)
		}
		table = append(table, attrs{v[0], v[1], v[2], v[3]})
	}
	n := numbers(d.col[colAttr])
	if n == 0 || n > MaxInodes || len(table) == 0 {
		return fmt.Errorf("%d inodes, %d attributes", n, len(table))
	}
	t.Inodes = make([]Inode, n)
	targets := string(d.col[colTarget]) // one allocation for all of them
	d.col[colTarget] = nil
	used, mtime, nextContent, first := uint64(0), int64(0), int32(0), uint32(0)
	for i := range t.Inodes {
		k, err := d.uint(colAttr, min(used, uint64(len(table))-1))
		if err != nil {
			return err
		}
		if k == used {
			used++
		}
		a := table[k]
		delta, m := binary.Varint(d.col[colMtime])
		if m <= 0 {
			return fmt.Errorf("inode %d: no time", i)
		}
		d.col[colMtime] = d.col[colMtime][m:]
		mtime += delta
		nsec, err := d.uint(colNsec, 999_999_999)
		if err != nil {
			return err
		}
		n := &t.Inodes[i]
		*n = Inode{Mode: a.mode, UID: a.uid, GID: a.gid, Xattrs: a.xattrs, Mtime: mtime, MtimeNsec: uint32(nsec), Content: -1}
		switch a.mode & unix.S_IFMT {
		case unix.S_IFDIR:
			children, err := d.uint(colChildren, uint64(MaxDirents-first))
			if err != nil {
				return err
			}
			n.FirstChild, n.Children = first, uint32(children)
			first += n.Children
		case unix.S_IFCHR, unix.S_IFBLK:
			for _, v := range []*uint32{&n.Major, &n.Minor} {
				x, err := d.uint(colDevice, math.MaxUint32)
				if err != nil {
					return err
				}
				*v = uint32(x)
			}
		case unix.S_IFLNK:
			var ok bool
			if n.Target, targets, ok = strings.Cut(targets, "\x00"); !ok {
				return fmt.Errorf("inode %d: no target", i)
			}
			n.Size = int64(len(n.Target))
		case unix.S_IFREG:
			ref, err := d.uint(colRefs, uint64(nextContent)+1)
			if err != nil {
				return err
			}
			switch {
			case ref == 1:
				n.Content = nextContent
				nextContent++
			case ref > 1:
				n.Content = nextContent - int32(ref-1)
			}
			if int(n.Content) >= len(t.Contents) {
				return fmt.Errorf("inode %d: content %d of %d", i, n.Content, len(t.Contents))
			}
			if n.Content >= 0 {
				n.Size = t.Contents[n.Content].Size
			}
		}
	}
	if targets != "" || used != uint64(len(table)) {
		return fmt.Errorf("%d bytes of targets too many, %d of %d attributes used", len(targets), used, len(table))
	}
	return nil
}

func (d *decoder) tree(t *TOC) error {
	names := string(d.col[colNames]) // one allocation for all of them
	d.col[colNames] = nil
	n := strings.Count(names, "\x00")
	if n > MaxDirents {
		return fmt.Errorf("%d names", n)
	}
	t.Dirents = make([]Dirent, n)
	next, link := uint32(1), -1
	inode := uint64(0)
	advance := func() error {
		if len(d.col[colLinks]) == 0 {
			link = n
			return nil
		}
		gap, err := d.uint(colLinks, uint64(n-1-link))
		if err != nil {
			return err
		}
		if gap == 0 {
			return errors.New("a name is linked twice")
		}
		link += int(gap)
		inode, err = d.uint(colLinks, uint64(len(t.Inodes)-1))
		return err
	}
	if err := advance(); err != nil {
		return err
	}
	for i := range t.Dirents {
		e := &t.Dirents[i]
		e.Name, names, _ = strings.Cut(names, "\x00")
		if i != link {
			e.Inode = next
			next++
			continue
		}
		if inode >= uint64(next) {
			return fmt.Errorf("name %d: linked to inode %d before its first name", i, inode)
		}
		e.Inode = uint32(inode)
		if err := advance(); err != nil {
			return err
		}
	}
	if names != "" {
		return errors.New("the last name has no end")
	}
	return nil
}
