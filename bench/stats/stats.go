// Package stats is the little statistics that reports and comparisons need. All
// of it is for positive numbers that were measured a few times, such as times:
// medians, since one disturbed run must not tell; means of ratios as Starlight's
// figures have them (geometric for normalised times, harmonic for speed-ups,
// NSDI'22, figure 4); and confidence intervals by resampling, which assume no
// distribution. Of a few pairs in each of many settings resampling would be too sure: the
// mean of their ratios has a t interval.
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

// MeanRatio is the geometric mean of ratios over some settings, each of which has a list of
// ratios of its own and counts once, and its one-sided 95% upper bound: the mean is above
// that in one of twenty such measurements.
//
// The bound is that of a t interval of the logarithms. Settings are taken as they are, not as a
// sample of others: only what differs between the ratios of one setting is noise, and the
// variances of the settings' means add up (degrees of freedom after Welch and
// Satterthwaite). If a setting has a single ratio its noise is not known; then the
// settings' means are the sample. The bound is NaN if there is but one ratio in all.
func MeanRatio(settings [][]float64) (mean, upper float64) {
	var sum, variance, denominator float64
	var means []float64
	single := false
	for _, ratios := range settings {
		logs := make([]float64, len(ratios))
		for i, ratio := range ratios {
			logs[i] = math.Log(ratio)
		}
		m, v := meanVariance(logs)
		n := float64(len(logs))
		means, sum = append(means, m), sum+m
		if single = single || len(logs) < 2; !single {
			variance += v / n
			denominator += v / n * v / n / (n - 1)
		}
	}
	count := float64(len(means))
	if count == 0 {
		return math.NaN(), math.NaN()
	}
	m := sum / count
	variance, freedom := variance/count/count, variance*variance/denominator
	switch {
	case single && count == 1:
		return math.Exp(m), math.NaN()
	case single:
		_, v := meanVariance(means)
		variance, freedom = v/count, count-1
	case variance == 0:
		return math.Exp(m), math.Exp(m)
	}
	return math.Exp(m), math.Exp(m + student95(freedom)*math.Sqrt(variance))
}

// student95 is the 95% quantile of Student's t distribution, of one degree of freedom or
// more. The density, integrated from 0 on by Simpson's rule, comes to 0.45 there.
func student95(freedom float64) float64 {
	a, _ := math.Lgamma((freedom + 1) / 2)
	b, _ := math.Lgamma(freedom / 2)
	scale := math.Exp(a-b) / math.Sqrt(freedom*math.Pi)
	density := func(t float64) float64 {
		return scale * math.Exp(-(freedom+1)/2*math.Log1p(t*t/freedom))
	}
	const steps = 100
	low, high := 1.6, 6.4 // of the normal distribution 1.645, of one degree of freedom 6.314
	for high-low > 1e-9 {
		t := (low + high) / 2
		sum := density(0) + density(t)
		for i := 1; i < steps; i++ {
			sum += float64(2+2*(i%2)) * density(t*float64(i)/steps)
		}
		if sum*t/steps/3 < 0.45 {
			low = t
		} else {
			high = t
		}
	}
	return low
}

// meanVariance is the mean of x and the variance of which x is a sample, NaN of a single value.
func meanVariance(x []float64) (mean, variance float64) {
	for _, v := range x {
		mean += v
	}
	mean /= float64(len(x))
	for _, v := range x {
		variance += (v - mean) * (v - mean)
	}
	return mean, variance / float64(len(x)-1)
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
