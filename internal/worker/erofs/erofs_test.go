package erofs

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/format/toc/toctest"
)

// anywhere places contents one after the other on one device.
func anywhere(t *toc.TOC) Options {
	starts := make([]uint32, len(t.Contents))
	next := uint32(0)
	for c := range t.Contents {
		starts[c] = next
		next += uint32(roundUp(t.Contents[c].Size, BlockSize) / BlockSize)
	}
	return Options{
		Devices: []Device{{Blocks: next}},
		Place:   func(c int) Extent { return Extent{Block: starts[c]} },
	}
}

func TestWriteIsDeterministic(t *testing.T) {
	images := make([][]byte, 2)
	for i := range images {
		b := build(awkward())
		var buf bytes.Buffer
		if err := Write(&buf, b.toc, anywhere(b.toc)); err != nil {
			t.Fatal(err)
		}
		images[i] = buf.Bytes()
	}
	if !bytes.Equal(images[0], images[1]) {
		t.Error("two images of one rootfs differ")
	}
}

func TestWriteRefuses(t *testing.T) {
	one := func(change func(*built, *Options)) error {
		root := newDir(0o755)
		root.children["d"] = newDir(0o755)
		root.children["d"].children["f"] = newFile(0o644, []byte("data"))
		root.children["l"] = newSymlink("target")
		root.children["n"] = &node{inode: toc.Inode{Mode: 0o020600, Major: 1, Minor: 3}}
		b := build(root)
		o := anywhere(b.toc)
		change(&b, &o)
		return Write(io.Discard, b.toc, o)
	}
	if err := one(func(*built, *Options) {}); err != nil {
		t.Fatal(err)
	}
	inode := func(b *built, path string) *toc.Inode {
		for i := range b.toc.Inodes {
			img := &Image{t: b.toc}
			if err := img.planDirs(); err != nil {
				t.Fatal(err)
			}
			if img.path(uint32(i)) == path {
				return &b.toc.Inodes[i]
			}
		}
		t.Fatalf("no %s", path)
		return nil
	}
	tests := []struct {
		name   string
		change func(*built, *Options)
		want   string
	}{
		{"no root", func(b *built, o *Options) { b.toc.Inodes = nil }, "no directory"},
		{"root is a file", func(b *built, o *Options) { b.toc.Inodes[0].Mode = 0o100644 }, "no directory"},
		{"device number", func(b *built, o *Options) { inode(b, "/n").Major = 4096 }, `"/n": device 4096:3`},
		{"file type", func(b *built, o *Options) { inode(b, "/n").Mode = 0o030000 }, `"/n": mode`},
		{"target", func(b *built, o *Options) {
			n := inode(b, "/l")
			n.Target, n.Size = strings.Repeat("t", 4096), 4096
		}, `"/l": symlink target of 4096 bytes`},
		{"no target", func(b *built, o *Options) {
			n := inode(b, "/l")
			n.Target, n.Size = "", 0
		}, `"/l": symlink target`},
		{"size without content", func(b *built, o *Options) { inode(b, "/d/f").Content = -1 }, `"/d/f": 4 bytes, but no content`},
		{"size of content", func(b *built, o *Options) { inode(b, "/d/f").Size = 5 }, `"/d/f": 5 bytes`},
		{"content out of range", func(b *built, o *Options) { inode(b, "/d/f").Content = 1 }, `"/d/f": 4 bytes`},
		{"too large", func(b *built, o *Options) {
			inode(b, "/d/f").Size = 1 << 44
			b.toc.Contents[0].Size = 1 << 44
		}, `"/d/f": 17592186044416 bytes, at most`},
		{"nanoseconds", func(b *built, o *Options) { inode(b, "/d/f").MtimeNsec = 1e9 }, "nanoseconds"},
		{"device", func(b *built, o *Options) { o.Place = func(int) Extent { return Extent{Device: 1} } }, "device 1 of 1"},
		{"place", func(b *built, o *Options) { o.Place = func(int) Extent { return Extent{Block: 1} } }, "blocks 1 to 2 of device 0, which has 1"},
		{"devices", func(b *built, o *Options) { o.Devices = make([]Device, 1<<16) }, "65536 devices"},
		{"xattr set", func(b *built, o *Options) { inode(b, "/d/f").Xattrs = 1 }, "xattr set 1 of 1"},
		{"xattr value", func(b *built, o *Options) {
			b.toc.Xattrs[0] = []toc.Xattr{{Name: "user.x", Value: make([]byte, 1<<16)}}
		}, "user.x"},
		{"xattrs", func(b *built, o *Options) {
			for i := range 5 {
				b.toc.Xattrs[0] = append(b.toc.Xattrs[0], toc.Xattr{Name: "user." + string(rune('a'+i)), Value: make([]byte, 60_000)})
			}
			b.toc.Inodes = b.toc.Inodes[:1]
			b.toc.Dirents = nil
			b.toc.Inodes[0].Children = 0
		}, "of 300052 bytes"},
		{"order of names", func(b *built, o *Options) { b.toc.Dirents[0].Name = "z" }, "not sorted"},
		{"long name", func(b *built, o *Options) { b.toc.Dirents[0].Name = strings.Repeat("a", 256) }, "1 to 255"},
		{"no name", func(b *built, o *Options) { b.toc.Dirents[0].Name = "" }, "1 to 255"},
		{"inode out of range", func(b *built, o *Options) { b.toc.Dirents[0].Inode = 99 }, "inode 99"},
		{"loop", func(b *built, o *Options) { b.toc.Dirents[0].Inode = 0 }, "breadth-first"},
		{"lost name", func(b *built, o *Options) { b.toc.Inodes[0].Children-- }, "children"},
		{"children out of range", func(b *built, o *Options) { b.toc.Inodes[0].Children = 1 << 31 }, "children"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			err := one(tt.change)
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got error %v, want one with %q", err, tt.want)
			}
		})
	}
}

