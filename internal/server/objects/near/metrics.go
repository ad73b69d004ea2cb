package near

import (
	"github.com/prometheus/client_golang/prometheus"

	"hydrofoil.dev/foil/internal/metrics"
)

// Metrics count what a Store spares.
type Metrics struct {
	bytes prometheus.Gauge
	read  *prometheus.CounterVec
}

// NewMetrics returns metrics that nobody collects yet.
func NewMetrics() *Metrics {
	return &Metrics{
		bytes: prometheus.NewGauge(prometheus.GaugeOpts{Name: "foil_serve_store_cache_bytes", Help: "Bytes of objects of the bucket that are on the local disk."}),
		read: metrics.Counters(prometheus.CounterOpts{
			Name: "foil_serve_store_cache_read_bytes_total", Help: "Bytes of objects that were read through the cache: from the disk, or from the store.",
		}, []string{"from"}, metrics.Each("disk", "store")...),
	}
}

// Collectors are those to register.
func (m *Metrics) Collectors() []prometheus.Collector { return []prometheus.Collector{m.bytes, m.read} }
