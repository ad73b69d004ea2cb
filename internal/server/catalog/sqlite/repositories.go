package sqlite

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"math"
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/server/catalog"
)

// repository returns the ID of repo, which it makes when missing; made is that change then.
func repository(ctx context.Context, tx *sql.Tx, repo string) (id int64, made []catalog.Change, err error) {
	err = tx.QueryRowContext(ctx, `SELECT id FROM repositories WHERE name = ?`, repo).Scan(&id)
	if !errors.Is(err, sql.ErrNoRows) {
		return id, nil, err
	}
	err = tx.QueryRowContext(ctx, `INSERT INTO repositories (name) VALUES (?) RETURNING id`, repo).Scan(&id)
	return id, []catalog.Change{{Kind: catalog.ChangedRepository, Repo: repo}}, err
}

// LinkBlob implements catalog.Repositories.
func (c *Catalog) LinkBlob(ctx context.Context, repo string, b catalog.Blob) error {
	err := c.change(ctx, 0, func(ctx context.Context, tx *sql.Tx) ([]catalog.Change, error) {
		id, changes, err := repository(ctx, tx, repo)
		if err != nil {
			return nil, err
		}
		was := catalog.Blob{Digest: b.Digest}
		err = tx.QueryRowContext(ctx, `UPDATE blobs SET leased = max(leased, ?) WHERE digest = ? AND repo = ? RETURNING size, media_type`,
			c.leaseEnd(), b.Digest.String(), id).Scan(&was.Size, &was.MediaType)
		if err == nil && b.MediaType == "" {
			b.MediaType = was.MediaType
		}
		if err == nil && was == b {
			return unlogged, nil
		}
		if err != nil && !errors.Is(err, sql.ErrNoRows) {
			return nil, err
		}
		changes = append(changes, catalog.Change{Kind: catalog.ChangedBlob, Repo: repo, Name: b.Digest.String(), Blob: b})
		return changes, c.within(ctx, tx, repo, func() error { return putBlob(ctx, tx, id, b, c.leaseEnd()) })
	})
	if err != nil {
		return fmt.Errorf("record blob %s in %s: %w", b.Digest, repo, err)
	}
	return nil
}

// putBlob records a blob, and has it stay until the lease ends: nanoseconds since 1970; 0: none.
func putBlob(ctx context.Context, tx *sql.Tx, repo int64, b catalog.Blob, leased int64) error {
	_, err := tx.ExecContext(ctx, `INSERT INTO blobs (repo, digest, size, media_type, leased) VALUES (?, ?, ?, ?, ?)
		ON CONFLICT (digest, repo) DO UPDATE SET size = excluded.size, media_type = excluded.media_type, leased = max(leased, excluded.leased)`,
		repo, b.Digest.String(), b.Size, b.MediaType, leased)
	return err
}

// Blob implements catalog.Repositories.
func (c *Catalog) Blob(ctx context.Context, repo string, d digest.Digest) (catalog.Blob, error) {
	b := catalog.Blob{Digest: d}
	err := c.read.QueryRowContext(ctx, `SELECT size, media_type FROM blobs
		WHERE digest = ? AND repo = (SELECT id FROM repositories WHERE name = ?)`, d.String(), repo).
		Scan(&b.Size, &b.MediaType)
	if err != nil {
		return catalog.Blob{}, fmt.Errorf("blob %s in %s: %w", d, repo, known(err))
	}
	return b, nil
}

