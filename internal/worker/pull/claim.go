package pull

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/arena"
	"hydrofoil.dev/foil/internal/worker/store"
)

// Header is what is known of an image as soon as its bundle has begun, before the
// TOC has come. All bytes are those that their digests name.
type Header struct {
	Name     string // HOST/REPOSITORY@DIGEST, of the manifest: what claims the pull
	Manifest bundle.Blob
	Chosen   *bundle.Blob // the index that names Manifest, if the reference names that
	Config   bundle.Blob
}

// Digest is what the reference names: the index, or the manifest.
func (h *Header) Digest() digest.Digest {
	if h.Chosen != nil {
		return h.Chosen.Digest
	}
	return h.Manifest.Digest
}

// claim is of a pull that was begun for its header. Its stream is held where the
// header ends until somebody pulls the image by the digest of its manifest, and
// then has this pull. What arrives meanwhile is bounded by the stream's receive
// window. A rootfs that is not here is laid out and mounted while containerd
// stores manifest and config, which takes as long: when the image is claimed its
// mount is there. If nobody claims it, it is removed with the pull: no image
// names it.
//
// It is worth a request and a round trip of each start by way of containerd (docs/results.md,
// "Through CRI").
type claim struct {
	headed chan struct{} // closed when header is set
	header *Header
	taken  chan struct{} // closed by who takes the pull over
	take   sync.Once
	tried  bool // it has been tried again since; run's
}

const (
	// claimWithin is how long such a pull is held. containerd asks for manifest and
	// config, both from memory, and then prepares the first layer.
	claimWithin = 10 * time.Second
	// mostOffered bounds how many are held; the oldest goes.
	mostOffered = 8
)

// errUnclaimed ends a pull that nobody claimed.
var errUnclaimed = errors.New("only the image's header was wanted")

// Claimed implements store.Filler: of all pulls but those for a header it is true.
func (p *Pull) Claimed() bool {
	if p.claim == nil {
		return true
	}
	select {
	case <-p.claim.taken:
		return true
	default:
		return false
	}
}

// Yield implements store.Filler.
func (p *Pull) Yield() {
	p.s.withdraw(p)
	p.stop(errUnclaimed)
}

