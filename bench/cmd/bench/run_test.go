package main

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// What is asked for twice is measured once, in the order in which it was asked for.
func TestOnce(t *testing.T) {
	if diff := cmp.Diff([]string{"redis", "nginx"}, once([]string{"redis", "nginx", "redis"})); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff([]time.Duration{0, 5}, once([]time.Duration{0, 5, 0})); diff != "" {
		t.Error(diff)
	}
}

func TestParseShare(t *testing.T) {
	if got, err := parseShare("12.5%"); err != nil || got != 0.125 {
		t.Errorf("12.5%%: %v, %v", got, err)
	}
	for _, bad := range []string{"", "30", "0%", "100%", "-3%", "much%", "NaN%"} {
		if got, err := parseShare(bad); err == nil {
			t.Errorf("%q is a share: %v", bad, got)
		}
	}
}

func TestParseRates(t *testing.T) {
	all, own, err := parseRates([]string{"100mbit", "0", "pytorch=1gbit"})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]int64{1e8, 0}, all); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff(map[string][]int64{"pytorch": {1e9}}, own); diff != "" {
		t.Error(diff)
	}
	for _, bad := range []string{"fast", "redis=fast", "-1mbit"} {
		if _, _, err := parseRates([]string{bad}); err == nil {
			t.Errorf("%q is a rate", bad)
		}
	}
}
