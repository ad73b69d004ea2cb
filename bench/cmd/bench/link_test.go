package main

import "testing"

func TestRate(t *testing.T) {
	for s, want := range map[string]int64{"100mbit": 1e8, "1Gbit": 1e9, "1.5mbit": 15e5, "56kbit": 56e3, "9600": 9600, "9600bit": 9600, "0": 0} {
		var r rateFlag
		if err := r.Set(s); err != nil || int64(r) != want {
			t.Errorf("%q: %d, %v; want %d", s, int64(r), err, want)
		}
	}
	for _, s := range []string{"", "fast", "-1mbit", "1 mbyte"} {
		var r rateFlag
		if err := r.Set(s); err == nil {
			t.Errorf("%q was taken for %d", s, int64(r))
		}
	}
}
