// Package pull brings images: it asks the server, has the rootfs laid out and
// mounted, fills it, and goes on until it is complete. pull.go tells one pull from
// top to bottom; retry.go says what becomes of one that fails; claim.go is about
// pulls that are begun for an image's header; events.go tells who waits. Package share has
// what several pulls want come once.
package pull

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/credentials"
	"hydrofoil.dev/foil/internal/worker/fetch"
	"hydrofoil.dev/foil/internal/worker/hosts"
	"hydrofoil.dev/foil/internal/worker/images"
	"hydrofoil.dev/foil/internal/worker/locks"
	"hydrofoil.dev/foil/internal/worker/memory"
	"hydrofoil.dev/foil/internal/worker/servers"
	"hydrofoil.dev/foil/internal/worker/share"
	"hydrofoil.dev/foil/internal/worker/store"
	"hydrofoil.dev/foil/internal/worker/waits"
	"hydrofoil.dev/foil/internal/worker/yield"
)

// Options configure a Puller. Store, Images, Hosts, MakeRoom and Logger are
// required.
type Options struct {
	Store  *store.Store
	Images *images.Set
	Hosts  *hosts.Set
	Logger *slog.Logger
	// MakeRoom evicts one image if more than the limit is taken, or at least least
	// bytes too much, and reports whether it did.
	MakeRoom func(least int64) bool
	// GiveUp is how long a pull goes on trying while its server cannot be reached,
	// before reads that wait for it fail; 0: package fetch's default.
	GiveUp time.Duration
	// Workers is how many frames a pull decodes at a time; 0: fetch's default.
	Workers int
	// NoStartup does without startup sets.
	NoStartup bool
	// NoReports keeps the daemon from telling servers what containers read until
	// they were ready; ReportSample is which share of starts it tells of, 0 means 1.
	NoReports    bool
	ReportSample float64
	// Credentials, when set, has what somebody shows to the registry of an image, by
	// its name, HOST/REPOSITORY; none: what Hosts has.
	Credentials func(repository string) credentials.Credential
	// Memory bounds what pulls read into page caches; nil: nothing does.
	Memory *memory.Budget
	// Others says when others want the processors; nil: never.
	Others *yield.Watch
	// Completed, when set, is told of each image that a pull has made complete, and what was shown to its registry.
	Completed func(ref string, shown credentials.Credential)
	// Used, when set, is told of each server that sent all that it was asked for.
	Used func(servers.Server)
	// At is called at named points; a test dies there.
	At func(point string)

	// Times; the constants of these names when 0.
	ClaimWithin, FirstRetry, Stalled time.Duration
}

// Puller runs the pulls of one daemon.
type Puller struct {
	opts    Options
	log     *slog.Logger
	store   *store.Store
	images  *images.Set
	metrics *metrics
	ctx     context.Context // ends with Stop; pulls run under it
	stop    context.CancelCauseFunc
	work    sync.WaitGroup
	begun   atomic.Uint64 // pulls

	mu       locks.Mutex[locks.Pulls]
	closing  bool
	pulls    map[string]*Pull // by reference; the last one of each
	offered  map[string]*Pull // that nobody has claimed yet, by the reference that will
	blocked  map[string]bool  // references of which no pull may begin
	retries  map[string]*retry
	finished []*waits.List // of pulls that have ended, the last keptWaits
	ended    []*Pull       // of references that named no image then; the last keptPulls
}

// Causes for which a pull is stopped. Reads that wait for it go on waiting.
var (
	ErrStopping = &api.Error{Code: api.CodeUnavailable, Message: "the daemon is stopping; it goes on with the pull when it is started again"}
	ErrRemoved  = &api.Error{Code: api.CodeConflict, Message: "the image was removed meanwhile"}
)

// isStopped reports whether a pull ended because it was told to.
func isStopped(err error) bool { return errors.Is(err, ErrStopping) || errors.Is(err, ErrRemoved) }

