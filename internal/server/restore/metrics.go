package restore

import (
	"io"

	"github.com/prometheus/client_golang/prometheus"

	"hydrofoil.dev/foil/internal/metrics"
)

// Metrics counts what Blobs restore.
type Metrics struct {
	metrics.Collectors
	restores *prometheus.CounterVec
	bytes    prometheus.Counter
	heals    prometheus.Counter
}

// What became of a restore.
const (
	done      = "done"
	cutOff    = "cut-off"
	notProven = "failed"
)

// NewMetrics returns Metrics that count from 0.
func NewMetrics() *Metrics {
	m := &Metrics{
		restores: metrics.Counters(prometheus.CounterOpts{Name: "foil_serve_restores_total",
			Help: "Blobs of layers, or ranges of them, that were made again from packs and recipes: done, cut off by who read them, or failed, because something is lost or came out otherwise."},
			[]string{"result"}, metrics.Each(done, cutOff, notProven)...),
		bytes: prometheus.NewCounter(prometheus.CounterOpts{Name: "foil_serve_restored_bytes_total", Help: "Bytes of blobs that were made again."}),
		heals: prometheus.NewCounter(prometheus.CounterOpts{Name: "foil_serve_healed_blobs_total", Help: "Blobs that were lost or damaged, and were made again and stored."}),
	}
	m.Collectors = metrics.Collectors{m.restores, m.bytes, m.heals}
	return m
}

func (m *Metrics) ended(err error, cut bool) {
	if m == nil {
		return
	}
	result := done
	switch {
	case cut:
		result = cutOff
	case err != nil:
		result = notProven
	}
	m.restores.WithLabelValues(result).Inc()
}

func (m *Metrics) healed() {
	if m != nil {
		m.heals.Inc()
	}
}

// counted counts what is written.
type counted struct {
	w io.Writer
	m *Metrics
}

func (c *counted) Write(b []byte) (int, error) {
	n, err := c.w.Write(b)
	if c.m != nil {
		c.m.bytes.Add(float64(n))
	}
	return n, err
}
