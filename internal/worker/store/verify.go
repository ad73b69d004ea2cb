package store

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/contents"
	"hydrofoil.dev/foil/internal/worker/mounts"
	"hydrofoil.dev/foil/internal/worker/records"
	"hydrofoil.dev/foil/internal/worker/rootfs"
)

// Verify compares every local byte of a rootfs with its digest: the TOC and
// the metadata image, and of every content what is here, segment by segment.
// Bytes that have not arrived are counted, and are no error. The caller uses r.
func (s *Store) Verify(ctx context.Context, r *Rootfs, emit func(api.VerifyEvent) error) error {
	have, err := r.Read()
	if err != nil {
		return api.Errorf(api.CodeCorrupt, "%w: remove the image with `foil rm` and pull it again", err)
	}
	ev := api.VerifyEvent{Total: r.ContentBytes()}
	bad := func(what string) error {
		ev.Bad = what
		err := emit(ev)
		ev.Bad = ""
		return err
	}
	meta := r.Record().Meta
	if meta != "" {
		got, err := records.Sum(r.Path(mounts.Image))
		if err != nil {
			return err
		}
		if got != meta {
			if err := bad("(metadata image)"); err != nil {
				return err
			}
		}
	}
	v := verifier{s: s, toc: have.TOC, ev: &ev, emit: emit, buf: make([]byte, segment.MaxLength)}
	for i, id := range r.Arenas() {
		if err := v.arena(ctx, id, have.Place.In(i)); err != nil {
			return err
		}
	}
	for _, c := range v.bad {
		if err := bad(v.path(c)); err != nil {
			return err
		}
	}
	ev.Done = true
	return emit(ev)
}

type verifier struct {
	s     *Store
	toc   *toc.TOC
	ev    *api.VerifyEvent
	emit  func(api.VerifyEvent) error
	buf   []byte
	bad   []int32
	names *toc.Names
	since int64 // bytes since the last event
}

// arena verifies the contents that lie in the arena of one rootfs.
func (v *verifier) arena(ctx context.Context, id digest.Digest, here []int32) (failed error) {
	var leases Leases
	defer leases.End()
	v.s.mu.Lock()
	r := v.s.ownerLocked(id)
	if r != nil {
		leases.Take(r)
	}
	v.s.mu.Unlock()
	var src *rootfs.Contents
	if r != nil {
		src = r.Contents()
	}
	if src == nil {
		return api.Errorf(api.CodeCorrupt, "the arena of rootfs %s is gone: remove the image with `foil rm` and pull it again", id)
	}
	defer func() { failed = errors.Join(failed, src.Close()) }()
	contentID := func(c int32) *segment.ID { return &v.toc.Contents[c].ID }
	segment.Sort(here, contentID)
	found := 0
	src.List.Join(here, contentID, func(c int32, off int64, kind contents.Kind) {
		if kind == contents.Piece || failed != nil {
			return
		}
		found++
		if failed = context.Cause(ctx); failed == nil {
			failed = v.content(src, c, off, src.Holds)
		}
	})
	if failed == nil && found != len(here) {
		failed = api.Errorf(api.CodeCorrupt, "the arena of rootfs %s holds %d of the %d contents placed in it: remove the image with `foil rm` and pull it again", id, found, len(here))
	}
	return failed
}

// content verifies one content at its place.
func (v *verifier) content(file io.ReaderAt, c int32, at int64, present func(off, n int64) bool) error {
	content := &v.toc.Contents[c]
	ok := true
	for _, s := range v.toc.Segments[content.First : content.First+content.Segments] {
		off := at + s.Offset
		if !present(off, int64(s.Length)) {
			v.ev.Absent += int64(s.Length)
			continue
		}
		b := v.buf[:s.Length]
		if _, err := file.ReadAt(b, off); err != nil {
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
	if v.since >= 32<<20 {
		v.since = 0
		return v.emit(*v.ev)
	}
	return nil
}

// path names a content by a path that has it.
func (v *verifier) path(c int32) string {
	if v.names == nil {
		v.names = toc.NamesOf(v.toc)
	}
	path, _ := v.names.Path(c)
	return path
}
