package recipe

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/columns"
)

// Source gives a range of a content, by the content's number: length bytes from
// offset on. It is called for one range after the other, forward as package recipe
// says, and what it returned is not read any more at the next call. A range that the content does
// not have is an error; so is a reader that ends early.
type Source func(content, offset, length int64) (io.Reader, error)

// Limits bound what a recipe may ask for. The zero value is usable.
type Limits struct {
	// Size is how many bytes the tar stream may have at most. Default 1 TiB.
	Size int64
	// Contents is how many contents there are. A recipe that names others is
	// corrupt. Default: 2^31.
	Contents int64
}

// Reader plays a recipe: it reads the tar stream. It is for one goroutine.
//
// It holds one block (some 5 MiB at most) and believes no number before what
// it counts is there. Its work is that of the bytes that it reads and returns.
type Reader struct {
	r      *bufio.Reader
	read   int64 // bytes of the recipe
	source Source
	limits Limits

	before, content, offset, length columns.Reader // what is left of the block's ranges
	literals                        []byte         // that are left of the block
	literal                         int            // of them come now
	part                            io.Reader      // the range at hand, or nil
	next, last                      span           // the range at hand, or that comes after literal bytes; the one before
	ranges                          int            // that are left of the block
	first                           bool           // no range of this block was read

	highest int64 // number of a content so far
	size    int64
	buf     []byte
	end     End
	err     error
}

// NewReader returns a Reader of the recipe that r reads.
func NewReader(r io.Reader, s Source, l Limits) *Reader {
	if l.Size == 0 {
		l.Size = 1 << 40
	}
	if l.Contents == 0 {
		l.Contents = maxContents
	}
	p := &Reader{source: s, limits: l, highest: -1}
	p.reset(r)
	p.err = p.head()
	return p
}

func (p *Reader) reset(r io.Reader) { p.r = bufio.NewReaderSize(r, 64<<10) }

func (p *Reader) head() error {
	b := make([]byte, len(magic)+1)
	n, err := io.ReadFull(p.r, b)
	p.read += int64(n)
	switch {
	case err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF):
		return fmt.Errorf("read recipe: %w", err)
	case err != nil || string(b[:len(magic)]) != magic:
		return fmt.Errorf("read recipe: %w", corrupt("it does not start like one"))
	case b[len(magic)] != version:
		return fmt.Errorf("read recipe: %w", corrupt("version %d, this program reads %d", b[len(magic)], version))
	}
	return nil
}

// End returns what the recipe says about all of it, after Read returned io.EOF.
func (p *Reader) End() End { return p.end }

// Read returns the next bytes of the tar stream, and io.EOF after its last one, when
// the recipe was read to its end and its size found right. Errors: ErrCorrupt; those
// of the Source and of the reader below.
func (p *Reader) Read(b []byte) (int, error) {
	if len(b) == 0 {
		return 0, nil
	}
	for p.err == nil {
		n, err := p.some(b)
		p.err = p.about(err)
		p.size += int64(n)
		if n > 0 {
			return n, nil
		}
	}
	return 0, p.err
}

// about says where an error was met.
func (p *Reader) about(err error) error {
	if err != nil && err != io.EOF {
		err = fmt.Errorf("read recipe, byte %d of the tar stream: %w", p.size, err)
	}
	return err
}

// some reads bytes, or takes a step towards them.
func (p *Reader) some(b []byte) (int, error) {
	switch {
	case p.literal > 0:
		n := copy(b, p.literals[:p.literal])
		p.literals, p.literal = p.literals[n:], p.literal-n
		return n, nil
	case p.next.length > 0:
		return p.ranged(b)
	case p.ranges > 0:
		return 0, p.nextRange()
	case len(p.literals) > 0:
		p.literal = len(p.literals)
		return 0, p.room(int64(p.literal))
	}
	return 0, p.nextBlock()
}

