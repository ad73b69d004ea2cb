package s3

import (
	"net/http"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"hydrofoil.dev/foil/internal/metrics"
)

// Metrics count what is asked of a bucket.
type Metrics struct {
	requests *prometheus.CounterVec
	seconds  *prometheus.HistogramVec
	bytes    *prometheus.CounterVec
	sent     prometheus.Counter
	received prometheus.Counter
	retries  *prometheus.CounterVec
}

// operations are those of Operation.
var operations = []string{"get", "head", "put", "delete", "list", "create", "part", "complete", "abort", "list_uploads", "other"}

// NewMetrics returns metrics that nobody collects yet.
func NewMetrics() *Metrics {
	var answered [][]string
	for _, op := range operations {
		answered = append(answered, []string{op, "200"}, []string{op, "503"}, []string{op, "error"})
	}
	m := &Metrics{
		requests: metrics.Counters(prometheus.CounterOpts{
			Name: "foil_serve_store_requests_total", Help: "Requests to the bucket, by what they ask for and the status of the answer; error: there was none.",
		}, []string{"operation", "status"}, answered...),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "foil_serve_store_request_seconds", Help: "How long the bucket took until its answer began.",
			Buckets: []float64{.002, .005, .01, .02, .05, .1, .2, .5, 1, 2, 5, 10, 30},
		}, []string{"operation"}),
		bytes: metrics.Counters(prometheus.CounterOpts{
			Name: "foil_serve_store_bytes_total", Help: "Bytes of objects, to and from the bucket, tries that failed included.",
		}, []string{"direction"}, metrics.Each("sent", "received")...),
		retries: metrics.Counters(prometheus.CounterOpts{
			Name: "foil_serve_store_retries_total", Help: "Requests to the bucket that failed: tried again, or given up (failed).",
		}, []string{"result"}, metrics.Each("again", "failed")...),
	}
	for _, op := range operations {
		m.seconds.WithLabelValues(op)
	}
	m.sent, m.received = m.bytes.WithLabelValues("sent"), m.bytes.WithLabelValues("received")
	return m
}

// Collectors are those to register.
func (m *Metrics) Collectors() []prometheus.Collector {
	return []prometheus.Collector{m.requests, m.seconds, m.bytes, m.retries}
}

func (m *Metrics) request(op string, resp *http.Response, err error, took time.Duration, sent int64) {
	status := "error"
	if err == nil {
		status = strconv.Itoa(resp.StatusCode)
	}
	m.requests.WithLabelValues(op, status).Inc()
	m.seconds.WithLabelValues(op).Observe(took.Seconds())
	m.sent.Add(float64(sent))
}
