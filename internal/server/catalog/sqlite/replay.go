package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/server/catalog"
)

// apply makes a change of a log. What it deletes may not be there.
func apply(ctx context.Context, tx *sql.Tx, c *catalog.Change) (err error) {
	var repo int64
	if c.Repo != "" && !c.Gone {
		if repo, _, err = repository(ctx, tx, c.Repo); err != nil {
			return err
		}
	}
	switch {
	case c.Kind == catalog.ChangedRepository && c.Gone:
		err = dropRepository(ctx, tx, c.Repo)
	case c.Kind == catalog.ChangedDeletedManifest && c.Gone:
		_, err = tx.ExecContext(ctx, `DELETE FROM deleted_manifests WHERE repo = (SELECT id FROM repositories WHERE name = ?) AND digest = ?`, c.Repo, c.Name)
	case c.Kind == catalog.ChangedDeletedManifest:
		err = putDeletedManifest(ctx, tx, repo, c.Manifest, c.Deleted)
	case c.Kind == catalog.ChangedDeletedTag && c.Gone:
		_, err = tx.ExecContext(ctx, `DELETE FROM deleted_tags WHERE repo = (SELECT id FROM repositories WHERE name = ?) AND name = ?`, c.Repo, c.Name)
	case c.Kind == catalog.ChangedDeletedTag:
		err = putDeletedTag(ctx, tx, repo, c.Name, c.Target, c.Deleted)
	case c.Kind == catalog.ChangedBlob && c.Gone:
		err = dropBlob(ctx, tx, c.Repo, c.Name)
	case c.Kind == catalog.ChangedBlob:
		err = putBlob(ctx, tx, repo, c.Blob, 0)
	case c.Kind == catalog.ChangedManifest && c.Gone:
		err = dropManifest(ctx, tx, c.Repo, c.Name)
	case c.Kind == catalog.ChangedManifest:
		err = putManifest(ctx, tx, repo, c.Manifest)
	case c.Kind == catalog.ChangedTag && c.Gone:
		err = dropTag(ctx, tx, c.Repo, c.Name)
	case c.Kind == catalog.ChangedTag:
		err = putTag(ctx, tx, repo, c.Name, c.Target, c.Time)
	case c.Kind == catalog.ChangedLayer && c.Gone:
		_, err = tx.ExecContext(ctx, `DELETE FROM layers WHERE blob = ?`, c.Name)
	case c.Kind == catalog.ChangedLayer:
		err = putLayer(ctx, tx, c.Layer)
	case c.Kind == catalog.ChangedRootfs && c.Gone:
		_, err = tx.ExecContext(ctx, `DELETE FROM rootfs WHERE chain_id = ?`, c.Name)
	case c.Kind == catalog.ChangedRootfs:
		err = putRootfs(ctx, tx, c.Rootfs)
	}
	if err = known(err); errors.Is(err, catalog.ErrNotFound) {
		err = nil
	}
	if err != nil {
		return fmt.Errorf("change %d of %s %s: %w", c.Version, c.Repo, c.Name, err)
	}
	return nil
}

