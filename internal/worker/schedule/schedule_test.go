package schedule

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"hydrofoil.dev/foil/internal/worker/arena"
)

// world is a worker's schedule, a server and the link between them, on which nothing happens but
// at times that the test sets: no clock runs.
type world struct {
	t   *rapid.T
	now time.Time
	due []happening // by time, and in the order in which they were planned

	trip time.Duration // one way
	rate float64       // bytes a second
	free time.Time     // when the link has taken what was sent

	// The worker.
	s     Schedule
	here  []bool // by segment, each of which is a block of the arena
	reads map[*Read]*waiting
	moved int64

	// The server's side of the stream that runs.
	stream int
	sizes  []int64  // by frame
	of     []uint32 // the frame of each segment
	order  []uint32 // promoted
	number uint64
	sent   []bool
	holds  bool
	rests  time.Time // until when it rests
	pages  []page    // of the startup set that are left
	mute   int       // promotions that get lost
	lost   bool      // one has got lost
	along  int       // frames that are sent along with a promoted one
	flight int64     // bytes that are sent and have not arrived
}

type happening struct {
	at time.Time
	fn func()
}

// page is a frame of the startup set.
type page struct {
	segments []int
	size     int64
}

// waiting is what the model knows of a read.
type waiting struct {
	segments []int
	since    time.Time // when something could be asked for
	most     int64     // bytes that may come first
	inSet    bool
	lost     bool // a promotion was lost meanwhile
}

func (w *world) Present(off, n int64) bool { return len(w.AbsentSegments(nil, off, n)) == 0 }

func (w *world) AbsentSegments(dst []int, off, n int64) []int {
	first, end := w.SegmentsIn(off, n)
	for i := first; i < end; i++ {
		if !w.here[i] {
			dst = append(dst, i)
		}
	}
	return dst
}

func (w *world) SegmentsIn(off, n int64) (first, end int) {
	return int(off / arena.BlockSize), int((off + n + arena.BlockSize - 1) / arena.BlockSize)
}

// Neighbours: contents are four segments long.
func (w *world) Neighbours(i int) (first, end int) { return i &^ 3, min(i&^3+4, len(w.here)) }

func (w *world) after(d time.Duration, fn func()) {
	at := w.now.Add(d)
	i := len(w.due)
	for i > 0 && at.Before(w.due[i-1].at) {
		i--
	}
	w.due = slices.Insert(w.due, i, happening{at, fn})
}

// tell does what Pull.decide does.
func (w *world) tell(event func()) {
	w.s.Moved(w.now, w.moved)
	event()
	o := w.s.Take()
	if o.Restart {
		w.t.Fatal("nothing was damaged, and the stream is to end")
	}
	if len(o.Promote) > 0 || o.Release || o.Rest > 0 {
		stream := w.stream
		if w.mute > 0 {
			w.mute--
			w.lost = true
			for _, v := range w.reads {
				v.lost = true
			}
			if silent := rapid.Bool().Draw(w.t, "silent"); !silent || o.Release {
				w.after(w.trip, func() {
					if stream == w.stream {
						w.tell(func() { w.s.Unsaid(w.now, o.Release) })
					}
				})
			}
		} else {
			w.after(w.trip, func() {
				if stream == w.stream {
					w.promote(o)
					w.after(w.trip, func() { w.tell(func() { w.s.Answered(2 * w.trip) }) })
				}
			})
		}
	}
	if at := w.s.Wake(); !at.IsZero() {
		w.after(max(0, at.Sub(w.now)), func() {
			if again := w.s.Wake(); !again.IsZero() && !again.After(w.now) {
				w.tell(func() { w.s.Tick(w.now) })
			}
		})
	}
}

// promote is the server's side of a promotion, as package bundles has it.
func (w *world) promote(o Orders) {
	if o.Number > w.number {
		w.order, w.number = append(slices.Clone(o.Promote), w.order...), o.Number
	} else {
		w.order = append(w.order, o.Promote...)
	}
	w.holds = w.holds && !o.Release
	if o.Rest > 0 {
		w.rests = w.now.Add(o.Rest)
		w.after(o.Rest, w.send)
	}
	w.send()
}

