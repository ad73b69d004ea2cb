package start

import (
	"cmp"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/format/trace"
	"hydrofoil.dev/foil/internal/worker/memory"
	"hydrofoil.dev/foil/internal/worker/store"
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
	// borrowedWindow is how many bytes are read in the order of the disk at a time, and of
	// how many, twice, there are two copies for a moment: one in the page cache of the arena, one in the mount's.
	borrowedWindow = 8 << 20
	// borrowedGap is how much is read between two pages rather than asking twice.
	borrowedGap = 16 << 10
)

// Borrowed tells which pages of a startup set do not come, since other arenas hold
// them. Each stream of a pull tells of them.
func (s *Start) Borrowed(runs []trace.Run) {
	l := s.laidOut()
	if l == nil {
		return
	}
	w := &s.warm
	w.mu.Lock()
	if w.borrowed == nil {
		w.borrowed = make(map[trace.Run]bool)
	}
	runs = slices.DeleteFunc(runs, func(run trace.Run) bool { return w.borrowed[run] })
	for _, run := range runs {
		w.borrowed[run] = true
	}
	w.mu.Unlock()
	if len(runs) > 0 {
		s.read(func() { s.readBorrowed(l, runs) })
	}
}

// borrowedRun is a run that another arena holds.
type borrowedRun struct {
	trace.Run
	arena  int   // index in borrowedRuns.arenas
	off, n int64 // in it
}

// borrowedRuns are runs that other arenas hold, in the order of need.
type borrowedRuns struct {
	arenas []*store.LentArena
	runs   []borrowedRun
}

func (b *borrowedRuns) close() {
	for _, a := range b.arenas {
		_ = a.Close()
	}
}

// find finds runs in the arenas that hold them. What is in the rootfs's own is
// left out.
func (l *laid) find(st *store.Store, runs []trace.Run) *borrowedRuns {
	wanted := make([]uint32, len(runs))
	for i, run := range runs {
		wanted[i] = run.Content
	}
	at, arenas := st.Lent(l.r, l.toc, l.place, wanted)
	b := &borrowedRuns{arenas: arenas}
	for _, run := range runs {
		if e, ok := at[run.Content]; ok {
			off, n := run.Range(l.toc.Contents[run.Content].Size)
			b.runs = append(b.runs, borrowedRun{run, e.Arena, e.Off + off, n})
		}
	}
	return b
}

// windows splits runs into pieces of about borrowedWindow bytes.
func (b *borrowedRuns) windows() (list [][]borrowedRun) {
	first, bytes := 0, int64(0)
	for i, run := range b.runs {
		if bytes += run.n; bytes >= borrowedWindow || i == len(b.runs)-1 {
			list = append(list, b.runs[first:i+1])
			first, bytes = i+1, 0
		}
	}
	return list
}

// advise tells the kernel something about the places of runs, in the order of the files.
func (b *borrowedRuns) advise(runs []borrowedRun, advice int) {
	runs = slices.Clone(runs)
	slices.SortFunc(runs, func(a, b borrowedRun) int { return cmp.Or(cmp.Compare(a.arena, b.arena), cmp.Compare(a.off, b.off)) })
	for len(runs) > 0 {
		at, end := runs[0], runs[0].off+runs[0].n
		for runs = runs[1:]; len(runs) > 0 && runs[0].arena == at.arena && runs[0].off <= end+borrowedGap; runs = runs[1:] {
			end = max(end, runs[0].off+runs[0].n)
		}
		if a := b.arenas[at.arena]; advice == unix.FADV_WILLNEED || a.Alone {
			if file, err := a.File(); err == nil {
				_ = unix.Fadvise(int(file.Fd()), at.off, end-at.off, advice)
			}
		}
	}
}

// readBorrowed reads runs that other arenas hold. A failure is nothing: who needs the page
// reads it.
func (s *Start) readBorrowed(l *laid, runs []trace.Run) {
	b := l.find(s.opts.Store, runs)
	defer b.close()
	windows := b.windows()
	if len(windows) == 0 {
		return
	}
	b.advise(windows[0], unix.FADV_WILLNEED)
	select {
	case <-l.r.Ready():
	case <-s.ctx.Done():
		return
	}
	usable := l.r.Mount().Mounted() && !l.r.Mount().Gated() && l.r.Broken() == nil
	m := through{laid: l, memory: s.memory}
	defer m.close()
	for i, window := range windows {
		if i+1 < len(windows) {
			b.advise(windows[i+1], unix.FADV_WILLNEED)
		}
		if !usable {
			continue
		}
		for _, run := range window {
			if s.ctx.Err() != nil {
				return
			}
			m.read(run.Run, nil)
		}
		b.advise(window, unix.FADV_DONTNEED)
	}
}

// ReadThrough reads runs of contents through a mount of their image, in the order of
// need.
func ReadThrough(dir string, have *store.Files, runs []trace.Run) {
	names := sync.OnceValue(func() *toc.Names { return toc.NamesOf(have.TOC) })
	m := through{laid: &laid{dir: dir, toc: have.TOC, names: names}, memory: new(memory.Account)}
	defer m.close()
	for _, run := range trace.Merge(runs) {
		m.read(run, nil)
	}
}