// A writer that fails after some bytes.
type failing struct{ left int }

var errFull = errors.New("no space left")

func (f *failing) Write(p []byte) (int, error) {
	if f.left -= len(p); f.left < 0 {
		return 0, errFull
	}
	return len(p), nil
}

func TestWriteReportsErrors(t *testing.T) {
	table := toctest.Synthetic(20_000, 1)
	for _, left := range []int{0, bufferSize, 3 * bufferSize} {
		if err := Write(&failing{left}, table, anywhere(table)); !errors.Is(err, errFull) {
			t.Errorf("after %d bytes: got %v", left, err)
		}
	}
}

func TestHolesAreNotPlaced(t *testing.T) {
	root := newDir(0o755)
	root.children["hole"] = newFile(0o644, make([]byte, 1<<20))
	root.children["hole"].hole = true
	b := build(root)
	if !b.toc.Segments[0].ID.IsHole() || b.toc.Contents[0].ID == (segment.ID{}) {
		t.Fatal("the tree has no hole")
	}
	o := Options{Place: func(int) Extent { t.Error("asked for the place of a hole"); return Extent{} }}
	if err := Write(io.Discard, b.toc, o); err != nil {
		t.Fatal(err)
	}
}

func TestChunkBits(t *testing.T) {
	for _, tt := range []struct {
		size   int64
		bits   int
		chunks int64
	}{
		{1, 0, 1}, {4096, 0, 1}, {4097, 1, 1}, {8192, 1, 1}, {8193, 2, 1},
		{1 << 43, 31, 1}, {1<<43 + 1, 31, 2}, {1<<44 - 4096, 31, 2},
	} {
		if bits, chunks := chunkBits(tt.size); bits != tt.bits || chunks != tt.chunks {
			t.Errorf("%d bytes: %d bits, %d chunks, want %d, %d", tt.size, bits, chunks, tt.bits, tt.chunks)
		}
	}
}

func BenchmarkWrite(b *testing.B) {
	t := toctest.Synthetic(84_000, 1)
	o := anywhere(t)
	var size countWriter
	b.ReportAllocs()
	before := cpuTime(b)
	for b.Loop() {
		size = 0
		if err := Write(&size, t, o); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64((cpuTime(b)-before).Milliseconds())/float64(b.N), "cpu-ms/op")
	b.ReportMetric(float64(size)/1e6, "image-MB")
	b.ReportMetric(float64(len(t.Dirents)), "names")
}

func BenchmarkPlan(b *testing.B) {
	t := toctest.Synthetic(84_000, 1)
	o := anywhere(t)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := Plan(t, o); err != nil {
			b.Fatal(err)
		}
	}
}

// cpuTime is what this process has used; on a busy machine it tells more than
// the clock.
func cpuTime(tb testing.TB) time.Duration {
	tb.Helper()
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		tb.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

type countWriter int64

func (c *countWriter) Write(p []byte) (int, error) {
	*c += countWriter(len(p))
	return len(p), nil
}
