package registers

import (
	"context"
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/catalog/sqlcat/database"
)

// perStep is how many rows are logged at once.
const perStep = 500

// A Stage is a table whose rows are logged. Its query takes the place after which they are wanted (id, name) and how many;
// scan returns the change and the place of its row.
type Stage struct {
	query string
	scan  func(scan func(...any) error) (c catalog.Change, id int64, name string, err error)
}

// Stages are in this order, and each is logged as it is when its turn comes. Rows that are added behind the place
// are logged by who adds them.
var Stages = []Stage{
	{`SELECT id, name FROM repositories WHERE id > $1 AND $2 = '' ORDER BY id LIMIT $3`,
		func(scan func(...any) error) (c catalog.Change, id int64, name string, err error) {
			c.Kind = catalog.ChangedRepository
			err = scan(&id, &c.Repo)
			return c, id, "", err
		}},
	{`SELECT b.repo, r.name, b.digest, b.size, b.media_type FROM blobs b JOIN repositories r ON r.id = b.repo
		WHERE (b.digest, b.repo) > ($2, $1) ORDER BY b.digest, b.repo LIMIT $3`,
		func(scan func(...any) error) (c catalog.Change, id int64, name string, err error) {
			c.Kind = catalog.ChangedBlob
			err = scan(&id, &c.Repo, &c.Name, &c.Blob.Size, &c.Blob.MediaType)
			c.Blob.Digest = digest.Digest(c.Name)
			return c, id, c.Name, err
		}},
	{`SELECT m.id, r.name, ` + ManifestColumns + ` FROM manifests m JOIN repositories r ON r.id = m.repo
		WHERE m.id > $1 AND $2 = '' ORDER BY m.id LIMIT $3`,
		func(scan func(...any) error) (c catalog.Change, id int64, name string, err error) {
			c.Kind = catalog.ChangedManifest
			c.Manifest, err = ScanManifest(func(dest ...any) error { return scan(append([]any{&id, &c.Repo}, dest...)...) })
			c.Name = c.Manifest.Digest.String()
			return c, id, "", err
		}},
	{`SELECT t.repo, r.name, t.name, t.digest FROM tags t JOIN repositories r ON r.id = t.repo
		WHERE (t.repo, t.name) > ($1, $2) ORDER BY t.repo, t.name LIMIT $3`,
		func(scan func(...any) error) (c catalog.Change, id int64, name string, err error) {
			c.Kind = catalog.ChangedTag
			var d string
			err = scan(&id, &c.Repo, &c.Name, &d)
			c.Target = digest.Digest(d)
			return c, id, c.Name, err
		}},
	{`SELECT ` + LayerColumns + ` FROM layers WHERE blob > $2 AND $1 = 0 ORDER BY blob LIMIT $3`,
		func(scan func(...any) error) (c catalog.Change, id int64, name string, err error) {
			var row LayerRow
			err = scan(row.Dest()...)
			return LayerChange(row.Value()), 0, row.blob, err
		}},
	{`SELECT chain_id, toc, key, idx FROM rootfs WHERE chain_id > $2 AND $1 = 0 ORDER BY chain_id LIMIT $3`,
		func(scan func(...any) error) (c catalog.Change, id int64, name string, err error) {
			c.Kind = catalog.ChangedRootfs
			var toc string
			err = scan(&c.Name, &toc, &c.Rootfs.Key, &c.Rootfs.Index)
			c.Rootfs.ChainID, c.Rootfs.TOC = digest.Digest(c.Name), digest.Digest(toc)
			return c, 0, c.Name, err
		}},
	{`SELECT m.id, m.deleted, r.name, ` + ManifestColumns + ` FROM deleted_manifests m JOIN repositories r ON r.id = m.repo
		WHERE m.id > $1 AND $2 = '' ORDER BY m.id LIMIT $3`,
		func(scan func(...any) error) (c catalog.Change, id int64, name string, err error) {
			c.Kind = catalog.ChangedDeletedManifest
			var at int64
			c.Manifest, err = ScanManifest(func(dest ...any) error { return scan(append([]any{&id, &at, &c.Repo}, dest...)...) })
			c.Name, c.Deleted = c.Manifest.Digest.String(), time.Unix(0, at)
			return c, id, "", err
		}},
	{`SELECT t.repo, t.deleted, r.name, t.name, t.digest FROM deleted_tags t JOIN repositories r ON r.id = t.repo
		WHERE (t.repo, t.name) > ($1, $2) ORDER BY t.repo, t.name LIMIT $3`,
		func(scan func(...any) error) (c catalog.Change, id int64, name string, err error) {
			c.Kind = catalog.ChangedDeletedTag
			var d string
			var at int64
			err = scan(&id, &at, &c.Repo, &c.Name, &d)
			c.Target, c.Deleted = digest.Digest(d), time.Unix(0, at)
			return c, id, c.Name, err
		}},
}

// After returns what comes after a place, the place after that, and whether that is all.
func (s Stage) After(ctx context.Context, tx *database.Tx, id int64, name string) (changes []catalog.Change, _ int64, _ string, last bool, err error) {
	rows, err := tx.QueryContext(ctx, s.query, id, name, perStep)
	if err != nil {
		return nil, 0, "", false, err
	}
	defer rows.Close()
	bytes := 0
	for bytes < database.MaxBatchBytes && rows.Next() {
		var c catalog.Change
		if c, id, name, err = s.scan(rows.Scan); err != nil {
			return nil, 0, "", false, err
		}
		bytes += len(c.Manifest.Bytes)
		changes = append(changes, c)
	}
	return changes, id, name, bytes < database.MaxBatchBytes && len(changes) < perStep, rows.Err()
}
