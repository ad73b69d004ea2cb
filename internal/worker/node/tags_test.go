package node

import (
	"slices"
	"testing"
)

func TestCompareVersions(t *testing.T) {
	want := []string{"1", "1-rc", "1.9", "1.9.1", "1.10", "1.10-alpine", "2", "10", "latest", "v1", "v2", "v10"}
	for range 10 {
		got := slices.Clone(want)
		slices.Reverse(got)
		slices.SortFunc(got, compareVersions)
		if !slices.Equal(got, want) {
			t.Fatalf("%q, want %q", got, want)
		}
	}
	for _, c := range []struct {
		pattern, tag string
		want         bool
	}{
		{"", "1", true}, {"*", "1.2", true}, {"1.*", "1.2", true}, {"1.*", "2.1", false},
		{"*", "sha256-0123.sig", false}, {"", "sha256-0123", false}, {"sha256-*", "sha256-0123.sig", true},
	} {
		if got := matchesTag(c.pattern, c.tag); got != c.want {
			t.Errorf("%q matches %q: %v", c.pattern, c.tag, got)
		}
	}
}
