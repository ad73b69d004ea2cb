package schedule

import (
	"testing"
	"time"
)

// What a line brings is measured while it brings something, and what has gathered while nobody read
// counts little.
func TestLink(t *testing.T) {
	begin := time.Unix(1000, 0)
	type arrival struct {
		at    time.Duration
		moved int64
	}
	for name, c := range map[string]struct {
		arrivals []arrival
		min, max float64 // the rate; 0: not known
	}{
		"nothing":      {nil, 0, 0},
		"one frame":    {[]arrival{{0, 1000}, {time.Hour, 1000}}, 0, 0},
		"steady":       {[]arrival{{0, 1000}, {100 * time.Millisecond, 101_000}, {1200 * time.Millisecond, 1_201_000}}, 1e6, 1e6},
		"idle, again":  {[]arrival{{0, 1000}, {time.Minute, 2000}, {time.Minute + 200*time.Millisecond, 202_000}}, 1e6, 1e6},
		"idle between": {[]arrival{{0, 1000}, {100 * time.Millisecond, 101_000}, {time.Minute, 102_000}, {time.Minute + time.Second, 202_000}}, 1e6, 1e6},
		"a burst": {[]arrival{{0, 0}, {100 * time.Millisecond, 100_000}, {600 * time.Millisecond, 600_000}, {601 * time.Millisecond, 1_000_000},
			{1100 * time.Millisecond, 1_500_000}}, 1e6, 1.5e6},
	} {
		var l link
		for _, a := range c.arrivals {
			l.arrived(begin.Add(a.at), a.moved)
		}
		if l.rate < c.min || l.rate > c.max {
			t.Errorf("%s: %.0f bytes a second, want %.0f to %.0f", name, l.rate, c.min, c.max)
		}
	}
	l := link{rate: 1e6}
	if l.most(1000) != 0 {
		t.Error("a bound without a round trip")
	}
	l.answered(100 * time.Millisecond)
	l.answered(time.Second)
	if got, want := l.most(1_000_000-serverAhead), 1200*time.Millisecond+workerTakes; got != want {
		t.Errorf("%v, want %v", got, want)
	}
}
