package convert

import (
	"cmp"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"hydrofoil.dev/foil/internal/metrics"
)

// Status is what a pass over everything has found, after what it did.
type Status struct {
	Began  time.Time `json:"began,omitzero"`
	Ended  time.Time `json:"ended,omitzero"`
	Stores []Store   `json:"stores,omitempty"`
	// Groups are blobs of one mode with one number of intact copies, each blob in that of the mode which wants most.
	Groups []Group `json:"groups"`
	// Kept are blobs with more copies than their modes want, by reason.
	Kept []Kept `json:"kept,omitempty"`
}

// Store is one of the server's.
type Store struct {
	Dir  string `json:"dir"`
	Away string `json:"away,omitempty"` // why; empty: it is here
}

// Group is blobs that rest alike.
type Group struct {
	Mode   string `json:"mode"`
	Copies int    `json:"copies"`
	Blobs  int64  `json:"blobs"`
	Bytes  int64  `json:"bytes"` // of one copy
}

// Kept is blobs that keep a copy for one reason.
type Kept struct {
	Why   string `json:"why"`
	Blobs int64  `json:"blobs"`
	Bytes int64  `json:"bytes"`
}

func (s *Status) add(size int64, f found) {
	if f.mode.String() == "" {
		return
	}
	i := slices.IndexFunc(s.Groups, func(g Group) bool { return g.Mode == f.mode.String() && g.Copies == f.copies })
	if i < 0 {
		i = len(s.Groups)
		s.Groups = append(s.Groups, Group{Mode: f.mode.String(), Copies: f.copies})
	}
	s.Groups[i].Blobs++
	s.Groups[i].Bytes += size
	if f.kept == "" || f.copies == f.want {
		return
	}
	i = slices.IndexFunc(s.Kept, func(k Kept) bool { return k.Why == f.kept })
	if i < 0 {
		i = len(s.Kept)
		s.Kept = append(s.Kept, Kept{Why: f.kept})
	}
	s.Kept[i].Blobs++
	s.Kept[i].Bytes += size
}

// Status is what the last pass over everything has found, and which stores there are now.
func (c *Converter) Status(root string) Status {
	c.mu.Lock()
	s := c.status
	c.mu.Unlock()
	s.Groups, s.Kept = slices.Clone(s.Groups), slices.Clone(s.Kept)
	slices.SortFunc(s.Groups, func(a, b Group) int { return cmp.Or(cmp.Compare(a.Mode, b.Mode), b.Copies-a.Copies) })
	slices.SortFunc(s.Kept, func(a, b Kept) int { return cmp.Compare(a.Why, b.Why) })
	s.Stores = []Store{{Dir: root}}
	for _, o := range c.o.Stores.Others() {
		one := Store{Dir: o.Dir}
		if err := o.Err(); err != nil {
			one.Away = err.Error()
		}
		s.Stores = append(s.Stores, one)
	}
	return s
}

// Metrics counts conversions.
type Metrics struct {
	metrics.Collectors
	passes, copied, made, dropped, droppedBytes, refused, leveled, mended prometheus.Counter
	intact                                                                *prometheus.GaugeVec
	kept                                                                  *prometheus.GaugeVec
}

func newMetrics() *Metrics {
	count := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
	}
	m := &Metrics{
		passes:       count("foil_serve_convert_passes_total", "Passes over all blobs that compare their intact copies with what their modes want."),
		copied:       count("foil_serve_convert_copied_total", "Intact copies of blobs that were copied to another store."),
		made:         count("foil_serve_convert_made_total", "Intact copies of blobs that were made again from packs, since their mode wants one."),
		dropped:      count("foil_serve_convert_dropped_total", "Intact copies of blobs that were removed, after the blob was made again from each store."),
		droppedBytes: count("foil_serve_convert_dropped_bytes_total", "Bytes of those."),
		refused:      count("foil_serve_convert_refused_total", "Intact copies that stay since the blob did not come out of a store's packs and recipe."),
		leveled:      count("foil_serve_convert_leveled_total", "Packs, entry lists and recipes that were copied to another store."),
		mended:       count("foil_serve_convert_mended_total", "Packs, entry lists and recipes that the root's store had lost, and got from another one."),
		intact: prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "foil_serve_blob_bytes",
			Help: "Bytes of blobs that repositories hold, each once, by how many intact copies they have: none, one, more."}, []string{"copies"}),
		kept: prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "foil_serve_blob_kept_bytes",
			Help: "Bytes of blobs that have more intact copies than their mode wants, by reason."}, []string{"why"}),
	}
	for _, n := range []string{"none", "one", "more"} {
		m.intact.WithLabelValues(n)
	}
	for _, why := range reasons {
		m.kept.WithLabelValues(why)
	}
	m.Collectors = metrics.Collectors{m.passes, m.copied, m.made, m.dropped, m.droppedBytes, m.refused, m.leveled, m.mended, m.intact, m.kept}
	return m
}

// found sets what a pass has found.
func (m *Metrics) found(s *Status) {
	n := map[string]int64{"none": 0, "one": 0, "more": 0}
	for _, g := range s.Groups {
		n[[]string{"none", "one", "more"}[min(g.Copies, 2)]] += g.Bytes
	}
	for label, bytes := range n {
		m.intact.WithLabelValues(label).Set(float64(bytes))
	}
	for _, why := range reasons {
		m.kept.WithLabelValues(why).Set(0)
	}
	for _, k := range s.Kept {
		m.kept.WithLabelValues(k.Why).Set(float64(k.Bytes))
	}
}

// Metrics are those of the converter.
func (c *Converter) Metrics() *Metrics { return c.metrics }
