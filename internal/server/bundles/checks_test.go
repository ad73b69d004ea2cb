package bundles

import (
	"fmt"
	"testing"
	"time"
)

// TestChecksAreBounded: a client that says over and over that something arrived damaged has
// little read, and takes nothing from another.
func TestChecksAreBounded(t *testing.T) {
	c := newChecks()
	now := time.Unix(1e9, 0)
	taken := 0
	for c.take("hostile", 1<<20, now) {
		taken++
	}
	if taken != checkBurst>>20 {
		t.Errorf("%d MiB at once, want %d", taken, checkBurst>>20)
	}
	if !c.take("another", 1<<20, now) {
		t.Error("another client has none")
	}
	for range 1000 {
		now = now.Add(100 * time.Millisecond)
		if c.take("hostile", 1<<20, now) {
			taken++
		}
	}
	if most := (checkBurst + 100*checkRate) >> 20; taken > most || taken < most*9/10 {
		t.Errorf("%d MiB in 100 s, want about %d", taken, most)
	}
	// Clients are forgotten when that makes no difference, and none besides.
	for i := range 10 * checkClients {
		c.take(fmt.Sprint(i), 1<<20, now)
	}
	if len(c.clients) != checkClients {
		t.Errorf("%d clients are remembered", len(c.clients))
	}
	if c.take("one more", 1, now) {
		t.Error("a client that nobody remembers has an allowance")
	}
	now = now.Add(time.Hour)
	if !c.take("later", 1, now) || len(c.clients) != 1 {
		t.Errorf("later, %d clients are remembered", len(c.clients))
	}
}
