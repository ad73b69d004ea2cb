package encoder

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"io"
	"runtime"

	"hydrofoil.dev/foil/internal/format/deflate"
	"hydrofoil.dev/foil/internal/format/recipe"
)

const (
	// probe is how much of a tar stream all candidates are tried on.
	probe = 2 << 20
	// maxProofs is how many tar streams' bytes those that survive are tried on.
	maxProofs = 3
	// maxStored is which share of a blob may be stored, as a divisor.
	maxStored = 4
)

// Input is a blob, and what it is said to be made of.
type Input struct {
	Size int64 // of the blob
	// Blob reads it from an offset on.
	Blob func(ctx context.Context, at int64) (io.ReadCloser, error)
	// Tar reads the tar stream, which has TarSize bytes.
	Tar     Plain
	TarSize int64
}

// Prove looks for an encoding of a blob, and returns it when it has made all of the blob by it. It returns nil if
// there is none. Skipped are the encoders that were not tried because they are not available.
//
// It works for as long as the slowest candidate takes for all of the tar stream, a few times at worst. Who wants it
// to be slow reads slowly: it does nothing but between reads of the tar stream.
func (s *Set) Prove(ctx context.Context, in Input) (e *recipe.Encoding, skipped []string, err error) {
	p := &prover{set: s, in: in}
	if err := p.begin(ctx); err != nil || p.head == nil {
		return nil, nil, err
	}
	header, ok := parseHeader(p.head)
	if !ok {
		return nil, nil, nil
	}
	p.header = int64(header.length)
	bad := map[string]bool{}
	for _, c := range candidates(header) {
		if bad[c.encoder] {
			continue
		}
		if err := s.check(ctx, c.encoder); errors.Is(err, ErrUnavailable) {
			bad[c.encoder] = true
			skipped = append(skipped, c.encoder)
			continue
		} else if err != nil {
			return nil, nil, err
		}
		fits, err := p.probe(ctx, c)
		if err != nil {
			return nil, nil, err
		}
		if !fits || p.fed > maxProofs*in.TarSize {
			continue
		}
		if e, err = p.prove(ctx, c); e != nil || err != nil {
			return e, skipped, err
		}
	}
	return nil, skipped, nil
}

// prover proves one blob.
type prover struct {
	set    *Set
	in     Input
	head   []byte // of the blob: what a probe may make, and a header
	plain  []byte // of the tar stream: what is probed
	header int64  // bytes before the deflate stream
	fed    int64  // bytes of the tar stream that proofs were tried on
}

// begin reads the beginnings of both.
func (p *prover) begin(ctx context.Context) error {
	read := func(r io.ReadCloser, n int64) ([]byte, error) {
		defer r.Close()
		b := make([]byte, n)
		_, err := io.ReadFull(r, b)
		return b, err
	}
	r, err := p.in.Blob(ctx, 0)
	if err != nil {
		return err
	}
	if p.head, err = read(r, min(p.in.Size, probe+recipe.MaxLiteral+probe/8)); err != nil {
		return fmt.Errorf("read blob: %w", err)
	}
	if _, ok := parseHeader(p.head[:min(len(p.head), recipe.MaxLiteral)]); !ok {
		p.head = nil
		return nil
	}
	if r, err = p.in.Tar(ctx, 0); err != nil {
		return err
	}
	if p.plain, err = read(r, min(p.in.TarSize, probe)); err != nil {
		return fmt.Errorf("read tar stream: %w", err)
	}
	return nil
}

// errOther ends an encoder that makes other bytes.
var errOther = errors.New("other bytes")

// matcher compares what is written with a reader.
type matcher struct {
	r    io.Reader
	buf  []byte
	n    int64 // bytes that were equal
	more func(b []byte)
}

func (m *matcher) Write(b []byte) (int, error) {
	m.buf = append(m.buf[:0], b...)
	n, err := io.ReadFull(m.r, m.buf)
	if err != nil && err != io.EOF && err != io.ErrUnexpectedEOF {
		return 0, err
	}
	equal := 0
	for equal < n && b[equal] == m.buf[equal] {
		equal++
	}
	if m.n += int64(equal); equal < len(b) {
		return equal, errOther
	}
	if m.more != nil {
		m.more(b)
	}
	return len(b), nil
}

// probe reports whether a candidate makes the beginning of the stream.
func (p *prover) probe(ctx context.Context, c candidate) (bool, error) {
	equal := 0 // writes
	m := &matcher{r: bytes.NewReader(p.head[p.header:]), more: func([]byte) { equal++ }}
	whole := int64(len(p.plain)) == p.in.TarSize
	var err error
	if c.encoder == Go {
		var e *deflate.Encoder
		if e, err = deflate.NewEncoder(m, c.level); err != nil {
			return false, err
		}
		if _, err = e.Write(p.plain); err == nil && whole {
			err = e.Close()
		}
		// Where writes ended is looked into later. It cannot have changed the first block.
		if errors.Is(err, errOther) && c.level > 1 && equal > 0 {
			return true, nil
		}
	} else {
		var program *program
		if program, err = p.set.program(c.encoder); err != nil {
			return false, err
		}
		b := &blocks{program: program, level: c.level, size: c.block, end: p.in.TarSize}
		n := int64(len(p.plain))
		if c.block > 0 && !whole {
			n -= n % c.block
		}
		err = b.part(ctx, m, bytes.NewReader(p.plain), 0, 0, n)
	}
	if errors.Is(err, errOther) {
		return false, nil
	}
	return err == nil, err
}

