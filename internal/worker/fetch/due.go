package fetch

import (
	"sync"
	"time"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/worker/remote"
)

const (
	// ingestMost is how long a server may take for an image's header: it may have to ingest it first.
	ingestMost = time.Hour
	// leastRate is what a frame may take its time by, bytes a second, beyond what the answer has anyway.
	leastRate = 8 << 10
)

// due bounds how long an answer brings nothing that the pull can use. That a server says that it is at
// work (bundle.TypeAlive) keeps a connection from being taken for dead, and no more. Nor does it help to send again
// and again what is here: only a step forward counts (Pull.step).
type due struct {
	p    *Pull
	resp *remote.Stream
	most time.Duration // that reads may wait in all, given again within half of it after a step forward
	from time.Time     // when the answer's header was here
}

// due returns that of an answer of the pull.
func (p *Pull) due(resp *remote.Stream) due {
	first, most := allowed(p.opts.GiveUp, time.Since(p.began), p.counts.opened.Load() > 0)
	resp.Limit(first)
	return due{p: p, resp: resp, most: most}
}

// allowed is how long an answer may take for the first section that brings something, and from one to the next: of
// giveUp the half, so that there is time to ask again. opened says that the header came with an earlier answer, and
// elapsed how long the pull has gone on.
func allowed(giveUp, elapsed time.Duration, opened bool) (first, most time.Duration) {
	most = max(giveUp/2, time.Nanosecond)
	if opened {
		return most, most
	}
	return max(ingestMost-elapsed, most), most
}

// headerWithin is how long the server may take to answer at all; 0: as long as that of an image that it has to
// ingest. Older ones do that before they answer.
func (p *Pull) headerWithin() time.Duration {
	if p.counts.opened.Load() == 0 {
		return 0
	}
	return p.opts.GiveUp
}

// came is told of each section, jobs are the frames before it that are with the workers.
func (t *due) came(section any, jobs *sync.WaitGroup) {
	switch section.(type) {
	case *bundle.Image:
		t.from = time.Now() // there is one in an answer
		t.resp.Limit(t.most)
	case *bundle.Startup, *bundle.Pages, *bundle.Plan, *bundle.Frame:
		t.extend(0, jobs)
	}
}

// coming is told of a frame whose n bytes are to come.
func (t *due) coming(n int, jobs *sync.WaitGroup) { t.extend(n, jobs) }

// extend gives the answer its time again, and more for n bytes, unless the last step forward was too long ago: then
// what it has sent since was of no use, or is with the workers still.
func (t *due) extend(n int, jobs *sync.WaitGroup) {
	old := func() bool { return time.Since(t.from) > t.most/2 && time.Since(t.p.step()) > t.most/2 }
	if old() {
		if jobs.Wait(); old() {
			return
		}
	}
	t.resp.Limit(t.most + time.Duration(n)*time.Second/leastRate)
}

// forward is how far a pull has come: whether the header is here, and how many bytes of the arena's contents. A server
// cannot have more of that than the image has, however often it is asked.
type forward struct {
	steps int64
	last  time.Time // when there was one more
}

// step looks whether the pull has come forward, and returns when it last has.
func (p *Pull) step() time.Time {
	p.mu.Lock()
	defer p.mu.Unlock()
	if n := p.stepsLocked(); n > p.forward.steps {
		p.forward = forward{n, time.Now()}
	}
	return p.forward.last
}

// stepsLocked returns how far the pull has come. p.mu is held.
func (p *Pull) stepsLocked() int64 {
	n := p.counts.opened.Load()
	if p.target != nil && p.target.arena != nil {
		n += p.target.arena.ContentHere()
	}
	return n
}
