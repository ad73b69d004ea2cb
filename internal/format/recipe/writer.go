package recipe

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"hydrofoil.dev/foil/internal/format/columns"
)

// Writer makes the recipe of a tar stream that somebody else reads. It sees the
// stream below archive/tar (Tap), and sees what archive/tar makes of it (Read).
// What comes out of a content in the order in which it went in becomes a range;
// everything else is literal. So a recipe makes the same stream again whatever
// archive/tar does, as long as the contents are what Read returned.
//
// It is for one goroutine, and holds one block (MaxBlock bytes), its compressor,
// and what one call of Read gets. Errors of the writer below are told by Close.
type Writer struct {
	w       io.Writer
	written int64
	err     error

	size    int64 // bytes of the tar stream so far
	content int64 // number of the content at hand; -1 before the first
	at      int64 // bytes of it that Read has returned
	reading bool
	passed  []byte // through Tap during this Read

	growing span // the range that is growing; of no bytes: none is
	block   block
}

// span is a range of a content.
type span struct{ content, offset, length int64 }

func (s span) end() int64 { return s.offset + s.length }

// block is a block that is being filled.
type block struct {
	before, content, offset, length []byte // columns
	literals                        []byte
	ranges                          int
	counted                         int  // of literals, before some range
	last                            span // the last range
}

// NewWriter starts a recipe on w.
func NewWriter(w io.Writer) *Writer {
	r := &Writer{w: w, content: -1}
	r.write(append([]byte(magic), version))
	return r
}

// Tap returns a reader that reads the tar stream from r. All of the stream has to
// be read through it, up to its last byte.
func (w *Writer) Tap(r io.Reader) io.Reader { return tap{w, r} }

type tap struct {
	w *Writer
	r io.Reader
}

func (t tap) Read(p []byte) (int, error) {
	n, err := t.r.Read(p)
	t.w.size += int64(n)
	if t.w.reading {
		t.w.passed = append(t.w.passed, p[:n]...)
	} else {
		t.w.literal(p[:n])
	}
	return n, err
}

// Next says that the next content begins: a file that is not empty and is in the
// entry list.
func (w *Writer) Next() {
	w.content++
	w.at = 0
}

// Read reads the content at hand from r, which reads the tar stream through Tap.
func (w *Writer) Read(r io.Reader, p []byte) (int, error) {
	w.reading, w.passed = true, w.passed[:0]
	n, err := r.Read(p)
	w.reading = false
	w.match(p[:n])
	w.at += int64(n)
	return n, err
}

// minMatch is from how many bytes on a part of a content is a range.
const minMatch = 32

// match finds what passed in the bytes of the content that were read, which begin
// at w.at. Of a sparse file the holes did not pass: what passed is in p in its order,
// with zeros between. Each byte is taken for the first that equals it, so a
// fragment may be cut in two, and every byte of it is found.
func (w *Writer) match(p []byte) {
	if len(p) > 0 && bytes.Equal(w.passed, p) { // no hole
		w.extend(span{w.content, w.at, int64(len(p))})
		return
	}
	rest, from := w.passed, 0
	for len(rest) > 0 {
		skip := bytes.IndexByte(p[from:], rest[0])
		if skip < 0 {
			break
		}
		from += skip
		n := commonPrefix(rest, p[from:])
		if n >= minMatch {
			w.extend(span{w.content, w.at + int64(from), int64(n)})
		} else {
			w.literal(rest[:n])
		}
		rest, from = rest[n:], from+n
	}
	w.literal(rest)
}

func commonPrefix(a, b []byte) int {
	most := min(len(a), len(b))
	n := 0
	for n+64 <= most && bytes.Equal(a[n:n+64], b[n:n+64]) {
		n += 64
	}
	for n < most && a[n] == b[n] {
		n++
	}
	return n
}

// extend adds a range, which may go on with the one before.
func (w *Writer) extend(s span) {
	if g := &w.growing; g.length > 0 && g.content == s.content && g.end() == s.offset {
		g.length += s.length
		return
	}
	w.settle()
	w.growing = s
}

// literal adds literal bytes.
func (w *Writer) literal(p []byte) {
	if len(p) == 0 {
		return
	}
	w.settle()
	for len(p) > 0 {
		n := min(len(p), MaxLiterals-len(w.block.literals))
		w.block.literals = append(w.block.literals, p[:n]...)
		p = p[n:]
		if len(w.block.literals) == MaxLiterals {
			w.flush()
		}
	}
}

// settle puts the range that was growing into the block.
func (w *Writer) settle() {
	s, b := w.growing, &w.block
	if s.length == 0 {
		return
	}
	w.growing = span{}
	offset := s.offset
	if b.ranges > 0 && b.last.content == s.content {
		offset -= b.last.end()
	}
	b.before = binary.AppendUvarint(b.before, uint64(len(b.literals)-b.counted))
	b.content = binary.AppendUvarint(b.content, uint64(s.content-b.last.content))
	b.offset = binary.AppendUvarint(b.offset, uint64(offset))
	b.length = binary.AppendUvarint(b.length, uint64(s.length))
	b.counted, b.last = len(b.literals), s
	if b.ranges++; b.ranges == MaxRanges {
		w.flush()
	}
}

// flush writes the block, if there is anything in it.
func (w *Writer) flush() {
	b := &w.block
	if b.ranges == 0 && len(b.literals) == 0 {
		return
	}
	var encoded []byte
	for _, column := range [][]byte{b.before, b.content, b.offset, b.length, b.literals} {
		encoded = columns.Append(encoded, column, true)
	}
	w.write(binary.AppendUvarint(nil, uint64(len(encoded))))
	w.write(encoded)
	*b = block{before: b.before[:0], content: b.content[:0], offset: b.offset[:0], length: b.length[:0], literals: b.literals[:0]}
}

func (w *Writer) write(b []byte) {
	if w.err == nil {
		var n int
		n, w.err = w.w.Write(b)
		w.written += int64(n)
	}
}

// Size returns how many bytes of the tar stream have passed.
func (w *Writer) Size() int64 { return w.size }

// Written returns how many bytes the recipe has so far; all of them after Close.
func (w *Writer) Written() int64 { return w.written }

var errClosed = errors.New("the writer is closed")

// Close ends the recipe. Of end it takes DiffID and Compression. It does not close
// the writer below.
func (w *Writer) Close(end End) error {
	w.settle()
	w.flush()
	b := binary.AppendUvarint([]byte{0}, uint64(w.size))
	b = binary.AppendUvarint(b, uint64(w.content+1))
	b = columns.AppendBlock(b, end.DiffID)
	w.write(b)
	begin := w.written
	b, err := AppendCompression(nil, begin, end.Compression, nil)
	if err != nil {
		return err
	}
	w.write(b)
	if w.err != nil {
		return fmt.Errorf("write recipe: %w", w.err)
	}
	w.err = errClosed
	return nil
}
