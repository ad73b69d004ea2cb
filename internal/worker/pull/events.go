package pull

import (
	"context"
	"time"

	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/format/trace"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/store"
)

// log is what has happened in a pull. Guarded by Pull.mu, which its methods take.
type log struct {
	milestones []api.Event
	changed    chan struct{} // closed, and made anew, when milestones grow
	phase      phase
	err        error // why it has failed
}

// phase is how far a pull has come.
type phase uint8

const (
	running phase = iota
	failing       // it has failed, and is about to say so
	over
)

func (l *log) has(p *Pull, kind api.EventKind) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, ev := range l.milestones {
		if ev.Event == kind {
			return true
		}
	}
	return false
}

func (l *log) failing(p *Pull) {
	p.mu.Lock()
	defer p.mu.Unlock()
	l.phase = failing
}

func (l *log) why(p *Pull) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return l.err
}

// Ended reports whether the pull has ended, well or not.
func (p *Pull) Ended() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.events.phase == over
}

// HasFailed reports whether it has failed, or is about to say so.
func (p *Pull) HasFailed() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.events.phase == failing || p.events.err != nil
}

// Wait returns when the pull has ended, well or not.
func (p *Pull) Wait(ctx context.Context) error { return p.WaitWith(ctx, 0, nil) }

// WaitWith is Wait, and emits progress at intervals, unless interval is 0.
func (p *Pull) WaitWith(ctx context.Context, interval time.Duration, emit func(api.Event) error) error {
	tick, stop := ticks(interval)
	defer stop()
	for {
		p.mu.Lock()
		ended, changed := p.events.phase == over, p.events.changed
		p.mu.Unlock()
		if ended {
			return nil
		}
		select {
		case <-changed:
		case <-tick:
			if err := emit(p.Snapshot()); err != nil {
				return err
			}
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// ticks returns a channel that something comes from at intervals; nil when the interval is 0.
func ticks(interval time.Duration) (tick <-chan time.Time, stop func()) {
	if interval <= 0 {
		return nil, func() {}
	}
	t := time.NewTicker(max(interval, 20*time.Millisecond))
	return t.C, t.Stop
}

// happened records one of a pull's milestones and wakes who follows it.
// Milestones are kept: who joins late hears them all.
func (p *Pull) happened(kind api.EventKind, err error) {
	ev := p.Snapshot()
	ev.Event, ev.Trouble = kind, ""
	if err != nil {
		e := AsError(err)
		ev.Err, ev.Code = e.Message, e.Code
	}
	switch {
	case !p.Claimed():
		p.s.log.Debug("an image was asked for its header only", "ref", ev.Ref, "error", err)
	case err == nil:
		p.s.log.Info("image "+string(kind), "ref", ev.Ref, "digest", ev.Digest, "elapsed", seconds(ev.Elapsed),
			"moved", ev.BytesMoved, "here", ev.ContentHere, "contents", ev.ContentTotal, "startup", ev.StartupRaw, "waits", ev.Waits, "waited", seconds(ev.Waited))
	default:
		p.s.log.Error("pull failed", "ref", ev.Ref, "error", err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	l := &p.events
	l.milestones = append(l.milestones, ev)
	close(l.changed)
	l.changed = make(chan struct{})
	if kind == api.Complete || kind == api.Failed {
		l.phase, l.err = over, err
	}
}

// Snapshot is the pull as it stands now.
func (p *Pull) Snapshot() api.Event {
	p.mu.Lock()
	f, pr, img, r := p.stream, p.progress, p.image, p.rootfs
	p.mu.Unlock()
	now := time.Now()
	ev := api.Event{
		Event:   api.Progress,
		Ref:     p.ref.Name,
		Time:    now,
		Elapsed: now.Sub(p.begun).Seconds(),
	}
	if img != nil {
		ev.Digest = img.Digest.String()
	}
	if f != nil {
		pr = f.Progress()
		ev.Trouble = pr.Trouble
	}
	ev.BytesMoved, ev.BytesTotal = pr.Moved, pr.Total
	count, took := p.waits.Total()
	ev.Waits, ev.Waited = count, took.Seconds()
	longest, over := p.waits.Longest()
	ev.WaitMax, ev.WaitBound, ev.WaitsOver = longest.Took.Seconds(), longest.Bound.Seconds(), over
	ev.StartupOrigin, ev.StartupMoved, ev.StartupRaw = pr.Startup.Origin, pr.Startup.Moved, pr.Startup.Raw
	ev.StartupTotal, ev.ArenaBytes = pr.Startup.Total, pr.Written
	if r != nil {
		ev.Touched, ev.ContentHere, ev.ContentTotal = r.Touched(), r.Here(), r.ContentBytes()
	}
	return ev
}

// Follow emits the pull's milestones, those before it came first, and progress
// between them, until the one that req names, or the end of the pull.
func (p *Pull) Follow(ctx context.Context, req api.PullRequest, emit func(api.Event) error) error {
	until := req.Until
	if until == "" {
		until = api.Complete
	}
	tick, stop := ticks(req.Interval)
	defer stop()
	sent := 0
	for {
		p.mu.Lock()
		news, ended, changed := p.events.milestones[sent:], p.events.phase == over, p.events.changed
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
		if ended && len(news) == 0 {
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
			if err := emit(p.Snapshot()); err != nil {
				return err
			}
		}
	}
}

// Status is the pull for `foil status`.
func (p *Pull) Status() api.PullStatus {
	s := api.PullStatus{Event: p.Snapshot()}
	p.mu.Lock()
	f, ended := p.stream, p.events.phase == over
	if n := len(p.events.milestones); n > 0 {
		last := p.events.milestones[n-1]
		s.Event.Event, s.Err, s.Code = last.Event, last.Err, last.Code
		if ended {
			s.Time, s.Elapsed, s.Trouble = last.Time, last.Elapsed, ""
		}
	}
	p.mu.Unlock()
	if f != nil && !ended {
		s.Rate = f.Progress().Rate
	}
	return s
}

// Report is the pull with the reads that waited, by file and page.
func (p *Pull) Report() *api.PullReport {
	report := &api.PullReport{PullStatus: p.Status(), Began: p.begun, Reads: []api.Read{}}
	first := p.waits.First()
	if len(first) == 0 {
		return report
	}
	named := func(int64, int64) (string, int64) { return "", 0 }
	// A rootfs that has gone, or whose files cannot be read, has no names.
	if r := p.Rootfs(); r != nil && p.s.store.Get(r.Key()) == r {
		if n, err := namer(r); err == nil {
			named = n
		} else {
			p.s.log.Debug("name the reads that waited", "rootfs", r.ChainID(), "error", err)
		}
	}
	for _, w := range first {
		read := api.Read{
			Began: w.Began, Took: w.Took.Seconds(), Bound: w.Bound.Seconds(), Waiting: w.Waiting,
			Pages:   (w.Length + trace.BlockSize - 1) / trace.BlockSize,
			Planned: w.Planned, Moved: w.Moved, Ahead: w.Ahead, Promoted: w.Promoted,
		}
		read.Path, read.Page = named(w.Offset, w.Length)
		if w.Err != nil {
			read.Err = w.Err.Error()
		}
		report.Reads = append(report.Reads, read)
	}
	return report
}

// namer returns what names a range of a rootfs's own arena: the first file that has
// what begins there, and the page of it.
func namer(r *store.Rootfs) (func(off, length int64) (path string, page int64), error) {
	have, err := r.Read()
	if err != nil {
		return nil, err
	}
	l, err := r.Layout(have)
	if err != nil {
		return nil, err
	}
	names := toc.NamesOf(have.TOC)
	return func(off, length int64) (string, int64) {
		first, end := l.SegmentsIn(off, length)
		if first >= end {
			return "", 0
		}
		content := l.Content(first)
		at, _ := l.Offset(content)
		path, _ := names.Path(int32(content))
		return path, max(0, off-at) / trace.BlockSize
	}, nil
}

func seconds(s float64) time.Duration {
	return time.Duration(s * float64(time.Second)).Round(time.Millisecond)
}
