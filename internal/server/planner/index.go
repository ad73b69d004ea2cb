// Package planner decides what a bundle holds: from the indices of the rootfs
// that are wanted and of those that a worker has, the missing segments, the
// frames they rest in, and the order in which they go.
//
// # The index object
//
// An index says for every segment of one TOC where it rests. It can be rebuilt
// from the TOC and the packs' tables (Build) and is kept because asking for 100,000
// places takes longer than reading them. Encoded it is the seven bytes
// "HFINDX\n", the version (1, one byte) and these columns as package columns
// codes them, nothing after:
//
//	toc       the text of the TOC's digest
//	packs     blocks: the keys of packs, sorted
//	pack      per frame, uvarint: index into packs; frames are in the order of
//	          pack and offset
//	offset    per frame, uvarint: its offset in the pack, less the end of the
//	          frame before it in this index, in the same pack (the first: less 0)
//	length    per frame, uvarint: bytes as stored
//	counts    per frame, uvarint: segments in it, also those of other rootfs
//	lengths   per segment of all frames, uvarint: bytes
//	frame     per segment of the TOC that is no hole, varint: its frame less that
//	          of the one before (the first: less 0)
//	slot      per segment of the TOC that is no hole, uvarint: its place in its
//	          frame's segments
package planner

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/bits"
	"slices"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/columns"
	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/server/catalog"
)

// Index says where each segment of one TOC rests. It is immutable.
type Index struct {
	toc      digest.Digest
	table    *toc.TOC      // chain ID, contents and segments only
	segments []toc.Segment // the table's
	packs    []string
	frames   []frame
	lengths  []uint32 // of the segments of all frames
	frameOf  []uint32 // by segment of the TOC; noFrame for a hole
	slotOf   []uint32 // by segment of the TOC: place in its frame

	// The segments that are no holes in order of ID, then of number: prefix holds
	// the first eight bytes of the IDs, so that a difference reads memory in order.
	order  []uint32
	prefix []uint64
}

type frame struct {
	pack         uint32
	length       uint32
	offset       int64
	raw          uint32
	first, count uint32 // in lengths
}

const noFrame = math.MaxUint32

// ErrMissing is returned, wrapped, when a segment of a TOC rests nowhere.
var ErrMissing = errors.New("segment is not stored")

// ErrCorrupt is returned, wrapped, for an index object that cannot be read, or
// belongs to another TOC. Build makes a new one.
var ErrCorrupt = errors.New("corrupt frame index")

