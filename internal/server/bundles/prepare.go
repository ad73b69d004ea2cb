package bundles

import (
	"context"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/bundle"
)

// Prepare does for a manifest of a repository what its first pull would
// otherwise wait for: its rootfs is made, its index and order, and the startup
// sets that it inherits from another version in the repository. The
// error is the one that the pull would get; a manifest that is no image is
// CodeUnsupported.
func (h *Handler) Prepare(ctx context.Context, repository string, manifest digest.Digest) error {
	defer h.o.Readers.Begin()()
	m, err := resolve(ctx, h.o.Catalog, h.o.Objects, bundle.ImageRequest{Repository: repository, Reference: manifest.String()}, h.heavy)
	if err != nil {
		return err
	}
	_, encoded, x, err := h.whole(ctx, m)
	if err != nil {
		return err
	}
	if _, err = h.order(ctx, m, x, encoded); err != nil {
		return err
	}
	return h.sets.Prepare(ctx, m.startupImage(x.TOC()))
}

// Suspect has an image verified, and what is damaged made anew, before it is
// served or prepared the next time. The error is one of Prepare.
func (h *Handler) Suspect(ctx context.Context, repository string, manifest digest.Digest) error {
	defer h.o.Readers.Begin()()
	m, err := resolve(ctx, h.o.Catalog, h.o.Objects, bundle.ImageRequest{Repository: repository, Reference: manifest.String()}, h.heavy)
	if err == nil {
		h.suspect(m)
	}
	return err
}
