package contact

import (
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"hydrofoil.dev/foil/bench/link"
)

func TestWrite(t *testing.T) {
	r := Result{Bytes: 2e6, Cases: []Case{{
		RTT: 100 * time.Millisecond, TLS: true, Connections: 1, Window: 100, FirstRate: -1, More: 0.5,
		Warm: Parts{First: 0.1, Rest: 0.2}, Cold: Parts{TCP: 0.1, TLS: 0.1, First: 0.2, Rest: 0.4}, Dropped: 7,
	}}, Idle: &Idling{Hours: 1, Up: 100e3, Down: 50e3}}
	var text strings.Builder
	if err := r.Write(&text); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"100ms yes 1 100 default 0.30 0.80 0.50 5.0 0.10 0.10 0.10 0.20 7",
		"100 kB an hour up, 50 kB down",
	} {
		if got := strings.Join(strings.Fields(text.String()), " "); !strings.Contains(got, want) {
			t.Errorf("%q is not in:\n%s", want, text.String())
		}
	}
}

// Both ways of asking, over a link, of a server that this tree builds.
func TestMeasure(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: it makes network namespaces")
	}
	foil := filepath.Join(t.TempDir(), "foil")
	build := exec.Command("go", "build", "-o", foil, "./cmd/foil")
	build.Dir = filepath.Join("..", "..")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	b := &bench{dir: t.TempDir(), Options: Options{
		Foil: foil, Bytes: 300_000, Runs: 1, Connections: []int{1, 2}, Idle: time.Second, Out: io.Discard, Log: func(s string) { t.Log(s) },
	}}
	for _, secure := range []bool{false, true} {
		const rtt = 10 * time.Millisecond
		cases, err := b.over(t.Context(), rtt, secure, 20, 50)
		if err != nil {
			t.Fatal(err)
		}
		if len(cases) != 2 {
			t.Fatalf("%d cases", len(cases))
		}
		for _, c := range cases {
			// Handshakes take a round trip each, however fast the machine is; the warm connection has none.
			if c.Warm.TCP != 0 || c.Warm.TLS != 0 || c.Cold.TCP < rtt.Seconds() || secure != (c.Cold.TLS >= rtt.Seconds()) {
				t.Errorf("TLS %v: %+v", secure, c)
			}
		}
	}
	idle, err := b.idle(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if idle.Hours <= 0 {
		t.Errorf("%+v", idle)
	}
	if err := b.with(t.Context(), 0, false, 0, -1, func(p *place) error {
		if p.link.Options().RTT != 0 {
			t.Error("a delay that nobody asked for")
		}
		_, err := p.link.DialContext(t.Context(), link.Edge, "tcp4", "192.0.2.1:5000")
		return err
	}); err != nil {
		t.Error(err)
	}
}
