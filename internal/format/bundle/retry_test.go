package bundle_test

import (
	"net/http"
	"testing"
	"time"

	"hydrofoil.dev/foil/internal/format/bundle"
)

func TestRetryAfter(t *testing.T) {
	now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	for _, test := range []struct {
		says, date string
		want       time.Duration
	}{
		{"", "", 0},
		{"3", "", 3 * time.Second},
		{"-3", "", 0},
		{"soon", "", 0},
		{"99999999999", "", 0},
		{"Thu, 01 Jan 2026 00:00:07 GMT", "", 7 * time.Second},
		{"Thu, 01 Jan 2025 00:00:07 GMT", "", 0},
		// The clock here is a year ahead, or behind.
		{"Wed, 01 Jan 2025 00:00:07 GMT", "Wed, 01 Jan 2025 00:00:00 GMT", 7 * time.Second},
		{"Fri, 01 Jan 2027 00:00:07 GMT", "Fri, 01 Jan 2027 00:00:00 GMT", 7 * time.Second},
		{"Thu, 01 Jan 2026 00:00:07 GMT", "yesterday", 7 * time.Second},
	} {
		h := http.Header{}
		h.Set("Retry-After", test.says)
		h.Set("Date", test.date)
		if got := bundle.RetryAfter(h, now); got != test.want {
			t.Errorf("%q on %q: %s, want %s", test.says, test.date, got, test.want)
		}
	}
	for after, want := range map[time.Duration]string{0: "", time.Millisecond: "1", time.Second: "1", 1500 * time.Millisecond: "2"} {
		h := http.Header{}
		bundle.SetRetryAfter(h, after)
		if got := h.Get("Retry-After"); got != want {
			t.Errorf("%v: %q, want %q", after, got, want)
		}
	}
}
