package arena

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"math"
	"sort"
	"sync"

	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
)

// BlockSize is the unit of the presence map and the alignment of contents,
// bytes.
const BlockSize = 4096

// maxSize bounds an arena so that offsets of blocks and ends never overflow.
const maxSize = math.MaxInt64 - 2*BlockSize

// Layout says where in an arena each content of one TOC lies. Contents are in
// TOC order, each at the next multiple of BlockSize; those that are used in
// place from other arenas are left out. It does not refer to the TOC it was made from,
// and takes some 60 bytes a segment.
//
// Segments of an arena are numbered from 0 in the order of their places; these
// numbers are what Arena's methods take. They equal indices into TOC.Segments
// only when no content is left out: see TOCSegment and FromTOC.
type Layout struct {
	digest       func() [sha256.Size]byte
	size         int64 // bytes of the arena
	contentBytes int64 // sum of the contents' sizes
	tocContents  int
	tocSegments  int

	contents []placed // in TOC order
	// One entry a segment, in three slices because that needs no padding.
	ids     []segment.ID
	offsets []int64
	lengths []uint32

	// The index by ID is only needed when bytes arrive, so it is made then and
	// not on the way to the mount.
	index    sync.Once
	byID     []uint32 // segment numbers sorted by ID, then number; no holes
	repeated []uint64 // bit i: another segment has the ID of segment i
}

// placed is one content of the arena.
type placed struct {
	content  uint32 // index into TOC.Contents
	first    uint32 // its first segment's number
	tocFirst uint32 // its first segment's index in TOC.Segments
}

// NewLayout lays out the contents of t for which in returns true; a nil in
// takes all of them. It fails when t's contents and segments do not fit together, or
// are larger than a file can be.
func NewLayout(t *toc.TOC, in func(content int) bool) (*Layout, error) {
	if int64(len(t.Contents)) > math.MaxUint32 || int64(len(t.Segments)) > math.MaxUint32 {
		return nil, fmt.Errorf("lay out arena of %s: too many contents", t.ChainID)
	}
	contents, segments := 0, 0
	for i := range t.Contents {
		if in == nil || in(i) {
			contents++
			segments += int(t.Contents[i].Segments)
		}
	}
	if segments > len(t.Segments) {
		return nil, fmt.Errorf("lay out arena of %s: contents name %d segments of %d", t.ChainID, segments, len(t.Segments))
	}
	l := &Layout{
		tocContents: len(t.Contents),
		tocSegments: len(t.Segments),
		contents:    make([]placed, 0, contents),
		ids:         make([]segment.ID, 0, segments),
		offsets:     make([]int64, 0, segments),
		lengths:     make([]uint32, 0, segments),
	}
	for i := range t.Contents {
		if in != nil && !in(i) {
			continue
		}
		if err := l.add(uint32(i), &t.Contents[i], t.Segments); err != nil {
			return nil, fmt.Errorf("lay out arena of %s: content %d: %w", t.ChainID, i, err)
		}
	}
	// Needed when the arena is made, not for where things lie.
	l.digest = sync.OnceValue(l.sum)
	go l.digest()
	return l, nil
}

func (l *Layout) add(index uint32, c *toc.Content, segments []toc.Segment) error {
	end := uint64(c.First) + uint64(c.Segments)
	if c.Size <= 0 || c.Segments == 0 || end > uint64(len(segments)) {
		return fmt.Errorf("%d bytes in segments %d to %d of %d", c.Size, c.First, end, len(segments))
	}
	if len(l.ids)+int(c.Segments) > cap(l.ids) {
		return fmt.Errorf("its segments changed while they were laid out")
	}
	if k := len(l.contents); k > 0 && int64(c.First) < int64(l.contents[k-1].tocFirst)+int64(len(l.ids))-int64(l.contents[k-1].first) {
		return fmt.Errorf("its segments begin at %d, before the end of another content's", c.First)
	}
	if c.Size > maxSize-l.size {
		return fmt.Errorf("%d bytes after %d: larger than a file can be", c.Size, l.size)
	}
	l.contents = append(l.contents, placed{content: index, first: uint32(len(l.ids)), tocFirst: c.First})
	var at int64
	for _, s := range segments[c.First:end] {
		if s.Offset != at || s.Length == 0 || int64(s.Length) > c.Size-at {
			return fmt.Errorf("segment of %d bytes at %d of %d, want one at %d", s.Length, s.Offset, c.Size, at)
		}
		l.ids = append(l.ids, s.ID)
		l.offsets = append(l.offsets, l.size+at)
		l.lengths = append(l.lengths, s.Length)
		at += int64(s.Length)
	}
	if at != c.Size {
		return fmt.Errorf("segments of %d bytes make up %d", at, c.Size)
	}
	l.contentBytes += c.Size
	l.size += (c.Size + BlockSize - 1) / BlockSize * BlockSize
	return nil
}

