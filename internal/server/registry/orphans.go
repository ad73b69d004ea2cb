package registry

import (
	"context"
	"strings"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/server/catalog"
)

// removeOrphans removes the objects of blobs that no repository holds: their
// push or their deletion was cut short by a crash.
func (r *Registry) removeOrphans(ctx context.Context) error {
	return r.opts.Store.List(ctx, "blobs/", func(key string, _ int64) error {
		parts := strings.Split(key, "/")
		d, err := digest.Parse(parts[1] + ":" + parts[len(parts)-1])
		if err != nil || key != catalog.BlobKey(d) {
			return nil // not ours
		}
		// Most objects are held: only the others need the lock.
		if _, err := r.opts.Catalog.AnyBlob(ctx, d); err == nil {
			return nil
		}
		return r.RemoveUnheld(ctx, d)
	})
}
