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
		return catalog.Blob{}, fmt.Errorf("blob %s in %s: %w", d, repo, known(err))
	}
	var leased int64
	err := c.read.QueryRowContext(ctx, `SELECT size, media_type, leased FROM blobs
		WHERE digest = ? AND repo = (SELECT id FROM repositories WHERE name = ?)`, d.String(), repo).Scan(&b.Size, &b.MediaType, &leased)
	if err != nil {
		return fail(err)
	}
	if leased >= time.Now().UnixNano()+c.lease.Load()/2 {
		return b, nil
	}
	err = c.change(ctx, 0, func(ctx context.Context, tx *sql.Tx) ([]catalog.Change, error) {
		return unlogged, tx.QueryRowContext(ctx, `UPDATE blobs SET leased = max(leased, ?)
			WHERE digest = ? AND repo = (SELECT id FROM repositories WHERE name = ?) RETURNING size, media_type`,
			c.leaseEnd(), d.String(), repo).Scan(&b.Size, &b.MediaType)
	})
	if err != nil {
		return fail(err)
	}
	return b, nil
}

// keepManifest makes a manifest, which is about to be deleted, one that can be brought back.
func (c *Catalog) keepManifest(ctx context.Context, tx *sql.Tx, repo string, d digest.Digest, at time.Time) ([]catalog.Change, error) {
	if c.window.Load() <= 0 {
		return nil, nil
	}
	var id int64
	m, err := scanManifest(func(dest ...any) error {
		return tx.QueryRowContext(ctx, `SELECT repo, `+manifestColumns+` FROM manifests
			WHERE repo = (SELECT id FROM repositories WHERE name = ?) AND digest = ?`, repo, d.String()).Scan(append([]any{&id}, dest...)...)
	})
	if err != nil {
		return nil, err
	}
	kept := catalog.Change{Kind: catalog.ChangedDeletedManifest, Repo: repo, Name: d.String(), Manifest: m, Deleted: at}
	return []catalog.Change{kept}, putDeletedManifest(ctx, tx, id, m, at)
}

func putDeletedManifest(ctx context.Context, tx *sql.Tx, repo int64, m catalog.Manifest, at time.Time) error {
	annotations, err := encodeAnnotations(m)
	if err != nil {
		return err
	}
	_, err = tx.ExecContext(ctx, `INSERT INTO deleted_manifests
			(repo, digest, media_type, artifact_type, subject, annotations, bytes, pushed, deleted)
			VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
		ON CONFLICT (repo, digest) DO UPDATE SET deleted = excluded.deleted`,
		repo, m.Digest.String(), m.MediaType, m.ArtifactType, m.Subject.String(), string(annotations),
		nonNil(m.Bytes), m.Pushed.UnixNano(), at.UnixNano())
	return err
}

// deleteTag removes a tag, which can be brought back.
func (c *Catalog) deleteTag(ctx context.Context, tx *sql.Tx, repo, tag string, at time.Time) ([]catalog.Change, error) {
	var id int64
	var d string
	err := tx.QueryRowContext(ctx, `SELECT repo, digest FROM tags
		WHERE repo = (SELECT id FROM repositories WHERE name = ?) AND name = ?`, repo, tag).Scan(&id, &d)
	if err != nil {
		return nil, err
	}
	changes := []catalog.Change{{Kind: catalog.ChangedTag, Repo: repo, Name: tag, Gone: true}}
	if c.window.Load() > 0 {
		changes = append(changes, catalog.Change{Kind: catalog.ChangedDeletedTag, Repo: repo, Name: tag, Target: digest.Digest(d), Deleted: at})
		if err := putDeletedTag(ctx, tx, id, tag, digest.Digest(d), at); err != nil {
			return nil, err
		}
	}
	return changes, dropTag(ctx, tx, repo, tag)
}

