package pull

import (
	"errors"
	"syscall"
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/backoff"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/credentials"
	"hydrofoil.dev/foil/internal/worker/images"
	"hydrofoil.dev/foil/internal/worker/origin"
	"hydrofoil.dev/foil/internal/worker/remote"
	"hydrofoil.dev/foil/internal/worker/store"
)

// A pull that fails is tried again in two ways. Package fetch has resumed its
// streams before that, for Options.GiveUp.
//
// While it runs, by again:
//
//	the disk was full                     when something was evicted
//	a new daemon goes on with it, and     after a second, or what the server asks
//	nobody has answered yet               for, until Options.GiveUp: after a boot
//	                                      there may be no network yet
//	it was claimed when it had failed     once, at once: before it was claimed it
//	before its header                     tried nothing twice
//
// When it has ended, by retryLater: an image on which containers can start is
// tried again, since nobody else asks for it: containerd has its snapshots, and
// believes that it is here. Reads fail at once, and it is begun again after a
// pause, which doubles with each failure that brought nothing. A read of what is
// absent ends the pause, and so does a container that is made of the image; either
// not sooner than WantedRetry after the failure. A server that says when it wants to
// be asked again (remote.Asked) is not asked before.
const (
	firstRetry = 10 * time.Second
	lastRetry  = 5 * time.Minute
	// WantedRetry is the least pause.
	WantedRetry = 5 * time.Second
	// answerPause is the pause between attempts while nobody answers.
	answerPause = time.Second
)

// again reports whether a pull that failed with err is to try once more, now.
func (p *Pull) again(err error) bool {
	p.mu.Lock()
	headed, mountErr := p.image != nil, p.mountErr
	p.mu.Unlock()
	switch {
	case p.ctx.Err() != nil || mountErr != nil:
		return false
	case isAny(syscall.ENOSPC, syscall.EDQUOT)(err):
		return p.madeRoom(err)
	case headed:
		return false
	case p.resumed && p.awaitAnswer(err):
		return true
	case p.claim != nil && p.Claimed() && !p.claim.tried:
		p.claim.tried = true
		return true
	}
	return false
}

// madeRoom evicts something for a pull that failed because the disk was full, and
// reports whether it has.
func (p *Pull) madeRoom(err error) bool {
	p.leases.End()
	if !p.s.opts.MakeRoom(1) {
		return false
	}
	p.s.log.Info("the disk was full, and something was evicted: the pull goes on", "ref", p.ref, "error", err)
	// Each attempt costs a round trip.
	if short, ok := errors.AsType[*store.Shortage](err); ok {
		for {
			d, err := p.s.store.Space()
			if err != nil || d.Left() >= short.Need || !p.s.opts.MakeRoom(1) {
				break
			}
		}
	}
	return true
}

// awaitAnswer reports, after a pause, whether a pull that nobody answered is to try
// once more.
func (p *Pull) awaitAnswer(err error) bool {
	asked, giveUp := remote.Asked(err), p.s.opts.GiveUp
	if time.Since(p.begun)+asked >= giveUp {
		return false
	}
	switch AsError(err).Code {
	case api.CodeUnavailable, api.CodeUnsupported: // nobody answers, or something else
	default:
		return false
	}
	p.s.log.Info("the pull of an image cannot go on yet", "ref", p.ref, "error", err)
	return backoff.Wait(p.ctx, max(asked, min(answerPause, giveUp))) == nil
}

// makeRoom evicts until what is here and what is on its way fits, or nothing is
// left that may go.
func (s *Puller) makeRoom() {
	for s.opts.MakeRoom(0) {
	}
}

// retry is a pull that failed, and is to be begun again. Guarded by Puller.mu.
type retry struct {
	shown    credentials.Credential // by the pull that failed
	failures int                    // since it brought something
	wake     *store.Wake            // of the pause that lasts; nil: none does
}

func (t *retry) end() {
	if t.wake != nil {
		t.wake.End()
		t.wake = nil
	}
}

