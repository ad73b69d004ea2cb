package dedup

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"runtime"
	"sync"

	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/objects"
)

// Options of a Writer. The zero value is usable.
type Options struct {
	// PackSize is how many bytes of frames a pack takes before the next is
	// begun. Default 64 MiB.
	PackSize int64
	// Workers compress at once. Default: one a processor, at most 8.
	Workers int
	// Keep keeps what the layer relies on until the catalog knows the layer. nil: the Writer's own, until Close.
	Keep catalog.Keep
}

const (
	// A lookup in the catalog is made for so many segments, or so many bytes
	// of them, whichever comes first.
	batchSegments = 512
	batchBytes    = 2 << 20
)

// Writer adds the segments that no pack holds yet. It is for one goroutine and
// must be closed.
//
// It needs some 20 MiB with two workers, 3 MiB for each further one, and 32
// bytes for every distinct segment that it was given (with the map's overhead
// about 60).
type Writer struct {
	store   *Store
	ctx     context.Context
	opts    Options
	found   *Finder
	ownKeep bool

	seen  map[segment.ID]struct{}
	batch []catalog.FrameSegment
	bytes []byte // of batch
	small *frame // being filled with small segments

	free    chan *frame   // frames not in use; nil ones are not made yet
	work    chan *frame   // to the workers
	ordered chan *frame   // to the packer, in order
	failed  chan struct{} // closed when err is set
	fail    sync.Once
	err     error
	wg      sync.WaitGroup
	commits chan struct{} // bounds the packs being committed
	stopped bool

	mu    sync.Mutex
	packs []string // guarded by mu until Finish: committed, catalog not told

	pack  packWriter // the packer's
	stats Stats
}

// Stats counts what a Writer was given and what of it was new.
type Stats struct {
	Segments, Bytes       int64 // given, without repetitions
	NewSegments, NewBytes int64
}

// frame is a frame on its way. Its buffers are used again.
type frame struct {
	raw      []byte
	segments []catalog.FrameSegment
	encoded  []byte
	err      error
	done     chan struct{} // one value when encoded or err is set
}

// packWriter is a pack that is being written.
type packWriter struct {
	key    string
	w      objects.Writer
	table  []byte
	frames int
	size   int64
}

// NewWriter returns a Writer; all it does ends with ctx.
func (s *Store) NewWriter(ctx context.Context, o Options) *Writer {
	if o.PackSize == 0 {
		o.PackSize = 64 << 20
	}
	if o.Workers == 0 {
		o.Workers = min(runtime.GOMAXPROCS(0), 8)
	}
	own := o.Keep == nil
	if own {
		o.Keep = s.Catalog.Keep()
	}
	frames := 2*o.Workers + 1
	w := &Writer{
		store: s, ctx: ctx, opts: o, found: s.NewFinder(o.Keep), ownKeep: own,
		seen:    map[segment.ID]struct{}{},
		free:    make(chan *frame, frames),
		work:    make(chan *frame, frames),
		ordered: make(chan *frame, frames),
		failed:  make(chan struct{}),
		commits: make(chan struct{}, 1),
	}
	for range frames {
		w.free <- nil
	}
	for range o.Workers {
		w.wg.Go(w.compress)
	}
	w.wg.Go(w.write)
	return w
}

var errFinished = errors.New("the writer is finished")

// Add stores a segment unless a pack holds it already. It keeps no reference to
// b. Holes are passed over. Errors are sticky, and may be those of earlier
// segments.
func (w *Writer) Add(id segment.ID, b []byte) error {
	if id.IsHole() {
		return nil
	}
	if w.stopped {
		return errFinished
	}
	if _, ok := w.seen[id]; ok {
		return nil
	}
	w.seen[id] = struct{}{}
	w.stats.Segments++
	w.stats.Bytes += int64(len(b))
	w.batch = append(w.batch, catalog.FrameSegment{ID: id, Length: uint32(len(b))})
	w.bytes = append(w.bytes, b...)
	if len(w.batch) >= batchSegments || len(w.bytes) >= batchBytes {
		return w.flush()
	}
	return nil
}