func putDeletedTag(ctx context.Context, tx *sql.Tx, repo int64, tag string, d digest.Digest, at time.Time) error {
	_, err := tx.ExecContext(ctx, `INSERT INTO deleted_tags (repo, name, digest, deleted) VALUES (?, ?, ?, ?)
		ON CONFLICT (repo, name) DO UPDATE SET digest = excluded.digest, deleted = excluded.deleted`, repo, tag, d.String(), at.UnixNano())
	return err
}

// forgetDeleted forgets what was deleted, if it was, since it is there again, or its time is over.
func forgetDeleted(ctx context.Context, tx *sql.Tx, changes []catalog.Change, repo string, id int64, kind catalog.ChangeKind, name string) ([]catalog.Change, error) {
	query := `DELETE FROM deleted_tags WHERE repo = ? AND name = ?`
	if kind == catalog.ChangedDeletedManifest {
		query = `DELETE FROM deleted_manifests WHERE repo = ? AND digest = ?`
	}
	err := affected(tx.ExecContext(ctx, query, id, name))
	switch {
	case errors.Is(err, catalog.ErrNotFound):
		return changes, nil
	case err != nil:
		return nil, err
	}
	return append(changes, catalog.Change{Kind: kind, Repo: repo, Name: name, Gone: true}), nil
}

// Deleted implements catalog.Deleted.
func (c *Catalog) Deleted(ctx context.Context, repo string) ([]catalog.DeletedItem, error) {
	return c.deletedItems(ctx, `SELECT * FROM (SELECT r.name, '' AS tag, d.digest, d.deleted AS at, length(d.bytes) FROM deleted_manifests d JOIN repositories r ON r.id = d.repo
			WHERE ?1 IN ('', r.name)
		UNION ALL SELECT r.name, d.name, d.digest, d.deleted, 0 FROM deleted_tags d JOIN repositories r ON r.id = d.repo
			WHERE ?1 IN ('', r.name))
		ORDER BY tag <> '', at, 1, 2, 3`, repo)
}

