package upstream

import (
	"context"
	"errors"

	"github.com/prometheus/client_golang/prometheus"

	"hydrofoil.dev/foil/internal/metrics"
)

// accelerated counts what an Accelerator does.
type accelerated struct {
	requests *prometheus.CounterVec
	received prometheus.Counter
	bridged  prometheus.Counter
}

// names of what became of a request, by the kind of its failure.
var names = map[Kind]string{Down: "down", Busy: "busy", Missing: "missing", Denied: "denied", Wrong: "wrong"}

func newMetrics() *accelerated {
	return &accelerated{
		requests: metrics.Counters(prometheus.CounterOpts{Name: "foil_serve_upstream_requests_total",
			Help: "Requests to the upstream: ok, missing and denied are what it says; busy, down and wrong (no answer of a registry) are trouble; given_up: nobody waits for the answer any more."},
			[]string{"result"}, metrics.Each("ok", "given_up", names[Down], names[Busy], names[Missing], names[Denied], names[Wrong])...),
		received: prometheus.NewCounter(prometheus.CounterOpts{Name: "foil_serve_upstream_received_bytes_total", Help: "Bytes of blobs that came from the upstream."}),
		bridged: prometheus.NewCounter(prometheus.CounterOpts{Name: "foil_serve_upstream_bridged_tags_total",
			Help: "Tags that were served as they were, because the upstream did not answer."}),
	}
}

// request counts one, which has failed if err is not nil.
func (m *accelerated) request(ctx context.Context, err error) {
	result := "ok"
	if e, is := errors.AsType[*Error](err); is {
		result = names[e.Kind]
	} else if err != nil {
		result = names[Down]
	}
	if err != nil && ctx.Err() != nil {
		result = "given_up"
	}
	m.requests.WithLabelValues(result).Inc()
}

// Metrics returns what tells of the upstream.
func (a *Accelerator) Metrics() prometheus.Collector {
	m := a.client.metrics
	return metrics.Collectors{m.requests, m.received, m.bridged,
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "foil_serve_upstream_downloads_running", Help: "Blobs that are being downloaded, or wait for their turn."}, func() float64 {
			a.mu.Lock()
			defer a.mu.Unlock()
			return float64(len(a.downloads))
		})}
}
