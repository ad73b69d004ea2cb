package arena

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"unsafe"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/trace"
)

// runArena has one content of four segments, none of which ends with a page,
// and another that repeats the second of them.
func runArena(t *testing.T) (a *Arena, data [][]byte, all []byte) {
	t.Helper()
	c, data := makeTOC([]piece{{1, 5000}, {2, 100}, {3, 9000}, {4, 7}}, []piece{{5, 10}, {2, 100}}, []piece{{0, 9000}, {6, 100}})
	l := layout(t, c, nil)
	a, err := Create(t.TempDir(), l)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.Close() })
	return a, data, contents(l, data)
}

func (a *Arena) testRun(all []byte, content, first, blocks uint32) ([]int, error) {
	off, _ := a.layout.Offset(int(content))
	k, _ := a.layout.find(int(content))
	size := a.layout.end(a.layout.contentEnd(k)-1) - off
	r := trace.Run{Content: content, First: first, Blocks: blocks}
	at, n := r.Range(size)
	b := all[off+at:][:n]
	return a.writeRunAndSettle(r, b)
}

// writeRunAndSettle returns all segments that a run completes, sorted.
func (a *Arena) writeRunAndSettle(r trace.Run, b []byte) ([]int, error) {
	completed, err := a.WriteRun(r, segment.Sum(b), b)
	settled, serr := a.Settle()
	completed = append(completed, settled...)
	slices.Sort(completed)
	return completed, errors.Join(err, serr)
}

func TestWriteRun(t *testing.T) {
	a, data, all := runArena(t)
	waited := make(chan error, 1)
	go func() { waited <- a.Wait(context.Background(), 4096, 1) }()
	// The second segment lies in that page, here and in another content.
	if got, err := a.testRun(all, 0, 1, 1); err != nil || !cmp.Equal(got, []int{1}) {
		t.Fatalf("completed %v, %v", got, err)
	}
	if err := <-waited; err != nil {
		t.Error(err)
	}
	if a.HasSegment(0) || a.HasSegment(2) || !a.HasSegment(1) || !a.HasSegment(5) {
		t.Error("segments with absent blocks are marked, or one in another place is not")
	}
	if got, err := a.testRun(all, 0, 0, 1); err != nil || !cmp.Equal(got, []int{0}) {
		t.Errorf("completed %v, %v", got, err)
	}
	if d := cmp.Diff([]trace.Run{{Content: 0, First: 1, Blocks: 1}}, a.PresentRuns()); d != "" {
		t.Error(d)
	}
	if d := cmp.Diff([]int{2}, a.AbsentSegments(nil, 0, 3*4096)); d != "" {
		t.Errorf("absent: %s", d)
	}
	if d := cmp.Diff([]int(nil), a.AbsentSegments(nil, 0, 2*4096)); d != "" {
		t.Errorf("absent, of what is here by runs: %s", d)
	}
	// A segment that meets pages is written around them.
	written := a.Written()
	if err := a.WriteSegment(2, data[2]); err != nil {
		t.Fatal(err)
	}
	if n := a.Written() - written; n != 9000-(2*4096-5100) {
		t.Errorf("%d bytes were written", n)
	}
	if runs := a.PresentRuns(); runs != nil {
		t.Errorf("present runs of present segments: %v", runs)
	}
	// Over a hole, and the short page after it.
	if got, err := a.testRun(all, 2, 0, 3); err != nil || !cmp.Equal(got, []int{7}) {
		t.Errorf("completed %v, %v", got, err)
	}
	if got, err := a.testRun(all, 0, 0, 4); err != nil || !cmp.Equal(got, []int{3}) {
		t.Errorf("completed %v, %v", got, err)
	}
	if got, err := a.testRun(all, 1, 0, 1); err != nil || !cmp.Equal(got, []int{4}) {
		t.Errorf("completed %v, %v", got, err)
	}
	if !a.Complete() || a.ContentHere() != a.layout.ContentBytes() {
		t.Errorf("%d segments are missing, %d bytes here", a.Missing(), a.ContentHere())
	}
	if err := a.Verify(context.Background(), func(c Checked) error { return c.Err }); err != nil {
		t.Error(err)
	}
	got, err := os.ReadFile(filepath.Join(a.Dir(), FileName))
	if err != nil || !bytes.Equal(got, all) {
		t.Errorf("the file differs from the contents: %v", err)
	}
}

