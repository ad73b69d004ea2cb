package bundles

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"runtime"

	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/identity"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sync/errgroup"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/server/catalog"
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

// Media types of other times that mean the same as OCI's.
const (
	dockerManifest = "application/vnd.docker.distribution.manifest.v2+json"
	dockerList     = "application/vnd.docker.distribution.manifest.list.v2+json"
	dockerConfig   = "application/vnd.docker.container.image.v1+json"
)

func ref(repository, reference string) string {
	if digest.Digest(reference).Validate() == nil {
		return repository + "@" + reference
	}
	return repository + ":" + reference
}

// resolve finds an image by what its repository holds, and nothing else: a
// digest that another repository holds is not found.
func resolve(ctx context.Context, cat catalog.Repositories, store objects.Store, want bundle.ImageRequest) (*Resolved, error) {
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
	if isIndex(m) {
		r.Chosen = &bundle.Blob{Digest: m.Digest, MediaType: m.MediaType, Bytes: m.Bytes}
		if d, err = choose(m, want.Platform); err != nil {
			return nil, err
		}
		if m, err = cat.Manifest(ctx, want.Repository, d); err != nil {
			return nil, notFound(err, fmt.Sprintf("manifest %s, which its index lists, is not in the repository", d))
		}
	}
	if m.MediaType != ocispec.MediaTypeImageManifest && m.MediaType != dockerManifest {
		return nil, unsupported("manifest %s has media type %q, which is no image", m.Digest, m.MediaType)
	}
	r.Manifest = bundle.Blob{Digest: m.Digest, MediaType: m.MediaType, Bytes: m.Bytes}
	return r, r.resolveManifest(ctx, cat, store)
}

func (r *Resolved) resolveManifest(ctx context.Context, cat catalog.Repositories, store objects.Store) error {
	var manifest ocispec.Manifest
	if err := json.Unmarshal(r.Manifest.Bytes, &manifest); err != nil {
		return unsupported("manifest %s: %v", r.Manifest.Digest, err)
	}
	c := manifest.Config
	if c.MediaType != ocispec.MediaTypeImageConfig && c.MediaType != dockerConfig {
		return unsupported("manifest %s has a config of type %q: it is an artifact and no image", r.Manifest.Digest, c.MediaType)
	}
	blobs, errs := blobsOf(ctx, cat, r.Repository, append([]ocispec.Descriptor{c}, manifest.Layers...))
	blob, err := blobs[0], errs[0]
	if err != nil {
		return notFound(err, fmt.Sprintf("config %s is not in the repository; push the image again", c.Digest))
	}
	if blob.Size > bundle.MaxManifest {
		return unsupported("config %s has %d bytes, at most %d", c.Digest, blob.Size, bundle.MaxManifest)
	}
	b, err := readObject(ctx, store, catalog.BlobKey(c.Digest), bundle.MaxManifest)
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
	if err := json.Unmarshal(b, &r.Image); err != nil {
		return unsupported("config %s: %v", c.Digest, err)
	}
	diffIDs := r.Image.RootFS.DiffIDs
	if len(diffIDs) == 0 || len(diffIDs) != len(manifest.Layers) {
		return unsupported("config %s names %d layers, manifest %s %d", c.Digest, len(diffIDs), r.Manifest.Digest, len(manifest.Layers))
	}
	for i, l := range manifest.Layers {
		if err := diffIDs[i].Validate(); err != nil {
			return unsupported("config %s: layer %d: %v", c.Digest, i, err)
		}
		blob, err := blobs[1+i], errs[1+i]
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

func isIndex(m catalog.Manifest) bool {
	return m.MediaType == ocispec.MediaTypeImageIndex || m.MediaType == dockerList
}

// choose picks the first manifest of an index for the platform.
func choose(m catalog.Manifest, want *ocispec.Platform) (digest.Digest, error) {
	var index ocispec.Index
	if err := json.Unmarshal(m.Bytes, &index); err != nil {
		return "", unsupported("index %s: %v", m.Digest, err)
	}
	if want == nil {
		want = &ocispec.Platform{OS: "linux", Architecture: runtime.GOARCH}
	}
	for _, d := range index.Manifests {
		p := d.Platform
		if p != nil && p.OS == want.OS && p.Architecture == want.Architecture && variant(p) == variant(want) {
			return d.Digest, nil
		}
	}
	// A variant that was not asked for is better than nothing.
	for _, d := range index.Manifests {
		if p := d.Platform; p != nil && p.OS == want.OS && p.Architecture == want.Architecture && want.Variant == "" {
			return d.Digest, nil
		}
	}
	return "", &bundle.Error{Code: bundle.CodeNotFound, Message: fmt.Sprintf("its index has nothing for %s; ask for another platform", platform(want))}
}

func variant(p *ocispec.Platform) string {
	if p.Architecture == "arm64" && p.Variant == "" {
		return "v8"
	}
	return p.Variant
}

func platform(p *ocispec.Platform) string {
	s := p.OS + "/" + p.Architecture
	if p.Variant != "" {
		s += "/" + p.Variant
	}
	return s
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

// readObject reads a whole object of at most limit bytes.
func readObject(ctx context.Context, store objects.Store, key string, limit int64) ([]byte, error) {
	size, err := store.Stat(ctx, key)
	if err != nil {
		return nil, err
	}
	if size > limit {
		return nil, fmt.Errorf("object %s has %d bytes, at most %d", key, size, limit)
	}
	r, err := store.Open(ctx, key, 0, -1)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	b := make([]byte, size)
	if _, err := io.ReadFull(r, b); err != nil {
		return nil, fmt.Errorf("object %s: %w", key, err)
	}
	return b, nil
}
