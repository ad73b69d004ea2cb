package node

import (
	"context"
	"fmt"
	"net/url"
	"os"
	"slices"
	"sync"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/containers"
	"hydrofoil.dev/foil/internal/worker/images"
	"hydrofoil.dev/foil/internal/worker/origin"
	"hydrofoil.dev/foil/internal/worker/pull"
	"hydrofoil.dev/foil/internal/worker/remote"
	"hydrofoil.dev/foil/internal/worker/runner"
	"hydrofoil.dev/foil/internal/worker/store"
)

// Pull implements api.Service: it starts the pull of an image, or joins the one
// that runs, and emits its events.
func (n *Node) Pull(ctx context.Context, req api.PullRequest, emit func(api.Event) error) error {
	if req.Container != "" {
		leave, err := n.enter()
		if err != nil {
			return err
		}
		leave = sync.OnceFunc(leave)
		defer leave()
		return n.containers.Pull(ctx, req, emit, leave)
	}
	p, err := n.pulls.Start(ctx, req, pull.How{})
	if err != nil {
		return err
	}
	var first *store.Rootfs // that is to be proven before a container starts
	why := ""
	err = p.Follow(ctx, req, func(ev api.Event) error {
		if r := p.Rootfs(); ev.Event == api.Complete && r != nil {
			var policy origin.Policy
			if policy, why = n.policy(r, p.Ref()); policy == origin.Proven {
				first, ev.Proof = r, n.prover.State(r).Progress(r.ContentBytes())
			}
		}
		return emit(ev)
	})
	if err != nil || first == nil {
		return err
	}
	w := containers.Waiting{Interval: req.Interval, Emit: emit}
	if err := n.prover.Await(ctx, first.Key(), n.tellProof(first, p.Ref(), w)); err != nil {
		return api.Errorf(api.AsError(err).Code, "image %s is here, and starts when it is proven (%s): %w", p.Ref(), why, err)
	}
	return nil
}

// Header asks the server of an image what its reference names, and begins the pull:
// see pull.Puller.Header.
func (n *Node) Header(ctx context.Context, req api.PullRequest) (*pull.Header, error) {
	leave, err := n.enter()
	if err != nil {
		return nil, err
	}
	defer leave()
	// containerd's shim starts containers with it.
	n.work.Go(new(runner.Runner).Warm)
	return n.pulls.Header(ctx, req)
}

// PullReport returns the running pull of an image, or its last one.
func (n *Node) PullReport(_ context.Context, name string) (*api.PullReport, error) {
	name, err := api.NormalRef(name)
	if err != nil {
		return nil, err
	}
	leave, err := n.enter()
	if err != nil {
		return nil, err
	}
	defer leave()
	p := n.pulls.Get(name)
	if p == nil {
		return nil, api.Errorf(api.CodeNotFound, "no pull of %s since this daemon began: `foil status` lists those that there are", name)
	}
	return p.Report(), nil
}

// Images lists what is here, by reference.
func (n *Node) Images(context.Context) ([]api.Image, error) {
	list := make([]api.Image, 0)
	for _, img := range n.images.List() {
		r := n.store.Get(img.Rootfs)
		v := api.Image{
			Ref:     img.Ref,
			Digest:  img.Digest.String(),
			ChainID: img.ChainID.String(),
			Rootfs:  img.Rootfs.Encoded(),
			State:   stateOf(r),
			Why:     img.Why,
			Created: img.Created,
			Made:    img.Made,
		}
		if r != nil {
			v.Proof = n.prover.StateOf(img.Image).String()
			policy, why := n.policy(r, img.Ref)
			v.Policy, v.PolicyWhy = string(policy), why
			v.Files, v.ContentTotal, v.ContentHere = r.Inodes(), r.ContentBytes(), r.Here()
			if err := r.Broken(); err != nil {
				v.Why = err.Error()
			}
		}
		list = append(list, v)
	}
	return list, nil
}

// stateOf says how an image is whose rootfs is r, or nil: complete, pulling or broken.
func stateOf(r *store.Rootfs) string {
	switch {
	case r == nil || r.Broken() != nil:
		return "broken"
	case r.Complete():
		return "complete"
	case r.Mount().Mounted():
		return "pulling"
	}
	return "broken"
}

