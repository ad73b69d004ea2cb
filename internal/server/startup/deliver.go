package startup

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/format/trace"
	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/objects"
	"hydrofoil.dev/foil/internal/server/planner"
)

// Set is the startup set of a service, as it was when it was found.
type Set struct {
	Origin string // one of bundle's
	// Late are pages that the service touched outside of its set, in the order
	// of need.
	Late []trace.Run

	sets   *Sets
	row    catalog.StartupImage
	store  *Store
	frames []uint32
	filled int // of the last frames
}

// Find returns the set of the service that runs args on an image, whose TOC has the
// contents of table; nil if there is none. What is stale is built in the
// background. A failure is one of the catalog: without a set an image
// arrives as well.
func (s *Sets) Find(ctx context.Context, m Image, args []string, table *toc.TOC) (*Set, error) {
	row, store, err := s.current(ctx, m, table)
	if errors.Is(err, catalog.ErrNotFound) {
		s.build(m, false)
		return nil, nil
	}
	if err == nil && (row.Built != row.Wanted || row.TOC != m.TOC) {
		s.build(m, false)
	}
	if err != nil || store == nil {
		return nil, err
	}
	set := &Set{sets: s, row: row, store: store, Origin: bundle.OriginCommon, frames: store.Common}
	if v := store.find(args); v != nil {
		set.Origin, set.frames, set.filled, set.Late = v.Origin, v.Frames, v.Filled, v.Late
	}
	if len(set.frames)+len(set.Late) == 0 {
		return nil, nil
	}
	return set, nil
}

// current returns what is recorded of an image and its store; none if there is
// none of its TOC. A store that turns out to be lost or damaged is built anew.
// Errors: catalog.ErrNotFound; objects.ErrNotFound; ErrCorrupt.
func (s *Sets) current(ctx context.Context, m Image, table *toc.TOC) (catalog.StartupImage, *Store, error) {
	row, err := s.o.Catalog.StartupImage(ctx, m.Repository, m.ChainID)
	for {
		if err != nil || row.Key == "" || row.TOC != m.TOC {
			return row, nil, err
		}
		store, err := s.open(ctx, row, table)
		if err == nil {
			return row, store, nil
		}
		// It goes when two others have been built after it.
		now, nerr := s.o.Catalog.StartupImage(ctx, m.Repository, m.ChainID)
		if nerr == nil && now.Key != row.Key {
			row = now
			continue
		}
		if errors.Is(err, objects.ErrNotFound) || errors.Is(err, ErrCorrupt) {
			s.Lost(ctx, row, err)
		}
		return row, nil, fmt.Errorf("startup sets of %s of %s: %w", m.ChainID, m.Repository, err)
	}
}

// Lost has a store built anew that was lost or damaged.
func (s *Sets) Lost(ctx context.Context, row catalog.StartupImage, why error) {
	ctx = context.WithoutCancel(ctx)
	now, err := s.o.Catalog.StartupImage(ctx, row.Repository, row.ChainID)
	if err == nil && now.Key == row.Key {
		s.o.Log.Warn("startup pages are lost or damaged, and built anew", "repository", row.Repository, "chain_id", row.ChainID, "object", row.Key, "error", why)
		s.stores.Drop(row.Key)
		now.Built, now.Key, now.Previous = now.Wanted-1, "", ""
		err = s.o.Catalog.PutBuilt(ctx, now)
	}
	if err != nil {
		s.o.Log.Error("startup pages that are lost cannot be built anew", "repository", row.Repository, "chain_id", row.ChainID, "error", err)
		return
	}
	s.build(imageOf(row), false)
}

// Runs returns the pages of the set in the order in which they are sent.
func (t *Set) Runs() []trace.Run {
	var runs []trace.Run
	for _, f := range t.frames {
		frame := &t.store.Frames[f]
		runs = append(runs, t.store.Runs[frame.First:frame.First+frame.Count]...)
	}
	return runs
}

// Delivery is what a worker gets of a set.
type Delivery struct {
	// Wire is what it is told; Index is for the caller to set.
	Wire bundle.Startup
	// Rest are the runs of the set that do not go.
	Rest []trace.Run

	set     *Set
	sources [][]pick // by frame of Wire
}

