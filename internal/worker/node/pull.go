package node

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"
	"sync"
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/arena"
	"hydrofoil.dev/foil/internal/worker/credentials"
	"hydrofoil.dev/foil/internal/worker/fetch"
)

// pull brings one image here. Its story: resolved, mounted, complete; or failed
// at any point. Pull starts it, run is its goroutine, and when that ends what is
// here stays: a later pull of the same image goes on with it.
//
// At any time one pull fills a rootfs (rootfs.filling). Another one that wants
// the same rootfs, by another reference, waits for the end of the first, and
// goes on by itself if that came to nothing.
type pull struct {
	n     *Node
	ref   ref
	req   api.PullRequest
	begun time.Time
	ctx   context.Context // ends with the node, or with stop
	stop  context.CancelCauseFunc
	work  sync.WaitGroup // the mount, and the copying of what is here
	early *early         // nil unless it was begun for its header
	// goesOn: a new daemon has begun it, for an image that containers may be on.
	goesOn bool
	warm   warmer
	waits  fetch.Waits // reads that waited

	mu         sync.Mutex
	fetch      *fetch.Pull    // nil before the start and after the end
	progress   fetch.Progress // of it, once it has ended
	digest     string
	image      *image
	told       bool                   // of what the header says
	record     func() (staged, error) // of image, once it is on the disk; set before the mount
	rootfs     *rootfs
	committed  bool
	mountErr   error // of the mount that this pull made
	whole      bool  // the rootfs was complete when the header arrived
	milestones []api.Event
	changed    chan struct{} // closed, and made anew, when milestones grow
	failing    bool          // it has failed, and is about to say so
	over       bool
	err        error // why it has failed

	joined []service // services that have joined
	other  *pull     // that fills the rootfs, while this one waits for it

	used map[*rootfs]bool // which it keeps from being removed; guarded by Node.mu

	asked     chan struct{} // closed when the server is being asked for the first time, or nobody will be
	askedOnce sync.Once
	ready     chan struct{} // closed by isReady, under mu
	nextReady chan struct{} // closed, and made anew, when one that joined is ready; guarded by mu
}

// Causes for which a pull is stopped. Reads that wait for it go on waiting.
var (
	errStopping = &api.Error{Code: api.CodeUnavailable, Message: "the daemon is stopping; it goes on with the pull when it is started again"}
	errRemoved  = &api.Error{Code: api.CodeConflict, Message: "the image was removed meanwhile"}
)

// Pull starts the pull of an image, or joins the one that runs, and emits its
// events.
func (n *Node) Pull(ctx context.Context, req api.PullRequest, emit func(api.Event) error) error {
	if req.Container != "" {
		return n.pullInto(ctx, req, emit)
	}
	p, err := n.startPull(ctx, req, "", false)
	if err != nil {
		return err
	}
	return p.follow(ctx, req, emit)
}

// startPull starts a pull unless one of the same reference runs. A digest asks
// for that manifest, whatever the reference's tag names by now; goesOn is for
// pull.goesOn. One that has failed, and is about to say so, is waited for: what
// it failed of may be over, and who asks now has not been waiting for it.
func (n *Node) startPull(ctx context.Context, req api.PullRequest, manifest digest.Digest, goesOn bool) (*pull, error) {
	r, err := parseRef(req.Ref)
	if err != nil {
		return nil, err
	}
	if _, err := parsePlatform(req.Platform); err != nil {
		return nil, err
	}
	switch req.Until {
	case "", api.Resolved, api.Mounted, api.Complete:
	default:
		return nil, errorf(api.CodeInvalid, "until %q: use mounted or complete", req.Until)
	}
	if manifest != "" {
		r.reference = manifest.String()
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	for {
		if n.closing {
			return nil, errStopping
		}
		if n.removing[r.name] {
			return nil, errorf(api.CodeConflict, "image %s is just being removed: try again in a moment", r)
		}
		p := n.pulls[r.name]
		if p == nil || p.ended() {
			break
		}
		if !p.hasFailed() {
			p.join(req)
			return p, nil
		}
		n.mu.Unlock()
		err := p.wait(ctx)
		n.mu.Lock()
		if err != nil {
			return nil, err
		}
	}
	if p := n.claim(r.name); p != nil {
		p.join(req)
		return p, nil
	}
	p := n.newPull(r, req)
	p.goesOn = goesOn
	n.pulls[r.name] = p
	n.work.Go(p.run)
	return p, nil
}

func (n *Node) newPull(r ref, req api.PullRequest) *pull {
	p := &pull{n: n, ref: r, req: req, begun: time.Now(), changed: make(chan struct{}), used: make(map[*rootfs]bool), asked: make(chan struct{}), ready: make(chan struct{}), nextReady: make(chan struct{})}
	p.ctx, p.stop = context.WithCancelCause(n.ctx)
	return p
}

// nowAsked lets those go on who wait until the server is asked.
func (p *pull) nowAsked() { p.askedOnce.Do(func() { close(p.asked) }) }

func (p *pull) ended() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.over
}

