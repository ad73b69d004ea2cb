package fetch

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"sync"
	"syscall"
	"time"

	"hydrofoil.dev/foil/internal/backoff"
	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/oci"
	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/format/trace"
	"hydrofoil.dev/foil/internal/worker/arena"
	"hydrofoil.dev/foil/internal/worker/remote"
	"hydrofoil.dev/foil/internal/worker/schedule"
)

// Pull is one pull that runs, or has ended.
type Pull struct {
	opts   Options
	log    *slog.Logger
	outer  context.Context // the caller's
	ctx    context.Context
	cancel context.CancelCauseFunc
	done   chan struct{} // closed after run has ended, and err is set
	err    error
	began  time.Time

	counts   counts
	pipe     pipeline
	promoter promoter
	services services

	mu       sync.Mutex
	schedule schedule.Schedule   // guarded by mu: see decide
	wake     *time.Timer         // guarded by mu: calls Tick
	image    bundle.ImageRequest // guarded by mu: pinned to a digest once resolved
	target   *target             // guarded by mu; nil: the header has not arrived
	running  *stream             // guarded by mu: the one that was asked for, until its end
	current  *stream             // guarded by mu: the same, once it has its plan
	damage   damage              // guarded by mu
	origin   string              // guarded by mu: of the first startup set
	trouble  trouble             // guarded by mu
	forward  forward             // guarded by mu
	// Guarded by mu: segments, ascending, that come another way and are asked for as if they were here;
	// exact: there was reason for that. See choice.
	elsewhere []int
	exact     bool
}

// target is the image, once it was opened.
type target struct {
	header bundle.Image // without its bytes
	arena  *arena.Arena // nil: nothing is fetched
	toc    *toc.TOC     // until the plan has been read
}

// layout returns the arena's layout, or nil.
func (t *target) layout() *arena.Layout {
	if t.arena == nil {
		return nil
	}
	return t.arena.Layout()
}

// Start begins a pull, which goes on until it is complete, has failed, ctx ends
// or Stop is called.
func Start(ctx context.Context, opts Options) *Pull {
	p := newPull(ctx, opts)
	go p.run()
	return p
}

func newPull(ctx context.Context, opts Options) *Pull {
	opts.defaults()
	p := &Pull{
		outer: ctx,
		began: time.Now(),
		opts:  opts,
		log:   opts.Logger.With("pull", opts.Name),
		done:  make(chan struct{}),
		image: opts.Request.Image,
	}
	p.forward.last = p.began
	p.ctx, p.cancel = context.WithCancelCause(ctx)
	p.damage.times = make(map[segment.ID]int)
	o := schedule.Options{Beyond: opts.PromoteBeyond, Hold: opts.Hold}
	if opts.Client != nil {
		if w, ok := opts.Client.Kept(); ok {
			o.Rate = w.Rate
		}
	}
	p.schedule = schedule.New(o)
	p.wake = time.AfterFunc(time.Hour, func() { p.decide((*schedule.Schedule).Tick) })
	p.wake.Stop()
	p.pipe.init(p)
	p.promoter.init(p)
	p.services.init(p)
	return p
}

// Stop ends the pull soon. Its arena does not fail: reads go on waiting for the
// next pull.
func (p *Pull) Stop() { p.cancel(ErrStopped) }

// Wait waits for the end of the pull. It returns nil when all that the server
// planned is present and durable.
func (p *Pull) Wait() error {
	<-p.done
	return p.err
}

func (p *Pull) run() {
	defer close(p.done)
	p.pipe.start()
	err := p.streams()
	p.services.end()
	p.decide(func(s *schedule.Schedule, _ time.Time) { s.Release() })
	close(p.pipe.jobs)
	if err == nil {
		err = context.Cause(p.ctx) // a worker may have failed with the last frame
	}
	if err == nil {
		// Before anybody is told that it is complete.
		err = p.pipe.sync(p.ctx)
	}
	if cause := context.Cause(p.ctx); cause != nil && err != nil {
		err = cause // a worker's or the syncer's error, or Stop's
	}
	p.cancel(errors.New("the pull has ended"))
	p.pipe.work.Wait()
	p.mu.Lock()
	p.wake.Stop()
	p.mu.Unlock()
	if err != nil {
		p.err = fmt.Errorf("pull %s: %w", p.opts.Name, err)
		p.fail(err)
		return
	}
	p.counts.total.Store(p.counts.moved.Load())
}

