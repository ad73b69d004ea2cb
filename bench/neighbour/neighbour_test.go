package neighbour

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"hydrofoil.dev/foil/bench/workloads"
)

func TestRateUntil(t *testing.T) {
	seconds := []workloads.Second{{End: time.Second, Rate: 100}, {End: 2 * time.Second, Rate: 300}, {End: 3 * time.Second, Rate: 800}}
	for _, c := range []struct {
		until time.Duration
		want  float64
		ok    bool
	}{
		{-1, 400, true},
		{3 * time.Second, 400, true},
		{2500 * time.Millisecond, 200, true},
		{time.Second, 100, true},
		{time.Second - 1, 0, false},
	} {
		if got, err := rateUntil(seconds, c.until); got != c.want || (err == nil) != c.ok {
			t.Errorf("until %v: %v, %v", c.until, got, err)
		}
	}
}

func TestWrite(t *testing.T) {
	var out bytes.Buffer
	r := Result{Image: "nginx:1", Link: "100 Mbit/s", Rows: []Row{
		{Name: overlayfs, Rates: []float64{1000, 1200, 1100}, Shares: []float64{1, 1, 1}},
		{Name: foil, Rates: []float64{900, 1100, 1000}, Shares: []float64{.9, .92, .91}, Loaded: []float64{9, 11, 10}, Idle: []float64{6, 5, 7}},
	}}
	if err := r.Write(&out); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"nginx:1", "medians of 3", "overlayfs  1100                 1.00            -         -", "foil       1000                 0.91            10.0 s    6.0 s"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q is missing in:\n%s", want, out.String())
		}
	}
}

func TestShareOf(t *testing.T) {
	got, err := shareOf([]moment{{1000, 1000}, {1200, 1100}, {2800, 1850}, {3000, 2000}, {9000, 7900}})
	if err != nil || got != 0.5 { // 1,100 bytes are the image's, 990 of them had come when 2,000 had in all
		t.Errorf("%v, %v", got, err)
	}
	if _, err := shareOf([]moment{{5, 5}, {5, 5}}); err == nil {
		t.Error("a share of nothing")
	}
}
