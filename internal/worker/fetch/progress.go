package fetch

import (
	"sync"
	"time"
)

// Progress is how far a pull is.
type Progress struct {
	Moved int64 // bytes that came over the network as bundles, of all streams
	Total int64 // what Moved will be at the end, at most; 0 while unknown
	Rate  float64

	ContentHere, ContentTotal int64 // bytes of contents in the pull's arenas
	Written                   int64 // bytes, to these arenas since they were opened

	Stored int64 // bytes of contents that this pull has written to them

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

func (p *Pull) startup() Startup {
	p.mu.Lock()
	defer p.mu.Unlock()
	return Startup{Origin: p.origin, Moved: p.pagesMoved.Load(), Raw: p.pagesRaw.Load(), Total: p.pagesTotal.Load()}
}

// Progress returns how far the pull is now.
func (p *Pull) Progress() Progress {
	pr := Progress{
		Moved:      p.moved.Load(),
		Total:      p.total.Load(),
		Promotions: p.promotions.Load(),
		Frames:     p.frames.Load(),
		Damaged:    p.bad.Load(),
		Resumes:    p.resumes.Load(),
		Stored:     p.stored.Load(),
		Startup:    p.startup(),
	}
	pr.Rate = p.rate.add(time.Now(), pr.Moved)
	p.mu.Lock()
	if p.trouble.arrivals == p.arrivals() {
		pr.Trouble = p.trouble.why
	}
	for _, t := range p.targets {
		if t != nil && t.arena != nil {
			pr.ContentHere += t.arena.ContentHere()
			pr.ContentTotal += t.arena.Layout().ContentBytes()
			pr.Written += t.arena.Written()
		}
	}
	p.mu.Unlock()
	return pr
}

// trouble is how a stream ended, other than well.
type trouble struct {
	why      string // empty: there was none, or a stream runs again
	arrivals int64  // of the pull by then
}

func (p *Pull) setTrouble(t trouble) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.trouble = t
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
