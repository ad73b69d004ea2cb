// Package stats is the little statistics that reports and comparisons need. All
// of it is for positive numbers that were measured a few times, such as times:
// medians, since one disturbed run must not tell; means of ratios as Starlight's
// figures have them (geometric for normalised times, harmonic for speed-ups,
// NSDI'22, figure 4); and confidence intervals by resampling, which assume no
// distribution.
package stats

import (
	"math"
	"math/rand/v2"
	"slices"
)

// Median is NaN of nothing.
func Median(x []float64) float64 {
	if len(x) == 0 {
		return math.NaN()
	}
	s := slices.Sorted(slices.Values(x))
	n := len(s)
	return (s[(n-1)/2] + s[n/2]) / 2
}

// GeometricMean is NaN of nothing.
func GeometricMean(x []float64) float64 {
	var sum float64
	for _, v := range x {
		sum += math.Log(v)
	}
	return math.Exp(sum / float64(len(x)))
}

// HarmonicMean is NaN of nothing.
func HarmonicMean(x []float64) float64 {
	if len(x) == 0 {
		return math.NaN()
	}
	var sum float64
	for _, v := range x {
		sum += 1 / v
	}
	return float64(len(x)) / sum
}

// Interval is a 95% confidence interval.
type Interval struct {
	Low  float64 `json:"low"`
	High float64 `json:"high"`
}

// Contains reports whether v is in the interval.
func (i Interval) Contains(v float64) bool { return i.Low <= v && v <= i.High }

// resamples are enough for the second digit of an interval's ends.
const resamples = 2000

// Bootstrap is the interval of a statistic of x by the percentile bootstrap. It
// is the same each time. Of fewer than three values it is as wide as they are.
func Bootstrap(x []float64, statistic func([]float64) float64) Interval {
	if len(x) == 0 {
		return Interval{math.NaN(), math.NaN()}
	}
	if len(x) < 3 {
		return Interval{slices.Min(x), slices.Max(x)}
	}
	dice := rand.New(rand.NewPCG(uint64(len(x)), 1))
	values, sample := make([]float64, resamples), make([]float64, len(x))
	for i := range values {
		for j := range sample {
			sample[j] = x[dice.IntN(len(x))]
		}
		values[i] = statistic(sample)
	}
	slices.Sort(values)
	return Interval{values[resamples*25/1000], values[resamples*975/1000]}
}

// SignTest is the two-sided probability that so uneven a split of up and down
// comes from tossing a coin: the p-value of pairs of which up became larger and
// down became smaller. Pairs that are equal are left out before.
func SignTest(up, down int) float64 {
	n, k := up+down, min(up, down)
	if n == 0 {
		return 1
	}
	// The sum of n over i for i up to k, times 2, over 2 to the n.
	var p float64
	for i := range k + 1 {
		a, _ := math.Lgamma(float64(n + 1))
		b, _ := math.Lgamma(float64(i + 1))
		c, _ := math.Lgamma(float64(n - i + 1))
		p += math.Exp(a - b - c - float64(n)*math.Ln2)
	}
	return min(1, 2*p)
}
