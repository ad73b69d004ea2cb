package run

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"hydrofoil.dev/foil/bench/engines"
	"hydrofoil.dev/foil/bench/link"
	"hydrofoil.dev/foil/bench/results"
	"hydrofoil.dev/foil/bench/site"
	"hydrofoil.dev/foil/bench/workloads"
)

// warm measures the warm starts of a session's images for its round, for all builds, as
// far as that has not been done. One that fails is told, and no error: the image's first
// floor stands in for it.
func (s series) warm(ctx context.Context, at *site.Site, se session) error {
	m := se.of
	for i, im := range se.versions {
		k := se.keys[i]
		lacks := slices.DeleteFunc(slices.Clone(s), func(m *matrix) bool {
			_, err := m.out.Warm(k)
			return err == nil
		})
		if len(lacks) == 0 {
			continue
		}
		if f, ok := m.state.floor(im.Name, im.Built.Digest.String()); !ok || f.Floor.Warm == 0 {
			continue
		}
		w := results.Warm{Image: k.Image, Kind: k.Kind, RTT: k.RTT, Rate: k.Rate, Rep: k.Rep, Began: time.Now().UTC()}
		limited, cancel := context.WithTimeoutCause(ctx, m.Timeout, site.ErrTooLong)
		var err error
		w.All, err = engines.WarmStarts(limited, at, im, m.state.tree(im.Name))
		cancel()
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err != nil {
			m.log("no warm start of %s: %v", im.Name, err)
			continue
		}
		w.Time = slices.Min(w.All)
		for _, m := range lacks {
			if err := m.out.PutWarm(w); err != nil {
				return err
			}
		}
		m.log("%s, %s: warm start %.3f s", k.Image, k.Kind, w.Time.Seconds())
	}
	return nil
}

