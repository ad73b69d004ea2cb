package start

import (
	"runtime/debug"
	"time"

	"hydrofoil.dev/foil/internal/worker/store"
)

// A startup set has the pages that a start touches, and no others. With
// read-ahead, a read asks for a window around its page, most of which is not in
// the set, and waits for all of it. So the mount of a rootfs that comes with a
// startup set has no read-ahead until a second after its container is ready, as far as anybody
// says so: else for settle after the set has arrived, and never once everything
// is here. The same holds while nobody knows a set and what is read is noticed to
// make one: with read-ahead it would have what nobody asked for.
//
// A file that is opened meanwhile keeps reading page by page for as long as it
// is open: what is not in the page cache is read two to four times slower than
// with read-ahead, what is there as fast.

// SetArrived tells that all of a startup set has arrived, or that there is none.
func (s *Start) SetArrived(any bool) {
	l := s.laidOut()
	if l == nil {
		return
	}
	learning := LearnerOf(l.r) != nil
	s.goes(func() {
		if any || learning {
			s.awaitReady(s.ready, readyAfter)
		}
		l.ended()
		select {
		case <-l.r.Ready():
			debug.FreeOSMemory() // what the mount of a large image took; a start would wait for it
		case <-s.ctx.Done():
		}
	})
}

// awaitReady waits until a service is ready, and a moment longer; for settle, when
// nobody will say so; or for the end of the pull.
func (s *Start) awaitReady(ready <-chan struct{}, after time.Duration) {
	settled := time.NewTimer(settle)
	defer settled.Stop()
	over := settled.C
	if s.opts.Probed {
		over = nil
	}
	select {
	case <-ready:
		// What is read right after is in the set as well, and reported.
		select {
		case <-time.After(after):
		case <-s.ctx.Done():
		}
	case <-over:
	case <-s.ctx.Done():
	}
}

// Joined tells that another service of the image is started while the pull runs:
// until that one is ready too the mount of r has no read-ahead.
func (s *Start) Joined(r *store.Rootfs, probed bool) {
	s.mu.Lock()
	next := s.next
	s.mu.Unlock()
	if !r.Mount().Mounted() || s.ctx.Err() != nil {
		return
	}
	s.goes(func() {
		defer r.Mount().Started()()
		settled := time.NewTimer(settle)
		defer settled.Stop()
		over := settled.C
		if probed {
			over = nil
		}
		select {
		case <-next:
		case <-over:
		case <-s.ctx.Done():
		}
	})
}
