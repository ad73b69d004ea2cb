package fetch

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/semaphore"

	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/kernel"
	"hydrofoil.dev/foil/internal/worker/arena"
	"hydrofoil.dev/foil/internal/worker/schedule"
)

// inFlight bounds the compressed frames between the stream and the workers,
// bytes.
const inFlight = 8 << 20

// tightSyncBytes is Options.SyncBytes while memory is short: what has not been synced cannot leave the page cache.
const tightSyncBytes = 8 << 20

// pipeline verifies, decompresses and writes frames, and makes what is written durable.
type pipeline struct {
	p       *Pull
	work    sync.WaitGroup // workers, the syncer, the promoter, and who yields
	jobs    chan job
	room    *semaphore.Weighted // of inFlight
	buffers sync.Pool           // *buffer
	unsync  atomic.Int64        // bytes of frames of the plan, decoded, since the last sync
	kick    chan struct{}       // a sync is due
	tight   atomic.Bool         // memory was short when the syncer last looked
}

func (l *pipeline) init(p *Pull) {
	l.p, l.jobs, l.room, l.kick = p, make(chan job), semaphore.NewWeighted(inFlight), make(chan struct{}, 1)
}

// start starts the goroutines, which end when the pull has.
func (l *pipeline) start() {
	for range l.p.opts.Workers {
		l.work.Go(l.worker)
	}
	l.work.Go(l.syncer)
	l.work.Go(l.p.promoter.run)
	if l.p.opts.Yields != nil {
		l.work.Go(l.p.yield)
	}
}

// job is one frame for a worker.
type job struct {
	stream *stream
	set    *set   // that it is a frame of; nil: of the plan
	frame  uint32 // its index there
	data   []byte
	buffer *buffer          // that data is in; nil: in none
	done   *sync.WaitGroup  // to be told; the stream's jobs or parts
	reads  []*schedule.Read // what of the frame is to be written; nil: all
	kept   *schedule.Kept   // what it is a part of, if reads is not nil
	around int64            // how many bytes around these, of a frame of the plan
}

// buffer holds one compressed frame. counted of its bytes are of inFlight.
type buffer struct {
	bytes   []byte
	counted int64
}

// getBuffer returns a buffer of n bytes, once fewer than inFlight are in use.
// When ctx ends first it returns one all the same: the stream is read no
// further.
func (l *pipeline) getBuffer(ctx context.Context, n int) *buffer {
	b, _ := l.buffers.Get().(*buffer)
	if b == nil {
		b = new(buffer)
	}
	if cap(b.bytes) < n {
		b.bytes = make([]byte, n, max(n, 256<<10))
	}
	b.bytes, b.counted = b.bytes[:n], 0
	if l.room.Acquire(ctx, int64(n)) == nil {
		b.counted = int64(n)
	}
	return b
}

func (l *pipeline) putBuffer(b *buffer) {
	if b != nil {
		l.room.Release(b.counted)
		l.buffers.Put(b)
	}
}

// worker decodes frames and writes their segments. While no read waits for any of them the
// processors are the containers': a service that starts, and finds its pages, does not wait
// for those that come next to be written.
func (l *pipeline) worker() {
	priority := kernel.OwnPriority()
	defer priority.End()
	// One that grows with the frames would be memory that nothing has touched yet again and again, and
	// each page of it a page fault. Of this one no more is touched than the largest frame has.
	raw := make([]byte, 0, segment.DecodeCap)
	for j := range l.jobs {
		switch {
		case l.p.ctx.Err() != nil:
		default:
			priority.SetLow(l.p.state().Reads == 0)
			raw = l.writeJob(j, raw)
		}
		l.putBuffer(j.buffer)
		j.done.Done()
	}
}

// writeJob writes what a job says. It returns raw, which it may have replaced by a
// larger buffer.
func (l *pipeline) writeJob(j job, raw []byte) []byte {
	if j.set != nil {
		return l.writePages(j, raw)
	}
	return l.write(j, raw)
}

// write writes one frame. It returns raw, which it may have replaced by a
// larger buffer.
func (l *pipeline) write(j job, raw []byte) []byte {
	p, s := l.p, j.stream
	raw, err := segment.DecodeFrame(raw[:0], j.data, int(s.plan.Frames[j.frame].RawLength))
	if err != nil {
		l.forget(j.kept)
		s.damaged(j.frame, nil, err)
		return raw
	}
	written, wrong := int64(0), segment.ID{}
	a := s.target.arena
	err = s.index.segments(j.frame, func(id segment.ID, from, to, i int) error {
		if id == wrong || a.HasSegment(i) && !a.Layout().Repeated(i) {
			return nil
		}
		var err error
		if j.reads == nil {
			err = a.WriteSegment(i, raw[from:to])
		} else {
			err = j.writeParts(a, i, raw[from:to])
		}
		if errors.Is(err, arena.ErrWrongBytes) {
			l.forget(j.kept)
			s.damaged(j.frame, &id, err)
			wrong = id
			return nil // the others may be right
		}
		written += int64(to - from)
		return err
	})
	if err != nil {
		// The disk, not the server: another stream would not help.
		p.cancel(err)
		return raw
	}
	if j.reads != nil {
		return raw // counted when all of it is written
	}
	if wrong == (segment.ID{}) {
		p.counts.frames.Add(1)
	}
	l.wrote(written)
	return raw
}

// wrote counts bytes of contents that were written from frames of the plan.
func (l *pipeline) wrote(n int64) {
	l.p.counts.stored.Add(n)
	most := l.p.opts.SyncBytes
	if l.tight.Load() {
		most = min(most, tightSyncBytes)
	}
	if l.unsync.Add(n) >= most {
		select {
		case l.kick <- struct{}{}:
		default:
		}
	}
}

// syncer makes what has arrived durable from time to time.
func (l *pipeline) syncer() {
	p := l.p
	ticker := time.NewTicker(p.opts.SyncEvery)
	defer ticker.Stop()
	for {
		select {
		case <-p.ctx.Done():
			return
		case <-l.kick:
		case <-ticker.C:
		}
		p.counts.rate.add(time.Now(), p.counts.moved.Load())
		if err := l.sync(p.ctx); err != nil && p.ctx.Err() == nil {
			p.cancel(err)
			return
		}
	}
}

func (l *pipeline) sync(ctx context.Context) error {
	l.unsync.Store(0)
	// Before the sync, after which the pages may be in memory no more.
	if err := l.settle(); err != nil {
		return err
	}
	a := l.p.arena()
	if a == nil {
		return nil
	}
	if err := a.Sync(ctx); err != nil {
		return err
	}
	if l.tight.Store(l.p.opts.Tight()); l.tight.Load() {
		a.Shed()
	}
	return nil
}

// settle has what pages of startup sets have completed verified, and counted as segments.
func (l *pipeline) settle() error {
	a := l.p.arena()
	if a == nil {
		return nil
	}
	_, err := a.Settle()
	return err
}