// Build asks where the segments of t rest; d is the digest of the
// encoded TOC. Errors: ErrMissing; the Locator's.
func Build(ctx context.Context, t *toc.TOC, d digest.Digest, packs catalog.Locator) (*Index, error) {
	ids := make([]segment.ID, 0, len(t.Segments))
	for i := range t.Segments {
		if !t.Segments[i].ID.IsHole() {
			ids = append(ids, t.Segments[i].ID)
		}
	}
	places, err := packs.Locate(ctx, ids)
	if err != nil {
		return nil, fmt.Errorf("index rootfs %s: locate segments: %w", t.ChainID, err)
	}
	if len(places) != len(ids) {
		return nil, fmt.Errorf("index rootfs %s: located %d of %d segments", t.ChainID, len(places), len(ids))
	}
	frames := map[*catalog.Frame]uint32{}
	var list []*catalog.Frame
	for i, p := range places {
		if p.Frame == nil {
			return nil, fmt.Errorf("index rootfs %s: segment %s: %w", t.ChainID, ids[i], ErrMissing)
		}
		if p.Index < 0 || p.Index >= len(p.Frame.Segments) || p.Frame.Segments[p.Index].ID != ids[i] {
			return nil, fmt.Errorf("index rootfs %s: segment %s: it is said to be number %d of another frame", t.ChainID, ids[i], p.Index)
		}
		if _, ok := frames[p.Frame]; !ok {
			frames[p.Frame] = 0
			list = append(list, p.Frame)
		}
	}
	slices.SortFunc(list, func(a, b *catalog.Frame) int {
		return cmp.Or(cmp.Compare(a.Pack, b.Pack), cmp.Compare(a.Offset, b.Offset))
	})
	x := &Index{toc: d, table: table(t), segments: t.Segments}
	for i, f := range list {
		// Two pointers may name one frame.
		if i > 0 && list[i-1].Pack == f.Pack && list[i-1].Offset == f.Offset {
			frames[f] = uint32(len(x.frames) - 1)
			continue
		}
		if n := len(x.packs); n == 0 || x.packs[n-1] != f.Pack {
			x.packs = append(x.packs, f.Pack)
		}
		frames[f] = uint32(len(x.frames))
		x.frames = append(x.frames, frame{
			pack: uint32(len(x.packs) - 1), offset: f.Offset, length: f.Length, raw: f.RawLength,
			first: uint32(len(x.lengths)), count: uint32(len(f.Segments)),
		})
		for _, s := range f.Segments {
			x.lengths = append(x.lengths, s.Length)
		}
	}
	x.frameOf, x.slotOf = make([]uint32, len(t.Segments)), make([]uint32, len(t.Segments))
	next := 0
	for i := range t.Segments {
		if x.frameOf[i] = noFrame; !t.Segments[i].ID.IsHole() {
			x.frameOf[i], x.slotOf[i] = frames[places[next].Frame], uint32(places[next].Index)
			next++
		}
	}
	if err := x.check(); err != nil {
		return nil, fmt.Errorf("index rootfs %s: %w", t.ChainID, err)
	}
	x.sort()
	return x, nil
}

// Packs returns the keys of the packs that the segments are in.
func (x *Index) Packs() []string { return x.packs }

// check finds what would make a plan wrong.
func (x *Index) check() error {
	for i, f := range x.frames {
		raw := uint64(0)
		for _, n := range x.lengths[f.first : f.first+f.count] {
			raw += uint64(n)
		}
		if f.count == 0 || raw != uint64(f.raw) || raw == 0 || raw > segment.MaxFrameRaw || f.length < 2 || f.length > segment.MaxFrameRaw+1 || f.offset < 0 {
			return fmt.Errorf("%w: frame %d: %d bytes at %d, %d raw", ErrCorrupt, i, f.length, f.offset, f.raw)
		}
	}
	for i := range x.segments {
		if x.frameOf[i] == noFrame {
			continue
		}
		f := x.frames[x.frameOf[i]]
		if x.slotOf[i] >= f.count || x.lengths[f.first+x.slotOf[i]] != x.segments[i].Length {
			return fmt.Errorf("%w: segment %d: place %d of frame %d", ErrCorrupt, i, x.slotOf[i], x.frameOf[i])
		}
	}
	return nil
}

// sort makes order and prefix. IDs are digests, and as good as random: put into as many
// buckets as there are, by their first bits, some share one, and what is left to sort are
// these few.
func (x *Index) sort() {
	type entry struct {
		prefix uint64
		number uint32
	}
	n := 0
	for _, f := range x.frameOf {
		if f != noFrame {
			n++
		}
	}
	shift := 64 - bits.Len(uint(n))
	ends := make([]uint32, 1<<(64-shift)) // by bucket: where it ends
	for i := range x.segments {
		if x.frameOf[i] != noFrame {
			ends[binary.BigEndian.Uint64(x.segments[i].ID[:])>>shift]++
		}
	}
	for i := 1; i < len(ends); i++ {
		ends[i] += ends[i-1]
	}
	// Filled from their ends: ends become starts.
	entries := make([]entry, n)
	for i := len(x.segments) - 1; i >= 0; i-- {
		if x.frameOf[i] != noFrame {
			prefix := binary.BigEndian.Uint64(x.segments[i].ID[:])
			at := &ends[prefix>>shift]
			*at--
			entries[*at] = entry{prefix, uint32(i)}
		}
	}
	x.order, x.prefix = make([]uint32, n), make([]uint64, n)
	for i, start := range ends {
		end := n
		if i+1 < len(ends) {
			end = int(ends[i+1])
		}
		bucket := entries[start:end]
		if len(bucket) > 1 {
			slices.SortFunc(bucket, func(a, b entry) int {
				if a.prefix != b.prefix {
					return cmp.Compare(a.prefix, b.prefix)
				}
				return cmp.Or(bytes.Compare(x.segments[a.number].ID[:], x.segments[b.number].ID[:]), cmp.Compare(a.number, b.number))
			})
		}
		for k, e := range bucket {
			x.order[int(start)+k], x.prefix[int(start)+k] = e.number, e.prefix
		}
	}
}

