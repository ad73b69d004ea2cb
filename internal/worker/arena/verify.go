package arena

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"

	"golang.org/x/sys/unix"
)

// Checked is the result of comparing one segment with its ID.
type Checked struct {
	Segment int // its number in the arena
	Content int // index into TOC.Contents
	Length  int // bytes
	Absent  bool
	// Err is nil, ErrWrongBytes (wrapped), or what stopped the reading.
	Err error
}

// Verify reads every present segment and compares it with its ID, holes and
// padding with zeros, in the order of their places, and calls fn for each
// segment, the absent ones included. It stops with the error that fn returns, or when ctx ends. It
// changes nothing.
func (a *Arena) Verify(ctx context.Context, fn func(Checked) error) error {
	var buf []byte
	for i := range a.layout.ids {
		if err := ctx.Err(); err != nil {
			return fmt.Errorf("verify arena %s: %w", a.dir, err)
		}
		c := Checked{Segment: i, Content: a.layout.Content(i), Length: int(a.layout.lengths[i])}
		switch {
		case !a.HasSegment(i):
			c.Absent = true
		case a.layout.ids[i].IsHole() && a.unwritten(a.layout.offsets[i], int64(c.Length)+int64(a.layout.padding(i))):
		default:
			var b []byte
			if b, c.Err = a.ReadSegment(buf, i); c.Err == nil {
				buf = b
				c.Err = a.checkPadding(i)
			}
		}
		if err := fn(c); err != nil {
			return err
		}
	}
	return nil
}

func (a *Arena) checkPadding(i int) error {
	n := a.layout.padding(i)
	if n == 0 {
		return nil
	}
	var b [BlockSize]byte
	if _, err := io.ReadFull(io.NewSectionReader(a.file, a.layout.end(i), int64(n)), b[:n]); err != nil {
		return fmt.Errorf("read the padding after segment %s of arena %s: %w", a.layout.ids[i], a.dir, err)
	}
	if !isZero(b[:n]) {
		return fmt.Errorf("read the padding after segment %s of arena %s at %d: %w", a.layout.ids[i], a.dir, a.layout.end(i), ErrWrongBytes)
	}
	return nil
}

// unwritten reports whether the filesystem says that nothing was ever written
// to a range. Big holes would take long to read.
func (a *Arena) unwritten(off, n int64) bool {
	next, err := int64(0), error(nil)
	cerr := a.conn.Control(func(fd uintptr) { next, err = unix.Seek(int(fd), off, unix.SEEK_DATA) })
	if errors.Is(err, unix.ENXIO) { // no data up to the end of the file
		return true
	}
	return cerr == nil && err == nil && next >= off+n
}

func isZero(b []byte) bool {
	for len(b) > 0 {
		n := min(len(b), len(zeros))
		if !bytes.Equal(b[:n], zeros[:n]) {
			return false
		}
		b = b[n:]
	}
	return true
}
