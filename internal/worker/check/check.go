// Package check compares bytes that rest in arenas with the digests of a TOC: segment by
// segment (Checker), and contents of several segments as a whole (Whole).
package check

import (
	"bytes"
	"context"
	"fmt"

	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/contents"
	"hydrofoil.dev/foil/internal/worker/rootfs"
)

// tellEvery is how many bytes are checked between two events.
const tellEvery = 32 << 20

// Checker checks one rootfs, and tells how far it is. Bytes that have not arrived are
// counted, and are no error.
type Checker struct {
	toc   *toc.TOC
	ev    api.VerifyEvent
	emit  func(api.VerifyEvent) error
	buf   []byte
	bad   []int32
	names *toc.Names
	since int64 // bytes since the last event
}

// New returns a Checker of a rootfs whose contents have total bytes.
func New(t *toc.TOC, total int64, emit func(api.VerifyEvent) error) *Checker {
	return &Checker{toc: t, ev: api.VerifyEvent{Total: total}, emit: emit, buf: make([]byte, segment.MaxLength)}
}

// Bad tells of a part of the rootfs that is not what it should be.
func (v *Checker) Bad(what string) error {
	v.ev.Bad = what
	err := v.emit(v.ev)
	v.ev.Bad = ""
	return err
}

// End tells which contents were bad, and that nothing more comes.
func (v *Checker) End() error {
	for _, c := range v.bad {
		if err := v.Bad(v.path(c)); err != nil {
			return err
		}
	}
	v.ev.Done = true
	return v.emit(v.ev)
}

// Arena checks those of the contents here that lie in an arena, and returns how many do.
func (v *Checker) Arena(ctx context.Context, src *rootfs.Contents, here []int32) (found int, failed error) {
	contentID, size := contents.Of(v.toc)
	segment.Sort(here, contentID)
	src.List.Join(here, contentID, size, func(c int32, off int64, kind contents.Kind) {
		if kind == contents.Piece || failed != nil {
			return
		}
		found++
		if failed = context.Cause(ctx); failed == nil {
			failed = v.content(src, c, off)
		}
	})
	return found, failed
}

// content checks one content at its place.
func (v *Checker) content(src *rootfs.Contents, c int32, at int64) error {
	content := &v.toc.Contents[c]
	ok := true
	for _, s := range v.toc.Segments[content.First : content.First+content.Segments] {
		off := at + s.Offset
		if !src.Holds(off, int64(s.Length)) {
			v.ev.Absent += int64(s.Length)
			continue
		}
		b := v.buf[:s.Length]
		if _, err := src.ReadAt(b, off); err != nil {
			return fmt.Errorf("read %s: %w", v.path(c), err)
		}
		v.ev.Checked += int64(s.Length)
		v.since += int64(s.Length)
		if s.ID.IsHole() {
			ok = ok && len(bytes.Trim(b, "\x00")) == 0
		} else {
			ok = ok && segment.Sum(b) == s.ID
		}
	}
	if !ok {
		v.bad = append(v.bad, c)
	}
	if v.since >= tellEvery {
		v.since = 0
		return v.emit(v.ev)
	}
	return nil
}

// path names a content by a path that has it.
func (v *Checker) path(c int32) string {
	if v.names == nil {
		v.names = toc.NamesOf(v.toc)
	}
	path, _ := v.names.Path(c)
	return path
}
