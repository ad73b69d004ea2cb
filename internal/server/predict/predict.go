// Package predict says which layers a client is going to pull.
package predict

import (
	"container/list"
	"sync"
	"time"

	"github.com/opencontainers/go-digest"
)

// Predictor knows which layers clients have pulled, and says which of an image a client is going to: those that it has never pulled,
// and, of a client that pulls again what it has pulled before, the others too (DupHunter, ATC '20, 4.4). The zero value is ready.
type Predictor struct {
	// Threshold is from which share of repulls on a client counts as one that pulls again; 0 means a half.
	Threshold float64

	mu      sync.Mutex
	clients map[string]*list.Element // guarded by mu
	recent  list.List                // guarded by mu: *client, the one that came last in front
}

// client is guarded by Predictor.mu.
type client struct {
	name   string
	last   time.Time
	counts map[digest.Digest]int
	order  []digest.Digest // of counts, the first pulled first
	pulls  int             // the sum of counts
	again  int             // the sum of those above 1
}

const (
	maxClients = 10_000
	maxLayers  = 2_000 // of a client
	// forgetAfter is for how long a client is remembered that does not come: it may be another machine then.
	forgetAfter = 30 * 24 * time.Hour
)

// Pulled says that a client pulls a layer.
func (p *Predictor) Pulled(name string, d digest.Digest, now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	c := p.client(name, now)
	n := c.counts[d] + 1
	if n == 1 {
		if len(c.order) == maxLayers {
			c.forget(c.order[0])
			c.order = c.order[1:]
		}
		c.order = append(c.order, d)
	}
	c.counts[d] = n
	c.pulls++
	switch {
	case n == 2:
		c.again += 2
	case n > 2:
		c.again++
	}
}

func (c *client) forget(d digest.Digest) {
	n := c.counts[d]
	delete(c.counts, d)
	c.pulls -= n
	if n > 1 {
		c.again -= n
	}
}

// client is called with mu held.
func (p *Predictor) client(name string, now time.Time) *client {
	if e := p.clients[name]; e != nil {
		p.recent.MoveToFront(e)
		c := e.Value.(*client)
		c.last = now
		return c
	}
	if p.clients == nil {
		p.clients = map[string]*list.Element{}
	}
	for e := p.recent.Back(); e != nil; e = p.recent.Back() {
		c := e.Value.(*client)
		if p.recent.Len() < maxClients && now.Sub(c.last) < forgetAfter {
			break
		}
		p.recent.Remove(e)
		delete(p.clients, c.name)
	}
	c := &client{name: name, last: now, counts: map[digest.Digest]int{}}
	p.clients[name] = p.recent.PushFront(c)
	return c
}

// Predict returns those of an image's layers that a client is going to pull, in their order.
func (p *Predictor) Predict(name string, layers []digest.Digest) (soon []digest.Digest) {
	p.mu.Lock()
	defer p.mu.Unlock()
	var c *client
	if e := p.clients[name]; e != nil {
		c = e.Value.(*client)
	}
	threshold := p.Threshold
	if threshold == 0 {
		threshold = 0.5
	}
	for _, d := range layers {
		if c == nil || c.counts[d] == 0 || float64(c.again) > threshold*float64(c.pulls) {
			soon = append(soon, d)
		}
	}
	return soon
}