// pick is what goes of a stored frame: all of it as it is, or some of its runs.
type pick struct {
	frame uint32
	runs  []uint32 // of the store; nil: all, as they are
}

const (
	// wholeQuarters is how many quarters of a stored frame must be wanted for it
	// to go as it is: what is sent too much costs bandwidth, what is picked the
	// processor.
	wholeQuarters = 3
	// mergeWindow is how many bytes of whole frames may go between two picks
	// that are put into one frame.
	mergeWindow = 1 << 20
)

// Select returns what goes of a set: the runs that wanted says, and what else
// is in the frames that are mostly wanted.
func (t *Set) Select(table *toc.TOC, wanted func(trace.Run) bool) *Delivery {
	d := &Delivery{set: t, Wire: bundle.Startup{Origin: t.Origin}}
	type open struct {
		raw, max uint32
		runs     []uint32
		from     []pick
	}
	var frames []open
	at, since := -1, uint32(0) // the frame of picks that is filled, and what went since
	touched := 0               // frames of d before the filled ones
	for i, f := range t.frames {
		if i == len(t.frames)-t.filled {
			touched, at = len(frames), -1
		}
		stored := &t.store.Frames[f]
		var runs []uint32
		raw, rest := uint32(0), len(d.Rest)
		for i := stored.First; i < stored.First+stored.Count; i++ {
			r := t.store.Runs[i]
			if wanted(r) {
				_, n := r.Range(table.Contents[r.Content].Size)
				runs, raw = append(runs, i), raw+uint32(n)
			} else {
				d.Rest = append(d.Rest, r)
			}
		}
		switch {
		case len(runs) == 0:
		case 4*uint64(raw) >= wholeQuarters*uint64(stored.Raw):
			d.Rest = d.Rest[:rest]
			all := make([]uint32, stored.Count)
			for i := range all {
				all[i] = stored.First + uint32(i)
			}
			frames = append(frames, open{stored.Raw, stored.Length, all, []pick{{frame: f}}})
			since += stored.Length
		default:
			if at < 0 || frames[at].raw+raw > frameTarget || since > mergeWindow {
				at, since = len(frames), 0
				frames = append(frames, open{})
			}
			o := &frames[at]
			o.raw += raw
			o.max = uint32(segment.MaxEncoded(int(o.raw)))
			o.runs = append(o.runs, runs...)
			o.from = append(o.from, pick{f, runs})
		}
	}
	if t.filled > 0 {
		d.Wire.Filled = len(frames) - touched
	}
	for _, o := range frames {
		d.Wire.Frames = append(d.Wire.Frames, bundle.StartupFrame{
			MaxLength: o.max, RawLength: o.raw, First: uint32(len(d.Wire.Runs)), Count: uint32(len(o.runs)),
		})
		for _, i := range o.runs {
			d.Wire.Runs = append(d.Wire.Runs, t.store.Runs[i])
			d.Wire.Digests = append(d.Wire.Digests, t.store.Digests[i])
		}
		d.sources = append(d.sources, o.from)
	}
	return d
}

// Verify looks at the stored frames of the set that hold runs with the given digests, after
// take has allowed as many decoded bytes of each. It returns how many such frames are as they
// should be; at the first that is not, the store is built anew, and the error says what is wrong:
// the set is not to be sent.
func (t *Set) Verify(ctx context.Context, table *toc.TOC, digests map[segment.ID]bool, take func(bytes int64) bool) (sound int, err error) {
	r := reader{ctx: ctx}
	defer r.close()
	for _, f := range t.frames {
		stored := &t.store.Frames[f]
		runs := make([]uint32, 0, stored.Count)
		named := false
		for i := stored.First; i < stored.First+stored.Count; i++ {
			runs = append(runs, i)
			named = named || digests[t.store.Digests[i]]
		}
		if !named {
			continue
		}
		if !take(int64(stored.Raw)) {
			return sound, nil
		}
		r.close()
		r.contents = &planner.Contents{TOC: table}
		r.delivery = &Delivery{set: t, sources: [][]pick{{{f, runs}}}, Wire: bundle.Startup{Frames: []bundle.StartupFrame{{RawLength: stored.Raw}}}}
		if _, err := r.pick(0); err != nil {
			return sound, errors.Join(err, r.damaged(err))
		}
		sound++
	}
	return sound, nil
}

