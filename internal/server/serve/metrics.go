package serve

import (
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	format "hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/metrics"
	"hydrofoil.dev/foil/internal/server/admin"
	"hydrofoil.dev/foil/internal/server/login"
	"hydrofoil.dev/foil/internal/server/upstream"
)

// requestMetrics counts requests by their route, which is one of routes.
type requestMetrics struct {
	requests *prometheus.CounterVec
	seconds  *prometheus.HistogramVec
	running  *prometheus.GaugeVec
	received *prometheus.CounterVec
	sent     *prometheus.CounterVec
}

// aborted is the status of a request whose handler gave up in the midst of its
// answer.
const aborted = "aborted"

// Routes of requests. The first are those of the OCI distribution API.
var routes = []string{"base", "manifests", "blobs", "uploads", "tags", "referrers", "catalog",
	"bundle", "promote", "warm", "trace", "startup", "recipe", "contents", "webhook", "token", "metrics", "admin", "health", "other"}

func routeOf(path string) string {
	switch path {
	case format.PullPath:
		return "bundle"
	case format.PromotePath:
		return "promote"
	case format.WarmPath:
		return "warm"
	case format.TracePath:
		return "trace"
	case format.StartupPath:
		return "startup"
	case format.RecipePath:
		return "recipe"
	case format.ContentsPath:
		return "contents"
	case upstream.WebhookPath:
		return "webhook"
	case login.TokenPath:
		return "token"
	case MetricsPath:
		return "metrics"
	case "/healthz", ReadyPath:
		return "health"
	case "/v2", "/v2/":
		return "base"
	case "/v2/_catalog":
		return "catalog"
	}
	if strings.HasPrefix(path, admin.Prefix) {
		return "admin"
	}
	if !strings.HasPrefix(path, "/v2/") {
		return "other"
	}
	// Repositories have slashes in their names: what is asked for is at the end.
	parts := strings.Split(strings.TrimSuffix(path, "/"), "/")
	last := func(n int) string {
		if len(parts) < n {
			return ""
		}
		return parts[len(parts)-n]
	}
	switch {
	case last(1) == "uploads" && last(2) == "blobs", last(2) == "uploads" && last(3) == "blobs":
		return "uploads"
	case last(2) == "blobs", last(2) == "manifests", last(2) == "referrers":
		return last(2)
	case last(1) == "list" && last(2) == "tags":
		return "tags"
	}
	return "other"
}

func newRequestMetrics() *requestMetrics {
	labels := []string{"route"}
	m := &requestMetrics{
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "foil_serve_requests_total",
			Help: "Requests that have ended, by what was asked for and the HTTP status; aborted: the answer broke off."}, []string{"route", "status"}),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "foil_serve_request_seconds",
			Help:    "How long requests took until the last byte of the answer was written.",
			Buckets: []float64{.001, .005, .025, .1, .5, 1, 5, 30, 120, 600}}, labels),
		running: prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "foil_serve_requests_running", Help: "Requests under way."}, labels),
		received: metrics.Counters(prometheus.CounterOpts{Name: "foil_serve_received_bytes_total",
			Help: "Bytes of the bodies of requests."}, labels, metrics.Each(routes...)...),
		sent: metrics.Counters(prometheus.CounterOpts{Name: "foil_serve_sent_bytes_total",
			Help: "Bytes of the bodies of answers, counted when a request has ended."}, labels, metrics.Each(routes...)...),
	}
	for _, r := range routes {
		m.requests.WithLabelValues(r, "200")
		m.seconds.WithLabelValues(r)
		m.running.WithLabelValues(r)
	}
	return m
}

// begin counts a request, and its body while it is read, until end.
func (m *requestMetrics) begin(req *http.Request) (end func(status int, sent int64, ended bool)) {
	route, start := routeOf(req.URL.Path), time.Now()
	m.running.WithLabelValues(route).Inc()
	if req.Body != nil && req.Body != http.NoBody {
		req.Body = &countedBody{req.Body, m.received.WithLabelValues(route)}
	}
	return func(status int, sent int64, ended bool) {
		m.running.WithLabelValues(route).Dec()
		text := aborted
		if ended {
			text = strconv.Itoa(status)
		}
		m.requests.WithLabelValues(route, text).Inc()
		m.seconds.WithLabelValues(route).Observe(time.Since(start).Seconds())
		m.sent.WithLabelValues(route).Add(float64(sent))
	}
}

// countedBody counts what is read.
type countedBody struct {
	io.ReadCloser
	bytes prometheus.Counter
}

func (b *countedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	b.bytes.Add(float64(n))
	return n, err
}

func (m *requestMetrics) all() metrics.Collectors {
	return metrics.Collectors{m.requests, m.seconds, m.running, m.received, m.sent}
}

// collector of the queue of images to prepare.
func (q *queue) metrics() prometheus.Collector {
	return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "foil_serve_ingest_queue_images",
		Help: "Images that were pushed and wait to be prepared. At 1024 they are left to their first pull."}, func() float64 { return float64(len(q.pushed)) })
}

// Metrics returns what tells of the server.
func (s *Server) Metrics() prometheus.Collector { return s.metrics }
