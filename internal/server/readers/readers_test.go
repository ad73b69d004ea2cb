package readers_test

import (
	"testing"
	"testing/synctest"
	"time"

	"hydrofoil.dev/foil/internal/server/readers"
)

func TestOldest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var r readers.Readers
		begun := time.Now()
		age := func(want time.Duration) {
			t.Helper()
			if got := time.Since(r.Oldest()); got != want {
				t.Errorf("the oldest began %v ago, want %v", got, want)
			}
		}
		first := r.Begin()
		time.Sleep(time.Second)
		second := r.Begin()
		time.Sleep(time.Second)
		age(2 * time.Second)
		first()
		first() // again: nobody else's end
		age(time.Second)
		second()
		age(0)
		if time.Since(begun) != 2*time.Second {
			t.Error("the clock is another one")
		}
		var none *readers.Readers
		none.Begin()()
	})
}
