package deflate

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sort"
	"sync"
)

// ErrPlaintext is returned, wrapped, when plaintext does not make the stream of an index.
var ErrPlaintext = errors.New("this is not the plaintext of the stream")

const (
	pieceIn  = maxDistance // bytes of plaintext that are read at once
	pieceOut = 1 << 16     // bytes of the stream that are passed on at once
	maxAhead = 256         // pieces of a part that wait to be written
)

// errEnough ends the encoder of a part.
var errEnough = errors.New("all of this part is made")

// WriteRange writes bytes from (included) to (excluded) of the stream, made again of its
// plaintext: of what lies between the points around the range. Up to workers parts, each from one
// point to the next, are made at once; of each up to 16 MiB wait in memory for those before it.
//
// It returns ErrPlaintext if it sees that the plaintext is another one. It need not see it: a
// digest of the stream has to be compared.
func (x *Index) WriteRange(ctx context.Context, w io.Writer, plain io.ReaderAt, from, to int64, workers int) error {
	if from < 0 || to > x.Out || from > to {
		return fmt.Errorf("bytes %d to %d of a stream that has %d", from, to, x.Out)
	}
	if from == to {
		return nil
	}
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()

	// Part i begins at point i-1.
	part := sort.Search(len(x.Points), func(i int) bool { return x.Points[i].Out > from })
	after := sort.Search(len(x.Points), func(i int) bool { return x.Points[i].Out >= to })
	at := x.begin(part).Out
	var parts []*made // in order, those that are being made
	for next := part; ; {
		for next <= after && len(parts) < max(workers, 1) {
			i := next
			next++
			m := newMade(ctx, x.end(i)-x.begin(i).Out)
			parts = append(parts, m)
			running.Go(func() { m.done(x.part(ctx, i, plain, m)) })
		}
		if len(parts) == 0 {
			return nil
		}
		for b := range parts[0].pieces {
			begin := at
			at += int64(len(b))
			if begin < from {
				b = b[min(from-begin, int64(len(b))):]
			}
			if at > to {
				b = b[:max(int64(len(b))-(at-to), 0)]
			}
			if len(b) > 0 {
				if _, err := w.Write(b); err != nil {
					return err
				}
			}
			if at >= to {
				return nil
			}
		}
		if err := parts[0].err; err != nil {
			return err
		}
		parts = parts[1:]
	}
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

// part makes part i of the stream.
func (x *Index) part(ctx context.Context, i int, plain io.ReaderAt, w io.Writer) error {
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
	for at := p.In; err == nil && at < x.In; {
		if err := ctx.Err(); err != nil {
			return err
		}
		b := b[:min(int64(len(b)), x.In-at)]
		if err := readAt(plain, b, at); err != nil {
			return err
		}
		at += int64(len(b))
		_, err = e.Write(b)
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

// made is one part of a stream, while it is being made.
type made struct {
	ctx    context.Context // ends the wait for who reads it
	pieces chan []byte
	err    error // when pieces is closed
	piece  []byte
	begun  bool
}

func newMade(ctx context.Context, n int64) *made {
	return &made{ctx: ctx, pieces: make(chan []byte, min(n/pieceOut+2, maxAhead))}
}

// Write takes a block. The first one is passed on at once.
func (m *made) Write(b []byte) (int, error) {
	m.piece = append(m.piece, b...)
	if !m.begun || len(m.piece) >= pieceOut {
		m.begun = true
		if err := m.pass(); err != nil {
			return 0, err
		}
	}
	return len(b), nil
}

func (m *made) pass() error {
	select {
	case m.pieces <- m.piece:
		m.piece = make([]byte, 0, pieceOut)
		return nil
	case <-m.ctx.Done():
		return m.ctx.Err()
	}
}

// done ends it.
func (m *made) done(err error) {
	if err == nil && len(m.piece) > 0 {
		err = m.pass()
	}
	m.err = err
	close(m.pieces)
}
