package node

import (
	"cmp"
	"slices"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/trace"
)

// The pages of a startup set that other arenas hold do not come, and are on the disk:
// in memory they are, if at all, in the page cache of another mount, which shares nothing with
// this one. A start without read-ahead would wait for the disk at each of them, one after the
// other; an update took longer than a start with nothing here. So they are read
// as soon as the header says which they are, in large pieces, side by side, while
// the mount is made and the rest is on its way; then through the mount, so that
// processes find them in its page cache.
//
// Reports tell nothing of contents that other arenas hold. So this is done for any set.

const (
	// hereWindow is how many bytes are read in the order of the disk at a time, and of
	// how many, twice, there are two copies for a moment: one in the page cache of the arena, one in the mount's.
	hereWindow = 8 << 20
	// hereGap is how much is read between two pages rather than asking twice.
	hereGap = 16 << 10
)

// here is told of the pages of a startup set that are here, by each stream of a pull.
func (p *pull) here(_ int, runs []trace.Run) {
	w := &p.warm
	w.mu.Lock()
	defer w.mu.Unlock()
	l := w.laid
	if l == nil {
		return
	}
	if w.here == nil {
		w.here = make(map[trace.Run]bool)
	}
	runs = slices.DeleteFunc(runs, func(run trace.Run) bool { return w.here[run] })
	for _, run := range runs {
		w.here[run] = true
	}
	if len(runs) > 0 {
		p.work.Go(func() { p.readHere(l, runs) })
	}
}

// lentRun is a run that another arena holds.
type lentRun struct {
	trace.Run
	arena  int   // index in lentRuns.files
	off, n int64 // in it
}

// lentRuns are runs that other arenas hold, in the order of need.
type lentRuns struct {
	files []lentFile
	runs  []lentRun
}

// lentFile is an arena.
type lentFile struct {
	*arenaReader
	drop bool // nobody else reads by way of its page cache
}

func (l *lentRuns) close() {
	for _, f := range l.files {
		_ = f.Close()
	}
}

// lentRuns finds runs in the arenas that hold them. What is in the rootfs's own is
// left out.
func (n *Node) lentRuns(in *laid, runs []trace.Run) *lentRuns {
	r, t, place := in.r, in.toc, in.place
	l := &lentRuns{}
	own := r.own()
	wanted := make([][]int32, len(r.rec.Arenas)) // contents, by arena
	type extent struct {
		arena int
		off   int64
	}
	at := make(map[uint32]extent)
	for _, run := range runs {
		if _, seen := at[run.Content]; seen || int(place[run.Content]) == own {
			continue
		}
		at[run.Content] = extent{arena: -1}
		wanted[place[run.Content]] = append(wanted[place[run.Content]], int32(run.Content))
	}
	id := func(c int32) *segment.ID { return &t.Contents[c].ID }
	for i, contents := range wanted {
		if len(contents) == 0 {
			continue
		}
		other := n.arenaOf(r.rec.Arenas[i])
		if other == nil || other.contents == nil {
			continue
		}
		segment.Sort(contents, id)
		other.contents.join(contents, id, func(c int32, off int64, piece bool) {
			if !piece {
				at[uint32(c)] = extent{len(l.files), off}
			}
		})
		n.mu.Lock()
		l.files = append(l.files, lentFile{other.reader(), other.direct || other.lender != nil})
		n.mu.Unlock()
	}
	for _, run := range runs {
		if e, ok := at[run.Content]; ok && e.arena >= 0 {
			off, n := run.Range(t.Contents[run.Content].Size)
			l.runs = append(l.runs, lentRun{run, e.arena, e.off + off, n})
		}
	}
	return l
}

// windows splits runs into pieces of about hereWindow bytes.
func (l *lentRuns) windows() (list [][]lentRun) {
	first, bytes := 0, int64(0)
	for i, run := range l.runs {
		if bytes += run.n; bytes >= hereWindow || i == len(l.runs)-1 {
			list = append(list, l.runs[first:i+1])
			first, bytes = i+1, 0
		}
	}
	return list
}

// advise tells the kernel something about the places of runs, in the order of the files.
func (l *lentRuns) advise(runs []lentRun, advice int) {
	runs = slices.Clone(runs)
	slices.SortFunc(runs, func(a, b lentRun) int { return cmp.Or(cmp.Compare(a.arena, b.arena), cmp.Compare(a.off, b.off)) })
	for len(runs) > 0 {
		at, end := runs[0], runs[0].off+runs[0].n
		for runs = runs[1:]; len(runs) > 0 && runs[0].arena == at.arena && runs[0].off <= end+hereGap; runs = runs[1:] {
			end = max(end, runs[0].off+runs[0].n)
		}
		if f := l.files[at.arena]; advice == unix.FADV_WILLNEED || f.drop {
			if file, err := f.open(); err == nil {
				_ = unix.Fadvise(int(file.Fd()), at.off, end-at.off, advice)
			}
		}
	}
}

// readHere reads runs that other arenas hold. A failure is nothing: who needs the page
// reads it.
func (p *pull) readHere(in *laid, runs []trace.Run) {
	r := in.r
	l := p.n.lentRuns(in, runs)
	defer l.close()
	windows := l.windows()
	if len(windows) == 0 {
		return
	}
	l.advise(windows[0], unix.FADV_WILLNEED)
	select {
	case <-r.ready:
	case <-p.ctx.Done():
		return
	}
	p.n.mu.Lock()
	through := r.mounted && !r.gated && r.broken == nil
	p.n.mu.Unlock()
	m := mounted{laid: in}
	defer m.close()
	for i, window := range windows {
		if i+1 < len(windows) {
			l.advise(windows[i+1], unix.FADV_WILLNEED)
		}
		if !through {
			continue
		}
		for _, run := range window {
			if p.ctx.Err() != nil {
				return
			}
			m.read(run.Run, nil)
		}
		l.advise(window, unix.FADV_DONTNEED)
	}
}