// send has the server send what it may, one frame after the other, as the link takes them.
func (w *world) send() {
	if w.now.Before(w.free) {
		return
	}
	stream := w.stream
	put := func(size int64, arrive func()) {
		took := time.Duration(float64(size) / w.rate * float64(time.Second))
		w.free = w.now.Add(took)
		w.flight += size
		w.after(took, w.send)
		w.after(took+w.trip, func() {
			if stream == w.stream {
				w.moved += size
				w.flight -= size
				arrive()
				w.answer()
			}
		})
	}
	frame := func(f uint32) {
		w.sent[f] = true
		put(w.sizes[f], func() {
			for i, g := range w.of {
				w.here[i] = w.here[i] || g == f
			}
			w.tell(func() { w.s.Arrived(f) })
		})
	}
	for len(w.order) > 0 {
		f := w.order[0]
		if w.order = w.order[1:]; w.sent[f] {
			continue
		}
		for k := 1; k <= w.along && int(f)+k < len(w.sizes); k++ {
			w.order = append([]uint32{f + uint32(k)}, w.order...)
		}
		frame(f)
		return
	}
	if len(w.pages) > 0 {
		g := w.pages[0]
		w.pages = w.pages[1:]
		last := len(w.pages) == 0
		put(g.size, func() {
			for _, i := range g.segments {
				w.here[i] = true
			}
			w.tell(func() { w.s.Pages(g.size) })
			if last {
				w.tell(func() { w.s.PagesDone(w.now) })
			}
		})
		return
	}
	if next := slices.Index(w.sent, false); next >= 0 && !w.holds && !w.now.Before(w.rests) {
		frame(uint32(next))
	}
}

// begin starts a stream that has what is not here. Of the segments of the set nothing is planned.
func (w *world) begin(set []page) {
	w.stream++
	w.sizes, w.of, w.order, w.number, w.pages, w.flight = nil, make([]uint32, len(w.here)), nil, 0, set, 0
	inSet := make([]uint64, (len(w.here)+63)/64)
	bytes := int64(0)
	for _, g := range set {
		bytes += g.size
		for _, i := range g.segments {
			inSet[i/64] |= 1 << (i % 64)
		}
	}
	hold := false
	w.tell(func() {
		hold = w.s.Begin(w.now) > 0
		if set != nil {
			w.s.Startup(inSet, bytes, true)
		}
	})
	for i := range w.of {
		w.of[i] = NoFrame
	}
	segments := []int{}
	for i := range w.here {
		if !w.here[i] && !bit(inSet, int64(i)) {
			segments = append(segments, i)
		}
	}
	// The order of the plan is not that of the arena.
	if len(segments) > 0 {
		segments = rapid.Permutation(segments).Draw(w.t, "plan")
	}
	for len(segments) > 0 {
		n := min(len(segments), rapid.IntRange(1, 3).Draw(w.t, "segments of a frame"))
		for _, i := range segments[:n] {
			w.of[i] = uint32(len(w.sizes))
		}
		segments = segments[n:]
		w.sizes = append(w.sizes, rapid.Int64Range(1, 400_000).Draw(w.t, "size"))
	}
	w.lost = false
	w.sent, w.holds, w.rests = make([]bool, len(w.sizes)), hold && set != nil, time.Time{}
	w.tell(func() {
		w.s.Answered(2 * w.trip)
		w.s.Plan(w.now, w.sizes, w.of)
		if set == nil {
			w.s.PagesDone(w.now)
		}
	})
	for _, v := range w.reads {
		v.since, v.most = w.now, 0
		w.allow(v, nil)
	}
	w.free = w.now
	w.send()
}

// allow says how many bytes may come before the end of what a read lacks.
func (w *world) allow(v *waiting, before []*Read) {
	list := make([]uint32, 0, 10)
	add := func(segments []int) {
		for _, i := range segments {
			if f := w.of[i]; !w.here[i] && f != NoFrame && !slices.Contains(list, f) {
				list = append(list, f)
			} else if !w.here[i] && f == NoFrame {
				v.inSet = true
			}
		}
	}
	if before == nil {
		before = w.s.reads
	}
	for _, r := range before {
		add(w.reads[r].segments)
	}
	add(v.segments)
	v.most = w.flight + w.s.beyond + 400_000 // what the link takes when the promotion arrives
	for _, f := range list {
		v.most += w.sizes[f]
	}
	v.most += int64(w.along) * 400_000 * int64(len(list)+8) // with what is near other reads
	if v.inSet {
		for _, g := range w.pages {
			v.most += g.size
		}
	}
}

// read begins a read.
func (w *world) read(first, n int) {
	r := &Read{Space: w, Off: int64(first) * arena.BlockSize, Len: int64(n) * arena.BlockSize, Began: w.now}
	v := &waiting{since: w.now, lost: w.lost}
	for i := first; i < first+n; i++ {
		v.segments = append(v.segments, i)
	}
	if w.Present(r.Off, r.Len) {
		return
	}
	w.reads[r] = v
	w.allow(v, slices.Concat(w.s.reads, []*Read{r}))
	w.tell(func() { w.s.Wanted(w.now, r) })
}

