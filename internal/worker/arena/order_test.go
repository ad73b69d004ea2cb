package arena

import (
	"bytes"
	"context"
	gomaps "maps"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/format/trace"
	"hydrofoil.dev/foil/internal/kernel"
)

// TestAnyOrder writes segments and page runs in any order, dies at any point, with and
// without the host, and compares what is then believed with what was written.
func TestAnyOrder(t *testing.T) {
	tmp := t.TempDir()
	rapid.Check(t, func(t *rapid.T) {
		dir, err := os.MkdirTemp(tmp, "")
		if err != nil {
			t.Fatal(err)
		}
		defer os.RemoveAll(dir)
		w := newWritten(t, dir)
		defer func() { w.a.Close() }()
		actions := map[string]func(*rapid.T){"": w.check, "sync": w.sync, "daemon dies": w.reopen, "host dies": w.reboot}
		if w.l.Segments() > 0 {
			actions["write"], actions["write run"] = w.writeSegment, w.writeRun
		}
		t.Repeat(actions)
	})
}

// written is an arena and what was written to it.
type written struct {
	a    *Arena
	dir  string
	boot kernel.BootID
	l    *Layout
	toc  *toc.TOC
	data [][]byte // by segment of the TOC; nil: it is zeros
	all  []byte   // the arena when it is complete

	have, durable     map[segment.ID]bool
	runs, durableRuns map[int64]bool // blocks that page runs have written
}

func newWritten(t *rapid.T, dir string) *written {
	c, data := makeTOC(rapid.SliceOfN(rapid.SliceOfN(rapid.Custom(func(t *rapid.T) piece {
		return piece{rapid.Uint64Range(0, 20).Draw(t, "seed"), rapid.OneOf(rapid.IntRange(1, 50), rapid.IntRange(1, 9000), rapid.Just(4096)).Draw(t, "n")}
	}), 1, 6), 1, 8).Draw(t, "contents")...)
	in := rapid.SliceOfN(rapid.Bool(), len(c.Contents), len(c.Contents)).Draw(t, "in")
	l, err := NewLayout(c, func(i int) bool { return in[i] })
	if err != nil {
		t.Fatal(err)
	}
	w := &written{
		dir: dir, boot: kernel.BootID{1}, l: l, toc: c, data: data, all: contents(l, data),
		have: map[segment.ID]bool{{}: true}, durable: map[segment.ID]bool{{}: true},
		runs: map[int64]bool{}, durableRuns: map[int64]bool{},
	}
	if w.a, err = create(dir, l, w.boot); err != nil {
		t.Fatal(err)
	}
	return w
}

func (w *written) sync(t *rapid.T) {
	if err := w.a.Sync(context.Background()); err != nil {
		t.Fatal(err)
	}
	w.durable, w.durableRuns = gomaps.Clone(w.have), gomaps.Clone(w.runs)
}

