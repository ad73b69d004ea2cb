package bundles

import (
	"context"
	"sync"
	"time"

	"hydrofoil.dev/foil/internal/server/planner"
	"hydrofoil.dev/foil/internal/server/turns"
)

// list says which frames of a plan a stream sends next. It is a value without locks or clocks; queue
// guards it.
//
// What the worker may rely on: promoted frames go first, in the order of its newest promotion, and
// none goes along that it did not name. The others go in the order of the plan. So the lowest frame
// that has not arrived is where the stream is.
type list struct {
	sources  []planner.Source // nil until there is a plan
	taken    []bool           // by frame; true for a skipped one too
	skipped  []bool           // by frame: the worker does not want it
	left     int              // frames that were not taken
	next     int              // no frame before it is left
	promoted []uint32         // to be sent first, some taken
	number   uint64           // of the newest promotion
	paused   int              // streams that go ahead of this one
	held     bool             // as bundle.Request.Hold says
	released bool             // it is not held any more
	choosing bool             // as bundle.Request.Choose says
	chosen   bool             // the choice has come
	behind   bool             // it is others' turn to send what is not promoted
	resting  bool             // as bundle.Promotion.Rest says
}

// start gives the list its frames.
func (l *list) start(sources []planner.Source) {
	l.sources, l.taken, l.skipped, l.left = sources, make([]bool, len(sources)), make([]bool, len(sources)), len(sources)
}

// skip leaves out frames that the worker does not want. Frames that are promoted, not in the plan, or
// sent, are ignored: a promotion counts whether it comes before or after.
func (l *list) skip(frames []uint32) {
	promoted := make(map[uint32]bool, len(l.promoted))
	for _, f := range l.promoted {
		promoted[f] = true
	}
	for _, f := range frames {
		if int(f) < len(l.taken) && !l.taken[f] && !promoted[f] {
			l.taken[f], l.skipped[f] = true, true
			l.left--
		}
	}
}

// promote puts frames before all others, the first one first; behind those that are promoted, if a
// newer promotion has overtaken this one on the way. A promotion without a number, 0, is
// the newest. Frames that are not in the plan, or sent, are ignored; one that was skipped is sent.
func (l *list) promote(number uint64, frames []uint32) {
	lists := [][]uint32{frames, l.promoted}
	if number != 0 && number < l.number {
		lists[0], lists[1] = lists[1], lists[0]
	}
	l.number = max(l.number, number)
	for _, f := range frames {
		if int(f) < len(l.taken) && l.skipped[f] {
			l.taken[f], l.skipped[f] = false, false
			l.left++
			l.next = min(l.next, int(f))
		}
	}
	seen := make(map[uint32]bool, len(frames)+len(l.promoted))
	var first []uint32
	for _, one := range lists {
		for _, f := range one {
			if int(f) < len(l.taken) && !l.taken[f] && !seen[f] {
				seen[f] = true
				first = append(first, f)
			}
		}
	}
	l.promoted = first
}

// waits reports whether what is not promoted is kept back.
func (l *list) waits() bool { return l.paused > 0 || l.held || l.choosing || l.resting }

// urgent reports whether something promoted is to be sent.
func (l *list) urgent() bool {
	for len(l.promoted) > 0 && l.taken[l.promoted[0]] {
		l.promoted = l.promoted[1:]
	}
	return len(l.promoted) > 0
}

// take appends what is to be sent now to run: frames that lie one after the other in one pack, or
// one frame that has to be made; none when nothing may be sent.
func (l *list) take(run []uint32) []uint32 {
	promoted := l.urgent()
	follows := func() (uint32, bool) { // the frame that is to be sent next
		if promoted {
			if len(l.promoted) == 0 {
				return 0, false
			}
			return l.promoted[0], true
		}
		for l.next < len(l.taken) && l.taken[l.next] {
			l.next++
		}
		return uint32(l.next), l.next < len(l.taken)
	}
	if !promoted && (l.waits() || l.behind) {
		return run
	}
	bytes := uint32(0)
	for {
		f, ok := follows()
		if !ok || len(run) > 0 && !l.adjoins(run[len(run)-1], f) {
			break
		}
		if bytes += l.sources[f].Parts[0].Length; len(run) > 0 && bytes > runBytes {
			break
		}
		run = append(run, f)
		l.taken[f] = true
		l.left--
		if promoted {
			l.promoted = l.promoted[1:]
		}
	}
	return run
}

// adjoins reports whether frame b lies right behind frame a, and both go as they are.
func (l *list) adjoins(a, b uint32) bool {
	x, y := l.sources[a], l.sources[b]
	if b != a+1 || !x.Whole() || !y.Whole() || l.taken[b] {
		return false
	}
	p, q := x.Parts[0], y.Parts[0]
	return p.Pack == q.Pack && p.Offset+int64(p.Length) == q.Offset
}

