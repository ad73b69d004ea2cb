package node

import (
	"context"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/format/trace"
	"hydrofoil.dev/foil/internal/worker/arena"
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
	runs  []trace.Run // to be read
	r     *rootfs     // nil until it is mounted
	paths map[int32]string
	sizes []toc.Content
	busy  bool // somebody reads
}

const (
	// warmWindow is what one call reads ahead at most: the kernel reads no more at once of
	// a mount that has no device.
	warmWindow = 128 << 10
	// warmFiles is how many files a warmer holds open.
	warmFiles = 256
)

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

// warmUp lets the warmer begin with a rootfs that has just been mounted.
func (p *pull) warmUp(r *rootfs, t *toc.TOC) {
	p.n.mu.Lock()
	gated := r.gated
	p.n.mu.Unlock()
	if gated || !p.wantsStartup() {
		return
	}
	named := paths(t)
	w := &p.warm
	w.mu.Lock()
	defer w.mu.Unlock()
	w.r, w.paths, w.sizes = r, named, t.Contents
	p.warmLocked()
}

// warmLocked has what is queued read, by a goroutine that the pull waits for.
func (p *pull) warmLocked() {
	w := &p.warm
	if w.busy || w.r == nil || len(w.runs) == 0 {
		return
	}
	w.busy = true
	p.work.Go(func() {
		files := make(map[uint32]int) // descriptors, by content
		defer func() {
			for _, fd := range files {
				unix.Close(fd)
			}
		}()
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
			a := w.r.arena
			p.n.mu.Unlock()
			if a != nil {
				w.read(p.ctx, a, files, runs)
			}
		}
	})
}

// read reads runs into the page cache of the mount. A failure is nothing: who needs the
// page reads it.
func (w *warmer) read(ctx context.Context, a *arena.Arena, files map[uint32]int, runs []trace.Run) {
	for _, run := range runs {
		at, own := a.Layout().Offset(int(run.Content))
		path, named := w.paths[int32(run.Content)]
		if ctx.Err() != nil || !own || !named {
			continue
		}
		fd, open := files[run.Content]
		if !open {
			if len(files) == warmFiles {
				for c, fd := range files {
					unix.Close(fd)
					delete(files, c)
				}
			}
			var err error
			if fd, err = unix.Open(filepath.Join(w.r.path("mnt"), path), unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0); err != nil {
				continue
			}
			files[run.Content] = fd
		}
		off, n := run.Range(w.sizes[run.Content].Size)
		for n > 0 {
			some := min(n, warmWindow)
			a.Ahead(at+off, some)
			_ = unix.Fadvise(fd, off, some, unix.FADV_WILLNEED)
			off, n = off+some, n-some
		}
	}
}
