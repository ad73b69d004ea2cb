// Package backoff says how long to wait before something that failed is tried
// again.
package backoff

import (
	"context"
	"math/rand/v2"
	"time"
)

// Backoff is an exponential backoff.
type Backoff struct {
	First time.Duration // the pause after one failure
	Most  time.Duration // what it doubles to with each further one
}

// Pause returns the pause after so many failures in a row; none after none.
func (b Backoff) Pause(failures int) time.Duration {
	if failures <= 0 {
		return 0
	}
	pause := min(b.First, b.Most)
	for ; failures > 1 && pause < b.Most; failures-- {
		pause = min(2*pause, b.Most)
	}
	return pause
}

// Spread adds up to half of a pause at random: those that failed together are not
// to try again together.
func Spread(pause time.Duration) time.Duration { return pause + rand.N(pause/2+1) }

// Wait waits until a pause is over. It returns the cause if ctx ends before.
func Wait(ctx context.Context, pause time.Duration) error {
	timer := time.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