// TOC returns the digest of the encoded TOC that is indexed.
func (x *Index) TOC() digest.Digest { return x.toc }

// table is what an index keeps of a TOC.
func table(t *toc.TOC) *toc.TOC {
	return &toc.TOC{ChainID: t.ChainID, Rules: t.Rules, Contents: t.Contents, Segments: t.Segments}
}

// Table returns the TOC without its names and inodes: chain ID, contents and
// segments.
func (x *Index) Table() *toc.TOC { return x.table }

// Len returns the number of segments of the TOC.
func (x *Index) Len() int { return len(x.segments) }

// Find returns the number of a segment in the TOC; of equal ones the lowest.
func (x *Index) Find(id segment.ID) (n uint32, ok bool) {
	prefix := binary.BigEndian.Uint64(id[:])
	i, _ := slices.BinarySearch(x.prefix, prefix)
	for ; i < len(x.prefix) && x.prefix[i] == prefix; i++ {
		if x.segments[x.order[i]].ID == id {
			return x.order[i], true
		}
	}
	return 0, false
}

// Frame returns the frame in which segment n of the TOC, no hole, rests.
func (x *Index) Frame(n uint32) Part {
	f := &x.frames[x.frameOf[n]]
	return Part{Pack: x.packs[f.pack], Offset: f.offset, Length: f.length, RawLength: f.raw}
}

// Memory returns about how many bytes the index takes in memory.
func (x *Index) Memory() int64 {
	return int64(len(x.segments)*(48+4+4+4+8) + len(x.table.Contents)*48 + len(x.frames)*32 + len(x.lengths)*4 + 1024)
}

const (
	indexMagic   = "HFINDX\n"
	indexVersion = 1
	maxColumn    = 256 << 20
)

// Encode returns the index object.
func (x *Index) Encode() []byte {
	var packs, pack, offset, length, counts, lengths, frames, slots []byte
	for _, p := range x.packs {
		packs = columns.AppendBlock(packs, p)
	}
	at := int64(0)
	for i, f := range x.frames {
		if i > 0 && x.frames[i-1].pack != f.pack {
			at = 0
		}
		pack = binary.AppendUvarint(pack, uint64(f.pack))
		offset = binary.AppendUvarint(offset, uint64(f.offset-at))
		at = f.offset + int64(f.length)
		length = binary.AppendUvarint(length, uint64(f.length))
		counts = binary.AppendUvarint(counts, uint64(f.count))
	}
	for _, n := range x.lengths {
		lengths = binary.AppendUvarint(lengths, uint64(n))
	}
	before := int64(0)
	for i, f := range x.frameOf {
		if f == noFrame {
			continue
		}
		frames = binary.AppendVarint(frames, int64(f)-before)
		before = int64(f)
		slots = binary.AppendUvarint(slots, uint64(x.slotOf[i]))
	}
	b := append([]byte(indexMagic), indexVersion)
	for _, col := range [][]byte{[]byte(x.toc), packs, pack, offset, length, counts, lengths, frames, slots} {
		b = columns.Append(b, col, true)
	}
	return b
}

