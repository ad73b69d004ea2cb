// Package start is all that a pull does for the start of the services that it was
// begun for, until they are ready: the server holds back what is not of the startup
// set (hold.go), the mount has no read-ahead (readahead.go), pages that have come
// are read into the mount's page cache (warm.go), so are pages that other arenas
// hold (borrowed.go), and what the first container reads is reported (learn.go).
//
// None of it decides about a byte: without it a start is slower, and nothing else.
package start

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/worker/locks"
	"hydrofoil.dev/foil/internal/worker/memory"
	"hydrofoil.dev/foil/internal/worker/store"
)

// Options configure a Start. All are required, but for those that say otherwise.
type Options struct {
	Store  *store.Store
	Logger *slog.Logger
	// Set says that a startup set is asked for.
	Set bool
	// Probed says that somebody will say when a container is ready.
	Probed bool
	// Soon says that a container is about to be started, of which nobody will say
	// when it is ready: containerd's.
	Soon bool
	// Learning says that what the first container reads may be reported.
	Learning bool
	// Go runs what may outlive the pull, and ends with the daemon. It reports false
	// when the daemon is ending, and fn is not run.
	Go func(fn func()) bool
	// Report sends an encoded trace to the image's server.
	Report func(ctx context.Context, encoded []byte) error
	// Counted is told how many pages of a startup set were read until the container
	// was ready, and how many were not. It may be nil.
	Counted func(hit, unused int)
	// Memory bounds what is read into page caches; nil: nothing does.
	Memory *memory.Budget
}

// Start is the start of the services of one pull.
type Start struct {
	opts  Options
	log   *slog.Logger
	ctx   context.Context // the pull's
	began time.Time
	work  sync.WaitGroup
	// reads are those of work that read pages.
	reads sync.WaitGroup
	whole atomic.Bool // see Whole

	mu    locks.Mutex[locks.Leaf]
	ended bool          // nothing is begun any more
	laid  *laid         // nil: the rootfs was here before
	ready chan struct{} // closed when the first service is ready
	next  chan struct{} // closed, and made anew, when one that joined is ready

	warm   warmer
	memory *memory.Account
}

// laid is a rootfs that the pull has laid out.
type laid struct {
	r     *store.Rootfs
	dir   string // where it is mounted
	toc   *toc.TOC
	place store.Placement
	names func() *toc.Names // made when they are needed
	ended func()            // gives the mount its read-ahead back
}

// New is of a pull that ends with ctx.
func New(ctx context.Context, opts Options) *Start {
	return &Start{opts: opts, log: opts.Logger, ctx: ctx, began: time.Now(), ready: make(chan struct{}), next: make(chan struct{}), memory: opts.Memory.Begin()}
}

// goes runs fn, which ends with the pull, unless that has ended.
func (s *Start) goes(fn func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.ended {
		s.work.Go(fn)
	}
}

// read is goes, for what AwaitReads waits for.
func (s *Start) read(fn func()) {
	s.reads.Add(1)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended {
		s.reads.Done()
		return
	}
	s.work.Go(func() {
		defer s.reads.Done()
		fn()
	})
}

// AwaitReads waits until what has arrived has been read into the page cache.
func (s *Start) AwaitReads() { s.reads.Wait() }

// LaidOut tells that the pull has laid out r, which is not mounted yet.
func (s *Start) LaidOut(r *store.Rootfs, t *toc.TOC, place store.Placement) {
	l := &laid{r: r, dir: r.Mountpoint(), toc: t, place: place, ended: func() {}, names: sync.OnceValue(func() *toc.Names { return toc.NamesOf(t) })}
	if s.opts.Set {
		l.ended = r.Mount().Started()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.laid = l
}

func (s *Start) laidOut() *laid {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.laid
}

// Ready tells that a container is ready.
func (s *Start) Ready() {
	s.mu.Lock()
	defer s.mu.Unlock()
	select {
	case <-s.ready: // a service that has joined
		close(s.next)
		s.next = make(chan struct{})
	default:
		close(s.ready)
	}
}

// isReady reports whether the first service is ready.
func (s *Start) isReady() bool {
	select {
	case <-s.ready:
		return true
	default:
		return false
	}
}

// End ends what is done for the start: the pull has ended. Its context has, too.
func (s *Start) End() {
	s.mu.Lock()
	s.ended = true
	s.mu.Unlock()
	s.work.Wait()
	s.mu.Lock()
	l := s.laid
	s.laid = nil
	s.mu.Unlock()
	if l != nil {
		l.ended()
	}
	s.warm.forget()
	s.memory.End()
}

// Bound has no more read ahead than the memory limits of a container leave, in bytes, that is about to be started.
func (s *Start) Bound(left int64) { s.memory.Bound(left) }

// settle is after which time a start counts as over of which nobody says when it is.
const settle = 5 * time.Second

// readyAfter is how long after ready, as a probe says it, what is read still belongs
// to the start: what the first that use the service need.
const readyAfter = time.Second
