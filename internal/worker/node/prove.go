package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/containers"
	"hydrofoil.dev/foil/internal/worker/credentials"
	"hydrofoil.dev/foil/internal/worker/images"
	"hydrofoil.dev/foil/internal/worker/origin"
	"hydrofoil.dev/foil/internal/worker/proof"
	"hydrofoil.dev/foil/internal/worker/prover"
	"hydrofoil.dev/foil/internal/worker/pull"
	"hydrofoil.dev/foil/internal/worker/rootfs"
	"hydrofoil.dev/foil/internal/worker/store"
)

func (n *Node) newProver() *prover.Prover {
	return prover.New(prover.Options{
		Store: n.store, Images: n.images, Names: n, Warn: n.Warn, Logger: n.log,
		Server: func(img *images.Image, shown credentials.Credential, layers prover.Layers) proof.Server {
			return &layerServer{n, img, shown, layers}
		},
		Busy:   n.busy,
		Others: n.others.Wanted,
		Calm:   n.opts.ProveCalm,
		Count:  func(result string) { n.metrics.proofs.WithLabelValues(result).Inc() },
	})
}

// busy reports whether a pull runs, and with it whatever starts on its image.
func (n *Node) busy() bool {
	for _, p := range n.pulls.List() {
		if !p.Ended() {
			return true
		}
	}
	return false
}

// completed has an image proven that a pull has made complete.
func (n *Node) completed(ref string, shown credentials.Credential) {
	if !n.opts.noProofs {
		n.prover.Add(ref, shown)
	}
}

// policy says what has to be known of a rootfs before a container of an image may start on it, and why.
func (n *Node) policy(r *store.Rootfs, image string) (policy origin.Policy, why string) {
	registry := origin.Of(image)
	policy = n.opts.Policies.Of(registry)
	if policy != "" {
		return policy, "--policy says so of " + registry
	}
	if weak := r.Record().Weak; weak != "" {
		return origin.Proven, weak
	}
	return origin.Served, "its server was authenticated"
}

// mustProve reports whether a rootfs is still to be proven before a container of an image may start on it, and why.
func (n *Node) mustProve(r *store.Rootfs, image string) (must bool, why string) {
	if r.Proof() == rootfs.Proven {
		return false, ""
	}
	policy, why := n.policy(r, image)
	return policy == origin.Proven, why
}

// mayStart returns an error if no new container may start on a rootfs. Where an image is to be proven first it waits
// for that.
func (n *Node) mayStart(ctx context.Context, r *store.Rootfs, image string, w containers.Waiting) error {
	if img := n.images.Get(image); img != nil && r.Lying(img.Digest) != "" {
		return notLayers(image, r.Lying(img.Digest))
	}
	must, why := n.mustProve(r, image)
	if !must {
		return store.MayStart(r, image, n.prover.State(r).Why, n.opts.ProveWithin)
	}
	n.log.Info("a container waits until its image is proven", "ref", image, "proof", n.prover.State(r), "reason", why)
	if p := n.pulls.Get(image); p != nil {
		p.Whole()
	}
	err := n.awaitFirst(ctx, r, image, w)
	if img := n.images.Get(image); err == nil && img != nil && r.Lying(img.Digest) != "" {
		return notLayers(image, r.Lying(img.Digest)) // that was found out meanwhile
	}
	if errors.Is(err, context.Canceled) {
		err = errGone
	}
	if err != nil {
		err = api.Errorf(api.AsError(err).Code, "image %s starts when it is proven (%s), and is %s: %w", image, why, n.standing(r, image), err)
		n.log.Warn("no container starts on an image that is not proven", "ref", image, "error", err)
	}
	return err
}

var errGone = &api.Error{Code: api.CodeUnavailable, Message: "whoever asked for the container gave up; the proof goes on"}

