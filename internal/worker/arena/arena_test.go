package arena

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/format/trace"
)

// piece is a segment of a test's content: n bytes that seed decides, or n zeros
// when seed is 0.
type piece struct {
	seed uint64
	n    int
}

func (p piece) bytes() []byte {
	b := make([]byte, p.n)
	if p.seed == 0 {
		return b
	}
	r := rand.New(rand.NewPCG(p.seed, uint64(p.n)))
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	b[0] = 1
	return b
}

// makeTOC returns a TOC of contents made of pieces, and the bytes of its
// segments (nil: a hole).
func makeTOC(contents ...[]piece) (*toc.TOC, [][]byte) {
	t := &toc.TOC{ChainID: "sha256:aa"}
	var data [][]byte
	for _, pieces := range contents {
		c := toc.Content{First: uint32(len(t.Segments)), Segments: uint32(len(pieces))}
		var all []byte
		for _, p := range pieces {
			s := toc.Segment{Offset: c.Size, Length: uint32(p.n)}
			b := p.bytes()
			all = append(all, b...)
			if p.seed == 0 {
				b = nil
			} else {
				s.ID = segment.Sum(b)
			}
			data = append(data, b)
			t.Segments = append(t.Segments, s)
			c.Size += int64(p.n)
		}
		c.ID = segment.Sum(all)
		t.Contents = append(t.Contents, c)
	}
	return t, data
}

func layout(t testing.TB, c *toc.TOC, in func(int) bool) *Layout {
	t.Helper()
	l, err := NewLayout(c, in)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// example has small contents, one that ends with a block, one of several
// segments that share blocks, holes, and a segment that occurs three times.
func example() (*toc.TOC, [][]byte) {
	return makeTOC(
		[]piece{{1, 10}},
		[]piece{{2, 4096}},
		[]piece{{3, 5000}, {4, 100}, {5, 100}, {6, 9000}},
		[]piece{{7, 3000}, {0, 70000}, {7, 3000}, {8, 1}},
		[]piece{{0, 20000}},
		[]piece{{7, 3000}},
		[]piece{{9, 4097}},
	)
}

func TestLayout(t *testing.T) {
	c, _ := example()
	l := layout(t, c, func(i int) bool { return i != 1 && i != 4 })
	var got [][2]int64
	for i := range c.Contents {
		off, ok := l.Offset(i)
		if !ok {
			off = -1
		}
		got = append(got, [2]int64{int64(i), off})
	}
	want := [][2]int64{{0, 0}, {1, -1}, {2, 4096}, {3, 20480}, {4, -1}, {5, 98304}, {6, 102400}}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("offsets (-want +got):\n%s", d)
	}
	if l.Size() != 110592 || l.ContentBytes() != 10+14200+76001+3000+4097 || l.Segments() != 11 || l.Blocks() != 27 {
		t.Errorf("size %d, contents %d, segments %d, blocks %d", l.Size(), l.ContentBytes(), l.Segments(), l.Blocks())
	}
	for i := range l.Segments() {
		k := l.TOCSegment(i)
		if back, ok := l.FromTOC(k); !ok || back != i {
			t.Errorf("segment %d: TOC %d, back %d %v", i, k, back, ok)
		}
		s := l.Segment(i)
		if s.ID != c.Segments[k].ID || s.Length != int(c.Segments[k].Length) {
			t.Errorf("segment %d is not the TOC's %d", i, k)
		}
		off, _ := l.Offset(l.Content(i))
		if s.Offset != off+c.Segments[k].Offset {
			t.Errorf("segment %d at %d, want %d", i, s.Offset, off+c.Segments[k].Offset)
		}
	}
	for _, k := range []int{-1, 1, 10, 13, 1 << 40} {
		if i, ok := l.FromTOC(k); ok {
			t.Errorf("TOC segment %d is said to be segment %d", k, i)
		}
	}
	for _, tc := range []struct {
		off, n     int64
		first, end int
	}{
		{0, 1, 0, 1}, {0, 4096, 0, 1}, {0, 4097, 0, 2}, {10, 100, 1, 1}, {4096 + 4096, 4096, 1, 5},
		{4096 + 5000, 1, 2, 3}, {-100, 101, 0, 1}, {-100, 100, 0, 0}, {0, 1 << 62, 0, 11}, {110592, 1, 0, 0},
		{102400 + 4097, 10, 11, 11},
	} {
		if first, end := l.SegmentsIn(tc.off, tc.n); first != tc.first || end != tc.end {
			t.Errorf("SegmentsIn(%d, %d) = %d, %d, want %d, %d", tc.off, tc.n, first, end, tc.first, tc.end)
		}
	}
	if d := cmp.Diff([]int{5, 7, 9}, l.Find(nil, c.Segments[6].ID)); d != "" {
		t.Errorf("Find: %s", d)
	}
	for i, want := range map[int][]int{7: {5, 7, 9}, 0: {0}, 6: {6}} {
		if d := cmp.Diff(want, l.Same(nil, i)); d != "" {
			t.Errorf("Same(%d): %s", i, d)
		}
	}
	if got := l.Find(nil, segment.ID{}); got != nil {
		t.Errorf("a hole is found at %v", got)
	}
	if got := l.Find(nil, c.Segments[1].ID); got != nil {
		t.Errorf("a segment that is left out is found at %v", got)
	}
	if layout(t, c, nil).Digest() == l.Digest() {
		t.Error("two layouts have one digest")
	}
}

