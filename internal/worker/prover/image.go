package prover

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/format/flatten"
	"hydrofoil.dev/foil/internal/kernel"
	"hydrofoil.dev/foil/internal/worker/credentials"
	"hydrofoil.dev/foil/internal/worker/images"
	"hydrofoil.dev/foil/internal/worker/proof"
	"hydrofoil.dev/foil/internal/worker/store"
)

// Layers are the blobs of an image's layers, the lowest first.
type Layers []ocispec.Descriptor

// prove is one try: by each image that names the rootfs, until one says what it is. An image whose documents do not
// fit each other says so of itself only: whoever pushes one that names another image's rootfs does not have that fail.
func (p *Prover) prove(ctx context.Context, r *store.Rootfs, t *task, ref string, shown credentials.Credential) error {
	mounted, err := p.opts.Store.Mounted(r)
	if err != nil {
		return err
	}
	defer mounted.Close()
	var wrong *proof.Failed
	var errs []error
	for _, img := range p.opts.Images.Of(r.Key()) {
		if why := r.Lying(img.Digest); why != "" {
			wrong = &proof.Failed{Why: why, Documents: true}
			continue
		}
		with := credentials.Credential{}
		if img.Ref == ref {
			with = shown
		}
		err := p.by(ctx, r, t, img, with, mounted)
		switch failed, ok := errors.AsType[*proof.Failed](err); {
		case err == nil, ctx.Err() != nil, ok && !failed.Documents:
			return err
		case ok:
			wrong = failed
			p.lies(r, img, failed)
		default:
			errs = append(errs, err)
		}
	}
	switch {
	case len(errs) > 0:
		return errors.Join(errs...)
	case wrong != nil:
		return wrong
	}
	return errors.New("no image names it")
}

// lies has no container start on an image whose config and manifest do not fit each other.
func (p *Prover) lies(r *store.Rootfs, img *images.Image, why *proof.Failed) {
	var named []digest.Digest
	for _, other := range p.opts.Images.Of(r.Key()) {
		named = append(named, other.Digest)
	}
	if err := p.opts.Store.Lying(r, img.Digest, why.Why, named); err != nil {
		p.log.Warn("note what a proof has found out", "ref", img.Ref, "error", err)
	}
	p.tell(r, img.Ref, why)
}

// by proves a rootfs by one image.
func (p *Prover) by(ctx context.Context, r *store.Rootfs, t *task, img *images.Image, shown credentials.Credential, mounted *store.Mounted) error {
	diffIDs, layers, err := documents(img)
	if err != nil {
		return err
	}
	if chain := flatten.ChainID(diffIDs); chain != r.ChainID() {
		return &proof.Failed{Why: fmt.Sprintf("its config's layers have chain ID %s, its server said %s", chain, r.ChainID()), Documents: true}
	}
	at := &seat{ctx: ctx, desk: p.desk, priority: kernel.OwnPriority()}
	defer at.priority.End()
	at.priority.SetLow(!p.isUrgent())
	if err := at.sit(); err != nil {
		return err
	}
	defer at.leave()
	return proof.Run(ctx, proof.Options{
		DiffIDs:   diffIDs,
		Layers:    layers,
		TOC:       mounted.Files.TOC,
		TOCDigest: r.TOC(),
		Server:    server{p.opts.Server(img, shown, layers), at},
		ReadAt:    mounted.ReadAt,
		Meta:      func(ctx context.Context) (bool, error) { return p.opts.Store.SameMeta(ctx, r, mounted.Files) },
		Dir:       store.ProofDir(r),
		Known:     func(d digest.Digest) string { return p.opts.Store.KnownLayer(r, d) },
		Pace:      func(ctx context.Context, n int) error { return p.pace(ctx, at, n) },
		Step:      func(s proof.Step) { p.step(t, s) },
	})
}

// documents returns what an image's config and manifest say of its layers, of which one names the other by its digest.
func documents(img *images.Image) (diffIDs []digest.Digest, layers []ocispec.Descriptor, err error) {
	var m ocispec.Manifest
	var config ocispec.Image
	if err := errors.Join(json.Unmarshal(img.Manifest, &m), json.Unmarshal(img.Config, &config)); err != nil {
		return nil, nil, fmt.Errorf("%w: %w", proof.ErrNoDiffIDs, err)
	}
	for _, d := range []struct {
		want digest.Digest
		b    []byte
	}{{img.Digest, img.Manifest}, {m.Config.Digest, img.Config}} {
		if err := d.want.Validate(); err != nil {
			return nil, nil, err
		}
		if got := d.want.Algorithm().FromBytes(d.b); got != d.want {
			return nil, nil, fmt.Errorf("a document of image %s has digest %s, not %s: its record was damaged; remove it, and pull it again", img.Ref, got, d.want)
		}
	}
	if len(config.RootFS.DiffIDs) == 0 {
		return nil, nil, proof.ErrNoDiffIDs
	}
	return config.RootFS.DiffIDs, m.Layers, nil
}