// flush looks the batch up and hands on what is new.
func (w *Writer) flush() error {
	ids := make([]segment.ID, len(w.batch))
	for i, s := range w.batch {
		ids[i] = s.ID
	}
	locations, err := w.found.Locate(w.ctx, ids)
	if err != nil {
		return w.stop(err)
	}
	rest := w.bytes
	for i, s := range w.batch {
		b := rest[:s.Length]
		rest = rest[s.Length:]
		if locations[i].Frame != nil {
			continue
		}
		w.stats.NewSegments++
		w.stats.NewBytes += int64(s.Length)
		if err := w.place(s, b); err != nil {
			return err
		}
	}
	w.batch, w.bytes = w.batch[:0], w.bytes[:0]
	return nil
}

// place puts a new segment into a frame: a large one into its own, small ones
// together in the order in which they come.
func (w *Writer) place(s catalog.FrameSegment, b []byte) error {
	if len(b) >= segment.FrameAlone {
		f, err := w.take()
		if err != nil {
			return err
		}
		f.add(s, b)
		w.emit(f)
		return nil
	}
	if w.small == nil {
		f, err := w.take()
		if err != nil {
			return err
		}
		w.small = f
	}
	w.small.add(s, b)
	if len(w.small.raw) >= segment.FrameTarget {
		w.emit(w.small)
		w.small = nil
	}
	return nil
}

func (f *frame) add(s catalog.FrameSegment, b []byte) {
	f.segments = append(f.segments, s)
	f.raw = append(f.raw, b...)
}

// take waits for a frame that is free.
func (w *Writer) take() (*frame, error) {
	select {
	case <-w.failed:
		return nil, w.err
	default:
	}
	select {
	case f := <-w.free:
		if f == nil {
			f = &frame{done: make(chan struct{}, 1)}
		}
		f.raw, f.segments, f.err = f.raw[:0], f.segments[:0], nil
		return f, nil
	case <-w.failed:
		return nil, w.err
	case <-w.ctx.Done():
		return nil, w.stop(w.ctx.Err())
	}
}

// emit never blocks: the channels have room for all frames there are.
func (w *Writer) emit(f *frame) {
	w.work <- f
	w.ordered <- f
}

func (w *Writer) compress() {
	for f := range w.work {
		f.encoded, f.err = segment.AppendFrame(f.encoded[:0], segment.Zstd, f.raw)
		f.done <- struct{}{}
	}
}

// write is the packer: it puts frames into packs in the order they came.
func (w *Writer) write() {
	for f := range w.ordered {
		<-f.done
		err := f.err
		select {
		case <-w.failed:
		default:
			if err == nil {
				err = w.writeFrame(f)
			}
			if err != nil {
				w.stop(err) //nolint:errcheck // Publish returns it
			}
		}
		w.free <- f
	}
	select {
	case <-w.failed:
		w.drop()
	default:
		if w.pack.w != nil {
			if err := w.finishPack(); err != nil {
				w.stop(err) //nolint:errcheck // Publish returns it
				w.drop()
			}
		}
	}
}

func (w *Writer) drop() {
	if w.pack.w != nil {
		w.pack.w.Close()
		w.pack.w = nil
	}
}

// newKey returns a name that no pack has.
func newKey() string {
	var name [16]byte
	rand.Read(name[:]) //nolint:errcheck // never fails
	return fmt.Sprintf("%s%x/%x", prefix, name[0], name)
}

func (w *Writer) writeFrame(f *frame) error {
	p := &w.pack
	if err := p.add(w.ctx, w.store.Objects, f.encoded, f.segments); err != nil {
		return err
	}
	if p.size >= w.opts.PackSize || len(p.table) >= maxTable/2 {
		return w.finishPack()
	}
	return nil
}

