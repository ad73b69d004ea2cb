// Package prover has every complete image proven (package proof): one at a time, in the background, at once when
// somebody waits for it, and again later where nothing could be found out. It says how each stands.
package prover

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"hydrofoil.dev/foil/internal/backoff"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/credentials"
	"hydrofoil.dev/foil/internal/worker/images"
	"hydrofoil.dev/foil/internal/worker/locks"
	"hydrofoil.dev/foil/internal/worker/origin"
	"hydrofoil.dev/foil/internal/worker/proof"
	"hydrofoil.dev/foil/internal/worker/rootfs"
	"hydrofoil.dev/foil/internal/worker/store"
)

// Options configure a Prover. All but Count are required.
type Options struct {
	Store  *store.Store
	Images *images.Set
	Names  store.Namer
	// Server asks an image's registry, by what was shown to it when it was pulled.
	Server func(img *images.Image, shown credentials.Credential, layers Layers) proof.Server
	// Busy reports whether something more urgent runs: a pull, or a start.
	Busy   func() bool
	Warn   func(format string, args ...any)
	Logger *slog.Logger
	// Count is told how each proof ended: proven, unproven or failed.
	Count func(result string)
}

const (
	// While something more urgent runs a proof reads leastRate bytes a second. Else it
	// rests as long as it works.
	leastRate = 8 << 20
	mostRest  = 100 * time.Millisecond

	// The pauses after tries that found nothing out.
	firstPause = time.Minute
	lastPause  = time.Hour
)

// Phase is how far the proof of a rootfs is.
type Phase string

// The phases. All but Proven and Failed say that a server's word is all there is.
const (
	Served   Phase = "served"   // its turn has not come, or it is not complete
	Proving  Phase = "proving"  // it is on the way
	Unproven Phase = "unproven" // it came to nothing, and is tried again
	Proven   Phase = "proven"
	Failed   Phase = "failed" // it is not what its layers make
)

// State is how the proof of a rootfs stands.
type State struct {
	Phase   Phase
	Percent int    // of Proving
	Why     string // of Unproven and Failed
}

// String is the state for people.
func (s State) String() string {
	switch {
	case s.Phase == Proving:
		return fmt.Sprintf("proving %d%%", s.Percent)
	case s.Why != "":
		return string(s.Phase) + ": " + s.Why
	}
	return string(s.Phase)
}

// Prover runs proofs.
type Prover struct {
	opts Options
	log  *slog.Logger
	ctx  context.Context
	stop context.CancelCauseFunc
	work sync.WaitGroup
	wake chan struct{}
	last time.Time // when the proof that runs has read something; its goroutine's

	mu      locks.Mutex[locks.Leaf]
	tasks   map[origin.Key]*task
	running *task         // nil: none
	paused  int           // how often
	changed chan struct{} // closed, and made anew, when a task changes
}

// task is a rootfs that is to be proven. Guarded by Prover.mu.
type task struct {
	key      origin.Key
	ref      string                 // the image that was pulled with shown
	shown    credentials.Credential // until it is proven
	state    State
	due      time.Time
	failures int
	tries    int    // that have ended
	why      string // the last one came to nothing
	waiting  int    // who waits
	asked    bool   // one of these waits for a try that has not begun
	// Of the try that runs, or of the last one.
	running bool
	ctx     context.Context
	cancel  context.CancelCauseFunc
	done    chan struct{} // closed when nothing of it is used any more
}

// New returns a Prover that begins with Start.
func New(opts Options) *Prover {
	if opts.Count == nil {
		opts.Count = func(string) {}
	}
	p := &Prover{opts: opts, log: opts.Logger, wake: make(chan struct{}, 1), tasks: make(map[origin.Key]*task), changed: make(chan struct{})}
	p.ctx, p.stop = context.WithCancelCause(context.Background())
	return p
}

// Start has what is added proven, and, with all, what is here.
func (p *Prover) Start(all bool) {
	for _, img := range p.opts.Images.List() {
		if all {
			p.Add(img.Ref, credentials.Credential{})
		}
	}
	p.work.Go(p.run)
}

var errStopped = errors.New("the daemon is stopping; it goes on with the proof when it is started again")

// Stop ends what runs, and waits for it. The next daemon goes on with it.
func (p *Prover) Stop() {
	p.stop(errStopped)
	p.work.Wait()
}

// Add has the rootfs of an image proven, if it is complete and was not proven.
func (p *Prover) Add(ref string, shown credentials.Credential) {
	img := p.opts.Images.Get(ref)
	if img == nil || p.provable(img.Rootfs) == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	t := p.taskOf(img.Rootfs)
	t.ref, t.shown, t.due = ref, shown, time.Now()
	p.woken()
}

