package recipe

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"io"

	"hydrofoil.dev/foil/internal/format/columns"
)

// Limits of an Encoding. Who reads one takes memory for its bytes, and not more than
// some times that.
const (
	MaxEncoding = 64 << 20 // bytes of a payload
	MaxLiteral  = 64 << 10 // bytes of a blob before, and after, its stream
	maxParts    = 1 << 20
	maxName     = 64
	maxLevel    = 64
)

// Encoding says how a blob is made of the tar stream: some literal bytes, a DEFLATE stream that
// an encoder makes in parts, and literal bytes. See "Encodings".
type Encoding struct {
	Encoder string // its name, which says whose it is, and which of its versions
	Arch    string // the architecture that it was proven on
	Level   int
	// Block is how many bytes of the tar stream are compressed by themselves, after those before
	// them; 0: all are one stream.
	Block int64
	// Header is what comes before the stream, Trailer what follows it.
	Header, Trailer []byte
	Parts           []Part
	// Points are where an encoder may begin, in a format of its own; nil: by Block.
	Points []byte
}

// Part is a part of the tar stream, and of the stream that is made of it.
type Part struct {
	In, Out int64             // its bytes of the one, and of the other
	Sum     [sha256.Size]byte // of the bytes that are made
	Stored  []byte            // the bytes that are made, where the encoder makes others; else nil
}

// Compression is the kind of e.
func (e *Encoding) Compression() Compression {
	for i := range e.Parts {
		if e.Parts[i].Stored != nil {
			return Patched
		}
	}
	return Reencoded
}

// In returns how many bytes of the tar stream the parts have, Out how many the blob has.
func (e *Encoding) In() (n int64) {
	for i := range e.Parts {
		n += e.Parts[i].In
	}
	return n
}

// Out returns how many bytes the blob has.
func (e *Encoding) Out() int64 {
	n := int64(len(e.Header) + len(e.Trailer))
	for i := range e.Parts {
		n += e.Parts[i].Out
	}
	return n
}

// StoredBytes is how many bytes of the blob the parts store.
func (e *Encoding) StoredBytes() (n int64) {
	for i := range e.Parts {
		n += int64(len(e.Parts[i].Stored))
	}
	return n
}

func (e *Encoding) append(b []byte) []byte {
	b = columns.AppendBlock(b, e.Encoder)
	b = columns.AppendBlock(b, e.Arch)
	b = binary.AppendUvarint(b, uint64(e.Level))
	b = binary.AppendUvarint(b, uint64(e.Block))
	b = columns.AppendBlock(b, e.Header)
	b = columns.AppendBlock(b, e.Trailer)
	var in, out, stored, sums, kept []byte
	for i := range e.Parts {
		p := &e.Parts[i]
		in = binary.AppendUvarint(in, uint64(p.In))
		out = binary.AppendUvarint(out, uint64(p.Out))
		is := byte(0)
		if p.Stored != nil {
			is = 1
		}
		stored = append(stored, is)
		sums = append(sums, p.Sum[:]...)
		kept = append(kept, p.Stored...)
	}
	b = binary.AppendUvarint(b, uint64(len(e.Parts)))
	for _, c := range [][]byte{in, out, stored} {
		b = columns.Append(b, c, true)
	}
	b = columns.Append(b, sums, false)
	b = columns.Append(b, kept, false)
	b = columns.Append(b, e.Points, true)
	sum := sha256.Sum256(b)
	return append(sum[:], b...)
}

