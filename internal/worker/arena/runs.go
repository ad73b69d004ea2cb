package arena

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"

	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/trace"
)

// ErrContradiction is returned, wrapped, when pages and segments that were
// verified each by its own digest are not the same bytes. Whatever is present
// stays so: it may have been read.
var ErrContradiction = errors.New("the server contradicts itself: pages of a startup set and segments of the image differ; remove the image, and pull it again without startup sets")

// WriteRun verifies that data has the digest id, writes it to the place of a
// page run of one of the arena's contents, marks its blocks present and wakes
// those that wait. What is present already is compared with it and left alone.
// A segment that the run completes is marked present too if it is the run, or has
// other places in this arena, where readers may wait for it: it is verified and written there.
// The numbers of those are returned. The others are left to Settle. data is not kept.
//
// Errors: ErrWrongBytes; ErrContradiction; those of pwrite(2). After an error
// nothing is present that was not verified and written.
func (a *Arena) WriteRun(run trace.Run, id segment.ID, data []byte) (completed []int, err error) {
	what := func(err error) error {
		return fmt.Errorf("write pages %d to %d of content %d to arena %s: %w", run.First, run.First+run.Blocks, run.Content, a.dir, explain(err))
	}
	l := a.layout
	k, ok := l.find(int(run.Content))
	if !ok {
		return nil, what(errors.New("the content is not in this arena"))
	}
	base := l.offsets[l.contents[k].first]
	size := l.end(l.contentEnd(k)-1) - base
	if pages := trace.Pages(size); run.Blocks == 0 || uint64(run.First)+uint64(run.Blocks) > uint64(pages) {
		return nil, what(fmt.Errorf("it has %d pages: %w", pages, ErrWrongBytes))
	}
	off, n := run.Range(size)
	if int64(len(data)) != n {
		return nil, what(fmt.Errorf("%d bytes, want %d: %w", len(data), n, ErrWrongBytes))
	}
	if got := segment.ID(sha256.Sum256(data)); got != id {
		return nil, what(fmt.Errorf("got %s, want %s: %w", got, id, ErrWrongBytes))
	}
	if completed, err = a.writeRun(k, base+off, id, data); err != nil {
		return nil, what(err)
	}
	for _, i := range completed {
		if !l.Repeated(i) {
			continue
		}
		b, err := a.ReadSegment(nil, i)
		if err == nil {
			err = a.WriteSegment(i, b)
		}
		if err != nil {
			return nil, what(err)
		}
	}
	return completed, nil
}

// writeRun writes verified bytes of l.contents[k] at off, which is the
// beginning of a block.
func (a *Arena) writeRun(k int, off int64, id segment.ID, data []byte) (completed []int, err error) {
	l := a.layout
	content := &a.contents[k%len(a.contents)]
	content.Lock()
	defer content.Unlock()
	a.mu.RLock()
	defer a.mu.RUnlock()
	if a.closed {
		return nil, ErrClosed
	}
	end := off + int64(len(data))
	from, to := int(off/BlockSize), int((end-1)/BlockSize)+1
	part := func(lo, hi int64) (int64, []byte) {
		lo, hi = max(lo, off), min(hi, end)
		return lo, data[lo-off : hi-off]
	}
	first, after := l.SegmentsIn(off, int64(len(data)))
	for i := nextSet(a.maps.segments, first, after); i < after; i = nextSet(a.maps.segments, i+1, after) {
		if err := a.agrees(part(l.offsets[i], l.end(i))); err != nil {
			return nil, fmt.Errorf("segment %s came before: %w", l.ids[i], err)
		}
	}
	for b := nextSet(a.maps.runs, from, to); b < to; {
		e := nextClear(a.maps.runs, b, to)
		if err := a.agrees(part(int64(b)*BlockSize, int64(e)*BlockSize)); err != nil {
			return nil, fmt.Errorf("other pages came before: %w", err)
		}
		b = nextSet(a.maps.runs, e, to)
	}
	for b := nextClear(a.maps.blocks, from, to); b < to; {
		e := nextSet(a.maps.blocks, b, to)
		lo, piece := part(int64(b)*BlockSize, int64(e)*BlockSize)
		if err := a.pwrite(piece, int(int64(e)*BlockSize-lo)-len(piece), lo); err != nil {
			return nil, err
		}
		fresh := int64(0)
		for i := b; i < e; i++ {
			fresh += a.maps.absentIn(l, i)
		}
		setBits(a.maps.runs, b, e)
		setBits(a.maps.blocks, b, e)
		a.here.Add(fresh)
		a.waits.wake(b, e)
		b = nextClear(a.maps.blocks, e, to)
	}
	for i := nextClear(a.maps.segments, first, after); i < after; i = nextClear(a.maps.segments, i+1, after) {
		if !a.covered(i) {
			continue
		}
		got := id
		if l.offsets[i] != off || l.end(i) != end {
			if !l.Repeated(i) {
				a.unsettled.Lock()
				a.unsettled.list = append(a.unsettled.list, i)
				a.unsettled.Unlock()
				continue
			}
			if got, err = a.sum(i); err != nil {
				return nil, err
			}
		}
		if err := a.settle(i, got); err != nil {
			return nil, err
		}
		completed = append(completed, i)
	}
	return completed, nil
}