// Status says what the daemon is doing.
func (n *Node) Status(context.Context) (*api.Status, error) {
	s := &api.Status{
		Version: n.opts.Version,
		PID:     os.Getpid(),
		Started: n.started,
		Gate:    n.gateName(),
		Keeper:  n.keeper.PID(),
	}
	n.mu.Lock()
	s.Warnings = slices.Clone(n.warnings)
	n.mu.Unlock()
	for _, c := range n.connections() {
		w, ok := c.Kept()
		s.Servers = append(s.Servers, api.ServerStatus{URL: c.Base(), Warm: ok, WarmUp: w.Bytes, Rate: w.Rate})
	}
	for _, p := range n.pulls.List() {
		s.Pulls = append(s.Pulls, p.Status())
	}
	s.Proofs = n.proofs()
	slices.SortFunc(s.Pulls, func(a, b api.PullStatus) int { return a.Time.Compare(b.Time) })
	return s, nil
}

// CreateContainer implements api.Service.
func (n *Node) CreateContainer(ctx context.Context, req api.ContainerRequest) (*api.Container, error) {
	leave, err := n.enter()
	if err != nil {
		return nil, err
	}
	defer leave()
	return n.containers.Create(ctx, req)
}

// Containers implements api.Service.
func (n *Node) Containers(context.Context) ([]api.Container, error) {
	return n.containers.List(), nil
}

// ContainerStarted implements api.Service.
func (n *Node) ContainerStarted(_ context.Context, id string, s api.Start) error {
	if err := n.containers.Started(id, s); err != nil {
		return err
	}
	if !s.Ready.IsZero() && s.Probe {
		n.metrics.ready.Observe(max(0, s.Ready.Sub(s.Started).Seconds()))
	}
	return nil
}

// RemoveContainer implements api.Service.
func (n *Node) RemoveContainer(ctx context.Context, id string) error {
	leave, err := n.enter()
	if err != nil {
		return err
	}
	defer leave()
	return n.containers.Remove(ctx, id)
}

// TraceStatus implements api.Service.
func (n *Node) TraceStatus(_ context.Context, id string) (*api.TraceStatus, error) {
	return n.containers.TraceStatus(id)
}

// Trace implements api.Service.
func (n *Node) Trace(ctx context.Context, id string, req api.TraceRequest) (*api.TraceResult, error) {
	leave, err := n.enter()
	if err != nil {
		return nil, err
	}
	defer leave()
	return n.containers.Trace(ctx, id, req)
}

// Verify compares every local byte of an image with its digest: see
// store.Store.Verify.
func (n *Node) Verify(ctx context.Context, name string, emit func(api.VerifyEvent) error) error {
	ctx, leave, err := n.during(ctx)
	if err != nil {
		return err
	}
	defer leave()
	img, r, release, err := n.lookup(name)
	if err != nil {
		return err
	}
	defer release()
	return n.store.Verify(ctx, r, func(ev api.VerifyEvent) error {
		if ev.Done {
			ev.Proof = n.prover.StateOf(img).String()
		}
		return emit(ev)
	})
}

// lookup returns an image and its rootfs, kept from being removed until release.
func (n *Node) lookup(name string) (img *images.Image, r *store.Rootfs, release func(), err error) {
	name, err = api.NormalRef(name)
	if err != nil {
		return nil, nil, nil, err
	}
	img = n.images.Get(name)
	if img == nil {
		return nil, nil, nil, api.Errorf(api.CodeNotFound, "no image %s here: `foil images` lists them", name)
	}
	r, done := n.store.Use(img.Rootfs)
	if r == nil {
		return nil, nil, nil, api.Errorf(api.CodeCorrupt, "image %s: its rootfs is gone: pull it again", name)
	}
	return img, r, func() {
		done()
		n.store.Collect()
	}, nil
}

// RemoveImage forgets a reference, and stops its pull. Its rootfs goes when
// nothing else names it, and its arena when no other rootfs has contents in it.
func (n *Node) RemoveImage(ctx context.Context, name string) error {
	name, err := api.NormalRef(name)
	if err != nil {
		return err
	}
	leave, err := n.enter()
	if err != nil {
		return err
	}
	defer leave()
	// From here on no pull of it begins, and no container on it: who makes one names
	// the image first, and looks here then.
	running, unblock, err := n.pulls.Block(name)
	if err != nil {
		return err
	}
	defer unblock()
	img := n.images.Get(name)
	switch {
	case img == nil && running == nil:
		return api.Errorf(api.CodeNotFound, "no image %s here: `foil images` lists them", name)
	case img != nil:
		if err := n.removable(img); err != nil {
			return err
		}
	}
	if running != nil {
		running.Stop(pull.ErrRemoved)
		if err := running.Wait(ctx); err != nil {
			return err
		}
		img = n.images.Get(name)
	}
	defer n.prover.Pause()() // it keeps what it proves, and what lends to that
	if err := n.forget(name); err != nil {
		return err
	}
	n.store.Collect()
	if running != nil && img != nil {
		n.pulls.GoOn(n.images.Of(img.Rootfs), true) // whose rootfs the stopped pull was filling
	}
	return nil
}

