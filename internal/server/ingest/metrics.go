package ingest

import (
	"github.com/prometheus/client_golang/prometheus"

	"hydrofoil.dev/foil/internal/format/recipe"
	"hydrofoil.dev/foil/internal/metrics"
	"hydrofoil.dev/foil/internal/server/dedup"
)

// Metrics counts what an Ingester does.
type Metrics struct {
	metrics.Collectors
	layers   *prometheus.CounterVec
	seconds  prometheus.Histogram
	rootfs   prometheus.Counter
	bytes    *prometheus.CounterVec
	segments *prometheus.CounterVec
	recipes  prometheus.Counter
	proofs   *prometheus.CounterVec
	proved   *prometheus.CounterVec
}

// What became of a layer, and of a segment.
const (
	ingested = "ingested"
	refused  = "refused"
	failed   = "failed"

	isNew = "new"
	known = "known"
)

// NewMetrics returns Metrics that count from 0.
func NewMetrics() *Metrics {
	m := &Metrics{
		layers: metrics.Counters(prometheus.CounterOpts{Name: "foil_serve_ingest_layers_total",
			Help: "Layers that were looked at for bundles: ingested, refused (plain clients can pull them), or failed, to be tried again."},
			[]string{"result"}, metrics.Each(ingested, refused, failed)...),
		seconds: prometheus.NewHistogram(prometheus.HistogramOpts{Name: "foil_serve_ingest_layer_seconds",
			Help: "How long a layer took, with its download from an upstream.", Buckets: []float64{.01, .05, .1, .5, 1, 5, 10, 30, 60, 300}}),
		rootfs: prometheus.NewCounter(prometheus.CounterOpts{Name: "foil_serve_ingest_rootfs_total", Help: "Tables of contents that were made of ingested layers."}),
		bytes: metrics.Counters(prometheus.CounterOpts{Name: "foil_serve_ingest_bytes_total",
			Help: "Bytes of contents in ingested layers, repetitions within a layer left out: new, and stored, or known from other layers. The share of known is what deduplication saves."},
			[]string{"segments"}, metrics.Each(isNew, known)...),
		segments: metrics.Counters(prometheus.CounterOpts{Name: "foil_serve_ingest_segments_total",
			Help: "The same in segments."},
			[]string{"segments"}, metrics.Each(isNew, known)...),
	}
	m.recipes = prometheus.NewCounter(prometheus.CounterOpts{Name: "foil_serve_ingest_recipe_bytes_total",
		Help: "Bytes of recipes that were made: what it takes beside contents to make the tar streams of layers again."})
	kinds := metrics.Each(recipe.Unknown.String(), recipe.Plain.String(), recipe.Intact.String(), recipe.Reencoded.String(), recipe.Patched.String(), failed)
	m.proofs = metrics.Counters(prometheus.CounterOpts{Name: "foil_serve_proof_layers_total",
		Help: "Layers that were looked at for how their blobs were compressed: reencoded or patched (they can be made again from packs), plain (as well), intact (nothing is known that gives the same bytes), unknown (an encoder is not available), or failed."},
		[]string{"result"}, kinds...)
	m.proved = metrics.Counters(prometheus.CounterOpts{Name: "foil_serve_proof_bytes_total", Help: "The same in bytes of blobs."}, []string{"result"}, kinds...)
	m.Collectors = metrics.Collectors{m.layers, m.seconds, m.rootfs, m.bytes, m.segments, m.recipes, m.proofs, m.proved}
	return m
}

// layer counts one.
func (m *Metrics) layer(result string, seconds float64) {
	if m == nil {
		return
	}
	m.layers.WithLabelValues(result).Inc()
	m.seconds.Observe(seconds)
}

// stored counts what the store made of a layer's segments.
func (m *Metrics) stored(s dedup.Stats) {
	if m == nil {
		return
	}
	m.bytes.WithLabelValues(isNew).Add(float64(s.NewBytes))
	m.bytes.WithLabelValues(known).Add(float64(max(0, s.Bytes-s.NewBytes)))
	m.segments.WithLabelValues(isNew).Add(float64(s.NewSegments))
	m.segments.WithLabelValues(known).Add(float64(max(0, s.Segments-s.NewSegments)))
}

// recipe counts one of so many bytes.
func (m *Metrics) recipe(size int64) {
	if m != nil {
		m.recipes.Add(float64(size))
	}
}

// proven counts a layer that was looked at.
func (m *Metrics) proven(c recipe.Compression, size int64, err error) {
	if m == nil {
		return
	}
	result := c.String()
	if err != nil {
		result = failed
	}
	m.proofs.WithLabelValues(result).Inc()
	m.proved.WithLabelValues(result).Add(float64(size))
}

// flattened counts a rootfs.
func (m *Metrics) flattened() {
	if m != nil {
		m.rootfs.Inc()
	}
}
