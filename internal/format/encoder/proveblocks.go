package encoder

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"

	"hydrofoil.dev/foil/internal/format/recipe"
)

// proveBlocks makes all of a stream by a program. Of one with blocks, parts that come out otherwise are stored, if the
// stream goes on as it should.
func (p *prover) proveBlocks(ctx context.Context, e *recipe.Encoding) error {
	program, err := p.set.program(e.Encoder)
	if err != nil {
		return err
	}
	b := &blocks{program: program, level: e.Level, size: e.Block, end: p.in.TarSize}
	size := int64(0)
	if e.Block > 0 {
		size = max(e.Block, blocksInOne/e.Block*e.Block)
	}
	plain, closer, err := openWindow(ctx, p.in.Tar, 0, 2*size+history+slack)
	if err != nil {
		return err
	}
	defer closer.Close()
	blob, err := p.in.Blob(ctx, p.header)
	if err != nil {
		return err
	}
	defer blob.Close()
	r := bufio.NewReaderSize(blob, chunk)
	if e.Block == 0 {
		p.fed += p.in.TarSize
		hash := sha256.New()
		m := &matcher{r: r, more: func(b []byte) { hash.Write(b) }}
		if err := b.part(ctx, m, plain, 0, 0, p.in.TarSize); err != nil {
			return err
		}
		part := recipe.Part{In: p.in.TarSize, Out: m.n}
		hash.Sum(part.Sum[:0])
		e.Parts = []recipe.Part{part}
		return nil
	}
	f := follower{r: r, most: min(p.in.Size/maxStored, recipe.MaxEncoding)}
	for at := int64(0); at < p.in.TarSize || at == 0; at += size {
		end := min(at+size, p.in.TarSize)
		p.fed += end - at
		made, err := f.part(func(w io.Writer) error { return b.part(ctx, w, plain, len(e.Parts), at, end) }, end == p.in.TarSize)
		if err != nil {
			return err
		}
		for i := range made {
			// Those that were not known how long they are have been found now.
			made[i].In = min(size, p.in.TarSize-int64(len(e.Parts))*size)
			e.Parts = append(e.Parts, made[i])
		}
	}
	if f.other != nil {
		return errOther
	}
	return nil
}

// follower compares parts with a blob. One that differs is looked for the end of: where the next one that is equal
// begins.
type follower struct {
	r      *bufio.Reader
	most   int64  // bytes that may be stored
	stored int64  // bytes that are
	other  []byte // a part that differs, as it was made; nil: none waits for its end
}

// lookahead is how much of a part has to be equal to be taken for it.
const lookahead = 512

// part returns the parts that are known now: none, this one, or the one before and this one.
func (f *follower) part(make func(io.Writer) error, last bool) ([]recipe.Part, error) {
	var made bytes.Buffer
	if err := make(&made); err != nil {
		return nil, err
	}
	b := made.Bytes()
	if f.other == nil {
		got, err := f.read(len(b))
		if err != nil {
			return nil, err
		}
		if bytes.Equal(got, b) {
			return []recipe.Part{{Out: int64(len(b)), Sum: sha256.Sum256(b)}}, nil
		}
		if last {
			return nil, errOther
		}
		f.other = got
		return nil, nil
	}
	// How long was the part that differs? Some bytes more or less than the one that was made.
	more, err := f.read(len(f.other)/2 + len(b) + lookahead)
	if err != nil {
		return nil, err
	}
	all := append(f.other, more...)
	at := bytes.Index(all, b)
	if at <= 0 || len(b) < lookahead && !last {
		return nil, errOther
	}
	if f.stored += int64(at); f.stored > f.most {
		return nil, errOther
	}
	f.other = nil
	f.r = bufio.NewReaderSize(io.MultiReader(bytes.NewReader(all[at+len(b):]), f.r), chunk)
	stored := all[:at:at]
	return []recipe.Part{{Out: int64(at), Sum: sha256.Sum256(stored), Stored: stored}, {Out: int64(len(b)), Sum: sha256.Sum256(b)}}, nil
}

// read reads n bytes, or as many as there are.
func (f *follower) read(n int) ([]byte, error) {
	b := make([]byte, n)
	n, err := io.ReadFull(f.r, b)
	if err != nil && err != io.EOF && !errors.Is(err, io.ErrUnexpectedEOF) {
		return nil, fmt.Errorf("read blob: %w", err)
	}
	return b[:n], nil
}