// awaitFirst waits until an image is complete, and proven.
func (n *Node) awaitFirst(ctx context.Context, r *store.Rootfs, image string, w containers.Waiting) error {
	if p := n.pulls.Get(image); p != nil {
		if err := p.WaitWith(ctx, w.Interval, w.Emit); err != nil {
			return cmp.Or(context.Cause(ctx), err)
		}
	}
	return n.prover.Await(ctx, r.Key(), n.tellProof(r, image, w))
}

// tellProof tells who waits of a proof's states, as events: of each layer, and at intervals. That it has come to nothing
// is an error, and no event.
func (n *Node) tellProof(r *store.Rootfs, image string, w containers.Waiting) func(prover.State) error {
	if w.Emit == nil {
		return nil
	}
	layer, last := -1, time.Time{}
	return func(s prover.State) error {
		soon := s.Layer == layer && (w.Interval == 0 || time.Since(last) < w.Interval)
		if s.Phase == prover.Failed || s.Phase == prover.Unproven || s.Phase != prover.Proven && soon {
			return nil
		}
		layer, last = s.Layer, time.Now()
		ev := api.Event{Ref: image, Time: time.Now()}
		if p := n.pulls.Get(image); p != nil {
			ev = p.Snapshot()
		}
		ev.Event, ev.Proof = api.Proving, s.Progress(r.ContentBytes())
		if s.Phase == prover.Proven {
			ev.Event = api.Proven
		}
		return w.Emit(ev)
	}
}

// standing says how far a rootfs is on its way to being proven, for people.
func (n *Node) standing(r *store.Rootfs, image string) string {
	if p := n.pulls.Get(image); p != nil && !r.Complete() {
		return fmt.Sprintf("%d of %d bytes here", r.Here(), r.ContentBytes())
	}
	return n.prover.State(r).String()
}

func notLayers(image, why string) error {
	return api.Errorf(api.CodeCorrupt, "image %s is not what its layers make: %s", image, why)
}

// Proof says how the proof of a rootfs stands.
func (n *Node) Proof(key origin.Key) string { return n.prover.State(n.store.Get(key)).String() }

// firstWithin is how long containerd waits for a proof before it is told to ask again.
const firstWithin = time.Minute

var errFirst = &api.Error{Code: api.CodeUnavailable, Message: "that takes longer than a minute, and goes on: ask again; foil status shows how far it is"}

// MayStart returns an error if no new container may start on a rootfs: it cannot be served, or was not proven in time.
// It may wait for a proof for a while.
func (n *Node) MayStart(ctx context.Context, key origin.Key) error {
	leave, err := n.enter()
	if err != nil {
		return err
	}
	defer leave()
	ctx, cancel := context.WithTimeoutCause(ctx, firstWithin, errFirst)
	defer cancel()
	r := n.store.Get(key)
	if r == nil {
		return nil // whoever mounts it says so
	}
	if err := r.Broken(); err != nil {
		return api.Errorf(api.CodeCorrupt, "image %s cannot be served: %w", n.Image(key), err)
	}
	name := n.Image(key)
	for _, img := range n.images.Of(key) {
		if r.Lying(img.Digest) == "" {
			name = img.Ref
			break
		}
	}
	return n.mayStart(ctx, r, name, containers.Waiting{})
}

// AwaitProof waits until a rootfs is complete, has it proven now, and waits for that.
func (n *Node) AwaitProof(ctx context.Context, key origin.Key) error {
	ctx, leave, err := n.during(ctx)
	if err != nil {
		return err
	}
	defer leave()
	r := n.store.Get(key)
	if r == nil {
		return api.Errorf(api.CodeNotFound, "the image was removed meanwhile")
	}
	return n.awaitFirst(ctx, r, n.Image(key), containers.Waiting{})
}

