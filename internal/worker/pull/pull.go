package pull

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"sync"
	"time"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/arena"
	"hydrofoil.dev/foil/internal/worker/credentials"
	"hydrofoil.dev/foil/internal/worker/fetch"
	"hydrofoil.dev/foil/internal/worker/hosts"
	"hydrofoil.dev/foil/internal/worker/images"
	"hydrofoil.dev/foil/internal/worker/locks"
	"hydrofoil.dev/foil/internal/worker/records"
	"hydrofoil.dev/foil/internal/worker/servers"
	"hydrofoil.dev/foil/internal/worker/share"
	"hydrofoil.dev/foil/internal/worker/start"
	"hydrofoil.dev/foil/internal/worker/store"
	"hydrofoil.dev/foil/internal/worker/waits"
)

// Pull brings one image here. Its story: resolved, mounted, complete; or failed
// at any point. When it has ended what is here stays: a later pull of the same
// image goes on with it.
//
// At any time one pull fills a rootfs. Another one that wants the same rootfs, by
// another reference, waits for the end of the first, and goes on by itself if that
// came to nothing, or brings nothing for a while.
type Pull struct {
	s       *Puller
	ref     Ref
	req     api.PullRequest
	shown   credentials.Credential // to the registry, in all attempts; what Hosts has when zero
	begun   time.Time
	resumed bool            // a new daemon has begun it, for an image that containers may be on
	claim   *claim          // nil unless it was begun for its header
	ctx     context.Context // ends with the Puller, or with stop
	stop    context.CancelCauseFunc
	work    sync.WaitGroup // the mount, and the record of the image
	start   *start.Start
	waits   waits.List      // reads that waited
	leases  store.Leases    // of what it uses
	number  uint64          // of the Puller's pulls, in the order in which they began
	shares  *share.Contents // what other pulls bring of its image

	asked     chan struct{} // closed when the server is being asked for the first time, or nobody will be
	askedOnce sync.Once

	placed     chan struct{} // closed when rootfs is set, or never will be
	placedOnce sync.Once

	mu       locks.Mutex[locks.Pull]
	stream   *fetch.Pull                    // nil before the first and after the end
	server   string                         // that stream is of
	weak     string                         // server, and why nothing shows that it is this one; empty: it was authenticated
	source   store.Source                   // stream, and what other pulls bring
	progress fetch.Progress                 // of the last stream, once the pull has ended
	image    *images.Image                  // what the header says; nil before
	record   func() (records.Staged, error) // of image, once it is on the disk; set with image
	recorded bool                           // the reference names this image
	rootfs   *store.Rootfs
	mountErr error // of the mount that this pull made
	hadAll   bool  // the rootfs was complete when the header arrived
	joined   []service
	behind   *Pull // that fills the rootfs, while this one waits for it
	overtook bool  // another pull that brought nothing; once
	yielded  bool  // another pull fills the rootfs now, because this one brought nothing
	events   log
}

// newPull makes a pull that run is still to be called of.
func (s *Puller) newPull(r Ref, req api.PullRequest) *Pull {
	p := &Pull{s: s, ref: r, req: req, begun: time.Now(), asked: make(chan struct{}), placed: make(chan struct{}), number: s.begun.Add(1)}
	p.events.changed = make(chan struct{})
	p.ctx, p.stop = context.WithCancelCause(s.ctx)
	p.start = start.New(p.ctx, start.Options{
		Store:    s.store,
		Logger:   s.log,
		Set:      p.wantsSet(),
		Probed:   req.Probed,
		Soon:     req.Until == api.Mounted,
		Learning: s.samples(),
		Go:       s.goes,
		Report:   p.report,
		Counted:  s.metrics.counted,
		Memory:   s.opts.Memory,
	})
	p.shares = share.New(p.ctx, share.Options{
		Own:     p,
		Earlier: func() []share.Pull { return s.earlier(p) },
		Store:   s.store,
		Stalled: s.opts.Stalled,
		Copied:  s.metrics.copied,
		Logger:  s.log,
	})
	return p
}

