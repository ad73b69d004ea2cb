package dedup

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/objects"
)

// Examined is what a pack was found to hold.
type Examined struct {
	// Sound are the frames that the catalog says segments rest in, and that were read right.
	Sound []catalog.Frame
	// Lost are the segments that rest in this pack, and whose bytes are lost or others.
	Lost []segment.ID
	// Wrong is the first thing that is wrong, also of what the pack says of itself: frames may be right then. nil: nothing is.
	Wrong error
}

// Live reports whether anything rests in the pack.
func (x *Examined) Live() bool { return len(x.Sound)+len(x.Lost) > 0 }

// Examine reads a pack, as the catalog knows it. Frames in which no segment has its place are passed over. Errors: those of the
// catalog, and those of reading that may be over the next time.
func (s *Store) Examine(ctx context.Context, p catalog.Pack) (x Examined, err error) {
	fail := func(err error) (Examined, error) {
		return Examined{}, fmt.Errorf("examine pack %s: %w", p.Key, err)
	}
	var ids []segment.ID
	for _, f := range p.Frames {
		for _, fs := range f.Segments {
			ids = append(ids, fs.ID)
		}
	}
	places, err := s.Catalog.Locate(ctx, ids)
	if err != nil {
		return fail(err)
	}
	wrong := func(err error) {
		if x.Wrong == nil {
			x.Wrong = err
		}
	}
	var raw []byte
	for _, f := range p.Frames {
		var here []segment.ID
		for i, at := range places[:len(f.Segments)] {
			if at.Frame != nil && at.Frame.Pack == p.Key && at.Frame.Offset == f.Offset && at.Index == i {
				here = append(here, f.Segments[i].ID)
			}
		}
		places = places[len(f.Segments):]
		if len(here) == 0 {
			continue
		}
		raw, err = s.soundFrame(ctx, p, &f, raw)
		switch {
		case err == nil:
			x.Sound = append(x.Sound, f)
		case ctx.Err() != nil || !Damage(err):
			return fail(cmp.Or(ctx.Err(), err))
		default:
			wrong(err)
			x.Lost = append(x.Lost, here...)
		}
	}
	if !x.Live() {
		return x, nil
	}
	own, err := s.ReadPack(ctx, p.Key)
	switch {
	case err == nil && !sameFrames(own.Frames, p.Frames):
		wrong(fmt.Errorf("%w: its table is not that of its frames", ErrBadPack))
	case err == nil:
	case ctx.Err() != nil || !Damage(err):
		return fail(cmp.Or(ctx.Err(), err))
	default:
		wrong(err)
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

// Sound reads a pack, as it says itself what it holds, and returns what is wrong with it. Errors: those of Damage; others that may be over
// the next time.
func (s *Store) Sound(ctx context.Context, key string) error {
	p, err := s.ReadPack(ctx, key)
	if err != nil {
		return err
	}
	var raw []byte
	for i := range p.Frames {
		if raw, err = s.soundFrame(ctx, p, &p.Frames[i], raw); err != nil {
			return err
		}
	}
	return nil
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

func sameFrames(a, b []catalog.Frame) bool {
	return slices.EqualFunc(a, b, func(x, y catalog.Frame) bool {
		return x.Offset == y.Offset && x.Length == y.Length && slices.Equal(x.Segments, y.Segments)
	})
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
