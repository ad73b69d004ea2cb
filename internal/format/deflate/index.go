package deflate

import (
	"context"
	"errors"
	"fmt"
	"io"

	"hydrofoil.dev/foil/internal/format/parts"
)

// ErrPlaintext is returned, wrapped, when plaintext does not make the stream of an index.
var ErrPlaintext = errors.New("this is not the plaintext of the stream")

// pieceIn is how many bytes of plaintext are read at once.
const pieceIn = maxDistance

// errEnough ends the encoder of a part.
var errEnough = errors.New("all of this part is made")

// WriteRange writes bytes from (included) to (excluded) of the stream, made again of its
// plaintext: of what lies between the points around the range. Up to workers parts, each from one
// point to the next, are made at once, as package parts says.
//
// It returns ErrPlaintext if it sees that the plaintext is another one. It need not see it: a
// digest of the stream has to be compared.
func (x *Index) WriteRange(ctx context.Context, w io.Writer, plain io.ReaderAt, from, to int64, workers int) error {
	begins := make([]int64, len(x.Points)+1)
	for i := range begins {
		begins[i] = x.begin(i).Out
	}
	return parts.Write(ctx, w, begins, x.Out, from, to, workers, func(ctx context.Context, i int, w io.Writer) error {
		return x.WritePart(ctx, w, plain, i)
	})
}

// begin is where part i begins.
func (x *Index) begin(i int) *Point {
	if i == 0 {
		return &Point{}
	}
	return &x.Points[i-1]
}

// end is the byte of the stream that part i ends before.
func (x *Index) end(i int) int64 {
	if i < len(x.Points) {
		return x.Points[i].Out
	}
	return x.Out
}

// WritePart writes part i of the stream: from the point before it, the beginning if it is 0, to the
// next one. Of the plaintext it reads, forward, what lies between the points, 32 KiB before, and up to 64 KiB
// after. Else it is as WriteRange.
func (x *Index) WritePart(ctx context.Context, w io.Writer, plain io.ReaderAt, i int) error {
	p := x.begin(i)
	b := make([]byte, pieceIn)
	history := b[:p.History()]
	if err := readAt(plain, history, p.In-int64(len(history))); err != nil {
		return err
	}
	l := &limited{w: w, rest: x.end(i) - p.Out}
	var e *Encoder
	var err error
	if i == 0 {
		e, err = NewEncoder(l, x.Level)
	} else {
		e, err = Resume(l, x.Level, p, history)
	}
	if err != nil {
		return err
	}
	between := x.Between
	for at := p.In; err == nil && at < x.In; {
		if err := ctx.Err(); err != nil {
			return err
		}
		for len(between) > 0 && between[0] <= at {
			between = between[1:]
		}
		b := b[:min(int64(len(b)), x.In-at)]
		if len(between) > 0 {
			b = b[:min(int64(len(b)), between[0]-at)]
		}
		if err := readAt(plain, b, at); err != nil {
			return err
		}
		at += int64(len(b))
		if _, err = e.Write(b); len(between) > 0 && at == between[0] {
			e.Between()
		}
	}
	if err == nil {
		err = e.Close()
	}
	switch {
	case errors.Is(err, errEnough):
		return nil
	case err != nil:
		return err
	}
	return fmt.Errorf("%w: %d bytes more at byte %d of the stream", ErrPlaintext, l.rest, x.end(i))
}

// readAt fills b.
func readAt(r io.ReaderAt, b []byte, at int64) error {
	n, err := r.ReadAt(b, at)
	if n == len(b) {
		return nil
	}
	if err == nil || err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	return fmt.Errorf("read plaintext at %d: %w", at+int64(n), err)
}

// limited passes on rest bytes, and then fails with errEnough. Parts end with a block, and
// so with a Write.
type limited struct {
	w    io.Writer
	rest int64
}

func (l *limited) Write(b []byte) (int, error) {
	if int64(len(b)) > l.rest {
		return 0, fmt.Errorf("%w: a block is longer than it was", ErrPlaintext)
	}
	n, err := l.w.Write(b)
	l.rest -= int64(n)
	if err == nil && l.rest == 0 {
		err = errEnough
	}
	return n, err
}