// wantsSet reports whether a pull asks for a startup set.
func (p *Pull) wantsSet() bool { return !p.s.opts.NoStartup && !p.req.NoStartup }

// Ref is what is pulled.
func (p *Pull) Ref() string { return p.ref.Name }

// Begun is when it began.
func (p *Pull) Begun() time.Time { return p.begun }

// Asked is closed when the server is being asked, or nobody will be.
func (p *Pull) Asked() <-chan struct{} { return p.asked }

// HadAll reports whether the image was complete before the pull.
func (p *Pull) HadAll() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.hadAll
}

// Placed is closed when Rootfs is known, or never will be.
func (p *Pull) Placed() <-chan struct{} { return p.placed }

// Hold is for how long from Begun on a service that starts on its image has the line; 0: none is about to.
func (p *Pull) Hold() time.Duration { return p.start.Hold() }

// Server returns who is asked.
func (p *Pull) Server() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.server
}

// Stream returns what comes from there, or nil.
func (p *Pull) Stream() *fetch.Pull {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.stream
}

// Held reports whether its stream brings nothing because a service starts.
func (p *Pull) Held() bool {
	f := p.Stream()
	return f != nil && f.Held()
}

// Rootfs returns the rootfs that it brings, once that is known, or nil.
func (p *Pull) Rootfs() *store.Rootfs {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.rootfs
}

// Stop ends it; cause says why.
func (p *Pull) Stop(cause error) { p.stop(cause) }

// run is the pull's goroutine.
func (p *Pull) run() {
	p.s.makeRoom()
	err := p.bring()
	for err != nil && p.again(err) {
		err = p.bring()
	}
	p.end(err)
}

// errShared ends the stream of a pull that needs none.
var errShared = errors.New("another pull fills this rootfs")

// bring is one attempt: it asks one host after the other, until the rootfs is
// complete.
func (p *Pull) bring() error {
	s, ctx := p.s, p.ctx
	defer p.nowAsked()
	want := s.Want(p.ref, p.req)
	want.Credential = p.shown // whatever others have shown meanwhile
	ask, err := s.opts.Hosts.For(ctx, want)
	if err != nil {
		return api.Errorf(api.CodeInvalid, "pull %s: %w", p.ref, err)
	}
	reference := p.ref.Reference
	have := s.store.Haves(&p.leases, p.ref.Host, p.named())
	for lacked := false; ; {
		err := p.streamFrom(ask[0], len(ask) > 1, reference, have)
		p.mu.Lock()
		mountErr, r, img := p.mountErr, p.rootfs, p.image
		p.mu.Unlock()
		switch {
		case mountErr != nil:
			return mountErr
		case err != nil && img == nil && len(ask) > 1 && ctx.Err() == nil && !errors.Is(err, errUnclaimed):
			s.log.Info("this host does not have the image; asking the next one", "ref", p.ref.Name, "host", ask[0].Client.Base(), "error", err)
			ask, reference = ask[1:], p.ref.Reference // what has been announced, if anything has
			continue
		case errors.Is(err, errShared), errors.Is(err, fetch.ErrStopped) && p.hasYielded():
			if err := p.awaitOther(r); err != nil || r.Complete() {
				return err
			}
			reference, have = img.Digest.String(), s.store.Haves(&p.leases, p.ref.Host, p.named())
			continue
		case err != nil:
			return err
		case r == nil:
			return fmt.Errorf("pull %s: the server ended the bundle before it named the image", p.ref)
		}
		a := r.Arena()
		if a == nil || a.Complete() {
			return p.finish(r)
		}
		switch dropped := p.shares.Await(a); {
		case a.Complete():
			return p.finish(r)
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case dropped:
			// What another pull was to bring is not here. There are fewer others now.
		case lacked:
			return api.Errorf(api.CodeCorrupt, "pull %s: the server ended the bundle, but bytes are missing; remove the image with `foil rm` and pull it again", p.ref)
		default:
			// Something that the server left out, because this worker said that it
			// has it, was not found here: damaged, or removed just now. Once more,
			// and this time without counting on other images.
			s.log.Warn("not all that was to be taken from other images is here; asking for it", "ref", p.ref, "segments", a.Missing())
			lacked = true
		}
		have = nil
		if h, ok := r.Have(); ok {
			have = append(have, h)
		}
		reference = img.Digest.String()
	}
}

