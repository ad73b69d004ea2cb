package pull

import (
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	measure "hydrofoil.dev/foil/internal/metrics"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/fetch"
)

// metrics counts what pulls do. docs/metrics.md lists all.
type metrics struct {
	pulls    *prometheus.CounterVec
	failures *prometheus.CounterVec
	mount    prometheus.Histogram
	reused   *prometheus.CounterVec
	pages    *prometheus.CounterVec

	mu      sync.Mutex
	running map[*fetch.Pull]struct{} // guarded by mu
	ended   fetch.Progress           // guarded by mu: sums of those that have ended
}

func newMetrics() *metrics {
	return &metrics{
		pulls: measure.Counters(prometheus.CounterOpts{Name: "foil_node_pulls_total",
			Help: "Pulls that have ended: complete, failed, or stopped (by a removal, or the end of the daemon)."},
			[]string{"result"}, measure.Each("complete", "failed", "stopped")...),
		failures: measure.Counters(prometheus.CounterOpts{Name: "foil_node_pull_failures_total",
			Help: "Pulls that failed, by the code of the error."},
			[]string{"code"}, measure.Each(api.Codes...)...),
		mount: prometheus.NewHistogram(prometheus.HistogramOpts{Name: "foil_node_mount_seconds",
			Help:    "From the begin of a pull until containers could start on the image.",
			Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 300}}),
		reused: measure.Counters(prometheus.CounterOpts{Name: "foil_node_reused_bytes_total",
			Help: "Bytes of contents that pulls had from the disk: shared in the arena of another image, or copied from there."},
			[]string{"how"}, measure.Each("shared", "copied")...),
		pages: measure.Counters(prometheus.CounterOpts{Name: "foil_node_startup_pages_total",
			Help: "Pages of 4 KiB of startup sets: hit, read until the container was ready, or unused by then. Only starts that are reported (--report) are looked at."},
			[]string{"result"}, measure.Each("hit", "unused")...),
		running: make(map[*fetch.Pull]struct{}),
	}
}

// Metrics returns what tells of pulls.
func (s *Puller) Metrics() []prometheus.Collector {
	m := s.metrics
	return []prometheus.Collector{m.pulls, m.failures, m.mount, m.reused, m.pages}
}

// begin counts what a fetch does from now on.
func (m *metrics) begin(f *fetch.Pull) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.running[f] = struct{}{}
}

// end keeps what a fetch that has ended did.
func (m *metrics) end(f *fetch.Pull) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.running, f)
	addProgress(&m.ended, f.Progress())
}

func addProgress(sum *fetch.Progress, p fetch.Progress) {
	sum.Moved += p.Moved
	sum.Stored += p.Stored
	sum.Startup.Raw += p.Startup.Raw
	sum.Promotions += p.Promotions
	sum.Damaged += p.Damaged
	sum.Resumes += p.Resumes
}

// Fetched sums what all pulls have brought.
func (s *Puller) Fetched() fetch.Progress {
	m := s.metrics
	m.mu.Lock()
	defer m.mu.Unlock()
	sum := m.ended
	for f := range m.running {
		addProgress(&sum, f.Progress())
	}
	return sum
}

// over counts a pull that has ended.
func (m *metrics) over(stopped bool, err error) {
	switch {
	case err == nil:
		m.pulls.WithLabelValues("complete").Inc()
	case stopped:
		m.pulls.WithLabelValues("stopped").Inc()
	default:
		m.pulls.WithLabelValues("failed").Inc()
		m.failures.WithLabelValues(AsError(err).Code).Inc()
	}
}

func (m *metrics) mounted(after time.Duration) { m.mount.Observe(after.Seconds()) }

func (m *metrics) shared(bytes int64) { m.reused.WithLabelValues("shared").Add(float64(bytes)) }

func (m *metrics) copied(bytes int64) { m.reused.WithLabelValues("copied").Add(float64(bytes)) }

func (m *metrics) counted(hit, unused int) {
	m.pages.WithLabelValues("hit").Add(float64(hit))
	m.pages.WithLabelValues("unused").Add(float64(unused))
}
