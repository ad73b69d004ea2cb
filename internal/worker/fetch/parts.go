package fetch

import (
	"slices"
	"sync"

	"hydrofoil.dev/foil/internal/format/trace"
	"hydrofoil.dev/foil/internal/worker/arena"
)

// keep keeps a frame as it came, copied from its buffer, if that is to be done with it. now is
// what is to be written of it at once, if it has reads.
func (l *pipeline) keep(j job) (later bool, now job) {
	p := l.p
	p.mu.Lock()
	filled := j.set != nil && j.set.arena != nil && int(j.frame) >= len(j.set.Frames)-j.set.Filled
	keeps := p.schedule.keeps(j.set != nil, filled, int64(len(j.data)))
	p.mu.Unlock()
	if !keeps {
		return false, job{}
	}
	j.data, j.buffer = slices.Clone(j.data), nil
	k := &kept{job: j, blocks: j.places()}
	p.mu.Lock()
	defer p.mu.Unlock()
	reads, ok := p.schedule.keep(k)
	if !ok {
		return false, job{}
	}
	if reads != nil {
		now = k.part(reads, nil)
	}
	return true, now
}

// places returns where the bytes of a frame belong.
func (j job) places() (out []span) {
	if j.set == nil {
		return j.stream.index.spans(j.frame)
	}
	f := &j.set.Frames[j.frame]
	for i, r := range j.set.Runs[f.First : f.First+f.Count] {
		if base, ok := j.set.arena.Layout().Offset(int(r.Content)); ok {
			off, n := r.Range(j.set.contents[int(f.First)+i].Size)
			out = append(out, span{base + off, base + off + n})
		}
	}
	return out
}

// part returns a job that writes what reads lack of the frame, of which done is told. p.mu is held.
func (k *kept) part(reads []*reading, done *sync.WaitGroup) job {
	j := k.job
	j.kept, j.reads, j.done, j.shift = k, reads, done, min(2*k.hits, 16)
	if done != nil {
		done.Add(1)
	}
	return j
}

// forget lets go of a frame that was kept and turned out to be damaged.
func (l *pipeline) forget(k *kept) {
	l.p.mu.Lock()
	defer l.p.mu.Unlock()
	l.p.schedule.forget(k)
}

// writeKept writes frames that were kept, in the background. p.mu is held.
func (l *pipeline) writeKept(list []*kept) {
	parts := &list[0].stream.parts // of one stream: it ends before the next begins
	parts.Add(len(list))
	go func() {
		for _, k := range list {
			j := k.job
			j.done = parts
			l.jobs <- j // the workers take it: the stream waits for parts before they end
		}
	}()
}

// reaches reports whether a read of the job lacks some of [off, off+n) of the arena.
func (j job) reaches(off, n int64) bool {
	return slices.ContainsFunc(j.reads, func(r *reading) bool { return r.off < off+n && off < r.off+r.n })
}

// writeParts writes what the reads of a job lack of segment i of the arena, and what lies around it:
// four times as much with each read of the frame, since all of it is verified each time.
func (j job) writeParts(a *arena.Arena, i int, data []byte) error {
	for _, k := range a.Layout().Same(nil, i) {
		g := a.Layout().Segment(k)
		for _, r := range j.reads {
			if r.off >= g.Offset+int64(g.Length) || g.Offset >= r.off+r.n {
				continue
			}
			if err := a.WritePart(k, data, r.off, r.n, int64(trace.BlockSize)<<j.shift); err != nil {
				return err
			}
		}
	}
	return nil
}