func (c *Catalog) deletedItems(ctx context.Context, query string, args ...any) (items []catalog.DeletedItem, err error) {
	err = c.rows(ctx, query, args, func(scan func(...any) error) error {
		var it catalog.DeletedItem
		var d string
		var at int64
		if err := scan(&it.Repository, &it.Tag, &d, &at, &it.Size); err != nil {
			return err
		}
		it.Digest, it.Deleted = digest.Digest(d), time.Unix(0, at)
		items = append(items, it)
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list what was deleted: %w", err)
	}
	return items, nil
}

// Undelete implements catalog.Deleted.
func (c *Catalog) Undelete(ctx context.Context, repo string, items []catalog.DeletedItem) (restored []catalog.DeletedItem, err error) {
	err = c.change(ctx, 0, func(ctx context.Context, tx *sql.Tx) ([]catalog.Change, error) {
		restored = nil
		var id int64
		if err := tx.QueryRowContext(ctx, `SELECT id FROM repositories WHERE name = ?`, repo).Scan(&id); err != nil {
			return nil, err
		}
		var all []catalog.Change
		for _, tags := range []bool{false, true} { // manifests first: a tag names one that is there
			for _, it := range items {
				if (it.Tag != "") != tags {
					continue
				}
				restore := undeleteManifest
				if tags {
					restore = undeleteTag
				}
				made, err := restore(ctx, tx, repo, id, it)
				if err != nil {
					return nil, err
				}
				if made != nil {
					restored = append(restored, it)
				}
				all = append(all, made...)
			}
		}
		return all, nil
	})
	if err != nil {
		return nil, fmt.Errorf("bring back what was deleted from %s: %w", repo, err)
	}
	return restored, nil
}

// undeleteManifest brings a manifest back, unless blobs of it are gone.
func undeleteManifest(ctx context.Context, tx *sql.Tx, repo string, id int64, it catalog.DeletedItem) ([]catalog.Change, error) {
	m, err := scanManifest(tx.QueryRowContext(ctx, `SELECT `+manifestColumns+` FROM deleted_manifests WHERE repo = ? AND digest = ?`,
		id, it.Digest.String()).Scan)
	if errors.Is(err, sql.ErrNoRows) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	// Its own fields only: an annotation may name anything. What an index names are manifests, or blobs.
	var lacks int
	err = tx.QueryRowContext(ctx, `SELECT count(*) FROM json_tree(CASE WHEN json_valid(CAST(?1 AS TEXT)) THEN CAST(?1 AS TEXT) ELSE '{}' END) j
		WHERE j.key = 'digest' AND j.type = 'text' AND (j.path GLOB '$.layers*' OR j.path GLOB '$.blobs*' OR j.path = '$.config')
			AND NOT EXISTS (SELECT 1 FROM json_each(CAST(?1 AS TEXT), j.path) u WHERE u.key = 'urls')
			AND NOT EXISTS (SELECT 1 FROM blobs WHERE digest = j.value AND repo = ?2)`, nonNil(m.Bytes), id).Scan(&lacks)
	if err != nil || lacks > 0 {
		return nil, err
	}
	changes := []catalog.Change{{Kind: catalog.ChangedManifest, Repo: repo, Name: m.Digest.String(), Manifest: m}}
	if err := putManifest(ctx, tx, id, m); err != nil {
		return nil, err
	}
	return forgetDeleted(ctx, tx, changes, repo, id, catalog.ChangedDeletedManifest, m.Digest.String())
}

// undeleteTag brings a tag back whose manifest is there, unless there is another one by now.
func undeleteTag(ctx context.Context, tx *sql.Tx, repo string, id int64, it catalog.DeletedItem) ([]catalog.Change, error) {
	var d string
	err := tx.QueryRowContext(ctx, `SELECT digest FROM deleted_tags t WHERE repo = ?1 AND name = ?2
		AND EXISTS (SELECT 1 FROM manifests WHERE repo = ?1 AND digest = t.digest)
		AND NOT EXISTS (SELECT 1 FROM tags WHERE repo = ?1 AND name = ?2)`, id, it.Tag).Scan(&d)
	if errors.Is(err, sql.ErrNoRows) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	changes := []catalog.Change{{Kind: catalog.ChangedTag, Repo: repo, Name: it.Tag, Target: digest.Digest(d)}}
	if err := putTag(ctx, tx, id, it.Tag, digest.Digest(d), time.Now()); err != nil {
		return nil, err
	}
	return forgetDeleted(ctx, tx, changes, repo, id, catalog.ChangedDeletedTag, it.Tag)
}

// Manifests implements catalog.Deleted.
func (c *Catalog) Manifests(ctx context.Context, repo string) (all []digest.Digest, err error) {
	if _, err := c.Tags(ctx, repo, "", 0); err != nil {
		return nil, err
	}
	all, err = c.digests(ctx, `SELECT digest FROM manifests WHERE repo = (SELECT id FROM repositories WHERE name = ?) ORDER BY id DESC`, repo)
	if err != nil {
		return nil, fmt.Errorf("manifests of %s: %w", repo, err)
	}
	return all, nil
}

// Family implements catalog.Deleted.
func (c *Catalog) Family(ctx context.Context, repo string, d digest.Digest) (f catalog.Family, err error) {
	const of = `(SELECT id FROM repositories WHERE name = ?1)`
	err = c.read.QueryRowContext(ctx, `SELECT EXISTS (SELECT 1 FROM tags WHERE repo = `+of+` AND digest = ?2)
		OR EXISTS (SELECT 1 FROM refs r JOIN manifests m ON m.repo = r.repo AND m.digest = r.manifest
			WHERE r.digest = ?2 AND r.repo = `+of+` AND m.digest <> ?2 AND m.subject <> ?2)`, repo, d.String()).Scan(&f.Named)
	if err == nil {
		f.Children, err = c.digests(ctx, `SELECT r.digest FROM refs r JOIN known_manifests m ON m.repo = r.repo AND m.digest = r.digest
			WHERE r.repo = `+of+` AND r.manifest = ?2 AND r.digest <> ?2
				AND r.digest <> (SELECT subject FROM known_manifests WHERE repo = r.repo AND digest = ?2)`, repo, d.String())
	}
	if err == nil {
		f.Referrers, err = c.digests(ctx, `SELECT digest FROM known_manifests WHERE repo = `+of+` AND subject = ?2`, repo, d.String())
	}
	if err != nil {
		return f, fmt.Errorf("what belongs to manifest %s of %s: %w", d, repo, known(err))
	}
	return f, nil
}

func (c *Catalog) digests(ctx context.Context, query string, args ...any) (all []digest.Digest, err error) {
	err = c.rows(ctx, query, args, func(scan func(...any) error) error {
		var d string
		err := scan(&d)
		all = append(all, digest.Digest(d))
		return err
	})
	return all, err
}

// Purge implements catalog.Deleted.
func (c *Catalog) Purge(ctx context.Context, before time.Time, limit int) (n int, err error) {
	err = c.change(ctx, 0, func(ctx context.Context, tx *sql.Tx) ([]catalog.Change, error) {
		var changes []catalog.Change
		rows, err := tx.QueryContext(ctx, `SELECT * FROM (SELECT r.id, r.name, d.digest, ?3, deleted FROM deleted_manifests d JOIN repositories r ON r.id = d.repo
				WHERE deleted < ?1 UNION ALL
			SELECT r.id, r.name, d.name, ?4, deleted FROM deleted_tags d JOIN repositories r ON r.id = d.repo WHERE deleted < ?1)
			ORDER BY deleted LIMIT ?2`, before.UnixNano(), limit, int(catalog.ChangedDeletedManifest), int(catalog.ChangedDeletedTag))
		if err != nil {
			return nil, err
		}
		defer rows.Close()
		type item struct {
			id         int64
			repo, name string
			kind       catalog.ChangeKind
		}
		var items []item
		for rows.Next() {
			var it item
			var at int64
			if err := rows.Scan(&it.id, &it.repo, &it.name, &it.kind, &at); err != nil {
				return nil, err
			}
			items = append(items, it)
		}
		if err := rows.Err(); err != nil {
			return nil, err
		}
		for _, it := range items {
			if changes, err = forgetDeleted(ctx, tx, changes, it.repo, it.id, it.kind, it.name); err != nil {
				return nil, err
			}
		}
		n = len(items)
		return changes, nil
	})
	if err != nil {
		return 0, fmt.Errorf("forget what was deleted before %v: %w", before, err)
	}
	return n, nil
}

// dropRepository removes a repository that has nothing.
func dropRepository(ctx context.Context, tx *sql.Tx, repo string) error {
	return affected(tx.ExecContext(ctx, `DELETE FROM repositories AS r WHERE name = ?
		AND NOT EXISTS (SELECT 1 FROM manifests WHERE repo = r.id)
		AND NOT EXISTS (SELECT 1 FROM deleted_manifests WHERE repo = r.id)
		AND NOT EXISTS (SELECT 1 FROM tags WHERE repo = r.id)
		AND NOT EXISTS (SELECT 1 FROM deleted_tags WHERE repo = r.id)
		AND NOT EXISTS (SELECT 1 FROM blobs WHERE repo = r.id)`, repo))
}

// textOf returns a column.
func textOf(ctx context.Context, tx *sql.Tx, query string, args ...any) (all []string, err error) {
	rows, err := tx.QueryContext(ctx, query, args...)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() {
		var s string
		if err := rows.Scan(&s); err != nil {
			return nil, err
		}
		all = append(all, s)
	}
	return all, rows.Err()
}

// rows calls fn for the rows of a query.
func (c *Catalog) rows(ctx context.Context, query string, args []any, fn func(scan func(...any) error) error) error {
	rows, err := c.read.QueryContext(ctx, query, args...)
	if err != nil {
		return known(err)
	}
	defer rows.Close()
	for rows.Next() {
		if err := fn(rows.Scan); err != nil {
			return err
		}
	}
	return known(rows.Err())
}
