package bundles

import (
	"context"
	"errors"
	"fmt"
	"runtime"

	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/identity"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sync/errgroup"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/oci"
	"hydrofoil.dev/foil/internal/server/access"
	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/guard"
	"hydrofoil.dev/foil/internal/server/objects"
)

// Resolved is an image with all that hangs from its reference but its rootfs.
type Resolved struct {
	Repository string
	Reference  string
	Manifest   bundle.Blob
	Chosen     *bundle.Blob // the index it was chosen from, if any
	Config     bundle.Blob
	Image      ocispec.Image // Config's bytes
	ChainID    digest.Digest
	Layers     []Layer // lowest first; each in the repository
}

// Layer is one layer of a resolved image.
type Layer struct {
	Digest    digest.Digest
	DiffID    digest.Digest
	MediaType string
	Size      int64
}

// blobs returns those of the layers.
func (r *Resolved) blobs() []digest.Digest {
	list := make([]digest.Digest, len(r.Layers))
	for i := range r.Layers {
		list[i] = r.Layers[i].Digest
	}
	return list
}

func ref(repository, reference string) string {
	if digest.Digest(reference).Validate() == nil {
		return repository + "@" + reference
	}
	return repository + ":" + reference
}

// resolve finds an image for a request, if its sender may pull it, or what they find who may not: nothing.
// Errors: bundle.Error, *guard.Denied.
func (h *Handler) resolve(ctx context.Context, want bundle.ImageRequest) (*Resolved, error) {
	cat := catalog.Repositories(h.o.Catalog)
	err := h.o.Guard.Check(ctx, access.Pull, want.Repository, want.Reference)
	if guard.Hides(err) {
		cat, err = h.hidden, nil
	}
	if err != nil {
		return nil, err
	}
	return resolve(ctx, cat, h.o.Objects, want, h.held)
}

// resolve finds an image by what its repository holds, and nothing else: a
// digest that another repository holds is not found. heavy reads documents, as Handler.held does.
func resolve(ctx context.Context, cat catalog.Repositories, store objects.Store, want bundle.ImageRequest, heavy func(context.Context, int, func() error) error) (*Resolved, error) {
	r := &Resolved{Repository: want.Repository, Reference: want.Reference}
	d := digest.Digest(want.Reference)
	if d.Validate() != nil {
		var err error
		if d, err = cat.Tag(ctx, want.Repository, want.Reference); err != nil {
			return nil, notFound(err, "there is no such tag; push the image, or check the name")
		}
	}
	m, err := cat.Manifest(ctx, want.Repository, d)
	if err != nil {
		return nil, notFound(err, "there is no such manifest; push the image, or check the name")
	}
	var entry ocispec.Descriptor // of the index
	p := ocispec.Platform{OS: "linux", Architecture: runtime.GOARCH}
	if want.Platform != nil {
		p = *want.Platform
	}
	if oci.IsIndex(m.MediaType) {
		r.Chosen = &bundle.Blob{Digest: m.Digest, MediaType: m.MediaType, Bytes: m.Bytes}
		if err = heavy(ctx, len(m.Bytes), func() error {
			entry, err = choose(m, p)
			return err
		}); err != nil {
			return nil, noBundle("index "+m.Digest.String(), err)
		}
		if m, err = cat.Manifest(ctx, want.Repository, entry.Digest); err != nil {
			return nil, notFound(err, fmt.Sprintf("manifest %s, which its index lists, is not in the repository", entry.Digest))
		}
		if err := oci.Describes(entry, m.MediaType, m.Bytes); err != nil {
			return nil, noBundle("index "+r.Chosen.Digest.String(), err)
		}
	}
	r.Manifest = bundle.Blob{Digest: m.Digest, MediaType: m.MediaType, Bytes: m.Bytes}
	if err := r.resolveManifest(ctx, cat, store, heavy); err != nil {
		return nil, err
	}
	if r.Chosen != nil {
		if err := oci.Fits(entry, &r.Image, p); err != nil {
			return nil, noBundle("index "+r.Chosen.Digest.String(), err)
		}
	}
	return r, nil
}

