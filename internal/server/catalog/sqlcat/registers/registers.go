// Package registers is the rows that a log has too (catalog.Change): one function that writes each, one that removes
// it, and one that reads it. A request, a replay and a collector change them in the same way.
package registers

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/catalog/sqlcat/database"
)

// Apply makes a change of a log. What it deletes may not be there.
func Apply(ctx context.Context, tx *database.Tx, c *catalog.Change) (err error) {
	var repo int64
	switch {
	case c.Repo != "" && c.Gone:
		repo, err = Hold(ctx, tx, c.Repo)
	case c.Repo != "":
		repo, _, err = Repository(ctx, tx, c.Repo)
	}
	if errors.Is(err, catalog.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	switch {
	case c.Kind == catalog.ChangedRepository && c.Gone:
		err = DropRepository(ctx, tx, c.Repo)
	case c.Kind == catalog.ChangedDeletedManifest && c.Gone:
		_, err = tx.ExecContext(ctx, `DELETE FROM deleted_manifests WHERE repo = $1 AND digest = $2`, repo, c.Name)
	case c.Kind == catalog.ChangedDeletedManifest:
		err = PutDeletedManifest(ctx, tx, repo, c.Manifest, c.Deleted)
	case c.Kind == catalog.ChangedDeletedTag && c.Gone:
		_, err = tx.ExecContext(ctx, `DELETE FROM deleted_tags WHERE repo = $1 AND name = $2`, repo, c.Name)
	case c.Kind == catalog.ChangedDeletedTag:
		err = PutDeletedTag(ctx, tx, repo, c.Name, c.Target, c.Deleted)
	case c.Kind == catalog.ChangedBlob && c.Gone:
		err = DropBlob(ctx, tx, repo, c.Name)
	case c.Kind == catalog.ChangedBlob:
		err = PutBlob(ctx, tx, repo, c.Blob, 0)
	case c.Kind == catalog.ChangedManifest && c.Gone:
		err = DropManifest(ctx, tx, repo, c.Name)
	case c.Kind == catalog.ChangedManifest:
		err = PutManifest(ctx, tx, repo, c.Manifest)
	case c.Kind == catalog.ChangedTag && c.Gone:
		err = DropTag(ctx, tx, repo, c.Name)
	case c.Kind == catalog.ChangedTag:
		err = PutTag(ctx, tx, repo, c.Name, c.Target, c.Time)
	case c.Kind == catalog.ChangedLayer && c.Gone:
		_, err = tx.ExecContext(ctx, `DELETE FROM layers WHERE blob = $1`, c.Name)
	case c.Kind == catalog.ChangedLayer:
		err = PutLayer(ctx, tx, c.Layer)
	case c.Kind == catalog.ChangedRootfs && c.Gone:
		_, err = tx.ExecContext(ctx, `DELETE FROM rootfs WHERE chain_id = $1`, c.Name)
	case c.Kind == catalog.ChangedRootfs:
		err = PutRootfs(ctx, tx, c.Rootfs)
	}
	if errors.Is(err, catalog.ErrNotFound) {
		err = nil
	}
	if err != nil {
		return fmt.Errorf("change %d of %s %s: %w", c.Version, c.Repo, c.Name, err)
	}
	return nil
}

// Now returns the present value of the register that a change is of.
func Now(ctx context.Context, tx *database.Tx, of catalog.Change) (catalog.Change, error) {
	now := catalog.Change{Kind: of.Kind, Repo: of.Repo, Name: of.Name}
	const repository = `(SELECT id FROM repositories WHERE name = $1)`
	var err error
	switch of.Kind {
	case catalog.ChangedRepository:
		var id int64
		err = tx.QueryRowContext(ctx, `SELECT id FROM repositories WHERE name = $1`, of.Repo).Scan(&id)
	case catalog.ChangedBlob:
		now.Blob.Digest = digest.Digest(of.Name)
		err = tx.QueryRowContext(ctx, `SELECT size, media_type FROM blobs WHERE repo = `+repository+` AND digest = $2`, of.Repo, of.Name).
			Scan(&now.Blob.Size, &now.Blob.MediaType)
	case catalog.ChangedManifest:
		row := tx.QueryRowContext(ctx, `SELECT `+ManifestColumns+` FROM manifests WHERE repo = `+repository+` AND digest = $2`, of.Repo, of.Name)
		now.Manifest, err = ScanManifest(row.Scan)
	case catalog.ChangedTag:
		err = tx.QueryRowContext(ctx, `SELECT digest FROM tags WHERE repo = `+repository+` AND name = $2`, of.Repo, of.Name).Scan(&now.Target)
	case catalog.ChangedLayer:
		var row LayerRow
		err = tx.QueryRowContext(ctx, `SELECT `+LayerColumns+` FROM layers WHERE blob = $1`, of.Name).Scan(row.Dest()...)
		now.Layer = row.Value()
	case catalog.ChangedRootfs:
		now.Rootfs.ChainID = digest.Digest(of.Name)
		err = tx.QueryRowContext(ctx, `SELECT toc, key, idx FROM rootfs WHERE chain_id = $1`, of.Name).
			Scan(&now.Rootfs.TOC, &now.Rootfs.Key, &now.Rootfs.Index)
	case catalog.ChangedDeletedManifest:
		var at int64
		row := tx.QueryRowContext(ctx, `SELECT deleted, `+ManifestColumns+` FROM deleted_manifests WHERE repo = `+repository+` AND digest = $2`, of.Repo, of.Name)
		now.Manifest, err = ScanManifest(func(dest ...any) error { return row.Scan(append([]any{&at}, dest...)...) })
		now.Deleted = time.Unix(0, at)
	case catalog.ChangedDeletedTag:
		var at int64
		err = tx.QueryRowContext(ctx, `SELECT digest, deleted FROM deleted_tags WHERE repo = `+repository+` AND name = $2`, of.Repo, of.Name).Scan(&now.Target, &at)
		now.Deleted = time.Unix(0, at)
	case catalog.ChangesWhole:
		var stage int
		err = tx.QueryRowContext(ctx, `SELECT stage FROM log`).Scan(&stage)
		now.Gone = stage < len(Stages)
	default:
		return now, fmt.Errorf("change of kind %d", of.Kind)
	}
	if errors.Is(database.Missing(err), catalog.ErrNotFound) {
		return catalog.Change{Kind: of.Kind, Repo: of.Repo, Name: of.Name, Gone: true}, nil
	}
	return now, err
}

// SameValue compares two changes of one register. A manifest's digest says what its bytes are.
func SameValue(a, b *catalog.Change) bool {
	return a.Blob == b.Blob && a.Target == b.Target && a.Layer == b.Layer && a.Rootfs == b.Rootfs &&
		a.Manifest.Digest == b.Manifest.Digest && a.Manifest.MediaType == b.Manifest.MediaType && a.Deleted.Equal(b.Deleted)
}