// fail sees to it that reads do not wait for ever for what this pull does not bring. When
// the pull was stopped from outside, another one will come.
func (p *Pull) fail(err error) {
	if errors.Is(err, ErrStopped) || p.outer.Err() != nil {
		return
	}
	switch a := p.arena(); {
	case a == nil || a.Complete():
	case p.opts.Failed != nil:
		p.opts.Failed(p.err)
	default:
		a.Fail(p.err)
	}
}

// arena returns the arena, or nil.
func (p *Pull) arena() *arena.Arena {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.target == nil {
		return nil
	}
	return p.target.arena
}

// decide tells the schedule of something, and does what it orders.
func (p *Pull) decide(event func(s *schedule.Schedule, now time.Time)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.decideLocked(event)
}

// decideLocked is decide with mu held.
func (p *Pull) decideLocked(event func(s *schedule.Schedule, now time.Time)) {
	s, now := &p.schedule, time.Now()
	s.Moved(now, p.counts.moved.Load())
	event(s, now)
	o := s.Take()
	if len(o.Promote) > 0 || len(o.Back) > 0 || o.Chosen || o.Release || o.Rest > 0 {
		p.promoter.add(p.current, o)
	}
	if o.Restart && p.current != nil {
		p.current.cancel(errRestart)
	}
	if len(o.Write) > 0 {
		p.pipe.writeKept(o.Write)
	}
	if at := s.Wake(); at.IsZero() || p.ctx.Err() != nil {
		p.wake.Stop()
	} else {
		p.wake.Reset(max(0, at.Sub(now)))
	}
}

// state returns what can be seen of the schedule.
func (p *Pull) state() schedule.State {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.schedule.State()
}

// Release ends what Options.Hold does, before it has begun as well.
func (p *Pull) Release() { p.decide(func(s *schedule.Schedule, _ time.Time) { s.Release() }) }

// ReleaseAfter has the hold end after a while at the latest: a service that is ready has its first
// users, for whom it works as it did for its start.
func (p *Pull) ReleaseAfter(d time.Duration) {
	p.decide(func(s *schedule.Schedule, now time.Time) { s.ReleaseAt(now.Add(d)) })
}

// patience is how long a pull that has not begun tries a server that is not
// likely to change: it refuses connections, its name is unknown, its certificate
// is not trusted, or what answers is no Hydrofoil server. Long enough for one
// that restarts, short enough for a person who mistyped.
const patience = 2 * time.Second

func unlikely(err error) bool {
	dns, ok := errors.AsType[*net.DNSError](err)
	if ok && dns.IsNotFound || errors.Is(err, syscall.ECONNREFUSED) || errors.As(err, new(*tls.CertificateVerificationError)) {
		return true
	}
	status, ok := errors.AsType[*remote.StatusError](err)
	return ok && status.Said == nil && status.After == 0
}

