package toc

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/format/columns"
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

// DecodeContents reads of what Encode wrote the chain ID, the rules, the contents and their segments, and
// looks at nothing else, nor whether a content is there twice: it is for who wrote the TOC,
// and knows by its digest that it is that one. Errors: ErrCorrupt.
func DecodeContents(encoded []byte) (*TOC, error) {
	d, err := newDecoder(encoded, colChainID, colSizes, colSegments, colDigests)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrCorrupt, err)
	}
	t := &TOC{ChainID: digest.Digest(d.col[colChainID].B), Rules: d.rules}
	d.count = columns.Numbers(d.col[colSizes].B)
	err = d.contents(t)
	for _, i := range []int{colSizes, colSegments, colDigests} {
		err = errors.Join(err, d.col[i].End())
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrCorrupt, err)
	}
	return t, nil
}

// CountSegments returns how many segments a TOC has that Encode wrote. Errors: ErrCorrupt.
func CountSegments(encoded []byte) (int, error) {
	d, err := newDecoder(encoded, colSizes, colSegments)
	if err != nil {
		return 0, fmt.Errorf("%w: %w", ErrCorrupt, err)
	}
	contents, numbers := columns.Numbers(d.col[colSizes].B), columns.Numbers(d.col[colSegments].B)
	if numbers < 2*contents || numbers-contents > MaxSegments {
		return 0, fmt.Errorf("%w: %d contents, %d numbers of their segments", ErrCorrupt, contents, numbers)
	}
	return numbers - contents, nil
}

// newDecoder reads the columns that are named, or all if none is.
func newDecoder(encoded []byte, wanted ...int) (*decoder, error) {
	rest, ok := bytes.CutPrefix(encoded, []byte(magic))
	if !ok || len(rest) == 0 {
		return nil, errors.New("it does not start like one")
	}
	d := &decoder{rest: rest[1:], rules: 1}
	switch {
	case rest[0] == versionFirst:
	case rest[0] != versionRules:
		return nil, fmt.Errorf("version %d, this program reads %d and %d", rest[0], versionFirst, versionRules)
	case len(d.rest) == 0 || d.rest[0] < 2:
		return nil, fmt.Errorf("version %d with the rules of version %d", versionRules, versionFirst)
	default:
		d.rules, d.rest = d.rest[0], d.rest[1:]
	}
	return d, d.readColumns(wanted)
}

func decode(encoded []byte) (*TOC, error) {
	d, err := newDecoder(encoded)
	if err != nil {
		return nil, err
	}
	t := &TOC{ChainID: digest.Digest(d.col[colChainID].B), Rules: d.rules}
	d.count = columns.Numbers(d.col[colSizes].B)
	// Contents and names have nothing to do with each other, and a container waits for both.
	var contents error
	var work sync.WaitGroup
	work.Go(func() {
		contents = inTurn(func() error { return d.contents(t) }, t.validateContents)
	})
	err = d.names(t)
	work.Wait()
	if err = cmp.Or(contents, err); err != nil {
		return nil, err
	}
	for i := range t.Inodes {
		if n := &t.Inodes[i]; n.Content >= 0 {
			n.Size = t.Contents[n.Content].Size
		}
	}
	d.col[colChainID].B = nil
	for i := range d.col {
		if err := d.col[i].End(); err != nil {
			return nil, fmt.Errorf("column %d: %w", i, err)
		}
	}
	if err := inTurn(t.validateHead, t.validateInodes); err != nil {
		return nil, err
	}
	t.setNlink()
	return t, nil
}

// names reads and checks xattrs, inodes but for the sizes and contents of files, and the tree, and
// looks at no contents or segments, which are read meanwhile.
func (d *decoder) names(t *TOC) error {
	read := func(fn func(*TOC) error) func() error { return func() error { return fn(t) } }
	return inTurn(read(d.xattrs), read(d.inodes), read(d.tree), t.validateTree, t.validateXattrs)
}

type decoder struct {
	rest  []byte
	rules uint8
	col   [colCount]columns.Reader
	count int // of contents
}

// readColumns decompresses columns: those wanted, or all if none is named. Every element of
// the TOC takes at least one byte of a column, so what is allocated later is bounded by
// maxRaw, too.
func (d *decoder) readColumns(wanted []int) error {
	left := uint64(maxRaw)
	for i := range d.col {
		if wanted != nil && !slices.Contains(wanted, i) {
			n := columns.Size(d.rest)
			if n == 0 || n > uint64(len(d.rest)) {
				return fmt.Errorf("column %d: %d of %d bytes", i, len(d.rest), n)
			}
			d.rest = d.rest[n:]
			continue
		}
		col, rest, err := columns.Next(d.rest, left)
		if err != nil {
			return fmt.Errorf("column %d: %w", i, err)
		}
		d.col[i].B, d.rest = col, rest
		left -= uint64(len(col))
	}
	if len(d.rest) > 0 {
		return fmt.Errorf("%d bytes too many", len(d.rest))
	}
	return nil
}

func (d *decoder) xattrs(t *TOC) error {
	t.Xattrs = append(t.Xattrs, nil)
	col := &d.col[colXattrs]
	for len(col.B) > 0 {
		var set []Xattr
		for range col.Uint(uint64(len(col.B))) {
			x := Xattr{Name: string(col.Block(MaxName)), Value: bytes.Clone(col.Block(MaxXattr))}
			if col.Err != nil {
				break
			}
			set = append(set, x)
		}
		t.Xattrs = append(t.Xattrs, set)
	}
	return col.Err
}