// sum digests everything that decides what a bit of the maps means.
func (l *Layout) sum() (d [sha256.Size]byte) {
	h := sha256.New()
	// Many small pieces at a time.
	b := make([]byte, 0, 16<<10)
	room := func(n int) {
		if len(b)+n > cap(b) {
			h.Write(b)
			b = b[:0]
		}
	}
	for i := range l.ids {
		room(sha256.Size + 12)
		b = append(b, l.ids[i][:]...)
		b = binary.LittleEndian.AppendUint64(b, uint64(l.offsets[i]))
		b = binary.LittleEndian.AppendUint32(b, l.lengths[i])
	}
	for _, c := range l.contents {
		room(8)
		b = binary.LittleEndian.AppendUint32(b, c.content)
		b = binary.LittleEndian.AppendUint32(b, c.tocFirst)
	}
	h.Write(b)
	h.Sum(d[:0])
	return d
}

// Size returns the arena's size in bytes, a multiple of BlockSize.
func (l *Layout) Size() int64 { return l.size }

// ContentBytes returns the summed size of the contents in the arena, bytes.
func (l *Layout) ContentBytes() int64 { return l.contentBytes }

// Contents returns how many contents the arena holds.
func (l *Layout) Contents() int { return len(l.contents) }

// Segments returns how many segments the arena holds.
func (l *Layout) Segments() int { return len(l.ids) }

// TOCSegments returns how many segments the TOC has.
func (l *Layout) TOCSegments() int { return l.tocSegments }

// Blocks returns how many blocks of BlockSize the arena has.
func (l *Layout) Blocks() int64 { return l.size / BlockSize }

// Digest identifies the layout: two layouts with equal digests place equal
// segments at equal offsets, and come from TOCs with equal contents there.
func (l *Layout) Digest() [sha256.Size]byte { return l.digest() }

// Offset returns where TOC.Contents[content] begins in the arena, in bytes;
// false when it is not in this arena.
func (l *Layout) Offset(content int) (int64, bool) {
	p, ok := l.find(content)
	if !ok {
		return 0, false
	}
	return l.offsets[l.contents[p].first], true
}

// find returns the position of TOC.Contents[content] in l.contents.
func (l *Layout) find(content int) (int, bool) {
	if len(l.contents) == l.tocContents { // nothing is left out
		return content, content >= 0 && content < l.tocContents
	}
	return sort.Find(len(l.contents), func(i int) int { return content - int(l.contents[i].content) })
}

// Segment is one segment's place in an arena.
type Segment struct {
	ID     segment.ID
	Offset int64 // bytes, in the arena
	Length int   // bytes
}

// Segment returns where segment i of the arena lies.
func (l *Layout) Segment(i int) Segment {
	return Segment{ID: l.ids[i], Offset: l.offsets[i], Length: int(l.lengths[i])}
}

// Content returns the index in TOC.Contents of the content that segment i of
// the arena is a piece of.
func (l *Layout) Content(i int) int { return int(l.contents[l.contentOf(i)].content) }

// contentOf returns the position in l.contents of segment i's content.
func (l *Layout) contentOf(i int) int {
	return sort.Search(len(l.contents), func(k int) bool { return int(l.contents[k].first) > i }) - 1
}

// TOCSegment returns the index in TOC.Segments of segment i of the arena.
func (l *Layout) TOCSegment(i int) int {
	c := &l.contents[l.contentOf(i)]
	return int(c.tocFirst) + i - int(c.first)
}