// Prove has the rootfs of an image proven now, and waits for it: see prover.Prover.Await.
func (n *Node) Prove(ctx context.Context, name string, emit func(api.VerifyEvent) error) error {
	ctx, leave, err := n.during(ctx)
	if err != nil {
		return err
	}
	defer leave()
	img, r, release, err := n.lookup(name)
	if err != nil {
		return err
	}
	release() // what fails is put aside
	total := r.ContentBytes()
	event := func(s prover.State) api.VerifyEvent {
		return api.VerifyEvent{Proof: s.String(), Layer: s.Layer, Layers: s.Layers, Checked: total * int64(s.Percent) / 100, Total: total}
	}
	err = n.prover.Await(ctx, r.Key(), func(s prover.State) error { return emit(event(s)) })
	if why := r.Lying(img.Digest); why != "" {
		return notLayers(img.Ref, why) // whatever other images of the rootfs are
	}
	if err != nil {
		return err
	}
	ev := event(n.prover.StateOf(img))
	ev.Checked, ev.Done = total, true
	return emit(ev)
}

// proofs lists the images whose proof is on the way, came to nothing, or failed.
func (n *Node) proofs() (list []api.ProofStatus) {
	for _, img := range n.images.List() {
		switch s := n.prover.StateOf(img.Image); s.Phase {
		case prover.Proving, prover.Unproven, prover.Failed:
			list = append(list, api.ProofStatus{Ref: img.Ref, Proof: s.String()})
		}
	}
	return list
}

// layerServer is the server of an image, asked for what its proof needs.
type layerServer struct {
	n      *Node
	img    *images.Image
	shown  credentials.Credential
	layers prover.Layers
}

func (s *layerServer) ask(ctx context.Context, path string, layer int, runs []bundle.ContentRun) (proof.Sections, error) {
	req := s.n.pulls.About(s.img.Ref, s.shown)
	req.Platform = s.img.Platform
	a, err := s.n.pulls.Layer(ctx, req, s.img.Digest.String(), path, layer, runs)
	if err != nil {
		return nil, err
	}
	return a, nil
}

// Recipe implements proof.Server.
func (s *layerServer) Recipe(ctx context.Context, layer int) (proof.Sections, error) {
	return s.ask(ctx, bundle.RecipePath, layer, nil)
}

// Contents implements proof.Server.
func (s *layerServer) Contents(ctx context.Context, layer int, runs []bundle.ContentRun) (proof.Sections, error) {
	return s.ask(ctx, bundle.ContentsPath, layer, runs)
}

// blobStall is how long a blob may bring no byte while one is waited for.
const blobStall = time.Minute

var errBlobStall = &api.Error{Code: api.CodeUnavailable, Message: "the registry has sent no byte of the blob for a minute"}

// Blob implements proof.Server.
func (s *layerServer) Blob(ctx context.Context, layer int) (io.ReadCloser, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	timer := time.AfterFunc(blobStall, func() { cancel(errBlobStall) })
	body, err := s.n.openBlob(ctx, s.img.Ref, s.layers[layer], s.shown)
	timer.Stop()
	if err != nil {
		cancel(nil)
		return nil, s.refused(err)
	}
	return &blob{ReadCloser: body, of: s, ctx: ctx, cancel: cancel, timer: timer}, nil
}

// refused says why a registry may have refused a blob.
func (s *layerServer) refused(err error) error {
	if isDenied(err) && s.shown == (credentials.Credential{}) {
		return fmt.Errorf("%w: %s", err, pull.Forgotten)
	}
	return err
}

type blob struct {
	io.ReadCloser // it asks the registry when it is first read
	of            *layerServer
	ctx           context.Context
	cancel        context.CancelCauseFunc
	timer         *time.Timer
	once          sync.Once
}

// Read implements io.Reader.
func (b *blob) Read(p []byte) (int, error) {
	b.timer.Reset(blobStall)
	n, err := b.ReadCloser.Read(p)
	b.timer.Stop()
	if err != nil && err != io.EOF && b.ctx.Err() != nil {
		err = context.Cause(b.ctx)
	}
	return n, b.of.refused(err)
}

// Close implements io.Closer.
func (b *blob) Close() (err error) {
	b.once.Do(func() {
		b.timer.Stop()
		b.cancel(nil)
		err = b.ReadCloser.Close()
	})
	return err
}
