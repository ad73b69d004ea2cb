package fetch

import (
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/worker/arena"
)

// benchFrame is a frame and the segments (indices into the TOC's) that it holds.
type benchFrame struct {
	bytes    []byte
	raw      int
	segments []uint32
}

// realFiles splits files of this machine into a TOC and its frames, up to max
// bytes of contents: libraries and what lies in /usr/share, as images have them.
func realFiles(b *testing.B, max int64) (*toc.TOC, []benchFrame, int64) {
	b.Helper()
	t := &toc.TOC{ChainID: "sha256:bench"}
	seen := map[segment.ID]bool{}
	var frames []benchFrame
	var total int64
	var small [][]byte
	var smallAt []uint32
	smallSize := 0
	flush := func(bs [][]byte, at []uint32) {
		if len(bs) == 0 {
			return
		}
		raw := 0
		for _, s := range bs {
			raw += len(s)
		}
		f, err := segment.AppendFrame(nil, segment.Zstd, bs...)
		if err != nil {
			b.Fatal(err)
		}
		frames = append(frames, benchFrame{f, raw, append([]uint32(nil), at...)})
	}
	sp := segment.NewSplitter(nil)
	for _, root := range []string{"/usr/lib/x86_64-linux-gnu", "/usr/share", "/usr/lib/python3", "/usr/lib/python3.11"} {
		var here int64
		filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			if err != nil || !d.Type().IsRegular() || here > max/4 || total >= max {
				return nil
			}
			f, err := os.Open(path)
			if err != nil {
				return nil
			}
			defer f.Close()
			sp.Reset(f)
			c := toc.Content{First: uint32(len(t.Segments))}
			var pieces [][]byte
			for {
				p, err := sp.Next()
				if err != nil {
					break
				}
				t.Segments = append(t.Segments, toc.Segment{ID: p.ID, Offset: p.Offset, Length: p.Length})
				pieces = append(pieces, append([]byte(nil), p.Bytes...))
			}
			c.ID, c.Size = sp.Content()
			c.Segments = uint32(len(pieces))
			if c.Size == 0 || seen[c.ID] {
				t.Segments = t.Segments[:c.First]
				return nil
			}
			seen[c.ID] = true
			t.Contents = append(t.Contents, c)
			here += c.Size
			total += c.Size
			for i, p := range pieces {
				at := c.First + uint32(i)
				switch {
				case len(p) == 0:
				case len(p) >= segment.FrameTarget:
					flush([][]byte{p}, []uint32{at})
				default:
					small, smallAt, smallSize = append(small, p), append(smallAt, at), smallSize+len(p)
					if smallSize >= segment.FrameTarget {
						flush(small, smallAt)
						small, smallAt, smallSize = nil, nil, 0
					}
				}
			}
			return nil
		})
	}
	flush(small, smallAt)
	return t, frames, total
}

// BenchmarkPipeline decodes, verifies and writes real files, on one core.
func BenchmarkPipeline(b *testing.B) {
	t, frames, total := realFiles(b, 400<<20)
	moved := 0
	for _, f := range frames {
		moved += len(f.bytes)
	}
	l, err := arena.NewLayout(t, nil)
	if err != nil {
		b.Fatal(err)
	}
	b.Logf("%d contents, %d segments, %d frames, %d bytes, compressed %d", len(t.Contents), len(t.Segments), len(frames), total, moved)
	b.SetBytes(total)
	dir := b.TempDir()
	var buf []byte
	for b.Loop() {
		a, err := arena.Create(filepath.Join(dir, "a"), l)
		if err != nil {
			b.Fatal(err)
		}
		for _, f := range frames {
			if buf, err = segment.DecodeFrame(buf[:0], f.bytes, f.raw); err != nil {
				b.Fatal(err)
			}
			rest := buf
			for _, s := range f.segments {
				n := l.Segment(int(s)).Length
				if err := a.WriteSegment(int(s), rest[:n]); err != nil {
					b.Fatal(err)
				}
				rest = rest[n:]
			}
		}
		b.StopTimer()
		if err := a.Remove(); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
	}
}
