package snapshotter

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/backoff"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/origin"
	"hydrofoil.dev/foil/internal/worker/pull"
)

// containerd keys snapshots by chain ID alone, and when it has one it asks nobody. So the rootfs that came for an
// image of one registry would serve an image of any other that names the same layers: whoever came first would have
// chosen what runs, and a stranger's image could name layers that it never had. What containerd's own
// unpacker makes is compared with the chain ID, and may serve anybody; a rootfs of ours may once it is proven.
// Until then an image of another origin is refused it:
//
//   - by the mirror, which sees every image that containerd resolves (Claim), also where containerd would not ask
//     for a snapshot;
//   - when a layer is prepared, or something is made on a rootfs.
//
// Where there is no mirror the first cannot be: then only images of one origin, or one group, come lazily at a
// time, and the others by containerd.

// foreign returns an error if r is the rootfs of another origin's image, and is not proven. What has no name, as an
// image that somebody imports or builds here, is of no other registry. Called with mu held.
func (s *Snapshotter) foreign(r *record, image string) error {
	from, to := origin.Of(r.Image), origin.Of(image)
	if image == "" || r.Role != roleRootfs || r.expected || s.opts.Groups.Same(from, to) || r.held != nil && s.opts.Node.Proven(r.held.Rootfs) {
		return nil
	}
	return fmt.Errorf("image %s has the layers of %s, which came from another registry, %s, and is not proven to be these layers: "+
		"remove one of the two images; or, if whoever runs one registry may choose what runs of the other, name both in --origin-group of foil node: %w",
		image, r.Image, from, errdefs.ErrFailedPrecondition)
}

// Claim returns an error if containerd would run an image that it has resolved on the rootfs of another origin's
// that is not proven. It has that one proven, and waits for it for a while.
func (s *Snapshotter) Claim(h *pull.Header) error {
	p, err := layersOf(h.Manifest.Bytes, h.Config.Bytes)
	if err != nil || len(p.chains) == 0 {
		return nil // whoever asks for it is told
	}
	chain := p.chains[len(p.chains)-1]
	s.mu.Lock()
	err = s.claims(h.Name, chain)
	var held origin.Key
	for _, r := range s.records {
		if err != nil && r.Chain == chain && r.held != nil && s.foreign(r, h.Name) != nil {
			held = r.held.Rootfs
		}
	}
	s.mu.Unlock()
	if err == nil || held == "" {
		return err
	}
	ctx, cancel := context.WithTimeoutCause(context.Background(), claimWithin, errClaim)
	defer cancel()
	if why := s.opts.Node.AwaitProof(ctx, held); why != nil {
		return fmt.Errorf("%w; it was waited for just now: %w", err, why)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.claims(h.Name, chain)
}

// claimWithin is how long Claim waits for a proof: containerd, which asks by the mirror, waits 30 s, and asks again.
const claimWithin = 15 * time.Second

var errClaim = fmt.Errorf("it has to arrive whole first, and be proven, which takes longer than %s: ask again; foil images shows how far it is", claimWithin)

// mayStart returns an error if no new container may start on what is made on a snapshot.
func (s *Snapshotter) mayStart(ctx context.Context, parent string) error {
	if parent == "" || s.opts.Node == nil {
		return nil
	}
	ids, err := s.chain(ctx, parent)
	if err != nil {
		return err
	}
	var on []*record
	s.mu.Lock()
	for _, id := range ids {
		if r := s.records[id]; r != nil && r.Role == roleRootfs && r.held != nil {
			on = append(on, r)
		}
	}
	s.mu.Unlock()
	for _, r := range on {
		err := s.rootfsMayStart(ctx, r)
		if err != nil && api.AsError(err).Code == api.CodeCorrupt && s.heal(ctx, r) {
			err = s.rootfsMayStart(ctx, r)
		}
		if err != nil {
			return fmt.Errorf("%w: %w", err, errdefs.ErrFailedPrecondition)
		}
	}
	return nil
}

func (s *Snapshotter) rootfsMayStart(ctx context.Context, r *record) error {
	s.mu.Lock()
	held := r.held
	s.mu.Unlock()
	if held == nil {
		return nil // whoever mounts it says so
	}
	return s.opts.Node.MayStart(ctx, held.Rootfs)
}

// heals is how long it is between two times that an image comes anew. Its server may be honest, or whole, by then; but each time
// costs a whole pull.
var heals = backoff.Backoff{First: 10 * time.Second, Most: 10 * time.Minute}

// heal has an image come anew whose rootfs may start no container, and reports whether it is here. containerd has snapshots of
// its layers, and would ask for no others before somebody removes the image.
func (s *Snapshotter) heal(ctx context.Context, r *record) bool {
	s.mu.Lock()
	wait := time.Now().Before(r.healAt) || s.closed || s.records[r.ID] != r
	if !wait {
		r.healed++
		r.healAt = time.Now().Add(heals.Pause(r.healed))
	}
	s.mu.Unlock()
	if wait {
		return false
	}
	s.log.Warn("no container may start on an image: it comes anew", "image", r.Image)
	ctx, cancel := context.WithTimeout(ctx, s.opts.HeaderTimeout)
	defer cancel()
	held, err := s.opts.Node.Hold(ctx, r.Image)
	if err != nil {
		s.log.Error("an image that no container may start on does not come anew", "image", r.Image, "error", err)
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if held.ChainID != r.Chain || s.records[r.ID] != r || s.closed {
		s.opts.Node.Release(held.Rootfs)
		return false
	}
	s.letGo(r) // not before: containers that run go on
	r.held = held
	return true
}

// claims is Claim for the chain ID of an image. Called with mu held.
func (s *Snapshotter) claims(image string, chain digest.Digest) error {
	for _, r := range s.records {
		if r.Chain != chain {
			continue
		}
		if err := s.foreign(r, image); err != nil {
			return err
		}
	}
	return nil
}

// onForeign returns an error if what is made for an image would lie on a foreign rootfs.
func (s *Snapshotter) onForeign(ctx context.Context, image, parent string) error {
	if parent == "" || image == "" {
		return nil
	}
	ids, err := s.chain(ctx, parent)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, id := range ids {
		if r := s.records[id]; r != nil {
			if err := s.foreign(r, image); err != nil {
				return err
			}
		}
	}
	return nil
}

// Besides reports whether there is a rootfs that Claim could refuse an image.
func (s *Snapshotter) Besides(image string) bool { return s.besides(image) != "" }

// besides returns an image of another origin whose rootfs is not proven; "": there is none.
func (s *Snapshotter) besides(image string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var others []string
	for _, r := range s.records {
		if s.foreign(r, image) != nil {
			others = append(others, r.Image)
		}
	}
	if len(others) == 0 {
		return ""
	}
	return slices.Min(others)
}