// ranged reads of the range at hand.
func (p *Reader) ranged(b []byte) (int, error) {
	s := &p.next
	if p.part == nil {
		var err error
		if p.part, err = p.source(s.content, s.offset, s.length); err != nil {
			return 0, fmt.Errorf("content %d: %w", s.content, err)
		}
	}
	n, err := p.part.Read(b[:min(int64(len(b)), s.length)])
	s.offset, s.length = s.offset+int64(n), s.length-int64(n)
	switch {
	case s.length == 0:
		p.part, err = nil, nil
	case err == io.EOF:
		err = fmt.Errorf("content %d ends at byte %d, %d more are wanted: %w", s.content, s.offset, s.length, io.ErrUnexpectedEOF)
	case err != nil:
		err = fmt.Errorf("content %d: %w", s.content, err)
	}
	return n, err
}

// nextRange takes the next range of the block.
func (p *Reader) nextRange() error {
	p.ranges--
	before := p.before.Uint(MaxLiterals)
	s := span{
		content: int64(p.content.Uint(maxContents)),
		offset:  int64(p.offset.Uint(maxOffset)),
		length:  int64(p.length.Uint(maxOffset)),
	}
	for _, column := range []*columns.Reader{&p.before, &p.content, &p.offset, &p.length} {
		if column.Err != nil {
			return corrupt("range: %w", column.Err)
		}
	}
	last := p.last // of the block before, perhaps
	if !p.first {
		if s.content += last.content; s.content == last.content {
			s.offset += last.end()
		}
	}
	p.first = false
	switch {
	case before > uint64(len(p.literals)):
		return corrupt("%d literal bytes before a range, the block has %d", before, len(p.literals))
	case s.length == 0:
		return corrupt("empty range of content %d", s.content)
	case s.content >= p.limits.Contents:
		return corrupt("content %d of %d", s.content, p.limits.Contents)
	case s.offset > maxOffset || s.end() > maxOffset:
		return corrupt("range of content %d ends beyond %d", s.content, int64(maxOffset))
	case s.content < p.highest || s.content == p.highest && s.offset < last.end():
		return corrupt("range of content %d at %d after content %d up to %d", s.content, s.offset, p.highest, last.end())
	}
	p.highest, p.last, p.next, p.literal = s.content, s, s, int(before)
	return p.room(int64(before) + s.length)
}

// room checks that more bytes may come.
func (p *Reader) room(more int64) error {
	if p.size+more > p.limits.Size {
		return corrupt("it makes more than %d bytes", p.limits.Size)
	}
	return nil
}

// number reads a uvarint of at most limit.
func (p *Reader) number(limit uint64) (uint64, error) {
	var b [binary.MaxVarintLen64]byte
	for i := range b {
		var err error
		if b[i], err = p.r.ReadByte(); err != nil {
			return 0, noEOF(err)
		}
		p.read++
		if b[i] < 0x80 {
			c := columns.Reader{B: b[:i+1]}
			if v := c.Uint(limit); c.Err == nil {
				return v, nil
			}
			break
		}
	}
	return 0, corrupt("no number of at most %d at byte %d", limit, p.read)
}

// bytes reads n bytes, which are valid until the next call.
func (p *Reader) bytes(n uint64) ([]byte, error) {
	p.buf = p.buf[:0]
	for n > 0 {
		m := min(n, 256<<10)
		at := len(p.buf)
		p.buf = append(p.buf, make([]byte, m)...)
		read, err := io.ReadFull(p.r, p.buf[at:])
		p.read += int64(read)
		if err != nil {
			return nil, noEOF(err)
		}
		n -= m
	}
	return p.buf, nil
}