// New returns a Puller without pulls.
func New(opts Options) *Puller {
	if opts.GiveUp == 0 {
		opts.GiveUp = fetch.DefaultGiveUp
	}
	if opts.ClaimWithin == 0 {
		opts.ClaimWithin = claimWithin
	}
	if opts.FirstRetry == 0 {
		opts.FirstRetry = firstRetry
	}
	if opts.Stalled == 0 {
		opts.Stalled = stalled
	}
	if opts.At == nil {
		opts.At = func(string) {}
	}
	s := &Puller{
		opts: opts, log: opts.Logger, store: opts.Store, images: opts.Images, metrics: newMetrics(),
		pulls: make(map[string]*Pull), offered: make(map[string]*Pull), blocked: make(map[string]bool), retries: make(map[string]*retry),
	}
	s.ctx, s.stop = context.WithCancelCause(context.Background())
	return s
}

// Stop ends all pulls, and what they left, and waits for it. What is here stays.
func (s *Puller) Stop() {
	s.mu.Lock()
	s.closing = true
	s.mu.Unlock()
	s.stop(ErrStopping)
	s.work.Wait()
}

// goes runs fn, which ends with the Puller, and reports true; or false, when that has
// been stopped.
func (s *Puller) goes(fn func()) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closing {
		s.work.Go(fn)
	}
	return !s.closing
}

// How says how a pull is begun, besides its request.
type How struct {
	// Manifest, when set, asks for that, whatever the reference's tag names by now.
	Manifest digest.Digest
	// Resumed: a new daemon goes on with it.
	Resumed bool
	// Admitted: who asks was let in by the registry already, as containerd was, which has resolved the image.
	Admitted bool

	shown credentials.Credential // what a pull that is begun shows; set by Start
}

// admits reports whether who asks may join p at once: the registry decides about p's credential, and it is theirs.
// Nobody joins a pull that is over: it does not know any more what it has shown.
func (h How) admits(p *Pull) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return h.Admitted || p.events.phase != over && h.shown == p.shown
}

// Start starts a pull unless one of the same reference runs, which it joins, once the registry has accepted the
// joiner's own credential. One that has failed, and is about to say
// so, is waited for: what it failed of may be over, and who asks now has not been
// waiting for it.
func (s *Puller) Start(ctx context.Context, req api.PullRequest, how How) (*Pull, error) {
	r, err := ParseRef(req.Ref)
	if err != nil {
		return nil, err
	}
	if _, err := parsePlatform(req.Platform); err != nil {
		return nil, err
	}
	switch req.Until {
	case "", api.Resolved, api.Mounted, api.Complete:
	default:
		return nil, api.Errorf(api.CodeInvalid, "until %q: use mounted or complete", req.Until)
	}
	if how.Manifest != "" {
		r.Reference = how.Manifest.String()
	}
	how.shown = s.Want(r, req).Credential
	for {
		p, begun, failing, err := s.find(r, req, how)
		switch {
		case err != nil:
			return nil, err
		case begun:
			return p, nil
		case failing == nil && how.admits(p):
			p.join(req)
			return p, nil
		case failing == nil:
			if err := s.mayPull(ctx, r, req); err != nil {
				return nil, err
			}
			how.Admitted = true
			continue // it may have ended meanwhile
		}
		if err := failing.Wait(ctx); err != nil {
			return nil, err
		}
	}
}

// find returns the pull of a reference that runs, claims one that was begun for its
// header, or begins one, which begun says; or returns one that has failed and has not ended.
func (s *Puller) find(r Ref, req api.PullRequest, how How) (p *Pull, begun bool, failing *Pull, err error) {
	s.mu.Lock()
	if s.closing {
		s.mu.Unlock()
		return nil, false, nil, ErrStopping
	}
	if s.blocked[r.Name] {
		s.mu.Unlock()
		return nil, false, nil, api.Errorf(api.CodeConflict, "image %s is just being removed: try again in a moment", r)
	}
	p = s.pulls[r.Name]
	if p != nil && p.HasFailed() && !p.Ended() {
		s.mu.Unlock()
		return nil, false, p, nil
	}
	if p == nil || p.Ended() {
		if p = s.claim(r.Name, how); p == nil {
			p = s.newPull(r, req)
			p.resumed, p.shown = how.Resumed, how.shown
			s.pulls[r.Name], begun = p, true
			s.work.Go(p.run)
		}
	}
	s.mu.Unlock()
	return p, begun, nil, nil
}

