package node

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"hydrofoil.dev/foil/internal/metrics/metricstest"
	"hydrofoil.dev/foil/internal/worker/api"
)

// measured returns the samples of a node whose values are not 0, without those
// that no test can know.
func measured(t *testing.T, n *Node) map[string]float64 {
	t.Helper()
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(n.Metrics())
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := make(map[string]float64)
	for _, f := range families {
		for _, m := range f.GetMetric() {
			name := strings.TrimPrefix(f.GetName(), "foil_node_")
			for _, l := range m.GetLabel() {
				name += " " + l.GetValue()
			}
			v := m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
			if v != 0 {
				got[name] = v
			}
		}
	}
	return got
}

func TestMetricsAreDocumented(t *testing.T) {
	h := newHost(t)
	h.stop()
	o := h.options()
	// Nobody answers there: it is not up.
	o.Connect = []string{"http://127.0.0.1:1"}
	var err error
	if h.n, err = New(o); err != nil {
		t.Fatal(err)
	}
	metricstest.Table(t, "../../../docs/metrics.md", "node", h.n.Metrics())
}

func TestMetrics(t *testing.T) {
	s := newFakeServer(t)
	img := newFakeImage(t, some(1, 30, 20_000))
	ref := s.Serve("app:1", img)
	h := newHost(t)
	h.mustPull(ref, api.Complete)
	if _, err := h.pull(ref+"none", api.Complete); err == nil {
		t.Fatal("an image that there is not was pulled")
	}
	got := measured(t, h.n)
	for _, name := range []string{"received_bytes_total", "disk_bytes complete", "disk_free_bytes", "disk_size_bytes", "disk_limit_bytes"} {
		if got[name] <= 0 {
			t.Errorf("%s is %v", name, got[name])
		}
		delete(got, name)
	}
	for name := range got {
		if strings.HasPrefix(name, "info ") || strings.HasPrefix(name, "gate_") {
			delete(got, name)
		}
	}
	size := 0.0
	for _, b := range img.Files {
		size += float64(len(b))
	}
	want := map[string]float64{
		"start new": 1, "keeper_up": 1,
		"pulls_total complete": 1, "pulls_total failed": 1, "pull_failures_total not_found": 1, "mount_seconds": 1,
		"image_proofs served": 1, "images complete": 1, "arenas complete": 1, "written_bytes_total": size,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("metrics (-want +got):\n%s", diff)
	}
}