// prove makes all of the blob.
func (p *prover) prove(ctx context.Context, c candidate) (e *recipe.Encoding, err error) {
	e = &recipe.Encoding{Encoder: c.encoder, Arch: runtime.GOARCH, Level: c.level, Block: c.block, Header: p.head[:p.header:p.header]}
	if c.encoder == Go {
		err = p.proveGo(ctx, e)
	} else {
		err = p.proveBlocks(ctx, e)
	}
	if errors.Is(err, errOther) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	at := e.Out()
	if p.in.Size-at > recipe.MaxLiteral {
		return nil, nil // members that follow
	}
	r, err := p.in.Blob(ctx, at)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	if e.Trailer, err = io.ReadAll(r); err != nil {
		return nil, fmt.Errorf("read blob: %w", err)
	}
	if e.Out() != p.in.Size || e.StoredBytes() > min(p.in.Size/maxStored, recipe.MaxEncoding) {
		return nil, nil
	}
	return e, nil
}

// goProof is one try to make a stream by go1.26.
type goProof struct {
	p     *prover
	e     *recipe.Encoding
	ends  tarEnds
	index deflate.Index
	// between says how many of index.Between are before each point.
	between []int
}

// proveGo makes all of a stream by go1.26. When it comes out otherwise, it tries the last part again, with the ends of
// writes of a tar stream, or without.
func (p *prover) proveGo(ctx context.Context, e *recipe.Encoding) error {
	g := &goProof{p: p, e: e, index: deflate.Index{Level: e.Level}}
	best := int64(-1) // of the stream, where it was otherwise
	for ends, tries := true, 0; ; ends = !ends {
		out, err := g.run(ctx, ends)
		if !errors.Is(err, errOther) {
			if err == nil {
				e.Points = g.index.Append(nil)
			}
			return err
		}
		if out > best {
			best, tries = out, 0
		}
		if tries++; tries == 2 || e.Level == 1 || ctx.Err() != nil {
			return err
		}
	}
}

// run goes on from the last point. It returns how far the stream is equal.
func (g *goProof) run(ctx context.Context, ends bool) (int64, error) {
	var from deflate.Point
	points := len(g.index.Points)
	if points > 0 {
		from = g.index.Points[points-1]
		g.index.Between = g.index.Between[:g.between[points-1]]
	}
	blob, err := g.p.in.Blob(ctx, g.p.header+from.Out)
	if err != nil {
		return from.Out, err
	}
	defer blob.Close()
	m := &matcher{r: bufio.NewReaderSize(blob, chunk), n: from.Out}
	plain, err := g.p.in.Tar(ctx, from.In-int64(from.History()))
	if err != nil {
		return from.Out, err
	}
	defer plain.Close()
	past := make([]byte, from.History())
	if _, err := io.ReadFull(plain, past); err != nil {
		return from.Out, fmt.Errorf("read tar stream: %w", err)
	}
	var enc *deflate.Encoder
	if points == 0 {
		enc, err = deflate.NewEncoder(m, g.e.Level)
	} else {
		enc, err = deflate.Resume(m, g.e.Level, &from, past)
	}
	if err != nil {
		return from.Out, err
	}
	r := &run{goProof: g, x: enc.Record(partTarget), known: len(g.index.Between), in: from.In, out: from.Out, hash: sha256.New()}
	m.more = r.equal
	err = r.feed(ctx, enc, plain, from.In, ends)
	if err == nil {
		err = enc.Close()
	}
	if err == nil {
		r.points()
		r.part(g.p.in.TarSize, m.n)
		g.index.In, g.index.Out = g.p.in.TarSize, m.n
		g.index.Between = append(g.index.Between[:r.known], r.x.Between...)
	}
	return m.n, err
}

// run is what becomes of a stream from one point on.
type run struct {
	*goProof
	x       *deflate.Index
	taken   int // of its points
	known   int // ends of writes before it
	in, out int64
	hash    hash.Hash
}

// feed gives the encoder the tar stream.
func (r *run) feed(ctx context.Context, enc *deflate.Encoder, plain io.Reader, at int64, ends bool) error {
	buf := make([]byte, chunk)
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		n, rerr := io.ReadFull(plain, buf)
		r.p.fed += int64(n)
		r.ends.see(buf[:n], at)
		for b := buf[:n]; len(b) > 0; {
			m := len(b)
			end := false
			if ends {
				if next := r.ends.next(at); next > at && next-at <= int64(m) {
					m, end = int(next-at), true
				}
			}
			if _, err := enc.Write(b[:m]); err != nil {
				return err
			}
			if end {
				enc.Between()
			}
			b, at = b[m:], at+int64(m)
		}
		switch {
		case rerr == io.EOF || rerr == io.ErrUnexpectedEOF:
			if at != r.p.in.TarSize {
				return fmt.Errorf("the tar stream has %d bytes, not %d: %w", at, r.p.in.TarSize, io.ErrUnexpectedEOF)
			}
			return nil
		case rerr != nil:
			return fmt.Errorf("read tar stream: %w", rerr)
		}
	}
}

// equal takes bytes that the blob has as well.
func (r *run) equal(b []byte) {
	r.points()
	r.hash.Write(b)

}

// points takes the points that were recorded since.
func (r *run) points() {
	for ; r.taken < len(r.x.Points); r.taken++ {
		p := r.x.Points[r.taken]
		r.part(p.In, p.Out)
		g := r.goProof
		g.index.Points = append(g.index.Points, p)
		g.index.Between = append(g.index.Between[:r.known], r.x.Between...)
		g.between = append(g.between, len(g.index.Between))
	}
}

// part ends a part.
func (r *run) part(in, out int64) {
	p := recipe.Part{In: in - r.in, Out: out - r.out}
	r.hash.Sum(p.Sum[:0])
	r.hash.Reset()
	r.e.Parts = append(r.e.Parts, p)
	r.in, r.out = in, out
}
