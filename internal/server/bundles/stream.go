package bundles

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"sync"
	"time"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/server/cache"
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

func (s *streams) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.m)
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
	state    []frameState     // guarded by mu, by frame
	left     int              // guarded by mu: frames that were not taken
	next     int              // guarded by mu: no frame before it is left
	promoted []uint32         // guarded by mu: to be sent first, some taken
	paused   int              // guarded by mu: streams that go ahead of this one
	held     bool             // guarded by mu: as bundle.Request.Hold says
	released bool             // guarded by mu: it is not held any more
	changed  chan struct{}    // guarded by mu: closed when something of this changes; nil: nobody waits
}

type frameState uint8

const (
	isTaken frameState = 1 << iota
	isPromoted
)

// start gives the queue its frames.
func (q *queue) start(sources []planner.Source) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.sources, q.state, q.left = sources, make([]frameState, len(sources)), len(sources)
}

// hold keeps back what is not promoted for some time, or until release is called,
// before it or after. end must be called when the queue is of no more use.
func (q *queue) hold(most time.Duration) (end func()) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.released || most <= 0 {
		return func() {}
	}
	q.held = true
	timer := time.AfterFunc(most, q.release)
	return func() { timer.Stop() }
}

// release ends what hold does.
func (q *queue) release() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.held, q.released = false, true
	q.change()
}

// promote puts frames before all others, the first one first. Frames that are
// not in the plan, or sent, are ignored.
func (q *queue) promote(frames []uint32) {
	q.mu.Lock()
	defer q.mu.Unlock()
	seen := make(map[uint32]bool, len(frames)+len(q.promoted))
	var first []uint32
	for _, list := range [][]uint32{frames, q.promoted} {
		for _, f := range list {
			if int(f) < len(q.state) && q.state[f]&isTaken == 0 && !seen[f] {
				seen[f] = true
				q.state[f] |= isPromoted
				first = append(first, f)
			}
		}
	}
	q.promoted = first
	q.change()
}

// pause keeps back what is not promoted until resume is called as often.
func (q *queue) pause() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.paused++
}

func (q *queue) resume() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.paused--
	q.change()
}

// change wakes who waits. Called with mu held.
func (q *queue) change() {
	if q.changed != nil {
		close(q.changed)
		q.changed = nil
	}
}

