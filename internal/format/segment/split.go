package segment

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"io"
	"math/bits"
)

// How a content is split. These numbers, gearSeed and the rules at Splitter are
// part of the format: a change makes every large content new to every server
// and worker that split it before.
const (
	// MaxLength bounds a segment, in bytes. A content no longer than this is
	// one segment.
	MaxLength = 1 << 20
	// MinLength is the least a cut by content leaves before it. Segments that
	// end at a hole or at the end of their content may be shorter.
	MinLength = 128 << 10
	// HoleLength is the shortest run of zeros that becomes a hole inside a
	// large content.
	HoleLength = 64 << 10

	normalLength = 320 << 10 // where the looser mask takes over
	strictBits   = 20        // one cut in 1 MiB before normalLength
	looseBits    = 16        // one cut in 64 KiB after it: about 360 KiB on average
	gearWindow   = 64        // bytes that a 64-bit gear hash depends on
	gearSeed     = "hydrofoil segment gear 1"
)

// Piece is one segment of a content, with its bytes.
type Piece struct {
	ID     ID
	Offset int64 // in the content, bytes
	Length uint32
	// Bytes are the segment's, valid until the next call of Next or Reset; nil
	// for a hole.
	Bytes []byte
}

// Splitter splits a content into segments as it streams by, in constant
// memory (two times MaxLength). The cut points depend on the bytes alone:
//
//   - A content of at most MaxLength bytes is one segment; its ID is the
//     content's. If all its bytes are zero it is a hole.
//   - In a larger content, look at the window of up to MaxLength bytes that
//     follow the previous cut. The first run of at least HoleLength zeros that
//     lies in the window, counting only what the window shows of it, ends the
//     segment before it; if it starts the window it is itself a segment, a
//     hole, up to the end of the run or of the window.
//   - What remains before such a run is cut by content (FastCDC): a gear hash
//     over 64 bytes is tried from MinLength bytes on; the cut is after the first
//     byte where its top 20 bits (top 16 from 320 KiB on) are zero, or else at
//     the end. A segment cut like this whose bytes are all zero is a hole, too.
//
// The gear hash is h = h<<1 + gear[b], modulo 2^64; gear[b] is the first eight
// bytes, big-endian, of the SHA-256 of "hydrofoil segment gear 1" and the byte b.
type Splitter struct {
	gear    [256]uint64
	r       io.Reader
	buf     []byte // what has been read and not yet been cut is buf[from:to]
	from    int
	to      int
	eof     bool
	large   bool
	err     error
	content hash.Hash
	offset  int64
	id      ID
}

// NewSplitter returns a Splitter that reads from r, which may be nil when Reset
// is called before the first Next.
func NewSplitter(r io.Reader) *Splitter {
	s := &Splitter{buf: make([]byte, 2*MaxLength), content: sha256.New()}
	for b := range s.gear {
		sum := sha256.Sum256(append([]byte(gearSeed), byte(b)))
		s.gear[b] = binary.BigEndian.Uint64(sum[:])
	}
	s.Reset(r)
	return s
}

// Reset starts a new content.
func (s *Splitter) Reset(r io.Reader) {
	s.r, s.from, s.to, s.eof, s.large, s.err, s.offset = r, 0, 0, false, false, nil, 0
	s.content.Reset()
}

// Next returns the next segment, or io.EOF after the last one; an empty content
// has none. An error of the underlying reader is returned wrapped.
func (s *Splitter) Next() (Piece, error) {
	if s.err != nil {
		return Piece{}, s.err
	}
	if s.to-s.from < MaxLength+1 && !s.eof {
		if err := s.fill(); err != nil {
			s.err = fmt.Errorf("split content at byte %d: %w", s.offset+int64(s.to-s.from), err)
			return Piece{}, s.err
		}
	}
	rest := s.buf[s.from:s.to]
	if len(rest) == 0 {
		s.content.Sum(s.id[:0])
		s.err = io.EOF
		return Piece{}, io.EOF
	}
	if !s.large && len(rest) > MaxLength {
		s.large = true
	}
	p := Piece{Offset: s.offset}
	var b []byte
	if s.large {
		n, hole := s.cut(rest[:min(len(rest), MaxLength)])
		b = rest[:n]
		s.content.Write(b)
		if !hole {
			p.ID, p.Bytes = Sum(b), b
		}
	} else {
		b = rest
		s.content.Write(b)
		if zeros(b) < len(b) {
			s.content.Sum(p.ID[:0])
			p.Bytes = b
		}
	}
	p.Length = uint32(len(b))
	s.from += len(b)
	s.offset += int64(len(b))
	return p, nil
}