const (
	// chunkBytes is how much goes to the network at once: a frame by itself costs a system call
	// and some switches between goroutines.
	chunkBytes = 256 << 10
	// aheadChunks is how many chunks are read before the network has taken those
	// before.
	aheadChunks = 3
)

// Send reads the frames of a delivery, in large reads, and calls fn with Pages sections, one
// or some at a time, all of them in their order; the bytes are valid during the call. A frame
// that is lost or damaged is made anew from the packs, which contents reads. Errors: fn's;
// those of contents.
func (d *Delivery) Send(ctx context.Context, contents *planner.Contents, fn func(sections []byte) error) error {
	type chunk struct {
		data []byte
		err  error
	}
	ctx, cancel := context.WithCancel(ctx)
	out, free := make(chan chunk), make(chan []byte, aheadChunks)
	for range aheadChunks {
		free <- nil
	}
	go func() {
		defer close(out)
		r := reader{ctx: ctx, delivery: d, contents: contents}
		defer r.close()
		for i := 0; i < len(d.sources); {
			var c chunk
			select {
			case c.data = <-free:
			case <-ctx.Done():
				return
			}
			if c.data == nil {
				c.data = make([]byte, 0, chunkBytes)
			}
			// The first frame goes by itself, so that the worker has something to do.
			c.data, c.err = r.section(i, c.data[:0])
			for i++; i > 1 && i < len(d.sources) && c.err == nil && r.sectionMost(i) <= chunkBytes-len(c.data); i++ {
				c.data, c.err = r.section(i, c.data)
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
	}()
	defer func() {
		cancel()
		for range out { // wait for the reader
		}
	}()
	for c := range out {
		if c.err != nil {
			return c.err
		}
		if err := fn(c.data); err != nil {
			return err
		}
		free <- c.data
	}
	return ctx.Err()
}

// reader reads the frames of a delivery one after the other.
type reader struct {
	ctx      context.Context // of one Send
	delivery *Delivery
	contents *planner.Contents

	object io.ReadCloser // nil, or at offset next
	next   int64
	bad    bool // the store was reported lost
	stored []byte
	raw    []byte
}

func (r *reader) close() {
	if r.object != nil {
		r.object.Close()
		r.object = nil
	}
}

// sectionMost is what the section of frame i takes at most, bytes.
func (r *reader) sectionMost(i int) int {
	wire := &r.delivery.Wire
	return int(bundle.SectionLength(int(wire.Frames[i].MaxLength))) + binary.MaxVarintLen32
}

// section appends the Pages section of frame i to dst.
func (r *reader) section(i int, dst []byte) ([]byte, error) {
	body := bundle.AppendPagesHead(dst, uint32(i), 0)
	out, err := r.frame(i, body)
	if err != nil {
		return dst, err
	}
	_ = bundle.AppendPagesHead(out[:len(dst)], uint32(i), len(out)-len(body)) // in its place
	return out, nil
}

// frame appends frame i of the delivery to dst.
func (r *reader) frame(i int, dst []byte) ([]byte, error) {
	wire := &r.delivery.Wire.Frames[i]
	picks := r.delivery.sources[i]
	if picks[0].runs == nil {
		out, err := r.read(i, 0, dst)
		if err == nil {
			return out, nil
		}
		if err := r.damaged(err); err != nil {
			return nil, err
		}
	} else if out, err := r.picked(i, dst); err == nil {
		return out, nil
	} else if err := r.damaged(err); err != nil {
		return nil, err
	}
	return r.made(wire, dst)
}

// picked makes a frame of runs out of stored ones.
func (r *reader) picked(i int, dst []byte) ([]byte, error) {
	body, err := r.pick(i)
	if err != nil {
		return nil, err
	}
	return segment.AppendFrame(dst, segment.Zstd, body)
}

// pick returns the runs of frame i, verified.
func (r *reader) pick(i int) ([]byte, error) {
	store := r.delivery.set.store
	table := r.contents.TOC
	body := make([]byte, 0, r.delivery.Wire.Frames[i].RawLength)
	for k, p := range r.delivery.sources[i] {
		var err error
		if r.stored, err = r.read(i, k, r.stored[:0]); err != nil {
			return nil, err
		}
		f := &store.Frames[p.frame]
		if r.raw, err = segment.DecodeFrame(r.raw[:0], r.stored, int(f.Raw)); err != nil {
			return nil, fmt.Errorf("%w: %w", ErrCorrupt, err)
		}
		rest, picked := r.raw, p.runs
		for n := f.First; n < f.First+f.Count && len(picked) > 0; n++ {
			run := store.Runs[n]
			_, length := run.Range(table.Contents[run.Content].Size)
			if picked[0] == n {
				if segment.Sum(rest[:length]) != store.Digests[n] {
					return nil, fmt.Errorf("%w: run %d of frame %d has other bytes", ErrCorrupt, n-f.First, p.frame)
				}
				body, picked = append(body, rest[:length]...), picked[1:]
			}
			rest = rest[length:]
		}
	}
	return body, nil
}

// read appends the stored frame that pick k of frame i names to dst. A frame
// that does not follow the one before in the object starts a read of all that
// follow each other from it.
func (r *reader) read(i, k int, dst []byte) ([]byte, error) {
	set := r.delivery.set
	f := &set.store.Frames[r.delivery.sources[i][k].frame]
	if r.object == nil || r.next != f.Offset {
		r.close()
		end := f.Offset + int64(f.Length)
		for a, b := i, k+1; a < len(r.delivery.sources); a, b = a+1, 0 {
			for ; b < len(r.delivery.sources[a]); b++ {
				if g := &set.store.Frames[r.delivery.sources[a][b].frame]; g.Offset == end {
					end += int64(g.Length)
					continue
				}
				a = len(r.delivery.sources) - 1
				break
			}
		}
		o, err := set.sets.o.Objects.Open(r.ctx, set.row.Key, f.Offset, end-f.Offset)
		if err != nil {
			return nil, err
		}
		r.object, r.next = o, f.Offset
	}
	start := len(dst)
	dst = append(dst, make([]byte, f.Length)...)
	if _, err := io.ReadFull(r.object, dst[start:]); err != nil {
		return nil, err
	}
	r.next += int64(f.Length)
	if crc32.Checksum(dst[start:], castagnoli) != f.Sum {
		return nil, fmt.Errorf("%w: frame at %d has another checksum", ErrCorrupt, f.Offset)
	}
	return dst, nil
}

// damaged has the store built anew; it returns an error when there is nothing
// more to do for this stream.
func (r *reader) damaged(why error) error {
	r.close()
	if err := r.ctx.Err(); err != nil {
		return err
	}
	if !r.bad {
		r.bad = true
		r.delivery.set.sets.Lost(r.ctx, r.delivery.set.row, why)
	}
	return nil
}

// made makes a frame from the packs.
func (r *reader) made(wire *bundle.StartupFrame, dst []byte) ([]byte, error) {
	s := &r.delivery.Wire
	runs := s.Runs[wire.First : wire.First+wire.Count]
	body, err := readRuns(r.ctx, r.contents, r.contents.TOC, runs)
	if err != nil {
		return nil, err
	}
	rest := body
	for i, run := range runs {
		_, n := run.Range(r.contents.TOC.Contents[run.Content].Size)
		if segment.Sum(rest[:n]) != s.Digests[int(wire.First)+i] {
			return nil, fmt.Errorf("%w: run %+v has another digest than its image's bytes", ErrCorrupt, run)
		}
		rest = rest[n:]
	}
	out, err := segment.AppendFrame(dst, segment.Zstd, body)
	if err == nil && len(out)-len(dst) > int(wire.MaxLength) {
		err = fmt.Errorf("%w: a frame that was announced with %d bytes is lost, and takes %d when made anew", ErrCorrupt, wire.MaxLength, len(out)-len(dst))
	}
	return out, err
}
