package encoder

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"hash"
	"io"

	"hydrofoil.dev/foil/internal/format/deflate"
	"hydrofoil.dev/foil/internal/format/parts"
	"hydrofoil.dev/foil/internal/format/recipe"
)

// history is how many bytes before a part its encoder may need.
const history = 32 << 10

// slack is how many bytes after a part its encoder may read.
const slack = 1 << 20

// maker makes parts of one encoding.
type maker interface {
	// part writes part i, from in to end of the plaintext.
	part(ctx context.Context, w io.Writer, plain io.ReaderAt, i int, in, end int64) error
	// alone says that a part needs nothing of those before it but history.
	alone() bool
}

// Restore writes bytes from (included) to (excluded) of a blob, made again of its tar stream. It
// begins to read that shortly before what is needed. Up to workers parts are made at
// once; in memory are they, and what they are made of.
//
// Each part is compared with its sum before its last bytes are written, and the last byte of the
// range is not written before all of it were. Errors: ErrUnavailable; ErrMismatch; recipe.ErrCorrupt; those of
// plain and w.
func (s *Set) Restore(ctx context.Context, w io.Writer, e *recipe.Encoding, plain Plain, from, to int64, workers int) error {
	if size := e.Out(); from < 0 || to > size || from > to {
		return fmt.Errorf("bytes %d to %d of a blob that has %d", from, to, size)
	}
	head := int64(len(e.Header))
	tail := e.Out() - int64(len(e.Trailer))
	if from < head {
		if _, err := w.Write(e.Header[from:min(to, head)]); err != nil {
			return err
		}
	}
	if begin, end := max(from, head), min(to, tail); begin < end {
		if err := s.restoreStream(ctx, w, e, plain, begin-head, end-head, workers); err != nil {
			return err
		}
	}
	if to > tail {
		if _, err := w.Write(e.Trailer[max(from-tail, 0) : to-tail]); err != nil {
			return err
		}
	}
	return nil
}

func (s *Set) restoreStream(ctx context.Context, w io.Writer, e *recipe.Encoding, plain Plain, from, to int64, workers int) error {
	m, err := s.maker(ctx, e)
	if err != nil {
		return err
	}
	if workers = max(workers, 1); !m.alone() {
		workers = 1
	}
	ins, begins := make([]int64, len(e.Parts)+1), make([]int64, len(e.Parts)+1)
	first := 0
	for i := range e.Parts {
		ins[i+1], begins[i+1] = ins[i]+e.Parts[i].In, begins[i]+e.Parts[i].Out
		if begins[i+1] <= from {
			first = i + 1
		}
	}
	keep := int64(0)
	for i := range e.Parts {
		if !m.alone() {
			break // it reads forward
		}
		keep = max(keep, ins[min(i+workers, len(e.Parts))]-ins[i])
	}
	source, closer, err := openWindow(ctx, plain, max(ins[first]-history, 0), keep+history+slack)
	if err != nil {
		return err
	}
	defer closer.Close()
	size := begins[len(e.Parts)]
	return parts.Write(ctx, w, begins[:len(e.Parts)], size, from, to, workers, func(ctx context.Context, i int, w io.Writer) error {
		p := &e.Parts[i]
		v := verifier{w: w, hash: sha256.New()}
		if p.Stored != nil {
			_, err = v.Write(p.Stored)
		} else {
			err = m.part(ctx, &v, source, i, ins[i], ins[i+1])
		}
		if err == nil {
			err = v.end(p.Sum)
		}
		if err != nil {
			return fmt.Errorf("part %d of %d, by %s at level %d: %w", i+1, len(e.Parts), e.Encoder, e.Level, err)
		}
		return nil
	})
}

func (s *Set) maker(ctx context.Context, e *recipe.Encoding) (maker, error) {
	if err := s.check(ctx, e.Encoder); err != nil {
		return nil, err
	}
	if e.Encoder == Go {
		return newGoMaker(e)
	}
	p, err := s.program(e.Encoder)
	if err != nil {
		return nil, err
	}
	return &blocks{program: p, level: e.Level, size: e.Block, end: e.In()}, nil
}

// verifier passes on what is written, but for the last Write's bytes until the sum was found right.
type verifier struct {
	w    io.Writer
	hash hash.Hash
	held []byte
}

func (v *verifier) Write(b []byte) (int, error) {
	if err := v.pass(); err != nil {
		return 0, err
	}
	v.hash.Write(b)
	v.held = append(v.held[:0], b...)
	return len(b), nil
}

func (v *verifier) pass() error {
	if len(v.held) == 0 {
		return nil
	}
	_, err := v.w.Write(v.held)
	v.held = v.held[:0]
	return err
}

func (v *verifier) end(want [sha256.Size]byte) error {
	if !bytes.Equal(v.hash.Sum(nil), want[:]) {
		return ErrMismatch
	}
	return v.pass()
}

// goMaker is go1.26.
type goMaker struct{ index *deflate.Index }

func newGoMaker(e *recipe.Encoding) (*goMaker, error) {
	x, err := deflate.Decode(e.Points)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", recipe.ErrCorrupt, err)
	}
	in, out := int64(0), int64(0)
	fits := len(x.Points)+1 == len(e.Parts) && x.Level == e.Level
	for i := range e.Parts {
		if in, out = in+e.Parts[i].In, out+e.Parts[i].Out; fits && i < len(x.Points) {
			fits = x.Points[i].In == in && x.Points[i].Out == out
		}
	}
	if !fits || x.In != in || x.Out != out {
		return nil, fmt.Errorf("%w: %d restart points are not those of %d parts", recipe.ErrCorrupt, len(x.Points), len(e.Parts))
	}
	return &goMaker{x}, nil
}

func (g *goMaker) part(ctx context.Context, w io.Writer, plain io.ReaderAt, i int, _, _ int64) error {
	return g.index.WritePart(ctx, w, plain, i)
}

func (*goMaker) alone() bool { return true }