// Content returns the ID and the size in bytes of the whole content. It is
// known once Next has returned io.EOF.
func (s *Splitter) Content() (ID, int64) { return s.id, s.offset }

// fill reads until the buffer is full or the content ends.
func (s *Splitter) fill() error {
	s.to = copy(s.buf, s.buf[s.from:s.to])
	s.from = 0
	for empty := 0; s.to < len(s.buf); {
		n, err := s.r.Read(s.buf[s.to:])
		s.to += n
		if errors.Is(err, io.EOF) {
			s.eof = true
			return nil
		}
		if err != nil {
			return err
		}
		if n > 0 {
			empty = 0
		} else if empty++; empty > 100 {
			return io.ErrNoProgress
		}
	}
	return nil
}

// cut returns the length of the segment that starts window, and whether it is
// a hole.
func (s *Splitter) cut(window []byte) (n int, hole bool) {
	end := len(window)
	start, length := zeroRun(window)
	if length > 0 {
		if start == 0 {
			return length, true
		}
		end = start
	}
	n = s.cutByContent(window[:end])
	return n, zeros(window[:n]) == n
}

func (s *Splitter) cutByContent(b []byte) int {
	if len(b) <= MinLength {
		return len(b)
	}
	var h uint64
	for _, c := range b[MinLength-gearWindow : MinLength] {
		h = h<<1 + s.gear[c]
	}
	normal := min(len(b), normalLength)
	for i, c := range b[MinLength:normal] {
		h = h<<1 + s.gear[c]
		if h>>(64-strictBits) == 0 {
			return MinLength + i + 1
		}
	}
	for i, c := range b[normal:] {
		h = h<<1 + s.gear[c]
		if h>>(64-looseBits) == 0 {
			return normal + i + 1
		}
	}
	return len(b)
}

// zeroRun finds the first run of at least HoleLength zeros in b. A length of 0
// means that there is none.
func zeroRun(b []byte) (start, length int) {
	// Such a run covers one of these probes, and the first probe it covers is
	// met before those of any later run.
	for probe := HoleLength - 1; probe < len(b); {
		if b[probe] != 0 {
			probe += HoleLength
			continue
		}
		start = probe - trailingZeros(b[:probe])
		end := probe + zeros(b[probe:])
		if end-start >= HoleLength {
			return start, end - start
		}
		probe = end + HoleLength // b[end] is not zero: a run starts after it
	}
	return 0, 0
}

// zeros returns how many zero bytes b starts with.
func zeros(b []byte) int {
	i := 0
	for ; i+32 <= len(b); i += 32 {
		w := b[i : i+32]
		if binary.LittleEndian.Uint64(w)|binary.LittleEndian.Uint64(w[8:])|
			binary.LittleEndian.Uint64(w[16:])|binary.LittleEndian.Uint64(w[24:]) != 0 {
			break
		}
	}
	for i < len(b) && b[i] == 0 {
		i++
	}
	return i
}

// trailingZeros returns how many zero bytes b ends with.
func trailingZeros(b []byte) int {
	i := len(b)
	for ; i >= 8; i -= 8 {
		if w := binary.LittleEndian.Uint64(b[i-8:]); w != 0 {
			return len(b) - i + bits.LeadingZeros64(w)/8
		}
	}
	for i > 0 && b[i-1] == 0 {
		i--
	}
	return len(b) - i
}
