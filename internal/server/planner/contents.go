package planner

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"syscall"

	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/server/objects"
)

// Contents reads contents of one rootfs out of the packs, verified. It is not
// safe for concurrent use.
type Contents struct {
	TOC     *toc.TOC
	Index   *Index
	Objects objects.Store
	// Keep is how many frames are kept decoded, of up to 512 KiB each, for reads that go back and forth; 0: one.
	Keep int

	recent []decoded // the one that was used last comes first
}

// decoded is a frame that is kept.
type decoded struct {
	frame    uint32
	raw      []byte
	verified uint32 // segment of it that was compared with its ID last, plus 1
}

// Place returns a number that orders the segments of the TOC as they rest:
// reading them in this order reads each frame once.
func (c *Contents) Place(n uint32) uint64 {
	return uint64(c.Index.frameOf[n])<<32 | uint64(c.Index.slotOf[n])
}

// frame returns a frame, decoded, that has segment n.
func (c *Contents) frame(ctx context.Context, n uint32) (*decoded, error) {
	at := c.Index.frameOf[n]
	k := slices.IndexFunc(c.recent, func(d decoded) bool { return d.frame == at })
	if k < 0 {
		p := c.Index.Frame(n)
		b, err := ReadPart(ctx, c.Objects, p, nil)
		if err != nil {
			return nil, err
		}
		if len(c.recent) < max(1, c.Keep) {
			c.recent = append(c.recent, decoded{})
		}
		k = len(c.recent) - 1
		d := &c.recent[k]
		f := &c.Index.frames[at]
		if d.raw, err = segment.DecodeFrame(d.raw[:0], b, int(f.raw)); err != nil {
			c.recent = c.recent[:k]
			return nil, fmt.Errorf("frame at %d of pack %s: %w: %w", f.offset, p.Pack, ErrDamaged, err)
		}
		d.frame, d.verified = at, 0
	}
	d := c.recent[k]
	copy(c.recent[1:k+1], c.recent)
	c.recent[0] = d
	return &c.recent[0], nil
}

// Segment returns the bytes of segment n of the TOC, verified, valid until the
// next call. Errors: ErrDamaged; objects.ErrNotFound.
func (c *Contents) Segment(ctx context.Context, n uint32) ([]byte, error) {
	s := &c.TOC.Segments[n]
	if s.ID.IsHole() {
		return make([]byte, s.Length), nil
	}
	d, err := c.frame(ctx, n)
	if err != nil {
		return nil, err
	}
	f := &c.Index.frames[d.frame]
	from := uint32(0)
	for _, n := range c.Index.lengths[f.first : f.first+c.Index.slotOf[n]] {
		from += n
	}
	b := d.raw[from : from+s.Length]
	if d.verified != n+1 {
		if segment.Sum(b) != s.ID {
			return nil, fmt.Errorf("segment %s in frame at %d of pack %s: %w: its bytes are others", s.ID, f.offset, c.Index.packs[f.pack], ErrDamaged)
		}
		d.verified = n + 1
	}
	return b, nil
}

// ErrDamaged is returned, wrapped, for a pack that does not have what an index
// says.
var ErrDamaged = errors.New("damaged pack")

// Lost marks the error of a read as ErrDamaged when what was read is to blame for
// it: it ends too soon, or the disk cannot read it.
func Lost(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, syscall.EIO) {
		return fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	return err
}

// OpenPart opens a stored frame, or several one after the other, to read them,
// encoded. Errors: objects.ErrNotFound; ErrDamaged when the pack is shorter.
func OpenPart(ctx context.Context, store objects.Store, p Part) (io.ReadCloser, error) {
	r, err := store.Open(ctx, p.Pack, p.Offset, int64(p.Length))
	if err != nil {
		if size, serr := store.Stat(ctx, p.Pack); serr == nil && size < p.Offset+int64(p.Length) {
			err = fmt.Errorf("%w: it has %d bytes", ErrDamaged, size)
		}
		return nil, fmt.Errorf("read %d bytes at %d of pack %s: %w", p.Length, p.Offset, p.Pack, err)
	}
	return r, nil
}

// ReadPart reads a stored frame, encoded, into buf if it is large enough. Errors
// are those of OpenPart.
func ReadPart(ctx context.Context, store objects.Store, p Part, buf []byte) ([]byte, error) {
	if cap(buf) < int(p.Length) {
		buf = make([]byte, p.Length)
	}
	buf = buf[:p.Length]
	r, err := OpenPart(ctx, store, p)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	if _, err := io.ReadFull(r, buf); err != nil {
		return nil, fmt.Errorf("read %d bytes at %d of pack %s: %w", p.Length, p.Offset, p.Pack, Lost(err))
	}
	return buf, nil
}

// Open returns the content of an inode, which must have one, to read any part
// of it; only the segments that are touched are read.
func (c *Contents) Open(ctx context.Context, inode int) io.ReaderAt {
	return &contentReader{ctx, c, &c.TOC.Contents[c.TOC.Inodes[inode].Content]}
}

type contentReader struct {
	ctx      context.Context // io.ReaderAt has none
	contents *Contents
	content  *toc.Content
}

func (r *contentReader) ReadAt(p []byte, off int64) (n int, err error) {
	if off < 0 {
		return 0, fmt.Errorf("read content %s at %d", r.content.ID, off)
	}
	for i := r.content.First; i < r.content.First+r.content.Segments && n < len(p); i++ {
		s := &r.contents.TOC.Segments[i]
		at := off + int64(n) - s.Offset
		if at < 0 || at >= int64(s.Length) {
			continue
		}
		b, err := r.contents.Segment(r.ctx, i)
		if err != nil {
			return n, fmt.Errorf("read content %s: %w", r.content.ID, err)
		}
		n += copy(p[n:], b[at:])
	}
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}
