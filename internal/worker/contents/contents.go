// Package contents is the list of what the arena of a rootfs holds, sorted, so
// that another image's pull finds in one merge what it can use in place. It is
// derived from the TOC and the placement, and is mapped, not read: a worker with
// many images keeps none of this in its heap.
//
// The file:
//
//	 8 bytes  magic "FOILCNT3"
//	32 bytes  SHA-256 of all records
//	48 bytes  each record: ID (32), offset in the arena (8, little-endian), length (8, little-endian)
//
// The length is what the ID cannot say: another image's TOC may give an ID with a length that is not the content's, and
// would have more of the arena, or keep less of the content, than is its own.
//
// A record is a content or, with bit 63 of its offset set, one segment of
// a content that has several. Bit 62 marks a content that is not one segment with the
// content's ID: nothing has compared its bytes with that until it was hashed whole
// (rootfs.Record). Records are sorted by ID, and a content before a
// segment of the same ID. A file with another length, magic or digest is made
// again: a wrong offset would be a wrong byte in another image.
//
// Files of older versions begin with "FOILCNT1" or "FOILCNT2". They have no lengths, and those of the first mark nothing by
// bit 62. They are read for what lenders keep, which cannot be made again; those lend nothing new.
package contents

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sort"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/worker/arena"
)

const (
	magic      = "FOILCNT3"
	recordSize = 48
	headerSize = len(magic) + sha256.Size

	// Of older versions.
	firstMagic    = "FOILCNT1"
	secondMagic   = "FOILCNT2"
	oldRecordSize = 40
)

// List is a mapped contents file.
type List struct{ data []byte }

// Old reports whether an older version wrote it, which noted no lengths.
func (c *List) Old() bool { return string(c.data[:len(magic)]) != magic }

func (c *List) recordSize() int { return sizeOfRecords(c.data) }

func sizeOfRecords(data []byte) int {
	if string(data[:len(magic)]) == magic {
		return recordSize
	}
	return oldRecordSize
}

// The bits of a record's offset that say what it is; none: Whole.
const (
	pieceBit    = 1 << 63
	composedBit = 1 << 62
)

// Kind is what a record is.
type Kind uint8

const (
	// Whole is a content of one segment, whose ID it has: whoever verified the segment verified it.
	Whole Kind = iota
	// Composed is any other content: of several segments, or a hole.
	Composed
	// Piece is one segment of a content that has several.
	Piece
)

// Write makes the file that lists what lies in the rootfs's own arena, laid out by l.
func Write(path string, t *toc.TOC, l *arena.Layout) error {
	type record struct {
		id     *segment.ID
		off    uint64
		length int64
	}
	// Contents before pieces, both in the order of their places: it decides between equal IDs.
	recs := make([]record, 0, l.Segments())
	for i := range t.Contents {
		if off, ok := l.Offset(i); ok {
			at := uint64(off)
			if IsComposed(t, i) {
				at |= composedBit
			}
			recs = append(recs, record{&t.Contents[i].ID, at, t.Contents[i].Size})
		}
	}
	for i := range t.Contents {
		c := &t.Contents[i]
		off, ok := l.Offset(i)
		if !ok || c.Segments == 1 {
			continue
		}
		for k := c.First; k < c.First+c.Segments; k++ {
			if s := &t.Segments[k]; !s.ID.IsHole() {
				recs = append(recs, record{&s.ID, uint64(off+s.Offset) | pieceBit, int64(s.Length)})
			}
		}
	}
	order := make([]uint32, len(recs))
	for i := range order {
		order[i] = uint32(i)
	}
	segment.Sort(order, func(i uint32) *segment.ID { return recs[i].id })
	b := make([]byte, headerSize, headerSize+len(recs)*recordSize)
	for _, i := range order {
		b = append(b, recs[i].id[:]...)
		b = binary.LittleEndian.AppendUint64(b, recs[i].off)
		b = binary.LittleEndian.AppendUint64(b, uint64(recs[i].length))
	}
	digest := sha256.Sum256(b[headerSize:])
	copy(b, magic)
	copy(b[len(magic):], digest[:])
	return os.WriteFile(path, b, 0o600)
}

// IsComposed reports whether content i of a TOC is not one segment with the content's ID.
func IsComposed(t *toc.TOC, i int) bool {
	c := &t.Contents[i]
	return c.Segments != 1 || t.Segments[c.First].ID != c.ID
}

