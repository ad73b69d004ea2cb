package many

import (
	"strings"
	"testing"
)

func TestWrite(t *testing.T) {
	r := Result{Images: []string{"redis:1"}, RTT: "5ms", Rate: 1e9, Batches: []Batches{
		{Engine: "hydrofoil", Workers: 2, Services: 2, Ready: [][]float64{{1, 2, 3, 4}, {1, 2, 3, 2}, {3, 4, 5, 8}}},
		{Engine: "overlayfs", Workers: 1, Services: 1, Ready: [][]float64{{5}}},
	}}
	var text strings.Builder
	if err := r.Write(&text); err != nil {
		t.Fatal(err)
	}
	got := strings.Join(strings.Fields(text.String()), " ")
	for _, want := range []string{"2x2 hydrofoil 3 1.00 1.00 3.00 4.00 4.00", "1x1 overlayfs 1 0.20 5.00 5.00 5.00 5.00", "1000 Mbit/s for all"} {
		if !strings.Contains(got, want) {
			t.Errorf("%q is not in:\n%s", want, text.String())
		}
	}
}