func TestLayoutRefuses(t *testing.T) {
	for name, change := range map[string]func(*toc.TOC){
		"gap":               func(c *toc.TOC) { c.Segments[3].Offset++ },
		"short":             func(c *toc.TOC) { c.Contents[2].Size++ },
		"long":              func(c *toc.TOC) { c.Contents[2].Size-- },
		"empty segment":     func(c *toc.TOC) { c.Segments[0].Length = 0 },
		"no segments":       func(c *toc.TOC) { c.Contents[0].Segments = 0 },
		"empty":             func(c *toc.TOC) { c.Contents[0].Size = 0 },
		"out of range":      func(c *toc.TOC) { c.Contents[6].First = 1 << 31 },
		"overflow":          func(c *toc.TOC) { c.Contents[6].First, c.Contents[6].Segments = 1<<32-1, 1<<32-1 },
		"overlap":           func(c *toc.TOC) { c.Contents[5].First = 6 },
		"8 EiB":             func(c *toc.TOC) { c.Contents[0].Size = 1<<63 - 1 },
		"counts do not sum": func(c *toc.TOC) { c.Contents = append(c.Contents, c.Contents...) },
	} {
		c, _ := example()
		change(c)
		if _, err := NewLayout(c, nil); err == nil {
			t.Errorf("%s: laid out", name)
		}
	}
}

func TestCreateFails(t *testing.T) {
	c, _ := example()
	l := layout(t, c, nil)
	dir := t.TempDir()
	a, err := Create(filepath.Join(dir, "a"), l)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	if _, err := Create(filepath.Join(dir, "a"), l); !errors.Is(err, fs.ErrExist) {
		t.Errorf("second Create: %v", err)
	}
	if _, err := Open(filepath.Join(dir, "b"), l); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("Open of nothing: %v", err)
	}
	huge := layout(t, c, nil)
	huge.size = 1 << 61
	_, err = Create(filepath.Join(dir, "huge"), huge)
	if !errors.Is(err, unix.EFBIG) || !strings.Contains(err.Error(), "for this filesystem") {
		t.Errorf("Create of 2 EiB: %v", err)
	}
	if names, _ := os.ReadDir(filepath.Join(dir, "huge")); len(names) != 0 {
		t.Errorf("it left %v", names)
	}
}

// contents is what the arena file must hold once all of data is there.
func contents(l *Layout, data [][]byte) []byte {
	b := make([]byte, l.Size())
	for i := range l.Segments() {
		copy(b[l.Segment(i).Offset:], data[l.TOCSegment(i)])
	}
	return b
}