func (p *pull) hasFailed() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.failing
}

// use keeps r from being removed, and its arena open, until the pull has ended.
// Called with Node.mu held.
func (p *pull) use(r *rootfs) {
	if !p.used[r] {
		p.used[r] = true
		r.users++
	}
}

func (p *pull) run() {
	n := p.n
	n.makeRoom()
	err := p.bring(p.ctx)
	p.nowAsked()
	for err != nil && (p.again(err) || p.tryOn(err) || p.anew()) {
		err = p.bring(p.ctx)
	}
	if err != nil {
		p.mu.Lock()
		p.failing = true
		p.mu.Unlock()
		n.at("failing")
	}
	p.dropRecord()
	stopped := false
	if err != nil {
		if cause := context.Cause(p.ctx); isStopped(cause) {
			err, stopped = cause, true
		}
	}
	p.stop(nil)
	p.mu.Lock()
	r := p.rootfs
	p.mu.Unlock()
	if r != nil {
		n.endStart(r)
	}
	p.mu.Lock()
	// What a fetch knows of a large image is large.
	if p.fetch != nil {
		p.progress, p.fetch = p.fetch.Progress(), nil
	}
	p.mu.Unlock()
	p.warm.coolDown()
	var lacking digest.Digest // the manifest of the image, if nobody brings what it lacks
	n.mu.Lock()
	if r := p.rootfs; r != nil && r.filling == p {
		r.filling = nil
	}
	n.withdraw(p)
	if img := n.images[p.ref.name]; img != nil && !p.unclaimed() {
		img.Why = ""
		if err == nil {
			delete(n.retries, p.ref.name)
		} else {
			lacking = img.Digest
			img.Why = asError(err).Message
			// The pull may have ended before it came as far as to open the
			// rootfs. Its readers would wait for nobody.
			if r := n.rootfs[img.ChainID]; !stopped && r != nil && r.filling == nil && r.arena != nil {
				r.arena.Fail(err)
			}
		}
	}
	for r := range p.used {
		r.letGo()
	}
	p.used = nil
	n.keepWaits(p)
	n.mu.Unlock()
	// Who is told of a failure finds nothing left behind.
	n.collect()
	n.makeRoom()
	debug.FreeOSMemory() // buffers, and what the fetch knew of the image
	if !p.unclaimed() {
		n.metrics.over(stopped, err)
	}
	p.mu.Lock()
	p.err = err
	brought := p.progress.Written > 0
	p.mu.Unlock()
	// What a registry was shown is of no more use.
	p.req.Credential = credentials.Credential{}
	if err != nil {
		p.happened(api.Failed, err)
		if lacking != "" && !stopped {
			n.retryLater(p.ref.name, lacking, brought, err)
		}
	} else {
		p.happened(api.Complete, nil)
	}
}

// Errors that end the stream of a pull that needs none.
var (
	errShared = errors.New("another pull fills this rootfs")
	errHere   = errors.New("this rootfs is here")
)