// answer ends the reads that have what they lacked, and holds how long they waited against what they
// may have.
func (w *world) answer() {
	for _, r := range slices.Clone(w.s.reads) {
		if !w.Present(r.Off, r.Len) {
			continue
		}
		v := w.reads[r]
		delete(w.reads, r)
		w.tell(func() { w.s.Ended(r) })
		most := 2*w.trip + time.Duration(float64(v.most)/w.rate*float64(time.Second)) + time.Millisecond
		switch {
		case v.lost || w.along > 0:
			// It is promoted again when it has waited too long, after which the same may come first. What is
			// believed of the link is less than what it brings.
			most = 4*most + 2*askAgain
		case v.inSet:
			continue // reads that began later may go before pages
		}
		if took := w.now.Sub(v.since); took > most {
			w.t.Fatalf("a read of segments %v took %v, at most %v: %d bytes may come first", v.segments, took, most, v.most)
		}
	}
}

// TestScheduleProperty: whatever the order of reads, promotions, misses, resumptions and sets, no read
// waits longer than what was in flight when it began, a round trip, and its own bytes, and those of the reads
// that began before it.
func TestScheduleProperty(t *testing.T) {
	for _, older := range []bool{false, true} {
		t.Run(fmt.Sprintf("older=%t", older), func(t *testing.T) {
			for range 20 { // a hundred each, which seldom meet what is rare
				rapid.Check(t, func(t *rapid.T) { testSchedule(t, older) })
			}
		})
	}
}

func testSchedule(t *rapid.T, older bool) {
	n := rapid.IntRange(1, 60).Draw(t, "segments")
	w := &world{
		t: t, now: time.Unix(1000, 0), here: make([]bool, n), reads: map[*Read]*waiting{},
		trip: time.Duration(rapid.IntRange(1, 100).Draw(t, "trip")) * time.Millisecond,
		rate: rapid.Float64Range(1e5, 1e8).Draw(t, "rate"),
	}
	if older {
		w.along = rapid.IntRange(1, 5).Draw(t, "along")
	}
	w.s = New(Options{
		Beyond: rapid.SampledFrom([]int64{-1, 0, 256 << 10}).Draw(t, "beyond"),
		Hold:   rapid.SampledFrom([]time.Duration{0, 20 * time.Second}).Draw(t, "hold"),
	})
	w.s.Opened(w)
	var set []page
	if rapid.Bool().Draw(t, "set") {
		at := 0
		for range rapid.IntRange(1, 4).Draw(t, "pages") {
			g := page{size: rapid.Int64Range(1, 400_000).Draw(t, "size")}
			for range rapid.IntRange(1, 5).Draw(t, "segments of a page") {
				if at < n {
					g.segments = append(g.segments, at)
					at++
				}
			}
			set = append(set, g)
		}
	}
	w.begin(set)
	actions := rapid.IntRange(1, 30).Draw(t, "actions")
	for range actions {
		pause := time.Duration(rapid.OneOf(rapid.IntRange(0, 2000), rapid.IntRange(0, 500_000)).Draw(t, "pause")) * time.Microsecond
		w.run(w.now.Add(pause))
		switch rapid.IntRange(0, 10).Draw(t, "action") {
		case 0:
			if !w.lost { // one of a stream: each further one doubles the wait
				w.mute = 1
			}
		case 1: // the stream breaks, and is resumed
			w.tell(w.s.End)
			w.begin(nil)
		case 2:
			w.tell(w.s.Release)
		case 4: // others want the processors
			w.tell(func() { w.s.Yield(w.now, 400*time.Millisecond) })
		case 3: // another pull wants some of it first
			segments := rapid.SliceOf(rapid.IntRange(0, n-1)).Draw(t, "hurried")
			w.tell(func() { w.s.Hurry(w.now, segments) })
		default:
			first := rapid.IntRange(0, n-1).Draw(t, "first")
			w.read(first, rapid.IntRange(1, min(3, n-first)).Draw(t, "count"))
		}
	}
	w.tell(w.s.Release)
	w.run(w.now.Add(time.Hour))
	if len(w.reads) > 0 {
		t.Fatalf("%d reads wait for ever", len(w.reads))
	}
}

// run lets time pass until then.
func (w *world) run(until time.Time) {
	for steps := 0; len(w.due) > 0 && !w.due[0].at.After(until); steps++ {
		if steps > 100_000 {
			w.t.Fatal("it comes to no end")
		}
		h := w.due[0]
		w.due = w.due[1:]
		w.now = h.at
		h.fn()
	}
	w.now = until
}
