package startup

import (
	"context"
	"fmt"
	"hash/crc32"
	"io"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/server/objects"
)

// Examine reads all of a store of pages and compares it with its checksums and digests; t must be the TOC of its image, d its
// digest. Errors: ErrCorrupt; segment.ErrCorrupt; objects.ErrNotFound.
func Examine(ctx context.Context, store objects.Store, key string, t *toc.TOC, d digest.Digest) (read int64, err error) {
	s, err := open(ctx, store, key, t, d)
	if err != nil {
		return 0, err
	}
	object, err := store.Open(ctx, key, int64(len(magic)), -1)
	if err != nil {
		return 0, fmt.Errorf("examine startup pages: %w", err)
	}
	defer object.Close()
	var encoded, raw []byte
	for i := range s.Frames {
		f := &s.Frames[i]
		encoded = append(encoded[:0], make([]byte, f.Length)...)
		if _, err := io.ReadFull(object, encoded); err != nil {
			return 0, fmt.Errorf("examine startup pages %s: %w", key, err)
		}
		if raw, err = s.check(f, encoded, raw, t); err != nil {
			return 0, fmt.Errorf("examine startup pages %s: frame %d: %w", key, i, err)
		}
	}
	return s.bytes, nil
}

// check compares a frame with its checksum, and its runs with their digests. raw is used again.
func (s *Store) check(f *Frame, encoded, raw []byte, t *toc.TOC) ([]byte, error) {
	if crc32.Checksum(encoded, castagnoli) != f.Sum {
		return raw, fmt.Errorf("%w: another checksum", ErrCorrupt)
	}
	raw, err := segment.DecodeFrame(raw[:0], encoded, int(f.Raw))
	if err != nil {
		return raw, fmt.Errorf("%w: %w", ErrCorrupt, err)
	}
	rest := raw
	for n := f.First; n < f.First+f.Count; n++ {
		_, length := s.Runs[n].Range(t.Contents[s.Runs[n].Content].Size)
		if segment.Sum(rest[:length]) != s.Digests[n] {
			return raw, fmt.Errorf("%w: run %d has other bytes", ErrCorrupt, n-f.First)
		}
		rest = rest[length:]
	}
	return raw, nil
}
