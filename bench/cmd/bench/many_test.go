package main

import (
	"slices"
	"testing"

	"hydrofoil.dev/foil/bench/many"
)

func TestParseScales(t *testing.T) {
	got, err := parseScales([]string{"1x1", "8x8"})
	if want := []many.Scale{{Workers: 1, Services: 1}, {Workers: 8, Services: 8}}; err != nil || !slices.Equal(got, want) {
		t.Errorf("%v, %v", got, err)
	}
	for _, text := range []string{"", "8", "8x", "0x1", "1x-1", "8x8x8", "08x8", "100x100"} {
		if got, err := parseScales([]string{text}); err == nil {
			t.Errorf("%q was read as %v", text, got)
		}
	}
}
