package node

import (
	"context"
	"errors"
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/runner"
)

// Header is what is known of an image as soon as its bundle has begun, before the
// TOC has come. All bytes
// are those that their digests name.
type Header struct {
	Name     string // HOST/REPOSITORY@DIGEST, of the manifest: what Hold takes
	Manifest bundle.Blob
	Chosen   *bundle.Blob // the index that names Manifest, if the reference names that
	Config   bundle.Blob
}

// early is a pull that was begun for its header. Its stream is held where the
// header ends until somebody pulls the image by the digest of its manifest, and
// then has this pull. What arrives meanwhile is bounded by the stream's receive
// window. A rootfs that is not here is laid out and mounted while containerd
// stores manifest and config, which takes as long: when the image is claimed its
// mount is there. If nobody claims it, it is removed with the pull: no image
// names it.
type early struct {
	headed  chan struct{} // closed when header is set
	header  *Header
	claimed chan struct{} // closed, under Node.mu, by who takes the pull over
	anew    bool          // it has been tried again since; run's
}

const (
	// earlyFor is how long such a pull is held. containerd asks for manifest and
	// config, both from memory, and then prepares the first layer.
	earlyFor = 10 * time.Second
	// mostEarly bounds how many are held; the oldest goes.
	mostEarly = 8
)

// errUnclaimed ends an early pull that nobody took over.
var errUnclaimed = errors.New("only the image's header was wanted")

// Header asks the server of an image what its reference names, and begins the
// pull: one request for both. A reference with a digest is asked for as well, so
// that it is the server who says what may be pulled.
//
// Errors: those of a pull. None of them is tried again.
func (n *Node) Header(ctx context.Context, req api.PullRequest) (*Header, error) {
	r, err := parseRef(req.Ref)
	if err != nil {
		return nil, err
	}
	leave, err := n.enter()
	if err != nil {
		return nil, err
	}
	defer leave()
	// containerd's shim starts containers with it.
	n.work.Go(new(runner.Runner).Warm)
	p := n.newPull(r, req)
	p.early = &early{headed: make(chan struct{}), claimed: make(chan struct{})}
	n.work.Go(p.run)
	over := make(chan error, 1)
	n.work.Go(func() { over <- p.wait(ctx) })
	select {
	case <-p.early.headed:
		return p.early.header, nil
	case err := <-over:
		select {
		case <-p.early.headed: // both at once
			return p.early.header, nil
		default:
		}
		p.stop(errUnclaimed)
		if err != nil {
			return nil, err
		}
		return nil, p.failure()
	}
}

// failure is why a pull has failed: an *api.Error, and what it came from.
func (p *pull) failure() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.err == nil {
		return errUnclaimed
	}
	return &failure{asError(p.err), p.err}
}

type failure struct {
	told  *api.Error
	cause error
}

func (f *failure) Error() string   { return f.told.Error() }
func (f *failure) Unwrap() []error { return []error{f.told, f.cause} }

// announce tells of the header of an early pull, while the TOC is on its way: who
// has asked has something to do with it.
//
// Errors: errUnclaimed when there is nothing for the pull to bring.
func (p *pull) announce(img *bundle.Image) error {
	e := p.early
	if e == nil {
		return nil
	}
	select {
	case <-e.headed:
		return nil // another stream of the same pull
	default:
	}
	n := p.n
	name := p.ref.host + "/" + p.ref.repository + "@" + img.Manifest.Digest.String()
	header := &Header{Name: name, Manifest: img.Manifest, Chosen: img.Chosen, Config: img.Config}
	n.mu.Lock()
	known := n.images[name]
	running := n.pulls[name]
	if known != nil && n.rootfs[known.ChainID] != nil && n.rootfs[known.ChainID].rec.Complete || running != nil && !running.ended() {
		n.mu.Unlock()
		e.header = header
		close(e.headed)
		return errUnclaimed
	}
	// The image's name is the one by which containerd's snapshotter pulls.
	p.ref.name, p.ref.reference = name, img.Manifest.Digest.String()
	if old := n.early[name]; old != nil {
		old.stop(errUnclaimed)
	}
	if len(n.early) >= mostEarly {
		n.dropEarliest()
	}
	n.early[name] = p
	// The server answers: if a pull of the image waits for that, it goes on with this one.
	n.tryNow(name, 0)
	n.mu.Unlock()
	e.header = header
	close(e.headed)
	return nil
}

// layOut makes the rootfs of an image that nobody has claimed, unless there is
// one, and mounts it in the background. The caller tells then by the channel
// whether the image is claimed. Without a rootfs that was made the channel is nil;
// why, is found again by who claims the image.
func (p *pull) layOut(img *bundle.Image, t *toc.TOC) (*rootfs, chan<- bool) {
	n := p.n
	n.mu.Lock()
	skip := n.rootfs[img.ChainID] != nil || !p.unclaimed()
	n.mu.Unlock()
	if skip {
		return nil, nil
	}
	r, made, err := p.rootfsOf(img, t)
	if err != nil || made == nil {
		n.log.Debug("the rootfs of an image is not made before it is claimed", "ref", p.ref, "error", err)
		return nil, nil
	}
	p.note(img)
	p.laid(r, t, made)
	claimed := make(chan bool, 1)
	p.work.Go(func() { p.mount(r, claimed) })
	return r, claimed
}

// anew reports whether a pull that was claimed when its header had only begun to
// come, and then failed, is to try again: before it was claimed it tried nothing
// twice.
func (p *pull) anew() bool {
	p.mu.Lock()
	headed := p.image != nil
	p.mu.Unlock()
	if p.unclaimed() || p.early == nil || p.early.anew || headed || p.ctx.Err() != nil {
		return false
	}
	p.early.anew = true
	return true
}

// await waits until an early pull is claimed.
func (p *pull) await(ctx context.Context) error {
	n, e := p.n, p.early
	timer := time.NewTimer(n.opts.earlyFor)
	defer timer.Stop()
	select {
	case <-e.claimed:
		return nil
	case <-timer.C:
	case <-ctx.Done():
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.withdraw(p)
	if !p.unclaimed() {
		return nil
	}
	return errUnclaimed
}

// withdraw keeps an early pull from being claimed. Called with Node.mu held.
func (n *Node) withdraw(p *pull) {
	if n.early[p.ref.name] == p {
		delete(n.early, p.ref.name)
	}
}

// dropEarliest ends the early pull that has waited longest. Called with Node.mu
// held.
func (n *Node) dropEarliest() {
	var first *pull
	for _, p := range n.early {
		if first == nil || p.begun.Before(first.begun) {
			first = p
		}
	}
	delete(n.early, first.ref.name)
	first.stop(errUnclaimed)
}

// claim returns the early pull of an image, if there is one, which is now a pull
// like any other. Called with Node.mu held.
func (n *Node) claim(name string) *pull {
	p := n.early[name]
	if p == nil {
		return nil
	}
	delete(n.early, name)
	if p.ctx.Err() != nil || p.hasFailed() {
		return nil // it is about to end
	}
	n.pulls[name] = p
	close(p.early.claimed)
	return p
}

// unclaimed reports whether a pull is, or was, for a header only.
func (p *pull) unclaimed() bool {
	if p.early == nil {
		return false
	}
	select {
	case <-p.early.claimed:
		return false
	default:
		return true
	}
}

// Digest is what the reference names: the index, or the manifest.
func (h *Header) Digest() digest.Digest {
	if h.Chosen != nil {
		return h.Chosen.Digest
	}
	return h.Manifest.Digest
}
