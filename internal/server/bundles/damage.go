package bundles

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/metrics"
	"hydrofoil.dev/foil/internal/server/planner"
	"hydrofoil.dev/foil/internal/server/startup"
)

// Frames go from packs to workers as they are: that a disk has changed some of
// their bytes is first noticed by a worker, which compares every segment with its
// digest and names those that differ in its next request (bundle.Request.Damaged). What
// it says is a reason to look, and no more: the frames that the image is served from are
// read, and only when one is wrong is the image repaired, as one of which a pack is lost, and
// the request answered from what was made. So a worker can destroy nothing, and what
// it can have read is bounded (checks).

const (
	// checkBurst is how many bytes of frames, decoded, are checked for one client in a
	// row, and checkRate how many more a second: what one flipped bit wants is a
	// frame of at most 1 MiB, since the first that is wrong has the whole image looked at.
	checkBurst = 32 << 20
	checkRate  = 2 << 20
	// checkClients bounds the clients that are remembered. Whose allowance is whole again is not.
	checkClients = 1024
)

// What is found of something that is said to have arrived damaged.
const (
	checkDamaged   = "damaged"
	checkSound     = "sound"
	checkUnchecked = "unchecked"
)

// checks bounds what is done because workers say that something arrived damaged.
type checks struct {
	turn    chan struct{} // taken by a check: one at a time
	results *prometheus.CounterVec

	mu      *sync.Mutex
	clients map[string]allowance // guarded by mu
}

// allowance is what a client may have checked: left bytes, at the time at.
type allowance struct {
	left int64
	at   time.Time
}

func newChecks() checks {
	return checks{
		turn: make(chan struct{}, 1), mu: new(sync.Mutex), clients: map[string]allowance{},
		results: metrics.Counters(prometheus.CounterOpts{Name: "foil_serve_damage_checks_total",
			Help: "Frames that were read because workers said that something of them arrived damaged: damaged, and made anew; sound: something on the way changes bytes; or unchecked: the client has said so too often."},
			[]string{"result"}, metrics.Each(checkDamaged, checkSound, checkUnchecked)...),
	}
}

// now is what an allowance has become.
func (a allowance) now(now time.Time) allowance {
	left := min(float64(checkBurst), float64(a.left)+checkRate*now.Sub(a.at).Seconds())
	return allowance{int64(left), now}
}

// take takes bytes from what a client may have checked, if it has as many.
func (c *checks) take(client string, bytes int64, now time.Time) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	a, ok := c.clients[client]
	if !ok {
		if len(c.clients) >= checkClients {
			for k, a := range c.clients {
				if a.now(now).left == checkBurst {
					delete(c.clients, k)
				}
			}
		}
		if len(c.clients) >= checkClients {
			c.results.WithLabelValues(checkUnchecked).Inc()
			return false
		}
		a = allowance{checkBurst, now}
	}
	if a = a.now(now); a.left < bytes {
		c.results.WithLabelValues(checkUnchecked).Inc()
		return false
	}
	a.left -= bytes
	c.clients[client] = a
	return true
}

// begin waits until a check may begin; end must be called after it.
func (c *checks) begin(ctx context.Context) (end func(), err error) {
	select {
	case c.turn <- struct{}{}:
		return func() { <-c.turn }, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// take takes bytes from what the worker that asks may have checked.
func (p *pull) take(bytes int64) bool { return p.h.checks.take(p.client, bytes, time.Now()) }

// damaged reports whether a frame of an image is wrong that holds something which the
// worker says arrived damaged.
func (p *pull) damaged(ctx context.Context, m *Resolved, x *planner.Index) bool {
	var named []uint32
	for _, id := range p.req.Damaged {
		if n, ok := x.Find(id); ok { // of other images it may not ask
			named = append(named, n)
		}
	}
	if len(named) == 0 {
		return false
	}
	end, err := p.h.checks.begin(ctx)
	if err != nil {
		return false
	}
	defer end()
	contents := &planner.Contents{TOC: x.Table(), Index: x, Objects: p.h.o.Objects}
	slices.SortFunc(named, func(a, b uint32) int { return cmp.Compare(contents.Place(a), contents.Place(b)) })
	for i, n := range named {
		another := i == 0 || contents.Place(named[i-1])>>32 != contents.Place(n)>>32
		frame := x.Frame(n)
		if another && !p.take(int64(frame.RawLength)) {
			return false
		}
		_, err := contents.Segment(ctx, n)
		log := p.h.log.With("image", ref(m.Repository, m.Reference), "segment", x.Table().Segments[n].ID.String(), "pack", frame.Pack, "offset", frame.Offset)
		switch {
		case err == nil:
			if another {
				p.h.checks.results.WithLabelValues(checkSound).Inc()
			}
		case ctx.Err() != nil:
			return false
		case isDamage(err):
			p.h.checks.results.WithLabelValues(checkDamaged).Inc()
			log.Warn("a stored frame is damaged: the image is repaired", "error", err)
			return true
		default:
			log.Error("a frame that arrived damaged cannot be checked", "error", err)
			return false
		}
	}
	return false
}

// setDamaged does the same for a stored startup set, which is then built anew.
func (p *pull) setDamaged(ctx context.Context, set *startup.Set, table *toc.TOC) bool {
	if len(p.req.Damaged) == 0 {
		return false
	}
	end, err := p.h.checks.begin(ctx)
	if err != nil {
		return false
	}
	defer end()
	sound, err := set.Verify(ctx, table, p.named(), p.take)
	p.h.checks.results.WithLabelValues(checkSound).Add(float64(sound))
	if err != nil && ctx.Err() == nil {
		p.h.checks.results.WithLabelValues(checkDamaged).Inc() // the log has it from startup
	}
	return err != nil
}

// named is what the worker says arrived damaged.
func (p *pull) named() map[segment.ID]bool {
	named := make(map[segment.ID]bool, len(p.req.Damaged))
	for _, id := range p.req.Damaged {
		named[id] = true
	}
	return named
}

// makeAnew forgets the frames in memory, made of parts of others, that hold what
// arrived damaged: they were right when they were made, and memory fails too.
func (p *pull) makeAnew(sources []planner.Source) {
	if len(p.req.Damaged) == 0 {
		return
	}
	named := p.named()
	for _, s := range sources {
		raw, hit := int64(0), false
		for _, part := range s.Parts {
			raw += int64(part.RawLength)
			hit = hit || slices.ContainsFunc(part.Picks, func(k planner.Pick) bool { return named[k.ID] })
		}
		if hit && !p.take(raw) {
			return
		}
		if hit {
			p.h.frames.made.Drop(nameOf(s))
		}
	}
}