// Header asks the server of an image what its reference names, and begins the
// pull: one request for both. A reference with a digest is asked for as well, so
// that it is the server who says what may be pulled.
//
// Errors: those of a pull. None of them is tried again.
func (s *Puller) Header(ctx context.Context, req api.PullRequest) (*Header, error) {
	r, err := ParseRef(req.Ref)
	if err != nil {
		return nil, err
	}
	req.Until = api.Mounted // containerd starts a container then
	p := s.newPull(r, req)
	// Who asks for a header has not been let in by the registry yet. Others'
	// credentials are none of theirs.
	p.shown = req.Credential
	p.claim = &claim{headed: make(chan struct{}), taken: make(chan struct{})}
	if !s.goes(p.run) {
		return nil, ErrStopping
	}
	ended := make(chan error, 1)
	go func() { ended <- p.Wait(ctx) }()
	select {
	case <-p.claim.headed:
		return p.claim.header, nil
	case err := <-ended:
		select {
		case <-p.claim.headed: // both at once
			return p.claim.header, nil
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
func (p *Pull) failure() error {
	err := p.events.why(p)
	if err == nil {
		return errUnclaimed
	}
	return &failure{AsError(err), err}
}

type failure struct {
	told  *api.Error
	cause error
}

func (f *failure) Error() string   { return f.told.Error() }
func (f *failure) Unwrap() []error { return []error{f.told, f.cause} }

// announce tells of the header of a pull that was begun for it, while the TOC is on
// its way: who has asked has something to do with it.
//
// Errors: errUnclaimed when there is nothing for the pull to bring.
func (p *Pull) announce(img *bundle.Image) error {
	c := p.claim
	if c == nil {
		return nil
	}
	select {
	case <-c.headed:
		return nil // another stream of the same pull
	default:
	}
	name := p.ref.Host + "/" + p.ref.Repository + "@" + img.Manifest.Digest.String()
	c.header = &Header{Name: name, Manifest: img.Manifest, Chosen: img.Chosen, Config: img.Config}
	defer close(c.headed)
	if p.s.isHere(name) {
		if here := p.s.images.Get(name); here != nil {
			p.s.store.TellConflict(p.ref.Host, here.Rootfs, img)
		}
		return errUnclaimed
	}
	if p.s.Running(name) {
		return errUnclaimed
	}
	// The image's name is the one by which containerd's snapshotter pulls.
	p.ref.Name, p.ref.Reference = name, img.Manifest.Digest.String()
	p.s.offer(p)
	// The server answers: if a pull of the image waits for that, it goes on with this one.
	p.s.TryNow(name, 0)
	return nil
}

// isHere reports whether an image is complete.
func (s *Puller) isHere(name string) bool {
	img := s.images.Get(name)
	if img == nil {
		return false
	}
	r := s.store.Get(img.Rootfs)
	return r != nil && r.Complete()
}

// offer has a pull that was begun for its header be claimed by its name.
func (s *Puller) offer(p *Pull) {
	s.mu.Lock()
	old := s.offered[p.ref.Name]
	if old == nil && len(s.offered) >= mostOffered {
		for _, o := range s.offered {
			if old == nil || o.begun.Before(old.begun) {
				old = o
			}
		}
		delete(s.offered, old.ref.Name)
	}
	s.offered[p.ref.Name] = p
	s.mu.Unlock()
	if old != nil {
		old.stop(errUnclaimed)
	}
}

// withdraw keeps a pull from being claimed.
func (s *Puller) withdraw(p *Pull) {
	if p.claim == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.offered[p.ref.Name] == p {
		delete(s.offered, p.ref.Name)
	}
}

// claim returns the offered pull of an image, if there is one that may be claimed by how, which is now a pull
// like any other. Called with s.mu held.
func (s *Puller) claim(name string, how How) *Pull {
	p := s.offered[name]
	if p == nil || !how.admits(p) {
		return nil
	}
	delete(s.offered, name)
	if p.ctx.Err() != nil || p.HasFailed() {
		return nil // it is about to end
	}
	s.pulls[name] = p
	p.claim.take.Do(func() { close(p.claim.taken) })
	return p
}

// openUnclaimed opens an image for a pull that may not be claimed yet, and waits
// until it is. done is false when open is to go on as for any other pull.
func (p *Pull) openUnclaimed(ctx context.Context, img *bundle.Image, t *toc.TOC) (_ *arena.Arena, done bool, err error) {
	r, claimed := p.layOutUnclaimed(img, t)
	err = p.awaitClaim(ctx)
	if err == nil {
		p.resolved(img)
	}
	if claimed != nil {
		if err == nil {
			err = p.s.store.Fits(r) // still
		}
		claimed <- err == nil
	}
	if err != nil || claimed == nil {
		return nil, false, err
	}
	return r.Arena(), true, nil
}

// layOutUnclaimed makes the rootfs of an image that nobody has claimed, unless there is
// one, and mounts it in the background. The caller tells then by the channel
// whether the image is claimed. Without a rootfs that was made the channel is nil;
// why, is found again by who claims the image.
func (p *Pull) layOutUnclaimed(img *bundle.Image, t *toc.TOC) (*store.Rootfs, chan<- bool) {
	if p.Claimed() || p.s.store.Find(p.ref.Host, p.named(), img.ChainID, img.TOCDigest) != nil {
		return nil, nil
	}
	r, made, err := p.openRootfs(img, t)
	if err != nil || made == nil {
		p.s.log.Debug("the rootfs of an image is not made before it is claimed", "ref", p.ref, "error", err)
		return nil, nil
	}
	p.note(img)
	p.names(r)
	p.start.LaidOut(r, t, made)
	claimed := make(chan bool, 1)
	p.work.Go(func() { p.mount(r, claimed) })
	return r, claimed
}

// awaitClaim waits until a pull is claimed.
func (p *Pull) awaitClaim(ctx context.Context) error {
	timer := time.NewTimer(p.s.opts.ClaimWithin)
	defer timer.Stop()
	select {
	case <-p.claim.taken:
		return nil
	case <-timer.C:
	case <-ctx.Done():
	}
	p.s.withdraw(p)
	if p.Claimed() {
		return nil
	}
	return errUnclaimed
}
