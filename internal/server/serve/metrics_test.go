package serve

import (
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"hydrofoil.dev/foil/internal/metrics"
	"hydrofoil.dev/foil/internal/metrics/metricstest"
	"hydrofoil.dev/foil/internal/server/upstream"
)

func TestRoutes(t *testing.T) {
	for path, want := range map[string]string{
		"/v2/": "base", "/v2": "base", "/v2/_catalog": "catalog", "/v2/a/b/manifests/tag": "manifests",
		"/v2/a/blobs/sha256:1": "blobs", "/v2/a/blobs/uploads/": "uploads", "/v2/a/blobs/uploads/id": "uploads",
		"/v2/a/tags/list": "tags", "/v2/a/referrers/sha256:1": "referrers", "/v2/blobs": "other", "/v2/x": "other", "/": "other",
		"/healthz": "health", upstream.WebhookPath: "webhook",
	} {
		if got := routeOf(path); got != want {
			t.Errorf("%s: %s, want %s", path, got, want)
		}
	}
	known := make(map[string]bool)
	for _, r := range routes {
		known[r] = true
	}
	for _, path := range []string{"/hydrofoil/x", "/v2/a/b", "/" + strings.Repeat("a/", 1000)} {
		if got := routeOf(path); !known[got] {
			t.Errorf("%s: %s is no route", path, got)
		}
	}
}

func TestRequestsAreCounted(t *testing.T) {
	m := newRequestMetrics()
	h := logRequests(slog.New(slog.DiscardHandler), m, http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if req.URL.Path == "/healthz" {
			panic(http.ErrAbortHandler)
		}
		b := make([]byte, 100)
		n, _ := req.Body.Read(b)
		w.WriteHeader(http.StatusAccepted)
		_, _ = w.Write(b[:n/2])
	}))
	h.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest("PUT", "/v2/a/manifests/b", strings.NewReader("manifest")))
	func() {
		defer func() { _ = recover() }()
		h.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest("GET", "/healthz", nil))
	}()
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(m.all())
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := make(map[string]float64)
	for _, f := range families {
		for _, s := range f.GetMetric() {
			name := strings.TrimPrefix(f.GetName(), "foil_serve_")
			for _, l := range s.GetLabel() {
				name += " " + l.GetValue()
			}
			if v := s.GetCounter().GetValue() + s.GetGauge().GetValue() + float64(s.GetHistogram().GetSampleCount()); v != 0 {
				got[name] = v
			}
		}
	}
	want := map[string]float64{
		"requests_total manifests 202": 1, "requests_total health aborted": 1, "request_seconds manifests": 1, "request_seconds health": 1,
		"received_bytes_total manifests": 8, "sent_bytes_total manifests": 4,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("requests (-want +got):\n%s", diff)
	}
}

func TestMetricsAreDocumented(t *testing.T) {
	s, err := Start(t.Context(), Options{Root: t.TempDir(), Listen: "127.0.0.1:0", Log: slog.New(slog.DiscardHandler),
		Upstream: upstream.Options{URL: "http://127.0.0.1:1"}})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	const file = "../../../docs/metrics.md"
	all := s.metrics
	metricstest.Table(t, file, "serve", metrics.Collectors(all[:len(all)-1]))
	metricstest.Table(t, file, "upstream", all[len(all)-1])
	own, err := Start(t.Context(), Options{Root: t.TempDir(), Listen: "127.0.0.1:0", Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	defer own.Close()
	metricstest.Table(t, file, "modes", metrics.Collectors(own.metrics[len(own.metrics)-2:]))
}