// FromTOC returns the number in the arena of TOC.Segments[segment]; false when
// it is not in this arena.
func (l *Layout) FromTOC(segment int) (int, bool) {
	if len(l.contents) == l.tocContents { // nothing is left out
		return segment, segment >= 0 && segment < len(l.ids)
	}
	// The contents of a TOC are in the order of their segments.
	k := sort.Search(len(l.contents), func(k int) bool { return int(l.contents[k].tocFirst) > segment }) - 1
	if k < 0 {
		return 0, false
	}
	i := int(l.contents[k].first) + segment - int(l.contents[k].tocFirst)
	return i, i < l.contentEnd(k)
}

// contentEnd returns the number after the last segment of l.contents[k].
func (l *Layout) contentEnd(k int) int {
	if k+1 < len(l.contents) {
		return int(l.contents[k+1].first)
	}
	return len(l.ids)
}

// Neighbours returns the segments [first, end) of the content that segment i is a piece of.
func (l *Layout) Neighbours(i int) (first, end int) {
	k := l.contentOf(i)
	return int(l.contents[k].first), l.contentEnd(k)
}

// SegmentsIn returns the segments [first, end) that have bytes in
// [off, off+n) of the arena. Padding belongs to no segment.
func (l *Layout) SegmentsIn(off, n int64) (first, end int) {
	if off < 0 {
		n += off
		off = 0
	}
	if n <= 0 || off >= l.size {
		return 0, 0
	}
	first = sort.Search(len(l.ids), func(i int) bool { return l.end(i) > off })
	if n >= l.size-off {
		return first, len(l.ids)
	}
	end = first + sort.Search(len(l.ids)-first, func(i int) bool { return l.offsets[first+i] >= off+n })
	return first, end
}

// end returns the offset after the last byte of segment i.
func (l *Layout) end(i int) int64 { return l.offsets[i] + int64(l.lengths[i]) }

// padding returns how many bytes lie between the end of segment i and whatever
// comes next: more than 0 only for the last segment of a content.
func (l *Layout) padding(i int) int {
	next := l.size
	if i+1 < len(l.ids) {
		next = l.offsets[i+1]
	}
	return int(next - l.end(i))
}

// Find appends to dst the numbers of the segments with this ID, ascending. A
// hole is never found.
func (l *Layout) Find(dst []int, id segment.ID) []int {
	l.index.Do(l.makeIndex)
	from := sort.Search(len(l.byID), func(i int) bool { return bytes.Compare(l.ids[l.byID[i]][:], id[:]) >= 0 })
	for _, i := range l.byID[from:] {
		if l.ids[i] != id {
			break
		}
		dst = append(dst, int(i))
	}
	return dst
}

// Same appends to dst the numbers of all segments with the ID of segment i, i
// among them; of a hole, only i.
func (l *Layout) Same(dst []int, i int) []int {
	if l.Repeated(i) {
		return l.Find(dst, l.ids[i])
	}
	return append(dst, i)
}

// Repeated reports whether another segment has the ID of segment i.
func (l *Layout) Repeated(i int) bool {
	l.index.Do(l.makeIndex)
	return l.repeated[i/64]>>(i%64)&1 != 0
}

func (l *Layout) makeIndex() {
	l.byID = make([]uint32, 0, len(l.ids))
	for i := range l.ids {
		if !l.ids[i].IsHole() {
			l.byID = append(l.byID, uint32(i))
		}
	}
	segment.Sort(l.byID, func(i uint32) *segment.ID { return &l.ids[i] })
	l.repeated = make([]uint64, words(len(l.ids)))
	for k := 1; k < len(l.byID); k++ {
		if l.ids[l.byID[k-1]] == l.ids[l.byID[k]] {
			for _, i := range l.byID[k-1 : k+1] {
				l.repeated[i/64] |= 1 << (i % 64)
			}
		}
	}
}

// ByID returns segments sorted by their IDs, which id gives, and length their lengths, for contents.List.Join.
func (l *Layout) ByID(segments []int) (sorted []int32, id func(int32) *segment.ID, length func(int32) int64) {
	ids := make([]segment.ID, l.Segments())
	sorted = make([]int32, len(segments))
	for k, i := range segments {
		sorted[k], ids[i] = int32(i), l.Segment(i).ID
	}
	id = func(i int32) *segment.ID { return &ids[i] }
	segment.Sort(sorted, id)
	return sorted, id, func(i int32) int64 { return int64(l.Segment(int(i)).Length) }
}