// Replay makes changes of a log in a catalog that is being rebuilt. They may come in any order and more than
// once: of each register the latest counts. EndReplay has to follow.
func (c *Catalog) Replay(ctx context.Context, changes []catalog.Change) error {
	err := c.update(ctx, func(tx *sql.Tx) error {
		if _, err := tx.ExecContext(ctx, `CREATE TABLE IF NOT EXISTS replayed (
			repo TEXT NOT NULL, kind INTEGER NOT NULL, name TEXT NOT NULL, version INTEGER NOT NULL, gone INTEGER NOT NULL,
			PRIMARY KEY (repo, kind, name)) STRICT, WITHOUT ROWID`); err != nil {
			return err
		}
		later, err := tx.PrepareContext(ctx, `INSERT INTO replayed VALUES (?, ?, ?, ?, ?)
			ON CONFLICT (repo, kind, name) DO UPDATE SET version = excluded.version, gone = excluded.gone WHERE version < excluded.version`)
		if err != nil {
			return err
		}
		defer later.Close()
		for i := range changes {
			change := &changes[i]
			err := affected(later.ExecContext(ctx, change.Repo, int(change.Kind), change.Name, int64(change.Version), change.Gone))
			if errors.Is(err, catalog.ErrNotFound) {
				continue // a later one was made
			}
			if err != nil {
				return err
			}
			if err := apply(ctx, tx, change); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("replay %d changes: %w", len(changes), err)
	}
	return nil
}

// EndReplay ends a replay: the catalog is as the log up to a version, and whole says whether the log has everything.
func (c *Catalog) EndReplay(ctx context.Context, version uint64, whole bool) error {
	stage := 0
	if whole {
		stage = len(stages)
	}
	err := c.update(ctx, func(tx *sql.Tx) error {
		if err := dropReplayed(ctx, tx); err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, `DROP TABLE IF EXISTS replayed`); err != nil {
			return err
		}
		_, err := tx.ExecContext(ctx, `UPDATE log SET applied = ?1, reserved = ?1, stage = ?2, after_id = 0, after_name = ''`, int64(version), stage)
		return err
	})
	if err != nil {
		return fmt.Errorf("end the replay: %w", err)
	}
	return nil
}

// dropReplayed removes repositories that were deleted, and made again by older changes of what they had.
func dropReplayed(ctx context.Context, tx *sql.Tx) error {
	var n int
	err := tx.QueryRowContext(ctx, `SELECT count(*) FROM sqlite_master WHERE name = 'replayed'`).Scan(&n)
	if err != nil || n == 0 {
		return err
	}
	names, err := textOf(ctx, tx, `SELECT repo FROM replayed WHERE kind = ? AND gone`, int(catalog.ChangedRepository))
	if err != nil {
		return err
	}
	for _, name := range names {
		if err := dropRepository(ctx, tx, name); err != nil && !errors.Is(err, catalog.ErrNotFound) {
			return err
		}
	}
	return nil
}

// perStep is how many rows are logged at once.
const perStep = 500

// A stage is a table whose rows are logged. Its query takes the place after which they are wanted (id, name) and how many;
// scan returns the change and the place of its row.
type stage struct {
	query string
	scan  func(scan func(...any) error) (c catalog.Change, id int64, name string, err error)
}

// stages are in this order, and each is logged as it is when its turn comes. Rows that are added behind the place
// are logged by who adds them.
var stages = []stage{
	{`SELECT id, name FROM repositories WHERE id > ?1 AND ?2 = '' ORDER BY id LIMIT ?3`,
		func(scan func(...any) error) (c catalog.Change, id int64, name string, err error) {
			c.Kind = catalog.ChangedRepository
			err = scan(&id, &c.Repo)
			return c, id, "", err
		}},
	{`SELECT b.repo, r.name, b.digest, b.size, b.media_type FROM blobs b JOIN repositories r ON r.id = b.repo
		WHERE (b.digest, b.repo) > (?2, ?1) ORDER BY b.digest, b.repo LIMIT ?3`,
		func(scan func(...any) error) (c catalog.Change, id int64, name string, err error) {
			c.Kind = catalog.ChangedBlob
			err = scan(&id, &c.Repo, &c.Name, &c.Blob.Size, &c.Blob.MediaType)
			c.Blob.Digest = digest.Digest(c.Name)
			return c, id, c.Name, err
		}},
	{`SELECT m.id, r.name, ` + manifestColumns + ` FROM manifests m JOIN repositories r ON r.id = m.repo
		WHERE m.id > ?1 AND ?2 = '' ORDER BY m.id LIMIT ?3`,
		func(scan func(...any) error) (c catalog.Change, id int64, name string, err error) {
			c.Kind = catalog.ChangedManifest
			c.Manifest, err = scanManifest(func(dest ...any) error { return scan(append([]any{&id, &c.Repo}, dest...)...) })
			c.Name = c.Manifest.Digest.String()
			return c, id, "", err
		}},
	{`SELECT t.repo, r.name, t.name, t.digest FROM tags t JOIN repositories r ON r.id = t.repo
		WHERE (t.repo, t.name) > (?1, ?2) ORDER BY t.repo, t.name LIMIT ?3`,
		func(scan func(...any) error) (c catalog.Change, id int64, name string, err error) {
			c.Kind = catalog.ChangedTag
			var d string
			err = scan(&id, &c.Repo, &c.Name, &d)
			c.Target = digest.Digest(d)
			return c, id, c.Name, err
		}},
	{`SELECT ` + layerColumns + ` FROM layers WHERE blob > ?2 AND ?1 = 0 ORDER BY blob LIMIT ?3`,
		func(scan func(...any) error) (c catalog.Change, id int64, name string, err error) {
			var row layerRow
			err = scan(row.dest()...)
			return layerChange(row.layer()), 0, row.blob, err
		}},
	{`SELECT chain_id, toc, key, idx FROM rootfs WHERE chain_id > ?2 AND ?1 = 0 ORDER BY chain_id LIMIT ?3`,
		func(scan func(...any) error) (c catalog.Change, id int64, name string, err error) {
			c.Kind = catalog.ChangedRootfs
			var toc string
			err = scan(&c.Name, &toc, &c.Rootfs.Key, &c.Rootfs.Index)
			c.Rootfs.ChainID, c.Rootfs.TOC = digest.Digest(c.Name), digest.Digest(toc)
			return c, 0, c.Name, err
		}},
	{`SELECT m.id, m.deleted, r.name, ` + manifestColumns + ` FROM deleted_manifests m JOIN repositories r ON r.id = m.repo
		WHERE m.id > ?1 AND ?2 = '' ORDER BY m.id LIMIT ?3`,
		func(scan func(...any) error) (c catalog.Change, id int64, name string, err error) {
			c.Kind = catalog.ChangedDeletedManifest
			var at int64
			c.Manifest, err = scanManifest(func(dest ...any) error { return scan(append([]any{&id, &at, &c.Repo}, dest...)...) })
			c.Name, c.Deleted = c.Manifest.Digest.String(), time.Unix(0, at)
			return c, id, "", err
		}},
	{`SELECT t.repo, t.deleted, r.name, t.name, t.digest FROM deleted_tags t JOIN repositories r ON r.id = t.repo
		WHERE (t.repo, t.name) > (?1, ?2) ORDER BY t.repo, t.name LIMIT ?3`,
		func(scan func(...any) error) (c catalog.Change, id int64, name string, err error) {
			c.Kind = catalog.ChangedDeletedTag
			var d string
			var at int64
			err = scan(&id, &at, &c.Repo, &c.Name, &d)
			c.Target, c.Deleted = digest.Digest(d), time.Unix(0, at)
			return c, id, c.Name, err
		}},
}

// LogMore implements catalog.Logged. What it logs are changes like others, though they change nothing: between them and those that
// are made meanwhile the order of versions is that of transactions.
func (c *Catalog) LogMore(ctx context.Context) (whole bool, err error) {
	err = c.change(ctx, maxBatchBytes, func(ctx context.Context, tx *sql.Tx) ([]catalog.Change, error) {
		var n int
		var id int64
		var name string
		if err := tx.QueryRowContext(ctx, `SELECT stage, after_id, after_name FROM log`).Scan(&n, &id, &name); err != nil {
			return nil, err
		}
		if whole = n >= len(stages); whole {
			return nil, nil
		}
		var changes []catalog.Change
		for rows := 0; n < len(stages) && rows == 0; {
			more, afterID, afterName, last, err := stages[n].after(ctx, tx, id, name)
			if err != nil {
				return nil, err
			}
			changes, rows = append(changes, more...), len(more)
			if id, name = afterID, afterName; last { // rows that come later are logged by who adds them
				n, id, name = n+1, 0, ""
			}
		}
		// So that there is a change in any case, and the transaction is committed.
		changes = append(changes, catalog.Change{Kind: catalog.ChangesWhole, Gone: n < len(stages)})
		_, err := tx.ExecContext(ctx, `UPDATE log SET stage = ?, after_id = ?, after_name = ?`, n, id, name)
		whole = n >= len(stages)
		return changes, err
	})
	if err != nil {
		return false, fmt.Errorf("write what is older than the journal to it: %w", err)
	}
	return whole, nil
}

// after returns what comes after a place, the place after that, and whether that is all.
func (s stage) after(ctx context.Context, tx *sql.Tx, id int64, name string) (changes []catalog.Change, _ int64, _ string, last bool, err error) {
	rows, err := tx.QueryContext(ctx, s.query, id, name, perStep)
	if err != nil {
		return nil, 0, "", false, err
	}
	defer rows.Close()
	bytes := 0
	for bytes < maxBatchBytes && rows.Next() {
		var c catalog.Change
		if c, id, name, err = s.scan(rows.Scan); err != nil {
			return nil, 0, "", false, err
		}
		bytes += len(c.Manifest.Bytes)
		changes = append(changes, c)
	}
	return changes, id, name, bytes < maxBatchBytes && len(changes) < perStep, rows.Err()
}

// Stats counts what is in the catalog.
type Stats struct {
	Repositories int64 `json:"repositories"`
	Blobs        int64 `json:"blobs"` // links: a blob of two repositories counts twice
	Manifests    int64 `json:"manifests"`
	Tags         int64 `json:"tags"`
	Packs        int64 `json:"packs"`
	Segments     int64 `json:"segments"`
	Layers       int64 `json:"layers"`
	Rootfs       int64 `json:"rootfs"`
}

// Stats counts; it reads every table's keys.
func (c *Catalog) Stats(ctx context.Context) (s Stats, err error) {
	err = c.read.QueryRowContext(ctx, `SELECT (SELECT count(*) FROM repositories), (SELECT count(*) FROM blobs),
		(SELECT count(*) FROM manifests), (SELECT count(*) FROM tags), (SELECT count(*) FROM packs), (SELECT count(*) FROM segments),
		(SELECT count(*) FROM layers), (SELECT count(*) FROM rootfs)`).
		Scan(&s.Repositories, &s.Blobs, &s.Manifests, &s.Tags, &s.Packs, &s.Segments, &s.Layers, &s.Rootfs)
	return s, known(err)
}

// EachLayer calls fn for all layers. fn may ask the catalog, and must not change it.
func (c *Catalog) EachLayer(ctx context.Context, fn func(catalog.Layer) error) error {
	return c.each(ctx, stages[4], func(ch catalog.Change) error { return fn(ch.Layer) })
}

// EachRootfs calls fn for all rootfs. fn may ask the catalog, and must not change it.
func (c *Catalog) EachRootfs(ctx context.Context, fn func(catalog.Rootfs) error) error {
	return c.each(ctx, stages[5], func(ch catalog.Change) error { return fn(ch.Rootfs) })
}

func (c *Catalog) each(ctx context.Context, s stage, fn func(catalog.Change) error) error {
	after := ""
	for last := false; !last; {
		var page []catalog.Change
		err := func() error {
			tx, err := c.read.BeginTx(ctx, nil)
			if err != nil {
				return err
			}
			defer tx.Rollback() //nolint:errcheck // it only read
			page, _, after, last, err = s.after(ctx, tx, 0, after)
			return err
		}()
		if err != nil {
			return known(err)
		}
		for _, ch := range page {
			if err := fn(ch); err != nil {
				return err
			}
		}
	}
	return nil
}

// DropLayer forgets what ingest made of a layer; it is ingested again when it is asked for.
func (c *Catalog) DropLayer(ctx context.Context, blob digest.Digest) error {
	return c.drop(ctx, catalog.Change{Kind: catalog.ChangedLayer, Name: blob.String(), Gone: true})
}

// DropRootfs forgets a rootfs; it is flattened again when it is asked for.
func (c *Catalog) DropRootfs(ctx context.Context, chainID digest.Digest) error {
	return c.drop(ctx, catalog.Change{Kind: catalog.ChangedRootfs, Name: chainID.String(), Gone: true})
}

func (c *Catalog) drop(ctx context.Context, gone catalog.Change) error {
	err := c.change(ctx, 0, func(ctx context.Context, tx *sql.Tx) ([]catalog.Change, error) {
		return []catalog.Change{gone}, apply(ctx, tx, &gone)
	})
	if err != nil {
		return fmt.Errorf("forget %s: %w", gone.Name, err)
	}
	return nil
}