// queue is what a stream still has to send.
type queue struct {
	mu      sync.Mutex
	list    list          // guarded by mu, but for sources, which do not change once there are some
	changed chan struct{} // guarded by mu: closed when list changes; nil: nobody waits
	rests   *time.Timer   // guarded by mu: ends list.resting; nil: it never was

	stream *turns.Stream // guarded by mu: takes turns with others, once settle was called
	asked  bool          // guarded by mu: stream has asked for a turn
	turn   *turns.Turn   // guarded by mu: which it has got, for what is taken next

	// What others wait for: as turns.Turns.Urgent; nil: nothing. favour is how many bytes more may go so; of
	// who takes frames.
	urgent func() (end func())
	favour int64
}

// favourMost is how many promoted bytes of a stream others wait for. A worker that promotes more is not waiting
// for a start.
const favourMost = 64 << 20

// change calls fn with the list, and wakes who waits.
func (q *queue) change(fn func(*list)) {
	q.mu.Lock()
	defer q.mu.Unlock()
	fn(&q.list)
	if q.changed != nil {
		close(q.changed)
		q.changed = nil
	}
}

// start gives the queue its frames.
func (q *queue) start(sources []planner.Source) { q.change(func(l *list) { l.start(sources) }) }

// promote promotes frames: see list.promote.
func (q *queue) promote(number uint64, frames []uint32) {
	q.change(func(l *list) { l.promote(number, frames) })
}

// pause keeps back what is not promoted until resume is called as often.
func (q *queue) pause()  { q.change(func(l *list) { l.paused++ }) }
func (q *queue) resume() { q.change(func(l *list) { l.paused-- }) }

// hold keeps back what is not promoted for some time, or until release is called,
// before it or after. end must be called when the queue is of no more use.
func (q *queue) hold(most time.Duration) (end func()) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.list.released || most <= 0 {
		return func() {}
	}
	q.list.held = true
	timer := time.AfterFunc(most, q.release)
	return func() { timer.Stop() }
}

// release ends what hold does.
func (q *queue) release() { q.change(func(l *list) { l.held, l.released = false, true }) }

// choose keeps back what is not promoted until choice is called, before it or after, or for some
// time. end must be called when the queue is of no more use.
func (q *queue) choose(most time.Duration) (end func()) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.list.chosen || most <= 0 {
		return func() {}
	}
	q.list.choosing = true
	timer := time.AfterFunc(most, q.choice)
	return func() { timer.Stop() }
}

// choice ends what choose does.
func (q *queue) choice() { q.change(func(l *list) { l.choosing, l.chosen = false, true }) }

// rest keeps back what is not promoted for some time from now on, whatever earlier calls said.
func (q *queue) rest(d time.Duration) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.list.resting = true
	if q.rests != nil {
		q.rests.Reset(d)
		return
	}
	q.rests = time.AfterFunc(d, func() { q.change(func(l *list) { l.resting = false }) })
}

// skip skips frames: see list.skip.
func (q *queue) skip(frames []uint32) { q.change(func(l *list) { l.skip(frames) }) }

// settle has what is not promoted take turns with the rests of others, from now on.
func (q *queue) settle(s *turns.Stream) {
	q.change(func(l *list) { q.stream, l.behind = s, true })
}

// wait waits until something may be sent, and has c be that; no frames at the end.
func (q *queue) wait(ctx context.Context, c *chunk) error {
	for {
		q.mu.Lock()
		promoted := q.list.urgent()
		if c.frames = q.list.take(c.frames[:0]); len(c.frames) > 0 || q.list.left == 0 {
			if len(c.frames) > 0 && !promoted && q.stream != nil {
				q.list.behind, c.turn, q.turn = true, q.turn, nil
			}
			q.mu.Unlock()
			if promoted && q.urgent != nil && q.favour > 0 {
				c.urgent = q.urgent()
			}
			return nil
		}
		if q.changed == nil {
			q.changed = make(chan struct{})
		}
		changed := q.changed
		ask := q.list.behind && !q.list.waits() && !q.asked
		if ask {
			q.asked = true
		}
		stream := q.stream
		q.mu.Unlock()
		if ask {
			stream.Ask(func(t *turns.Turn) {
				q.change(func(l *list) { q.asked, q.turn, l.behind = false, t, false })
			})
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// takeNow takes what may be sent now, without waiting, and returns the sources too.
func (q *queue) takeNow(run []uint32) ([]uint32, []planner.Source) {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.list.take(run[:0]), q.list.sources
}

// waits reports whether what is left is kept back, or may wait for its turn.
func (q *queue) waits() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.list.waits() || q.list.behind
}
