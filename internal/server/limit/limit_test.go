package limit_test

import (
	"testing"
	"testing/synctest"
	"time"

	"hydrofoil.dev/foil/internal/server/limit"
)

func TestBuckets(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := limit.New[string](2, 10, 2)
		take := func(key string, n int, want bool, after time.Duration) {
			t.Helper()
			if ok, got := b.Take(key, n); ok != want || got != after {
				t.Errorf("%d of %s: %v, %v, want %v, %v", n, key, ok, got, want, after)
			}
		}
		take("a", 10, true, 0)
		take("a", 1, false, 500*time.Millisecond)
		take("b", 4, true, 0)
		// There is room for two: the others share.
		take("c", 6, true, 0)
		take("d", 6, false, time.Second)
		time.Sleep(3 * time.Second)
		// b is full again, and forgotten.
		take("e", 10, true, 0)
		take("a", 7, false, 500*time.Millisecond)
		take("a", 6, true, 0)
		// More than a bucket holds is a whole one.
		time.Sleep(5 * time.Second)
		take("e", 99, true, 0)
		take("e", 99, false, 5*time.Second)
	})
}
