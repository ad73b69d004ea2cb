package schedule

import (
	"slices"
	"testing"
	"time"

	"hydrofoil.dev/foil/internal/worker/arena"
)

// block is a range of one block, which is a segment of a world.
func block(i int64) arena.Range { return arena.Range{Off: i * arena.BlockSize, Len: arena.BlockSize} }

// TestKeep has two frames kept, one of filled pages (blocks 0 and 1, which frame 0 of the plan has too) and frame 1 of
// the plan (block 2): what reads lack of them is handed out, what is not kept is promoted, and the rest is written
// when the hold ends.
func TestKeep(t *testing.T) {
	now := time.Unix(1000, 0)
	s, w := New(Options{Hold: time.Minute}), &world{here: make([]bool, 4)}
	s.Opened(w)
	keeps := func(when string, ofSet, filled bool, bytes int64, want bool) {
		t.Helper()
		if s.Keeps(ofSet, filled, bytes) != want {
			t.Errorf("%s: a frame of %d bytes, of a set: %t, filled: %t, is kept: %t", when, bytes, ofSet, filled, !want)
		}
	}
	s.Begin(now)
	s.Startup([]uint64{0b11}, 100, true)
	keeps("before the hold", true, true, 10, true)
	keeps("before the hold", true, false, 10, false)
	keeps("before the hold", false, false, 10, false)
	s.Plan(now, []int64{100, 100, 100}, []uint32{0, 0, 1, 2})
	s.PagesDone(now)
	keeps("in the hold", false, false, 10, true)
	keeps("in the hold", true, true, keepMost+1, false)

	pages := &Kept{Blocks: []arena.Range{block(0), block(1)}, Bytes: keepMost - 10, Filled: true}
	if reads, ok := s.Keep(pages); !ok || reads != nil {
		t.Errorf("kept: %t, for reads %v", ok, reads)
	}
	keeps("with pages", false, false, 10, true)
	keeps("with pages", false, false, 11, false)
	read := func(first, n int64) *Read {
		return &Read{Space: w, Off: first * arena.BlockSize, Len: n * arena.BlockSize, Began: now}
	}
	has := read(0, 2)
	if parts := s.Wanted(now, has); !slices.Equal(parts, []*Kept{pages}) || s.Take().Promote != nil {
		t.Errorf("a read of pages that are kept gets %v", parts)
	}
	// One that lacks more than the pages has all of it promoted.
	lacks := read(1, 2)
	if parts := s.Wanted(now, lacks); !slices.Equal(parts, []*Kept{pages}) || !lacks.Promoted() {
		t.Errorf("a read of pages that are kept, and of what is not, gets %v, promoted: %t", parts, lacks.Promoted())
	}
	if o := s.Take(); len(o.Promote) < 2 || !slices.Equal(o.Promote[:2], []uint32{0, 1}) {
		t.Errorf("promoted %v", o.Promote)
	}
	s.Arrived(1)
	frame := &Kept{Blocks: []arena.Range{block(2)}, Bytes: 10}
	if reads, ok := s.Keep(frame); !ok || !slices.Equal(reads, []*Read{lacks}) {
		t.Errorf("kept: %t, for reads %v", ok, reads)
	}
	if n := frame.Around(); n != 4*arena.BlockSize {
		t.Errorf("%d bytes around the first read", n)
	}
	s.Wanted(now, read(2, 1))
	if n := frame.Around(); n != 16*arena.BlockSize {
		t.Errorf("%d bytes around the second read", n)
	}

	s.Forget(pages)
	s.Forget(nil)
	keeps("without pages", true, true, keepMost-10, true)
	s.Take()
	s.Release()
	if o := s.Take(); !o.Release || !slices.Equal(o.Write, []*Kept{frame}) {
		t.Errorf("when the hold ends it is told: %t, and %v is written", o.Release, o.Write)
	}
	if _, ok := s.Keep(pages); ok || s.State().Kept != 0 {
		t.Error("a frame is kept after the hold")
	}
}