// WritePart verifies all of segment i and writes of it what of [off, off+n), at least one byte of which it
// has, is absent, with as much on either side as makes it whole multiples of around, bytes. A segment that
// begins or ends within a block which that would need is written whole, as WriteSegment does.
//
// Errors: those of WriteSegment; ErrContradiction.
func (a *Arena) WritePart(i int, data []byte, off, n, around int64) error {
	l := a.layout
	start, end := l.offsets[i], l.end(i)
	first, after := (start+BlockSize-1)/BlockSize*BlockSize, end/BlockSize*BlockSize // of whole blocks
	if l.contentEnd(l.contentOf(i)) == i+1 {
		after = end
	}
	from, to := max(off/around*around, first), min((off+n+around-1)/around*around, after)
	if l.Repeated(i) || max(off, start)/BlockSize*BlockSize < from || min(off+n, end) > to {
		return a.WriteSegment(i, data)
	}
	if err := a.verify(i, data); err != nil {
		return err
	}
	if _, err := a.writeRun(l.contentOf(i), from, l.ids[i], data[from-start:to-start]); err != nil {
		return fmt.Errorf("write part of segment %s to arena %s: %w", l.ids[i], a.dir, explain(err))
	}
	return nil
}

// settle marks segment i, whose blocks are present and have a digest.
func (a *Arena) settle(i int, got segment.ID) error {
	if want := a.layout.ids[i]; got != want {
		return fmt.Errorf("they make up %s, its segment is %s: %w", got, want, ErrContradiction)
	}
	if fresh, _, _ := a.maps.mark(a.layout, i); fresh {
		a.one()
	}
	return nil
}

// Settle verifies the segments that page runs have completed, marks them present and
// returns their numbers. Their bytes can be read before, since each run was verified; to read and
// hash all of them once more takes the processors as long as hashing the runs did, at a time when
// a start waits for both. So whoever writes runs calls it when there is time, and
// before asking whether the arena is complete.
//
// Errors: ErrContradiction; those of pread(2). What was not verified then is left to
// the next call.
func (a *Arena) Settle() (completed []int, err error) {
	a.unsettled.Lock()
	list := a.unsettled.list
	a.unsettled.list = nil
	a.unsettled.Unlock()
	for n, i := range list {
		fresh, err := a.settleAbsent(i)
		if err != nil {
			a.unsettled.Lock()
			a.unsettled.list = append(a.unsettled.list, list[n:]...)
			a.unsettled.Unlock()
			return completed, fmt.Errorf("verify what came as pages of content %d in arena %s: %w", a.layout.Content(i), a.dir, err)
		}
		if fresh {
			completed = append(completed, i)
		}
	}
	return completed, nil
}

// settleAbsent verifies and marks segment i, unless it is present, or not all of its blocks are.
func (a *Arena) settleAbsent(i int) (fresh bool, err error) {
	content := &a.contents[a.layout.contentOf(i)%len(a.contents)]
	content.RLock()
	defer content.RUnlock()
	a.mu.RLock()
	defer a.mu.RUnlock()
	if a.closed {
		return false, ErrClosed
	}
	if bit(a.maps.segments, i) || !a.covered(i) {
		return false, nil
	}
	got, err := a.sum(i)
	if err != nil {
		return false, err
	}
	return true, a.settle(i, got)
}