// streams runs one stream after the other until one comes to its end with
// nothing left to ask for.
func (p *Pull) streams() error {
	faults := 0 // streams that broke the protocol, in a row
	stalls := 0 // streams that stalled: a server that needs longer is not to be asked the same for ever
	for pause := time.Duration(0); ; {
		before := p.step()
		err := p.stream(stalls)
		if err == nil {
			return nil
		}
		if p.ctx.Err() != nil || isFinal(err) {
			return err
		}
		if errors.Is(err, errReplan) {
			continue
		}
		last := p.step()
		if last.After(before) {
			faults, pause = 0, 0
		}
		now := time.Now()
		if errors.Is(err, remote.ErrStall) {
			stalls = min(stalls+1, 4)
		}
		if isFault(err) {
			if faults++; faults >= p.opts.Attempts {
				return err
			}
		}
		limit := p.opts.GiveUp
		if p.counts.opened.Load() == 0 {
			limit = p.opts.GiveUpUnopened
			if unlikely(err) {
				limit = min(limit, patience)
			}
		}
		if now.Sub(last) >= limit {
			return fmt.Errorf("%w %s for %v, try again when it can be reached: %w", ErrUnreachable, p.opts.Client.Base(), limit.Round(time.Second), err)
		}
		wait := pause + rand.N(pause/2+1)
		if after := remote.Asked(err); after > wait {
			// Not all at once, who were asked the same.
			wait = after + rand.N(after/10+1)
			if now.Sub(last)+wait >= limit {
				return fmt.Errorf("%w %s, which asks to be asked again in %v, try again then: %w", ErrUnreachable, p.opts.Client.Base(), after.Round(time.Second), err)
			}
		}
		p.counts.resumes.Add(1)
		p.log.Warn("stream broke, resuming", "error", err, "pause", wait)
		if !errors.Is(err, errRestart) {
			p.setTrouble(err.Error())
		}
		if backoff.Wait(p.ctx, wait) != nil {
			return context.Cause(p.ctx)
		}
		pause = min(max(2*pause, p.opts.Pause), 5*time.Second)
	}
}

// finalError is an error that asking again would not change.
type finalError struct{ error }

func (e finalError) Unwrap() error { return e.error }

// errRestart says that the stream ended, or was ended, to ask for frames that
// arrived damaged.
var errRestart = errors.New("frames have to be sent again")

func isFinal(err error) bool {
	var f finalError
	var status *remote.StatusError
	var said *bundle.Error
	switch {
	case errors.As(err, &f), errors.Is(err, oci.ErrRefused):
		return true
	case errors.As(err, &said):
		switch said.Code {
		case bundle.CodeNotFound, bundle.CodeInvalid, bundle.CodeUnauthorized, bundle.CodeUnsupported:
			return true
		}
		return false
	case errors.As(err, &status):
		return status.Final()
	}
	return false
}

// isFault reports whether the server is at fault, rather than the way to it.
func isFault(err error) bool {
	var said *bundle.Error
	if errors.As(err, &said) {
		return said.Code == bundle.CodeCorrupt || said.Code == bundle.CodeInternal
	}
	var status *remote.StatusError
	if errors.As(err, &status) {
		return status.Status == http.StatusInternalServerError
	}
	return errors.Is(err, bundle.ErrCorrupt)
}

// request returns what to ask for now.
func (p *Pull) request() bundle.Request {
	p.mu.Lock()
	defer p.mu.Unlock()
	req := p.opts.Request
	req.Image = p.image
	req.Image.Startup = req.Image.Startup && !p.damage.wholly
	req.Damaged = slices.Clone(p.damage.claims)
	t := p.target
	if t == nil {
		return req
	}
	req.Have = slices.DeleteFunc(slices.Clone(req.Have), func(h bundle.Have) bool { return h.ChainID == t.header.ChainID })
	h := bundle.Have{ChainID: t.header.ChainID, TOC: t.header.TOCDigest, Present: t.present(p.opts.Request.Have)}
	if t.arena != nil {
		h.Pages = Pages(t.arena)
		if p.exact && h.Present != nil {
			t.claim(h.Present, p.elsewhere)
		}
	}
	req.Have = append(req.Have, h)
	return req
}

// Pages is what to say in bundle.Have.Pages of an arena.
func Pages(a *arena.Arena) []byte {
	if runs := a.PresentRuns(); len(runs) > 0 {
		return trace.AppendRuns(nil, runs)
	}
	return nil
}

// present returns a bitmap of the segments that the server need not send: those
// that have arrived, and those that the caller said were here. Contents that
// are used in place elsewhere are not claimed: the rootfs that has them is one of Request.Have.
func (t *target) present(said []bundle.Have) []byte {
	b := make([]byte, (t.header.Segments+7)/8)
	if t.arena != nil {
		b = t.arena.PresentBitmap()
	}
	for _, h := range said {
		if h.ChainID != t.header.ChainID || h.TOC != t.header.TOCDigest {
			continue
		}
		if h.Present == nil {
			return nil // all of them
		}
		for i := range min(len(b), len(h.Present)) {
			b[i] |= h.Present[i]
		}
	}
	return b
}