// wait waits until something may be sent, and takes it: the next frames that lie
// one after the other in one pack, or one frame that has to be made; none at the
// end.
func (q *queue) wait(ctx context.Context, run []uint32) ([]uint32, error) {
	for {
		q.mu.Lock()
		if run = q.take(run[:0]); len(run) > 0 || q.left == 0 {
			q.mu.Unlock()
			return run, nil
		}
		if q.changed == nil {
			q.changed = make(chan struct{})
		}
		changed := q.changed
		q.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// take appends what may be sent now to run, if there is something. Called with mu
// held.
func (q *queue) take(run []uint32) []uint32 {
	only := q.paused > 0 || q.held // what was promoted
	for len(q.promoted) > 0 && len(run) == 0 {
		if f := q.promoted[0]; q.state[f]&isTaken == 0 {
			run = append(run, f)
		}
		q.promoted = q.promoted[1:]
	}
	for len(run) == 0 {
		if only || q.next == len(q.state) {
			return run
		}
		if q.state[q.next]&isTaken == 0 {
			run = append(run, uint32(q.next))
		}
		q.next++
	}
	f := run[0]
	q.state[f] |= isTaken
	last, bytes := q.sources[f], q.sources[f].Parts[0].Length
	for f++; int(f) < len(q.state) && q.state[f]&isTaken == 0 && last.Whole() && q.sources[f].Whole(); f++ {
		a, b := last.Parts[0], q.sources[f].Parts[0]
		if a.Pack != b.Pack || a.Offset+int64(a.Length) != b.Offset || bytes+b.Length > runBytes || only && q.state[f]&isPromoted == 0 {
			break
		}
		q.state[f] |= isTaken
		run = append(run, f)
		last, bytes = q.sources[f], bytes+b.Length
	}
	q.left -= len(run)
	return run
}

// chunk is a run of frames on its way.
type chunk struct {
	frames []uint32
	// buf is their sections, if they do not go from the file; reused.
	buf []byte
	// direct says that the frames go from the pack's file, from offset on.
	direct bool
	offset int64
	err    error

	// What the last frames came from, kept open for the next ones. file is nil
	// if the pack is not in a file.
	pack   string
	reader io.ReadCloser
	file   *os.File
	size   int64 // of file, bytes
}

// open opens what a run of frames is read from.
func (c *chunk) open(ctx context.Context, store objects.Store, all planner.Part) error {
	if c.file != nil && c.pack == all.Pack && all.Offset+int64(all.Length) <= c.size {
		return nil
	}
	c.close()
	r, err := planner.OpenPart(ctx, store, all)
	if err != nil {
		return err
	}
	c.pack, c.reader = all.Pack, r
	if in, ok := r.(objects.InFile); ok {
		if info, err := in.File().Stat(); err == nil {
			c.file, c.size = in.File(), info.Size()
		}
	}
	return nil
}

// close closes what was read from.
func (c *chunk) close() {
	if c.reader != nil {
		c.reader.Close()
	}
	c.reader, c.file = nil, nil
}

// grow lengthens b by n bytes, to be filled.
func grow(b []byte, n int) []byte { return slices.Grow(b, n)[:len(b)+n] }

// source is where the frames of streams come from.
type source struct {
	store objects.Store
	// made keeps frames that were made of picks, since many workers ask for the
	// same: by what they were made of.
	made *cache.Cache[[]byte]
}

// read reads chunks until the queue is empty or ctx ends, and closes out. Used
// chunks come back through free.
func (q *queue) read(ctx context.Context, from source, direct bool, out chan<- *chunk, free <-chan *chunk) {
	defer close(out)
	for {
		var c *chunk
		select {
		case c = <-free:
		case <-ctx.Done():
			return
		}
		var err error
		if c.frames, err = q.wait(ctx, c.frames); err != nil || len(c.frames) == 0 {
			return
		}
		c.err = from.fill(ctx, q.sources, direct, c) // sources do not change any more
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

// fill gets the sections of the frames of c. With direct, only what is not in a
// file is read.
func (from source) fill(ctx context.Context, sources []planner.Source, direct bool, c *chunk) error {
	c.buf, c.direct = c.buf[:0], false
	first := sources[c.frames[0]]
	if !first.Whole() {
		b, err := from.made.Get(ctx, nameOf(first), func(ctx context.Context) ([]byte, error) {
			return makeFrame(ctx, from.store, first)
		})
		if err != nil {
			return err
		}
		c.buf = append(bundle.AppendFrameHead(c.buf, c.frames[0], len(b)), b...)
		return nil
	}
	all := first.Parts[0]
	for _, f := range c.frames[1:] {
		all.Length += sources[f].Parts[0].Length
	}
	if err := c.open(ctx, from.store, all); err != nil {
		return err
	}
	c.offset = all.Offset
	if c.direct = direct && c.file != nil; c.direct {
		return nil
	}
	for _, f := range c.frames {
		p := sources[f].Parts[0]
		c.buf = bundle.AppendFrameHead(c.buf, f, int(p.Length))
		start := len(c.buf)
		c.buf = grow(c.buf, int(p.Length))
		var err error
		if c.file != nil {
			_, err = c.file.ReadAt(c.buf[start:], p.Offset)
		} else {
			_, err = io.ReadFull(c.reader, c.buf[start:])
		}
		if err != nil {
			return fmt.Errorf("read %d bytes at %d of pack %s: %w", p.Length, p.Offset, p.Pack, planner.Lost(err))
		}
	}
	if c.file == nil {
		c.close()
	}
	return nil
}

// nameOf names what source picks.
func nameOf(source planner.Source) string {
	h := sha256.New()
	var b []byte
	for _, p := range source.Parts {
		b = append(b[:0], p.Pack...)
		b = append(b, 0)
		b = binary.AppendVarint(b, p.Offset)
		b = binary.AppendUvarint(b, uint64(len(p.Picks)))
		for _, pick := range p.Picks {
			b = append(b, pick.ID[:]...)
			b = binary.AppendUvarint(b, uint64(pick.From))
			b = binary.AppendUvarint(b, uint64(pick.Length))
		}
		h.Write(b)
	}
	return string(h.Sum(nil))
}

// makeFrame returns a frame of what source picks. Every segment is verified
// on the way: a frame that is damaged in its pack is noticed here.
func makeFrame(ctx context.Context, store objects.Store, source planner.Source) ([]byte, error) {
	var stored, raw []byte
	for _, p := range source.Parts {
		var err error
		if stored, err = planner.ReadPart(ctx, store, p, stored); err != nil {
			return nil, err
		}
		start := len(raw)
		if raw, err = segment.DecodeFrame(raw, stored, int(p.RawLength)); err != nil {
			return nil, fmt.Errorf("frame at %d of pack %s: %w: %w", p.Offset, p.Pack, errDamaged, err)
		}
		// Keep what is picked, in front.
		kept := start
		for _, pick := range p.Picks {
			b := raw[start+int(pick.From):][:pick.Length]
			if segment.Sum(b) != pick.ID {
				return nil, fmt.Errorf("segment %s in frame at %d of pack %s: %w", pick.ID, p.Offset, p.Pack, errDamaged)
			}
			copy(raw[kept:], b)
			kept += len(b)
		}
		raw = raw[:kept]
	}
	b, err := segment.AppendFrame(nil, segment.Zstd, raw)
	return slices.Clip(b), err
}

// waits reports whether what is left is kept back.
func (q *queue) waits() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.paused > 0 || q.held
}

// send writes what the queue holds; from files by to, if there is one, on which w
// then writes. While frames are kept back the worker is told every alive that there
// are more.
func (q *queue) send(ctx context.Context, from source, to *direct, w *bundle.Writer, flush func() error, alive time.Duration) error {
	tick := time.NewTicker(alive)
	defer tick.Stop()
	ctx, cancel := context.WithCancel(ctx)
	out, free := make(chan *chunk), make(chan *chunk, 2)
	chunks := [2]chunk{}
	for i := range chunks {
		free <- &chunks[i]
	}
	go q.read(ctx, from, to != nil, out, free)
	defer func() {
		cancel()
		for range out { // wait for read
		}
		for i := range chunks {
			chunks[i].close()
		}
	}()
	for {
		var c *chunk
		select {
		case <-tick.C:
			if !q.waits() {
				continue
			}
			if err := errors.Join(w.Alive(), flush()); err != nil {
				return writeFailed{err}
			}
			continue
		case c = <-out:
		}
		if c == nil {
			return ctx.Err()
		}
		if c.err != nil {
			return c.err
		}
		if c.direct {
			if err := q.sendDirect(to, c); err != nil {
				return err
			}
			free <- c
			continue
		}
		if err := w.Sections(c.buf); err != nil {
			return writeFailed{err}
		}
		if err := flush(); err != nil {
			return writeFailed{err}
		}
		free <- c
	}
}

// sendPromoted writes what has been promoted, and may be sent, without waiting for more.
func (q *queue) sendPromoted(ctx context.Context, from source, w *bundle.Writer, flush func() error) error {
	var c chunk
	defer c.close()
	for {
		q.mu.Lock()
		c.frames = q.take(c.frames[:0])
		sources := q.sources
		q.mu.Unlock()
		if len(c.frames) == 0 {
			return nil
		}
		if err := from.fill(ctx, sources, false, &c); err != nil {
			return err
		}
		if err := w.Sections(c.buf); err != nil {
			return writeFailed{err}
		}
		if err := flush(); err != nil {
			return writeFailed{err}
		}
	}
}

// sendDirect sends frames from their file.
func (q *queue) sendDirect(to *direct, c *chunk) error {
	offset := c.offset
	for _, f := range c.frames {
		length := int(q.sources[f].Parts[0].Length)
		if err := to.frame(f, c.file, offset, length); err != nil {
			return fmt.Errorf("send %d bytes at %d of pack %s: %w", length, offset, c.pack, err)
		}
		offset += int64(length)
	}
	return nil
}

// writeFailed is an error of the connection: there is nobody to tell.
type writeFailed struct{ error }

func (e writeFailed) Unwrap() error { return e.error }
