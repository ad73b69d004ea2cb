// Package metrics serves Prometheus metrics: at GET /metrics of an address of
// its own, which is a TCP address or a Unix socket. docs/metrics.md lists what
// there is; package metricstest holds it to what programs register.
//
// Names are foil_node_... for the worker and foil_serve_... for the server, with
// their unit, and _total for what only grows. No label has values that others
// choose, such as image names: what is counted is bounded by the program and its
// configuration.
package metrics

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// Off is the address of no endpoint.
const Off = "off"

// Network splits an address: /PATH or unix:/PATH is a Unix socket, HOST:PORT is
// TCP.
func Network(address string) (network, at string, err error) {
	if path, ok := strings.CutPrefix(address, "unix:"); ok || strings.HasPrefix(address, "/") {
		if !strings.HasPrefix(path, "/") || len(path) > 100 {
			return "", "", fmt.Errorf("%q is no address for metrics: the path of a Unix socket begins with / and has at most 100 bytes", address)
		}
		return "unix", path, nil
	}
	if _, _, err := net.SplitHostPort(address); err != nil {
		return "", "", fmt.Errorf("%q is no address for metrics (%w): say HOST:PORT, :PORT, /PATH of a Unix socket, or off", address, err)
	}
	return "tcp", address, nil
}

// Listen opens an address. A Unix socket that nobody listens on is replaced; its
// mode is 0660.
func Listen(address string) (net.Listener, error) {
	network, at, err := Network(address)
	if err != nil {
		return nil, err
	}
	if network == "unix" {
		if c, err := net.DialTimeout(network, at, time.Second); err == nil {
			_ = c.Close()
			return nil, fmt.Errorf("listen for metrics: another process listens on %s: name another path", at)
		}
		if st, err := os.Lstat(at); err == nil && st.Mode()&os.ModeSocket != 0 {
			_ = os.Remove(at)
		}
	}
	l, err := net.Listen(network, at)
	if err != nil {
		return nil, fmt.Errorf("listen for metrics: %w", err)
	}
	if network == "unix" {
		if err := os.Chmod(at, 0o660); err != nil {
			return nil, errors.Join(fmt.Errorf("listen for metrics: %w", err), l.Close())
		}
	}
	return l, nil
}

// Registry holds collectors, and those of the process and of Go's runtime.
func Registry(list ...prometheus.Collector) (*prometheus.Registry, error) {
	r := prometheus.NewRegistry()
	list = append(list, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	for _, c := range list {
		if err := r.Register(c); err != nil {
			return nil, fmt.Errorf("register metrics: %w", err)
		}
	}
	return r, nil
}

// Serve answers at l, which it closes, until ctx ends.
func Serve(ctx context.Context, l net.Listener, r *prometheus.Registry, log *slog.Logger) error {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(r, promhttp.HandlerOpts{
		ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelWarn),
		// What can be had is better than nothing.
		ErrorHandling:       promhttp.ContinueOnError,
		MaxRequestsInFlight: 4,
	}))
	srv := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second, IdleTimeout: 5 * time.Minute, WriteTimeout: time.Minute,
		ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelDebug)}
	done := make(chan error, 1)
	go func() { done <- srv.Serve(l) }()
	select {
	case err := <-done:
		return fmt.Errorf("serve metrics: %w", err)
	case <-ctx.Done():
	}
	_ = srv.Close()
	<-done
	return nil
}

// Counters makes a CounterVec whose every combination of the values given for its
// labels is there from the start, at 0: a rate of what has not happened yet is 0
// and not unknown.
func Counters(o prometheus.CounterOpts, labels []string, values ...[]string) *prometheus.CounterVec {
	v := prometheus.NewCounterVec(o, labels)
	for _, combination := range values {
		v.WithLabelValues(combination...)
	}
	return v
}

// Each is values for Counters with one label.
func Each(values ...string) [][]string {
	list := make([][]string, len(values))
	for i, v := range values {
		list[i] = []string{v}
	}
	return list
}

// Collectors collects several as one.
type Collectors []prometheus.Collector

// Describe implements prometheus.Collector.
func (c Collectors) Describe(ch chan<- *prometheus.Desc) {
	for _, one := range c {
		one.Describe(ch)
	}
}

// Collect implements prometheus.Collector.
func (c Collectors) Collect(ch chan<- prometheus.Metric) {
	for _, one := range c {
		one.Collect(ch)
	}
}
