package sqlite

import (
	"context"
	"database/sql"
	"fmt"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/catalog/sqlite/database"
	"hydrofoil.dev/foil/internal/server/catalog/sqlite/registers"
)

// BlobsAfter returns at most limit blobs after the given one, each once, in byte order of their digests.
func (c *Catalog) BlobsAfter(ctx context.Context, after digest.Digest, limit int) ([]catalog.Blob, error) {
	rows, err := c.db.Read.QueryContext(ctx, `SELECT digest, max(size), max(media_type) FROM blobs WHERE digest > ?
		GROUP BY digest ORDER BY digest LIMIT ?`, after.String(), limit)
	if err != nil {
		return nil, fmt.Errorf("list blobs: %w", database.Known(err))
	}
	defer rows.Close()
	var blobs []catalog.Blob
	for rows.Next() {
		var b catalog.Blob
		if err := rows.Scan(&b.Digest, &b.Size, &b.MediaType); err != nil {
			return nil, fmt.Errorf("list blobs: %w", err)
		}
		blobs = append(blobs, b)
	}
	return blobs, database.Known(rows.Err())
}

// ImageManifest is a manifest of a repository, with its tags.
type ImageManifest struct {
	Repository string
	Tags       []string
	catalog.Manifest
}

// EachManifest calls fn for all manifests of all repositories. fn may ask the catalog.
func (c *Catalog) EachManifest(ctx context.Context, fn func(ImageManifest) error) error {
	for after, last := int64(0), false; !last; {
		var page []catalog.Change
		err := func() error {
			tx, err := c.db.Read.BeginTx(ctx, nil)
			if err != nil {
				return err
			}
			defer tx.Rollback() //nolint:errcheck // it only reads
			page, after, _, last, err = registers.Stages[2].After(ctx, tx, after, "")
			return err
		}()
		if err != nil {
			return fmt.Errorf("list manifests: %w", database.Known(err))
		}
		for _, ch := range page {
			m := ImageManifest{Repository: ch.Repo, Manifest: ch.Manifest}
			m.Tags, err = c.db.Strings(ctx, `SELECT name FROM tags WHERE repo = (SELECT id FROM repositories WHERE name = ?) AND digest = ? ORDER BY name`,
				ch.Repo, ch.Name)
			if err != nil {
				return fmt.Errorf("list tags of %s: %w", ch.Name, database.Known(err))
			}
			if err := fn(m); err != nil {
				return err
			}
		}
	}
	return nil
}

// EachStartupImage calls fn for all images that startup sets are kept of. fn may ask the catalog, and change it.
func (c *Catalog) EachStartupImage(ctx context.Context, fn func(catalog.StartupImage) error) error {
	repo, chain := "", ""
	for {
		page, err := c.images(ctx, `WHERE (repo, chain_id) > (?, ?) ORDER BY repo, chain_id LIMIT 500`, repo, chain)
		if err != nil {
			return fmt.Errorf("list startup sets: %w", err)
		}
		for _, m := range page {
			repo, chain = m.Repository, m.ChainID.String()
			if err := fn(m); err != nil {
				return err
			}
		}
		if len(page) == 0 {
			return nil
		}
	}
}

// EachLogged calls fn for all that a log has of the catalog: some rows at a time, as changes without version and time. fn
// may ask the catalog, and change it.
func (c *Catalog) EachLogged(ctx context.Context, fn func([]catalog.Change) error) error {
	for _, s := range registers.Stages {
		id, name := int64(0), ""
		for last := false; !last; {
			var page []catalog.Change
			err := func() error {
				tx, err := c.db.Read.BeginTx(ctx, nil)
				if err != nil {
					return err
				}
				defer tx.Rollback() //nolint:errcheck // it only reads
				page, id, name, last, err = s.After(ctx, tx, id, name)
				return err
			}()
			if err == nil && len(page) > 0 {
				err = fn(page)
			}
			if err != nil {
				return database.Known(err)
			}
		}
	}
	return nil
}

// Differs returns those of changes that are not as the catalog is now: another value, or none.
func (c *Catalog) Differs(ctx context.Context, changes []catalog.Change) (other []catalog.Change, err error) {
	tx, err := c.db.Read.BeginTx(ctx, nil)
	if err != nil {
		return nil, database.Known(err)
	}
	defer tx.Rollback() //nolint:errcheck // it only reads
	for _, ch := range changes {
		now, err := registers.Now(ctx, tx, ch)
		if err != nil {
			return nil, fmt.Errorf("compare %s %s: %w", ch.Repo, ch.Name, database.Known(err))
		}
		if now.Gone || !registers.SameValue(&now, &ch) {
			other = append(other, ch)
		}
	}
	return other, nil
}

// LogAgain logs the present values of the registers of changes, also those that are gone.
func (c *Catalog) LogAgain(ctx context.Context, changes []catalog.Change) error {
	err := c.db.Change(ctx, 0, func(ctx context.Context, tx *sql.Tx) ([]catalog.Change, error) {
		var out []catalog.Change
		for _, ch := range changes {
			now, err := registers.Now(ctx, tx, ch)
			if err != nil {
				return nil, err
			}
			out = append(out, now)
		}
		return out, nil
	})
	if err != nil {
		return fmt.Errorf("log %d registers again: %w", len(changes), err)
	}
	return nil
}
