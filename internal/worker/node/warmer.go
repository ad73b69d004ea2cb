package node

import (
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/format/trace"
	"hydrofoil.dev/foil/internal/kernel"
)

// warmer reads the pages of a startup set through the mount of the rootfs that a
// pull fills, as they arrive: they are in the mount's own page cache then, where processes find
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
	mu    sync.Mutex
	laid  *laid              // nil: the rootfs was here before
	runs  []trace.Run        // to be read
	ready bool               // it is mounted
	busy  bool               // somebody reads
	here  map[trace.Run]bool // read from other arenas: see here.go
}

const (
	// warmWindow is what one call reads ahead at most: the kernel reads no more at once of
	// a mount that has no device.
	warmWindow = 128 << 10
	// warmFiles is how many files of a mount are held open for it.
	warmFiles = 256
)

// laid is a rootfs that a pull has laid out.
type laid struct {
	r     *rootfs
	dir   string // where it is mounted
	toc   *toc.TOC
	place placement
	names func() *names // made when they are needed
}

// laid notes that p has laid out r.
func (p *pull) laid(r *rootfs, t *toc.TOC, place placement) {
	p.warm.mu.Lock()
	defer p.warm.mu.Unlock()
	p.warm.laid = &laid{r, r.path("mnt"), t, place, sync.OnceValue(func() *names { return namesOf(t) })}
}

// pages is told of page runs that have been written to the arena.
func (p *pull) pages(_ int, origin string, runs []trace.Run) {
	p.mu.Lock()
	r := p.rootfs
	p.mu.Unlock()
	if r == nil {
		return
	}
	p.n.mu.Lock()
	wanted := origin == bundle.OriginTraced || r.learning == nil
	p.n.mu.Unlock()
	if !wanted {
		return
	}
	w := &p.warm
	w.mu.Lock()
	defer w.mu.Unlock()
	w.runs = append(w.runs, runs...)
	p.warmLocked()
}

// warmUp lets the warmer begin, since the rootfs is mounted.
func (p *pull) warmUp(r *rootfs) {
	p.n.mu.Lock()
	gated := r.gated
	p.n.mu.Unlock()
	if gated || !p.wantsStartup() {
		return
	}
	w := &p.warm
	w.mu.Lock()
	defer w.mu.Unlock()
	w.ready = true
	p.warmLocked()
}

// warmLocked has what is queued read, by a goroutine that the pull waits for.
func (p *pull) warmLocked() {
	w := &p.warm
	if w.busy || !w.ready || len(w.runs) == 0 {
		return
	}
	w.busy = true
	l := w.laid
	p.work.Go(func() {
		priority := kernel.OwnPriority()
		defer priority.End()
		priority.SetLow(true)
		m := mounted{laid: l}
		defer m.close()
		for {
			w.mu.Lock()
			runs := w.runs
			w.runs = nil
			if len(runs) == 0 || p.ctx.Err() != nil {
				w.busy = false
				w.mu.Unlock()
				return
			}
			w.mu.Unlock()
			p.n.mu.Lock()
			a := l.r.arena
			p.n.mu.Unlock()
			// What has queued up are pieces of the same tables, in the order of need: one read,
			// and one question to the gate, for what lies together.
			for _, run := range trace.Merge(runs) {
				if a == nil || p.ctx.Err() != nil {
					break
				}
				if at, own := a.Layout().Offset(int(run.Content)); own {
					m.read(run, func(off, n int64) { a.Ahead(at+off, n) })
				}
			}
		}
	})
}

// coolDown forgets what the warmer knows of the image. Nobody reads any more.
func (w *warmer) coolDown() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.laid, w.runs, w.ready, w.here = nil, nil, false, nil
}

// mounted reads files of a mount into its page cache.
type mounted struct {
	*laid
	fds map[uint32]int // open, by content
}

// read reads a run, in pieces that before, if not nil, is called with. A failure is nothing:
// who needs the page reads it.
func (m *mounted) read(run trace.Run, before func(off, n int64)) {
	fd, open := m.fds[run.Content]
	if !open {
		path, named := m.names().path(int32(run.Content))
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
	off, n := run.Range(m.toc.Contents[run.Content].Size)
	for n > 0 {
		some := min(n, warmWindow)
		if before != nil {
			before(off, some)
		}
		_ = unix.Fadvise(fd, off, some, unix.FADV_WILLNEED)
		off, n = off+some, n-some
	}
}

func (m *mounted) close() {
	for _, fd := range m.fds {
		unix.Close(fd)
	}
	clear(m.fds)
}
