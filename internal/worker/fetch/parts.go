package fetch

import (
	"slices"

	"hydrofoil.dev/foil/internal/worker/arena"
	"hydrofoil.dev/foil/internal/worker/schedule"
)

// keep keeps a frame as it came, copied from its buffer, if that is to be done with it. now is
// what is to be written of it at once, if it has reads.
func (l *pipeline) keep(j job) (later bool, now job) {
	p := l.p
	p.mu.Lock()
	filled := j.set != nil && j.set.arena != nil && int(j.frame) >= len(j.set.Frames)-j.set.Filled
	keeps := p.schedule.Keeps(j.set != nil, filled, int64(len(j.data)))
	p.mu.Unlock()
	if !keeps {
		return false, job{}
	}
	j.data, j.buffer = slices.Clone(j.data), nil
	k := &schedule.Kept{Blocks: j.places(), Bytes: int64(len(j.data)), Filled: filled, Handle: j}
	p.mu.Lock()
	defer p.mu.Unlock()
	reads, ok := p.schedule.Keep(k)
	if !ok {
		return false, job{}
	}
	if reads != nil {
		now = part(k, reads)
	}
	return true, now
}

// places returns where the bytes of a frame belong.
func (j job) places() (out []arena.Range) {
	if j.set == nil {
		return j.stream.index.places(j.frame)
	}
	f := &j.set.Frames[j.frame]
	for i, r := range j.set.Runs[f.First : f.First+f.Count] {
		if base, ok := j.set.arena.Layout().Offset(int(r.Content)); ok {
			off, n := r.Range(j.set.contents[int(f.First)+i].Size)
			out = append(out, arena.Range{Off: base + off, Len: n})
		}
	}
	return out
}

// part returns a job that writes what reads lack of a kept frame. p.mu is held.
func part(k *schedule.Kept, reads []*schedule.Read) job {
	j := k.Handle.(job)
	j.kept, j.reads, j.around = k, reads, k.Around()
	return j
}

// forget lets go of a frame that was kept and turned out to be damaged.
func (l *pipeline) forget(k *schedule.Kept) {
	l.p.mu.Lock()
	defer l.p.mu.Unlock()
	l.p.schedule.Forget(k)
}

// writeKept writes frames that were kept, in the background. p.mu is held.
func (l *pipeline) writeKept(list []*schedule.Kept) {
	parts := &list[0].Handle.(job).stream.parts // of one stream: it ends before the next begins
	parts.Add(len(list))
	go func() {
		for _, k := range list {
			j := k.Handle.(job)
			j.done = parts
			l.jobs <- j // the workers take it: the stream waits for parts before they end
		}
	}()
}

// reaches reports whether a read of the job lacks some of [off, off+n) of the arena.
func (j job) reaches(off, n int64) bool {
	return slices.ContainsFunc(j.reads, func(r *schedule.Read) bool { return r.Reaches(off, n) })
}

// writeParts writes what the reads of a job lack of segment i of the arena, and what lies around it.
func (j job) writeParts(a *arena.Arena, i int, data []byte) error {
	for _, k := range a.Layout().Same(nil, i) {
		g := a.Layout().Segment(k)
		for _, r := range j.reads {
			if !r.Reaches(g.Offset, int64(g.Length)) {
				continue
			}
			if err := a.WritePart(k, data, r.Off, r.Len, j.around); err != nil {
				return err
			}
		}
	}
	return nil
}