func (p *pull) bring(ctx context.Context) error {
	n := p.n
	platform, err := parsePlatform(p.req.Platform)
	if err != nil {
		return err
	}
	want := n.want(p.ref, p.req)
	if p.early != nil {
		// Who asks for a header has not been let in by the registry yet. Others'
		// credentials are none of theirs.
		want.Credential = p.req.Credential
	}
	ask, err := n.hosts.For(ctx, want)
	if err != nil {
		return errorf(api.CodeInvalid, "pull %s: %w", p.ref, err)
	}
	reference := p.ref.reference
	have := p.haves()
	for again := false; ; {
		var atOnce time.Duration // how long a host is tried; 0: as usual
		if len(ask) > 1 || p.unclaimed() {
			atOnce = time.Nanosecond
		}
		f := fetch.Start(ctx, fetch.Options{
			Client: ask[0].Client,
			Name:   p.ref.name,
			Request: bundle.Request{
				Versions: []int{bundle.Version},
				Images: []bundle.ImageRequest{{
					Repository: ask[0].Repository, Reference: reference, Platform: platform,
					Startup: p.wantsStartup(), Entrypoint: p.req.Entrypoint, Args: p.req.Args,
				}},
				Have: have,
			},
			Head:           p.announce,
			Open:           p.open,
			TOC:            p.encodedTOC,
			Early:          p.arrived,
			Pages:          p.pages,
			Here:           p.here,
			Hold:           p.hold(),
			Workers:        n.opts.Workers,
			Waits:          &p.waits,
			GiveUp:         n.opts.GiveUp,
			GiveUpUnopened: atOnce,
			Logger:         n.log,
		})
		p.nowAsked()
		p.mu.Lock()
		p.fetch = f
		for _, s := range p.joined {
			f.Join(0, s.entrypoint, s.args)
		}
		p.mu.Unlock()
		p.handOver()
		n.metrics.begin(f)
		err = f.Wait()
		n.metrics.end(f)
		p.work.Wait()
		p.mu.Lock()
		mountErr, r, img := p.mountErr, p.rootfs, p.image
		p.mu.Unlock()
		switch {
		case mountErr != nil:
			return mountErr
		case err != nil && img == nil && len(ask) > 1 && ctx.Err() == nil && !errors.Is(err, errUnclaimed):
			n.log.Info("this host does not have the image; asking the next one", "ref", p.ref.name, "host", ask[0].Client.Base(), "error", err)
			ask, reference = ask[1:], p.ref.reference // what has been announced, if anything has
			continue
		case errors.Is(err, errHere):
			return nil
		case errors.Is(err, errShared):
			if done, err := p.waitFilled(ctx, r); done || err != nil {
				return err
			}
			reference, have = img.Digest.String(), p.haves()
			continue
		case err != nil:
			return err
		case r == nil:
			return fmt.Errorf("pull %s: the server ended the bundle before it named the image", p.ref)
		}
		n.mu.Lock()
		a := r.arena
		n.mu.Unlock()
		if a == nil || a.Complete() {
			return n.finish(ctx, r)
		}
		if again {
			return errorf(api.CodeCorrupt, "pull %s: the server ended the bundle, but bytes are missing; remove the image with `foil rm` and pull it again", p.ref)
		}
		// Something that the server left out, because this worker said that it
		// has it, was not found here: damaged, or removed just now. Once more,
		// and this time without counting on other images.
		n.log.Warn("not all that was to be taken from other images is here; asking for it", "ref", p.ref, "segments", a.Missing())
		again = true
		n.mu.Lock()
		have = []bundle.Have{{ChainID: r.rec.ChainID, TOC: r.rec.TOC, Present: r.present(), Pages: fetch.Pages(a)}}
		n.mu.Unlock()
		reference = img.Digest.String()
	}
}