// Get returns the pull of a reference that runs, or its last one, or nil.
func (s *Puller) Get(name string) *Pull {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.pulls[name]
}

// Running reports whether a pull of a reference runs.
func (s *Puller) Running(name string) bool {
	p := s.Get(name)
	return p != nil && !p.Ended()
}

// earlier returns the pulls of the same registry that run, and began before p, the first one first.
func (s *Puller) earlier(p *Pull) (list []share.Pull) {
	all := s.List()
	slices.SortFunc(all, func(a, b *Pull) int { return cmp.Compare(a.number, b.number) })
	for _, o := range all {
		if o.number < p.number && o.ref.Host == p.ref.Host && !o.Ended() {
			list = append(list, o)
		}
	}
	return list
}

// List returns the pulls that run, and the last ones of other references.
func (s *Puller) List() []*Pull {
	s.mu.Lock()
	defer s.mu.Unlock()
	list := make([]*Pull, 0, len(s.pulls))
	for _, p := range s.pulls {
		list = append(list, p)
	}
	return list
}

// Block keeps pulls of a reference from beginning until unblock is called. It
// returns the one that runs, or nil.
//
// Errors: api.CodeConflict when it is blocked already.
func (s *Puller) Block(name string) (running *Pull, unblock func(), err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.blocked[name] {
		return nil, nil, api.Errorf(api.CodeConflict, "image %s is just being removed", name)
	}
	s.blocked[name] = true
	if p := s.pulls[name]; p != nil && !p.Ended() {
		running = p
	}
	return running, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.blocked, name)
	}, nil
}

// Blocked reports whether a reference is being removed.
func (s *Puller) Blocked(name string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.blocked[name]
}

// Forget forgets what was of a reference that was removed.
func (s *Puller) Forget(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.pulls, name)
	if t := s.retries[name]; t != nil {
		t.end()
		delete(s.retries, name)
	}
}

// samples reports whether a start is to be reported.
func (s *Puller) samples() bool {
	o := s.opts
	return !o.NoReports && (o.ReportSample <= 0 || rand.Float64() < o.ReportSample)
}

// keptPulls is how many pulls that have ended are remembered of references that name no image here: anybody who may name
// images can have very many fail.
const keptPulls = 256

// keepEnded remembers a pull that has ended, and forgets the one of an older reference that names no image.
func (s *Puller) keepEnded(p *Pull) {
	here := make(map[string]bool) // these are bounded by the disk
	for _, img := range s.images.List() {
		here[img.Ref] = true
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = slices.DeleteFunc(append(s.ended, p), func(o *Pull) bool { return s.pulls[o.ref.Name] != o || here[o.ref.Name] })
	for len(s.ended) > keptPulls {
		delete(s.pulls, s.ended[0].ref.Name)
		s.ended = s.ended[1:]
	}
}

// keptWaits is of how many pulls that have ended it is remembered which reads
// waited: less than 1 MiB in all.
const keptWaits = 32

// keepWaits remembers the waits of a pull that ends, and forgets those of an
// older one.
func (s *Puller) keepWaits(p *Pull) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.finished = append(s.finished, &p.waits)
	if len(s.finished) > keptWaits {
		s.finished[0].Forget()
		s.finished = slices.Delete(s.finished, 0, 1)
	}
}

// Offered is how many pulls were begun for a header, and wait to be claimed.
func (s *Puller) Offered() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.offered)
}

// Retrying is how many images there are whose pull has failed, and is tried again.
func (s *Puller) Retrying() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.retries)
}
