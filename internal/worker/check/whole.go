package check

import (
	"context"
	"crypto/sha256"
	"fmt"
	"hash"
	"io"

	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/kernel"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/contents"
)

// mostHoles is how many bytes of holes of one rootfs are hashed: zeros cost processor time, and a TOC can name
// petabytes of them. A rootfs with more lends only what is one segment.
const mostHoles = 64 << 30

// Whole hashes contents that are not one segment with the content's ID: their segments were verified each for itself,
// and nothing has said yet that together they are the content. here are the contents that lie in src, offset their
// places, in bytes. hashed is false when some were left out.
//
// Errors: api.CodeCorrupt for a content that is not what its ID says; those of reading.
func Whole(ctx context.Context, src io.ReaderAt, t *toc.TOC, here []int32, offset func(c int) (off int64, ok bool)) (hashed bool, err error) {
	// Nobody waits for it: what it reads is here, and can be used.
	priority := kernel.OwnPriority()
	defer priority.End()
	priority.SetLow(true)
	var h contentHash
	holes := int64(mostHoles)
	hashed = true
	for _, c := range here {
		if !contents.IsComposed(t, int(c)) {
			continue
		}
		off, ok := offset(int(c))
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
			return false, api.Errorf(api.CodeCorrupt, "content %s was hashed whole, and is %s: the server named it falsely; nothing of it is used for other images. Remove the image with `foil rm`, and ask who runs its registry", content.ID, got)
		}
	}
	return hashed, nil
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
