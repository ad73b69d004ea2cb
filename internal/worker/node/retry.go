package node

import (
	"errors"
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/fetch"
)

// What becomes of an image on which containers can start when its pull fails:
// nobody asks for it again. containerd has its snapshots, and believes that it is
// here. So the daemon goes on by itself.
//
// A pull that a new daemon goes on with tries for Options.GiveUp before reads
// fail: after a boot there may be no network yet, and a server that is restarted
// is back in a moment. When a pull has failed reads fail at once, and it is begun
// again after a pause, which doubles with each failure that brought nothing. A read
// of what is absent ends the pause, and so does a container that is made of the
// image; either not sooner than wantedRetry after the failure. A server that says
// when it wants to be asked again (fetch.Asked) is not asked before.
const (
	firstRetry = 10 * time.Second
	lastRetry  = 5 * time.Minute
	// wantedRetry is the least pause.
	wantedRetry = 5 * time.Second
	// anotherTry is the pause between attempts to begin of a pull that goes on.
	anotherTry = time.Second
)

// tryOn reports, after a pause, whether a pull that goes on with an image, and
// failed with err before its header came, is to try once more.
func (p *pull) tryOn(err error) bool {
	p.mu.Lock()
	headed := p.image != nil
	p.mu.Unlock()
	asked := fetch.Asked(err)
	if !p.goesOn || headed || p.ctx.Err() != nil || time.Since(p.begun)+asked >= p.n.opts.GiveUp {
		return false
	}
	switch asError(err).Code {
	case api.CodeUnavailable, api.CodeUnsupported: // nobody answers, or something else
	default:
		return false
	}
	p.n.log.Info("the pull of an image cannot go on yet", "ref", p.ref, "error", err)
	return p.n.pauseIn(p.ctx.Done(), max(asked, min(anotherTry, p.n.opts.GiveUp)))
}

// pauseIn reports whether a pause passed before done was closed.
func (n *Node) pauseIn(done <-chan struct{}, pause time.Duration) bool {
	timer := time.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-done:
		return false
	}
}

// lacks reports whether containers can start on an image, or could before a
// reboot, and nobody brings what it lacks. Called with Node.mu held.
func (n *Node) lacks(ref string, manifest digest.Digest) *image {
	img := n.images[ref]
	if img == nil || img.Digest != manifest {
		return nil
	}
	if r := n.rootfs[img.ChainID]; r != nil && (r.rec.Complete || r.broken != nil || r.filling != nil) {
		return nil
	}
	return img
}

// retry is a pull that failed, and what becomes of it. Guarded by Node.mu.
type retry struct {
	pause time.Duration // the last one
	asked time.Duration // how long the server asks not to be asked; 0: it does not say
	since time.Time     // when it began
	waits bool          // it lasts
	now   chan struct{} // closed by who wants its end; nil then
}

// retryLater has a pull that failed with err begun again after a pause. moved says
// that it brought something.
func (n *Node) retryLater(ref string, manifest digest.Digest, moved bool, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	t := n.retries[ref]
	if n.closing || t != nil && t.waits || n.lacks(ref, manifest) == nil {
		return
	}
	if t == nil {
		t = &retry{}
		n.retries[ref] = t
	}
	if moved || t.pause == 0 {
		t.pause = n.opts.firstRetry / 2
	}
	now := make(chan struct{})
	t.pause, t.asked = min(2*t.pause, lastRetry), fetch.Asked(err)
	t.since, t.waits, t.now = time.Now(), true, now
	pause := max(t.pause, t.asked)
	n.log.Info("the pull of an image is tried again later", "ref", ref, "in", pause)
	n.work.Go(func() {
		timer := time.NewTimer(pause)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-now:
		case <-n.ctx.Done():
			return
		}
		n.retryNow(ref, manifest, t)
	})
}

// retryNow begins a pull again whose pause is over. Reads wait until it has failed
// again.
func (n *Node) retryNow(ref string, manifest digest.Digest, t *retry) {
	n.mu.Lock()
	t.waits, t.now = false, nil
	img := n.lacks(ref, manifest)
	var chain digest.Digest
	switch {
	case n.retries[ref] != t: // the image was removed
		img = nil
	case img == nil:
		delete(n.retries, ref)
	default:
		chain = img.ChainID
		n.readsWait(chain)
	}
	n.mu.Unlock()
	if img == nil {
		return
	}
	if p := n.goOn([]*image{img}, false); p != nil {
		_ = p.wait(n.ctx)
	}
	// Most often the pull has seen to that. But it may have been of another image,
	// to which the tag has moved, or may not have begun.
	n.mu.Lock()
	defer n.mu.Unlock()
	n.unlessFilled(chain)
}

// readsWait ends that reads of what a rootfs lacks fail: its pull is about to be
// begun. Called with Node.mu held.
func (n *Node) readsWait(chain digest.Digest) {
	if r := n.rootfs[chain]; r != nil && r.filling == nil && r.arena != nil {
		r.arena.Resume()
	}
}

// unlessFilled has reads of what a rootfs lacks fail unless somebody brings it.
// Called with Node.mu held.
func (n *Node) unlessFilled(chain digest.Digest) {
	r := n.rootfs[chain]
	if n.closing || r == nil || r.arena == nil || r.filling != nil || r.rec.Complete || r.arena.Failure() != nil {
		return
	}
	for ref, img := range n.images {
		if p := n.pulls[ref]; img.ChainID == chain && p != nil && !p.ended() {
			return
		}
	}
	r.arena.Fail(errNobody)
}

// errNobody is what reads fail with of what nobody brings.
var errNobody = errors.New("nothing brings what it lacks: pull the image again")

// wanted is called when somebody reads what a rootfs lacks while no pull fills it.
// If reads of it fail, because its pull has, the next try begins at once, and this
// read waits for it; but not so soon that it would ask a server that is away for
// every read.
func (n *Node) wanted(r *rootfs) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if r.arena == nil || r.arena.Failure() == nil || n.rootfs[r.rec.ChainID] != r {
		return
	}
	for ref, img := range n.images {
		if img.ChainID == r.rec.ChainID && n.tryNow(ref, n.opts.wantedRetry) {
			return
		}
	}
}

// tryNow ends the pause before the next try of an image's pull, and reports whether
// it has, unless there is none, it has lasted for less than least, or the server asked
// for more. Called with Node.mu held.
func (n *Node) tryNow(ref string, least time.Duration) bool {
	t, img := n.retries[ref], n.images[ref]
	if t == nil || t.now == nil || img == nil || n.closing || n.removing[ref] || time.Since(t.since) < max(least, t.asked) {
		return false
	}
	n.readsWait(img.ChainID)
	close(t.now)
	t.now = nil
	return true
}
