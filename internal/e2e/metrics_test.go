package e2e

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"

	"hydrofoil.dev/foil/internal/worker/api"
)

// scrape returns the samples that an address has.
func scrape(t *testing.T, network, address string) map[string]float64 {
	t.Helper()
	c := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, network, address)
	}}}
	resp, err := c.Get("http://metrics/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	got := make(map[string]float64)
	for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
		name, value, ok := strings.Cut(lines.Text(), "} ")
		if !ok {
			name, value, ok = strings.Cut(lines.Text(), " ")
		} else {
			name += "}"
		}
		var v float64
		if _, err := fmt.Sscan(value, &v); ok && !strings.HasPrefix(name, "#") && err == nil {
			got[name] = v
		}
	}
	return got
}

// One push and one pull, as both sides count them.
func TestMetricsAreServed(t *testing.T) {
	sockets := t.TempDir()
	at := func(name string) string { return filepath.Join(sockets, name) }
	s := &server{addr: freeAddr(t)}
	s.process = start(t, "serve", "--root", t.TempDir(), "--listen", s.addr, "--metrics-listen", at("serve"))
	eventually(t, "the server answers", func() error {
		resp, err := http.Get("http://" + s.addr + "/v2/")
		if err == nil {
			resp.Body.Close()
		}
		return err
	})
	img := manyFiles(t, 50, 20_000, 2, 0)
	ref := s.push("counted", "1", img)
	tcp := freeAddr(t)
	w := startWorker(t, workerRoot(t), "--metrics-listen", tcp)
	events := w.mustPull(ref, api.Complete)
	bytes := float64(events[len(events)-1].ContentTotal)
	node := scrape(t, "tcp", tcp)
	for name, want := range map[string]float64{
		`foil_node_pulls_total{result="complete"}`: 1, `foil_node_images{state="complete"}`: 1, `foil_node_arenas{state="complete"}`: 1,
		`foil_node_keeper_up`: 1, `foil_node_mount_seconds_count`: 1, `foil_node_pulls_running`: 0, `foil_node_written_bytes_total`: bytes,
	} {
		if got, ok := node[name]; !ok || got != want {
			t.Errorf("%s is %v (%v), want %v", name, got, ok, want)
		}
	}
	// The worker may have the last byte before the server has counted it.
	eventually(t, "the server has counted the bundle", func() error {
		var errs []error
		serve := scrape(t, "unix", at("serve"))
		for name, want := range map[string]float64{
			`foil_serve_bundles_total{result="sent"}`: 1, `foil_serve_bundles_running`: 0,
			`foil_serve_ingest_layers_total{result="ingested"}`: float64(len(img.layers)), `foil_serve_ingest_queue_images`: 0,
			`foil_serve_ingest_bytes_total{segments="new"}`: bytes, `foil_serve_ingest_rootfs_total`: 1,
			`foil_serve_requests_total{route="manifests",status="201"}`: 1,
			`foil_serve_sent_bytes_total{route="bundle"}`:               node["foil_node_received_bytes_total"],
		} {
			if got, ok := serve[name]; !ok || got != want {
				errs = append(errs, fmt.Errorf("%s is %v (%v), want %v", name, got, ok, want))
			}
		}
		return errors.Join(errs...)
	})
}
