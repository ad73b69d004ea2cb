package limit

import (
	"context"
	"slices"
	"sync"
	"time"
)

// Places are where requests are worked on, as many as processors: who has many requests or connections gets no more of the
// processors than who has one. A client belongs to a group, as addresses from which one subject comes.
//
//   - While several groups are about, a group has at most half of the places: another one finds some free at once.
//   - Else it waits. The next place that a group may have is that of the group that has had the fewest seconds since it had
//     something to do; of its clients they come in turn.
//   - Alone, a group may have all.
//
// A group is about while it works or waits, and for a second after that. A place counts for Lapse while somebody waits: who has it for
// longer most likely waits too, for a disk, a lock, an upstream. nil lets everybody in.
type Places[G, K comparable] struct {
	most, share int // places, and those of a group among others

	mu      sync.Mutex
	held    []*Place[G, K]          // guarded by mu: those that count
	lapses  bool                    // guarded by mu: a timer runs for the one that lapses first
	clock   time.Duration           // guarded by mu: what the group that last came in had had
	groups  map[G]*placeGroup[G, K] // guarded by mu: those that work or wait
	waiting []*placeGroup[G, K]     // guarded by mu: those of which somebody waits
	last    [2]struct {             // guarded by mu: who left last, and who did of the others
		group G
		at    time.Time
	}
}

// Lapse is how long a place counts while others wait for one.
const Lapse = 20 * time.Millisecond

// about is for how long a group counts that has left.
const about = time.Second

// placeGroup is one group. Places.mu guards it.
type placeGroup[G, K comparable] struct {
	name   G
	inside int
	had    time.Duration // in places, and what others had while it had nothing to do
	queues map[K][]*Place[G, K]
	next   []K // of those who wait, in their turn
}

// NewPlaces returns so many places.
func NewPlaces[G, K comparable](most int) *Places[G, K] {
	return &Places[G, K]{most: most, share: max(1, most/2), groups: make(map[G]*placeGroup[G, K])}
}

// Place is one that somebody has, or waits for.
type Place[G, K comparable] struct {
	of    *Places[G, K]
	group *placeGroup[G, K]
	since time.Time
	mine  chan struct{} // closed when it is had; nil: it was at once
	left  bool          // guarded by of.mu
}

// Enter waits for a place. Errors: that of ctx.
func (p *Places[G, K]) Enter(ctx context.Context, group G, client K) (*Place[G, K], error) {
	if p == nil {
		return nil, nil
	}
	p.mu.Lock()
	g := p.groups[group]
	if g == nil {
		g = &placeGroup[G, K]{name: group, had: p.clock}
		p.groups[group] = g
	}
	x := &Place[G, K]{of: p, group: g}
	now := time.Now()
	if len(g.next) == 0 && p.may(g, now) {
		p.take(x, now)
		p.mu.Unlock()
		return x, nil
	}
	if g.inside == 0 && len(g.next) == 0 {
		g.had = max(g.had, p.clock)
	}
	x.mine = make(chan struct{})
	p.watch(now)
	if len(g.next) == 0 {
		p.waiting = append(p.waiting, g)
	}
	if g.queues == nil {
		g.queues = make(map[K][]*Place[G, K])
	}
	if len(g.queues[client]) == 0 {
		g.next = append(g.next, client)
	}
	g.queues[client] = append(g.queues[client], x)
	p.mu.Unlock()
	select {
	case <-x.mine:
		return x, nil
	case <-ctx.Done():
	}
	if !p.withdraw(x, client) {
		x.Leave() // it was its turn at that moment
	}
	return nil, ctx.Err()
}

// Leave gives the place up. More than once does nothing.
func (x *Place[G, K]) Leave() {
	if x == nil {
		return
	}
	p, g := x.of, x.group
	p.mu.Lock()
	defer p.mu.Unlock()
	if now := time.Now(); !x.left {
		p.end(x, now)
		p.admit(now)
		p.forget(g)
	}
}

