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
	"hydrofoil.dev/foil/internal/server/catalog/sqlite/bounds"
	"hydrofoil.dev/foil/internal/server/catalog/sqlite/database"
	"hydrofoil.dev/foil/internal/server/catalog/sqlite/registers"
)

// LinkBlob implements catalog.Repositories.
func (c *Catalog) LinkBlob(ctx context.Context, repo string, b catalog.Blob) error {
	err := c.db.Change(ctx, 0, func(ctx context.Context, tx *sql.Tx) ([]catalog.Change, error) {
		id, changes, err := registers.Repository(ctx, tx, repo)
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
			return database.Unlogged, nil
		}
		if err != nil && !errors.Is(err, sql.ErrNoRows) {
			return nil, err
		}
		changes = append(changes, catalog.Change{Kind: catalog.ChangedBlob, Repo: repo, Name: b.Digest.String(), Blob: b})
		return changes, c.Within(ctx, tx, repo, func() error { return registers.PutBlob(ctx, tx, id, b, c.leaseEnd()) })
	})
	if err != nil {
		return fmt.Errorf("record blob %s in %s: %w", b.Digest, repo, err)
	}
	return nil
}

// Blob implements catalog.Repositories.
func (c *Catalog) Blob(ctx context.Context, repo string, d digest.Digest) (catalog.Blob, error) {
	b := catalog.Blob{Digest: d}
	err := c.db.Read.QueryRowContext(ctx, `SELECT size, media_type FROM blobs
		WHERE digest = ? AND repo = (SELECT id FROM repositories WHERE name = ?)`, d.String(), repo).
		Scan(&b.Size, &b.MediaType)
	if err != nil {
		return catalog.Blob{}, fmt.Errorf("blob %s in %s: %w", d, repo, database.Known(err))
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
	err := c.db.Read.QueryRowContext(ctx, `SELECT size, media_type FROM blobs WHERE digest = ?
		ORDER BY repo LIMIT 1`, d.String()).Scan(&b.Size, &b.MediaType)
	if err != nil {
		return catalog.Blob{}, fmt.Errorf("blob %s in any repository: %w", d, database.Known(err))
	}
	return b, nil
}

// Holders implements catalog.Repositories.
func (c *Catalog) Holders(ctx context.Context, d digest.Digest) ([]string, error) {
	names, err := c.db.Strings(ctx, `SELECT name FROM repositories JOIN blobs ON repo = id WHERE digest = ? ORDER BY name`, d.String())
	if err != nil {
		return nil, fmt.Errorf("holders of blob %s: %w", d, err)
	}
	return names, nil
}

// UnlinkBlob implements catalog.Repositories.
func (c *Catalog) UnlinkBlob(ctx context.Context, repo string, d digest.Digest) error {
	err := c.db.Change(ctx, 0, func(ctx context.Context, tx *sql.Tx) ([]catalog.Change, error) {
		gone := catalog.Change{Kind: catalog.ChangedBlob, Repo: repo, Name: d.String(), Gone: true}
		return []catalog.Change{gone}, registers.DropBlob(ctx, tx, repo, d.String())
	})
	if err != nil {
		return fmt.Errorf("remove blob %s from %s: %w", d, repo, err)
	}
	return nil
}

// PutManifest implements catalog.Repositories.
func (c *Catalog) PutManifest(ctx context.Context, repo string, m catalog.Manifest, tags ...string) error {
	err := c.db.Change(ctx, len(m.Bytes), func(ctx context.Context, tx *sql.Tx) ([]catalog.Change, error) {
		id, changes, err := registers.Repository(ctx, tx, repo)
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
		if err := c.Within(ctx, tx, repo, func() error { return registers.PutManifest(ctx, tx, id, put) }); err != nil {
			return nil, err
		}
		if changes, err = registers.ForgetDeleted(ctx, tx, changes, repo, id, catalog.ChangedDeletedManifest, m.Digest.String()); err != nil {
			return nil, err
		}
		for _, tag := range tags {
			if changes, err = registers.ForgetDeleted(ctx, tx, changes, repo, id, catalog.ChangedDeletedTag, tag); err != nil {
				return nil, err
			}
			changes = append(changes, catalog.Change{Kind: catalog.ChangedTag, Repo: repo, Name: tag, Target: m.Digest})
			if err := c.MayMove(ctx, tx, repo, id, tag, m.Digest); err != nil {
				return nil, err
			}
			if err := registers.PutTag(ctx, tx, id, tag, m.Digest, m.Pushed); err != nil {
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

// Manifest implements catalog.Repositories.
func (c *Catalog) Manifest(ctx context.Context, repo string, d digest.Digest) (catalog.Manifest, error) {
	m, err := registers.ScanManifest(c.ask.manifest.QueryRowContext(ctx, repo, d.String()).Scan)
	if err != nil {
		return catalog.Manifest{}, fmt.Errorf("manifest %s in %s: %w", d, repo, database.Known(err))
	}
	return m, nil
}

// DeleteManifest implements catalog.Repositories.
func (c *Catalog) DeleteManifest(ctx context.Context, repo string, d digest.Digest) error {
	err := c.db.Change(ctx, 0, func(ctx context.Context, tx *sql.Tx) ([]catalog.Change, error) {
		if err := c.Removable(ctx, tx, repo, d); err != nil {
			return nil, err
		}
		at := time.Now()
		changes, err := c.keepManifest(ctx, tx, repo, d, at)
		if err != nil {
			return nil, err
		}
		if err := registers.DropManifest(ctx, tx, repo, d.String()); err != nil {
			return nil, err
		}
		changes = append(changes, catalog.Change{Kind: catalog.ChangedManifest, Repo: repo, Name: d.String(), Gone: true})
		tags, err := database.TextOf(ctx, tx, `SELECT name FROM tags
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
		err := c.db.Read.QueryRowContext(ctx, `SELECT pushed, id FROM manifests
			WHERE repo = (SELECT id FROM repositories WHERE name = ?) AND digest = ? AND subject = ?`, repo, after.String(), d.String()).Scan(&pushed, &id)
		if err != nil && !errors.Is(err, sql.ErrNoRows) {
			return err
		}
	}
	rows, err := c.db.Read.QueryContext(ctx, `SELECT digest, media_type, artifact_type, annotations, length(bytes) FROM manifests
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
		return "", fmt.Errorf("tag %s:%s: %w", repo, tag, database.Known(err))
	}
	return digest.Digest(d), nil
}

// DeleteTag implements catalog.Repositories.
func (c *Catalog) DeleteTag(ctx context.Context, repo, tag string) error {
	err := c.db.Change(ctx, 0, func(ctx context.Context, tx *sql.Tx) ([]catalog.Change, error) {
		changes, err := c.deleteTag(ctx, tx, repo, tag, time.Now())
		if err != nil {
			return nil, err
		}
		if rule := c.Immutable(repo, tag); rule != "" {
			return nil, bounds.ImmutableTag(repo, tag, rule)
		}
		return changes, nil
	})
	if err != nil {
		return fmt.Errorf("delete tag %s:%s: %w", repo, tag, err)
	}
	return nil
}

// Tags implements catalog.Repositories.
func (c *Catalog) Tags(ctx context.Context, repo, after string, limit int) ([]string, error) {
	var id int64
	err := c.db.Read.QueryRowContext(ctx, `SELECT id FROM repositories WHERE name = ?`, repo).Scan(&id)
	if err != nil {
		return nil, fmt.Errorf("tags of %s: %w", repo, database.Known(err))
	}
	tags, err := c.db.Strings(ctx, `SELECT name FROM tags WHERE repo = ? AND name > ? ORDER BY name LIMIT ?`,
		id, after, limit)
	if err != nil {
		return nil, fmt.Errorf("tags of %s: %w", repo, err)
	}
	return tags, nil
}

// ListRepositories implements catalog.Repositories.
func (c *Catalog) ListRepositories(ctx context.Context, after string, limit int) ([]string, error) {
	names, err := c.db.Strings(ctx, `SELECT name FROM repositories WHERE name > ? ORDER BY name LIMIT ?`, after, limit)
	if err != nil {
		return nil, fmt.Errorf("list repositories: %w", err)
	}
	return names, nil
}
