package dedup

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/objects"
)

// Examined is what a pack was found to hold.
type Examined struct {
	// Frames are all that its table has; none if that cannot be read.
	Frames []catalog.Frame
	// Sound are those that were read right.
	Sound []catalog.Frame
	// Lost are the segments of the others.
	Lost []segment.ID
	// Wrong is the first thing that is wrong. nil: nothing is.
	Wrong error
}

// Examine reads a pack of so many bytes. Errors: those of reading that may be over the next time.
func (s *Store) Examine(ctx context.Context, p catalog.Pack) (x Examined, err error) {
	fail := func(err error) (Examined, error) {
		return Examined{}, fmt.Errorf("examine pack %s: %w", p.Key, err)
	}
	own, err := s.ReadPack(ctx, p.Key)
	if err == nil && own.Size != p.Size {
		err = fmt.Errorf("%w: it has %d bytes, and had %d", ErrBadPack, own.Size, p.Size)
	}
	if err != nil {
		if ctx.Err() != nil || !Damage(err) {
			return fail(cmp.Or(ctx.Err(), err))
		}
		return Examined{Wrong: err}, nil
	}
	x.Frames = own.Frames
	var raw []byte
	for _, f := range own.Frames {
		raw, err = s.soundFrame(ctx, p, &f, raw)
		switch {
		case err == nil:
			x.Sound = append(x.Sound, f)
		case ctx.Err() != nil || !Damage(err):
			return fail(cmp.Or(ctx.Err(), err))
		default:
			if x.Wrong == nil {
				x.Wrong = err
			}
			for i := range f.Segments {
				x.Lost = append(x.Lost, f.Segments[i].ID)
			}
		}
	}
	return x, nil
}

// Damage reports whether an error of reading says that bytes are lost or others, and not that they could not be read now.
func Damage(err error) bool {
	for _, target := range []error{ErrBadPack, segment.ErrCorrupt, objects.ErrNotFound, objects.ErrRange, io.ErrUnexpectedEOF, unix.EIO, unix.EBADMSG} {
		if errors.Is(err, target) {
			return true
		}
	}
	return false
}

// soundFrame reads a frame and compares all of its segments with their IDs.
func (s *Store) soundFrame(ctx context.Context, p catalog.Pack, f *catalog.Frame, buf []byte) ([]byte, error) {
	encoded, err := s.ReadFrame(ctx, f)
	if err != nil {
		return buf, err
	}
	raw, err := checkFrame(f, encoded, buf)
	if err != nil {
		return raw, fmt.Errorf("frame at %d of pack %s: %w", f.Offset, p.Key, err)
	}
	return raw, nil
}

// checkFrame decodes a frame to buf and compares all of its segments with their IDs. Errors: segment.ErrCorrupt.
func checkFrame(f *catalog.Frame, encoded, buf []byte) ([]byte, error) {
	raw, err := segment.DecodeFrame(buf[:0], encoded, int(f.RawLength))
	if err != nil {
		return buf, err
	}
	rest := raw
	for _, fs := range f.Segments {
		if int(fs.Length) > len(rest) || segment.Sum(rest[:fs.Length]) != fs.ID {
			return raw, fmt.Errorf("%w: segment %s has other bytes", segment.ErrCorrupt, fs.ID)
		}
		rest = rest[fs.Length:]
	}
	return raw, nil
}

// Salvage copies frames of a pack, which Examine has found to be sound, to a new one, and returns it. The catalog is not
// told.
func (s *Store) Salvage(ctx context.Context, frames []catalog.Frame) (p catalog.Pack, err error) {
	p.Key = newKey()
	fail := func(err error) (catalog.Pack, error) {
		return catalog.Pack{}, fmt.Errorf("salvage %d frames as pack %s: %w", len(frames), p.Key, err)
	}
	w, err := s.Objects.Create(ctx, p.Key)
	if err != nil {
		return fail(err)
	}
	defer w.Close()
	if _, err := w.Write([]byte(magic)); err != nil {
		return fail(err)
	}
	var table, raw []byte
	for _, f := range frames {
		encoded, err := s.ReadFrame(ctx, &f)
		if err != nil {
			return fail(err)
		}
		// What was sound when it was examined may not be now.
		if raw, err = checkFrame(&f, encoded, raw); err != nil {
			return fail(err)
		}
		if _, err := w.Write(encoded); err != nil {
			return fail(err)
		}
		table = appendTable(table, len(encoded), f.Segments)
	}
	if _, err := w.Write(appendTrailer(table, table, len(frames))); err != nil {
		return fail(err)
	}
	if err := w.Commit(); err != nil {
		return fail(err)
	}
	return s.ReadPack(ctx, p.Key)
}
