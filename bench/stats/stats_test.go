package stats

import (
	"math"
	"testing"

	"pgregory.net/rapid"
)

func near(a, b float64) bool { return math.Abs(a-b) < 1e-9*max(1, math.Abs(b)) }

func TestMeans(t *testing.T) {
	for _, c := range []struct {
		x                           []float64
		median, geometric, harmonic float64
	}{
		{[]float64{4}, 4, 4, 4},
		{[]float64{8, 2}, 5, 4, 3.2},
		{[]float64{1, 100, 10}, 10, 10, 3 / 1.11},
		{[]float64{4, 1, 2, 2}, 2, 2, 4 / 2.25},
	} {
		if got := Median(c.x); !near(got, c.median) {
			t.Errorf("median of %v: %v, want %v", c.x, got, c.median)
		}
		if got := GeometricMean(c.x); !near(got, c.geometric) {
			t.Errorf("geometric mean of %v: %v, want %v", c.x, got, c.geometric)
		}
		if got := HarmonicMean(c.x); !near(got, c.harmonic) {
			t.Errorf("harmonic mean of %v: %v, want %v", c.x, got, c.harmonic)
		}
	}
	for name, f := range map[string]func([]float64) float64{"median": Median, "geometric": GeometricMean, "harmonic": HarmonicMean} {
		if got := f(nil); !math.IsNaN(got) {
			t.Errorf("%s of nothing: %v", name, got)
		}
	}
}

// The exact values of the binomial distribution.
func TestSignTest(t *testing.T) {
	for _, c := range []struct {
		up, down int
		want     float64
	}{
		{0, 0, 1}, {1, 0, 1}, {5, 0, 2. / 32}, {0, 6, 2. / 64}, {9, 1, 2 * 11. / 1024}, {3, 3, 1}, {5, 5, 1},
	} {
		if got := SignTest(c.up, c.down); !near(got, c.want) {
			t.Errorf("%d up, %d down: %v, want %v", c.up, c.down, got, c.want)
		}
	}
}

func TestBootstrap(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		x := rapid.SliceOfN(rapid.Float64Range(0.001, 1000), 1, 30).Draw(t, "x")
		lo, hi := math.Inf(1), math.Inf(-1)
		for _, v := range x {
			lo, hi = min(lo, v), max(hi, v)
		}
		i := Bootstrap(x, Median)
		if i.Low > i.High || i.Low < lo || i.High > hi {
			t.Fatalf("interval %v of values in [%v, %v]", i, lo, hi)
		}
		if len(x) >= 3 && i != Bootstrap(x, Median) {
			t.Fatal("two intervals of the same values differ")
		}
	})
	// It narrows with more of the same.
	few, many := Bootstrap([]float64{1, 2, 3, 4, 5}, Median), []float64{}
	for range 40 {
		many = append(many, 1, 2, 3, 4, 5)
	}
	if i := Bootstrap(many, Median); i.High-i.Low >= few.High-few.Low || !i.Contains(3) {
		t.Errorf("of 5 values %v, of 200 %v", few, i)
	}
}
