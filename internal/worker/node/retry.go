package node

import (
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/worker/api"
)

// What becomes of an image on which containers can start when its pull fails:
// nobody asks for it again. containerd has its snapshots, and believes that it is
// here. So the daemon goes on by itself.
//
// A pull that a new daemon goes on with tries for Options.GiveUp before reads
// fail: after a boot there may be no network yet, and a server that is restarted
// is back in a moment. When a pull has failed reads fail at once, and it is begun
// again after a pause, which doubles with each failure that brought nothing.
const (
	firstRetry = 10 * time.Second
	lastRetry  = 5 * time.Minute
	// anotherTry is the pause between attempts to begin of a pull that goes on.
	anotherTry = time.Second
)

// tryOn reports, after a pause, whether a pull that goes on with an image, and
// failed with err before its header came, is to try once more.
func (p *pull) tryOn(err error) bool {
	p.mu.Lock()
	headed := p.image != nil
	p.mu.Unlock()
	if !p.goesOn || headed || p.ctx.Err() != nil || time.Since(p.begun) >= p.n.opts.GiveUp {
		return false
	}
	switch asError(err).Code {
	case api.CodeUnavailable, api.CodeUnsupported: // nobody answers, or something else
	default:
		return false
	}
	p.n.log.Info("the pull of an image cannot go on yet", "ref", p.ref, "error", err)
	return p.n.pauseIn(p.ctx.Done(), min(anotherTry, p.n.opts.GiveUp))
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

// retryLater has a pull that failed begun again after a pause. moved says that it
// brought something.
func (n *Node) retryLater(ref string, manifest digest.Digest, moved bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	pause, before := n.retries[ref]
	if n.closing || pause < 0 || n.lacks(ref, manifest) == nil {
		return
	}
	if moved || !before {
		pause = n.opts.firstRetry / 2
	}
	pause = min(2*pause, lastRetry)
	n.retries[ref] = -pause
	n.log.Info("the pull of an image is tried again later", "ref", ref, "in", pause)
	n.work.Go(func() {
		n.pauseIn(n.ctx.Done(), pause)
		n.mu.Lock()
		img := n.lacks(ref, manifest)
		if img != nil {
			n.retries[ref] = pause
		} else {
			delete(n.retries, ref)
		}
		n.mu.Unlock()
		if img != nil {
			n.goOn([]*image{img}, false)
		}
	})
}
