package stats

import (
	"math"
	"math/rand/v2"
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

// The values of printed tables.
func TestStudent(t *testing.T) {
	for _, c := range []struct{ freedom, want float64 }{{1, 6.314}, {2, 2.920}, {4, 2.132}, {10, 1.812}, {30, 1.697}, {120, 1.658}, {1e6, 1.645}} {
		if got := student95(c.freedom); math.Abs(got-c.want) > 0.0005 {
			t.Errorf("of %v degrees of freedom: %v, want %v", c.freedom, got, c.want)
		}
	}
}

func TestMeanRatio(t *testing.T) {
	e := math.Exp
	for _, c := range []struct {
		name        string
		settings    [][]float64
		mean, upper float64 // NaN: there is none
	}{
		{"nothing", nil, math.NaN(), math.NaN()},
		{"one pair", [][]float64{{1.5}}, 1.5, math.NaN()},
		{"no noise", [][]float64{{1.2, 1.2}, {0.8, 0.8}}, math.Sqrt(1.2 * 0.8), math.Sqrt(1.2 * 0.8)},
		// Logarithms -0.1, 0, 0.1: variance 0.01, that of the mean 0.01/3, 2 degrees.
		{"one setting", [][]float64{{e(-0.1), 1, e(0.1)}}, 1, e(2.9199856 * 0.1 / math.Sqrt(3))},
		// Two of those, far apart: half the variance, twice the degrees.
		{"two settings", [][]float64{{e(0.9), e(1), e(1.1)}, {e(-1.1), e(-1), e(-0.9)}}, 1, e(2.1318468 * 0.1 / math.Sqrt(6))},
		// The settings are the sample.
		{"a pair each", [][]float64{{e(-0.1)}, {1}, {e(0.1)}}, 1, e(2.9199856 * 0.1 / math.Sqrt(3))},
	} {
		mean, upper := MeanRatio(c.settings)
		same := func(got, want float64) bool {
			return math.IsNaN(got) && math.IsNaN(want) || math.Abs(got-want) < 1e-6
		}
		if !same(mean, c.mean) || !same(upper, c.upper) {
			t.Errorf("%s: %v, at most %v; want %v and %v", c.name, mean, upper, c.mean, c.upper)
		}
	}
}

// The mean is above its bound in one of twenty measurements.
func TestMeanRatioCovers(t *testing.T) {
	dice := rand.New(rand.NewPCG(1, 2))
	const tries = 1500
	above := 0
	for range tries {
		settings := make([][]float64, 6)
		for i := range settings {
			for range 5 {
				// Settings differ in their ratios, and in how much they vary.
				settings[i] = append(settings[i], math.Exp(float64(i-3)*0.05+0.025+dice.NormFloat64()*0.02*float64(1+i)))
			}
		}
		if _, upper := MeanRatio(settings); upper < 1 {
			above++
		}
	}
	if share := float64(above) / tries; share < 0.03 || share > 0.07 {
		t.Errorf("the true mean is above the bound in %.3f of all cases, want 0.05", share)
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