// covered reports whether every block with bytes of segment i is present.
func (a *Arena) covered(i int) bool {
	to := int((a.layout.end(i)-1)/BlockSize) + 1
	return nextClear(a.maps.blocks, int(a.layout.offsets[i]/BlockSize), to) == to
}

// sum reads the bytes in the place of segment i and returns their digest.
func (a *Arena) sum(i int) (id segment.ID, err error) {
	s := a.layout.Segment(i)
	h := sha256.New()
	if _, err := io.Copy(h, io.NewSectionReader(a.file, s.Offset, int64(s.Length))); err != nil {
		return id, fmt.Errorf("read segment %s: %w", s.ID, err)
	}
	h.Sum(id[:0])
	return id, nil
}

// finish marks the segments that page runs have completed, and that the daemon
// died before it marked. It is called while nobody else has the arena. What
// cannot be read, or is wrong, stays absent: a pull will meet it.
func (a *Arena) finish() {
	l := a.layout
	if nextSet(a.maps.runs, 0, int(l.Blocks())) == int(l.Blocks()) {
		return
	}
	for i := nextClear(a.maps.segments, 0, l.Segments()); i < l.Segments(); i = nextClear(a.maps.segments, i+1, l.Segments()) {
		if !a.covered(i) {
			continue
		}
		if got, err := a.sum(i); err == nil && got == l.ids[i] {
			a.maps.mark(l, i)
			a.missing.Add(-1)
		}
	}
}

// agrees compares bytes with those in the file at off, which are present.
func (a *Arena) agrees(off int64, data []byte) error {
	buf := copyBuffers.Get().(*[]byte)
	defer copyBuffers.Put(buf)
	if cap(*buf) < len(data) {
		*buf = make([]byte, len(data))
	}
	b := (*buf)[:len(data)]
	if _, err := io.ReadFull(io.NewSectionReader(a.file, off, int64(len(b))), b); err != nil {
		return fmt.Errorf("read what is present at %d: %w", off, err)
	}
	if !bytes.Equal(b, data) {
		return ErrContradiction
	}
	return nil
}

// PresentRuns returns the page runs that are present of segments which are not,
// as runs of the TOC's contents, ascending, and at most trace.MaxRuns: what is to
// be said in bundle.Have.Pages.
func (a *Arena) PresentRuns() []trace.Run { return a.runs(false) }

// PresentPages is PresentRuns, encoded; nil when there are none.
func (a *Arena) PresentPages() []byte {
	if runs := a.PresentRuns(); len(runs) > 0 {
		return trace.AppendRuns(nil, runs)
	}
	return nil
}

// EarlyRuns returns all page runs that were written as such, in the same way,
// whether their segments have come since or not.
func (a *Arena) EarlyRuns() []trace.Run { return a.runs(true) }

func (a *Arena) runs(all bool) []trace.Run {
	l := a.layout
	a.mu.RLock()
	defer a.mu.RUnlock()
	if a.closed {
		return nil
	}
	var runs []trace.Run
	k := 0 // the content of the block at hand
	blocks := int(l.Blocks())
	for b := nextSet(a.maps.runs, 0, blocks); b < blocks; b = nextSet(a.maps.runs, b+1, blocks) {
		if !all && a.maps.absentIn(l, b) == 0 {
			continue
		}
		for k+1 < len(l.contents) && l.offsets[l.contents[k+1].first] <= int64(b)*BlockSize {
			k++
		}
		first := uint32(b - int(l.offsets[l.contents[k].first]/BlockSize))
		if n := len(runs); n > 0 && runs[n-1].Content == l.contents[k].content && runs[n-1].End() == first {
			runs[n-1].Blocks++
			continue
		}
		if len(runs) == trace.MaxRuns {
			break
		}
		runs = append(runs, trace.Run{Content: l.contents[k].content, First: first, Blocks: 1})
	}
	return runs
}
