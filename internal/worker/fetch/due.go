package fetch

import (
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
// work (bundle.TypeAlive) keeps a connection from being taken for dead, and no more.
type due struct {
	resp *remote.Stream
	most time.Duration // between two sections that bring something, the header's being the first
}

// due returns that of an answer of the pull.
func (p *Pull) due(resp *remote.Stream) due {
	first, most := allowed(p.opts.GiveUp, time.Since(p.began), p.counts.opened.Load() > 0)
	resp.Limit(first)
	return due{resp, most}
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

// came is told of each section, and returns when the last one came that brought something: now or, as before, last.
func (t *due) came(section any, last time.Time) time.Time {
	switch section.(type) {
	case *bundle.Image, *bundle.Startup, *bundle.Pages, *bundle.Plan, *bundle.Frame:
		t.resp.Limit(t.most)
		return time.Now()
	}
	return last
}

// coming is told of a frame whose n bytes are to come.
func (t *due) coming(n int) {
	t.resp.Limit(t.most + time.Duration(n)*time.Second/leastRate)
}
