package start

import (
	"path/filepath"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/trace"
	"hydrofoil.dev/foil/internal/kernel"
	"hydrofoil.dev/foil/internal/worker/locks"
	"hydrofoil.dev/foil/internal/worker/memory"
)

// warmer reads the pages of a startup set through the mount of the rootfs, as they
// arrive: they are in the mount's own page cache then, where processes find
// them without asking the gate, which costs a container two switches of context for
// each page that it touches.
//
// It reads what is present, so that the gate's answer waits for nobody. Still
// it is the daemon that waits for itself meanwhile: with the fanotify gate that
// does no harm whenever it dies, since such a read can be killed. One that a FUSE server
// waits for from itself cannot, so there is no warming up with that.
//
// Nobody can tell whether a page that was read ahead is used. So it is done for
// sets that were traced, which are exact, and where nothing is reported: a set that workers
// teach would never lose what it has too much.
type warmer struct {
	mu       locks.Mutex[locks.Leaf]
	runs     []trace.Run // to be read
	mounted  bool
	busy     bool               // somebody reads
	borrowed map[trace.Run]bool // read from other arenas: see borrowed.go
}

const (
	// warmWindow is what one call reads ahead at most: the kernel reads no more at once of
	// a mount that has no device.
	warmWindow = 128 << 10
	// warmFiles is how many files of a mount are held open for it.
	warmFiles = 256
)

// Pages tells of page runs of a set that have been written to the arena.
func (s *Start) Pages(origin string, runs []trace.Run) {
	l := s.laidOut()
	if l == nil || origin != bundle.OriginTraced && LearnerOf(l.r) != nil {
		return
	}
	w := &s.warm
	w.mu.Lock()
	w.runs = append(w.runs, runs...)
	w.mu.Unlock()
	s.warmUp()
}

// Mounted tells that the rootfs is mounted: pages may be read through it.
func (s *Start) Mounted() {
	l := s.laidOut()
	if l == nil || l.r.Mount().Gated() || !s.opts.Set {
		return
	}
	w := &s.warm
	w.mu.Lock()
	w.mounted = true
	w.mu.Unlock()
	s.warmUp()
}

// warmUp has what is queued read, unless somebody is at it.
func (s *Start) warmUp() {
	l := s.laidOut()
	w := &s.warm
	w.mu.Lock()
	begin := !w.busy && w.mounted && len(w.runs) > 0 && l != nil
	w.busy = w.busy || begin
	w.mu.Unlock()
	if begin {
		s.read(func() { s.warmRuns(l) })
	}
}

func (s *Start) warmRuns(l *laid) {
	w := &s.warm
	priority := kernel.OwnPriority()
	defer priority.End()
	priority.SetLow(true)
	m := through{laid: l, memory: s.memory}
	defer m.close()
	for {
		w.mu.Lock()
		runs := w.runs
		w.runs = nil
		if len(runs) == 0 || s.ctx.Err() != nil {
			w.busy = false
			w.mu.Unlock()
			return
		}
		w.mu.Unlock()
		a := l.r.Arena()
		// What has queued up are pieces of the same tables, in the order of need: one read,
		// and one question to the gate, for what lies together.
		for _, run := range trace.Merge(runs) {
			if a == nil || s.ctx.Err() != nil {
				break
			}
			if at, own := a.Layout().Offset(int(run.Content)); own {
				m.read(run, func(off, n int64) { a.Ahead(at+off, n) })
			}
		}
	}
}

// forget lets go of what is known of the image. Nobody reads any more.
func (w *warmer) forget() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.runs, w.mounted, w.borrowed = nil, false, nil
}

// through reads files of a mount into its page cache, as far as there is memory for it.
type through struct {
	*laid
	memory *memory.Account
	fds    map[uint32]int // open, by content
}

// read reads a run, in pieces that before, if not nil, is called with. A failure is nothing, nor is memory that is
// refused: who needs the page reads it.
func (m *through) read(run trace.Run, before func(off, n int64)) {
	off, n := run.Range(m.toc.Contents[run.Content].Size)
	if !m.memory.Take(n) {
		return
	}
	fd, open := m.fds[run.Content]
	if !open {
		path, named := m.names().Path(int32(run.Content))
		if !named {
			return
		}
		if len(m.fds) == warmFiles {
			m.close()
		}
		var err error
		if fd, err = unix.Open(filepath.Join(m.dir, path), unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0); err != nil {
			return
		}
		if m.fds == nil {
			m.fds = make(map[uint32]int)
		}
		m.fds[run.Content] = fd
	}
	for n > 0 {
		some := min(n, warmWindow)
		if before != nil {
			before(off, some)
		}
		_ = unix.Fadvise(fd, off, some, unix.FADV_WILLNEED)
		off, n = off+some, n-some
	}
}

func (m *through) close() {
	for _, fd := range m.fds {
		unix.Close(fd)
	}
	clear(m.fds)
}
