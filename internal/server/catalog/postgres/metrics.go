package postgres

import (
	"github.com/prometheus/client_golang/prometheus"

	"hydrofoil.dev/foil/internal/metrics"
)

// measures are those of a database; collectors.NewDBStatsCollector has those of its pools.
type measures struct {
	retries *prometheus.CounterVec
	doubts  prometheus.Counter
	shipped prometheus.Gauge
}

func newMeasures() *measures {
	m := &measures{
		retries: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "foil_serve_catalog_retries_total",
			Help: "Reads and changes that were made again, since the connection was lost, or another change came first."}, []string{"what"}),
		doubts: prometheus.NewCounter(prometheus.CounterOpts{Name: "foil_serve_catalog_doubts_total",
			Help: "Commits whose connection was lost, so that the database was asked what became of them."}),
		shipped: prometheus.NewGauge(prometheus.GaugeOpts{Name: "foil_serve_catalog_journal_timestamp_seconds",
			Help: "When this process last saw that the journal has all changes, or wrote some to it."}),
	}
	for _, what := range []string{"read", "change"} {
		m.retries.WithLabelValues(what)
	}
	return m
}

func (m *measures) all() metrics.Collectors {
	return metrics.Collectors{m.retries, m.doubts, m.shipped}
}
