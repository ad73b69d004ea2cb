package scrub

import (
	"cmp"
	"context"
	"time"

	"hydrofoil.dev/foil/internal/backoff"
)

const (
	// daily is the default of Options.Every: a small store need not be read all day.
	daily = 24 * time.Hour
	// trouble is how long a pass that could not go on waits.
	trouble = time.Minute
)

// Always makes one pass after the other until ctx ends. What goes wrong is in the log.
func Always(ctx context.Context, o Options) {
	s := New(o)
	for ctx.Err() == nil {
		if last, err := Last(s.o.Root); err == nil && last != nil {
			if backoff.Wait(ctx, time.Until(last.Began.Add(cmp.Or(s.o.Every, daily)))) != nil {
				return
			}
		}
		r, err := s.Pass(ctx)
		switch {
		case ctx.Err() != nil:
			return
		case err != nil:
			s.o.Log.Error("scrub: it goes on in a minute", "error", err)
			if backoff.Wait(ctx, trouble) != nil {
				return
			}
		case r.Unmended > 0:
			s.o.Log.Error("scrub: all was read; what is damaged was named, and in scrub.json below the root", "unmended", r.Unmended, "mended", r.Mended, "took", r.Took.Round(time.Second))
		default:
			s.o.Log.Info("scrub: all was read", "mended", r.Mended, "took", r.Took.Round(time.Second))
		}
	}
}