// nextBlock reads the next block, or what is after the last one.
func (p *Reader) nextBlock() error {
	n, err := p.number(MaxBlock)
	if err != nil {
		return err
	}
	if n == 0 {
		return p.ended()
	}
	rest, err := p.bytes(n)
	if err != nil {
		return err
	}
	numbers := -1
	for _, column := range []*columns.Reader{&p.before, &p.content, &p.offset, &p.length} {
		*column = columns.Reader{}
		if column.B, rest, err = columns.Next(rest, maxNumbers); err != nil {
			return corrupt("%w", err)
		}
		n := columns.Numbers(column.B)
		if n > MaxRanges || numbers >= 0 && n != numbers || len(column.B) > 0 && column.B[len(column.B)-1] >= 0x80 {
			return corrupt("columns of %d and %d ranges in a block, at most %d", numbers, n, MaxRanges)
		}
		numbers = n
	}
	if p.literals, rest, err = columns.Next(rest, MaxLiterals); err != nil {
		return corrupt("%w", err)
	}
	if len(rest) > 0 || numbers == 0 && len(p.literals) == 0 {
		return corrupt("block with %d bytes too many, %d ranges, %d literal bytes", len(rest), numbers, len(p.literals))
	}
	p.ranges, p.first = numbers, true
	return nil
}

// ended reads the end and the compression, and returns io.EOF when all is well.
func (p *Reader) ended() error {
	size, err := p.number(1<<63 - 1)
	if err != nil {
		return err
	}
	contents, err := p.number(maxContents)
	if err != nil {
		return err
	}
	n, err := p.number(maxDiffID)
	if err != nil {
		return err
	}
	diffID, err := p.bytes(n)
	if err != nil {
		return err
	}
	p.end = End{Size: int64(size), Contents: int64(contents), DiffID: digest.Digest(diffID)}
	switch {
	case p.end.Size != p.size:
		return corrupt("it says that the tar stream has %d bytes", size)
	case p.end.Contents <= p.highest || p.end.Contents > p.limits.Contents:
		return corrupt("it says that there are %d contents; it uses number %d, and there are at most %d", contents, p.highest, p.limits.Contents)
	case n > 0 && p.end.DiffID.Validate() != nil:
		return corrupt("diff ID %q", p.end.DiffID)
	}
	begin := p.read
	if p.end.Compression, err = p.compression(func([]byte) error { return nil }); err != nil {
		return err
	}
	b, err := p.bytes(BeginLen)
	if err != nil {
		return err
	}
	if at := binary.LittleEndian.Uint64(b); at != uint64(begin) {
		return corrupt("its compression is at byte %d, it says %d", begin, at)
	}
	if err := p.over(); err != nil {
		return err
	}
	return io.EOF
}

// over says that nothing follows.
func (p *Reader) over() error {
	if _, err := p.r.ReadByte(); err != io.EOF {
		if err != nil {
			return err
		}
		return corrupt("something follows its end")
	}
	return nil
}

// compression reads that part, up to begin.
func (p *Reader) compression(chunk func([]byte) error) (Compression, error) {
	kind, err := p.number(1<<63 - 1)
	if err != nil {
		return Unknown, err
	}
	for {
		n, err := p.number(MaxChunk)
		if err != nil {
			return Unknown, err
		}
		if n == 0 {
			break
		}
		if kind <= uint64(Intact) {
			return Unknown, corrupt("compression of kind %d with a payload", kind)
		}
		b, err := p.bytes(n)
		if err == nil {
			err = chunk(b)
		}
		if err != nil {
			return Unknown, err
		}
	}
	if c := Compression(kind); c <= Patched {
		return c, nil
	}
	return Unknown, nil
}

// Skip passes over the next n bytes of the tar stream, or as many as there are. Contents that lie there
// are not asked for. Errors: those of Read, but io.EOF.
func (p *Reader) Skip(n int64) error {
	var b [4096]byte
	for n > 0 {
		var err error
		m := int64(0)
		switch {
		case p.err != nil:
			err = p.err
		case p.literal > 0 || p.part != nil:
			var k int
			k, err = p.Read(b[:min(n, int64(len(b)))])
			m = int64(k)
		case p.next.length > 0:
			m = min(n, p.next.length)
			p.next.offset, p.next.length, p.size = p.next.offset+m, p.next.length-m, p.size+m
		default:
			_, err = p.some(nil)
			p.err = p.about(err)
			err = p.err
		}
		n -= m
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
	}
	return nil
}