// Decode reads an index object; t is the TOC it must belong to, d the digest
// of the encoded TOC. Errors: ErrCorrupt.
func Decode(b []byte, t *toc.TOC, d digest.Digest) (*Index, error) {
	x, err := decode(b, t, d)
	if errors.Is(err, columns.ErrCorrupt) {
		err = fmt.Errorf("%w: %w", ErrCorrupt, err)
	}
	if err != nil {
		return nil, fmt.Errorf("frame index of %s: %w", d, err)
	}
	return x, nil
}

func decode(b []byte, t *toc.TOC, d digest.Digest) (*Index, error) {
	rest, ok := bytes.CutPrefix(b, []byte(indexMagic))
	if !ok || len(rest) == 0 || rest[0] != indexVersion {
		return nil, fmt.Errorf("%w: it does not start like one", ErrCorrupt)
	}
	rest = rest[1:]
	var col [9]columns.Reader
	for i := range col {
		var err error
		if col[i].B, rest, err = columns.Next(rest, maxColumn); err != nil {
			return nil, err
		}
	}
	packs, pack, offset, length, counts, lengths, frames, slots := &col[1], &col[2], &col[3], &col[4], &col[5], &col[6], &col[7], &col[8]
	if string(col[0].B) != string(d) || len(rest) > 0 {
		return nil, fmt.Errorf("%w: it is of TOC %q, %d bytes too many", ErrCorrupt, col[0].B, len(rest))
	}
	col[0].B = nil
	x := &Index{toc: d, table: table(t), segments: t.Segments}
	for len(packs.B) > 0 {
		x.packs = append(x.packs, string(packs.Block(4096)))
	}
	x.lengths = make([]uint32, columns.Numbers(lengths.B))
	for i := range x.lengths {
		x.lengths[i] = uint32(lengths.Uint(segment.MaxLength))
	}
	x.frames = make([]frame, columns.Numbers(pack.B))
	at, first := uint64(0), uint64(0)
	for i := range x.frames {
		f := &x.frames[i]
		if len(x.packs) > 0 {
			f.pack = uint32(pack.Uint(uint64(len(x.packs) - 1)))
		}
		if i > 0 && f.pack != x.frames[i-1].pack {
			at = 0
		}
		at += offset.Uint(1 << 50)
		f.offset, f.length = int64(at), uint32(length.Uint(segment.MaxFrameRaw+1))
		if at += uint64(f.length); at > 1<<60 {
			return nil, fmt.Errorf("%w: frame %d at %d", ErrCorrupt, i, at)
		}
		f.first, f.count = uint32(first), uint32(counts.Uint(uint64(len(x.lengths))-first))
		first += uint64(f.count)
		raw := uint64(0)
		for _, n := range x.lengths[f.first : f.first+f.count] {
			raw += uint64(n)
		}
		f.raw = uint32(min(raw, math.MaxUint32))
		if i > 0 && (f.pack < x.frames[i-1].pack || f.pack == x.frames[i-1].pack && f.offset <= x.frames[i-1].offset) {
			return nil, fmt.Errorf("%w: frame %d is out of order", ErrCorrupt, i)
		}
	}
	x.frameOf, x.slotOf = make([]uint32, len(t.Segments)), make([]uint32, len(t.Segments))
	before := int64(0)
	for i := range t.Segments {
		if x.frameOf[i] = noFrame; t.Segments[i].ID.IsHole() {
			continue
		}
		if before += frames.Int(); before < 0 || before >= int64(len(x.frames)) {
			return nil, fmt.Errorf("%w: segment %d: frame %d of %d", ErrCorrupt, i, before, len(x.frames))
		}
		x.frameOf[i], x.slotOf[i] = uint32(before), uint32(slots.Uint(math.MaxUint32))
	}
	for i := range col {
		if err := col[i].End(); err != nil {
			return nil, err
		}
	}
	if first != uint64(len(x.lengths)) {
		return nil, fmt.Errorf("%w: %d segments in frames, %d lengths", ErrCorrupt, first, len(x.lengths))
	}
	if err := x.check(); err != nil {
		return nil, err
	}
	x.sort()
	return x, nil
}