// waitFilled waits until no other pull fills r, and reports whether r is
// complete then.
func (p *pull) waitFilled(ctx context.Context, r *rootfs) (complete bool, err error) {
	p.n.mu.Lock()
	other := r.filling
	p.n.mu.Unlock()
	if other != nil {
		p.waitBehind(other)
		defer p.waitBehind(nil)
		if err := other.wait(ctx); err != nil {
			return false, context.Cause(ctx)
		}
	}
	p.n.mu.Lock()
	defer p.n.mu.Unlock()
	return r.rec.Complete, nil
}

// encodedTOC reads the TOC of a rootfs that is here.
func (p *pull) encodedTOC(_ context.Context, img *bundle.Image) ([]byte, error) {
	p.n.mu.Lock()
	r := p.n.rootfs[img.ChainID]
	p.n.mu.Unlock()
	if r == nil {
		return nil, fmt.Errorf("read the TOC of rootfs %s: it is not here", img.ChainID)
	}
	return os.ReadFile(r.path("toc"))
}

// haves names every rootfs that is here, wholly or in part, and keeps their
// arenas for the pull: what the server leaves out because of them must still be
// here when its place is looked for.
func (p *pull) haves() []bundle.Have {
	n := p.n
	n.mu.Lock()
	defer n.mu.Unlock()
	var list []bundle.Have
	for _, r := range n.rootfs {
		if r.broken != nil {
			continue
		}
		h := bundle.Have{ChainID: r.rec.ChainID, TOC: r.rec.TOC}
		if !r.rec.Complete {
			if r.present == nil {
				continue
			}
			h.Present = r.present()
			if r.arena != nil {
				h.Pages = fetch.Pages(r.arena)
			}
		}
		p.use(r)
		list = append(list, h)
	}
	return list
}

// open is called with an image's header: it lays out the arena at once, so that
// frames can be written, and mounts in the background. Of a rootfs that is here
// it takes what is there.
func (p *pull) open(ctx context.Context, img *bundle.Image, t *toc.TOC) (*arena.Arena, error) {
	n := p.n
	if p.early != nil {
		r, claimed := p.layOut(img, t)
		err := p.await(ctx)
		if err == nil {
			p.resolved(img)
		}
		if claimed != nil {
			if err == nil {
				err = n.fits(r) // still
			}
			claimed <- err == nil
		}
		if err != nil {
			return nil, err
		}
		if claimed != nil {
			return r.arena, nil
		}
	}
	p.resolved(img)
	r, made, err := p.rootfsOf(img, t)
	if err != nil {
		return nil, err
	}
	if made != nil {
		p.laid(r, t, made)
		p.work.Go(func() { p.mount(r, nil) })
		return r.arena, nil
	}
	select {
	case <-r.ready:
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	n.mu.Lock()
	a, mine, broken, complete := r.arena, r.filling == p, r.broken, r.rec.Complete
	n.mu.Unlock()
	if broken != nil {
		return nil, broken
	}
	p.mu.Lock()
	p.whole = complete
	p.mu.Unlock()
	if err := p.commit(); err != nil {
		return nil, err
	}
	switch {
	case complete && r.rec.TOC != img.TOCDigest:
		// The server wrote its TOC anew. What is here was verified by the one
		// that came with it, and the image's digest is the same.
		return nil, errHere
	case complete:
		return nil, nil
	case !mine:
		return nil, errShared
	}
	if a != nil {
		p.work.Go(func() {
			n.copyLocal(p.ctx, r, p)
			p.settled(r)
		})
	}
	return a, nil
}

// hadAll reports whether the image was complete before its pull.
func (p *pull) hadAll() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.whole
}

// resolved notes what the header says, and tells of it, once.
func (p *pull) resolved(img *bundle.Image) {
	p.note(img)
	p.mu.Lock()
	first := !p.told
	p.told = true
	p.mu.Unlock()
	if first {
		p.happened(api.Resolved, nil)
	}
}