func TestWriteSegment(t *testing.T) {
	c, data := example()
	l := layout(t, c, nil)
	a, err := Create(t.TempDir(), l)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	if a.Missing() != 11 || a.ContentHere() != 90000 {
		t.Errorf("empty: missing %d, here %d", a.Missing(), a.ContentHere())
	}
	if err := a.WriteSegment(0, []byte("0123456789")); !errors.Is(err, ErrWrongBytes) {
		t.Errorf("wrong bytes: %v", err)
	}
	if err := a.WriteSegment(1, data[1][:4095]); !errors.Is(err, ErrWrongBytes) {
		t.Errorf("short: %v", err)
	}
	if err := a.WriteSegment(7, make([]byte, 70000)); !errors.Is(err, ErrWrongBytes) {
		t.Errorf("hole: %v", err)
	}
	if a.Missing() != 11 {
		t.Errorf("wrong bytes were marked")
	}
	// One segment in three places.
	if err := a.WriteSegment(8, data[8]); err != nil {
		t.Fatal(err)
	}
	for _, i := range []int{6, 8, 11} {
		if !a.HasSegment(i) {
			t.Errorf("segment %d, equal to 8, is absent", i)
		}
	}
	// Two tiny segments in a block shared by four.
	off, _ := l.Offset(2)
	for _, i := range []int{5, 3, 4} {
		if err := a.WriteSegment(i, data[i]); err != nil {
			t.Fatal(err)
		}
		if a.Present(off+4096, 1) {
			t.Errorf("a block is present before its segment 2, after %d", i)
		}
	}
	if !a.Present(off+8192, 1000) {
		t.Error("a block of segment 5 alone is absent")
	}
	if d := cmp.Diff([]int{2}, a.AbsentSegments(nil, off, 1<<20)[:1]); d != "" {
		t.Errorf("AbsentSegments: %s", d)
	}
	if err := a.WriteSegment(2, data[2]); err != nil {
		t.Fatal(err)
	}
	if !a.Present(off, 14200) {
		t.Error("content 2 is absent")
	}
	for i, b := range data {
		if b != nil {
			if err := a.WriteSegment(i, b); err != nil {
				t.Fatal(err)
			}
		}
	}
	select {
	case <-a.Done():
	default:
		t.Error("not done")
	}
	if !a.Complete() || a.ContentHere() != l.ContentBytes() || !a.Present(0, l.Size()) {
		t.Errorf("complete %v, here %d of %d", a.Complete(), a.ContentHere(), l.ContentBytes())
	}
	got, err := os.ReadFile(filepath.Join(a.Dir(), FileName))
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, contents(l, data)) {
		t.Error("the file differs from the contents")
	}
}

func TestConcurrent(t *testing.T) {
	var all [][]piece
	r := rand.New(rand.NewPCG(1, 2))
	for i := range 200 {
		var p []piece
		for k := range 1 + r.IntN(4) {
			p = append(p, piece{uint64(1 + i*10 + k), 1 + r.IntN(6000)})
		}
		all = append(all, p)
	}
	c, data := makeTOC(all...)
	l := layout(t, c, nil)
	a, err := Create(t.TempDir(), l)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	want := contents(l, data)
	var readers, writers sync.WaitGroup
	for g := range 500 {
		r := rand.New(rand.NewPCG(3, uint64(g)))
		off := r.Int64N(l.Size())
		n := min(1+r.Int64N(100000), l.Size()-off)
		readers.Go(func() {
			if err := a.Wait(context.Background(), off, n); err != nil {
				t.Error(err)
				return
			}
			b := make([]byte, n)
			if _, err := a.File().ReadAt(b, off); err != nil {
				t.Error(err)
			}
			if !bytes.Equal(b, want[off:off+n]) {
				t.Errorf("bytes %d to %d are wrong", off, off+n)
			}
		})
	}
	for g := range 4 {
		order := rand.New(rand.NewPCG(4, uint64(g))).Perm(l.Segments())
		writers.Go(func() {
			for _, i := range order {
				if err := a.WriteSegment(i, data[i]); err != nil {
					t.Error(err)
				}
				if i%100 == 0 {
					if err := a.Sync(context.Background()); err != nil {
						t.Error(err)
					}
				}
			}
		})
	}
	for g := range 2 {
		order := rand.New(rand.NewPCG(5, uint64(g))).Perm(len(c.Contents))
		writers.Go(func() {
			for _, i := range order {
				at, _ := l.Offset(i)
				for first := range trace.Pages(c.Contents[i].Size) {
					r := trace.Run{Content: uint32(i), First: first, Blocks: 1}
					off, n := r.Range(c.Contents[i].Size)
					b := want[at+off:][:n]
					if _, err := a.WriteRun(r, segment.Sum(b), b); err != nil {
						t.Error(err)
					}
				}
			}
		})
	}
	readers.Wait()
	writers.Wait()
	if _, err := a.Settle(); err != nil {
		t.Error(err)
	}
	if n := a.ContentHere(); n != l.ContentBytes() {
		t.Errorf("%d bytes here, of %d", n, l.ContentBytes())
	}
	if !a.Complete() || a.waits.n.Load() != 0 || len(a.waits.byBlock) != 0 {
		t.Errorf("complete %v, %d waiters left in %d blocks", a.Complete(), a.waits.n.Load(), len(a.waits.byBlock))
	}
}

