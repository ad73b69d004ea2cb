package node

import (
	"context"
	"errors"
	"io"
	"slices"
	"sync"
	"time"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/worker/api"
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
		Busy:  n.busy,
		Count: func(result string) { n.metrics.proofs.WithLabelValues(result).Inc() },
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

// mayStart returns an error if no new container may start on a rootfs. Where images are to be proven first it waits
// for that.
func (n *Node) mayStart(ctx context.Context, r *store.Rootfs, image string) error {
	registry := origin.Of(image)
	first := slices.Contains(n.opts.ProveFirst, registry) || slices.Contains(n.opts.ProveFirst, "*")
	if first && r.Proof() != rootfs.Proven {
		if p := n.pulls.Get(image); p != nil {
			if err := p.Wait(ctx); err != nil {
				return err
			}
		}
		if err := n.prover.Await(ctx, r.Key(), nil); err != nil {
			return api.Errorf(api.AsError(err).Code, "images of %s start when they are proven (--prove-first), and this one is %s: %w", registry, n.prover.State(r), err)
		}
		return nil
	}
	return store.MayStart(r, image, n.prover.State(r).Why, n.opts.ProveWithin)
}

// Proof says how the proof of a rootfs stands.
func (n *Node) Proof(key origin.Key) string { return n.prover.State(n.store.Get(key)).String() }

// firstWithin is how long containerd waits for a proof before it is told to ask again.
const firstWithin = time.Minute

// MayStart returns an error if no new container may start on a rootfs: it cannot be served, or was not proven in time.
// It may wait for a proof for a while.
func (n *Node) MayStart(ctx context.Context, key origin.Key) error {
	leave, err := n.enter()
	if err != nil {
		return err
	}
	defer leave()
	ctx, cancel := context.WithTimeoutCause(ctx, firstWithin, errors.New("the proof takes longer than a minute: ask again"))
	defer cancel()
	r := n.store.Get(key)
	if r == nil {
		return nil // whoever mounts it says so
	}
	if err := r.Broken(); err != nil {
		return api.Errorf(api.CodeCorrupt, "image %s cannot be served: %w", n.Image(key), err)
	}
	return n.mayStart(ctx, r, n.Image(key))
}

// AwaitProof has a rootfs proven now, and waits for it.
func (n *Node) AwaitProof(ctx context.Context, key origin.Key) error {
	leave, err := n.enter()
	if err != nil {
		return err
	}
	defer leave()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(n.ctx, func() { cancel(pull.ErrStopping) })()
	return n.prover.Await(ctx, key, nil)
}

// Prove has the rootfs of an image proven now, and waits for it: see prover.Prover.Await.
func (n *Node) Prove(ctx context.Context, name string, emit func(api.VerifyEvent) error) error {
	leave, err := n.enter()
	if err != nil {
		return err
	}
	defer leave()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(n.ctx, func() { cancel(pull.ErrStopping) })()
	r, release, err := n.lookup(name)
	if err != nil {
		return err
	}
	release() // what fails is put aside
	total := r.ContentBytes()
	event := func(s prover.State) api.VerifyEvent {
		return api.VerifyEvent{Proof: s.String(), Checked: total * int64(s.Percent) / 100, Total: total}
	}
	if err := n.prover.Await(ctx, r.Key(), func(s prover.State) error { return emit(event(s)) }); err != nil {
		return err
	}
	ev := event(n.prover.State(r))
	ev.Checked, ev.Done = total, true
	return emit(ev)
}

// proofs lists the images whose proof is on the way, came to nothing, or failed.
func (n *Node) proofs() (list []api.ProofStatus) {
	for _, img := range n.images.List() {
		switch s := n.prover.State(n.store.Get(img.Rootfs)); s.Phase {
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
		return nil, err
	}
	return &blob{ReadCloser: body, ctx: ctx, cancel: cancel, timer: timer}, nil
}

type blob struct {
	io.ReadCloser
	ctx    context.Context
	cancel context.CancelCauseFunc
	timer  *time.Timer
	once   sync.Once
}

// Read implements io.Reader.
func (b *blob) Read(p []byte) (int, error) {
	b.timer.Reset(blobStall)
	n, err := b.ReadCloser.Read(p)
	b.timer.Stop()
	if err != nil && err != io.EOF && b.ctx.Err() != nil {
		err = context.Cause(b.ctx)
	}
	return n, err
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