// Open maps a contents file, and believes it or says why not.
func Open(path string) (*List, error) {
	c, err := Map(path)
	if err != nil {
		return nil, err
	}
	if err := check(c.data); err != nil {
		c.Close()
		return nil, fmt.Errorf("contents file %s: %w", path, err)
	}
	return c, nil
}

// Map maps a contents file that was just written by this process.
func Map(path string) (*List, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return nil, err
	}
	n := fi.Size()
	if n < int64(headerSize) {
		return nil, fmt.Errorf("contents file %s: %d bytes is no length it can have", path, n)
	}
	data, err := unix.Mmap(int(f.Fd()), 0, int(n), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map contents file %s: %w", path, err)
	}
	return &List{data}, nil
}

// check believes a contents file or says why not.
func check(data []byte) error {
	if len(data) < headerSize {
		return fmt.Errorf("%d bytes is no length it can have", len(data))
	}
	if m := string(data[:len(magic)]); m != magic && m != firstMagic && m != secondMagic {
		return errors.New("not one of ours")
	}
	if (len(data)-headerSize)%sizeOfRecords(data) != 0 {
		return fmt.Errorf("%d bytes is no length it can have", len(data))
	}
	if sha256.Sum256(data[headerSize:]) != [sha256.Size]byte(data[len(magic):]) {
		return errors.New("damaged: its digest is another")
	}
	return nil
}

// Close unmaps the list. Nobody may use it any more.
func (c *List) Close() {
	if c != nil && c.data != nil {
		_ = unix.Munmap(c.data)
		c.data = nil
	}
}

// Len is how many records there are.
func (c *List) Len() int { return (len(c.data) - headerSize) / c.recordSize() }

func (c *List) id(i int) []byte {
	at := headerSize + i*c.recordSize()
	return c.data[at : at+len(segment.ID{})]
}

// place returns the length as well; -1: it is not known.
func (c *List) place(i int) (off, length int64, kind Kind) {
	at := headerSize + i*c.recordSize() + len(segment.ID{})
	if length = -1; !c.Old() {
		length = int64(binary.LittleEndian.Uint64(c.data[at+8:]))
	}
	v := binary.LittleEndian.Uint64(c.data[at:])
	switch {
	case v&pieceBit != 0:
		kind = Piece
	case v&composedBit != 0:
		kind = Composed
	}
	return int64(v &^ (pieceBit | composedBit)), length, kind
}

// Only returns the bytes of a contents file that lists what lies in keep: whole
// contents, in the order of their places.
func (c *List) Only(keep []arena.Range) ([]byte, error) {
	b := make([]byte, headerSize)
	size := c.recordSize()
	for i := range c.Len() {
		off, length, _ := c.place(i)
		k := sort.Search(len(keep), func(k int) bool { return keep[k].Off > off }) - 1
		if k >= 0 && off < keep[k].Off+keep[k].Len && length <= keep[k].Off+keep[k].Len-off {
			at := headerSize + i*size
			b = append(b, c.data[at:at+size]...)
		}
	}
	digest := sha256.Sum256(b[headerSize:])
	copy(b, c.data[:len(magic)])
	copy(b[len(magic):], digest[:])
	return b, check(b)
}

// Join calls fn for every ID wanted that this arena holds with the length that is wanted, once for each place
// that holds it. want lists numbers sorted by the ID that id gives for them; length gives their lengths.
func (c *List) Join(want []int32, id func(int32) *segment.ID, length func(int32) int64, fn func(want int32, offset int64, kind Kind)) {
	at, n := 0, c.Len()
	for _, w := range want {
		wid := id(w)
		for at < n && bytes.Compare(c.id(at), wid[:]) < 0 {
			at++
		}
		for k := at; k < n && bytes.Equal(c.id(k), wid[:]); k++ {
			if off, n, kind := c.place(k); n < 0 || n == length(w) {
				fn(w, off, kind)
			}
		}
	}
}

// Of returns what gives the IDs and sizes of a TOC's contents, for Join.
func Of(t *toc.TOC) (id func(int32) *segment.ID, size func(int32) int64) {
	return func(c int32) *segment.ID { return &t.Contents[c].ID }, func(c int32) int64 { return t.Contents[c].Size }
}
