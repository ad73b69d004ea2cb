package store

import (
	"context"
	"crypto/sha256"
	"fmt"
	"hash"
	"io"

	"hydrofoil.dev/foil/internal/durable"
	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/contents"
)

// mostHoles is how many bytes of holes of one rootfs are hashed: zeros cost processor time, and a TOC can name
// petabytes of them. A rootfs with more lends only what is one segment.
const mostHoles = 64 << 30

// hash hashes the contents in r's own arena that are not one segment with the content's ID: their segments were
// verified each for itself, and nothing has said yet that together they are the content. hashed is false when
// some were left out. A content that is not what its ID says has r quarantined.
//
// Errors: api.CodeCorrupt for such a content; those of reading.
func (s *Store) hash(ctx context.Context, r *Rootfs) (hashed bool, err error) {
	src := r.Contents()
	if src == nil || r.Own() < 0 {
		return src != nil, nil
	}
	defer func() { _ = src.Close() }()
	have, err := r.Read()
	if err != nil {
		return false, err
	}
	l, err := r.Layout(have)
	if err != nil {
		return false, err
	}
	t, holes := have.TOC, int64(mostHoles)
	hashed = true
	var h contentHash
	for _, c := range have.Place.In(r.Own()) {
		if !contents.IsComposed(t, int(c)) {
			continue
		}
		off, ok := l.Offset(int(c))
		if !ok {
			return false, fmt.Errorf("its arena has no place for content %s", t.Contents[c].ID)
		}
		content := &t.Contents[c]
		segments := t.Segments[content.First : content.First+content.Segments]
		zeros := int64(0)
		for _, seg := range segments {
			if seg.ID.IsHole() {
				zeros += int64(seg.Length)
			}
		}
		if holes -= zeros; holes < 0 {
			hashed = false
			continue
		}
		got, err := h.of(ctx, src, off, segments)
		if err != nil {
			return false, err
		}
		if got != content.ID {
			err := api.Errorf(api.CodeCorrupt, "content %s was hashed whole, and is %s: the server named it falsely; nothing of it is used for other images. Remove the image with `foil rm`, and ask who runs its registry", content.ID, got)
			return false, s.Quarantine(r, err)
		}
	}
	return hashed, nil
}

// Quarantine has nothing served from r any more, now and by a new daemon. It returns why, or what it failed of as
// well.
func (s *Store) Quarantine(r *Rootfs, why error) error {
	r.Quarantine(why)
	rec := r.Record()
	if err := r.Save(&rec, durable.Replace); err != nil {
		return fmt.Errorf("%w; and that cannot be noted: %w", why, err)
	}
	return why
}

// contentHash hashes contents, one after the other.
type contentHash struct {
	sum  hash.Hash
	buf  []byte
	zero [64 << 10]byte
}

// of returns the digest of a content whose segments lie at off of src.
func (h *contentHash) of(ctx context.Context, src io.ReaderAt, off int64, segments []toc.Segment) (id segment.ID, err error) {
	if h.sum == nil {
		h.sum, h.buf = sha256.New(), make([]byte, segment.MaxLength)
	}
	h.sum.Reset()
	for _, seg := range segments {
		if err := context.Cause(ctx); err != nil {
			return id, err
		}
		if seg.ID.IsHole() { // nothing is ever written there
			for n := int(seg.Length); n > 0; n -= len(h.zero) {
				h.sum.Write(h.zero[:min(n, len(h.zero))])
			}
			continue
		}
		b := h.buf[:seg.Length]
		if _, err := src.ReadAt(b, off+seg.Offset); err != nil {
			return id, fmt.Errorf("hash what is in place of segment %s: %w", seg.ID, err)
		}
		h.sum.Write(b)
	}
	h.sum.Sum(id[:0])
	return id, nil
}