// Blobs implements catalog.Repositories.
func (c *Catalog) Blobs(ctx context.Context, repo string, ds []digest.Digest) ([]catalog.Blob, error) {
	found := make(map[digest.Digest]catalog.Blob, len(ds))
	var d string
	var b catalog.Blob
	err := c.listed(ctx, c.ask.blobs, ds, func() {
		b.Digest = digest.Digest(d)
		found[b.Digest] = b
	}, []any{repo}, &d, &b.Size, &b.MediaType)
	blobs := make([]catalog.Blob, len(ds))
	for i, d := range ds {
		var ok bool
		if blobs[i], ok = found[d]; !ok && err == nil {
			err = fmt.Errorf("blob %s: %w", d, catalog.ErrNotFound)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("%d blobs in %s: %w", len(ds), repo, err)
	}
	return blobs, nil
}

// AnyBlob implements catalog.Repositories.
func (c *Catalog) AnyBlob(ctx context.Context, d digest.Digest) (catalog.Blob, error) {
	b := catalog.Blob{Digest: d}
	err := c.read.QueryRowContext(ctx, `SELECT size, media_type FROM blobs WHERE digest = ?
		ORDER BY repo LIMIT 1`, d.String()).Scan(&b.Size, &b.MediaType)
	if err != nil {
		return catalog.Blob{}, fmt.Errorf("blob %s in any repository: %w", d, known(err))
	}
	return b, nil
}

// Holders implements catalog.Repositories.
func (c *Catalog) Holders(ctx context.Context, d digest.Digest) ([]string, error) {
	names, err := c.strings(ctx, `SELECT name FROM repositories JOIN blobs ON repo = id WHERE digest = ? ORDER BY name`, d.String())
	if err != nil {
		return nil, fmt.Errorf("holders of blob %s: %w", d, err)
	}
	return names, nil
}

// UnlinkBlob implements catalog.Repositories.
func (c *Catalog) UnlinkBlob(ctx context.Context, repo string, d digest.Digest) error {
	err := c.change(ctx, 0, func(ctx context.Context, tx *sql.Tx) ([]catalog.Change, error) {
		gone := catalog.Change{Kind: catalog.ChangedBlob, Repo: repo, Name: d.String(), Gone: true}
		return []catalog.Change{gone}, dropBlob(ctx, tx, repo, d.String())
	})
	if err != nil {
		return fmt.Errorf("remove blob %s from %s: %w", d, repo, err)
	}
	return nil
}

func dropBlob(ctx context.Context, tx *sql.Tx, repo, d string) error {
	return affected(tx.ExecContext(ctx, `DELETE FROM blobs
		WHERE digest = ? AND repo = (SELECT id FROM repositories WHERE name = ?)`, d, repo))
}

// PutManifest implements catalog.Repositories.
func (c *Catalog) PutManifest(ctx context.Context, repo string, m catalog.Manifest, tags ...string) error {
	err := c.change(ctx, len(m.Bytes), func(ctx context.Context, tx *sql.Tx) ([]catalog.Change, error) {
		id, changes, err := repository(ctx, tx, repo)
		if err != nil {
			return nil, err
		}
		put := m
		var was int64
		err = tx.QueryRowContext(ctx, `SELECT pushed FROM manifests WHERE repo = ? AND digest = ?`, id, m.Digest.String()).Scan(&was)
		switch {
		case err == nil:
			put.Pushed = time.Unix(0, was)
		case !errors.Is(err, sql.ErrNoRows):
			return nil, err
		}
		changes = append(changes, catalog.Change{Kind: catalog.ChangedManifest, Repo: repo, Name: m.Digest.String(), Manifest: put})
		if err := c.within(ctx, tx, repo, func() error { return putManifest(ctx, tx, id, put) }); err != nil {
			return nil, err
		}
		if changes, err = forgetDeleted(ctx, tx, changes, repo, id, catalog.ChangedDeletedManifest, m.Digest.String()); err != nil {
			return nil, err
		}
		for _, tag := range tags {
			if changes, err = forgetDeleted(ctx, tx, changes, repo, id, catalog.ChangedDeletedTag, tag); err != nil {
				return nil, err
			}
			changes = append(changes, catalog.Change{Kind: catalog.ChangedTag, Repo: repo, Name: tag, Target: m.Digest})
			if err := c.mayMove(ctx, tx, repo, id, tag, m.Digest); err != nil {
				return nil, err
			}
			if err := putTag(ctx, tx, id, tag, m.Digest, m.Pushed); err != nil {
				return nil, err
			}
		}
		return changes, nil
	})
	if err != nil {
		return fmt.Errorf("record manifest %s in %s: %w", m.Digest, repo, err)
	}
	return nil
}

func putManifest(ctx context.Context, tx *sql.Tx, repo int64, m catalog.Manifest) error {
	annotations, err := encodeAnnotations(m)
	if err != nil {
		return err
	}
	_, err = tx.ExecContext(ctx, `INSERT INTO manifests
			(repo, digest, media_type, artifact_type, subject, annotations, bytes, pushed)
			VALUES (?, ?, ?, ?, ?, ?, ?, ?)
		ON CONFLICT (repo, digest) DO UPDATE SET media_type = excluded.media_type,
			artifact_type = excluded.artifact_type, subject = excluded.subject,
			annotations = excluded.annotations, bytes = excluded.bytes, pushed = excluded.pushed`,
		repo, m.Digest.String(), m.MediaType, m.ArtifactType, m.Subject.String(), string(annotations),
		nonNil(m.Bytes), m.Pushed.UnixNano())
	return err
}

func encodeAnnotations(m catalog.Manifest) ([]byte, error) {
	if len(m.Annotations) == 0 {
		return nil, nil
	}
	return json.Marshal(m.Annotations)
}

func putTag(ctx context.Context, tx *sql.Tx, repo int64, tag string, d digest.Digest, pushed time.Time) error {
	_, err := tx.ExecContext(ctx, `INSERT INTO tags (repo, name, digest, pushed) VALUES (?, ?, ?, ?)
		ON CONFLICT (repo, name) DO UPDATE SET digest = excluded.digest, pushed = excluded.pushed`, repo, tag, d.String(), pushed.UnixNano())
	return err
}

// nonNil keeps an empty slice from becoming NULL.
func nonNil(b []byte) []byte {
	if b == nil {
		return []byte{}
	}
	return b
}

const manifestColumns = `digest, media_type, artifact_type, subject, annotations, bytes, pushed`

func scanManifest(scan func(...any) error) (m catalog.Manifest, err error) {
	var d, subject string
	var annotations []byte
	var pushed int64
	if err := scan(&d, &m.MediaType, &m.ArtifactType, &subject, &annotations, &m.Bytes, &pushed); err != nil {
		return m, err
	}
	m.Digest, m.Subject, m.Pushed = digest.Digest(d), digest.Digest(subject), time.Unix(0, pushed)
	if len(annotations) > 0 {
		if err := json.Unmarshal(annotations, &m.Annotations); err != nil {
			return m, fmt.Errorf("annotations of manifest %s: %w", d, err)
		}
	}
	return m, nil
}

// Manifest implements catalog.Repositories.
func (c *Catalog) Manifest(ctx context.Context, repo string, d digest.Digest) (catalog.Manifest, error) {
	m, err := scanManifest(c.ask.manifest.QueryRowContext(ctx, repo, d.String()).Scan)
	if err != nil {
		return catalog.Manifest{}, fmt.Errorf("manifest %s in %s: %w", d, repo, known(err))
	}
	return m, nil
}

// DeleteManifest implements catalog.Repositories.
func (c *Catalog) DeleteManifest(ctx context.Context, repo string, d digest.Digest) error {
	err := c.change(ctx, 0, func(ctx context.Context, tx *sql.Tx) ([]catalog.Change, error) {
		if err := c.mayRemove(ctx, tx, repo, d); err != nil {
			return nil, err
		}
		at := time.Now()
		changes, err := c.keepManifest(ctx, tx, repo, d, at)
		if err != nil {
			return nil, err
		}
		if err := dropManifest(ctx, tx, repo, d.String()); err != nil {
			return nil, err
		}
		changes = append(changes, catalog.Change{Kind: catalog.ChangedManifest, Repo: repo, Name: d.String(), Gone: true})
		tags, err := textOf(ctx, tx, `SELECT name FROM tags
			WHERE repo = (SELECT id FROM repositories WHERE name = ?) AND digest = ?`, repo, d.String())
		if err != nil {
			return nil, err
		}
		for _, tag := range tags {
			gone, err := c.deleteTag(ctx, tx, repo, tag, at)
			if err != nil {
				return nil, err
			}
			changes = append(changes, gone...)
		}
		return changes, nil
	})
	if err != nil {
		return fmt.Errorf("delete manifest %s from %s: %w", d, repo, err)
	}
	return nil
}

func dropManifest(ctx context.Context, tx *sql.Tx, repo, d string) error {
	return affected(tx.ExecContext(ctx, `DELETE FROM manifests
		WHERE repo = (SELECT id FROM repositories WHERE name = ?) AND digest = ?`, repo, d))
}

// Referrers implements catalog.Repositories.
func (c *Catalog) Referrers(ctx context.Context, repo string, d digest.Digest, artifactType string, after digest.Digest) iter.Seq2[catalog.Referrer, error] {
	return func(yield func(catalog.Referrer, error) bool) {
		if err := c.referrers(ctx, repo, d, artifactType, after, func(r catalog.Referrer) bool { return yield(r, nil) }); err != nil {
			yield(catalog.Referrer{}, fmt.Errorf("referrers of %s in %s: %w", d, repo, err))
		}
	}
}

// referrers calls fn until it returns false. The size of a manifest is known without reading it.
func (c *Catalog) referrers(ctx context.Context, repo string, d digest.Digest, artifactType string, after digest.Digest, fn func(catalog.Referrer) bool) error {
	pushed, id := int64(math.MinInt64), int64(0)
	if after != "" {
		err := c.read.QueryRowContext(ctx, `SELECT pushed, id FROM manifests
			WHERE repo = (SELECT id FROM repositories WHERE name = ?) AND digest = ? AND subject = ?`, repo, after.String(), d.String()).Scan(&pushed, &id)
		if err != nil && !errors.Is(err, sql.ErrNoRows) {
			return err
		}
	}
	rows, err := c.read.QueryContext(ctx, `SELECT digest, media_type, artifact_type, annotations, length(bytes) FROM manifests
		WHERE repo = (SELECT id FROM repositories WHERE name = ?1) AND subject = ?2 AND subject <> ''
			AND (?3 = '' OR artifact_type = ?3) AND (pushed, id) > (?4, ?5)
		ORDER BY pushed, id`, repo, d.String(), artifactType, pushed, id)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		var r catalog.Referrer
		var name string
		var annotations []byte
		if err := rows.Scan(&name, &r.MediaType, &r.ArtifactType, &annotations, &r.Size); err != nil {
			return err
		}
		r.Digest = digest.Digest(name)
		if len(annotations) > 0 {
			if err := json.Unmarshal(annotations, &r.Annotations); err != nil {
				return fmt.Errorf("annotations of manifest %s: %w", name, err)
			}
		}
		if !fn(r) {
			return nil
		}
	}
	return rows.Err()
}

