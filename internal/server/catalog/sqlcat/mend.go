package sqlcat

import (
	"context"
	"fmt"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/catalog/sqlcat/database"
	"hydrofoil.dev/foil/internal/server/catalog/sqlcat/registers"
)

// BlobsAfter returns at most limit blobs after the given one, each once, in byte order of their digests.
func (c *Catalog) BlobsAfter(ctx context.Context, after digest.Digest, limit int) ([]catalog.Blob, error) {
	var blobs []catalog.Blob
	err := c.db.Rows(ctx, `SELECT digest, max(size), max(media_type) FROM blobs WHERE digest > $1
		GROUP BY digest ORDER BY digest LIMIT $2`, []any{after.String(), limit}, func(scan func(...any) error) error {
		var b catalog.Blob
		err := scan(&b.Digest, &b.Size, &b.MediaType)
		blobs = append(blobs, b)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list blobs: %w", err)
	}
	return blobs, nil
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
		from := after
		err := c.db.View(ctx, func(tx *database.Tx) (err error) {
			page, after, _, last, err = registers.Stages[2].After(ctx, tx, from, "")
			return err
		})
		if err != nil {
			return fmt.Errorf("list manifests: %w", err)
		}
		for _, ch := range page {
			m := ImageManifest{Repository: ch.Repo, Manifest: ch.Manifest}
			m.Tags, err = c.db.Strings(ctx, `SELECT name FROM tags WHERE repo = (SELECT id FROM repositories WHERE name = $1) AND digest = $2 ORDER BY name`,
				ch.Repo, ch.Name)
			if err != nil {
				return fmt.Errorf("list tags of %s: %w", ch.Name, err)
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
		page, err := c.images(ctx, `WHERE (repo, chain_id) > ($1, $2) ORDER BY repo, chain_id LIMIT 500`, repo, chain)
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
			fromID, fromName := id, name
			err := c.db.View(ctx, func(tx *database.Tx) (err error) {
				page, id, name, last, err = s.After(ctx, tx, fromID, fromName)
				return err
			})
			if err == nil && len(page) > 0 {
				err = fn(page)
			}
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// Differs returns those of changes that are not as the catalog is now: another value, or none.
func (c *Catalog) Differs(ctx context.Context, changes []catalog.Change) (other []catalog.Change, err error) {
	err = c.db.View(ctx, func(tx *database.Tx) error {
		other = nil
		for _, ch := range changes {
			now, err := registers.Now(ctx, tx, ch)
			if err != nil {
				return fmt.Errorf("compare %s %s: %w", ch.Repo, ch.Name, err)
			}
			if now.Gone || !registers.SameValue(&now, &ch) {
				other = append(other, ch)
			}
		}
		return nil
	})
	return other, err
}

// LogAgain logs the present values of the registers of changes, also those that are gone.
func (c *Catalog) LogAgain(ctx context.Context, changes []catalog.Change) error {
	err := c.db.Change(ctx, 0, func(ctx context.Context, tx *database.Tx) ([]catalog.Change, error) {
		if err := tx.Begin(ctx, tx.LockLog); err != nil {
			return nil, err
		}
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