// What a read needs of a segment is written when all of it was verified, with what lies around it.
func TestWritePart(t *testing.T) {
	c, data := makeTOC([]piece{{1, 40_000}, {2, 50_001}}, []piece{{3, 100}})
	l := layout(t, c, nil)
	a, err := Create(t.TempDir(), l)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.Close() })
	blocks := func() (out []int) {
		for i := range int(l.Blocks()) {
			if a.Present(int64(i)*BlockSize, 1) {
				out = append(out, i)
			}
		}
		return out
	}
	wrong := bytes.Clone(data[0])
	wrong[39_999] ^= 1
	if err := a.WritePart(0, wrong, 0, 1, BlockSize); !errors.Is(err, ErrWrongBytes) {
		t.Errorf("wrong bytes elsewhere: %v", err)
	}
	var want []int
	for _, s := range []struct {
		segment        int
		off, n, around int64
		present        []int
	}{
		{0, 4096, 1, BlockSize, []int{1}},
		{0, 4096, 1, BlockSize, nil},
		{0, 13_000, 4096, 4 * BlockSize, []int{0, 2, 3, 4, 5, 6, 7}}, // pages 3 and 4
		{1, 89_000, 1, 2 * BlockSize, []int{20, 21}},                 // the last one is short
		{1, 86_017, 1, BlockSize, nil},
		{1, 45_056, 1, 4 * BlockSize, []int{10, 11}}, // not those of the segment before
	} {
		if err := a.WritePart(s.segment, data[s.segment], s.off, s.n, s.around); err != nil {
			t.Fatal(err)
		}
		want = append(want, s.present...)
		slices.Sort(want)
		want = slices.Compact(want)
		if d := cmp.Diff(want, blocks()); d != "" {
			t.Errorf("present after %+v (want, got):\n%s", s, d)
		}
	}
	if a.HasSegment(0) || a.HasSegment(1) {
		t.Error("a segment is marked of which blocks are absent")
	}
	// A page that two segments share comes with the whole of both.
	if err := a.WritePart(0, data[0], 36_864, 4096, BlockSize); err != nil || a.Present(36_864, 1) {
		t.Errorf("half of a page is there: %v", err)
	}
	if err := a.WritePart(1, data[1], 36_864, 4096, BlockSize); err != nil || !a.Present(0, 90_001) || !a.HasSegment(0) || !a.HasSegment(1) {
		t.Errorf("both are not: %v", err)
	}
	if err := a.WritePart(2, data[2], l.Segment(2).Offset, 1, BlockSize); err != nil || !a.Complete() {
		t.Errorf("the rest: %v", err)
	}
	got, err := os.ReadFile(filepath.Join(a.Dir(), FileName))
	if err != nil || !bytes.Equal(got, contents(l, data)) {
		t.Errorf("the file differs from the contents: %v", err)
	}
}

// TestSettle has pages of segments that have no other place: their bytes are here when
// the runs are, and the segments when they were settled, or when the next daemon finds them.
func TestSettle(t *testing.T) {
	for _, crash := range []bool{false, true} {
		a, data, all := runArena(t)
		for first := range uint32(4) {
			r := trace.Run{Content: 0, First: first, Blocks: 1}
			at, n := r.Range(14107)
			want := []int(nil)
			if first == 1 {
				want = []int{1} // which has another place
			}
			if got, err := a.WriteRun(r, segment.Sum(all[at:][:n]), all[at:][:n]); err != nil || !cmp.Equal(got, want) {
				t.Fatalf("page %d completed %v, %v", first, got, err)
			}
		}
		if a.HasSegment(0) || !a.Present(0, 14107) || a.AbsentSegments(nil, 0, 14107) != nil {
			t.Errorf("segment 0 marked %v, its bytes present %v", a.HasSegment(0), a.Present(0, 14107))
		}
		// One comes as a segment as well.
		if err := a.WriteSegment(2, data[2]); err != nil {
			t.Error(err)
		}
		if crash {
			a.Close()
			var err error
			if a, err = Open(a.dir, a.layout); err != nil {
				t.Fatal(err)
			}
			defer a.Close()
		} else if got, err := a.Settle(); err != nil || !cmp.Equal(got, []int{0, 3}) {
			t.Errorf("settled %v, %v", got, err)
		}
		if !a.HasSegment(0) || !a.HasSegment(2) || !a.HasSegment(3) || a.Missing() != 2 {
			t.Errorf("crash %v: %d segments are missing", crash, a.Missing())
		}
		if got, err := a.Settle(); err != nil || got != nil {
			t.Errorf("settled %v, %v", got, err)
		}
	}
}

