package bundles

import (
	"context"
	"crypto/rand"
	"fmt"
	"sync"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/server/objects"
	"hydrofoil.dev/foil/internal/server/planner"
)

// runBytes is how much is read from a pack at once. Two runs are ahead of the
// network: a promoted frame waits for no more than that.
const runBytes = 256 << 10

// streams are the bundles under way, by ID.
type streams struct {
	mu sync.Mutex
	m  map[string]*queue // guarded by mu
}

// add gives a queue an ID that nobody can guess: it is the only permission that
// a promotion needs.
func (s *streams) add(q *queue) (id string) {
	id = rand.Text()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.m == nil {
		s.m = map[string]*queue{}
	}
	s.m[id] = q
	return id
}

func (s *streams) remove(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.m, id)
}

func (s *streams) find(id string) *queue {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.m[id]
}

// queue is what a stream still has to send.
type queue struct {
	mu       sync.Mutex
	sources  []planner.Source // guarded by mu; nil until there is a plan
	taken    []bool           // guarded by mu, by frame
	next     int              // guarded by mu: no frame before it is left
	promoted []uint32         // guarded by mu: to be sent first, some taken
}

// start gives the queue its frames.
func (q *queue) start(sources []planner.Source) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.sources, q.taken = sources, make([]bool, len(sources))
}

// promote puts frames before all others, the first one first. Frames that are
// not in the plan, or sent, are ignored.
func (q *queue) promote(frames []uint32) {
	q.mu.Lock()
	defer q.mu.Unlock()
	seen := make(map[uint32]bool, len(frames)+len(q.promoted))
	var promoted []uint32
	for _, list := range [][]uint32{frames, q.promoted} {
		for _, f := range list {
			if int(f) < len(q.taken) && !q.taken[f] && !seen[f] {
				seen[f] = true
				promoted = append(promoted, f)
			}
		}
	}
	q.promoted = promoted
}

// take returns the next frames that lie one after the other in one pack, or one
// frame that has to be made; none at the end.
func (q *queue) take(run []uint32) []uint32 {
	q.mu.Lock()
	defer q.mu.Unlock()
	run = run[:0]
	for len(q.promoted) > 0 && len(run) == 0 {
		if f := q.promoted[0]; !q.taken[f] {
			run = append(run, f)
		}
		q.promoted = q.promoted[1:]
	}
	for len(run) == 0 {
		if q.next == len(q.taken) {
			return nil
		}
		if !q.taken[q.next] {
			run = append(run, uint32(q.next))
		}
		q.next++
	}
	f := run[0]
	q.taken[f] = true
	last, bytes := q.sources[f], q.sources[f].Parts[0].Length
	for f++; int(f) < len(q.taken) && !q.taken[f] && last.Whole() && q.sources[f].Whole(); f++ {
		a, b := last.Parts[0], q.sources[f].Parts[0]
		if a.Pack != b.Pack || a.Offset+int64(a.Length) != b.Offset || bytes+b.Length > runBytes {
			break
		}
		q.taken[f] = true
		run = append(run, f)
		last, bytes = q.sources[f], bytes+b.Length
	}
	return run
}

// chunk is frames that have been read.
type chunk struct {
	frames []uint32
	data   [][]byte // by frame
	buf    []byte   // what data points into; reused
	err    error
}

// read reads chunks until the queue is empty or ctx ends, and closes out. Used
// chunks come back through free.
func (q *queue) read(ctx context.Context, store objects.Store, out chan<- *chunk, free <-chan *chunk) {
	defer close(out)
	var m maker
	for {
		var c *chunk
		select {
		case c = <-free:
		case <-ctx.Done():
			return
		}
		if c.frames = q.take(c.frames); len(c.frames) == 0 {
			return
		}
		c.err = m.fill(ctx, store, q.sources, c) // sources do not change any more
		select {
		case out <- c:
		case <-ctx.Done():
			return
		}
		if c.err != nil {
			return
		}
	}
}

// maker makes frames of picks; it keeps its buffers.
type maker struct {
	stored, raw []byte
}

func (m *maker) fill(ctx context.Context, store objects.Store, sources []planner.Source, c *chunk) error {
	c.data = c.data[:0]
	first := sources[c.frames[0]]
	if !first.Whole() {
		var err error
		if c.buf, err = m.make(ctx, store, first, c.buf[:0]); err != nil {
			return err
		}
		c.data = append(c.data, c.buf)
		return nil
	}
	all := first.Parts[0]
	for _, f := range c.frames[1:] {
		all.Length += sources[f].Parts[0].Length
	}
	var err error
	if c.buf, err = planner.ReadPart(ctx, store, all, c.buf); err != nil {
		return err
	}
	rest := c.buf
	for _, f := range c.frames {
		n := sources[f].Parts[0].Length
		c.data = append(c.data, rest[:n:n])
		rest = rest[n:]
	}
	return nil
}

// make appends to dst a frame of what source picks. Every segment is verified
// on the way: a frame that is damaged in its pack is noticed here.
func (m *maker) make(ctx context.Context, store objects.Store, source planner.Source, dst []byte) ([]byte, error) {
	m.raw = m.raw[:0]
	for _, p := range source.Parts {
		var err error
		if m.stored, err = planner.ReadPart(ctx, store, p, m.stored); err != nil {
			return nil, err
		}
		start := len(m.raw)
		if m.raw, err = segment.DecodeFrame(m.raw, m.stored, int(p.RawLength)); err != nil {
			return nil, fmt.Errorf("frame at %d of pack %s: %w: %w", p.Offset, p.Pack, errDamaged, err)
		}
		// Keep what is picked, in front.
		kept := start
		for _, pick := range p.Picks {
			b := m.raw[start+int(pick.From):][:pick.Length]
			if segment.Sum(b) != pick.ID {
				return nil, fmt.Errorf("segment %s in frame at %d of pack %s: %w", pick.ID, p.Offset, p.Pack, errDamaged)
			}
			copy(m.raw[kept:], b)
			kept += len(b)
		}
		m.raw = m.raw[:kept]
	}
	return segment.AppendFrame(dst, segment.Zstd, m.raw)
}

// send writes what the queue holds.
func (q *queue) send(ctx context.Context, store objects.Store, w *bundle.Writer, flush func() error) error {
	ctx, cancel := context.WithCancel(ctx)
	out, free := make(chan *chunk), make(chan *chunk, 2)
	free <- &chunk{}
	free <- &chunk{}
	go q.read(ctx, store, out, free)
	defer func() {
		cancel()
		for range out { // wait for read
		}
	}()
	for c := range out {
		if c.err != nil {
			return c.err
		}
		for i, f := range c.frames {
			if err := w.Frame(f, c.data[i]); err != nil {
				return writeFailed{err}
			}
		}
		if err := flush(); err != nil {
			return writeFailed{err}
		}
		free <- c
	}
	return ctx.Err()
}

// writeFailed is an error of the connection: there is nobody to tell.
type writeFailed struct{ error }

func (e writeFailed) Unwrap() error { return e.error }