// end ends that a place counts. mu must be held.
func (p *Places[G, K]) end(x *Place[G, K], now time.Time) {
	x.left = true
	p.held = slices.DeleteFunc(p.held, func(o *Place[G, K]) bool { return o == x })
	x.group.inside--
	x.group.had += now.Sub(x.since)
	if p.last[0].group != x.group.name {
		p.last[1] = p.last[0]
		p.last[0].group = x.group.name
	}
	p.last[0].at = now
}

// watch has places lapse, since somebody waits. mu must be held.
func (p *Places[G, K]) watch(now time.Time) {
	if p.lapses || len(p.held) == 0 {
		return
	}
	p.lapses = true
	first := p.held[0].since // they are in the order in which they were had
	time.AfterFunc(first.Add(Lapse).Sub(now), p.lapse)
}

// lapse ends places that have counted for long enough.
func (p *Places[G, K]) lapse() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.lapses = false
	now := time.Now()
	for len(p.waiting) > 0 && len(p.held) > 0 && now.Sub(p.held[0].since) >= Lapse {
		x := p.held[0]
		p.end(x, now)
		p.admit(now)
		p.forget(x.group)
	}
	if len(p.waiting) > 0 {
		p.watch(now)
	}
}

// may reports whether somebody of a group may have a place now. mu must be held.
func (p *Places[G, K]) may(g *placeGroup[G, K], now time.Time) bool {
	if len(p.held) >= p.most {
		return false
	}
	return g.inside < p.share || p.alone(g, now)
}

// alone reports whether no other group is about. mu must be held.
func (p *Places[G, K]) alone(g *placeGroup[G, K], now time.Time) bool {
	if len(p.held) > g.inside || len(p.waiting) > 1 || len(p.waiting) == 1 && p.waiting[0] != g {
		return false
	}
	for _, last := range p.last {
		if last.group != g.name && now.Sub(last.at) < about {
			return false
		}
	}
	return true
}

// take gives somebody a place. mu must be held.
func (p *Places[G, K]) take(x *Place[G, K], now time.Time) {
	x.group.inside++
	x.since = now
	p.held = append(p.held, x)
	p.clock = max(p.clock, x.group.had)
}

// admit gives free places to who is next. mu must be held.
func (p *Places[G, K]) admit(now time.Time) {
	for len(p.held) < p.most {
		var g *placeGroup[G, K]
		for _, o := range p.waiting {
			if (g == nil || o.had < g.had) && p.may(o, now) {
				g = o
			}
		}
		if g == nil {
			return
		}
		client := g.next[0]
		g.next = g.next[1:]
		all := g.queues[client]
		if len(all) > 1 {
			g.queues[client] = all[1:]
			g.next = append(g.next, client)
		} else {
			delete(g.queues, client)
		}
		p.rest(g)
		p.take(all[0], now)
		close(all[0].mine)
	}
}

// withdraw ends that somebody waits, and reports whether they did.
func (p *Places[G, K]) withdraw(x *Place[G, K], client K) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	g := x.group
	i := slices.Index(g.queues[client], x)
	if i < 0 {
		return false
	}
	if g.queues[client] = slices.Delete(g.queues[client], i, i+1); len(g.queues[client]) == 0 {
		delete(g.queues, client)
		g.next = slices.DeleteFunc(g.next, func(o K) bool { return o == client })
	}
	p.rest(g)
	p.forget(g)
	return true
}

// rest ends that a group waits of which nobody does. mu must be held.
func (p *Places[G, K]) rest(g *placeGroup[G, K]) {
	if len(g.next) == 0 {
		p.waiting = slices.DeleteFunc(p.waiting, func(o *placeGroup[G, K]) bool { return o == g })
	}
}

// forget drops a group that neither works nor waits. mu must be held.
func (p *Places[G, K]) forget(g *placeGroup[G, K]) {
	if g.inside == 0 && len(g.next) == 0 {
		delete(p.groups, g.name)
	}
}