func TestWait(t *testing.T) {
	c, data := example()
	l := layout(t, c, nil)
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		a, err := Create(dir, l)
		if err != nil {
			t.Fatal(err)
		}
		wait := func(ctx context.Context, off, n int64) chan error {
			c := make(chan error, 1)
			go func() { c <- a.Wait(ctx, off, n) }()
			return c
		}
		pending := func(c chan error) {
			t.Helper()
			synctest.Wait()
			select {
			case err := <-c:
				t.Fatalf("did not wait: %v", err)
			default:
			}
		}
		ctx := context.Background()
		hole, _ := l.Offset(4)
		if err := a.Wait(ctx, hole, 20000); err != nil {
			t.Errorf("wait for a hole: %v", err)
		}
		both := wait(ctx, 0, 8192)
		pending(both)
		if err := a.WriteSegment(1, data[1]); err != nil {
			t.Fatal(err)
		}
		pending(both)
		if err := a.WriteSegment(0, data[0]); err != nil {
			t.Fatal(err)
		}
		if err := <-both; err != nil {
			t.Error(err)
		}
		// A reader that goes away.
		short, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		if err := <-wait(short, 8192, 1); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("after its time: %v", err)
		}
		// A failure, and its end.
		first, second := wait(ctx, 8192, 1), wait(ctx, 12288, 1)
		pending(first)
		pending(second)
		gone := errors.New("the server is gone")
		a.Fail(gone)
		for _, c := range []chan error{first, second, wait(ctx, 12288, 1)} {
			if err := <-c; !errors.Is(err, gone) {
				t.Errorf("after Fail: %v", err)
			}
		}
		if err := a.Wait(ctx, 0, 8192); err != nil {
			t.Errorf("present after Fail: %v", err)
		}
		a.Resume()
		third := wait(ctx, 8192, 1)
		pending(third)
		a.Close()
		if err := <-third; !errors.Is(err, ErrClosed) {
			t.Errorf("after Close: %v", err)
		}
		if err := a.Wait(ctx, 0, 1); !errors.Is(err, ErrClosed) {
			t.Errorf("wait after Close: %v", err)
		}
		if err := a.WriteSegment(2, data[2]); !errors.Is(err, ErrClosed) {
			t.Errorf("write after Close: %v", err)
		}
		if !a.Present(0, 8192) || a.Present(8192, 1) {
			t.Error("a closed arena has forgotten what was present, or made something up")
		}
		if a.waits.n.Load() != 0 {
			t.Errorf("%d waiters left", a.waits.n.Load())
		}
	})
}

func TestCopyFrom(t *testing.T) {
	c1, data := makeTOC([]piece{{1, 6000}, {2, 5000}})
	c2, _ := makeTOC([]piece{{2, 5000}, {3, 10}}, []piece{{1, 6000}, {2, 5000}})
	old, err := Create(filepath.Join(t.TempDir(), "old"), layout(t, c1, nil))
	if err != nil {
		t.Fatal(err)
	}
	defer old.Close()
	l := layout(t, c2, func(i int) bool { return i == 0 })
	a, err := Create(filepath.Join(t.TempDir(), "new"), l)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	if err := a.CopyFrom(old, 1, 0); err == nil {
		t.Error("copied what is absent")
	}
	if err := old.WriteSegment(1, data[1]); err != nil {
		t.Fatal(err)
	}
	if err := a.CopyFrom(old, 0, 0); !errors.Is(err, ErrWrongBytes) {
		t.Errorf("copied another segment: %v", err)
	}
	if err := a.CopyFrom(old, 1, 0); err != nil {
		t.Error(err)
	}
	if d := cmp.Diff([]byte{0b1}, a.PresentBitmap()); d != "" {
		t.Errorf("bitmap: %s", d)
	}
	// Rotten on the disk.
	if _, err := old.File().WriteAt([]byte("rot"), 7000); err != nil {
		t.Fatal(err)
	}
	b, err := NewLayout(c2, nil)
	if err != nil {
		t.Fatal(err)
	}
	third, err := Create(filepath.Join(t.TempDir(), "third"), b)
	if err != nil {
		t.Fatal(err)
	}
	defer third.Close()
	if err := third.CopyFrom(old, 1, 0); !errors.Is(err, ErrWrongBytes) {
		t.Errorf("copied rot: %v", err)
	}
	if third.HasSegment(0) {
		t.Error("rot is present")
	}
}

