package startup

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/columns"
	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/format/trace"
	"hydrofoil.dev/foil/internal/server/objects"
)

const (
	magic       = "HFPAGES\n"
	version     = 2 // 1 had no Service.Filled
	trailerSize = 8 + sha256.Size + len(magic)

	maxServices = 64 // of an image: a bit each
	maxArgument = 128 << 10
	maxIndex    = 64 << 20
)

// ErrCorrupt is returned, wrapped, for an object that is no store of pages or is
// damaged. It is built anew.
var ErrCorrupt = errors.New("corrupt store of startup pages")

// Store is what an object says about the pages it holds.
type Store struct {
	ChainID  digest.Digest
	TOC      digest.Digest
	Services []Service
	Common   []uint32 // frames of the common set, in their order
	Frames   []Frame
	Runs     []trace.Run  // of all frames
	Digests  []segment.ID // SHA-256 of their bytes

	bytes int64 // of the object
}

// Service is one service of a store.
type Service struct {
	Args   []string
	Origin string // one of bundle's
	Frames []uint32
	Filled int // how many of the last of Frames hold filled pages
	// Late are pages that traces touched outside of the set, in their order.
	Late []trace.Run
}

// Frame is one frame of page runs.
type Frame struct {
	Offset int64  // in the object
	Length uint32 // bytes, encoded
	Raw    uint32 // bytes, decoded
	First  uint32 // its runs are Store.Runs[First:First+Count]
	Count  uint32
	Sum    uint32 // CRC-32C of the encoded bytes
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// memory is about what a store takes in memory, bytes.
func (s *Store) memory() int64 {
	n := 1024 + 32*len(s.Frames) + (12+segment.IDLength)*len(s.Runs) + 4*len(s.Common)
	for _, v := range s.Services {
		n += 100 + 4*len(v.Frames) + 12*len(v.Late)
		for _, a := range v.Args {
			n += 16 + len(a)
		}
	}
	return int64(n)
}

// find returns the service that runs args.
func (s *Store) find(args []string) *Service {
	id := trace.Service(args)
	for i := range s.Services {
		if trace.Service(s.Services[i].Args) == id {
			return &s.Services[i]
		}
	}
	return nil
}

// encode returns what follows the frames in the object; t has the contents.
func (s *Store) encode(t *toc.TOC) []byte {
	head := columns.AppendBlock(nil, s.ChainID)
	head = columns.AppendBlock(head, s.TOC)
	for _, v := range s.Services {
		head = columns.AppendBlock(head, v.Origin)
		head = binary.AppendUvarint(head, uint64(len(v.Args)))
		for _, a := range v.Args {
			head = columns.AppendBlock(head, a)
		}
	}
	var lengths, counts, sums []byte
	for _, f := range s.Frames {
		lengths = binary.AppendUvarint(lengths, uint64(f.Length))
		counts = binary.AppendUvarint(counts, uint64(f.Count))
		sums = binary.LittleEndian.AppendUint32(sums, f.Sum)
	}
	b := binary.AppendUvarint(nil, version)
	for _, col := range [][]byte{head, lengths, counts, sums} {
		b = columns.Append(b, col, true)
	}
	b = trace.AppendRuns(b, s.Runs)
	var digests []byte
	for i, r := range s.Runs {
		if !r.Whole(t.Contents[r.Content].Size) {
			digests = append(digests, s.Digests[i][:]...)
		}
	}
	b = columns.Append(b, digests, false)
	b = appendOrder(b, s.Common)
	for _, v := range s.Services {
		b = appendOrder(b, v.Frames)
		b = binary.AppendUvarint(b, uint64(v.Filled))
		b = trace.AppendRuns(b, v.Late)
	}
	sum := sha256.Sum256(b)
	trailer := binary.LittleEndian.AppendUint64(nil, uint64(len(b)))
	trailer = append(trailer, sum[:]...)
	return append(append(b, trailer...), magic...)
}

func appendOrder(dst []byte, frames []uint32) []byte {
	var col []byte
	before := int64(-1)
	for _, f := range frames {
		col = binary.AppendVarint(col, int64(f)-before-1)
		before = int64(f)
	}
	return columns.Append(dst, col, true)
}

func nextOrder(b []byte, frames int) (order []uint32, rest []byte, err error) {
	col, rest, err := columns.Next(b, uint64(frames)*binary.MaxVarintLen64)
	if err != nil {
		return nil, nil, err
	}
	c := columns.Reader{B: col}
	seen := make([]bool, frames)
	for before := int64(-1); len(c.B) > 0; {
		before += c.Int() + 1
		if c.Err == nil && (before < 0 || before >= int64(frames) || seen[before]) {
			return nil, nil, fmt.Errorf("%w: frame %d of %d, or twice", ErrCorrupt, before, frames)
		}
		if c.Err == nil {
			seen[before] = true
			order = append(order, uint32(before))
		}
	}
	return order, rest, c.End()
}

// open reads what an object says; t must be the TOC of its image, d its digest.
// Errors: ErrCorrupt; objects.ErrNotFound.
func open(ctx context.Context, store objects.Store, key string, t *toc.TOC, d digest.Digest) (*Store, error) {
	size, err := store.Stat(ctx, key)
	if err != nil {
		return nil, fmt.Errorf("open startup pages: %w", err)
	}
	read := func(offset, n int64) ([]byte, error) {
		r, err := store.Open(ctx, key, offset, n)
		if err != nil {
			return nil, err
		}
		defer r.Close()
		b := make([]byte, n)
		_, err = io.ReadFull(r, b)
		return b, err
	}
	fail := func(err error) (*Store, error) {
		return nil, fmt.Errorf("open startup pages %s: %w", key, err)
	}
	if size < int64(len(magic)+trailerSize) {
		return fail(fmt.Errorf("%w: %d bytes", ErrCorrupt, size))
	}
	trailer, err := read(size-int64(trailerSize), int64(trailerSize))
	if err != nil {
		return fail(err)
	}
	n := binary.LittleEndian.Uint64(trailer)
	end := size - int64(trailerSize)
	if !bytes.HasSuffix(trailer, []byte(magic)) || n > maxIndex || int64(n) > end-int64(len(magic)) {
		return fail(fmt.Errorf("%w: index of %d bytes in %d", ErrCorrupt, n, size))
	}
	index, err := read(end-int64(n), int64(n))
	if err != nil {
		return fail(err)
	}
	if sum := sha256.Sum256(index); !bytes.Equal(sum[:], trailer[8:][:sha256.Size]) {
		return fail(fmt.Errorf("%w: its index has another checksum", ErrCorrupt))
	}
	s, err := decode(index, end-int64(n), t, d)
	if err != nil {
		return fail(err)
	}
	s.bytes = size
	return s, nil
}

// decode reads an index whose frames end at end. Errors: ErrCorrupt.
func decode(b []byte, end int64, t *toc.TOC, d digest.Digest) (*Store, error) {
	s, err := decodeIndex(b, end, t, d)
	if err != nil && !errors.Is(err, ErrCorrupt) {
		err = fmt.Errorf("%w: %w", ErrCorrupt, err)
	}
	return s, err
}

func decodeIndex(b []byte, end int64, t *toc.TOC, d digest.Digest) (*Store, error) {
	c := columns.Reader{B: b}
	written := c.Uint(math.MaxUint32)
	if c.Err != nil || written < 1 || written > version {
		return nil, fmt.Errorf("%w: version %d, this program reads 1 to %d", ErrCorrupt, written, version)
	}
	var col [4]columns.Reader
	rest := c.B
	for i := range col {
		var err error
		if col[i].B, rest, err = columns.Next(rest, maxIndex); err != nil {
			return nil, err
		}
	}
	head, lengths, counts, sums := &col[0], &col[1], &col[2], &col[3]
	s := &Store{ChainID: digest.Digest(head.Block(256)), TOC: digest.Digest(head.Block(256))}
	if s.ChainID != t.ChainID || s.TOC != d {
		return nil, fmt.Errorf("%w: of %s in TOC %s", ErrCorrupt, s.ChainID, s.TOC)
	}
	for len(head.B) > 0 && len(s.Services) < maxServices {
		v := Service{Origin: string(head.Block(64))}
		for range head.Uint(trace.MaxArgs) {
			if head.Err == nil {
				v.Args = append(v.Args, string(head.Block(maxArgument)))
			}
		}
		s.Services = append(s.Services, v)
	}
	runs, rest, err := trace.NextRuns(rest)
	if err != nil {
		return nil, err
	}
	if err := trace.Check(runs, t); err != nil {
		return nil, err
	}
	s.Runs = runs
	ends, first, err := s.decodeFrames(lengths, counts, sums, t)
	if err != nil {
		return nil, err
	}
	for i := range col {
		if err := col[i].End(); err != nil {
			return nil, err
		}
	}
	if ends != end || first != len(runs) {
		return nil, fmt.Errorf("%w: its frames end at %d, not at %d, and have %d of %d runs", ErrCorrupt, ends, end, first, len(runs))
	}
	digests, rest, err := columns.Next(rest, uint64(len(runs))*segment.IDLength)
	if err != nil {
		return nil, err
	}
	if digests, err = s.decodeDigests(digests, t); err != nil {
		return nil, err
	}
	if s.Common, rest, err = nextOrder(rest, len(s.Frames)); err != nil {
		return nil, err
	}
	for i := range s.Services {
		if rest, err = s.Services[i].decode(rest, written, len(s.Frames), t); err != nil {
			return nil, err
		}
	}
	if len(digests)+len(rest) > 0 {
		return nil, fmt.Errorf("%w: %d bytes too many", ErrCorrupt, len(digests)+len(rest))
	}
	return s, nil
}

// decodeFrames reads the frames of s, whose runs are known. It returns where the last
// one ends, and how many runs they have.
func (s *Store) decodeFrames(lengths, counts, sums *columns.Reader, t *toc.TOC) (end int64, runs int, err error) {
	end = int64(len(magic))
	for len(lengths.B) > 0 {
		f := Frame{Offset: end, Length: uint32(lengths.Uint(segment.MaxFrameRaw + 1)), First: uint32(runs)}
		f.Count = uint32(counts.Uint(uint64(len(s.Runs) - runs)))
		if sum := sums.Bytes(4); sum != nil {
			f.Sum = binary.LittleEndian.Uint32(sum)
		}
		raw := int64(0)
		for _, r := range s.Runs[runs : runs+int(f.Count)] {
			_, n := r.Range(t.Contents[r.Content].Size)
			raw += n
		}
		if f.Length < 2 || f.Count == 0 || raw > segment.MaxFrameRaw {
			return 0, 0, fmt.Errorf("%w: frame %d: %+v of %d bytes", ErrCorrupt, len(s.Frames), f, raw)
		}
		f.Raw = uint32(raw)
		end += int64(f.Length)
		runs += int(f.Count)
		s.Frames = append(s.Frames, f)
	}
	return end, runs, nil
}

// decodeDigests reads the digests of the runs of s, and returns what is left of b. A run
// that is all of its content has the content's.
func (s *Store) decodeDigests(b []byte, t *toc.TOC) (rest []byte, err error) {
	s.Digests = make([]segment.ID, len(s.Runs))
	for i, r := range s.Runs {
		if content := &t.Contents[r.Content]; r.Whole(content.Size) {
			s.Digests[i] = content.ID
			continue
		}
		if len(b) < segment.IDLength {
			return nil, fmt.Errorf("%w: too few digests", ErrCorrupt)
		}
		b = b[copy(s.Digests[i][:], b):]
	}
	return b, nil
}

// decode reads which of a store's frames are the service's, and what it touched
// besides, and returns what is left of b.
func (v *Service) decode(b []byte, written uint64, frames int, t *toc.TOC) (rest []byte, err error) {
	if v.Frames, b, err = nextOrder(b, frames); err != nil {
		return nil, err
	}
	if written > 1 {
		c := columns.Reader{B: b}
		v.Filled = int(c.Uint(uint64(len(v.Frames)) + 1))
		if c.Err != nil {
			return nil, c.Err
		}
		b = c.B
	}
	if v.Late, b, err = trace.NextRuns(b); err != nil {
		return nil, err
	}
	if len(v.Late) == 0 {
		v.Late = nil
	}
	return b, trace.Check(v.Late, t)
}