// streamFrom asks a host, and takes what it sends until the end. more says that there
// are other hosts: this one is tried once.
func (p *Pull) streamFrom(host hosts.Host, more bool, reference string, have []bundle.Have) error {
	platform, err := parsePlatform(p.req.Platform)
	if err != nil {
		return err
	}
	var atOnce time.Duration // how long a host is tried; 0: as usual
	if more || !p.Claimed() {
		atOnce = time.Nanosecond
	}
	server := host.Client.Base()
	p.mu.Lock()
	p.server, p.weak = server, ""
	if host.Weak != "" {
		p.weak = server + ": " + host.Weak
	}
	p.mu.Unlock()
	elsewhere := p.shares.Begin()
	f := fetch.Start(p.ctx, fetch.Options{
		Client: host.Client,
		Name:   p.ref.Name,
		Request: bundle.Request{
			Versions: []int{bundle.Version},
			Image: bundle.ImageRequest{
				Repository: host.Repository, Reference: reference, Platform: platform,
				Startup: p.wantsSet(), Entrypoint: p.req.Entrypoint, Args: p.req.Args,
			},
			Have: have,
		},
		Head:           p.announce,
		Open:           p.open,
		TOC:            p.encodedTOC,
		Early:          func(set fetch.Startup) { p.start.SetArrived(set.Origin != "") },
		Pages:          p.start.Pages,
		Here:           p.start.Borrowed,
		Hold:           p.start.Hold(),
		Elsewhere:      elsewhere,
		Workers:        p.s.opts.Workers,
		Waits:          &p.waits,
		Tight:          p.s.opts.Memory.Tight,
		Yields:         func() bool { return p.s.opts.Others.Wanted() && !p.start.Awaited() },
		GiveUp:         p.s.opts.GiveUp,
		Failed:         p.gaveUp,
		GiveUpUnopened: atOnce,
		Logger:         p.s.log,
	})
	p.nowAsked()
	p.mu.Lock()
	p.stream = f
	if p.start.IsWhole() { // it may have been told so meanwhile
		f.Release()
	}
	if p.source = f; elsewhere != nil {
		p.source = p.shares.Source(f)
	}
	for _, s := range p.joined {
		f.Join(s.entrypoint, s.args)
	}
	p.mu.Unlock()
	p.supply()
	p.s.metrics.begin(f)
	err = f.Wait()
	p.s.metrics.end(f)
	p.work.Wait()
	p.start.AwaitReads()
	if used := p.s.opts.Used; used != nil && err == nil {
		used(servers.Server{Registry: p.ref.Host, PlainHTTP: p.req.PlainHTTP, Base: server})
	}
	return err
}

// nowAsked lets those go on who wait until the server is asked.
func (p *Pull) nowAsked() { p.askedOnce.Do(func() { close(p.asked) }) }

// nowPlaced lets those go on who wait until p's contents have places.
func (p *Pull) nowPlaced() { p.placedOnce.Do(func() { close(p.placed) }) }

