package fetch

import "time"

// After the startup set of a service, a start needs next to nothing: what follows would
// only compete with it for the processors and the disk, and be in the way of
// the page that is missing all the same, which waits for everything that is on
// the line and in buffers before it. So the server is asked to hold back what is
// not promoted (bundle.Request.Hold), and a miss costs one round trip.
//
// It costs one each time, and who misses once is likely to miss again nearby: a file
// that is read from one end to the other, the tables of a large program. The line
// has nothing else to do before the next miss. So what lies around a miss comes
// after it, twice as much each time. The hold does not end with misses: a start that
// has the processors to itself, and waits now and then, is ready before one that
// shares them with the rest of its image, which has to be decompressed, hashed and written.
// Only when misses have brought as much as the set of a large service was the set wrong.
const (
	// aroundFirst is how much comes with the first miss of a start, bytes of frames.
	aroundFirst = 256 << 10
	// aroundMost is how much comes with one miss at most.
	aroundMost = 2 << 20
	// aroundAll is how much misses bring before the hold ends.
	aroundAll = 16 << 20
)

// hold is what Options.Hold has become. p.mu guards it.
type hold struct {
	on       bool // the current stream holds back what is not promoted, unless the server knows no holds
	released bool
	ends     time.Time   // once it has begun, in whichever stream
	timer    *time.Timer // calls Release then
	misses   int
	brought  int64 // with misses, bytes of frames
}

// Release ends what Options.Hold does, before it has begun as well.
func (p *Pull) Release() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.release()
}

// ReleaseAfter has the hold end after a while at the latest: a service that is ready has its first
// users, for whom it works as it did for its start.
func (p *Pull) ReleaseAfter(d time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	h := &p.hold
	switch ends := time.Now().Add(d); {
	case p.opts.Hold == 0:
		p.release()
	case h.released, !h.ends.IsZero() && h.ends.Before(ends):
	default:
		if h.timer != nil {
			h.timer.Stop()
		}
		h.ends, h.timer = ends, time.AfterFunc(d, p.Release)
	}
}

// release is Release with p.mu held.
func (p *Pull) release() {
	h := &p.hold
	if h.on {
		p.promoter.add(p.current, true)
	}
	h.on, h.released = false, true
	p.writeKept()
}

// holdLeft is for how long the server is to hold in the next stream.
func (p *Pull) holdLeft() time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.hold.released:
		return 0
	case p.hold.ends.IsZero():
		return p.opts.Hold
	}
	return max(0, time.Until(p.hold.ends))
}

// beginHold notes that the server holds, now that a stream's plan is here. p.mu is
// held.
func (s *stream) beginHold() {
	h := &s.p.hold
	if !s.hold || !s.held() {
		return
	}
	h.on = true
	if h.released {
		s.p.release()
		return
	}
	if h.ends.IsZero() {
		h.ends = time.Now().Add(s.p.opts.Hold)
		h.timer = time.AfterFunc(s.p.opts.Hold, s.p.Release)
	}
}

// held reports whether the server holds after one of the stream's startup sets.
func (s *stream) held() bool {
	for _, set := range s.sets {
		if set.Held() {
			return true
		}
	}
	return false
}

// missed counts a read for which something had to be promoted, and does what is to
// be done for the next one. p.mu is held.
func (p *Pull) missed(r *reading) {
	h := &p.hold
	if !h.on {
		return
	}
	most := int64(aroundMost)
	if h.misses < 8 {
		most = min(most, aroundFirst<<h.misses)
	}
	h.brought += p.current.around(r, most)
	h.misses++
	if h.brought >= aroundAll {
		p.release()
	}
}

// around promotes what lies next to what a read waits for in its arena, about so
// many bytes of frames: in the file, and in the files next to it. It returns how
// many. p.mu is held.
func (s *stream) around(r *reading, most int64) (n int64) {
	frameOf := s.frameOf[r.arena]
	first, end := r.arena.Layout().SegmentsIn(r.off, r.n)
	for before, after := first-1, end; before >= 0 || after < len(frameOf); before, after = before-1, after+1 {
		for _, i := range [...]int{after, before} {
			if i < 0 || i >= len(frameOf) || frameOf[i] == noFrame || s.state[frameOf[i]] != 0 {
				continue
			}
			s.promote(frameOf[i])
			if n += int64(s.plan.Frames[frameOf[i]].MaxLength); n >= most {
				return n
			}
		}
	}
	return n
}

// endHold ends it when the pull has.
func (p *Pull) endHold() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.hold.released = true
	if p.hold.timer != nil {
		p.hold.timer.Stop()
	}
}