// note begins the record of the image.
func (p *pull) note(img *bundle.Image) {
	p.mu.Lock()
	first := p.image == nil
	if first {
		p.digest = img.Manifest.Digest.String()
		p.image = &image{
			Version:  imageVersion,
			Ref:      p.ref.name,
			Platform: p.req.Platform,
			Plain:    p.req.PlainHTTP,
			Digest:   img.Manifest.Digest,
			Manifest: img.Manifest.Bytes,
			Config:   img.Config.Bytes,
			ChainID:  img.ChainID,
			Created:  time.Now().UTC(),

			Entrypoint: p.req.Entrypoint,
			Args:       p.req.Args,
			NoStartup:  p.req.NoStartup,
		}
	}
	p.mu.Unlock()
	if first {
		p.stageImage()
	}
}

// rootfsOf finds the rootfs of an image, or makes it: then made is the placement
// to mount it by.
func (p *pull) rootfsOf(img *bundle.Image, t *toc.TOC) (r *rootfs, made placement, err error) {
	n := p.n
	n.layout.Lock()
	defer n.layout.Unlock()
	if err := n.clearBroken(img.ChainID); err != nil {
		return nil, nil, err
	}
	n.mu.Lock()
	if r = n.rootfs[img.ChainID]; r != nil {
		if !r.rec.Complete && r.rec.TOC != img.TOCDigest {
			n.mu.Unlock()
			return nil, nil, errorf(api.CodeConflict, "the server now describes rootfs %s by TOC %s, what is here of it came by %s: remove its images with `foil rm` and pull again",
				img.ChainID, img.TOCDigest, r.rec.TOC)
		}
		if f := r.filling; f != nil && f != p && f.unclaimed() {
			// Nobody may ever claim it: this one goes on with what it has made.
			n.withdraw(f)
			f.stop(errUnclaimed)
		}
		if !r.rec.Complete && r.filling == nil {
			r.filling = p
		}
		p.use(r)
		for _, c := range r.rec.Arenas {
			if other := n.arenaLocked(c); other != nil {
				p.use(other)
			}
		}
		// One that is not mounted is being made, or was kept for its arena only.
		again, mine := !r.mounted && r.isReady(), r.filling == p
		n.mu.Unlock()
		p.setRootfs(r)
		if mine {
			p.handOver()
			err = n.fits(r)
		}
		if err == nil && again {
			err = n.mount(r)
		}
		return r, nil, err
	}
	n.mu.Unlock()
	if t == nil {
		return nil, nil, fmt.Errorf("pull %s: the server sent no TOC of rootfs %s, which is not here", p.ref, img.ChainID)
	}
	r, made, err = n.createRootfs(img, t, p)
	if err != nil {
		return nil, nil, err
	}
	if err := n.fits(r); err != nil {
		n.discard(r)
		return nil, nil, err
	}
	shared := r.rec.Contents
	if r.arena != nil {
		shared -= r.arena.Layout().ContentBytes()
	}
	n.metrics.reused.WithLabelValues("shared").Add(float64(shared))
	n.mu.Lock()
	n.rootfs[img.ChainID] = r
	p.use(r)
	n.mu.Unlock()
	p.setRootfs(r)
	return r, made, nil
}

// handOver has the reads that wait on the rootfs which p fills wait by p: what they
// need comes soon then. It is called when p fills the rootfs, and when its fetch has
// begun, whichever is later.
func (p *pull) handOver() {
	p.mu.Lock()
	r, f := p.rootfs, p.fetch
	p.mu.Unlock()
	if r == nil || f == nil {
		return
	}
	p.n.mu.Lock()
	defer p.n.mu.Unlock()
	if r.filling != p {
		return
	}
	for w := range r.waiting {
		if w.by != f {
			w.stop(fetch.ErrAnother)
		}
	}
}

func (p *pull) setRootfs(r *rootfs) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.rootfs = r
}