// add adds a frame, to a new pack if none is being written.
func (p *packWriter) add(ctx context.Context, store objects.Store, encoded []byte, segments []catalog.FrameSegment) error {
	if p.w == nil {
		*p = packWriter{key: newKey(), table: p.table[:0]}
		object, err := store.Create(ctx, p.key)
		if err != nil {
			return fmt.Errorf("create pack %s: %w", p.key, err)
		}
		p.w = object
		if _, err := p.w.Write([]byte(magic)); err != nil {
			return fmt.Errorf("write pack %s: %w", p.key, err)
		}
	}
	if _, err := p.w.Write(encoded); err != nil {
		return fmt.Errorf("write pack %s: %w", p.key, err)
	}
	p.table = appendTable(p.table, len(encoded), segments)
	p.frames++
	p.size += int64(len(encoded))
	return nil
}

// end writes what follows the frames. Nothing is durable before the object is committed.
func (p *packWriter) end() error {
	if _, err := p.w.Write(appendTrailer(p.table, p.table, p.frames)); err != nil {
		return fmt.Errorf("write pack %s: %w", p.key, err)
	}
	return nil
}

// finishPack ends the pack and commits it while the next one is begun.
func (w *Writer) finishPack() error {
	p := &w.pack
	object, key := p.w, p.key
	if err := p.end(); err != nil {
		return err
	}
	p.w = nil
	w.commits <- struct{}{}
	w.wg.Go(func() {
		defer func() { <-w.commits }()
		if err := object.Commit(); err != nil {
			object.Close()
			w.stop(fmt.Errorf("commit pack %s: %w", key, err)) //nolint:errcheck // Publish returns it
		}
		// A commit that failed may have left the object: Close deletes it.
		w.mu.Lock()
		w.packs = append(w.packs, key)
		w.mu.Unlock()
	})
	return nil
}

// stop records the first error and returns it.
func (w *Writer) stop(err error) error {
	w.fail.Do(func() {
		w.err = fmt.Errorf("store segments: %w", err)
		close(w.failed)
	})
	return w.err
}

// Finish makes all that was added durable. Nothing can be added after it.
func (w *Writer) Finish() error {
	if !w.stopped {
		w.stopped = true
		select {
		case <-w.failed:
		default:
			if err := w.flush(); err == nil && w.small != nil {
				w.emit(w.small)
				w.small = nil
			}
		}
		close(w.work)
		close(w.ordered)
		w.wg.Wait()
	}
	select {
	case <-w.failed:
		return w.err
	default:
		return nil
	}
}

// Publish finishes, and then tells the catalog. After an error of the object
// store nothing has changed for anybody; after one of the catalog some packs
// may be known, which does no harm.
func (w *Writer) Publish() error {
	if err := w.Finish(); err != nil {
		return err
	}
	for len(w.packs) > 0 {
		key := w.packs[0]
		p, err := w.store.ReadPack(w.ctx, key)
		if err != nil {
			return w.stop(err)
		}
		// From here on the catalog may know the pack, even when it fails.
		w.packs = w.packs[1:]
		w.opts.Keep.Hold(key)
		if err := w.store.Catalog.AddPack(w.ctx, p); err != nil {
			return w.stop(err)
		}
	}
	return nil
}

// Stats says what Add was given; whole after Publish.
func (w *Writer) Stats() Stats { return w.stats }

// Close ends the Writer. What Publish did not tell the catalog about, it
// deletes, also when the Writer's context is over.
func (w *Writer) Close() error {
	if !w.stopped {
		w.stop(errors.New("closed")) //nolint:errcheck // nobody asks
	}
	w.Finish() //nolint:errcheck // told by Add or Publish
	if w.ownKeep {
		w.opts.Keep.Release()
	}
	ctx := context.WithoutCancel(w.ctx)
	var errs []error
	for _, key := range w.packs {
		if err := w.store.Objects.Delete(ctx, key); err != nil {
			errs = append(errs, fmt.Errorf("delete pack %s: %w", key, err))
		}
	}
	w.packs = nil
	return errors.Join(errs...)
}