// removable returns an error when an image is the last one that names a rootfs which
// is used.
func (n *Node) removable(img *images.Image) error {
	for _, other := range n.images.Of(img.Rootfs) {
		if other.Ref != img.Ref && !n.pulls.Blocked(other.Ref) {
			return nil
		}
	}
	if n.Held(img.Rootfs) {
		return api.Errorf(api.CodeConflict, "image %s is used by containerd: remove it there", img.Ref)
	}
	if on := n.ContainersOn(img.Rootfs); len(on) > 0 {
		return api.Errorf(api.CodeConflict, "image %s is used by container %s: remove it first, with `foil rm %s`", img.Ref, on[0], on[0])
	}
	return nil
}

// forget removes an image's record. Its rootfs stays until it is collected.
func (n *Node) forget(name string) error {
	if err := n.images.Remove(name); err != nil {
		return err
	}
	n.pulls.Forget(name)
	return nil
}

// about is the pull that a question about an image would be. An image that is
// here was asked for without TLS before if it was then.
func (n *Node) about(req api.AboutImage) (api.PullRequest, error) {
	name, err := api.NormalRef(req.Ref)
	if err != nil {
		return api.PullRequest{}, err
	}
	p := n.pulls.About(name, req.Credential)
	p.Platform = req.Platform
	p.PlainHTTP = p.PlainHTTP || req.PlainHTTP
	return p, nil
}

// Startup asks an image's server what it has of startup sets.
func (n *Node) Startup(ctx context.Context, req api.AboutImage) (*bundle.StartupReport, error) {
	v := new(bundle.StartupReport)
	return v, n.askStartup(ctx, req, func(c *remote.Client, query url.Values) error {
		return c.Get(ctx, bundle.StartupPath, query, v)
	})
}

// StartupService asks an image's server for one startup set.
func (n *Node) StartupService(ctx context.Context, req api.AboutImage) (*bundle.ServiceReport, error) {
	v := new(bundle.ServiceReport)
	return v, n.askStartup(ctx, req, func(c *remote.Client, query url.Values) error {
		query.Set("service", req.Service)
		return c.Get(ctx, bundle.StartupPath, query, v)
	})
}

// ForgetStartup has an image's server forget startup sets.
func (n *Node) ForgetStartup(ctx context.Context, req api.AboutImage) error {
	return n.askStartup(ctx, req, func(c *remote.Client, query url.Values) error {
		if req.Service != "" {
			query.Set("service", req.Service)
		}
		return c.Delete(ctx, bundle.StartupPath, query)
	})
}

func (n *Node) askStartup(ctx context.Context, req api.AboutImage, fn func(c *remote.Client, query url.Values) error) error {
	leave, err := n.enter()
	if err != nil {
		return err
	}
	defer leave()
	p, err := n.about(req)
	if err != nil {
		return err
	}
	if err := n.pulls.Ask(ctx, p, "", fn); err != nil {
		return pull.AsError(fmt.Errorf("startup sets of %s: %w", p.Ref, err))
	}
	return nil
}

// TOC returns the encoded TOC of an image: what is here, if it is the one that is
// wanted, else the server's.
func (n *Node) TOC(ctx context.Context, req api.AboutImage) ([]byte, error) {
	leave, err := n.enter()
	if err != nil {
		return nil, err
	}
	defer leave()
	p, err := n.about(req)
	if err != nil {
		return nil, err
	}
	_, r, release, err := n.lookup(p.Ref)
	if err == nil {
		defer release()
		if req.TOC == "" || r.TOC().String() == req.TOC {
			return r.EncodedTOC()
		}
	}
	if req.TOC == "" {
		return nil, err
	}
	return n.pulls.TOC(ctx, p, digest.Digest(req.TOC))
}
