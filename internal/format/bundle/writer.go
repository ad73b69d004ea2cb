package bundle

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"

	"hydrofoil.dev/foil/internal/format/columns"
)

// Writer writes a stream. It keeps no order: the sections are written as they
// are called. It is not safe for concurrent use. After the first error every
// method returns it.
type Writer struct {
	w       *bufio.Writer
	started bool
	err     error
	scratch []byte
}

// NewWriter returns a Writer that buffers a little; call Flush when what was
// written should be on its way.
func NewWriter(w io.Writer) *Writer { return &Writer{w: bufio.NewWriterSize(w, 64<<10)} }

// Flush writes what is buffered.
func (w *Writer) Flush() error {
	if w.err == nil {
		w.err = w.w.Flush()
	}
	return w.err
}

func (w *Writer) section(t Type, flags byte, parts ...[]byte) error {
	length := 0
	for _, p := range parts {
		length += len(p)
	}
	if w.err == nil && int64(length) > 1<<32-1 {
		w.err = fmt.Errorf("write section %d: %d bytes", t, length)
	}
	if w.err != nil {
		return w.err
	}
	if !w.started {
		w.started = true
		w.w.WriteString(magic) // bufio keeps the first error for the next call
	}
	var head [headLength]byte
	head[0], head[1] = byte(t), flags
	binary.LittleEndian.PutUint32(head[2:], uint32(length))
	_, w.err = w.w.Write(head[:])
	for _, p := range parts {
		if w.err == nil {
			_, w.err = w.w.Write(p)
		}
	}
	return w.err
}

// Hello writes the section.
func (w *Writer) Hello(h Hello) error {
	b := binary.AppendUvarint(nil, uint64(h.Version))
	return w.section(TypeHello, flagMust, columns.AppendBlock(b, h.Stream))
}

// Image writes the section.
func (w *Writer) Image(m *Image) error {
	have := uint64(0)
	if m.TOC == nil {
		have = 1
	}
	b := binary.AppendUvarint(nil, onlyImage)
	b = binary.AppendUvarint(b, have)
	b = binary.AppendUvarint(b, uint64(m.Segments))
	chosen := m.Chosen
	if chosen == nil {
		chosen = &Blob{}
	}
	for _, blob := range []*Blob{&m.Manifest, chosen, &m.Config} {
		b = columns.AppendBlock(b, blob.Digest)
		b = columns.AppendBlock(b, blob.MediaType)
		b = columns.AppendBlock(b, blob.Bytes)
	}
	b = columns.AppendBlock(b, m.ChainID)
	b = columns.AppendBlock(b, m.TOCDigest)
	return w.section(TypeImage, flagMust, columns.AppendQuick(nil, b), m.TOC)
}

// Plan writes the section.
func (w *Writer) Plan(p *Plan) error {
	return w.section(TypePlan, flagMust, AppendPlan(nil, p))
}

// AppendPlan appends the payload of the Plan section to dst.
func AppendPlan(dst []byte, p *Plan) []byte {
	for _, v := range []uint64{uint64(len(p.Frames)), uint64(len(p.Segments)), uint64(p.MaxBytes), uint64(p.ContentBytes)} {
		dst = binary.AppendUvarint(dst, v)
	}
	var lengths, raw, counts, segments []byte
	for _, f := range p.Frames {
		lengths = binary.AppendUvarint(lengths, uint64(f.MaxLength))
		raw = binary.AppendUvarint(raw, uint64(f.RawLength))
		counts = binary.AppendUvarint(counts, uint64(f.Segments))
	}
	before := int64(-1)
	for _, n := range p.Segments {
		segments = binary.AppendVarint(segments, int64(n)-before)
		before = int64(n)
	}
	for _, col := range [][]byte{lengths, raw, counts, segments} {
		dst = columns.AppendQuick(dst, col)
	}
	return dst
}

// SectionLength is what a Frame section of a frame of n bytes takes at most.
func SectionLength(n int) int64 { return headLength + binary.MaxVarintLen32 + int64(n) }

// Frame writes a section; its frame's bytes are the parts, one after the other.
func (w *Writer) Frame(index uint32, parts ...[]byte) error {
	w.scratch = binary.AppendUvarint(w.scratch[:0], uint64(index))
	all := [3][]byte{w.scratch}
	return w.section(TypeFrame, flagMust, append(all[:1], parts...)...)
}

// AppendFrameHead appends what a Frame section has before its frame, which has
// length bytes and is to follow.
func AppendFrameHead(dst []byte, index uint32, length int) []byte {
	var number [binary.MaxVarintLen32]byte
	n := binary.PutUvarint(number[:], uint64(index))
	dst = append(dst, byte(TypeFrame), flagMust)
	dst = binary.LittleEndian.AppendUint32(dst, uint32(n+length))
	return append(dst, number[:n]...)
}

// Sections writes sections that are coded already, after one that was not.
func (w *Writer) Sections(b []byte) error {
	if w.err == nil {
		_, w.err = w.w.Write(b)
	}
	return w.err
}

// Alive writes the section, and flushes.
func (w *Writer) Alive() error {
	w.section(TypeAlive, 0) //nolint:errcheck // Flush returns it
	return w.Flush()
}

// Error writes the section, which ends the stream, and flushes.
func (w *Writer) Error(e *Error) error {
	cut := func(s string) string { return s[:min(len(s), MaxError/4)] }
	b := columns.AppendBlock(nil, cut(e.Code))
	b = columns.AppendBlock(b, cut(e.Message))
	b = columns.AppendBlock(b, cut(e.Ref))
	w.section(TypeError, flagMust, b) //nolint:errcheck // Flush returns it
	return w.Flush()
}

// End writes the section, which ends the stream, and flushes.
func (w *Writer) End() error {
	w.section(TypeEnd, flagMust) //nolint:errcheck // Flush returns it
	return w.Flush()
}
