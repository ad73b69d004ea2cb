package check

import (
	"bytes"
	"testing"

	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
)

// What a rootfs of large files pays when it is complete: for bytes, and for holes.
func BenchmarkHashContent(b *testing.B) {
	const size = 64 << 20
	for name, id := range map[string]segment.ID{"bytes": {1}, "holes": {}} {
		b.Run(name, func(b *testing.B) {
			var segments []toc.Segment
			for off := int64(0); off < size; off += segment.MaxLength {
				segments = append(segments, toc.Segment{ID: id, Offset: off, Length: segment.MaxLength})
			}
			src := bytes.NewReader(make([]byte, size))
			var h contentHash
			b.SetBytes(size)
			for b.Loop() {
				if _, err := h.of(b.Context(), src, 0, segments); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
