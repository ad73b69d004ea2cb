package sqlcat

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
	"hydrofoil.dev/foil/internal/server/catalog/sqlcat/bounds"
	"hydrofoil.dev/foil/internal/server/catalog/sqlcat/database"
	"hydrofoil.dev/foil/internal/server/catalog/sqlcat/registers"
)

// LinkBlob implements catalog.Repositories.
func (c *Catalog) LinkBlob(ctx context.Context, repo string, b catalog.Blob) error {
	err := c.db.Change(ctx, 0, func(ctx context.Context, tx *database.Tx) ([]catalog.Change, error) {
		id, changes, err := registers.Repository(ctx, tx, repo)
		if err != nil {
			return nil, err
		}
		was := catalog.Blob{Digest: b.Digest}
		err = tx.QueryRowContext(ctx, `UPDATE blobs SET leased = CASE WHEN $1 > leased THEN $1 ELSE leased END
			WHERE digest = $2 AND repo = $3 RETURNING size, media_type`,
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
	err := c.db.Row(ctx, `SELECT size, media_type FROM blobs
		WHERE digest = $1 AND repo = (SELECT id FROM repositories WHERE name = $2)`, []any{d.String(), repo}, &b.Size, &b.MediaType)
	if err != nil {
		return catalog.Blob{}, fmt.Errorf("blob %s in %s: %w", d, repo, err)
	}
	return b, nil
}

// Blobs implements catalog.Repositories.
func (c *Catalog) Blobs(ctx context.Context, repo string, ds []digest.Digest) ([]catalog.Blob, error) {
	found := make(map[digest.Digest]catalog.Blob, len(ds))
	list, err := database.List(ds)
	if err == nil {
		err = c.db.Rows(ctx, c.ask.blobs, []any{list, repo}, func(scan func(...any) error) error {
			var b catalog.Blob
			err := scan(&b.Digest, &b.Size, &b.MediaType)
			found[b.Digest] = b
			return err
		})
	}
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
	err := c.db.Row(ctx, `SELECT size, media_type FROM blobs WHERE digest = $1 ORDER BY repo LIMIT 1`, []any{d.String()}, &b.Size, &b.MediaType)
	if err != nil {
		return catalog.Blob{}, fmt.Errorf("blob %s in any repository: %w", d, err)
	}
	return b, nil
}

// Holders implements catalog.Repositories.
func (c *Catalog) Holders(ctx context.Context, d digest.Digest) ([]string, error) {
	names, err := c.db.Strings(ctx, `SELECT name FROM repositories JOIN blobs ON repo = id WHERE digest = $1 ORDER BY name`, d.String())
	if err != nil {
		return nil, fmt.Errorf("holders of blob %s: %w", d, err)
	}
	return names, nil
}

// UnlinkBlob implements catalog.Repositories.
func (c *Catalog) UnlinkBlob(ctx context.Context, repo string, d digest.Digest) error {
	err := c.db.Change(ctx, 0, func(ctx context.Context, tx *database.Tx) ([]catalog.Change, error) {
		id, err := registers.Hold(ctx, tx, repo)
		if err != nil {
			return nil, err
		}
		gone := catalog.Change{Kind: catalog.ChangedBlob, Repo: repo, Name: d.String(), Gone: true}
		return []catalog.Change{gone}, registers.DropBlob(ctx, tx, id, d.String())
	})
	if err != nil {
		return fmt.Errorf("remove blob %s from %s: %w", d, repo, err)
	}
	return nil
}

// PutManifest implements catalog.Repositories.
func (c *Catalog) PutManifest(ctx context.Context, repo string, m catalog.Manifest, tags ...string) error {
	err := c.db.Change(ctx, len(m.Bytes), func(ctx context.Context, tx *database.Tx) ([]catalog.Change, error) {
		id, changes, err := registers.Repository(ctx, tx, repo)
		if err != nil {
			return nil, err
		}
		put := m
		var was int64
		err = tx.QueryRowContext(ctx, `SELECT pushed FROM manifests WHERE repo = $1 AND digest = $2`, id, m.Digest.String()).Scan(&was)
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
	m, err := registers.ScanManifest(func(dest ...any) error {
		return c.db.Row(ctx, c.ask.manifest, []any{repo, d.String()}, dest...)
	})
	if err != nil {
		return catalog.Manifest{}, fmt.Errorf("manifest %s in %s: %w", d, repo, err)
	}
	return m, nil
}

// DeleteManifest implements catalog.Repositories.
func (c *Catalog) DeleteManifest(ctx context.Context, repo string, d digest.Digest) error {
	err := c.db.Change(ctx, 0, func(ctx context.Context, tx *database.Tx) ([]catalog.Change, error) {
		id, err := registers.Hold(ctx, tx, repo)
		if err != nil {
			return nil, err
		}
		if err := c.Removable(ctx, tx, repo, d); err != nil {
			return nil, err
		}
		at := time.Now()
		changes, err := c.keepManifest(ctx, tx, repo, id, d, at)
		if err != nil {
			return nil, err
		}
		if err := registers.DropManifest(ctx, tx, id, d.String()); err != nil {
			return nil, err
		}
		changes = append(changes, catalog.Change{Kind: catalog.ChangedManifest, Repo: repo, Name: d.String(), Gone: true})
		tags, err := database.TextOf(ctx, tx, `SELECT name FROM tags WHERE repo = $1 AND digest = $2`, id, d.String())
		if err != nil {
			return nil, err
		}
		for _, tag := range tags {
			gone, err := c.deleteTag(ctx, tx, repo, id, tag, at)
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
		err := c.db.Row(ctx, `SELECT pushed, id FROM manifests
			WHERE repo = (SELECT id FROM repositories WHERE name = $1) AND digest = $2 AND subject = $3`, []any{repo, after.String(), d.String()}, &pushed, &id)
		if err != nil && !errors.Is(err, catalog.ErrNotFound) {
			return err
		}
	}
	err := c.db.Rows(ctx, `SELECT digest, media_type, artifact_type, annotations, length(bytes) FROM manifests
		WHERE repo = (SELECT id FROM repositories WHERE name = $1) AND subject = $2 AND subject <> ''
			AND ($3 = '' OR artifact_type = $3) AND (pushed, id) > ($4, $5)
		ORDER BY pushed, id`, []any{repo, d.String(), artifactType, pushed, id}, func(scan func(...any) error) error {
		var r catalog.Referrer
		var name string
		var annotations []byte
		if err := scan(&name, &r.MediaType, &r.ArtifactType, &annotations, &r.Size); err != nil {
			return err
		}
		r.Digest = digest.Digest(name)
		if len(annotations) > 0 {
			if err := json.Unmarshal(annotations, &r.Annotations); err != nil {
				return fmt.Errorf("annotations of manifest %s: %w", name, err)
			}
		}
		if !fn(r) {
			return errEnough
		}
		return nil
	})
	if errors.Is(err, errEnough) {
		err = nil
	}
	return err
}

// errEnough ends a reading.
var errEnough = errors.New("enough")

// Tag implements catalog.Repositories.
func (c *Catalog) Tag(ctx context.Context, repo, tag string) (digest.Digest, error) {
	var d string
	err := c.db.Row(ctx, c.ask.tag, []any{repo, tag}, &d)
	if err != nil {
		return "", fmt.Errorf("tag %s:%s: %w", repo, tag, err)
	}
	return digest.Digest(d), nil
}

// DeleteTag implements catalog.Repositories.
func (c *Catalog) DeleteTag(ctx context.Context, repo, tag string) error {
	err := c.db.Change(ctx, 0, func(ctx context.Context, tx *database.Tx) ([]catalog.Change, error) {
		id, err := registers.Hold(ctx, tx, repo)
		if err != nil {
			return nil, err
		}
		changes, err := c.deleteTag(ctx, tx, repo, id, tag, time.Now())
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
	err := c.db.Row(ctx, `SELECT id FROM repositories WHERE name = $1`, []any{repo}, &id)
	if err != nil {
		return nil, fmt.Errorf("tags of %s: %w", repo, err)
	}
	tags, err := c.db.Strings(ctx, `SELECT name FROM tags WHERE repo = $1 AND name > $2 ORDER BY name LIMIT $3`,
		id, after, database.Most(limit))
	if err != nil {
		return nil, fmt.Errorf("tags of %s: %w", repo, err)
	}
	return tags, nil
}

// ListRepositories implements catalog.Repositories.
func (c *Catalog) ListRepositories(ctx context.Context, after string, limit int) ([]string, error) {
	names, err := c.db.Strings(ctx, `SELECT name FROM repositories WHERE name > $1 ORDER BY name LIMIT $2`, after, database.Most(limit))
	if err != nil {
		return nil, fmt.Errorf("list repositories: %w", err)
	}
	return names, nil
}
