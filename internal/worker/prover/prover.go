// Package prover has every complete image proven (package proof): in the background, at once when somebody waits for it,
// and again later where nothing could be found out. It says how each stands.
//
// One proof works at a time (desk.go). A few are under way, since each waits for its image's server: whoever says nothing,
// or little, or has very much hashed, holds up no other image's proof. When more are due a proof gives way after a turn.
package prover

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"runtime/debug"
	"slices"
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
	"hydrofoil.dev/foil/internal/worker/yield"
)

// Options configure a Prover. All but Count are required.
type Options struct {
	Store  *store.Store
	Images *images.Set
	Names  store.Namer
	// Server asks an image's registry, by what was shown to it when it was pulled.
	Server func(img *images.Image, shown credentials.Credential, layers Layers) proof.Server
	// Busy reports whether something more urgent runs: a pull, or a start. Others reports whether others want the
	// processors; nil: they never do.
	Busy   func() bool
	Others func() bool
	// Calm is how long nothing is begun after an image has become complete, or the daemon begun: what starts then needs
	// the machine. Who waits for a proof does not wait for this.
	Calm   time.Duration
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
	// When something more urgent begins, which as a rule is a start, it reads nothing for startRest: what it would read
	// takes 7 to 10% of the time of a short start on two processors. Not again within betweenRests, so that it has four
	// fifths of its least rate whatever begins.
	startRest    = time.Second
	betweenRests = 5 * time.Second

	// While something more urgent runs no try is begun that is due for less than mostDelay; it is looked at again every
	// lookAgain.
	mostDelay = time.Minute
	lookAgain = time.Second

	// The pauses after tries that found nothing out.
	firstPause = time.Minute
	lastPause  = time.Hour

	// lanes is how many tries are under way at most. A try that has had its turn gives way to one that is due: after
	// firstTurn, and twice as long after each try that came to nothing, so that whatever takes long is proven in the end.
	lanes     = 4
	firstTurn = time.Minute
	lastTurn  = time.Hour
)

// Prover runs proofs.
type Prover struct {
	opts Options
	log  *slog.Logger
	ctx  context.Context
	stop context.CancelCauseFunc
	work sync.WaitGroup
	wake chan struct{}
	desk desk
	// Of whoever has the desk: whether something more urgent ran a moment ago, and when a start was last made way for.
	wasBusy   bool
	stoodBack time.Time
	// attempt is Prover.attemptNow, and provable whether a proof can be of a rootfs: others in tests.
	attempt  func(*task) error
	provable func(origin.Key) bool

	mu      locks.Mutex[locks.Leaf]
	tasks   map[origin.Key]*task
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
	began   time.Time
	ctx     context.Context
	cancel  context.CancelCauseFunc
	done    chan struct{} // closed when nothing of it is used any more
}

// New returns a Prover that begins with Start.
func New(opts Options) *Prover {
	if opts.Count == nil {
		opts.Count = func(string) {}
	}
	p := &Prover{opts: opts, log: opts.Logger, wake: make(chan struct{}, 1), tasks: make(map[origin.Key]*task), changed: make(chan struct{}), desk: newDesk()}
	p.attempt, p.provable = p.attemptNow, p.isProvable
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
	if img := p.opts.Images.Get(ref); img != nil {
		p.add(img.Rootfs, ref, shown)
	}
}

