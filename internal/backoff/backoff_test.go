package backoff_test

import (
	"context"
	"errors"
	"math"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"hydrofoil.dev/foil/internal/backoff"
)

func TestPause(t *testing.T) {
	b := backoff.Backoff{First: 10 * time.Millisecond, Most: 50 * time.Millisecond}
	for failures, want := range []time.Duration{0, 10, 20, 40, 50, 50} {
		if got := b.Pause(failures); got != want*time.Millisecond {
			t.Errorf("after %d failures: %v, want %v", failures, got, want*time.Millisecond)
		}
	}
	if got := b.Pause(math.MaxInt); got != b.Most {
		t.Errorf("after very many failures: %v", got)
	}
}

func TestSpread(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		pause := time.Duration(rapid.Int64Range(0, int64(time.Hour)).Draw(t, "pause"))
		if got := backoff.Spread(pause); got < pause || got > pause+pause/2 {
			t.Errorf("%v became %v", pause, got)
		}
	})
}

func TestWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		if err := backoff.Wait(t.Context(), time.Second); err != nil || time.Since(began) != time.Second {
			t.Errorf("waited %v: %v", time.Since(began), err)
		}
		cause := errors.New("enough")
		ctx, cancel := context.WithCancelCause(t.Context())
		time.AfterFunc(time.Second, func() { cancel(cause) })
		began = time.Now()
		if err := backoff.Wait(ctx, time.Minute); !errors.Is(err, cause) || time.Since(began) != time.Second {
			t.Errorf("waited %v: %v", time.Since(began), err)
		}
	})
}
