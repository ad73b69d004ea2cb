package catalog

import (
	"context"
	"iter"

	"github.com/opencontainers/go-digest"
)

// nobody is a repository's name that none has.
const nobody = ""

// Hide returns a view of inner for somebody who may not know what a repository holds: as of
// one that there is not. inner is asked as often, for a name that none has, so that time does not tell
// either. It changes nothing.
func Hide(inner Repositories) Repositories { return hidden{inner} }

type hidden struct{ inner Repositories }

func (h hidden) Blob(ctx context.Context, _ string, d digest.Digest) (Blob, error) {
	return h.inner.Blob(ctx, nobody, d)
}

func (h hidden) Exists(ctx context.Context, _ string, d digest.Digest) (Blob, error) {
	return h.inner.Exists(ctx, nobody, d)
}

func (h hidden) Blobs(ctx context.Context, _ string, ds []digest.Digest) ([]Blob, error) {
	return h.inner.Blobs(ctx, nobody, ds)
}

func (h hidden) Manifest(ctx context.Context, _ string, d digest.Digest) (Manifest, error) {
	return h.inner.Manifest(ctx, nobody, d)
}

func (h hidden) Referrers(ctx context.Context, _ string, d digest.Digest, artifactType string, after digest.Digest) iter.Seq2[Referrer, error] {
	return h.inner.Referrers(ctx, nobody, d, artifactType, after)
}

func (h hidden) Tag(ctx context.Context, _, tag string) (digest.Digest, error) {
	return h.inner.Tag(ctx, nobody, tag)
}

func (h hidden) Tags(ctx context.Context, _, after string, limit int) ([]string, error) {
	return h.inner.Tags(ctx, nobody, after, limit)
}

func (hidden) AnyBlob(context.Context, digest.Digest) (Blob, error) { return Blob{}, ErrNotFound }

func (hidden) Holders(context.Context, digest.Digest) ([]string, error) { return nil, nil }

func (hidden) ListRepositories(context.Context, string, int) ([]string, error) { return nil, nil }

func (hidden) LinkBlob(context.Context, string, Blob) error { return ErrNotFound }

func (hidden) UnlinkBlob(context.Context, string, digest.Digest) error { return ErrNotFound }

func (hidden) PutManifest(context.Context, string, Manifest, ...string) error { return ErrNotFound }

func (hidden) DeleteManifest(context.Context, string, digest.Digest) error { return ErrNotFound }

func (hidden) DeleteTag(context.Context, string, string) error { return ErrNotFound }
