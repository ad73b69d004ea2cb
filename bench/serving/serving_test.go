package serving

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"hydrofoil.dev/foil/bench/engines"
)

func TestWrite(t *testing.T) {
	r := Result{
		Image: "redis:1", Bytes: 42e6,
		Plans: []Plan{{Image: "redis:2", Kind: "update", Segments: 4465, Frames: 62, First: 40 * time.Millisecond, Median: 5 * time.Millisecond, Bytes: 180_000}},
		Serving: []Served{
			{"foil serve", 16, 450e6, 2, 3 * time.Millisecond, 0},
			{"nginx", 16, 900e6, 0.5, time.Millisecond, 1},
		},
	}
	var out bytes.Buffer
	if err := r.Write(&out); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"450 MB/s  0.50", "2.00 s        4.00", "40.0 ms", "5.0 ms", "42.0 MB"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q is missing in:\n%s", want, out.String())
		}
	}
}

func TestRequest(t *testing.T) {
	q := request(engines.Image{Ref: engines.RegistryAddr + "/redis:2"})
	if got := q.Image; got.Repository != "redis" || got.Reference != "2" || got.Header {
		t.Errorf("%+v", got)
	}
}