// clearBroken makes way for a rootfs in the place of one that cannot be served.
// Called with Node.layout held.
func (n *Node) clearBroken(chain digest.Digest) error {
	n.mu.Lock()
	r := n.rootfs[chain]
	if r == nil || r.broken == nil || !r.isReady() {
		n.mu.Unlock()
		return nil
	}
	in := fmt.Sprintf("rootfs %s cannot be served: %v", chain, r.broken)
	for _, c := range n.containers {
		if c.ChainID == chain {
			n.mu.Unlock()
			return errorf(api.CodeCorrupt, "%s; remove container %s with `foil rm --force %s` and pull again", in, c.ID, c.ID)
		}
	}
	borrowers := n.borrowersLocked(r)
	if len(borrowers) > 0 && (!r.rec.Complete || r.contents == nil) {
		user := borrowers[0].rec.ChainID.String()
		for _, img := range n.images {
			if img.ChainID == borrowers[0].rec.ChainID {
				user = img.Ref
			}
		}
		n.mu.Unlock()
		return errorf(api.CodeCorrupt, "%s; image %s uses contents in its arena: remove that with `foil rm %s`, and pull both again", in, user, user)
	}
	if n.holds[chain] > 0 {
		n.mu.Unlock()
		return errorf(api.CodeCorrupt, "%s; containerd uses it: remove its containers and images there, and pull again", in)
	}
	if r.users > 0 {
		n.mu.Unlock()
		return errorf(api.CodeCorrupt, "%s; it is in use just now: pull again in a moment", in)
	}
	mounted := r.mounted
	n.mu.Unlock()
	if mounted {
		if err := n.unmount(r); err != nil {
			return errorf(api.CodeCorrupt, "%s; and it is in use: %w", in, err)
		}
	}
	if r.inUse() {
		return errorf(api.CodeCorrupt, "%s; and a container that the daemon does not know uses it: end it, and pull again", in)
	}
	switch ok, err := n.becomeLender(n.ctx, r, borrowers); {
	case err != nil:
		return errorf(api.CodeCorrupt, "%s; and it cannot be put out of the way: %w", in, err)
	case !ok:
		return errorf(api.CodeCorrupt, "%s; it is in use just now: pull again in a moment", in)
	}
	if len(borrowers) == 0 {
		n.drop(r)
	}
	return nil
}

// mount makes the mount of a rootfs that this pull laid out, and then brings
// over what other arenas hold of it. Of a pull that nobody has claimed yet,
// claimed says whether somebody does; else it is nil.
func (p *pull) mount(r *rootfs, claimed <-chan bool) {
	n := p.n
	err := n.mountRootfs(r)
	n.at("mounted")
	if err == nil && claimed != nil && !<-claimed {
		close(r.ready)
		return
	}
	if err == nil {
		err = p.commit()
		n.at("committed")
	}
	if err != nil {
		n.mu.Lock()
		r.broken = err
		n.mu.Unlock()
		p.mu.Lock()
		p.mountErr = err
		p.mu.Unlock()
		p.stop(err)
	}
	close(r.ready)
	if err != nil {
		return
	}
	p.warmUp(r)
	n.copyLocal(p.ctx, r, p)
	p.settled(r)
}

// stageImage begins to write the image's record: that it is on the disk is waited
// for when everything else is ready.
func (p *pull) stageImage() {
	n, img := p.n, p.image
	n.mu.Lock()
	if old := n.images[img.Ref]; old != nil && old.Digest == img.Digest {
		img.Created = old.Created
	}
	n.mu.Unlock()
	var file staged
	var err error
	written := make(chan struct{})
	p.work.Go(func() {
		defer close(written)
		file, err = n.stageImage(img)
	})
	p.record = func() (staged, error) {
		<-written
		return file, err
	}
}

// dropRecord removes the record of an image that was not committed.
func (p *pull) dropRecord() {
	p.mu.Lock()
	committed := p.committed
	p.mu.Unlock()
	if p.record == nil || committed {
		return
	}
	if file, err := p.record(); err == nil {
		file.drop()
	}
}

