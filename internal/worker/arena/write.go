package arena

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/format/segment"
)

// ErrWrongBytes is returned, wrapped, when bytes are not those of the segment
// that they were said to be.
var ErrWrongBytes = errors.New("the bytes are not the segment's")

var zeros [BlockSize]byte

// WriteSegment verifies that data is segment i, writes it to its place and to
// every other place in this arena with the same segment, marks it present and
// wakes those that wait. A segment that is present already is left alone. data
// is not kept.
//
// Errors: ErrWrongBytes; those of pwrite(2), e.g. unix.ENOSPC. After an error
// nothing is present that was not verified and written.
func (a *Arena) WriteSegment(i int, data []byte) error {
	if err := a.verify(i, data); err != nil {
		return err
	}
	if !a.layout.Repeated(i) {
		return a.write(i, data)
	}
	for _, k := range a.layout.Find(make([]int, 0, 8), a.layout.ids[i]) {
		// Equal IDs have equal lengths unless the TOC lies.
		if int(a.layout.lengths[k]) != len(data) {
			return fmt.Errorf("write segment %s to arena %s: it is said to have %d and %d bytes: %w",
				a.layout.ids[i], a.dir, len(data), a.layout.lengths[k], ErrWrongBytes)
		}
		if err := a.write(k, data); err != nil {
			return err
		}
	}
	return nil
}

// verify is the one place where bytes are compared with what the header fixed.
func (a *Arena) verify(i int, data []byte) error {
	want := a.layout.Segment(i)
	if len(data) != want.Length {
		return fmt.Errorf("write segment %s to arena %s: %d bytes, want %d: %w", want.ID, a.dir, len(data), want.Length, ErrWrongBytes)
	}
	if want.ID.IsHole() {
		return fmt.Errorf("write segment %d to arena %s: it is a hole: %w", i, a.dir, ErrWrongBytes)
	}
	if got := segment.ID(sha256.Sum256(data)); got != want.ID {
		return fmt.Errorf("write segment %s to arena %s: got %s: %w", want.ID, a.dir, got, ErrWrongBytes)
	}
	return nil
}

// write puts verified bytes in the place of segment i.
func (a *Arena) write(i int, data []byte) error {
	content := &a.contents[a.layout.contentOf(i)%len(a.contents)]
	content.RLock()
	defer content.RUnlock()
	a.mu.RLock()
	defer a.mu.RUnlock()
	if a.closed {
		return fmt.Errorf("write segment %s to arena %s: %w", a.layout.ids[i], a.dir, ErrClosed)
	}
	if bit(a.maps.segments, i) {
		return nil
	}
	if err := a.fillAround(i, data); err != nil {
		return fmt.Errorf("write segment %s to arena %s: %w", a.layout.ids[i], a.dir, explain(err))
	}
	early := a.maps.inRuns(a.layout, i)
	fresh, from, to := a.maps.mark(a.layout, i)
	if fresh {
		a.here.Add(int64(len(data)) - early)
		a.one()
	}
	a.waits.wake(from, to)
	return nil
}

// one counts a segment that has become present.
func (a *Arena) one() {
	if a.missing.Add(-1) == 0 {
		a.once.Do(func() { close(a.done) })
	}
}

// fillAround compares the bytes of segment i with those that page runs wrote of
// it, then writes the others, and the padding after them. Its content is locked
// for reading: runs do not change.
func (a *Arena) fillAround(i int, data []byte) error {
	off, end := a.layout.offsets[i], a.layout.end(i)
	from, to := int(off/BlockSize), int((end-1)/BlockSize)+1
	part := func(b, e int) (int64, []byte) {
		lo, hi := max(off, int64(b)*BlockSize), min(end, int64(e)*BlockSize)
		return lo, data[lo-off : hi-off]
	}
	for b := nextSet(a.maps.runs, from, to); b < to; {
		e := nextClear(a.maps.runs, b, to)
		if err := a.agrees(part(b, e)); err != nil {
			return fmt.Errorf("content %d of its TOC came as pages before: %w", a.layout.Content(i), err)
		}
		b = nextSet(a.maps.runs, e, to)
	}
	for b := nextClear(a.maps.runs, from, to); b < to; {
		e := nextSet(a.maps.runs, b, to)
		padding := 0
		if e == to {
			padding = a.layout.padding(i)
		}
		lo, piece := part(b, e)
		if err := a.pwrite(piece, padding, lo); err != nil {
			return err
		}
		b = nextClear(a.maps.runs, e, to)
	}
	return nil
}

