package remote

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"time"

	"hydrofoil.dev/foil/internal/format/bundle"
)

const (
	// keepEvery is how often a kept connection is used, so that no middlebox
	// forgets it, and one that died is found before a pull needs it. It is less than
	// Options.PingInterval, so that HTTP/2 need not ping as well: answers to both at
	// once have BBR look for the shortest round trip, with four packets in flight.
	keepEvery = 9 * time.Second
	// warmStep is what a warm-up begins with, bytes; it doubles.
	warmStep = 64 << 10
	// warmGain is how much faster than all before a step must be: if it is not, the
	// path may be full.
	warmGain = 1.25
)

// Warming is what a warm-up came to.
type Warming struct {
	Bytes int64
	Rate  float64 // bytes a second, of the fastest step
}

// Warm connects if need be, and has the server send bytes that mean nothing, twice
// as many each time, until that was no longer faster twice; at most `most` in all. TCP
// has then learned the path: a pull that comes later begins at its full rate instead of
// with ten packets a round trip. BBR keeps what it learned while
// a connection is idle (Linux: tcp_slow_start_after_idle is not for it).
//
// Twice, since one packet that is lost makes a step slow on a path that is far from
// full; and since BBR believes that a path is full after three round trips that
// were no faster. The server sees to it that what comes before that does not overflow
// the queue.
func (c *Client) Warm(ctx context.Context, most int64) (Warming, error) {
	var w Warming
	slow := 0 // steps in a row that were no faster
	for step := int64(warmStep); w.Bytes < most && slow < 2; step *= 2 {
		began := time.Now()
		n, err := c.padding(ctx, min(step, most-w.Bytes))
		w.Bytes += n
		if err != nil {
			return w, err
		}
		rate := float64(n) / time.Since(began).Seconds()
		if rate < w.Rate*warmGain {
			slow++
		} else {
			slow = 0
		}
		w.Rate = max(w.Rate, rate)
	}
	return w, nil
}

// Kept returns the warm-up of the connection that Keep holds open; false while it has
// none.
func (c *Client) Kept() (Warming, bool) {
	w := c.kept.Load()
	if w == nil {
		return Warming{}, false
	}
	return *w, true
}

// padding has the server send n bytes.
func (c *Client) padding(ctx context.Context, n int64) (int64, error) {
	r, err := c.Stream(ctx, bundle.WarmPath, bundle.Warm{Bytes: n}, 0)
	if err != nil {
		return 0, err
	}
	defer r.Close()
	got, err := io.Copy(io.Discard, io.LimitReader(r, n+1))
	if err == nil && got != n {
		err = fmt.Errorf("post %s: %d bytes or more, asked for %d", r.url, got, n)
	}
	return got, err
}

// Keeping says how Keep holds a connection.
type Keeping struct {
	// WarmUp is how many bytes, at most, a new connection is warmed up with; 0: it is not.
	WarmUp int64
	// Least is the least time between two warm-ups. A connection that comes earlier has none:
	// a server or a path that drops connections is not worth the bytes.
	Least time.Duration
	// Used is called each time the connection has been used, before it counts as kept; nil: nothing is.
	Used func(context.Context)
}

// Keep holds a connection to the server open until ctx ends: it connects, warms
// each connection up that it made itself, and connects
// again when it was lost. What a request of somebody else has made needs no warming, and
// would have to share with that request.
func (c *Client) Keep(ctx context.Context, k Keeping) {
	var cold bool          // the connection is to be warmed up
	var warmedAt time.Time // the last time; zero: never
	defer c.kept.Store(nil)
	for pause := time.Second; ; {
		before := c.dials.Load()
		_, err := c.padding(ctx, 0)
		cold = cold && c.dials.Load() == before || c.dials.Load() > before
		var status *StatusError
		if k.Used != nil && (err == nil || errors.As(err, &status)) {
			k.Used(ctx)
		}
		switch {
		case errors.As(err, &status):
			err, cold = nil, false // a server that knows no warming, but there it is
			c.kept.CompareAndSwap(nil, &Warming{})
		case err != nil:
		case !cold || !warmedAt.IsZero() && time.Since(warmedAt) < k.Least:
			cold = false
			c.kept.CompareAndSwap(nil, &Warming{})
		default:
			warmedAt = time.Now()
			var w Warming
			if w, err = c.Warm(ctx, k.WarmUp); err == nil {
				cold = false
				c.kept.Store(&w)
				c.log.Info("connected", "server", c.base.Redacted(), "warm_up_bytes", w.Bytes, "bytes_per_second", int64(w.Rate))
			}
		}
		wait := keepEvery
		if err != nil {
			if ctx.Err() != nil {
				return
			}
			c.kept.Store(nil)
			c.log.Debug("no connection", "server", c.base.Redacted(), "error", err, "pause", pause)
			wait = pause + rand.N(pause/2)
			pause = min(2*pause, time.Minute)
		} else {
			pause = time.Second
		}
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return
		}
	}
}