func (w *written) reopen(t *rapid.T) {
	w.a.Close()
	f, err := os.OpenFile(filepath.Join(w.dir, FileName), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	if w.a, err = open(w.dir, f, w.l, w.boot); err != nil {
		t.Fatal(err)
	}
}

func (w *written) reboot(t *rapid.T) {
	w.boot[0]++
	w.have, w.runs = gomaps.Clone(w.durable), gomaps.Clone(w.durableRuns)
	w.reopen(t)
}

func (w *written) writeSegment(t *rapid.T) {
	i := rapid.IntRange(0, w.l.Segments()-1).Draw(t, "segment")
	b := w.data[w.l.TOCSegment(i)]
	if b == nil {
		return
	}
	if err := w.a.WriteSegment(i, b); err != nil {
		t.Fatal(err)
	}
	w.have[segment.Sum(b)] = true
}

func (w *written) writeRun(t *rapid.T) {
	k := rapid.IntRange(0, w.l.Contents()-1).Draw(t, "content")
	content := int(w.l.contents[k].content)
	size := w.toc.Contents[content].Size
	r := trace.Run{Content: uint32(content), First: rapid.Uint32Range(0, trace.Pages(size)-1).Draw(t, "first")}
	r.Blocks = rapid.Uint32Range(1, trace.Pages(size)-r.First).Draw(t, "blocks")
	at, _ := w.l.Offset(content)
	held := map[int64]bool{} // blocks
	for b := range w.l.Blocks() {
		held[b] = w.a.Present(b*BlockSize, 1)
	}
	off, n := r.Range(size)
	completed, err := w.a.writeRunAndSettle(r, w.all[at+off:][:n])
	if err != nil {
		t.Fatal(err)
	}
	for b := (at + off) / BlockSize; b < (at+off+n+BlockSize-1)/BlockSize; b++ {
		w.runs[b] = w.runs[b] || !held[b]
	}
	var want []int
	for i := range w.l.Segments() {
		if s := w.l.Segment(i); !w.have[s.ID] && w.covered(s) {
			want = append(want, i)
		}
	}
	for _, i := range want {
		w.have[w.l.Segment(i).ID] = true
	}
	if d := cmp.Diff(want, completed); d != "" {
		t.Fatalf("completed: %s", d)
	}
}

// covered reports whether page runs have written all of a segment.
func (w *written) covered(s Segment) bool {
	for b := s.Offset / BlockSize; b*BlockSize < s.Offset+int64(s.Length); b++ {
		if !w.runs[b] {
			return false
		}
	}
	return true
}

func (w *written) check(t *rapid.T) {
	w.checkBlocks(t)
	missing, here := 0, int64(0)
	for i := range w.l.Segments() {
		s := w.l.Segment(i)
		if w.a.HasSegment(i) != w.have[s.ID] {
			t.Fatalf("segment %d present: %v, want %v", i, w.a.HasSegment(i), w.have[s.ID])
		}
		if !w.have[s.ID] {
			missing++
		}
		end := s.Offset + int64(s.Length)
		for at := s.Offset; at < end; {
			next := min(end, (at/BlockSize+1)*BlockSize)
			if w.have[s.ID] || w.runs[at/BlockSize] {
				here += next - at
			}
			at = next
		}
	}
	if a := w.a; a.Missing() != missing || a.ContentHere() != here || a.Complete() != (missing == 0) || a.Doubt() != "" {
		t.Fatalf("missing %d, want %d; here %d, want %d; doubt %q", a.Missing(), missing, a.ContentHere(), here, a.Doubt())
	}
	bits := w.a.PresentBitmap()
	for k := range w.toc.Segments {
		i, ok := w.l.FromTOC(k)
		if got := bits[k/8]>>(k%8)&1 != 0; got != (ok && w.a.HasSegment(i)) {
			t.Fatalf("bit %d of the bitmap is %v", k, got)
		}
	}
	if err := w.a.Verify(context.Background(), func(c Checked) error { return c.Err }); err != nil {
		t.Fatal(err)
	}
}

func (w *written) checkBlocks(t *rapid.T) {
	said := map[int64]bool{}
	for _, r := range w.a.PresentRuns() {
		off, _ := w.l.Offset(int(r.Content))
		for b := range int64(r.Blocks) {
			said[off/BlockSize+int64(r.First)+b] = true
		}
	}
	for b := range w.l.Blocks() {
		want := true
		for i := range w.l.Segments() {
			s := w.l.Segment(i)
			if s.Offset < (b+1)*BlockSize && s.Offset+int64(s.Length) > b*BlockSize {
				want = want && w.have[s.ID]
			}
		}
		if got := w.a.Present(b*BlockSize, 1); got != (want || w.runs[b]) {
			t.Fatalf("block %d present: %v, want %v", b, got, want || w.runs[b])
		}
		if said[b] != (w.runs[b] && !want) {
			t.Fatalf("block %d is in PresentRuns: %v", b, said[b])
		}
		if w.runs[b] {
			got := make([]byte, BlockSize)
			if _, err := w.a.File().ReadAt(got, b*BlockSize); err != nil || !bytes.Equal(got, w.all[b*BlockSize:][:BlockSize]) {
				t.Fatalf("block %d is wrong: %v", b, err)
			}
		}
	}
}