// Tag implements catalog.Repositories.
func (c *Catalog) Tag(ctx context.Context, repo, tag string) (digest.Digest, error) {
	var d string
	err := c.ask.tag.QueryRowContext(ctx, repo, tag).Scan(&d)
	if err != nil {
		return "", fmt.Errorf("tag %s:%s: %w", repo, tag, known(err))
	}
	return digest.Digest(d), nil
}

// DeleteTag implements catalog.Repositories.
func (c *Catalog) DeleteTag(ctx context.Context, repo, tag string) error {
	err := c.change(ctx, 0, func(ctx context.Context, tx *sql.Tx) ([]catalog.Change, error) {
		changes, err := c.deleteTag(ctx, tx, repo, tag, time.Now())
		if err != nil {
			return nil, err
		}
		if rule := c.immutable(repo, tag); rule != "" {
			return nil, immutableTag(repo, tag, rule)
		}
		return changes, nil
	})
	if err != nil {
		return fmt.Errorf("delete tag %s:%s: %w", repo, tag, err)
	}
	return nil
}

func dropTag(ctx context.Context, tx *sql.Tx, repo, tag string) error {
	return affected(tx.ExecContext(ctx, `DELETE FROM tags
		WHERE repo = (SELECT id FROM repositories WHERE name = ?) AND name = ?`, repo, tag))
}

