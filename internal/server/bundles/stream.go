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
	"hydrofoil.dev/foil/internal/server/turns"
)

// runBytes is how much is read from a pack at once. Two runs are ahead of the
// network: a promoted frame waits for no more than that.
const runBytes = 256 << 10

// chunkMost is the most memory that a run takes: one frame of the largest size, and what the slice has
// grown too much. A stream holds two.
const chunkMost = 3 << 19

// streams are the bundles under way, by ID.
type streams struct {
	mu sync.Mutex
	m  map[string]stream // guarded by mu
}

type stream struct {
	queue *queue
	owner
}

// owner is who began a stream, and of what it sends: the repository, and the digest of the manifest.
type owner struct{ subject, repository, reference string }

// add gives a queue an ID that nobody can guess: where the server is open it is the only
// permission that a promotion needs.
func (s *streams) add(q *queue, of owner) (id string) {
	id = rand.Text()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.m == nil {
		s.m = map[string]stream{}
	}
	s.m[id] = stream{q, of}
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

// find returns a stream; nil: there is none.
func (s *streams) find(id string) (*queue, owner) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.m[id].queue, s.m[id].owner
}

// chunk is a run of frames on its way.
type chunk struct {
	frames []uint32
	buf    []byte // their sections; reused
	err    error

	turn   *turns.Turn // in which it goes; nil: it needs none
	urgent func()      // ends that others wait for it; nil: they do not

	// What the last frames came from, kept open for the next ones. file is nil
	// if the pack is not in a file.
	pack   string
	reader io.ReadCloser
	file   *os.File
}

// open opens what a run of frames is read from.
func (c *chunk) open(ctx context.Context, store objects.Store, all planner.Part) error {
	if c.file != nil && c.pack == all.Pack {
		return nil
	}
	c.close()
	r, err := planner.OpenPart(ctx, store, all)
	if err != nil {
		return err
	}
	c.pack, c.reader = all.Pack, r
	if in, ok := r.(objects.InFile); ok {
		c.file = in.File()
	}
	return nil
}

// sent ends what others may wait for, after n bytes went out.
func (c *chunk) sent(n int) {
	if c.turn != nil {
		c.turn.Done(n)
	}
	if c.urgent != nil {
		c.urgent()
	}
	c.turn, c.urgent = nil, nil
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
	// making has room for as many as may be made at a time: each decodes and compresses a frame.
	making chan struct{}
	// place waits for one of whom a context's request is of.
	place func(context.Context) (leave func())
}

// read reads chunks until the queue is empty or ctx ends, and closes out. Used
// chunks come back through free.
func (q *queue) read(ctx context.Context, from source, out chan<- *chunk, free <-chan *chunk) {
	defer close(out)
	for {
		var c *chunk
		select {
		case c = <-free:
		case <-ctx.Done():
			return
		}
		if err := q.wait(ctx, c); err != nil || len(c.frames) == 0 {
			return
		}
		c.err = from.fill(ctx, q.list.sources, c) // sources do not change any more
		if c.urgent != nil {
			q.favour -= int64(len(c.buf))
		}
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

// fill gets the sections of the frames of c.
func (from source) fill(ctx context.Context, sources []planner.Source, c *chunk) error {
	c.buf = c.buf[:0]
	first := sources[c.frames[0]]
	if !first.Whole() {
		b, err := from.made.Get(ctx, nameOf(first), func(ctx context.Context) ([]byte, error) {
			select {
			case from.making <- struct{}{}:
				defer func() { <-from.making }()
			case <-ctx.Done():
				return nil, ctx.Err()
			}
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
	if c.file != nil {
		defer from.place(ctx)()
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

// send writes what the queue holds. While frames are kept back the worker is told
// every alive that there are more.
func (q *queue) send(ctx context.Context, from source, w *bundle.Writer, flush func() error, alive time.Duration) error {
	tick := time.NewTicker(alive)
	defer tick.Stop()
	ctx, cancel := context.WithCancel(ctx)
	out, free := make(chan *chunk), make(chan *chunk, 2)
	chunks := [2]chunk{}
	for i := range chunks {
		free <- &chunks[i]
	}
	go q.read(ctx, from, out, free)
	defer func() {
		cancel()
		for range out { // wait for read
		}
		for i := range chunks {
			chunks[i].sent(0)
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
		if err := w.Sections(c.buf); err != nil {
			return writeFailed{err}
		}
		if err := flush(); err != nil {
			return writeFailed{err}
		}
		c.sent(len(c.buf))
		free <- c
	}
}

// sendPromoted writes what has been promoted, and may be sent, without waiting for more.
func (q *queue) sendPromoted(ctx context.Context, from source, w *bundle.Writer, flush func() error) error {
	var c chunk
	defer c.close()
	for {
		var sources []planner.Source
		if c.frames, sources = q.takeNow(c.frames); len(c.frames) == 0 {
			return nil
		}
		if err := from.fill(ctx, sources, &c); err != nil {
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

// writeFailed is an error of the connection: there is nobody to tell.
type writeFailed struct{ error }

func (e writeFailed) Unwrap() error { return e.error }
