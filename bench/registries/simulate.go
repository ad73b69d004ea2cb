// Package registries replays traces of registries: against servers, and against caches.
package registries

import (
	"cmp"
	"container/list"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	digest "github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/bench/trace"
	"hydrofoil.dev/foil/internal/server/arc"
	"hydrofoil.dev/foil/internal/server/predict"
)

// Simulated is what a cache would have done with a trace.
type Simulated struct {
	Cache  float64 `json:"cache"`  // its size, as a share of the distinct layers' bytes
	Policy string  `json:"policy"` // lru, arc, or arc with prediction
	Hit    float64 `json:"hit"`    // shares of the requests for layers
	Wait   float64 `json:"wait"`
	Miss   float64 `json:"miss"`
	// Waited is the mean time that those waited.
	Waited time.Duration `json:"waited_ns"`
}

// Policies that are compared.
const (
	LRU   = "lru"
	ARC   = "arc"
	ARCUB = "arc+prediction"
)

// cache is what both kinds do.
type cache interface {
	get(name string) bool
	has(name string) bool
	add(name string, size int64)
}

type arcCache struct{ *arc.Cache }

func (c arcCache) get(name string) bool        { return c.Get(name) }
func (c arcCache) has(name string) bool        { return c.Has(name) }
func (c arcCache) add(name string, size int64) { c.Add(name, size) }

// lru keeps what was used last.
type lru struct {
	limit, bytes int64
	recent       list.List
	items        map[string]*list.Element
}

type lruItem struct {
	name string
	size int64
}

func (l *lru) has(name string) bool { return l.items[name] != nil }

func (l *lru) get(name string) bool {
	e := l.items[name]
	if e != nil {
		l.recent.MoveToFront(e)
	}
	return e != nil
}

func (l *lru) add(name string, size int64) {
	if size > l.limit || l.has(name) {
		return
	}
	l.items[name] = l.recent.PushFront(lruItem{name, size})
	for l.bytes += size; l.bytes > l.limit; {
		e := l.recent.Back()
		v := l.recent.Remove(e).(lruItem)
		delete(l.items, v.name)
		l.bytes -= v.size
	}
}

// Restoring says how long what is not in the cache takes to get there: nothing is restored at once if Rate is 0.
type Restoring struct {
	Rate    int64 // bytes a second, of each
	Workers int   // how many at once, of those that nobody waits for
}

// Simulate has a cache of a share of the bytes of all distinct layers answer a trace. With a rate a layer is there only when it was
// restored: who asks before waits.
func Simulate(requests []trace.Request, policy string, share float64, r Restoring) Simulated {
	sizes := map[string]int64{}
	images := map[string][]string{} // by the repository: what its clients ask for belongs to it
	total := int64(0)
	for _, q := range requests {
		if q.Manifest {
			continue
		}
		if _, ok := sizes[q.Layer]; !ok {
			sizes[q.Layer] = max(1, q.Bytes)
			total += max(1, q.Bytes)
		}
		if !slices.Contains(images[q.Image], q.Layer) {
			images[q.Image] = append(images[q.Image], q.Layer)
		}
	}
	limit := int64(share * float64(total))
	var c cache = &lru{limit: limit, items: map[string]*list.Element{}}
	if policy != LRU {
		c = arcCache{arc.New(limit)}
	}
	p := new(predict.Predictor)
	ready := map[string]time.Duration{}              // when what is being restored is there
	busy := make([]time.Duration, max(1, r.Workers)) // until when each worker is
	epoch := time.Unix(1e9, 0)
	var hits, waits, misses int
	var waited time.Duration
	took := func(name string) time.Duration {
		if r.Rate == 0 {
			return 0
		}
		return time.Duration(float64(sizes[name]) / float64(r.Rate) * float64(time.Second))
	}
	arrive := func(now time.Duration) {
		type done struct {
			name string
			at   time.Duration
		}
		var list []done
		for name, at := range ready {
			if at <= now {
				list = append(list, done{name, at})
			}
		}
		slices.SortFunc(list, func(a, b done) int { return cmp.Or(cmp.Compare(a.at, b.at), cmp.Compare(a.name, b.name)) })
		for _, d := range list {
			delete(ready, d.name)
			c.add(d.name, sizes[d.name])
		}
	}
	for _, q := range requests {
		arrive(q.At)
		switch {
		case q.Put:
		case q.Manifest:
			if policy != ARCUB {
				continue
			}
			repo := q.Image
			if i := strings.LastIndexByte(repo, ':'); i >= 0 {
				repo = repo[:i]
			}
			names := map[digest.Digest]string{}
			var layers []digest.Digest
			for _, l := range images[repo] {
				d := digest.FromString(l)
				names[d] = l
				layers = append(layers, d)
			}
			for _, d := range p.Predict(q.Client, layers) {
				name := names[d]
				if _, coming := ready[name]; coming || c.has(name) {
					continue
				}
				i := slices.Index(busy, slices.Min(busy))
				busy[i] = max(busy[i], q.At) + took(name)
				ready[name] = busy[i]
			}
		default:
			p.Pulled(q.Client, digest.FromString(q.Layer), epoch.Add(q.At))
			at, coming := ready[q.Layer]
			switch {
			case c.get(q.Layer):
				hits++
			case coming:
				waits++
				// It is made now, if it was only waiting for its turn.
				if now := q.At + took(q.Layer); now < at {
					at = now
					ready[q.Layer] = at
				}
				waited += at - q.At
			default:
				misses++
				ready[q.Layer] = q.At + took(q.Layer)
			}
		}
	}
	s := Simulated{Cache: share, Policy: policy}
	if n := float64(hits + waits + misses); n > 0 {
		s.Hit, s.Wait, s.Miss = float64(hits)/n, float64(waits)/n, float64(misses)/n
	}
	if waits > 0 {
		s.Waited = waited / time.Duration(waits)
	}
	return s
}

// SimulateAll compares the policies with caches of 5, 10 and 15%, and writes a table.
func SimulateAll(w io.Writer, name string, requests []trace.Request, r Restoring) (all []Simulated, err error) {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(tw, "TRACE\tCACHE\tPOLICY\tHIT\tWAIT\tMISS\tWAITED")
	for _, share := range []float64{0.05, 0.10, 0.15} {
		for _, policy := range []string{LRU, ARC, ARCUB} {
			s := Simulate(requests, policy, share, r)
			all = append(all, s)
			fmt.Fprintf(tw, "%s\t%.0f%%\t%s\t%.3f\t%.3f\t%.3f\t%v\n", name, share*100, policy, s.Hit, s.Wait, s.Miss, s.Waited.Round(time.Millisecond))
		}
	}
	return all, tw.Flush()
}