func (a *Arena) pwrite(data []byte, padding int, off int64) error {
	var werr error
	cerr := a.conn.Control(func(fd uintptr) { werr = pwrite(int(fd), data, padding, off) })
	if err := errors.Join(werr, cerr); err != nil {
		return err
	}
	a.written.Add(int64(len(data)))
	return nil
}

// pwrite writes data at off, and padding zeros after it.
func pwrite(fd int, data []byte, padding int, off int64) error {
	if padding > 0 {
		n, err := unix.Pwritev(fd, [][]byte{data, zeros[:padding]}, off)
		for errors.Is(err, unix.EINTR) {
			n, err = unix.Pwritev(fd, [][]byte{data, zeros[:padding]}, off)
		}
		if err != nil {
			return os.NewSyscallError("pwritev", err)
		}
		if n >= len(data) {
			// A disk that is full can end a write early, here in the padding.
			data, padding, off = zeros[:padding-(n-len(data))], 0, off+int64(n)
		} else {
			data, off = data[n:], off+int64(n)
		}
	}
	for len(data) > 0 {
		n, err := unix.Pwrite(fd, data, off)
		if err != nil && !errors.Is(err, unix.EINTR) {
			return os.NewSyscallError("pwrite", err)
		}
		if err == nil {
			data, off = data[n:], off+int64(n)
		}
	}
	if padding > 0 {
		return pwrite(fd, zeros[:padding], 0, off)
	}
	return nil
}

// ReadSegment reads segment i, which must be present, into dst and verifies it.
// It returns the bytes, in dst when its capacity is enough.
//
// Errors: ErrWrongBytes; errors of pread(2); one that says that the segment is
// absent.
func (a *Arena) ReadSegment(dst []byte, i int) ([]byte, error) {
	s := a.layout.Segment(i)
	if !a.HasSegment(i) {
		return nil, fmt.Errorf("read segment %s of arena %s: it is absent", s.ID, a.dir)
	}
	if cap(dst) < s.Length {
		dst = make([]byte, s.Length)
	}
	dst = dst[:s.Length]
	if _, err := io.ReadFull(io.NewSectionReader(a.file, s.Offset, int64(s.Length)), dst); err != nil {
		return nil, fmt.Errorf("read segment %s of arena %s: %w", s.ID, a.dir, err)
	}
	if s.ID.IsHole() {
		if !isZero(dst) {
			return nil, fmt.Errorf("read a hole of arena %s at %d: %w", a.dir, s.Offset, ErrWrongBytes)
		}
		return dst, nil
	}
	if got := segment.Sum(dst); got != s.ID {
		return nil, fmt.Errorf("read segment %s of arena %s at %d: got %s: %w", s.ID, a.dir, s.Offset, got, ErrWrongBytes)
	}
	return dst, nil
}

var copyBuffers = sync.Pool{New: func() any { return new([]byte) }}

// CopyFrom fills segment i from segment k of another arena, where it must be
// present, and verifies it on the way. It serves segments that another arena
// holds inside of a content that differs.
func (a *Arena) CopyFrom(other *Arena, k, i int) error {
	if other.layout.ids[k] != a.layout.ids[i] {
		return fmt.Errorf("copy segment %s to arena %s: the source is %s: %w", a.layout.ids[i], a.dir, other.layout.ids[k], ErrWrongBytes)
	}
	buf := copyBuffers.Get().(*[]byte)
	defer copyBuffers.Put(buf)
	b, err := other.ReadSegment(*buf, k)
	if err != nil {
		return fmt.Errorf("copy to arena %s: %w", a.dir, err)
	}
	*buf = b
	return a.WriteSegment(i, b)
}
