package fetch

import (
	"slices"

	"hydrofoil.dev/foil/internal/format/trace"
	"hydrofoil.dev/foil/internal/worker/arena"
)

// Until a service is ready it needs a few of the filled pages of its startup set, and of the
// frames that a miss brings the pages that it missed: some percent of what they hold.
// Written all the same they would be half as much again as the service touches, in the page cache
// and on the disk, and the processors would decode and hash them while the
// service waits for these. So while the server holds, such frames are kept as they came, and
// written as far as somebody reads them, at once; the rest of them when the hold ends.

// keepMost bounds what is kept of a pull, bytes of frames: as much as misses bring before the hold
// ends. What comes beyond it is written as everything is.
const keepMost = aroundAll

// kept is a frame that is to be written later, or of which a part is to be written now.
type kept struct {
	job
	blocks []span // where in arenas it belongs
	hits   int    // reads of it; p.mu guards it
}

// span is a range of an arena that a kept frame has, bytes.
type span struct {
	arena    *arena.Arena
	off, end int64
}

// keep keeps a frame as it came, copied from its buffer, if that is to be done with it. now is
// what is to be written of it at once, if it has reads.
func (p *Pull) keep(j job) (later bool, now job) {
	s := j.stream
	p.mu.Lock()
	keeps := s.hold && !p.hold.released && s.held() && p.keptSize+int64(len(j.data)) <= keepMost
	if j.set != nil {
		keeps = keeps && j.set.arena != nil && int(j.frame) >= len(j.set.Frames)-j.set.Filled
	} else {
		keeps = keeps && p.hold.on
	}
	p.mu.Unlock()
	if !keeps {
		return false, job{}
	}
	j.data, j.buffer = slices.Clone(j.data), nil
	k := &kept{job: j, blocks: j.places()}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.hold.released {
		return false, job{}
	}
	p.kept, p.keptSize = append(p.kept, k), p.keptSize+int64(len(j.data))
	for r := range p.wanted {
		if k.has(r) {
			now.reads = append(now.reads, r)
		}
	}
	if now.reads != nil {
		j.reads = now.reads
		now = k.part(j)
	}
	return true, now
}

// places returns where the bytes of a frame belong.
func (j job) places() (out []span) {
	if j.set != nil {
		f := &j.set.Frames[j.frame]
		for i, r := range j.set.Runs[f.First : f.First+f.Count] {
			if base, ok := j.set.arena.Layout().Offset(int(r.Content)); ok {
				off, n := r.Range(j.set.contents[int(f.First)+i].Size)
				out = append(out, span{j.set.arena, base + off, base + off + n})
			}
		}
		return out
	}
	for a, frameOf := range j.stream.frameOf {
		for i, f := range frameOf {
			if f == j.frame {
				g := a.Layout().Segment(i)
				out = append(out, span{a, g.Offset, g.Offset + int64(g.Length)})
			}
		}
	}
	return out
}

// has reports whether some of what a read waits for is in the frame.
func (k *kept) has(r *reading) bool {
	return slices.ContainsFunc(k.blocks, func(s span) bool {
		return s.arena == r.arena && s.off < r.off+r.n && r.off < s.end
	})
}

// part returns a job that writes some of the frame. p.mu is held.
func (k *kept) part(j job) job {
	k.hits++
	j.kept, j.shift = k, min(2*k.hits, 16)
	return j
}

// keptFor returns what a read needs of kept frames, for writeParts, and whether
// filled pages are all that it needs. p.mu is held.
func (p *Pull) keptFor(r *reading) (parts []job, all bool) {
	var pages []*kept
	for _, k := range p.kept {
		if !k.has(r) {
			continue
		}
		if k.set != nil {
			pages = append(pages, k)
		}
		j := k.job
		j.reads, j.done = []*reading{r}, &k.stream.parts
		j.done.Add(1)
		parts = append(parts, k.part(j))
	}
	// A frame of the plan that is here is not promoted; one that has these pages too would be.
	for at := r.off &^ (arena.BlockSize - 1); at < r.off+r.n; at += arena.BlockSize {
		block := &reading{arena: r.arena, off: at, n: 1}
		if !r.arena.Present(at, 1) && !slices.ContainsFunc(pages, func(k *kept) bool { return k.has(block) }) {
			return parts, false
		}
	}
	return parts, len(parts) > 0
}

// writeParts writes what a read needs of kept frames. If a frame was damaged, what the
// read waits for comes another way.
func (p *Pull) writeParts(r *reading, parts []job) {
	for _, j := range parts {
		p.writeJob(j, nil)
		j.done.Done()
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	r.kept = false
	if p.current != nil && !p.brings(r) {
		p.current.wantAll(r)
	}
}

// forget lets go of a frame that turned out to be damaged: it is asked for again.
func (p *Pull) forget(k *kept) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if i := slices.Index(p.kept, k); k != nil && i >= 0 {
		p.kept, p.keptSize = slices.Delete(p.kept, i, i+1), p.keptSize-int64(len(k.data))
	}
}

// writeKept has what was kept written: nothing is held any more, or the stream is at its end.
// p.mu is held.
func (p *Pull) writeKept() {
	list := p.kept
	p.kept, p.keptSize = nil, 0
	if len(list) == 0 {
		return
	}
	parts := &list[0].stream.parts // of one stream: it ends before the next begins
	parts.Add(len(list))
	go func() {
		for _, k := range list {
			j := k.job
			j.done = parts
			p.jobs <- j // the workers take it: the stream waits for parts before they end
		}
	}()
}

// reaches reports whether a read of the job wants some of [off, off+n) of an arena.
func (j job) reaches(a *arena.Arena, off, n int64) bool {
	return slices.ContainsFunc(j.reads, func(r *reading) bool {
		return r.arena == a && r.off < off+n && off < r.off+r.n
	})
}

// writeParts writes what the reads of a job want of segment i of an arena, and what lies around it:
// four times as much with each read of the frame, since all of it is verified each time.
func (j job) writeParts(a *arena.Arena, i int, data []byte) error {
	for _, k := range a.Layout().Same(nil, i) {
		g := a.Layout().Segment(k)
		for _, r := range j.reads {
			if r.arena != a || r.off >= g.Offset+int64(g.Length) || g.Offset >= r.off+r.n {
				continue
			}
			if err := a.WritePart(k, data, r.off, r.n, int64(trace.BlockSize)<<j.shift); err != nil {
				return err
			}
		}
	}
	return nil
}
