package proofs

import (
	"strings"
	"testing"
	"time"
)

func TestPrint(t *testing.T) {
	r := Result{RTT: 50 * time.Millisecond, Rate: 100e6, Proofs: []Proof{{
		Image: "redis:1", Contents: 110e6, Layers: 40e6,
		Pull:  Cost{Time: 4 * time.Second, CPU: 2 * time.Second, Moved: 36e6},
		Proof: Cost{Time: 250 * time.Millisecond, CPU: 300 * time.Millisecond, Moved: 180e3},
	}}, Beside: &Beside{Image: "redis:1", While: "gcc:1", Proven: []bool{false, true}, During: []float64{1.1, 1}, Alone: []float64{1, 1}}}
	var b strings.Builder
	if err := r.print(&b); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"round trip 50ms, 100 Mbit/s", "redis:1", "0.25 s", "0.30 s", "0.18 MB", "0.50%", "ratio 1.049 (95%: 1.000 to 1.100)", "ended before ready in 1"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("%q is not in\n%s", want, b.String())
		}
	}
}
