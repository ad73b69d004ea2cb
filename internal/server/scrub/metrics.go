package scrub

import (
	"github.com/prometheus/client_golang/prometheus"

	"hydrofoil.dev/foil/internal/metrics"
)

// Metrics counts what passes read and find.
type Metrics struct {
	metrics.Collectors
	bytes    *prometheus.CounterVec
	damage   *prometheus.CounterVec
	unmended prometheus.Gauge
	ended    prometheus.Gauge
}

const (
	mended   = "mended"
	unmended = "unmended"
)

// NewMetrics returns those of one server.
func NewMetrics() *Metrics {
	var results [][]string
	for _, p := range phases {
		results = append(results, []string{p, mended}, []string{p, unmended})
	}
	m := &Metrics{
		bytes: metrics.Counters(prometheus.CounterOpts{Name: "foil_serve_scrub_read_bytes_total",
			Help: "Bytes of what rests that were read and compared with their digests (--scrub-rate)."}, []string{"kind"}, metrics.Each(phases...)...),
		damage: metrics.Counters(prometheus.CounterOpts{Name: "foil_serve_scrub_damage_total",
			Help: "Objects that were found to be lost or damaged: mended from what others hold, or unmended."}, []string{"kind", "result"}, results...),
		unmended: prometheus.NewGauge(prometheus.GaugeOpts{Name: "foil_serve_scrub_unmended",
			Help: "Objects that the last whole pass found lost or damaged, and could not mend: foil server scrub names them."}),
		ended: prometheus.NewGauge(prometheus.GaugeOpts{Name: "foil_serve_scrub_ended_seconds",
			Help: "When the last whole pass ended, in seconds since 1970; 0: there was none since the server started."}),
	}
	m.Collectors = metrics.Collectors{m.bytes, m.damage, m.unmended, m.ended}
	return m
}

func (m *Metrics) read(kind string, bytes int64) {
	if m != nil {
		m.bytes.WithLabelValues(kind).Add(float64(bytes))
	}
}

func (m *Metrics) found(f *Finding) {
	if m == nil {
		return
	}
	result := unmended
	if f.Mended != "" {
		result = mended
	}
	m.damage.WithLabelValues(f.Kind, result).Inc()
}

func (m *Metrics) passed(r *Report) {
	if m != nil {
		m.unmended.Set(float64(r.Unmended))
		m.ended.Set(float64(r.Ended.Unix()))
	}
}