func (r *Resolved) resolveManifest(ctx context.Context, cat catalog.Repositories, store objects.Store, heavy func(context.Context, int, func() error) error) error {
	about := "manifest " + r.Manifest.Digest.String()
	var manifest *ocispec.Manifest
	err := heavy(ctx, len(r.Manifest.Bytes), func() (err error) {
		manifest, err = oci.ReadManifest(r.Manifest.MediaType, r.Manifest.Bytes)
		return err
	})
	if err != nil {
		return noBundle(about, err)
	}
	c := manifest.Config
	blobs, errs := blobsOf(ctx, cat, r.Repository, append([]ocispec.Descriptor{c}, manifest.Layers...))
	blob, err := blobs[0], errs[0]
	if err != nil {
		return notFound(err, fmt.Sprintf("config %s is not in the repository; push the image again", c.Digest))
	}
	if blob.Size != c.Size {
		return otherSize(about, "config", c, blob.Size)
	}
	b, err := objects.Read(ctx, store, catalog.BlobKey(c.Digest), bundle.MaxManifest)
	if err == nil && c.Digest.Algorithm().FromBytes(b) != c.Digest {
		err = errDamaged
	}
	if isDamage(err) {
		// What is not offered any more is pushed again by the next push.
		err = errors.Join(err, cat.UnlinkBlob(context.WithoutCancel(ctx), r.Repository, c.Digest))
	}
	if err != nil {
		return fmt.Errorf("read config %s: %w", c.Digest, err)
	}
	r.Config = bundle.Blob{Digest: c.Digest, MediaType: c.MediaType, Bytes: b}
	var config *ocispec.Image
	if err := heavy(ctx, len(b), func() (err error) {
		config, err = oci.ReadConfig(manifest, c.MediaType, b)
		return err
	}); err != nil {
		return noBundle(about, err)
	}
	r.Image = *config
	diffIDs := config.RootFS.DiffIDs
	for i, l := range manifest.Layers {
		blob, err := blobs[1+i], errs[1+i]
		if errors.Is(err, catalog.ErrNotFound) && oci.Foreign(l) {
			return unsupported("layer %s is foreign: it is not in the repository, and servers do not fetch what is elsewhere; pull the image the plain way, or push it with that layer (with docker: --allow-nondistributable-artifacts)", l.Digest)
		}
		if err == nil && blob.Size != l.Size {
			return otherSize(about, "layer", l, blob.Size)
		}
		if err != nil {
			return notFound(err, fmt.Sprintf("layer %s is not in the repository; push the image again", l.Digest))
		}
		r.Layers = append(r.Layers, Layer{Digest: l.Digest, DiffID: diffIDs[i], MediaType: l.MediaType, Size: blob.Size})
	}
	r.ChainID = identity.ChainID(diffIDs)
	return nil
}

// blobsOf looks up blobs of a repository; for each there is an error, or nil.
func blobsOf(ctx context.Context, cat catalog.Repositories, repository string, list []ocispec.Descriptor) ([]catalog.Blob, []error) {
	ds, errs := make([]digest.Digest, len(list)), make([]error, len(list))
	for i, l := range list {
		ds[i] = l.Digest
	}
	if blobs, err := cat.Blobs(ctx, repository, ds); err == nil {
		return blobs, errs
	}
	// Which it is, each says; a catalog in front of an upstream may have to ask for it: all at
	// once.
	blobs := make([]catalog.Blob, len(ds))
	var asking errgroup.Group
	asking.SetLimit(16)
	for i, d := range ds {
		asking.Go(func() error {
			blobs[i], errs[i] = cat.Blob(ctx, repository, d)
			return nil
		})
	}
	_ = asking.Wait() // errs has them
	return blobs, errs
}

// choose picks the manifest of an index for a platform.
func choose(m catalog.Manifest, want ocispec.Platform) (ocispec.Descriptor, error) {
	index, err := oci.ReadIndex(m.MediaType, m.Bytes)
	if err != nil {
		return ocispec.Descriptor{}, err
	}
	return oci.Choose(index, want)
}

func platform(p *ocispec.Platform) string {
	s := p.OS + "/" + p.Architecture
	if p.Variant != "" {
		s += "/" + p.Variant
	}
	return s
}

// noBundle says what an image's documents lack for a bundle.
func noBundle(about string, err error) error {
	if isBeyond(err) || errors.Is(err, context.Canceled) {
		return err // nobody has looked
	}
	code := bundle.CodeUnsupported
	if errors.Is(err, oci.ErrNoPlatform) {
		code = bundle.CodeNotFound
	}
	return &bundle.Error{Code: code, Message: fmt.Sprintf("%s: %v", about, err)}
}

func otherSize(about, what string, d ocispec.Descriptor, got int64) error {
	return unsupported("%s: %s %s has %d bytes, and the manifest says %d: push an image that is right", about, what, d.Digest, got, d.Size)
}

func unsupported(format string, args ...any) error {
	return &bundle.Error{Code: bundle.CodeUnsupported, Message: fmt.Sprintf(format, args...)}
}

// notFound says what is missing, if that is what err says and does not say better.
func notFound(err error, message string) error {
	if _, ok := errors.AsType[*bundle.Error](err); ok {
		return err
	}
	if errors.Is(err, catalog.ErrNotFound) {
		return &bundle.Error{Code: bundle.CodeNotFound, Message: message}
	}
	return err
}