// check tries the link, twice if need be. A machine that does not hold it is
// recorded, and the runs are made all the same: the report says so.
func (m *matrix) check(ctx context.Context, s *site.Site, r round) error {
	c := results.Check{RTT: r.rtt, Rate: r.rate, Rep: r.rep, Load1: loadAverage()}
	measured, err := s.Link.Check(ctx)
	if err != nil && ctx.Err() == nil {
		measured, err = s.Link.Check(ctx)
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	c.Measured = measured.String()
	if err != nil {
		c.Err = err.Error()
	}
	m.log("link %v, %s, round %d: %s%s", r.rtt, rateText(r.rate), r.rep, c.Measured, strings.TrimPrefix("; "+c.Err, "; "))
	return m.out.PutCheck(c)
}

// run is one session: what of it fails is recorded, and is no error.
func (m *matrix) run(ctx context.Context, l *link.Link, se session) error {
	dir, err := os.MkdirTemp(m.dir, "session-")
	if err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	if err := os.Chmod(dir, 0o711); err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	// What a daemon of a peer leaves behind does not end a matrix of hours: its
	// processes end with the namespaces, and its files go when the next begins.
	after := func(what string, err error) {
		if err != nil {
			m.log("after %s: %s: %v", se.keys[0], what, err)
		}
	}
	defer func() { after("remove the worker", site.RemoveTree(dir)) }()
	s := &site.Site{Dir: dir, Link: l}
	home := filepath.Join(dir, "w") // short: sockets below it have paths of at most 100 bytes
	if err := os.Mkdir(home, 0o711); err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	w := &turn{Worker: se.engine.Worker(s, m.Programs, home)}
	defer func() { after("stop its daemons", w.end()) }()
	var failed error
	for i, im := range se.versions {
		r := results.Run{Key: se.keys[i], Began: time.Now().UTC(), Stopped: m.stops(se, i)}
		if p, ok := m.state.image(im.Name, im.Built.Digest.String()); ok {
			r.Touched = p.Floor.Touched
		}
		if failed == nil {
			failed = m.provision(ctx, s, w, im, home, m.hurries(se, i), &r)
		} else {
			failed = fmt.Errorf("not run, since the run before it failed: %w", failed)
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if failed != nil {
			r.Err = failed.Error()
			if err := keepLogs(dir, m.out.Logs(r.Key)); err != nil {
				return err
			}
		}
		if err := m.out.PutRun(r); err != nil {
			return err
		}
		m.log("%s%s", m.progress.String(), tell(r))
	}
	return nil
}

// turn is a worker whose daemons are stopped and started between two runs, unless
// that would make it fetch again what it has.
type turn struct {
	engines.Worker
	runs bool
}

func (t *turn) Start(ctx context.Context) error {
	if t.runs {
		return nil
	}
	err := t.Worker.Start(ctx)
	t.runs = err == nil
	return err
}

func (t *turn) Stop() error {
	if _, forgets := t.Worker.(engines.Forgetful); forgets {
		return nil
	}
	return t.end()
}

// end stops the daemons if they run.
func (t *turn) end() error {
	if !t.runs {
		return nil
	}
	t.runs = false
	return t.Worker.Stop()
}

// provision is one run. With hurry the link's rate is lifted after ready, until the image
// is complete, and the run has no figures of that.
func (m *matrix) provision(ctx context.Context, s *site.Site, w *turn, im engines.Image, home string, hurry bool, r *results.Run) (err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, m.Timeout, site.ErrTooLong)
	defer cancel()
	if err := w.Start(ctx); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.Stop()) }()
	if u, ok := w.Worker.(engines.Unlearner); ok {
		if err := u.Unlearn(ctx, im); err != nil {
			return err
		}
	}
	// What a worker does on its own when it is started is no part of the run.
	if err := site.DropCaches(); err != nil {
		return err
	}
	var container *engines.Container
	defer quiet()()
	before, own := processorTime(), ownTime()
	defer func() {
		if r.Own == 0 { // it was not ready
			r.Stolen, r.Own = before.stolenSince(), ownTime()-own
		}
	}()
	t := engines.Begin(s, w.Processes())
	whole := !r.Stopped
	defer func() {
		var clients []int
		if container != nil {
			clients = append(clients, container.PID())
		}
		r.Outcome = t.End(clients...)
		if r.Stopped {
			delete(r.Marks, engines.Complete)
			delete(r.Marks, engines.Quiet)
		}
		err = errors.Join(err, container.Stop())
	}()
	if r.Kind == results.Resumed {
		end := t.CutAfter(ctx, int64(m.Cut*float64(im.Built.LayerBytes())))
		defer func() { err = errors.Join(err, end()) }()
	}
	if container, err = w.Provision(ctx, im, t); err != nil {
		return err
	}
	if container != nil {
		if err := im.Ready.Wait(ctx, s.Link, container.Process); err != nil {
			return err
		}
		t.Mark(engines.Ready)
		r.Stolen, r.Own = before.stolenSince(), ownTime()-own
		if load := workloads.For(r.Image, im.Ready.Probe); load != nil && m.Load > 0 && !im.Ready.Ends() {
			r.Load = load(ctx, s.Link, m.Load)
		}
	}
	if whole {
		if hurry {
			r.Stopped = true
			s.Link.Free(true)
			defer s.Link.Free(false)
		}
		if err := w.Complete(ctx, im, t); err != nil {
			return err
		}
		if err := t.Quiet(ctx, 50*time.Millisecond+2*r.RTT, engines.Quiet); err != nil {
			return err
		}
	}
	if teller, ok := w.Worker.(engines.Teller); ok {
		if err := teller.Tell(ctx, t); err != nil {
			return err
		}
	}
	r.Late = max(s.Link.Stats(link.Cloud).Late, s.Link.Stats(link.Edge).Late)
	if err := w.Check(ctx, im, whole); err != nil || r.Stopped {
		return err
	}
	r.Disk, err = site.DiskBytes(home)
	return err
}

// keepLogs copies what the processes of a failed session have said.
func keepLogs(from, to string) error {
	logs, err := filepath.Glob(filepath.Join(from, "*.log"))
	if err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	if err := os.MkdirAll(to, 0o755); err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	for _, log := range logs {
		text, err := os.ReadFile(log)
		if err == nil {
			err = os.WriteFile(filepath.Join(to, filepath.Base(log)), text, 0o644)
		}
		if err != nil {
			return fmt.Errorf("bench: keep a log: %w", err)
		}
	}
	return nil
}
