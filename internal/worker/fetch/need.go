package fetch

import (
	"context"
	"errors"
	"net/http"
	"sync"
	"time"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/worker/arena"
)

const (
	// gather is how long promotions are collected before they are sent: a
	// reader that has just been answered asks for its next page within it.
	gather = time.Millisecond
	// underway bounds the promotions that are sent and not yet answered.
	underway = 16
)

// reading is a read that waits.
type reading struct {
	kept   bool // frames that were kept have it, and are being written; p.mu guards it
	arena  *arena.Arena
	off, n int64
}

// ErrAnother is the cause with which a read's context is cancelled that is to wait by
// another pull: it has not failed, and Waits says so.
var ErrAnother = errors.New("another pull brings it")

// Need waits until [off, off+n) of a, one of the pull's arenas, is present, and
// has what is queued far behind promoted. It fails when a fails or ctx ends;
// see arena.Wait. Of another arena it only waits.
func (p *Pull) Need(ctx context.Context, a *arena.Arena, off, n int64) error {
	if a.Present(off, n) {
		return nil
	}
	began := time.Now()
	r := &reading{arena: a, off: off, n: n}
	p.mu.Lock()
	p.wanted[r] = struct{}{}
	w := Wait{Offset: off, Length: n, Began: began, Moved: p.moved.Load()}
	var parts []job
	parts, r.kept = p.keptFor(r)
	if p.current != nil && !r.kept && !p.brings(r) {
		w.Ahead = p.current.ahead(r)
		w.Planned, w.Promoted = true, p.current.wantAll(r)
	}
	p.mu.Unlock()
	i := p.opts.Waits.begin(w)
	if parts != nil {
		p.writeParts(r, parts)
	}
	err := a.Wait(ctx, off, n)
	p.mu.Lock()
	delete(p.wanted, r)
	p.mu.Unlock()
	failed := err
	if errors.Is(err, ErrAnother) {
		failed = nil
	}
	p.opts.Waits.end(i, time.Since(began), failed)
	return err
}

// wantAll makes what a read waits for come soon, and reports whether something
// had to be promoted. p.mu is held.
func (s *stream) wantAll(r *reading) (promoted bool) {
	for _, i := range r.arena.AbsentSegments(nil, r.off, r.n) {
		if s.want(r.arena, i) {
			promoted = true
		}
	}
	if promoted {
		s.p.missed(r)
	}
	return promoted
}

// want makes a segment come soon, and reports whether it had to be promoted.
// p.mu is held.
func (s *stream) want(a *arena.Arena, i int) bool {
	frameOf := s.frameOf[a]
	if frameOf == nil {
		return false
	}
	if frameOf[i] == noFrame {
		if s.torn > 0 {
			s.again() // its pages may be those that arrived damaged
		}
		return false
	}
	frame := int(frameOf[i])
	switch state := s.state[frame]; {
	case state&damaged != 0:
		s.again()
		return false
	case state&(received|promoted) != 0, !s.p.hold.on && s.comes == nil && !s.far(frame):
		return false
	}
	s.promote(uint32(frame))
	return true
}

// promote has a frame promoted. p.mu is held.
func (s *stream) promote(frame uint32) {
	s.state[frame] |= promoted
	s.p.promoter.add(s, false, frame)
}

// far reports whether more than PromoteBeyond bytes are planned to come before
// a frame. p.mu is held.
func (s *stream) far(frame int) bool {
	if s.p.opts.PromoteBeyond < 0 {
		return true
	}
	left := s.p.opts.PromoteBeyond
	for i := s.next; i < frame; i++ {
		if s.state[i]&received == 0 {
			if left -= int64(s.plan.Frames[i].MaxLength); left < 0 {
				return true
			}
		}
	}
	return false
}

// promoter sends promotions, on the connection that the stream is on.
type promoter struct {
	p    *Pull
	kick chan struct{}

	// Guarded by p.mu.
	stream  *stream
	frames  []uint32 // to be promoted in it
	release bool     // what it holds back is to be sent
}

func (r *promoter) init(p *Pull) { r.p, r.kick = p, make(chan struct{}, 1) }

// add queues promotions, and the end of a hold. p.mu is held.
func (r *promoter) add(s *stream, release bool, frames ...uint32) {
	if r.stream != s {
		r.stream, r.frames, r.release = s, nil, false
	}
	r.frames, r.release = append(r.frames, frames...), r.release || release
	select {
	case r.kick <- struct{}{}:
	default:
	}
}

func (r *promoter) run() {
	var posts sync.WaitGroup
	defer posts.Wait()
	free := make(chan struct{}, underway)
	for {
		select {
		case <-r.kick:
		case <-r.p.ctx.Done():
			return
		}
		timer := time.NewTimer(gather)
		select {
		case <-timer.C:
		case <-r.p.ctx.Done():
			timer.Stop()
			return
		}
		select {
		case free <- struct{}{}:
		case <-r.p.ctx.Done():
			return
		}
		r.p.mu.Lock()
		s, frames, release := r.stream, r.frames, r.release
		r.frames, r.release = nil, false
		r.p.mu.Unlock()
		posts.Go(func() {
			r.post(s, frames, release)
			<-free
		})
	}
}

func (r *promoter) post(s *stream, frames []uint32, release bool) {
	p := r.p
	if len(frames) == 0 && !release {
		return
	}
	err := p.opts.Client.Post(p.ctx, bundle.PromotePath, bundle.Promotion{Stream: s.id, Frames: frames, Release: release}, nil)
	if err == nil {
		p.promotions.Add(int64(len(frames)))
		return
	}
	var status *StatusError
	if errors.As(err, &status) && status.Status == http.StatusNotFound {
		return // the stream has ended: all of it is on its way, or it is resumed
	}
	if p.ctx.Err() != nil {
		return
	}
	p.log.Warn("promotion failed", "stream", s.id, "frames", len(frames), "release", release, "error", err)
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, f := range frames {
		s.state[f] &^= promoted // the next read may try again
	}
}

// ahead returns how many bytes of frames are planned, and have not come, before
// the last frame that a read needs, that one included, as if none were promoted. p.mu is held.
func (s *stream) ahead(r *reading) (n int64) {
	last := -1
	for _, i := range r.arena.AbsentSegments(nil, r.off, r.n) {
		if frameOf := s.frameOf[r.arena]; frameOf != nil && frameOf[i] != noFrame {
			last = max(last, int(frameOf[i]))
		}
	}
	for i := s.next; i <= last; i++ {
		if s.state[i]&received == 0 {
			n += int64(s.plan.Frames[i].MaxLength)
		}
	}
	return n
}

// Backing is an arena that a pull fills: a gate.Backing.
type Backing struct {
	Pull  *Pull
	Arena *arena.Arena
}

// Present reports whether [off, off+n) is present.
func (b Backing) Present(off, n int64) bool { return b.Arena.Present(off, n) }

// Need waits for [off, off+n): see Pull.Need.
func (b Backing) Need(ctx context.Context, off, n int64) error {
	return b.Pull.Need(ctx, b.Arena, off, n)
}