func decodeEncoding(b []byte) (*Encoding, error) {
	sum := b[:min(len(b), sha256.Size)]
	b = b[len(sum):]
	if want := sha256.Sum256(b); !bytes.Equal(sum, want[:]) {
		return nil, corrupt("encoding: wrong checksum")
	}
	r := columns.Reader{B: b}
	e := &Encoding{
		Encoder: string(r.Block(maxName)), Arch: string(r.Block(maxName)),
		Level: int(r.Uint(maxLevel)), Block: int64(r.Uint(maxOffset)),
		Header: r.Block(MaxLiteral), Trailer: r.Block(MaxLiteral),
	}
	n := r.Uint(maxParts)
	if r.Err != nil {
		return nil, corrupt("encoding: %w", r.Err)
	}
	if n == 0 {
		return nil, corrupt("encoding: no parts")
	}
	var c [6][]byte
	limits := [6]uint64{n * binary.MaxVarintLen64, n * binary.MaxVarintLen64, n, n * sha256.Size, MaxEncoding, MaxEncoding}
	rest, err := r.B, error(nil)
	for i := range c {
		if c[i], rest, err = columns.Next(rest, limits[i]); err != nil {
			return nil, corrupt("encoding: %w", err)
		}
	}
	if len(rest) > 0 || uint64(len(c[2])) != n || uint64(len(c[3])) != n*sha256.Size {
		return nil, corrupt("encoding: %d bytes too many, or columns that are not of %d parts", len(rest), n)
	}
	in, out, kept := columns.Reader{B: c[0]}, columns.Reader{B: c[1]}, columns.Reader{B: c[4]}
	e.Parts = make([]Part, n)
	var sumIn, sumOut int64
	for i := range e.Parts {
		p := &e.Parts[i]
		p.In, p.Out = int64(in.Uint(maxOffset)), int64(out.Uint(maxOffset))
		p.Sum = [sha256.Size]byte(c[3][i*sha256.Size:])
		sumIn, sumOut = sumIn+p.In, sumOut+p.Out
		switch {
		case in.Err == nil && out.Err == nil && (p.Out == 0 || sumIn > maxOffset || sumOut > maxOffset || p.In == 0 && n > 1):
			return nil, corrupt("encoding: part %d of %d bytes from %d", i, p.Out, p.In)
		case c[2][i] > 1:
			return nil, corrupt("encoding: part %d is stored in way %d", i, c[2][i])
		case c[2][i] == 1:
			p.Stored = kept.Bytes(uint64(p.Out))
		}
	}
	for _, r := range []*columns.Reader{&in, &out, &kept} {
		if err := r.End(); err != nil {
			return nil, corrupt("encoding: %w", err)
		}
	}
	if len(e.Header) == 0 {
		e.Header = nil
	}
	if len(e.Trailer) == 0 {
		e.Trailer = nil
	}
	if e.Points = c[5]; len(e.Points) == 0 {
		e.Points = nil
	}
	return e, nil
}

// AppendCompression appends to b the compression that a recipe ends with and that begins at begin: of an
// Encoding, or, if that is nil, of a kind without one. Errors: an Encoding beyond the limits.
func AppendCompression(b []byte, begin int64, c Compression, e *Encoding) ([]byte, error) {
	var payload []byte
	if e != nil {
		if len(e.Parts) == 0 || len(e.Parts) > maxParts || len(e.Header) > MaxLiteral || len(e.Trailer) > MaxLiteral || e.StoredBytes() > MaxEncoding {
			return nil, fmt.Errorf("an encoding of %d parts, %d and %d literal bytes, %d stored bytes is beyond the limits",
				len(e.Parts), len(e.Header), len(e.Trailer), e.StoredBytes())
		}
		c, payload = e.Compression(), e.append(nil)
		if len(payload) > MaxEncoding {
			return nil, fmt.Errorf("an encoding of %d bytes, at most %d are allowed", len(payload), MaxEncoding)
		}
	}
	b = binary.AppendUvarint(b, uint64(c))
	for len(payload) > 0 {
		n := min(len(payload), MaxChunk)
		b = columns.AppendBlock(b, payload[:n])
		payload = payload[n:]
	}
	b = append(b, 0)
	return binary.LittleEndian.AppendUint64(b, uint64(begin)), nil
}

// BeginLen is how many bytes at the end of a recipe say where its compression begins.
const BeginLen = 8

// Begin reads the last BeginLen bytes of a recipe of size bytes. Errors: ErrCorrupt.
func Begin(b []byte, size int64) (int64, error) {
	if len(b) != BeginLen {
		return 0, corrupt("%d bytes instead of its last %d", len(b), BeginLen)
	}
	begin := binary.LittleEndian.Uint64(b)
	if begin <= uint64(len(magic)) || size < BeginLen || begin > uint64(size-BeginLen) {
		return 0, corrupt("its compression is at byte %d of %d", begin, size)
	}
	return int64(begin), nil
}

// ReadCompression reads the compression of a recipe from where it begins to the recipe's end. The Encoding is
// nil for kinds that have none. Errors: ErrCorrupt; those of r.
func ReadCompression(r io.Reader) (Compression, *Encoding, error) {
	p := &Reader{}
	p.reset(r)
	payload := []byte{}
	c, err := p.compression(func(b []byte) error {
		if len(payload)+len(b) > MaxEncoding {
			return corrupt("an encoding of more than %d bytes", MaxEncoding)
		}
		payload = append(payload, b...)
		return nil
	})
	if err == nil {
		_, err = p.bytes(BeginLen)
	}
	if err == nil {
		err = p.over()
	}
	if err != nil {
		return Unknown, nil, fmt.Errorf("read compression of a recipe: %w", err)
	}
	if c != Reencoded && c != Patched {
		return c, nil, nil
	}
	e, err := decodeEncoding(payload)
	if err == nil && e.Compression() != c {
		err = corrupt("encoding: of kind %d, it says %d", e.Compression(), c)
	}
	if err != nil {
		return Unknown, nil, fmt.Errorf("read compression of a recipe: %w", err)
	}
	return c, e, nil
}
