package recorder

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

func TestLog(t *testing.T) {
	t0 := time.Unix(1000, 0)
	l := NewLog(2, 3)
	l.Add(0, 0, 4096, t0, false)
	l.Add(0, 4096, 1, t0.Add(time.Millisecond), false)        // goes on
	l.Add(0, 0, 3*4096, t0.Add(2*time.Millisecond), false)    // its last block is new
	l.Add(1, 4095, 2, t0.Add(3*time.Millisecond), true)       // two blocks of another arena
	l.Add(1, 0, 3*4096, t0.Add(4*time.Millisecond), false)    // did not wait: another read
	l.Add(1, -1, 5, t0, false)                                // nothing
	l.Add(1, 100*4096, 1, t0.Add(5*time.Millisecond), false)  // more than there may be
	l.Add(1, 200*4096, 10, t0.Add(6*time.Millisecond), false) // not noted any more
	reads, full := l.Reads()
	want := []Read{
		{Arena: 0, Off: 0, N: 3 * 4096, At: t0},
		{Arena: 1, Off: 0, N: 2 * 4096, At: t0.Add(3 * time.Millisecond), Waited: true},
		{Arena: 1, Off: 2 * 4096, N: 4096, At: t0.Add(4 * time.Millisecond)},
	}
	if diff := cmp.Diff(want, reads); diff != "" || !full {
		t.Errorf("full %v (-want +got):\n%s", full, diff)
	}
	l.End()
	l.Add(0, 0, 4096, t0, false)
	if reads, _ := l.Reads(); len(reads) != 0 {
		t.Errorf("after its end: %v", reads)
	}
}

// Whatever is read in whatever order, each block is noted once, and all are.
func TestLogProperty(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := NewLog(2, 0)
		want := map[[2]int64]bool{}
		at := time.Unix(0, 0)
		for range rapid.IntRange(0, 50).Draw(t, "reads") {
			arena := rapid.IntRange(0, 1).Draw(t, "arena")
			off, n := rapid.Int64Range(0, 1<<20).Draw(t, "off"), rapid.Int64Range(0, 1<<17).Draw(t, "n")
			at = at.Add(time.Duration(rapid.IntRange(0, 10).Draw(t, "ms")) * time.Millisecond)
			l.Add(arena, off, n, at, rapid.Bool().Draw(t, "waited"))
			for b := off / BlockSize; n > 0 && b*BlockSize < off+n; b++ {
				want[[2]int64{int64(arena), b}] = true
			}
		}
		got := map[[2]int64]bool{}
		reads, _ := l.Reads()
		before := time.Unix(0, 0)
		for _, r := range reads {
			if r.At.Before(before) {
				t.Fatalf("%v comes after %v", r.At, before)
			}
			before = r.At
			for b := r.Off / BlockSize; b < (r.Off+r.N)/BlockSize; b++ {
				key := [2]int64{int64(r.Arena), b}
				if got[key] {
					t.Fatalf("block %v twice", key)
				}
				got[key] = true
			}
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Fatal(diff)
		}
		if n, _ := l.Count(); n != int64(len(want)) {
			t.Fatalf("%d blocks counted of %d", n, len(want))
		}
	})
}