// commit records the image: from now on its reference names this rootfs.
func (p *pull) commit() error {
	n := p.n
	p.mu.Lock()
	img, done := p.image, p.committed
	p.mu.Unlock()
	if done {
		return nil
	}
	record, err := p.record()
	if err == nil {
		err = record.put()
	}
	if err != nil {
		return err
	}
	p.work.Go(func() {
		if err := syncDir(filepath.Dir(record.path)); err != nil {
			n.log.Warn("make the record of an image durable", "ref", img.Ref, "error", err)
		}
	})
	n.mu.Lock()
	n.touch(img)
	n.images[img.Ref] = img
	n.mu.Unlock()
	p.mu.Lock()
	p.committed = true
	p.mu.Unlock()
	n.metrics.mount.Observe(time.Since(p.begun).Seconds())
	p.happened(api.Mounted, nil)
	return nil
}

// finish makes a rootfs durable and complete, and takes its arena from behind
// the gate. Everything of it has arrived.
func (n *Node) finish(ctx context.Context, r *rootfs) error {
	n.mu.Lock()
	a, complete := r.arena, r.rec.Complete
	var lenders []*rootfs // that are incomplete themselves
	for _, c := range r.rec.Arenas {
		if other := n.arenaLocked(c); c != r.id() && (other == nil || !other.rec.Complete && other.lender == nil) {
			lenders = append(lenders, other)
		}
	}
	n.mu.Unlock()
	if complete {
		return nil
	}
	what := func(err error) error { return fmt.Errorf("make rootfs %s durable: %w", r.rec.ChainID, err) }
	if a != nil {
		if err := a.Sync(ctx); err != nil {
			return what(err)
		}
	}
	// What it uses in place must survive a power cut as well, and be found
	// again after it.
	for _, other := range lenders {
		if other == nil {
			continue // lentAbsent says so
		}
		n.mu.Lock()
		b := other.arena
		n.mu.Unlock()
		if b != nil {
			if err := b.Sync(ctx); err != nil {
				return what(err)
			}
		}
		if err := other.syncFiles(); err != nil {
			return what(err)
		}
	}
	if len(lenders) > 0 {
		if err := n.lentAbsent(r, nil); err != nil {
			n.mu.Lock()
			r.broken = err
			n.mu.Unlock()
			return err
		}
	}
	if err := errors.Join(r.syncFiles(), syncFile(r.path("meta.erofs")), syncDir(filepath.Dir(r.dir))); err != nil {
		return what(err)
	}
	n.at("synced")
	rec := r.rec
	rec.Complete = true
	if err := r.save(&rec, writeFileAtomic); err != nil {
		return what(err)
	}
	n.at("recorded")
	n.mu.Lock()
	r.rec.Complete = true
	learning := r.learning
	n.mu.Unlock()
	n.keepWarm(r)
	if learning.underway() {
		// Only the gate sees what it reads.
		n.work.Go(func() {
			<-learning.done
			n.layout.Lock()
			n.mu.Lock()
			here := n.rootfs[r.rec.ChainID] == r && r.arena != nil
			n.mu.Unlock()
			if here {
				n.release(r)
			}
			n.layout.Unlock()
			n.passGate()
		})
		return nil
	}
	n.release(r)
	n.passGate()
	return nil
}

// release takes a complete rootfs from behind the gate.
func (n *Node) release(r *rootfs) {
	if err := n.retire(r); err != nil {
		// It is complete all the same, and every read of it is allowed.
		n.log.Warn("take a complete arena from behind the gate; reads of it go through the daemon until it is restarted", "rootfs", r.rec.ChainID, "error", err)
	}
}

// retire takes a complete arena from behind the gate. It is closed when nobody
// reads it any more through its own descriptor.
func (n *Node) retire(r *rootfs) error {
	n.mu.Lock()
	a := r.arena
	n.mu.Unlock()
	if a != nil {
		if err := n.gate.Release(r.name()); err != nil {
			return err
		}
	}
	n.at("released")
	n.mu.Lock()
	defer n.mu.Unlock()
	r.retired, r.arena, r.present = a, nil, nil
	if r.users == 0 {
		r.closeRetired()
	}
	return nil
}

