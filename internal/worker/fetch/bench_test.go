package fetch

import (
	"context"
	"encoding/binary"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/worker/arena"
	"hydrofoil.dev/foil/internal/worker/remote"
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
				case len(p) >= segment.FrameAlone:
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

// BenchmarkPipeline decodes, verifies and writes real files, on one core, and
// reports contents by wall clock and by processor time.
func BenchmarkPipeline(b *testing.B) {
	t, frames, total := realFiles(b, 400<<20)
	moved := 0
	for _, f := range frames {
		moved += len(f.bytes)
	}
	b.Logf("%d contents in %d frames: %d bytes, compressed %d", len(t.Contents), len(frames), total, moved)
	dir := b.TempDir()
	var buf []byte
	measure(b, total, func() func() {
		l, err := arena.NewLayout(t, nil)
		if err != nil {
			b.Fatal(err)
		}
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
		return func() {
			if err := a.Remove(); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// measure runs f, which returns what cleans up after it.
func measure(b *testing.B, bytes int64, f func() func()) {
	b.SetBytes(bytes)
	var spent time.Duration
	for b.Loop() {
		before := processorTime()
		cleanUp := f()
		spent += processorTime() - before
		b.StopTimer()
		cleanUp()
		b.StartTimer()
	}
	b.ReportMetric(float64(bytes)*float64(b.N)/1e6/spent.Seconds(), "MB/cpu-s")
}

// processorTime returns what this process has used.
func processorTime() time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		panic(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkPull pulls real files: the server's part (writing frames that are
// ready to a socket), HTTP/2, the pipeline, and the final sync.
func BenchmarkPull(b *testing.B) {
	t, frames, total := realFiles(b, 400<<20)
	plan := &bundle.Plan{}
	for _, f := range frames {
		plan.Frames = append(plan.Frames, bundle.PlanFrame{
			MaxLength: uint32(len(f.bytes)), RawLength: uint32(f.raw),
			First: uint32(len(plan.Segments)), Segments: uint32(len(f.segments)),
		})
		plan.Segments = append(plan.Segments, f.segments...)
		plan.MaxBytes += bundle.SectionLength(len(f.bytes))
		plan.ContentBytes += int64(f.raw)
	}
	img := newImage(b, []byte("x"))
	header := img.Image
	header.Segments = uint32(len(t.Segments))
	header.TOC = nil // it would have to have names; Open knows it
	s := &http.Server{Protocols: new(http.Protocols), Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		out := bundle.NewWriter(w)
		out.Hello(bundle.Hello{Version: 1, Stream: "s"})
		out.Image(&header)
		out.Plan(plan)
		for i, f := range frames {
			out.Frame(uint32(i), f.bytes)
		}
		out.End()
	})}
	s.Protocols.SetUnencryptedHTTP2(true)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	go s.Serve(l)
	defer s.Close()
	c, err := remote.New(remote.Options{Base: "http://" + l.Addr().String()})
	if err != nil {
		b.Fatal(err)
	}
	defer c.Close()
	dir := b.TempDir()
	measure(b, total, func() func() {
		var a *arena.Arena
		p := Start(context.Background(), Options{
			Client: c,
			Request: bundle.Request{
				Versions: []int{1},
				Image:    bundle.ImageRequest{Repository: "bench", Reference: "latest"},
				Have:     []bundle.Have{{ChainID: header.ChainID, TOC: header.TOCDigest, Present: []byte{}}},
			},
			Open: func(context.Context, *bundle.Image, *toc.TOC) (*arena.Arena, error) {
				layout, err := arena.NewLayout(t, nil)
				if err != nil {
					return nil, err
				}
				a, err = arena.Create(filepath.Join(dir, "a"), layout)
				return a, err
			},
		})
		if err := p.Wait(); err != nil {
			b.Fatal(err)
		}
		return func() {
			if err := a.Remove(); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// BenchmarkMemory reports what an arena and a pull of it keep on the heap, in
// bytes a segment, for an image of 84,000 small files.
func BenchmarkMemory(b *testing.B) {
	const files = 84000
	t := &toc.TOC{ChainID: "sha256:bench"}
	plan := &bundle.Plan{}
	for i := range files {
		id := segment.Sum(binary.BigEndian.AppendUint32(nil, uint32(i)))
		t.Contents = append(t.Contents, toc.Content{ID: id, Size: 5000, First: uint32(i), Segments: 1})
		t.Segments = append(t.Segments, toc.Segment{ID: id, Length: 5000})
		if i%20 == 0 {
			plan.Frames = append(plan.Frames, bundle.PlanFrame{MaxLength: 40000, RawLength: 100000, First: uint32(i), Segments: 20})
		}
		plan.Segments = append(plan.Segments, uint32(i))
	}
	dir := b.TempDir()
	for b.Loop() {
		before := heap()
		l, err := arena.NewLayout(t, nil)
		if err != nil {
			b.Fatal(err)
		}
		a, err := arena.Create(filepath.Join(dir, "a"), l)
		if err != nil {
			b.Fatal(err)
		}
		copied := *plan
		copied.Frames, copied.Segments = slices.Clone(plan.Frames), slices.Clone(plan.Segments)
		s, err := newIndex(&copied, l, nil)
		if err != nil {
			b.Fatal(err)
		}
		b.ReportMetric(float64(heap()-before)/files, "B/segment")
		runtime.KeepAlive(s)
		if err := a.Remove(); err != nil {
			b.Fatal(err)
		}
	}
}

func heap() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}
