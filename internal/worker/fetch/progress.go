package fetch

import (
	"io"
	"sync"
	"sync/atomic"
	"time"
)

// Progress is how far a pull is.
type Progress struct {
	Moved int64 // bytes that came over the network as bundles, of all streams
	Total int64 // what Moved will be at the end, at most; 0 while unknown
	Rate  float64

	ContentHere, ContentTotal int64 // bytes of contents in the pull's arena
	Written                   int64 // bytes, to it since it was opened

	Stored int64 // bytes of contents that this pull has written to it

	Startup Startup

	Promotions int64 // frames that were promoted

	Frames  int64 // written
	Damaged int64 // frames that arrived damaged
	Resumes int64 // streams that broke and were resumed

	// Trouble is how the last stream ended, while the pull tries again and nothing
	// has come since; empty: all is well.
	Trouble string
}

// Startup is what came of startup sets.
type Startup struct {
	Origin string // of the first one, an Origin constant of package bundle; empty: none came
	Moved  int64  // bytes of their frames
	Raw    int64  // bytes of page runs that were written
	Total  int64  // what Raw will be
}

// counts are what Progress tells.
type counts struct {
	moved      atomic.Int64 // bytes of streams
	total      atomic.Int64 // what moved will be at most; 0: unknown
	opened     atomic.Int64 // 1: the header has arrived
	frames     atomic.Int64 // that were written
	bad        atomic.Int64 // frames that were damaged
	resumes    atomic.Int64
	promotions atomic.Int64 // frames asked for ahead of their turn
	stored     atomic.Int64 // bytes of contents that were written
	pagesMoved atomic.Int64 // bytes of frames of startup sets
	pagesRaw   atomic.Int64 // bytes of the page runs in them that were written
	pagesTotal atomic.Int64 // what pagesRaw will be
	rate       rate
}

func (p *Pull) startup() Startup {
	p.mu.Lock()
	defer p.mu.Unlock()
	c := &p.counts
	return Startup{Origin: p.origin, Moved: c.pagesMoved.Load(), Raw: c.pagesRaw.Load(), Total: c.pagesTotal.Load()}
}

// Progress returns how far the pull is now.
func (p *Pull) Progress() Progress {
	c := &p.counts
	pr := Progress{
		Moved:      c.moved.Load(),
		Total:      c.total.Load(),
		Promotions: c.promotions.Load(),
		Frames:     c.frames.Load(),
		Damaged:    c.bad.Load(),
		Resumes:    c.resumes.Load(),
		Stored:     c.stored.Load(),
		Startup:    p.startup(),
	}
	pr.Rate = c.rate.add(time.Now(), pr.Moved)
	if a := p.arena(); a != nil {
		pr.ContentHere, pr.ContentTotal, pr.Written = a.ContentHere(), a.Layout().ContentBytes(), a.Written()
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.trouble.steps == p.stepsLocked() {
		pr.Trouble = p.trouble.why
	}
	return pr
}

// counted counts the bytes that are read from a stream.
type counted struct {
	io.Reader
	n *atomic.Int64
}

func (c counted) Read(b []byte) (int, error) {
	n, err := c.Reader.Read(b)
	c.n.Add(int64(n))
	return n, err
}

// trouble is how a stream ended, other than well.
type trouble struct {
	why   string // empty: there was none, or a stream runs again
	steps int64  // how far the pull had come by then
}

func (p *Pull) setTrouble(why string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.trouble = trouble{why, p.stepsLocked()}
}

// rate measures bytes a second over the last seconds.
type rate struct {
	mu      sync.Mutex
	samples []sample
}

type sample struct {
	at    time.Time
	moved int64
}

const (
	rateOver  = 4 * time.Second
	rateEvery = 250 * time.Millisecond
)

// add returns the rate now. It is called from time to time with how much has
// moved so far.
func (r *rate) add(now time.Time, moved int64) float64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	if n := len(r.samples); n == 0 || now.Sub(r.samples[n-1].at) >= rateEvery {
		r.samples = append(r.samples, sample{now, moved})
	}
	for len(r.samples) > 2 && now.Sub(r.samples[1].at) >= rateOver {
		r.samples = r.samples[1:]
	}
	first := r.samples[0]
	if d := now.Sub(first.at).Seconds(); d > 0 {
		return float64(moved-first.moved) / d
	}
	return 0
}