func TestVerify(t *testing.T) {
	c, data := example()
	l := layout(t, c, nil)
	a, err := Create(t.TempDir(), l)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	for i, b := range data {
		if b != nil && i != 12 {
			if err := a.WriteSegment(i, b); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, at := range []int64{
		l.Segment(1).Offset + 4000,
		l.Segment(0).Offset + 11,    // padding
		l.Segment(7).Offset + 50000, // a hole inside
		l.Segment(10).Offset,        // a hole that is all
	} {
		if _, err := a.File().WriteAt([]byte{0xff}, at); err != nil {
			t.Fatal(err)
		}
	}
	type result struct {
		Segment, Content int
		Absent, Bad      bool
	}
	var got []result
	if err := a.Verify(context.Background(), func(c Checked) error {
		if c.Absent || c.Err != nil {
			got = append(got, result{c.Segment, c.Content, c.Absent, errors.Is(c.Err, ErrWrongBytes)})
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	want := []result{{0, 0, false, true}, {1, 1, false, true}, {7, 3, false, true}, {10, 4, false, true}, {12, 6, true, false}}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("verified (-want +got):\n%s", d)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := a.Verify(ctx, func(Checked) error { return nil }); !errors.Is(err, context.Canceled) {
		t.Errorf("Verify after its context: %v", err)
	}
}

func TestOpenFile(t *testing.T) {
	c, data := example()
	l := layout(t, c, nil)
	dir := t.TempDir()
	a, err := Create(dir, l)
	if err != nil {
		t.Fatal(err)
	}
	if err := a.WriteSegment(0, data[0]); err != nil {
		t.Fatal(err)
	}
	fd, err := unix.FcntlInt(a.File().Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	a.Close()
	b, err := OpenFile(dir, os.NewFile(uintptr(fd), "arena"), l)
	if err != nil {
		t.Fatal(err)
	}
	if !b.HasSegment(0) || b.Missing() != 10 {
		t.Errorf("missing %d after a daemon's death", b.Missing())
	}
	other, err := os.Create(filepath.Join(t.TempDir(), "x"))
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	if _, err := OpenFile(dir, other, l); err == nil {
		t.Error("took a descriptor of another file")
	}
	if err := b.Remove(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("after Remove: %v", err)
	}
	if err := Remove(dir); err != nil {
		t.Errorf("second Remove: %v", err)
	}
}

// TestFailedSync checks that what a disk may have lost is taken back.
func TestFailedSync(t *testing.T) {
	c, data := example()
	l := layout(t, c, nil)
	dir := t.TempDir()
	a, err := Create(dir, l)
	if err != nil {
		t.Fatal(err)
	}
	if err := a.WriteSegment(0, data[0]); err != nil {
		t.Fatal(err)
	}
	if err := a.Sync(context.Background()); err != nil {
		t.Fatal(err)
	}
	if err := a.WriteSegment(1, data[1]); err != nil {
		t.Fatal(err)
	}
	// fdatasync of a pipe fails with EINVAL.
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	if a.conn, err = w.SyscallConn(); err != nil {
		t.Fatal(err)
	}
	if err := a.Sync(context.Background()); !errors.Is(err, unix.EINVAL) {
		t.Fatalf("Sync: %v", err)
	}
	if !a.HasSegment(0) || a.HasSegment(1) || a.Missing() != 10 || a.ContentHere() != 90010 {
		t.Errorf("after a failed Sync: missing %d, here %d", a.Missing(), a.ContentHere())
	}
	if err := a.Wait(context.Background(), 4096, 1); !errors.Is(err, unix.EINVAL) {
		t.Errorf("a read: %v", err)
	}
	if err := a.Sync(context.Background()); !errors.Is(err, unix.EINVAL) {
		t.Errorf("a second Sync: %v", err)
	}
	a.Close()
	b, err := Open(dir, l)
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	if !b.HasSegment(0) || b.HasSegment(1) {
		t.Error("reopened, it believes what was not durable")
	}
}