// provable returns a rootfs that a proof can be of, or nil.
func (p *Prover) provable(key origin.Key) *store.Rootfs {
	r := p.opts.Store.Get(key)
	if r == nil || !r.Complete() || r.Broken() != nil || r.Proof() == rootfs.Proven {
		return nil
	}
	return r
}

// taskOf returns the task of a rootfs, which it makes. Called with mu held.
func (p *Prover) taskOf(key origin.Key) *task {
	t := p.tasks[key]
	if t == nil {
		t = &task{key: key, state: State{Phase: Served}, due: time.Now()}
		p.tasks[key] = t
	}
	return t
}

// woken tells of a change. Called with mu held.
func (p *Prover) woken() {
	close(p.changed)
	p.changed = make(chan struct{})
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// State says how the proof of a rootfs stands.
func (p *Prover) State(r *store.Rootfs) State {
	if r == nil {
		return State{Phase: Served}
	}
	rec := r.Record()
	switch {
	case rec.Wrong != "":
		return State{Phase: Failed, Why: rec.Wrong}
	case rec.Proof == rootfs.Proven:
		return State{Phase: Proven}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if t := p.tasks[r.Key()]; t != nil {
		return t.state
	}
	return State{Phase: Served}
}

// errPaused ends a try that is begun again.
var errPaused = errors.New("something else is done with rootfs just now")

// Pause has nothing proven until resume is called, so that nothing is used because of that: it ends what runs, and waits
// for it. What was found out is kept.
func (p *Prover) Pause() (resume func()) {
	p.mu.Lock()
	p.paused++
	t := p.running
	if t != nil {
		t.cancel(errPaused)
	}
	p.mu.Unlock()
	if t != nil {
		<-t.done
	}
	return sync.OnceFunc(func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.paused--
		p.woken()
	})
}

// Await has a rootfs proven now, without rests, and returns when it is. emit, unless nil, is told of what changes.
//
// Errors: api.CodeCorrupt if it is not what its image's layers make, api.CodeUnavailable if that cannot be found out
// now; ctx's.
func (p *Prover) Await(ctx context.Context, key origin.Key, emit func(State) error) error {
	if emit == nil {
		emit = func(State) error { return nil }
	}
	p.mu.Lock()
	t := p.tasks[key]
	p.mu.Unlock()
	if t == nil {
		if r := p.provable(key); r == nil {
			return p.verdict(key, "it is not complete", emit)
		}
	}
	p.mu.Lock()
	t = p.taskOf(key)
	t.waiting++
	t.asked = t.asked || !t.running
	tries := t.tries
	p.woken()
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		t.waiting--
		p.mu.Unlock()
	}()
	last := State{}
	for {
		p.mu.Lock()
		state, why, ended, changed := t.state, t.why, t.tries > tries || p.tasks[key] != t, p.changed
		p.mu.Unlock()
		if ended {
			return p.verdict(key, why, emit)
		}
		if state != last {
			if err := emit(state); err != nil {
				return err
			}
			last = state
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-p.ctx.Done():
			return api.Errorf(api.CodeUnavailable, "%w", context.Cause(p.ctx))
		}
	}
}

// verdict is how a try that has ended has ended; why says why it came to nothing.
func (p *Prover) verdict(key origin.Key, why string, emit func(State) error) error {
	r := p.opts.Store.Get(key)
	if r == nil {
		return api.Errorf(api.CodeNotFound, "the image was removed meanwhile")
	}
	s := p.State(r)
	if err := emit(s); err != nil {
		return err
	}
	switch s.Phase {
	case Proven:
		return nil
	case Failed:
		return api.Errorf(api.CodeCorrupt, "image %s is not what its layers make: %s", p.opts.Names.Image(key), s.Why)
	}
	return api.Errorf(api.CodeUnavailable, "image %s cannot be proven now: %s", p.opts.Names.Image(key), why)
}

// run proves one after the other.
func (p *Prover) run() {
	for p.ctx.Err() == nil {
		t, pause := p.next()
		if t != nil {
			p.try(t)
			p.mu.Lock()
			p.running = nil
			p.mu.Unlock()
			close(t.done)
			p.opts.Store.Collect()
			continue
		}
		timer := time.NewTimer(pause)
		select {
		case <-p.wake:
		case <-timer.C:
		case <-p.ctx.Done():
		}
		timer.Stop()
	}
}

