package node

import (
	"context"
	"time"

	"hydrofoil.dev/foil/internal/worker/api"
)

// happened records one of a pull's milestones and wakes who follows it.
// Milestones are kept: who joins late hears them all.
func (p *pull) happened(kind api.EventKind, err error) {
	ev := p.snapshot()
	ev.Event, ev.Trouble = kind, ""
	if err != nil {
		e := asError(err)
		ev.Err, ev.Code = e.Message, e.Code
	}
	if p.unclaimed() {
		p.n.log.Debug("an image was asked for its header only", "ref", ev.Ref, "error", err)
	} else if err == nil {
		p.n.log.Info("image "+string(kind), "ref", ev.Ref, "digest", ev.Digest, "elapsed", seconds(ev.Elapsed),
			"moved", ev.BytesMoved, "here", ev.ContentHere, "contents", ev.ContentTotal, "startup", ev.StartupRaw, "waits", ev.Waits, "waited", seconds(ev.Waited))
	} else {
		p.n.log.Error("pull failed", "ref", ev.Ref, "error", err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.milestones = append(p.milestones, ev)
	close(p.changed)
	p.changed = make(chan struct{})
	if kind == api.Complete || kind == api.Failed {
		p.over = true
	}
}

// snapshot is the pull as it stands now.
func (p *pull) snapshot() api.Event {
	p.mu.Lock()
	f, pr, digest, r := p.fetch, p.progress, p.digest, p.rootfs
	p.mu.Unlock()
	now := time.Now()
	ev := api.Event{
		Event:   api.Progress,
		Ref:     p.ref.name,
		Time:    now,
		Elapsed: now.Sub(p.begun).Seconds(),
		Digest:  digest,
	}
	if f != nil {
		pr = f.Progress()
		ev.Trouble = pr.Trouble
	}
	ev.BytesMoved, ev.BytesTotal = pr.Moved, pr.Total
	count, took := p.waits.Total()
	ev.Waits, ev.Waited = count, took.Seconds()
	ev.StartupOrigin, ev.StartupMoved, ev.StartupRaw = pr.Startup.Origin, pr.Startup.Moved, pr.Startup.Raw
	ev.StartupTotal, ev.ArenaBytes = pr.Startup.Total, pr.Written
	if r != nil {
		p.n.mu.Lock()
		a := r.arena
		if a == nil {
			a = r.retired
		}
		if a != nil {
			ev.Touched = a.Touched()
		}
		ev.ContentHere, ev.ContentTotal = r.here(), r.rec.Contents
		p.n.mu.Unlock()
	}
	return ev
}

// follow emits the pull's milestones, those before it came first, and progress
// between them, until the one that req names, or the end of the pull.
func (p *pull) follow(ctx context.Context, req api.PullRequest, emit func(api.Event) error) error {
	until := req.Until
	if until == "" {
		until = api.Complete
	}
	var tick <-chan time.Time
	if req.Interval > 0 {
		t := time.NewTicker(max(req.Interval, 20*time.Millisecond))
		defer t.Stop()
		tick = t.C
	}
	sent := 0
	for {
		p.mu.Lock()
		news, over, changed := p.milestones[sent:], p.over, p.changed
		p.mu.Unlock()
		for _, ev := range news {
			sent++
			if err := emit(ev); err != nil {
				return err
			}
			if ev.Event == until {
				return nil
			}
		}
		if over && len(news) == 0 {
			return nil
		}
		if len(news) > 0 {
			continue
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-changed:
		case <-tick:
			if err := emit(p.snapshot()); err != nil {
				return err
			}
		}
	}
}

func seconds(s float64) time.Duration {
	return time.Duration(s * float64(time.Second)).Round(time.Millisecond)
}
