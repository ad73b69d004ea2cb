package sqlite

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/catalog/sqlite/database"
)

// Copy makes the file to, which must not be there, the catalog in the file from as one transaction sees it. A server may use
// from meanwhile.
func Copy(ctx context.Context, from, to string) error { return database.Copy(ctx, from, to) }

// OpenCopy opens a copy of the catalog in the file from, as one transaction sees it. A server may use from meanwhile. The
// copy is in the directory for temporary files, and gone when it is closed.
func OpenCopy(ctx context.Context, from string) (c *Catalog, end func() error, err error) {
	dir, err := os.MkdirTemp("", "foil-catalog-")
	if err != nil {
		return nil, nil, err
	}
	to := filepath.Join(dir, "catalog.db")
	if err = Copy(ctx, from, to); err == nil {
		c, err = Open(ctx, to)
	}
	if err != nil {
		return nil, nil, errors.Join(err, os.RemoveAll(dir))
	}
	return c, func() error { return errors.Join(c.Close(), os.RemoveAll(dir)) }, nil
}

// EachKey calls fn for the keys of all objects that cannot be made again: blobs, and packs.
func (c *Catalog) EachKey(ctx context.Context, fn func(key string) error) error {
	for _, query := range []string{
		`SELECT DISTINCT digest FROM blobs WHERE digest > ? ORDER BY digest LIMIT 1000`,
		`SELECT key FROM packs WHERE key > ? ORDER BY key LIMIT 1000`,
	} {
		for after := ""; ; {
			page, err := c.db.Strings(ctx, query, after)
			if err != nil {
				return fmt.Errorf("list keys: %w", database.Known(err))
			}
			if len(page) == 0 {
				break
			}
			for _, key := range page {
				after = key
				if d := digest.Digest(key); d.Validate() == nil {
					key = catalog.BlobKey(d)
				}
				if err := fn(key); err != nil {
					return err
				}
			}
		}
	}
	return nil
}
