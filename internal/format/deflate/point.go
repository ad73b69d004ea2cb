package deflate

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
)

// Point is where a stream can be begun in the middle: between two of its blocks.
type Point struct {
	In  int64 // bytes of plaintext before the next one that a match is looked for at
	Out int64 // whole bytes of the stream that are written

	// bits are the first ones of the byte at Out, nbits how many, 0 to 7.
	bits, nbits uint8

	// reach is how far before In the window begins. Levels 2 to 9.
	reach int
	// The state of a lazy level: see chains.
	pending          bool
	length, distance int
	// marks has a bit for each byte of History, the first one lowest in the first byte: it is
	// known to the table of level 1, or in a chain of a greedy level. Levels 1 to 3.
	marks []byte
}

// History is how many bytes of plaintext before In are needed to go on from a point.
func (p *Point) History() int { return int(min(p.In, maxDistance)) }

func (p *Point) marked(i int) bool { return p.marks[i/8]>>(i%8)&1 == 1 }

// hasMarks says whether a level's table is not a function of the plaintext alone.
func hasMarks(level int) bool { return level == 1 || efforts[level].lazy == 0 }

// Resume returns an encoder that goes on from a point of a stream at a level. History is
// the plaintext before p.In, at least p.History bytes; what is written to the encoder is
// the plaintext from p.In on: at levels 2 to 9 at least 262 bytes, which every stream has after
// its points, or Close returns ErrPlaintext. What it writes is the stream from byte p.Out on.
func Resume(w io.Writer, level int, p *Point, history []byte) (*Encoder, error) {
	e, err := NewEncoder(w, level)
	if err != nil {
		return nil, err
	}
	if err := p.check(level); err != nil {
		return nil, err
	}
	n := p.History()
	if len(history) < n {
		return nil, fmt.Errorf("deflate: %d bytes of plaintext before a restart point at %d, %d are needed",
			len(history), p.In, n)
	}
	history = history[len(history)-n:]
	at := n
	if level > 1 {
		at = p.reach
	}
	copy(e.buf[max(at-n, 0):], history[max(n-at, 0):])
	e.origin, e.p, e.end, e.begin = p.In-int64(at), at, at, at
	e.sent = p.Out
	e.block.acc, e.block.n = uint64(p.bits), uint(p.nbits)
	if e.chains != nil {
		e.chains.pending, e.chains.length, e.chains.distance = p.pending, shortest-1, 0
		if p.pending {
			e.begin--
			e.chains.length, e.chains.distance = p.length, p.distance
		}
		// The last positions have a hash when more is known.
		e.resumed = p
		return e, nil
	}
	for i := range n {
		if p.marked(i) {
			e.quick.enter(i, binary.LittleEndian.Uint32(e.buf[i:]))
		}
	}
	return e, nil
}

// enterResumed fills the chains.
func (e *Encoder) enterResumed() {
	n := e.resumed.History()
	for q := max(0, e.p-n); q < e.p; q++ {
		if e.resumed.marks == nil || e.resumed.marked(q-e.p+n) {
			e.chains.enter(e.buf, q)
		}
	}
	e.resumed = nil
}

// point is the state of e, which is about to begin a block.
func (e *Encoder) point() Point {
	p := Point{
		In:    e.origin + int64(e.p),
		Out:   e.sent,
		bits:  uint8(e.block.acc),
		nbits: uint8(e.block.n),
	}
	n := p.History()
	if hasMarks(e.level) {
		p.marks = make([]byte, (n+7)/8)
	}
	if e.quick != nil {
		for i := range n {
			q := e.p - n + i
			if e.quick.has(q, binary.LittleEndian.Uint32(e.buf[q:])) {
				p.marks[i/8] |= 1 << (i % 8)
			}
		}
		return p
	}
	p.reach = e.p - e.base
	if p.marks != nil {
		for i := range n {
			if q := e.p - n + i; q >= e.base && e.chains.has(q) {
				p.marks[i/8] |= 1 << (i % 8)
			}
		}
	}
	if e.chains.pending {
		p.pending, p.length, p.distance = true, e.chains.length, e.chains.distance
	}
	return p
}

// recorder collects the points of an encoder.
type recorder struct {
	index *Index // nil: nobody asked
	every int64
	last  int64 // where the last point was
	due   bool
}