func (d *decoder) contents(t *TOC) error {
	ids, sizes, col := &d.col[colDigests], &d.col[colSizes], &d.col[colSegments]
	n := d.count
	// Each content has one number for its count, one for each of its segments.
	segments := columns.Numbers(col.B) - n
	if n > MaxInodes || n*segment.IDLength > len(ids.B) || segments < n || segments > MaxSegments {
		return fmt.Errorf("%d contents, %d segments, %d bytes of IDs", n, segments, len(ids.B))
	}
	t.Contents = make([]Content, n)
	t.Segments = make([]Segment, 0, segments)
	for i := range t.Contents {
		c := &t.Contents[i]
		c.ID = segment.ID(ids.Bytes(segment.IDLength))
		size := sizes.Uint(MaxSize)
		c.Size, c.First = int64(size), uint32(len(t.Segments))
		c.Segments = uint32(col.Uint(uint64(segments-len(t.Segments)))) + 1
		at := uint64(0)
		for j := range c.Segments {
			v := col.Uint(segment.MaxLength<<1 | 1)
			s := Segment{Offset: int64(at)}
			length := v >> 1
			if j == c.Segments-1 {
				if length != 0 || size <= at {
					return fmt.Errorf("content %d: segments of %d bytes before the last, content of %d", i, at, size)
				}
				length = size - at
			}
			if col.Err != nil || length == 0 || length > segment.MaxLength {
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
			copy(s.ID[:], ids.Bytes(segment.IDLength))
			if s.ID.IsHole() {
				return fmt.Errorf("content %d: segment %d has the zero ID and is no hole", i, j)
			}
		}
	}
	return errors.Join(ids.Err, sizes.Err)
}

func (d *decoder) inodes(t *TOC) error {
	var table []attrs
	for col := &d.col[colAttrs]; len(col.B) > 0; {
		u := func() uint32 { return uint32(col.Uint(math.MaxUint32)) }
		if table = append(table, attrs{u(), u(), u(), u()}); col.Err != nil {
			return col.Err
		}
	}
	n := columns.Numbers(d.col[colAttr].B)
	if n == 0 || n > MaxInodes || len(table) == 0 {
		return fmt.Errorf("%d inodes, %d attributes", n, len(table))
	}
	t.Inodes = make([]Inode, n)
	targets := string(d.col[colTarget].B) // one allocation for all of them
	d.col[colTarget].B = nil
	used, mtime, nextContent, first := uint64(0), int64(0), int32(0), uint32(0)
	for i := range t.Inodes {
		k := d.col[colAttr].Uint(min(used, uint64(len(table))-1))
		if k == used {
			used++
		}
		a := table[k]
		mtime += d.col[colMtime].Int()
		n := &t.Inodes[i]
		*n = Inode{
			Mode: a.mode, UID: a.uid, GID: a.gid, Xattrs: a.xattrs,
			Mtime: mtime, MtimeNsec: uint32(d.col[colNsec].Uint(999_999_999)), Content: -1,
		}
		switch a.mode & unix.S_IFMT {
		case unix.S_IFDIR:
			n.FirstChild, n.Children = first, uint32(d.col[colChildren].Uint(uint64(MaxDirents-first)))
			first += n.Children
		case unix.S_IFCHR, unix.S_IFBLK:
			n.Major = uint32(d.col[colDevice].Uint(math.MaxUint32))
			n.Minor = uint32(d.col[colDevice].Uint(math.MaxUint32))
		case unix.S_IFLNK:
			var ok bool
			if n.Target, targets, ok = strings.Cut(targets, "\x00"); !ok {
				return fmt.Errorf("inode %d: no target", i)
			}
			n.Size = int64(len(n.Target))
		case unix.S_IFREG:
			ref := d.col[colRefs].Uint(uint64(nextContent) + 1)
			switch {
			case ref == 1:
				n.Content = nextContent
				nextContent++
			case ref > 1:
				n.Content = nextContent - int32(ref-1)
			}
			if int(n.Content) >= d.count {
				return fmt.Errorf("inode %d: content %d of %d", i, n.Content, d.count)
			}
		}
	}
	if targets != "" || used != uint64(len(table)) {
		return fmt.Errorf("%d bytes of targets too many, %d of %d attributes used", len(targets), used, len(table))
	}
	return nil
}

func (d *decoder) tree(t *TOC) error {
	names := string(d.col[colNames].B) // one allocation for all of them
	d.col[colNames].B = nil
	n := strings.Count(names, "\x00")
	if n > MaxDirents {
		return fmt.Errorf("%d names", n)
	}
	t.Dirents = make([]Dirent, n)
	col := &d.col[colLinks]
	link, inode := -1, uint32(0)
	advance := func() {
		if len(col.B) == 0 {
			link = n
			return
		}
		link += int(col.Uint(uint64(n - 1 - link)))
		inode = uint32(col.Uint(uint64(len(t.Inodes) - 1)))
	}
	advance()
	next := uint32(1)
	for i := range t.Dirents {
		e := &t.Dirents[i]
		e.Name, names, _ = strings.Cut(names, "\x00")
		if i != link {
			e.Inode = next
			next++
			continue
		}
		if inode >= next {
			return fmt.Errorf("name %d: linked to inode %d before its first name", i, inode)
		}
		e.Inode = inode
		advance()
	}
	if names != "" {
		return errors.New("the last name has no end")
	}
	return nil // a gap of 0 in links leaves the column unread, which decode finds
}