// next returns the task that is to be tried now, which is running from here on; nil: none is within pause.
func (p *Prover) next() (t *task, pause time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	defer func() {
		if t != nil {
			t.state, t.done, t.running, t.asked = State{Phase: Proving}, make(chan struct{}), true, false
			t.ctx, t.cancel = context.WithCancelCause(p.ctx)
			p.running = t
			p.woken()
		}
	}()
	now := time.Now()
	pause = time.Hour
	if p.paused > 0 {
		return nil, pause
	}
	for _, o := range p.tasks {
		switch {
		case o.asked:
			return o, 0
		case o.due.After(now):
			pause = min(pause, o.due.Sub(now))
		case t == nil || o.due.Before(t.due):
			t = o
		}
	}
	return t, pause
}

// try proves a rootfs, or finds that it cannot be done.
func (p *Prover) try(t *task) {
	defer t.cancel(nil)
	r, release := p.opts.Store.Use(t.key)
	if r == nil || p.provable(t.key) == nil {
		if r != nil {
			release()
		}
		p.mu.Lock()
		delete(p.tasks, t.key)
		p.woken()
		p.mu.Unlock()
		return
	}
	p.mu.Lock()
	ref, shown := t.ref, t.shown
	p.mu.Unlock()
	began := time.Now()
	err := p.prove(t.ctx, r, t, ref, shown)
	if err == nil {
		err = p.opts.Store.Proven(r)
	}
	release()
	p.ended(t, r, err, time.Since(began))
}

// ended notes how a try has ended.
func (p *Prover) ended(t *task, r *store.Rootfs, err error, took time.Duration) {
	image := p.opts.Names.Image(t.key)
	result := Unproven
	var wrong *proof.Failed
	switch {
	case err == nil:
		result = Proven
		p.log.Info("image proven", "ref", image, "chain", r.ChainID(), "took", took.Round(time.Millisecond))
	case errors.As(err, &wrong):
		result = Failed
		p.quarantine(r, image, wrong)
	case p.ctx.Err() != nil:
		return
	case errors.Is(context.Cause(t.ctx), errPaused):
		p.mu.Lock()
		defer p.mu.Unlock()
		t.state, t.running, t.asked = State{Phase: Served}, false, t.waiting > 0
		p.woken()
		return
	default:
		p.log.Warn("an image could not be proven; it is tried again later", "ref", image, "error", err)
	}
	p.mu.Lock()
	t.running, t.tries = false, t.tries+1
	if result == Unproven {
		t.failures++
		t.why = err.Error()
		t.state = State{Phase: Unproven, Why: t.why}
		t.due = time.Now().Add(backoff.Backoff{First: firstPause, Most: lastPause}.Pause(t.failures))
	} else {
		delete(p.tasks, t.key)
	}
	p.woken()
	p.mu.Unlock()
	p.opts.Count(string(result))
}

// quarantine has nothing served from a rootfs that is not what its image's layers make, and names what runs on it.
func (p *Prover) quarantine(r *store.Rootfs, image string, why *proof.Failed) {
	running := p.opts.Names.ContainersOn(r.Key())
	if p.opts.Names.Held(r.Key()) {
		running = append(running, "those of containerd on it")
	}
	err := p.opts.Store.Quarantine(r, why)
	p.log.Error("an image is not what its layers make: no new container starts on it", "ref", image, "error", err, "containers", running)
	what := "no container runs on it"
	if len(running) > 0 {
		what = "END THESE CONTAINERS, which run what its server made up: " + strings.Join(running, ", ")
	}
	p.opts.Warn("image %s is not what its layers make: %v; no new container starts on it; %s; then remove it with `foil rm`, and ask who runs its registry", image, err, what)
}

// pace has a proof stand back.
func (p *Prover) pace(ctx context.Context, t *task, n int) error {
	p.mu.Lock()
	urgent := t.waiting > 0
	for _, o := range p.tasks {
		urgent = urgent || o.waiting > 0
	}
	p.mu.Unlock()
	if urgent {
		return context.Cause(ctx)
	}
	now := time.Now()
	rest := min(now.Sub(p.last), mostRest)
	if p.opts.Busy() {
		rest = time.Duration(float64(n) / leastRate * float64(time.Second))
	}
	err := backoff.Wait(ctx, rest)
	p.last = time.Now()
	return err
}

// step notes how far a proof is.
func (p *Prover) step(t *task, done, all int64) {
	percent := 0
	if all > 0 {
		percent = int(done * 100 / all)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if t.state.Phase == Proving && t.state.Percent != percent {
		t.state.Percent = percent
		p.woken()
	}
}