// Record asks for restart points, at least every bytes of plaintext from each other. The
// index is complete when Close has returned nil. It is to be called before the first Write.
func (e *Encoder) Record(every int64) *Index {
	e.rec = recorder{index: &Index{}, every: every, last: e.origin + int64(e.p)}
	return e.rec.index
}

// block says that a block was written.
func (r *recorder) block(e *Encoder) {
	r.due = r.index != nil && e.origin+int64(e.p)-r.last >= r.every
}

// take takes a point, if it is time, before e begins a block: what follows is known to
// be enough for its first byte.
func (r *recorder) take(e *Encoder) {
	if r.due {
		r.due = false
		p := e.point()
		r.last = p.In
		r.index.Points = append(r.index.Points, p)
	}
}

// between says that the end of a Write, at byte in of the plaintext, moved the window.
func (r *recorder) between(in int64) {
	if r.index != nil {
		r.index.Between = append(r.index.Between, in)
	}
}

func (r *recorder) end(level int, in, out int64) {
	if r.index != nil {
		r.index.Level, r.index.In, r.index.Out = level, in, out
	}
}

// Index is what is recorded of a stream, so that it can be made again from its plaintext,
// in parts.
type Index struct {
	Level  int
	In     int64   // bytes of plaintext
	Out    int64   // bytes of the stream
	Points []Point // ascending; the stream's beginning is not among them
	// Between is where Writes ended and it made a difference, ascending (Encoder.Between).
	Between []int64
}

const (
	magic   = "HFDRP\r\n"
	version = 1
	// maxIn is more than any plaintext or stream has.
	maxIn = 1 << 61
)

// ErrCorrupt is returned, wrapped, for an index or point that breaks the rules.
var ErrCorrupt = errors.New("corrupt restart points")

func corrupt(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrCorrupt, fmt.Sprintf(format, args...))
}

// check says whether p can be a point of a stream at that level.
func (p *Point) check(level int) error {
	switch {
	case p.In <= 0 || p.In > maxIn || p.Out <= 0 || p.Out > maxIn:
		return corrupt("a point at %d of the plaintext, %d of the stream", p.In, p.Out)
	case p.nbits > 7 || p.bits>>p.nbits != 0:
		return corrupt("%d bits of a byte, %#x", p.nbits, p.bits)
	case hasMarks(level) && len(p.marks) != (p.History()+7)/8:
		return corrupt("%d bytes of marks for %d bytes", len(p.marks), p.History())
	case !hasMarks(level) && p.marks != nil:
		return corrupt("marks at level %d", level)
	case level == 1 && (p.reach != 0 || p.pending):
		return corrupt("a window at level 1")
	case level == 1:
		return nil
	case p.reach <= 0 || p.reach > slideAt || int64(p.reach) > p.In || (p.In-int64(p.reach))%maxDistance != 0:
		return corrupt("a window that begins %d before %d", p.reach, p.In)
	case p.pending && efforts[level].lazy == 0:
		return corrupt("a pending byte at level %d", level)
	case p.pending && p.length == shortest-1 && p.distance == 0:
		return nil
	case p.pending && (p.length < shortest || p.length > longest || p.distance < 1 || p.distance > maxDistance):
		return corrupt("a match of %d bytes from %d before", p.length, p.distance)
	}
	return nil
}

// Append appends the encoded index to b.
func (x *Index) Append(b []byte) []byte {
	b = append(b, magic...)
	b = append(b, version, byte(x.Level))
	b = binary.AppendUvarint(b, uint64(x.In))
	b = binary.AppendUvarint(b, uint64(x.Out))
	b = binary.AppendUvarint(b, uint64(len(x.Points)))
	var before Point
	for _, p := range x.Points {
		b = binary.AppendUvarint(b, uint64(p.In-before.In))
		b = binary.AppendUvarint(b, uint64(p.Out-before.Out))
		b = append(b, 1<<p.nbits|p.bits)
		if x.Level > 1 {
			b = binary.AppendUvarint(b, uint64(p.reach))
		}
		switch {
		case hasMarks(x.Level):
			b = append(b, p.marks...)
		case p.pending:
			b = binary.AppendUvarint(b, uint64(p.length))
			b = binary.AppendUvarint(b, uint64(p.distance))
		default:
			b = binary.AppendUvarint(b, 0)
		}
		before = p
	}
	b = binary.AppendUvarint(b, uint64(len(x.Between)))
	last := int64(0)
	for _, in := range x.Between {
		b = binary.AppendUvarint(b, uint64(in-last))
		last = in
	}
	return b
}
