package encoder

import (
	"context"
	"io"
	"strings"
)

// blocks makes streams by a program, with blocks or without.
type blocks struct {
	program *program
	level   int
	size    int64 // of a block; 0: all is one stream
	end     int64 // bytes of the tar stream
}

func (b *blocks) alone() bool { return b.size > 0 }

// part implements maker. A part is of whole blocks, but for the last one.
func (b *blocks) part(ctx context.Context, w io.Writer, plain io.ReaderAt, _ int, in, end int64) error {
	return b.program.run(ctx, w, func(ctx context.Context, c *process) error {
		if b.size == 0 {
			if err := c.say('S', []byte{byte(b.level)}); err != nil {
				return err
			}
			if err := b.write(ctx, c, plain, in, end); err != nil || end < b.end {
				return err
			}
			return c.say('E')
		}
		for at := in; ; at += b.size {
			if err := b.block(ctx, c, plain, at, min(at+b.size, end)); err != nil {
				return err
			}
			// A last block that is full has an empty one after it, in pgzip.
			if next := at + b.size; next > end || next == end && (end < b.end || !b.pgzip()) {
				return nil
			}
		}
	})
}

func (b *blocks) pgzip() bool { return strings.HasPrefix(b.program.name, "klauspost") }

// dictionary is how many bytes before a block it may refer to.
func (b *blocks) dictionary() int64 {
	if b.pgzip() {
		return 16 << 10
	}
	return 32 << 10
}

// block makes one.
func (b *blocks) block(ctx context.Context, c *process, plain io.ReaderAt, in, end int64) error {
	before := make([]byte, min(b.dictionary(), in))
	if err := readAt(plain, before, in-int64(len(before))); err != nil {
		return err
	}
	if err := c.say('S', []byte{byte(b.level)}, before); err != nil {
		return err
	}
	if err := b.write(ctx, c, plain, in, end); err != nil {
		return err
	}
	last := end == b.end && (end-in < b.size || !b.pgzip())
	switch {
	case b.pgzip() && last:
		if err := c.say('F'); err != nil {
			return err
		}
		return c.say('E')
	case b.pgzip():
		return c.say('F')
	case last:
		return c.say('E')
	}
	return c.say('A')
}

// write says what the plaintext is.
func (b *blocks) write(ctx context.Context, c *process, plain io.ReaderAt, at, end int64) error {
	buf := make([]byte, min(chunk, end-at))
	for at < end {
		if err := ctx.Err(); err != nil {
			return err
		}
		buf := buf[:min(int64(len(buf)), end-at)]
		if err := readAt(plain, buf, at); err != nil {
			return err
		}
		if err := c.say('W', buf); err != nil {
			return err
		}
		at += int64(len(buf))
	}
	return nil
}

func readAt(r io.ReaderAt, b []byte, at int64) error {
	n, err := r.ReadAt(b, at)
	if n == len(b) {
		return nil
	}
	if err == nil || err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	return err
}