// Tags implements catalog.Repositories.
func (c *Catalog) Tags(ctx context.Context, repo, after string, limit int) ([]string, error) {
	var id int64
	err := c.read.QueryRowContext(ctx, `SELECT id FROM repositories WHERE name = ?`, repo).Scan(&id)
	if err != nil {
		return nil, fmt.Errorf("tags of %s: %w", repo, known(err))
	}
	tags, err := c.strings(ctx, `SELECT name FROM tags WHERE repo = ? AND name > ? ORDER BY name LIMIT ?`,
		id, after, limit)
	if err != nil {
		return nil, fmt.Errorf("tags of %s: %w", repo, err)
	}
	return tags, nil
}

// ListRepositories implements catalog.Repositories.
func (c *Catalog) ListRepositories(ctx context.Context, after string, limit int) ([]string, error) {
	names, err := c.strings(ctx, `SELECT name FROM repositories WHERE name > ? ORDER BY name LIMIT ?`, after, limit)
	if err != nil {
		return nil, fmt.Errorf("list repositories: %w", err)
	}
	return names, nil
}

func (c *Catalog) strings(ctx context.Context, query string, args ...any) ([]string, error) {
	rows, err := c.read.QueryContext(ctx, query, args...)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var all []string
	for rows.Next() {
		var s string
		if err := rows.Scan(&s); err != nil {
			return nil, err
		}
		all = append(all, s)
	}
	return all, rows.Err()
}