// open is called with an image's header: it lays out the arena at once, so that
// frames can be written, and mounts in the background. Of a rootfs that is here
// it takes what is there.
func (p *Pull) open(ctx context.Context, img *bundle.Image, t *toc.TOC) (*arena.Arena, error) {
	if p.claim != nil {
		if a, done, err := p.openUnclaimed(ctx, img, t); done || err != nil {
			return a, err
		}
	}
	p.resolved(img)
	r, made, err := p.openRootfs(img, t)
	if err != nil {
		return nil, err
	}
	p.names(r)
	if made != nil {
		p.start.LaidOut(r, t, made)
		p.work.Go(func() { p.mount(r, nil) })
		return r.Arena(), nil
	}
	return p.openFound(ctx, r, img)
}

// openFound takes what is there of a rootfs that is here.
func (p *Pull) openFound(ctx context.Context, r *store.Rootfs, img *bundle.Image) (*arena.Arena, error) {
	select {
	case <-r.Ready():
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	if err := r.Broken(); err != nil {
		return nil, err
	}
	complete := r.Complete()
	p.mu.Lock()
	p.hadAll = complete
	p.mu.Unlock()
	if err := p.commit(); err != nil {
		return nil, err
	}
	switch {
	case complete:
		return nil, nil
	case r.Filler() != store.Filler(p):
		return nil, errShared
	}
	p.mu.Lock()
	p.yielded = false
	weak := p.weak
	p.mu.Unlock()
	if err := p.s.store.FillWeakly(r, weak); err != nil {
		return nil, err
	}
	a := r.Arena()
	if a != nil {
		p.work.Go(func() { p.copyShared(r) })
	}
	return a, nil
}

// resolved notes what the header says, and tells of it, once.
func (p *Pull) resolved(img *bundle.Image) {
	p.note(img)
	if !p.events.has(p, api.Resolved) {
		p.happened(api.Resolved, nil)
	}
}

// openRootfs finds the rootfs of an image, or lays it out: then made is not nil.
func (p *Pull) openRootfs(img *bundle.Image, t *toc.TOC) (r *store.Rootfs, made store.Placement, err error) {
	p.mu.Lock()
	weak := p.weak
	p.mu.Unlock()
	r, made, err = p.s.store.Open(store.Wanted{
		Registry: p.ref.Host, Named: p.named(), Image: img, TOC: t, Weak: weak, By: p, Leases: &p.leases,
		Observe: func(r *store.Rootfs) store.Observer { return p.start.Learn(p.s.ctx, r) },
	})
	if r != nil {
		p.mu.Lock()
		before := p.rootfs
		p.rootfs = r
		p.mu.Unlock()
		if before != nil && before != r {
			before.Unclaim(p) // the server has changed its TOC
		}
		p.nowPlaced()
		p.supply()
	}
	if err != nil {
		return nil, nil, err
	}
	if made != nil {
		p.s.metrics.shared(r.Shared())
	}
	return r, made, nil
}

// gaveUp is called when a stream has failed: who is next in turn fills the rootfs, or reads of it fail.
func (p *Pull) gaveUp(err error) {
	if r := p.Rootfs(); r != nil {
		r.GiveUp(p, err)
	}
}

// supply has the reads that wait on the rootfs which p fills wait by its stream: what they
// need comes soon then. It is called when p fills the rootfs, and when its stream has
// begun, whichever is later.
func (p *Pull) supply() {
	p.mu.Lock()
	r, src := p.rootfs, p.source
	p.mu.Unlock()
	if r != nil && src != nil {
		r.Supply(p, src)
	}
}

// mount makes the mount of a rootfs that this pull laid out, and then brings
// over what other arenas hold of it. Of a pull that nobody has claimed yet,
// claimed says whether somebody does; else it is nil.
func (p *Pull) mount(r *store.Rootfs, claimed <-chan bool) {
	wanted := true
	err := p.s.store.MountFirst(r, func() error {
		if claimed != nil {
			if wanted = <-claimed; !wanted {
				return nil
			}
		}
		err := p.commit()
		p.s.opts.At("committed")
		return err
	})
	switch {
	case err != nil:
		p.mu.Lock()
		p.mountErr = err
		p.mu.Unlock()
		p.stop(err)
	case wanted:
		p.start.Mounted()
		p.copyShared(r)
	}
}

// copyShared takes from other arenas what they hold inside of other contents. Those
// that the rootfs does not use may go then.
func (p *Pull) copyShared(r *store.Rootfs) {
	p.s.metrics.copied(p.s.store.CopyShared(p.ctx, r, &p.leases))
	p.s.store.Settle(&p.leases, r)
	p.s.makeRoom()
}

// encodedTOC reads the TOC of a rootfs that is here.
func (p *Pull) encodedTOC(_ context.Context, img *bundle.Image) ([]byte, error) {
	return p.s.store.TOC(p.ref.Host, p.named(), img.ChainID, img.TOCDigest)
}

// finish makes a rootfs complete of which everything has arrived, and takes it from
// behind the gate, unless somebody still looks at what is read there.
func (p *Pull) finish(r *store.Rootfs) error {
	s := p.s
	if r.Complete() {
		return nil
	}
	if err := s.store.Finish(p.ctx, r); err != nil {
		return err
	}
	leave := func() {
		s.store.LeaveGate(r)
		s.store.PassGate()
	}
	watched := start.LearnerOf(r).Watched()
	if watched == nil {
		leave()
		return nil
	}
	s.goes(func() {
		<-watched
		leave()
	})
	return nil
}

// end is called once, with how the last attempt ended.
func (p *Pull) end(err error) {
	s := p.s
	defer s.keepEnded(p)
	if err != nil {
		p.events.failing(p)
		s.opts.At("failing")
	}
	p.dropRecord()
	stopped := false
	if err != nil {
		if cause := context.Cause(p.ctx); isStopped(cause) {
			err, stopped = cause, true
		}
	}
	p.stop(nil)
	p.nowPlaced()
	p.shares.End()
	p.start.End()
	p.mu.Lock()
	// What a stream knows of a large image is large.
	if p.stream != nil {
		p.progress, p.stream, p.source = p.stream.Progress(), nil, nil
	}
	r, brought := p.rootfs, p.progress.Written > 0
	p.mu.Unlock()
	if r != nil {
		r.Unclaim(p)
	}
	s.withdraw(p)
	lacks := p.noteEnd(err, stopped)
	p.leases.End()
	s.keepWaits(p)
	// Who is told of a failure finds nothing left behind.
	s.store.Collect()
	s.makeRoom()
	debug.FreeOSMemory() // buffers, and what the stream knew of the image
	if p.Claimed() {
		s.metrics.over(stopped, err)
	}
	// What a registry was shown is of no more use.
	p.mu.Lock()
	shown := p.shown
	p.shown, p.req.Credential = credentials.Credential{}, credentials.Credential{}
	p.mu.Unlock()
	if err == nil {
		p.happened(api.Complete, nil)
		if s.opts.Completed != nil && p.Claimed() {
			s.opts.Completed(p.ref.Name, shown)
		}
		return
	}
	p.happened(api.Failed, err)
	if lacks != nil && !stopped {
		s.retryLater(lacks, shown, brought, err)
	}
}

// noteEnd notes at the image how its pull has ended. It returns the image when it
// lacks something that nobody brings.
func (p *Pull) noteEnd(err error, stopped bool) (lacks *images.Image) {
	s := p.s
	img := s.images.Get(p.ref.Name)
	if img == nil || !p.Claimed() {
		return nil
	}
	if err == nil {
		s.images.SetWhy(img.Ref, "")
		s.endRetry(img.Ref)
		return nil
	}
	why := AsError(err).Message
	if p.resumed && AsError(err).Code == api.CodeUnauthorized {
		why += ": " + Forgotten
	}
	s.images.SetWhy(img.Ref, why)
	// The pull may have ended before it came as far as to open the rootfs. Its
	// readers would wait for nobody.
	if r := s.store.Get(img.Rootfs); r != nil && !stopped {
		r.Fail(err)
	}
	return img
}
