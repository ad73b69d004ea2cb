// Package parts writes a stream whose parts are made at once, and in any order, in its own
// order.
package parts

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sort"
	"sync"
)

const (
	piece = 1 << 16 // bytes that are passed on at once
	ahead = 256     // pieces of a part that wait to be written
)

// Make writes part i of a stream to w: exactly the bytes that it has. What w returns ends
// it.
type Make func(ctx context.Context, i int, w io.Writer) error

// ErrLength is returned, wrapped, when a part has more or fewer bytes than it should.
var ErrLength = errors.New("a part has another length")

// Write writes bytes from (included) to (excluded) of a stream whose part i begins at begins[i], and
// whose last part ends at size. Up to workers parts are made at once; of each up to 16 MiB
// wait in memory for those before it.
//
// Every part that has bytes of the range is made to its end, and the last byte is not
// written before that went well. So a Make that compares its part with a sum guards the range.
func Write(ctx context.Context, w io.Writer, begins []int64, size, from, to int64, workers int, one Make) error {
	if from < 0 || to > size || from > to {
		return fmt.Errorf("bytes %d to %d of a stream that has %d", from, to, size)
	}
	if from == to {
		return nil
	}
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()

	end := func(i int) int64 {
		if i+1 < len(begins) {
			return begins[i+1]
		}
		return size
	}
	next := max(sort.Search(len(begins), func(i int) bool { return begins[i] > from })-1, 0)
	after := sort.Search(len(begins), func(i int) bool { return begins[i] >= to }) // the first part that has none
	out := trimmed{w: w, at: begins[next], from: from, to: to}
	var made []*part // in order, those that are being made
	for {
		for next < after && len(made) < max(workers, 1) {
			i := next
			next++
			p := newPart(ctx, end(i)-begins[i])
			made = append(made, p)
			running.Go(func() { p.done(one(ctx, i, p)) })
		}
		if len(made) == 0 {
			return out.last()
		}
		for b := range made[0].pieces {
			if err := out.write(b); err != nil {
				return err
			}
		}
		if err := made[0].err; err != nil {
			return err
		}
		made = made[1:]
	}
}

// trimmed writes what lies in a range, but for its last byte.
type trimmed struct {
	w            io.Writer
	at, from, to int64
	held         []byte
}

func (t *trimmed) write(b []byte) error {
	begin := t.at
	t.at += int64(len(b))
	if begin < t.from {
		b = b[min(t.from-begin, int64(len(b))):]
	}
	if t.at > t.to {
		b = b[:max(int64(len(b))-(t.at-t.to), 0)]
	}
	if t.at >= t.to && len(b) > 0 {
		t.held, b = b[len(b)-1:], b[:len(b)-1]
	}
	if len(b) == 0 {
		return nil
	}
	_, err := t.w.Write(b)
	return err
}

func (t *trimmed) last() error {
	if t.held == nil {
		return io.ErrUnexpectedEOF // a Make wrote less than its part
	}
	_, err := t.w.Write(t.held)
	return err
}

// part is one part of a stream, while it is being made.
type part struct {
	ctx    context.Context // ends the wait for who reads it
	pieces chan []byte
	err    error // when pieces is closed
	piece  []byte
	begun  bool
	rest   int64
}

func newPart(ctx context.Context, n int64) *part {
	return &part{ctx: ctx, pieces: make(chan []byte, min(n/piece+2, ahead)), rest: n}
}

// Write takes bytes. The first ones are passed on at once.
func (p *part) Write(b []byte) (int, error) {
	if p.rest -= int64(len(b)); p.rest < 0 {
		return 0, fmt.Errorf("%w: %d bytes too many", ErrLength, -p.rest)
	}
	p.piece = append(p.piece, b...)
	if !p.begun && len(b) > 0 || len(p.piece) >= piece {
		p.begun = true
		if err := p.pass(); err != nil {
			return 0, err
		}
	}
	return len(b), nil
}

func (p *part) pass() error {
	select {
	case p.pieces <- p.piece:
		p.piece = make([]byte, 0, piece)
		return nil
	case <-p.ctx.Done():
		return p.ctx.Err()
	}
}

// done ends it.
func (p *part) done(err error) {
	if err == nil && p.rest > 0 {
		err = fmt.Errorf("%w: it lacks %d bytes: %w", ErrLength, p.rest, io.ErrUnexpectedEOF)
	}
	if err == nil && len(p.piece) > 0 {
		err = p.pass()
	}
	p.err = err
	close(p.pieces)
}
