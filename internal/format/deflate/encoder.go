package deflate

import (
	"errors"
	"fmt"
	"io"
)

const (
	window = 2 * maxDistance // bytes that a window has
	// slideAt is how far a window is worked on before it slides.
	slideAt = window - margin

	bufferSize = 8 * maxDistance
	slack      = 16 // bytes after the buffer that may be read, and do not matter
)

// Levels that an Encoder knows.
const (
	MinLevel     = 1
	MaxLevel     = 9
	DefaultLevel = 6 // what compress/flate calls -1
)

// ErrClosed is returned for what is written after Close.
var ErrClosed = errors.New("deflate: the stream is closed")

// Encoder makes one DEFLATE stream: the one that compress/flate of Go 1.26 and before
// makes. See the package's documentation for how Writes matter.
type Encoder struct {
	w     io.Writer
	level int
	err   error // of w, or ErrClosed
	block blockWriter
	sent  int64 // bytes of the stream that w has

	// One of both finds matches.
	quick  *quick
	chains *chains
	tokens []token // of the block

	// buf[:end] is plaintext, the first byte of which is at offset origin of the whole. Of
	// the bytes before p all is known, base is where the window begins (level 1: what may
	// be needed), begin is where the block does; less than base, if its bytes may be gone.
	buf                 []byte
	origin              int64
	base, begin, p, end int

	between bool // a Write of the writer that is followed has ended at end

	rec     recorder
	resumed *Point // to be entered into chains, as soon as there are bytes enough
}

// NewEncoder returns an encoder at a level, MinLevel to MaxLevel.
func NewEncoder(w io.Writer, level int) (*Encoder, error) {
	if level < MinLevel || level > MaxLevel {
		return nil, fmt.Errorf("deflate: level %d is not one of %d to %d", level, MinLevel, MaxLevel)
	}
	e := &Encoder{w: w, level: level, buf: make([]byte, bufferSize+slack)}
	if level == 1 {
		e.quick = newQuick()
		e.tokens = make([]token, 0, quickBlock)
	} else {
		e.chains = newChains(level)
		e.tokens = make([]token, 0, chainTokens)
	}
	return e, nil
}

// Write compresses more plaintext. Where one Write ends and the next begins makes no
// difference: the stream is what compress/flate makes of a single Write, unless
// Between says otherwise. The error is that of the underlying writer, or ErrClosed.
func (e *Encoder) Write(b []byte) (int, error) {
	if e.err != nil {
		return 0, e.err
	}
	if len(b) > 0 && e.between {
		e.between = false
		if e.chains != nil && e.p-e.base >= slideAt {
			e.rec.between(e.origin + int64(e.end))
			e.slide()
		}
	}
	written := 0
	for len(b) > 0 {
		if e.end == bufferSize {
			e.makeRoom()
		}
		n := copy(e.buf[e.end:bufferSize], b)
		b = b[n:]
		e.end += n
		if e.compress(false); e.err != nil {
			return written, e.err
		}
		written += n
	}
	return written, nil
}

// Between says that the Write that is followed ended here. That can change the stream at
// levels 2 to 9; see the package's documentation.
func (e *Encoder) Between() { e.between = true }

// Close ends the stream. It does not close the underlying writer.
func (e *Encoder) Close() error {
	if e.err != nil {
		return e.err
	}
	e.compress(true)
	if e.err != nil {
		return e.err
	}
	e.block.stored(nil, true)
	e.block.align()
	if e.send(); e.err != nil {
		return e.err
	}
	e.rec.end(e.level, e.origin+int64(e.end), e.sent)
	e.err = ErrClosed
	return nil
}

// makeRoom moves what may be needed to the start of the buffer.
func (e *Encoder) makeRoom() {
	n := e.base
	copy(e.buf, e.buf[n:e.end])
	e.origin += int64(n)
	e.base, e.p, e.end, e.begin = 0, e.p-n, e.end-n, e.begin-n
	if e.quick != nil {
		e.quick.moved(n)
	} else {
		e.chains.moved(n)
	}
}

// slide moves the window on.
func (e *Encoder) slide() { e.base += maxDistance }

// compress makes blocks of what is in the buffer. If it is the last of it, of all.
func (e *Encoder) compress(last bool) {
	if e.quick != nil {
		for e.end-e.p >= quickBlock && e.err == nil {
			e.compressQuick(e.p + quickBlock)
		}
		if last && e.p < e.end && e.err == nil {
			e.compressQuick(e.end)
		}
		return
	}
	for e.err == nil {
		edge := min(e.end, e.base+window)
		e.compressChains(edge, last && edge == e.end)
		if edge == e.end {
			return
		}
		e.slide()
	}
}

// compressQuick makes the block that ends at end.
func (e *Encoder) compressQuick(end int) {
	e.rec.take(e)
	plain := e.buf[e.p:end]
	switch {
	case len(plain) <= 16:
		e.block.stored(plain, false)
	case len(plain) < 128:
		e.block.quickLiterals(plain)
	default:
		e.tokens = e.quick.matches(e.tokens[:0], e.buf, e.p, end)
		if len(e.tokens) > len(plain)-len(plain)>>4 {
			e.block.quickLiterals(plain)
		} else {
			e.block.quick(e.tokens, plain)
		}
	}
	e.p = end
	e.base = max(e.base, e.p-maxDistance)
	e.sendBlock()
}

// compressChains makes blocks of what comes before edge: all of it, if it is the last.
func (e *Encoder) compressChains(edge int, last bool) {
	for e.err == nil {
		look := edge - e.p
		if look < margin && last && e.resumed != nil {
			// What is held back may be longer than that.
			e.err = fmt.Errorf("%w: %d bytes after a restart point, %d are needed", ErrPlaintext, look, margin)
			return
		}
		if look >= margin && e.resumed != nil {
			e.enterResumed()
		}
		if look >= margin && len(e.tokens) == 0 {
			e.rec.take(e)
		}
		e.tokens, e.p = e.chains.matches(e.tokens, e.buf, e.p, e.base, edge, last)
		if len(e.tokens) < chainTokens && (!last || len(e.tokens) == 0) {
			return
		}
		end := e.p
		if e.chains.pending {
			end--
		}
		var plain []byte
		if e.begin >= e.base {
			plain = e.buf[e.begin:end]
		}
		e.block.smallest(e.tokens, plain)
		e.tokens, e.begin = e.tokens[:0], end
		e.sendBlock()
	}
}

// sendBlock sends the block that was just written.
func (e *Encoder) sendBlock() {
	e.send()
	e.rec.block(e)
}

// send gives the underlying writer all whole bytes.
func (e *Encoder) send() {
	if len(e.block.out) == 0 {
		return
	}
	n, err := e.w.Write(e.block.out)
	e.sent += int64(n)
	e.block.out = e.block.out[:0]
	if err != nil {
		e.err = err
	}
}