func TestWriteRunRefuses(t *testing.T) {
	a, _, all := runArena(t)
	b := all[:4096]
	for name, r := range map[string]trace.Run{
		"no such content": {Content: 3, First: 0, Blocks: 1},
		"after its end":   {Content: 1, First: 1, Blocks: 1},
		"too long":        {Content: 1, First: 0, Blocks: 2},
		"no pages":        {Content: 0, First: 0, Blocks: 0},
		"overflow":        {Content: 0, First: 1<<32 - 1, Blocks: 2},
		"other length":    {Content: 0, First: 0, Blocks: 2},
	} {
		if _, err := a.WriteRun(r, segment.Sum(b), b); err == nil {
			t.Errorf("%s: written", name)
		}
	}
	if _, err := a.WriteRun(trace.Run{Content: 0, First: 1, Blocks: 1}, segment.Sum(b), all[4096:8192]); !errors.Is(err, ErrWrongBytes) {
		t.Errorf("wrong digest: %v", err)
	}
	if a.Written() != 0 || a.PresentRuns() != nil {
		t.Error("something was written")
	}
	a.Close()
	if _, err := a.testRun(all, 0, 0, 1); !errors.Is(err, ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
}

// TestContradiction has pages and segments that differ, in every order.
func TestContradiction(t *testing.T) {
	wrong := func(all []byte, at int) []byte {
		b := bytes.Clone(all)
		b[at] ^= 1
		return b
	}
	t.Run("segment after pages", func(t *testing.T) {
		a, data, all := runArena(t)
		if _, err := a.testRun(wrong(all, 5050), 0, 1, 1); !errors.Is(err, ErrContradiction) {
			t.Fatal(err)
		}
		if _, err := a.testRun(wrong(all, 9000), 0, 2, 1); err != nil {
			t.Fatal(err)
		}
		written := a.Written()
		if err := a.WriteSegment(2, data[2]); !errors.Is(err, ErrContradiction) || a.HasSegment(2) || a.Written() != written {
			t.Errorf("%v; marked %v", err, a.HasSegment(2))
		}
	})
	t.Run("pages after segment", func(t *testing.T) {
		a, data, all := runArena(t)
		if err := a.WriteSegment(0, data[0]); err != nil {
			t.Fatal(err)
		}
		if _, err := a.testRun(wrong(all, 4100), 0, 1, 1); !errors.Is(err, ErrContradiction) || a.Present(4096, 1) {
			t.Errorf("%v; marked %v", err, a.Present(4096, 1))
		}
		if _, err := a.testRun(all, 0, 1, 1); err != nil {
			t.Errorf("the right pages after wrong ones: %v", err)
		}
	})
	t.Run("pages after pages", func(t *testing.T) {
		a, _, all := runArena(t)
		if _, err := a.testRun(all, 0, 2, 1); err != nil {
			t.Fatal(err)
		}
		if _, err := a.testRun(wrong(all, 9000), 0, 1, 2); !errors.Is(err, ErrContradiction) || a.Present(4096, 1) {
			t.Errorf("%v; marked %v", err, a.Present(4096, 1))
		}
	})
	t.Run("pages of a hole", func(t *testing.T) {
		a, _, all := runArena(t)
		off, _ := a.layout.Offset(2)
		if _, err := a.testRun(wrong(all, int(off)+8200), 2, 2, 1); !errors.Is(err, ErrContradiction) {
			t.Error(err)
		}
	})
	t.Run("pages that make up a segment", func(t *testing.T) {
		a, _, all := runArena(t)
		if _, err := a.testRun(wrong(all, 100), 0, 0, 1); err != nil {
			t.Fatal(err)
		}
		if _, err := a.testRun(all, 0, 1, 1); !errors.Is(err, ErrContradiction) || a.HasSegment(0) {
			t.Errorf("%v; marked %v", err, a.HasSegment(0))
		}
	})
}

// TestUnfinished opens an arena whose daemon died after the last page of a segment was marked
// and before the segment was.
func TestUnfinished(t *testing.T) {
	for _, rotten := range []bool{false, true} {
		a, _, all := runArena(t)
		if _, err := a.testRun(all, 0, 0, 4); err != nil {
			t.Fatal(err)
		}
		for i := range 4 {
			a.maps.segments[0] &^= 1 << i
		}
		if rotten {
			if _, err := a.File().WriteAt([]byte{1, 2, 3}, 6000); err != nil {
				t.Fatal(err)
			}
		}
		a.Close()
		b, err := Open(a.Dir(), a.layout)
		if err != nil {
			t.Fatal(err)
		}
		defer b.Close()
		// Segment 1 lies in another content as well, where it was written.
		for i, want := range []bool{true, true, !rotten, true} {
			if b.HasSegment(i) != want {
				t.Errorf("rotten %v: segment %d is present: %v", rotten, i, b.HasSegment(i))
			}
		}
	}
}

// TestAhead does not count what was announced, unless it was read before.
func TestAhead(t *testing.T) {
	c, _ := makeTOC([]piece{{1, 900_000}})
	a, err := Create(t.TempDir(), layout(t, c, nil))
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	const page = BlockSize
	if !a.Touch(2*page, page) {
		t.Error("a read that nobody announced is not needed")
	}
	a.Ahead(page, 70*page)
	for _, off := range []int64{0, page, 64 * page, 70 * page, 71 * page} {
		if want := off >= page && off < 71*page; a.IsAhead(off) != want {
			t.Errorf("block %d: ahead %t", off/page, !want)
		}
	}
	if a.Touch(page, 70*page) || a.Touched() != page {
		t.Errorf("%d bytes count as touched, want one page", a.Touched())
	}
	if !a.Touch(60*page, 20*page) || a.Touched() != 10*page {
		t.Errorf("%d bytes count as touched, want ten pages", a.Touched())
	}
	if a.IsAhead(-1) || a.IsAhead(1<<40) {
		t.Error("what is beyond the arena is ahead")
	}
}

// TestTouch counts what is read, and drops the arena's copy of it once it is on
// the disk.
func TestTouch(t *testing.T) {
	c, data := makeTOC([]piece{{1, 900_000}})
	a, err := Create(t.TempDir(), layout(t, c, nil))
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	if err := a.WriteSegment(0, data[0]); err != nil {
		t.Fatal(err)
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(a.Dir(), &fs); err != nil {
		t.Fatal(err)
	}
	a.Touch(-5, 1<<40)
	if n := a.Touched(); n != a.layout.Size() {
		t.Errorf("touched %d bytes of %d", n, a.layout.Size())
	}
	a.Touch(0, 5000)
	if n := a.Touched(); n != a.layout.Size() {
		t.Errorf("touched %d bytes of %d", n, a.layout.Size())
	}
	if fs.Type == unix.TMPFS_MAGIC {
		t.Skip("tmpfs has nothing but the page cache")
	}
	if err := a.Sync(context.Background()); err != nil {
		t.Fatal(err)
	}
	// The kernel may keep some, for reasons of its own.
	if n := inCache(t, a); n > int(a.layout.Blocks())/4 {
		t.Errorf("%d of %d pages are in the page cache", n, a.layout.Blocks())
	}
	// They are dropped once: who reads them from then on, by another way, keeps them.
	if _, err := a.File().ReadAt(make([]byte, 8192), 0); err != nil {
		t.Fatal(err)
	}
	before := inCache(t, a)
	if err := a.Sync(context.Background()); err != nil {
		t.Fatal(err)
	}
	if n := inCache(t, a); n < before {
		t.Errorf("%d pages are in the page cache, %d before", n, before)
	}
	if err := a.Verify(context.Background(), func(c Checked) error { return c.Err }); err != nil {
		t.Error(err)
	}
}

// inCache counts the pages of the arena in the page cache.
func inCache(t *testing.T, a *Arena) (n int) {
	t.Helper()
	m, err := unix.Mmap(int(a.File().Fd()), 0, int(a.layout.size), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Munmap(m) }()
	in := make([]byte, a.layout.Blocks())
	if _, _, errno := unix.Syscall(unix.SYS_MINCORE, uintptr(unsafe.Pointer(&m[0])), uintptr(len(m)), uintptr(unsafe.Pointer(&in[0]))); errno != 0 {
		t.Fatal(errno)
	}
	for _, b := range in {
		n += int(b & 1)
	}
	return n
}