// retryLater has the pull of an image that failed with err begun again after a pause.
// brought says that it brought something, shown what it was begun with: the next try shows the same.
func (s *Puller) retryLater(img *images.Image, shown credentials.Credential, brought bool, err error) {
	if s.lacks(img.Ref, img.Digest) == nil {
		return
	}
	asked := remote.Asked(err)
	s.mu.Lock()
	t := s.retries[img.Ref]
	if s.closing || t != nil && t.wake != nil {
		s.mu.Unlock()
		return
	}
	if t == nil {
		t = &retry{}
		s.retries[img.Ref] = t
	}
	if brought {
		t.failures = 0
	}
	t.failures++
	t.shown = shown
	wake := store.NewWake(asked)
	t.wake = wake
	pause := max(backoff.Backoff{First: s.opts.FirstRetry, Most: lastRetry}.Pause(t.failures), asked)
	s.work.Go(func() {
		timer := time.NewTimer(pause)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-wake.C():
		case <-s.ctx.Done():
			return
		}
		s.retryNow(img.Ref, img.Digest, t)
	})
	s.mu.Unlock()
	if r := s.store.Get(img.Rootfs); r != nil {
		r.WakeBy(wake)
	}
	s.log.Info("the pull of an image is tried again later", "ref", img.Ref, "in", pause)
}

// retryNow begins a pull again whose pause is over. Reads wait until it has failed
// again.
func (s *Puller) retryNow(ref string, manifest digest.Digest, t *retry) {
	img := s.lacks(ref, manifest)
	s.mu.Lock()
	t.end()
	shown := t.shown
	mine := s.retries[ref] == t // else the image was removed
	if mine && img == nil {
		delete(s.retries, ref)
	}
	s.mu.Unlock()
	if !mine || img == nil {
		return
	}
	if r := s.store.Get(img.Rootfs); r != nil {
		r.Resume()
	}
	if p := s.goOn(img, false, shown); p != nil {
		_ = p.Wait(s.ctx)
	}
	// Most often the pull has seen to that. But it may have been of another image,
	// to which the tag has moved, or may not have begun.
	s.failUnpulled(img.Rootfs)
}

// endRetry forgets that the pull of an image had failed.
func (s *Puller) endRetry(ref string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if t := s.retries[ref]; t != nil {
		t.end()
		delete(s.retries, ref)
	}
}

// TryNow ends the pause before the next try of an image's pull, unless there is none,
// it has lasted for less than least, or the server asked for more.
func (s *Puller) TryNow(ref string, least time.Duration) {
	img := s.images.Get(ref)
	if img == nil {
		return
	}
	s.mu.Lock()
	var wake *store.Wake
	if t := s.retries[ref]; t != nil && !s.closing && !s.blocked[ref] {
		wake = t.wake
	}
	s.mu.Unlock()
	if wake == nil || !wake.Fire(least) {
		return
	}
	if r := s.store.Get(img.Rootfs); r != nil {
		r.Resume()
	}
}

// lacks returns an image on which containers can start, or could before a reboot, if
// nobody brings what it lacks; else nil.
func (s *Puller) lacks(ref string, manifest digest.Digest) *images.Image {
	img := s.images.Get(ref)
	if img == nil || img.Digest != manifest {
		return nil
	}
	if r := s.store.Get(img.Rootfs); r != nil && (r.Complete() || r.Broken() != nil || r.Filler() != nil) {
		return nil
	}
	return img
}

// errNobody is what reads fail with of what nobody brings.
var errNobody = errors.New("nothing brings what it lacks: pull the image again")

// failUnpulled has reads of what a rootfs lacks fail unless somebody brings it.
func (s *Puller) failUnpulled(key origin.Key) {
	r := s.store.Get(key)
	if r == nil || s.ctx.Err() != nil {
		return
	}
	for _, img := range s.images.Of(key) {
		if s.Running(img.Ref) {
			return
		}
	}
	r.Fail(errNobody)
}

// GoOn starts the pulls of images that are not complete, by digest: a tag may
// have moved. resumed is as for Start.
func (s *Puller) GoOn(list []*images.Image, resumed bool) {
	for _, img := range list {
		s.goOn(img, resumed, credentials.Credential{})
	}
}

// goOn is GoOn for one, which shows what it did before; nothing: what there is now. It returns the pull, nil if
// that could not be started.
func (s *Puller) goOn(img *images.Image, resumed bool, shown credentials.Credential) *Pull {
	s.log.Info("going on with the pull of an image", "ref", img.Ref, "digest", img.Digest)
	p, err := s.Start(s.ctx, api.PullRequest{
		Ref: img.Ref, Platform: img.Platform, PlainHTTP: img.Plain, Credential: shown,
		Entrypoint: img.Entrypoint, Args: img.Args, NoStartup: img.NoStartup,
	}, How{Manifest: img.Digest, Resumed: resumed, Admitted: true})
	if err != nil {
		s.log.Warn("go on with the pull of an image", "ref", img.Ref, "error", err)
		return nil
	}
	return p
}
