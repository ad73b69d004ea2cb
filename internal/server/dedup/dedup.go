// Package dedup is the deduplicating store: it keeps every segment once, in
// frames, in packs.
//
// # Packs
//
// A pack is one immutable object under packs/, and says itself what it holds:
// no catalog has that, and the catalog can be rebuilt from the packs alone:
//
//	magic    8 bytes: "hfpack\x00\x01"
//	frames   one after the other, each as package segment codes it
//	table    for each frame, in this order, unsigned varints unless said
//	         otherwise: its length as stored, how many segments it holds, and of
//	         each its ID (32 bytes) and its length
//	trailer  64 bytes: length of the table (8 bytes, little-endian), how many
//	         frames (8 bytes, little-endian), SHA-256 of the table and of these
//	         16 bytes, 8 zero bytes, magic
//
// The first frame is at offset 8. The raw length of a frame is the sum of its
// segments'. A frame's bytes have no checksum here: segments are verified by
// their own IDs.
//
// A pack's key is random: packs are never overwritten, and who writes one need
// not know what it will hold.
//
// # Where a segment is
//
// The catalog says which packs a layer needs, their tables say the rest (Places). So who
// reads a layer or a rootfs asks the catalog once. Who stores segments asks it by
// their hooks for packs that may have them (Finder), and looks at the tables of these. Two layers
// that are stored at once may both store a segment, and each needs its own pack then. When a large store has thinned its hooks
// out, a short run of duplicates may be missed, and is stored again. Both cost room, and nothing else; what
// is compacted together has it once.
//
// # Life of a pack
//
// A Writer commits packs to the object store as they fill, and tells the catalog
// about none of them before Publish: until then nobody can refer to them, so
// Close can delete them. A process that dies in between leaves packs that the
// catalog does not know. They take room and do no harm.
package dedup

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"sync"

	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/objects"
)

const (
	magic       = "hfpack\x00\x01"
	trailerSize = 8 + 8 + sha256.Size + 8 + len(magic)
	prefix      = "packs/"
	// maxTable bounds what is read at once of a pack; a pack of 64 MiB has a
	// table of some 100 KiB to 3 MiB.
	maxTable = 64 << 20
)

// ErrBadPack is returned, wrapped, for an object that is no pack or is damaged.
var ErrBadPack = errors.New("damaged pack")

// Store reads and writes segments. It is used by pointer.
type Store struct {
	Objects objects.Store
	Catalog catalog.Dedup
	// Tables keeps tables of packs; nil: the Store keeps its own.
	Tables *Tables

	once sync.Once
}

// appendTable adds one frame to a table.
func appendTable(table []byte, length int, segments []catalog.FrameSegment) []byte {
	table = binary.AppendUvarint(table, uint64(length))
	table = binary.AppendUvarint(table, uint64(len(segments)))
	for _, s := range segments {
		table = append(table, s.ID[:]...)
		table = binary.AppendUvarint(table, uint64(s.Length))
	}
	return table
}

// appendTrailer ends a pack whose table has been written.
func appendTrailer(b, table []byte, frames int) []byte {
	var counts [16]byte
	binary.LittleEndian.PutUint64(counts[:], uint64(len(table)))
	binary.LittleEndian.PutUint64(counts[8:], uint64(frames))
	h := sha256.New()
	h.Write(table)
	h.Write(counts[:])
	b = append(b, counts[:]...)
	b = h.Sum(b)
	b = append(b, make([]byte, 8)...)
	return append(b, magic...)
}

// ReadPack returns what a pack says that it holds. Errors: ErrBadPack,
// objects.ErrNotFound.
func (s *Store) ReadPack(ctx context.Context, key string) (catalog.Pack, error) {
	size, err := s.Objects.Stat(ctx, key)
	if err != nil {
		return catalog.Pack{}, fmt.Errorf("read pack %s: %w", key, err)
	}
	p, err := parsePack(key, size, func(offset, length int64) ([]byte, error) {
		return s.read(ctx, key, offset, length)
	})
	if err != nil {
		return catalog.Pack{}, fmt.Errorf("read pack %s: %w", key, err)
	}
	return p, nil
}

