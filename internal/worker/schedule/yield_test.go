package schedule

import (
	"testing"
	"time"
)

// few is an arena of few segments, a block each, of which some are here.
type few map[int]bool

func (f few) Present(off, n int64) bool { return len(f.AbsentSegments(nil, off, n)) == 0 }

func (f few) AbsentSegments(dst []int, off, n int64) []int {
	first, end := f.SegmentsIn(off, n)
	for i := first; i < end; i++ {
		if !f[i] {
			dst = append(dst, i)
		}
	}
	return dst
}

func (few) SegmentsIn(off, n int64) (first, end int) {
	return int(off >> 12), int((off + n + 4095) >> 12)
}

func (few) Neighbours(i int) (first, end int) { return i, i + 1 }

// The server rests when nobody waits for what it sends; what a read lacks is promoted meanwhile, also what would come
// soon by itself.
func TestYield(t *testing.T) {
	now, space := time.Unix(1000, 0), make(few)
	const rest = 400 * time.Millisecond
	read := &Read{Space: &space, Off: 4096, Len: 4096, Began: now}
	begun := func() Schedule {
		s := New(Options{Beyond: 256 << 10})
		s.Opened(&space)
		s.Begin(now)
		s.Plan(now, []int64{100, 100, 100}, []uint32{0, 1, 2})
		s.PagesDone(now)
		s.Take()
		return s
	}
	for _, c := range []struct {
		name string
		do   func(s *Schedule)
		want time.Duration
	}{
		{"nobody waits", func(*Schedule) {}, rest},
		{"a read waits", func(s *Schedule) { s.Wanted(now, read) }, 0},
		{"it waited", func(s *Schedule) { s.Wanted(now, read); s.Ended(read) }, rest},
		{"a service joins", func(s *Schedule) { s.Joined(now, new(Joining), true, nil) }, 0},
		{"a set comes", func(s *Schedule) { s.Startup([]uint64{1}, 100, true) }, 0},
		{"all has come", func(s *Schedule) { s.Arrived(0); s.Arrived(1); s.Arrived(2) }, 0},
		{"no stream runs", func(s *Schedule) { s.End() }, 0},
	} {
		s := begun()
		c.do(&s)
		s.Take()
		if s.Yield(now, rest); s.Take().Rest != c.want {
			t.Errorf("%s: the server is not told to rest for %v", c.name, c.want)
		}
	}
	for _, c := range []struct {
		name  string
		yield bool
		after time.Duration
		want  int // frames that are promoted
	}{
		{"it comes soon", false, 0, 0},
		{"the server rests", true, rest, 1},
		{"it has rested", true, rest + restSlack, 0},
	} {
		s := begun()
		if c.yield {
			s.Yield(now, rest)
			s.Take()
		}
		if s.Wanted(now.Add(c.after), read); len(s.Take().Promote) < c.want || c.want == 0 && s.State().Reads != 1 {
			t.Errorf("%s: not promoted", c.name)
		}
		if promoted := read.promoted; promoted != (c.want > 0) {
			t.Errorf("%s: promoted %v", c.name, promoted)
		}
		read.promoted, read.due, read.bound = false, time.Time{}, 0
	}
}
