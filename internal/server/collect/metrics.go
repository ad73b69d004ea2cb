package collect

import "github.com/prometheus/client_golang/prometheus"

// Metrics returns what tells of the collector.
func (c *Collector) Metrics() []prometheus.Collector {
	counter := func(name, help string, value func(*Report) float64) prometheus.Collector {
		return prometheus.NewCounterFunc(prometheus.CounterOpts{Name: name, Help: help}, func() float64 {
			r, _ := c.Totals()
			return value(&r)
		})
	}
	return []prometheus.Collector{
		counter("foil_serve_collected_bytes_total", "Bytes of objects that nobody needed, and that were removed.", func(r *Report) float64 { return float64(r.Bytes) }),
		counter("foil_serve_collected_objects_total", "Objects that nobody needed, and that were removed.", func(r *Report) float64 { return float64(r.Objects) }),
		counter("foil_serve_compacted_bytes_total", "Bytes of packs that were written to take the place of others.", func(r *Report) float64 { return float64(r.Copied) }),
	}
}