// read returns exactly the bytes asked for.
func (s *Store) read(ctx context.Context, key string, offset, length int64) ([]byte, error) {
	r, err := s.Objects.Open(ctx, key, offset, length)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	b := make([]byte, length)
	if _, err := io.ReadFull(r, b); err != nil {
		return nil, err
	}
	return b, nil
}

func parsePack(key string, size int64, read func(offset, length int64) ([]byte, error)) (catalog.Pack, error) {
	bad := func(format string, args ...any) (catalog.Pack, error) {
		return catalog.Pack{}, fmt.Errorf("%w: "+format, append([]any{ErrBadPack}, args...)...)
	}
	if size < int64(len(magic)+trailerSize) {
		return bad("%d bytes are too few", size)
	}
	head, err := read(0, int64(len(magic)))
	if err != nil {
		return catalog.Pack{}, err
	}
	trailer, err := read(size-int64(trailerSize), int64(trailerSize))
	if err != nil {
		return catalog.Pack{}, err
	}
	if string(head) != magic || string(trailer[trailerSize-len(magic):]) != magic {
		return bad("it does not start and end like one")
	}
	length, frames := binary.LittleEndian.Uint64(trailer), binary.LittleEndian.Uint64(trailer[8:])
	space := uint64(size) - uint64(len(magic)+trailerSize)
	if length > space || length > maxTable || frames > length {
		return bad("table of %d bytes for %d frames in %d bytes", length, frames, size)
	}
	start := size - int64(trailerSize) - int64(length)
	table, err := read(start, int64(length))
	if err != nil {
		return catalog.Pack{}, err
	}
	h := sha256.New()
	h.Write(table)
	h.Write(trailer[:16])
	if !bytes.Equal(h.Sum(nil), trailer[16:16+sha256.Size]) || !bytes.Equal(trailer[48:56], make([]byte, 8)) {
		return bad("wrong checksum of its table")
	}
	p := catalog.Pack{Key: key, Size: size, Frames: make([]catalog.Frame, 0, frames)}
	offset := int64(len(magic))
	for range frames {
		var f catalog.Frame
		if f, table, err = parseFrame(table); err != nil {
			return bad("frame %d: %v", len(p.Frames), err)
		}
		f.Pack, f.Offset = key, offset
		if offset += int64(f.Length); offset > start {
			return bad("frame %d ends at %d, the table starts at %d", len(p.Frames), offset, start)
		}
		p.Frames = append(p.Frames, f)
	}
	if len(table) > 0 || offset != start {
		return bad("its frames end at %d, its table starts at %d and has %d bytes too many", offset, start, len(table))
	}
	return p, nil
}

// parseFrame reads the first frame of a table and returns what follows it.
func parseFrame(b []byte) (f catalog.Frame, rest []byte, err error) {
	number := func(most uint64) uint64 {
		v, n := binary.Uvarint(b)
		if n <= 0 || v > most {
			err = errors.New("illegal number")
			b = nil
			return 0
		}
		b = b[n:]
		return v
	}
	f.Length = uint32(number(uint64(segment.MaxEncoded(segment.MaxFrameRaw))))
	count := number(uint64(len(b)) / 33) // each takes that many bytes
	f.Segments = make([]catalog.FrameSegment, 0, count)
	for range count {
		if len(b) < len(segment.ID{}) {
			return f, nil, io.ErrUnexpectedEOF
		}
		s := catalog.FrameSegment{ID: segment.ID(b)}
		b = b[len(s.ID):]
		s.Length = uint32(number(segment.MaxLength))
		if err == nil && (s.Length == 0 || s.ID.IsHole()) {
			return f, nil, fmt.Errorf("segment %s of %d bytes", s.ID, s.Length)
		}
		if f.RawLength += s.Length; f.RawLength > segment.MaxFrameRaw {
			return f, nil, fmt.Errorf("more than %d bytes of segments", segment.MaxFrameRaw)
		}
		f.Segments = append(f.Segments, s)
	}
	if err == nil && (count == 0 || f.Length < 2 || int(f.Length) > segment.MaxEncoded(int(f.RawLength))) {
		err = fmt.Errorf("%d segments of %d bytes in %d", count, f.RawLength, f.Length)
	}
	return f, b, err
}
