package metrics

import (
	"context"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
)

func TestNetwork(t *testing.T) {
	for address, want := range map[string]string{
		"127.0.0.1:9464":               "tcp 127.0.0.1:9464",
		":9464":                        "tcp :9464",
		"[::1]:9464":                   "tcp [::1]:9464",
		"/run/foil/metrics.sock":       "unix /run/foil/metrics.sock",
		"unix:/run/metrics.sock":       "unix /run/metrics.sock",
		"unix:relative":                "",
		"9464":                         "",
		"":                             "",
		"/" + strings.Repeat("a", 100): "",
	} {
		network, at, err := Network(address)
		switch {
		case want == "" && err == nil:
			t.Errorf("%q: %s %s, want an error", address, network, at)
		case want != "" && (err != nil || network+" "+at != want):
			t.Errorf("%q: %s %s, %v, want %s", address, network, at, err, want)
		}
	}
}

func TestServe(t *testing.T) {
	seen := Counters(prometheus.CounterOpts{Name: "foil_test_seen_total", Help: "Seen."}, []string{"what"}, Each("one", "other")...)
	r, err := Registry(seen)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Registry(seen, seen); err == nil {
		t.Error("the same collector twice is no error")
	}
	seen.WithLabelValues("one").Inc()
	socket := filepath.Join(t.TempDir(), "m.sock")
	// A socket of a process that was killed.
	old, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	old.SetUnlinkOnClose(false)
	old.Close()
	for _, address := range []string{"127.0.0.1:0", socket} {
		l, err := Listen(address)
		if err != nil {
			t.Fatal(err)
		}
		if address == socket {
			if _, err := Listen(address); err == nil {
				t.Errorf("%s: taken twice", address)
			}
			if st, err := os.Stat(socket); err != nil || st.Mode().Perm() != 0o660 {
				t.Errorf("%v, %v", st, err)
			}
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- Serve(ctx, l, r, slog.New(slog.DiscardHandler)) }()
		client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, l.Addr().Network(), l.Addr().String())
		}}}
		resp, err := client.Get("http://metrics/metrics")
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		for _, want := range []string{`foil_test_seen_total{what="one"} 1`, `foil_test_seen_total{what="other"} 0`, "process_open_fds ", "go_goroutines "} {
			if !strings.Contains(string(b), want) {
				t.Errorf("%s: no %s in the answer, %v", address, want, err)
			}
		}
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
	if _, err := os.Stat(socket); !os.IsNotExist(err) {
		t.Errorf("the socket is left behind: %v", err)
	}
}
