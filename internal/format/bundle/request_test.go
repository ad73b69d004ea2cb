package bundle

import (
	"net/url"
	"testing"
	"time"
)

// TestHold: what a request's query says is what it asks for, bounded.
func TestHold(t *testing.T) {
	for hold, want := range map[time.Duration]time.Duration{
		0:                       0,
		-time.Second:            0,
		1500 * time.Millisecond: 1500 * time.Millisecond,
		1:                       1,
		MaxHold:                 MaxHold,
		time.Hour:               MaxHold,
	} {
		r := Request{Hold: hold}
		query, err := url.ParseQuery(r.Query().Encode())
		if err != nil {
			t.Fatal(err)
		}
		if got, err := ParseHold(query); got != want || err != nil {
			t.Errorf("%v: %v, %v, want %v", hold, got, err, want)
		}
	}
	for _, s := range []string{"10", "-1s", "soon", "1e9s", " 1s"} {
		if got, err := ParseHold(url.Values{"hold": {s}}); err == nil || got != 0 {
			t.Errorf("%q: %v, %v", s, got, err)
		}
	}
}
