package ahead

import (
	"github.com/prometheus/client_golang/prometheus"

	"hydrofoil.dev/foil/internal/metrics"
)

// Metrics counts what is ready and what is not.
type Metrics struct {
	metrics.Collectors
	requests  *prometheus.CounterVec
	predicted prometheus.Counter
	skipped   prometheus.Counter
	seconds   prometheus.Histogram
}

func newMetrics(a *Ahead) *Metrics {
	m := &Metrics{
		requests: metrics.Counters(prometheus.CounterOpts{Name: "foil_serve_restore_requests_total",
			Help: "Requests for blobs without an intact copy: hit, it was ready; wait, it was being made; miss, it had to be made; direct, it was made for the request alone, as ranges are."},
			[]string{"result"}, metrics.Each(hit, waited, missed, direct)...),
		predicted: prometheus.NewCounter(prometheus.CounterOpts{Name: "foil_serve_ahead_predicted_total",
			Help: "Layers that a client was expected to ask for when it got a manifest."}),
		skipped: prometheus.NewCounter(prometheus.CounterOpts{Name: "foil_serve_ahead_skipped_total",
			Help: "Layers that were expected and not made ahead: there was no room, too much to do, or they cannot be made."}),
		seconds: prometheus.NewHistogram(prometheus.HistogramOpts{Name: "foil_serve_restore_seconds",
			Help: "How long it took to make a blob from packs, to its end.", Buckets: prometheus.ExponentialBuckets(0.01, 4, 8)}),
	}
	kept := prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "foil_serve_restored_kept_bytes",
		Help: "Bytes of restored blobs that are kept on the disk."}, func() float64 {
		a.mu.Lock()
		defer a.mu.Unlock()
		return float64(a.cache.Bytes())
	})
	m.Collectors = metrics.Collectors{m.requests, m.predicted, m.skipped, m.seconds, kept}
	return m
}

// Metrics are those of a.
func (a *Ahead) Metrics() *Metrics { return a.metrics }