func (p *Prover) add(key origin.Key, ref string, shown credentials.Credential) {
	if !p.provable(key) {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	t := p.taskOf(key)
	t.ref, t.shown, t.due = ref, shown, time.Now().Add(p.opts.Calm)
	p.woken()
}

func (p *Prover) isProvable(key origin.Key) bool {
	r := p.opts.Store.Get(key)
	return r != nil && r.Complete() && r.Broken() == nil && r.Proof() != rootfs.Proven && p.lying(r) == ""
}

// lying says why all images of a rootfs are not what they say; "": one may be.
func (p *Prover) lying(r *store.Rootfs) (why string) {
	for _, img := range p.opts.Images.Of(r.Key()) {
		if why = r.Lying(img.Digest); why == "" {
			return ""
		}
	}
	return why
}

// taskOf returns the task of a rootfs, which it makes. Called with mu held.
func (p *Prover) taskOf(key origin.Key) *task {
	t := p.tasks[key]
	if t == nil {
		t = &task{key: key, state: State{Phase: Served}, due: time.Now().Add(p.opts.Calm)}
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
	if why := p.lying(r); why != "" {
		return State{Phase: Failed, Why: why}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if t := p.tasks[r.Key()]; t != nil {
		return t.state
	}
	return State{Phase: Served}
}

// StateOf says how the proof of an image stands: that of its rootfs, unless the image itself is not what it says.
func (p *Prover) StateOf(img *images.Image) State {
	r := p.opts.Store.Get(img.Rootfs)
	if r != nil {
		if why := r.Lying(img.Digest); why != "" {
			return State{Phase: Failed, Why: why}
		}
	}
	return p.State(r)
}

// errPaused ends a try that is begun again.
var errPaused = errors.New("something else is done with rootfs just now")

// Pause has nothing proven until resume is called, so that nothing is used because of that: it ends what runs, and waits
// for it. What was found out is kept.
func (p *Prover) Pause() (resume func()) {
	p.mu.Lock()
	p.paused++
	var running []*task
	for _, t := range p.tasks {
		if t.running {
			t.cancel(errPaused)
			running = append(running, t)
		}
	}
	p.mu.Unlock()
	for _, t := range running {
		<-t.done
	}
	return sync.OnceFunc(func() {
		p.dropGone()
		p.mu.Lock()
		defer p.mu.Unlock()
		p.paused--
		p.woken()
	})
}

// dropGone forgets what was to be proven of rootfs that are not here any more.
func (p *Prover) dropGone() {
	p.mu.Lock()
	keys := slices.Collect(maps.Keys(p.tasks))
	p.mu.Unlock()
	for _, key := range keys {
		if p.opts.Store.Get(key) != nil {
			continue
		}
		p.mu.Lock()
		if t := p.tasks[key]; t != nil && !t.running && t.waiting == 0 {
			delete(p.tasks, key)
		}
		p.mu.Unlock()
	}
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
		if !p.provable(key) {
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

// run begins tries.
func (p *Prover) run() {
	for p.ctx.Err() == nil {
		t, pause := p.next(p.opts.Busy())
		if t != nil {
			p.work.Go(func() { p.try(t) })
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

// next returns the task that is to be tried now, which is running from here on; nil: none is within pause, unless
// something changes. busy says that something more urgent runs.
func (p *Prover) next(busy bool) (t *task, pause time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	pause = time.Hour
	if p.paused > 0 {
		return nil, pause
	}
	running := 0
	for _, o := range p.tasks {
		switch {
		case o.running:
			running++
		case !o.asked && o.due.After(now):
			pause = min(pause, o.due.Sub(now))
		case busy && !o.asked && now.Before(o.due.Add(mostDelay)):
			pause = min(pause, lookAgain)
		case t == nil || o.before(t):
			t = o
		}
	}
	if t != nil && running >= lanes {
		return nil, min(pause, p.giveWay(now, t.asked))
	}
	if t != nil {
		t.state, t.done, t.running, t.asked, t.began = State{Phase: Proving}, make(chan struct{}), true, false, now
		t.ctx, t.cancel = context.WithCancelCause(p.ctx)
		p.woken()
	}
	return t, pause
}

// before reports whether t is tried before o, if both are due: what somebody waits for, what has failed less often, what
// has waited longer.
func (t *task) before(o *task) bool {
	switch {
	case t.asked != o.asked:
		return t.asked
	case t.failures != o.failures:
		return t.failures < o.failures
	}
	return t.due.Before(o.due)
}

var errTurn = errors.New("it takes long, and others are to be proven as well")

// giveWay ends the try that has gone on longest after its turn, or returns how long it is until one can be ended. One that
// nobody waits for has no turn where another one is asked for. Called with mu held.
func (p *Prover) giveWay(now time.Time, asked bool) (pause time.Duration) {
	pause = time.Hour
	var longest *task
	for _, t := range p.tasks {
		if !t.running || t.ctx.Err() != nil {
			continue
		}
		turn := backoff.Backoff{First: firstTurn, Most: lastTurn}.Pause(t.failures + 1)
		if asked && t.waiting == 0 {
			turn = 0
		}
		if left := t.began.Add(turn).Sub(now); left > 0 {
			pause = min(pause, left)
		} else if longest == nil || t.began.Before(longest.began) {
			longest = t
		}
	}
	if longest != nil {
		longest.cancel(errTurn)
		return time.Hour // its end is told
	}
	return pause
}

// errGone ends a try of what needs no proof any more.
var errGone = errors.New("there is nothing to be proven")

// try proves a rootfs, or finds that it cannot be done.
func (p *Prover) try(t *task) {
	defer close(t.done)
	defer t.cancel(nil)
	err := p.attempt(t)
	p.ended(t, err)
}

// attemptNow proves a rootfs, and notes what has come of it there.
func (p *Prover) attemptNow(t *task) error {
	r, release := p.opts.Store.Use(t.key)
	if r == nil {
		return errGone
	}
	defer debug.FreeOSMemory() // a TOC, and what the streams of layers left behind
	defer p.opts.Store.Collect()
	defer release()
	if !p.provable(t.key) {
		return errGone
	}
	p.mu.Lock()
	ref, shown, began := t.ref, t.shown, t.began
	p.mu.Unlock()
	err := p.prove(t.ctx, r, t, ref, shown)
	if err == nil {
		err = p.opts.Store.Proven(r)
	}
	image, cause := p.opts.Names.Image(t.key), context.Cause(t.ctx)
	switch wrong, failed := errors.AsType[*proof.Failed](err); {
	case err == nil:
		p.log.Info("image proven", "ref", image, "chain", r.ChainID(), "took", time.Since(began).Round(time.Millisecond))
	case failed:
		if !wrong.Documents { // of these it was noted
			p.quarantine(r, image, wrong)
		}
	case cause == nil || errors.Is(cause, errTurn):
		p.log.Warn("an image could not be proven; it is tried again later", "ref", image, "error", err)
	}
	return err
}

// ended notes how a try has ended.
func (p *Prover) ended(t *task, err error) {
	if result := p.note(t, err); result != "" {
		p.opts.Count(string(result))
	}
}

// note is ended, and returns what the try has found out; "": it found nothing out, and was no try.
func (p *Prover) note(t *task, err error) Phase {
	p.mu.Lock()
	defer p.mu.Unlock()
	defer p.woken()
	t.running = false
	switch failed := errors.As(err, new(*proof.Failed)); {
	case errors.Is(err, errGone):
		delete(p.tasks, t.key)
		return ""
	case err == nil, failed:
		delete(p.tasks, t.key)
		t.tries++
		if failed {
			return Failed
		}
		return Proven
	case p.ctx.Err() != nil:
		return ""
	case errors.Is(context.Cause(t.ctx), errPaused):
		t.state, t.asked = State{Phase: Served}, t.waiting > 0
		return ""
	}
	t.tries++
	t.failures++
	t.why = err.Error()
	t.state = State{Phase: Unproven, Why: t.why}
	t.due = time.Now().Add(backoff.Backoff{First: firstPause, Most: lastPause}.Pause(t.failures))
	return Unproven
}

// quarantine has nothing served from a rootfs that is not what its image's layers make, and names what runs on it.
func (p *Prover) quarantine(r *store.Rootfs, image string, why *proof.Failed) {
	p.tell(r, image, p.opts.Store.Quarantine(r, why))
}

// tell names what runs on an image that is not what it says.
func (p *Prover) tell(r *store.Rootfs, image string, err error) {
	running := p.opts.Names.ContainersOn(r.Key())
	if p.opts.Names.Held(r.Key()) {
		running = append(running, "those of containerd on it")
	}
	p.log.Error("an image is not what its layers make: no new container starts on it", "ref", image, "error", err, "containers", running)
	what := "no container runs on it"
	if len(running) > 0 {
		what = "END THESE CONTAINERS, which run what its server made up: " + strings.Join(running, ", ")
	}
	p.opts.Warn("image %s is not what its layers make: %v; no new container starts on it; %s; then remove it with `foil rm`, and ask who runs its registry", image, err, what)
}

// isUrgent reports whether somebody waits for a proof.
func (p *Prover) isUrgent() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, o := range p.tasks {
		if o.waiting > 0 {
			return true
		}
	}
	return false
}

// pace has a proof stand back, and others work meanwhile.
func (p *Prover) pace(ctx context.Context, at *seat, n int) error {
	urgent, busy := p.isUrgent(), p.opts.Busy()
	if at.priority != nil {
		at.priority.SetLow(!urgent)
	}
	if !urgent {
		worked := time.Since(at.since)
		rest := min(worked, mostRest)
		switch {
		case busy:
			rest = time.Duration(float64(n) / leastRate * float64(time.Second))
			if now := time.Now(); !p.wasBusy && now.Sub(p.stoodBack) >= betweenRests {
				p.stoodBack, rest = now, startRest
			}
		case p.opts.Others != nil && p.opts.Others():
			rest = min(worked*(yield.Rest/(yield.Turn-yield.Rest)), yield.Turn)
		}
		if err := backoff.Wait(ctx, rest); err != nil {
			return err
		}
	}
	p.wasBusy = busy
	at.leave()
	return at.sit()
}

// step notes how far a proof is.
func (p *Prover) step(t *task, s proof.Step) {
	state := State{Phase: Proving, Layer: s.Layer, Layers: s.Layers}
	if s.All > 0 {
		state.Percent = int(s.Done * 100 / s.All)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if t.state.Phase == Proving && t.state != state {
		t.state = state
		p.woken()
	}
}
