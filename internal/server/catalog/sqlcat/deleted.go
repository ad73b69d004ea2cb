package sqlcat

import (
	"context"
	"fmt"
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/catalog/sqlcat/database"
	"hydrofoil.dev/foil/internal/server/catalog/sqlcat/registers"
)

// SetWindow sets for how long deleted manifests and tags are kept. 0: they are not.
func (c *Catalog) SetWindow(d time.Duration) { c.window.Store(int64(d)) }

// SetLease sets for how long a blob stays after a client was told that it is there.
func (c *Catalog) SetLease(d time.Duration) { c.lease.Store(int64(d)) }

func (c *Catalog) leaseEnd() int64 { return time.Now().UnixNano() + c.lease.Load() }

// Exists implements catalog.Repositories. A lease of which half is left is not made longer: then it need not be
// written.
func (c *Catalog) Exists(ctx context.Context, repo string, d digest.Digest) (catalog.Blob, error) {
	b := catalog.Blob{Digest: d}
	fail := func(err error) (catalog.Blob, error) {
		return catalog.Blob{}, fmt.Errorf("blob %s in %s: %w", d, repo, err)
	}
	var leased int64
	err := c.db.Row(ctx, `SELECT size, media_type, leased FROM blobs
		WHERE digest = $1 AND repo = (SELECT id FROM repositories WHERE name = $2)`, []any{d.String(), repo}, &b.Size, &b.MediaType, &leased)
	if err != nil {
		return fail(err)
	}
	if leased >= time.Now().UnixNano()+c.lease.Load()/2 {
		return b, nil
	}
	err = c.db.Change(ctx, 0, func(ctx context.Context, tx *database.Tx) ([]catalog.Change, error) {
		return database.Unlogged, tx.QueryRowContext(ctx, `UPDATE blobs SET leased = CASE WHEN $1 > leased THEN $1 ELSE leased END
			WHERE digest = $2 AND repo = (SELECT id FROM repositories WHERE name = $3) RETURNING size, media_type`,
			c.leaseEnd(), d.String(), repo).Scan(&b.Size, &b.MediaType)
	})
	if err != nil {
		return fail(err)
	}
	return b, nil
}

// keepManifest makes a manifest, which is about to be deleted, one that can be brought back.
func (c *Catalog) keepManifest(ctx context.Context, tx *database.Tx, repo string, id int64, d digest.Digest, at time.Time) ([]catalog.Change, error) {
	if c.window.Load() <= 0 {
		return nil, nil
	}
	m, err := registers.ScanManifest(tx.QueryRowContext(ctx, `SELECT `+registers.ManifestColumns+` FROM manifests WHERE repo = $1 AND digest = $2`, id, d.String()).Scan)
	if err != nil {
		return nil, err
	}
	kept := catalog.Change{Kind: catalog.ChangedDeletedManifest, Repo: repo, Name: d.String(), Manifest: m, Deleted: at}
	return []catalog.Change{kept}, registers.PutDeletedManifest(ctx, tx, id, m, at)
}

// deleteTag removes a tag, which can be brought back.
func (c *Catalog) deleteTag(ctx context.Context, tx *database.Tx, repo string, id int64, tag string, at time.Time) ([]catalog.Change, error) {
	var d string
	err := tx.QueryRowContext(ctx, `SELECT digest FROM tags WHERE repo = $1 AND name = $2`, id, tag).Scan(&d)
	if err != nil {
		return nil, err
	}
	changes := []catalog.Change{{Kind: catalog.ChangedTag, Repo: repo, Name: tag, Gone: true}}
	if c.window.Load() > 0 {
		changes = append(changes, catalog.Change{Kind: catalog.ChangedDeletedTag, Repo: repo, Name: tag, Target: digest.Digest(d), Deleted: at})
		if err := registers.PutDeletedTag(ctx, tx, id, tag, digest.Digest(d), at); err != nil {
			return nil, err
		}
	}
	return changes, registers.DropTag(ctx, tx, id, tag)
}
