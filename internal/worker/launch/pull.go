package launch

import (
	"context"
	"fmt"
	"time"

	"hydrofoil.dev/foil/internal/worker/api"
)

// pull pulls the image, or finds it here, and emits the events of that. It fills
// r.reserved and r.mounted, closes r.pulled, and ends with ctx (the daemon's pull does not).
func (r *run) pull(ctx context.Context) {
	defer close(r.pulled)
	here, err := r.here(ctx)
	if here || err != nil {
		r.pullErr = err
		return
	}
	r.mu.Lock()
	r.pulling = true
	r.mu.Unlock()
	req := r.o.Pull
	req.Until = api.Complete
	req.Entrypoint, req.Args, req.Probed = r.o.Spec.Entrypoint, r.o.Spec.Args, r.o.Probe != nil && r.tracing == nil
	if r.tracing == nil { // one that is traced is made when all is here
		req.Container = r.o.Spec.ID
	}
	mounted := false
	for ev, err := range r.Client.Pull(ctx, req) {
		if ctx.Err() != nil {
			return
		}
		c := ev.Container
		ev.Container = nil
		if ev.Event == api.Reserved {
			r.container.Store(true)
			r.reserved <- c
			continue
		}
		if ev.Event != "" {
			r.emit(ev)
		}
		if err != nil {
			r.pullErr = err
			return
		}
		if ev.Event == api.Mounted && !mounted && r.tracing == nil {
			mounted = true
			r.mounted <- c
		}
	}
}

// here reports whether the run needs no pull, and tells the story of a pull that
// had nothing to do.
func (r *run) here(ctx context.Context) (bool, error) {
	if r.o.Policy == PullAlways {
		return false, nil
	}
	images, err := r.Client.Images(ctx)
	if err != nil {
		return false, err
	}
	for _, img := range images {
		if img.Ref != r.o.Pull.Ref {
			continue
		}
		complete := img.State == "complete"
		if !complete && r.o.Policy != PullNever {
			return false, nil
		}
		ev := api.Event{Event: api.Resolved, Digest: img.Digest, ContentHere: img.ContentHere, ContentTotal: img.ContentTotal}
		r.emit(ev)
		if complete {
			if err := r.prove(ctx, img, ev); err != nil {
				return false, err
			}
		}
		for _, ev.Event = range []api.EventKind{api.Mounted, api.Complete} {
			if ev.Event == api.Complete && !complete {
				break
			}
			r.emit(ev)
		}
		return true, nil
	}
	if r.o.Policy == PullNever {
		return false, &api.Error{Code: api.CodeNotFound, Message: fmt.Sprintf(
			"no image %s here, and --pull never forbids to fetch it: pull it with \"foil pull %s\"", r.o.Pull.Ref, r.o.Pull.Ref)}
	}
	return false, nil
}

// prove has a complete image proven that starts only then, and tells how far that is by events like ev.
func (r *run) prove(ctx context.Context, img api.Image, ev api.Event) error {
	if img.Policy != "proven" || img.Proof == "proven" {
		return nil
	}
	layer, last := -1, time.Time{}
	for p, err := range r.Client.Prove(ctx, img.Ref) {
		if err != nil {
			return api.Errorf(api.AsError(err).Code, "image %s starts when it is proven (%s): %w", img.Ref, img.PolicyWhy, err)
		}
		interval := r.o.Pull.Interval
		if !p.Done && p.Layer == layer && (interval == 0 || time.Since(last) < interval) {
			continue
		}
		layer, last = p.Layer, time.Now()
		ev.Event, ev.Proof = api.Proving, &api.ProofProgress{State: p.Proof, Hashed: p.Checked, Total: p.Total, Layer: p.Layer, Layers: p.Layers}
		if p.Done {
			ev.Event = api.Proven
		}
		r.emit(ev)
	}
	return nil
}

// refresh asks the daemon for the latest counts of the pull. That it does not
// answer is no reason to disturb a running container: the counts stay.
func (r *run) refresh(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	st, err := r.Client.Status(ctx)
	if err != nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, p := range st.Pulls {
		// Without a pull of its own the run moves nothing, whatever an earlier
		// pull of the image did.
		if r.pulling && p.Ref == r.o.Pull.Ref {
			r.counts = p.Event
		}
	}
}

// tell emits an event of the container, of this moment, with the latest counts.
func (r *run) tell(ctx context.Context, ev api.Event) {
	ev.Time = time.Now() // before asking
	r.refresh(ctx)
	r.emit(ev)
}

// emit completes an event, with the latest counts if it has none of its own,
// and hands it on.
func (r *run) emit(ev api.Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	switch ev.Event {
	case api.Started, api.Ready, api.Exited:
		kind, at, code := ev.Event, ev.Time, ev.ExitCode
		if at.IsZero() {
			at = now
		}
		ev = r.counts
		ev.Event, ev.Time, ev.ExitCode, ev.Err, ev.Code, ev.Proof = kind, at, code, "", "", nil
		ev.Elapsed = at.Sub(r.o.Begun).Seconds()
	default:
		ev.Ref = r.o.Pull.Ref
		if ev.Time.IsZero() {
			ev.Time = now
		}
		ev.Elapsed = now.Sub(r.o.Begun).Seconds()
		r.counts = ev
	}
	if r.o.Emit != nil {
		r.o.Emit(ev)
	}
}