// syncFiles makes the files durable without which the arena would be of no use.
func (r *rootfs) syncFiles() error {
	return errors.Join(syncFile(r.path("toc")), syncFile(r.path("placement")), syncFile(r.path("contents")), syncFile(r.path("rootfs.json")), syncDir(r.dir))
}

// lentAbsent returns an error unless every content that r uses in place is where
// it was placed. have is r's TOC and placement, read when nil.
func (n *Node) lentAbsent(r *rootfs, have *restored) error {
	for i, c := range r.rec.Arenas {
		if c == r.id() {
			continue
		}
		other := n.arenaOf(c)
		n.mu.Lock()
		var holds func(off, size int64) bool
		var contents *contents
		if other != nil && other.contents != nil && (other.broken == nil || other.rec.Complete) {
			holds, contents = other.holder(), other.contents
		}
		n.mu.Unlock()
		if holds == nil {
			return errorf(api.CodeCorrupt, "rootfs %s, which holds some contents of rootfs %s, is gone or damaged: remove the image with `foil rm` and pull it again", c, r.rec.ChainID)
		}
		if have == nil {
			var err error
			if have, err = r.read(); err != nil {
				return err
			}
		}
		if absent := lent(have, i, contents, holds); absent > 0 {
			return errorf(api.CodeCorrupt, "rootfs %s, which holds some contents of rootfs %s, lacks %d of them: remove the image with `foil rm` and pull it again", c, r.rec.ChainID, absent)
		}
	}
	return nil
}

// lent returns how many of the contents that are placed in arena i, which is
// that of other, are not there.
func lent(have *restored, i int, other *contents, holds func(off, size int64) bool) (absent int) {
	t := have.toc
	here := have.place.in(i)
	id := func(c int32) *segment.ID { return &t.Contents[c].ID }
	segment.Sort(here, id)
	absent = len(here)
	other.join(here, id, func(c int32, off int64, piece bool) {
		if !piece && holds(off, t.Contents[c].Size) {
			absent--
		}
	})
	return absent
}

func syncFile(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return errors.Join(fmt.Errorf("sync %s: %w", path, err), f.Close())
	}
	return f.Close()
}

// copyLocal fills r's arena with the segments that other arenas hold inside
// contents that are not the same: what stayed of a large file that changed. The
// server does not send them.
func (n *Node) copyLocal(ctx context.Context, r *rootfs, p *pull) {
	n.mu.Lock()
	a := r.arena
	others := make([]*rootfs, 0, len(p.used))
	for other := range p.used {
		if other != r && other.contents != nil {
			others = append(others, other)
		}
	}
	n.mu.Unlock()
	if a == nil {
		return
	}
	l := a.Layout()
	want := make([]int32, 0, l.Segments())
	for i := range l.Segments() {
		if s := l.Segment(i); !s.ID.IsHole() && !a.HasSegment(i) {
			want = append(want, int32(i))
		}
	}
	if len(want) == 0 || len(others) == 0 {
		return
	}
	ids := make([]segment.ID, l.Segments())
	for _, i := range want {
		ids[i] = l.Segment(int(i)).ID
	}
	id := func(i int32) *segment.ID { return &ids[i] }
	segment.Sort(want, id)
	buf := make([]byte, segment.MaxLength)
	for _, other := range others {
		n.mu.Lock()
		holds, source := other.holder(), other.reader()
		n.mu.Unlock()
		var err error
		other.contents.join(want, id, func(i int32, off int64, _ bool) {
			s := l.Segment(int(i))
			if err != nil || ctx.Err() != nil || a.HasSegment(int(i)) || !holds(off, int64(s.Length)) {
				return
			}
			if _, err = source.ReadAt(buf[:s.Length], off); err == nil {
				err = a.WriteSegment(int(i), buf[:s.Length])
			}
			if err == nil {
				n.metrics.reused.WithLabelValues("copied").Add(float64(s.Length))
			}
		})
		if err = errors.Join(err, source.Close()); err != nil {
			n.log.Warn("copy segments from another arena; what is missing is pulled", "from", other.rec.ChainID, "to", r.rec.ChainID, "error", err)
		}
	}
}
