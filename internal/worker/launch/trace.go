package launch

import (
	"context"
	"errors"
	"fmt"
	"time"

	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/probe"
	"hydrofoil.dev/foil/internal/worker/runner"
)

// TraceOptions are what a traced run has besides Options.
type TraceOptions struct {
	// Before is the trace of a start with a cold page cache: its pages are read in before this one. What comes
	// out is the trace of both.
	Before []byte
	// Send sends the trace to the image's server.
	Send bool
	// Quiet is for how long a container without a probe reads nothing new when
	// it counts as ready; one that ends well is ready as well. 0: 3 s.
	Quiet time.Duration
	// After is how long a container that is ready by its probe goes on, and what it
	// reads is part of its trace: what the first that use it need. 0: none.
	After time.Duration
	// Timeout is how long a container may take to be ready; 0: as long as it likes.
	Timeout time.Duration
	// Progress is called now and then while the container runs; nil: nobody
	// listens.
	Progress func(api.TraceStatus)
}

// tracing is the part of a run that is traced.
type tracing struct {
	TraceOptions
	result *api.TraceResult
}

// tracePoll is how often a traced container is looked at.
const tracePoll = 100 * time.Millisecond

// Trace runs a container once, as Run does, of an image that it first pulls
// completely, on a mount of its own with a cold page cache, until it is ready;
// stops and removes it, and returns what it read until then. Until and Remove of the
// options are ignored. An error names what kept it from being ready.
func (w *Worker) Trace(ctx context.Context, o Options, t TraceOptions) (*api.TraceResult, error) {
	o.Until, o.Remove = api.Ready, true
	if o.Grace == 0 {
		o.Grace = 2 * time.Second // nothing that it writes is kept
	}
	if err := o.prepare(); err != nil {
		return nil, err
	}
	if t.Quiet == 0 {
		t.Quiet = 3 * time.Second
	}
	r := w.newRun(o)
	r.tracing = &tracing{TraceOptions: t}
	code, err := r.run(ctx)
	switch {
	case err != nil:
		return nil, err
	case code != 0:
		return nil, fmt.Errorf("trace %s: %w: exit code %d", o.Pull.Ref, probe.ErrExited, code)
	case r.tracing.result == nil:
		return nil, fmt.Errorf("trace %s: %w", o.Pull.Ref, probe.ErrExited)
	}
	return r.tracing.result, nil
}

// notReady is the error of a container that has had its time.
func (r *run) notReady() error {
	return fmt.Errorf("trace %s: the service was not ready after %v: is the probe right for it? What it says is what foil run shows", r.o.Pull.Ref, r.tracing.Timeout)
}

// trace takes the trace of a container that was ready at that time.
func (r *run) trace(ctx context.Context, proc *runner.Container, ready time.Time) (err error) {
	req := api.TraceRequest{Args: r.args, Started: r.began, Ready: ready, Until: ready, Send: r.tracing.Send, Credential: r.o.Pull.Credential}
	if r.o.Probe != nil && r.tracing.After > 0 {
		select {
		case <-time.After(time.Until(ready.Add(r.tracing.After))):
			req.Until = time.Now()
		case <-proc.Done(): // by itself: what it reads to end others wait for as well
			req.Until = time.Now()
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	r.tracing.result, err = r.Client.Trace(ctx, proc.ID, req)
	return err
}

// traceQuiet does the same for one without a probe.
func (r *run) traceQuiet(ctx context.Context, proc *runner.Container) error {
	tick := time.NewTicker(tracePoll)
	defer tick.Stop()
	var late <-chan time.Time
	if r.tracing.Timeout > 0 {
		timer := time.NewTimer(r.tracing.Timeout)
		defer timer.Stop()
		late = timer.C
	}
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-late:
			return r.notReady()
		case <-proc.Done():
			ready := time.Now()
			if code, err := proc.Wait(ctx); err != nil || code != 0 {
				return errors.Join(err, fmt.Errorf("%w: exit code %d", probe.ErrExited, code))
			}
			return r.trace(ctx, proc, ready)
		case <-tick.C:
		}
		st, err := r.Client.TraceStatus(ctx, proc.ID)
		if err != nil {
			return err
		}
		if since := time.Since(later(st.Last, r.began)); since > r.tracing.Quiet {
			return r.trace(ctx, proc, later(st.Last, r.began))
		}
	}
}

// watchTrace tells how much a container has read, until ctx ends or it has.
func (r *run) watchTrace(ctx context.Context, proc *runner.Container) {
	tick := time.NewTicker(tracePoll)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-proc.Done():
			return
		case <-tick.C:
		}
		if st, err := r.Client.TraceStatus(ctx, proc.ID); err == nil && ctx.Err() == nil {
			r.tracing.Progress(*st)
		}
	}
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}
