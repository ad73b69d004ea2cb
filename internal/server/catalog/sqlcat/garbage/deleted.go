package garbage

import (
	"cmp"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/catalog/sqlcat/database"
	"hydrofoil.dev/foil/internal/server/catalog/sqlcat/registers"
)

// Deleted implements catalog.Deleted.
func (g *Garbage) Deleted(ctx context.Context, repo string) ([]catalog.DeletedItem, error) {
	return g.deletedItems(ctx, `SELECT * FROM (SELECT r.name, '' AS tag, d.digest, d.deleted AS at, length(d.bytes) AS size FROM deleted_manifests d JOIN repositories r ON r.id = d.repo
			WHERE $1 IN ('', r.name)
		UNION ALL SELECT r.name, d.name, d.digest, d.deleted, 0 FROM deleted_tags d JOIN repositories r ON r.id = d.repo
			WHERE $1 IN ('', r.name))
		AS items ORDER BY tag <> '', at, 1, 2, 3`, repo)
}

func (g *Garbage) deletedItems(ctx context.Context, query string, args ...any) (items []catalog.DeletedItem, err error) {
	err = g.db.Rows(ctx, query, args, func(scan func(...any) error) error {
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
func (g *Garbage) Undelete(ctx context.Context, repo string, items []catalog.DeletedItem) (restored []catalog.DeletedItem, err error) {
	err = g.db.Change(ctx, 0, func(ctx context.Context, tx *database.Tx) ([]catalog.Change, error) {
		restored = nil
		id, err := registers.Hold(ctx, tx, repo)
		if err != nil {
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
func undeleteManifest(ctx context.Context, tx *database.Tx, repo string, id int64, it catalog.DeletedItem) ([]catalog.Change, error) {
	m, err := registers.ScanManifest(tx.QueryRowContext(ctx, `SELECT `+registers.ManifestColumns+` FROM deleted_manifests WHERE repo = $1 AND digest = $2`,
		id, it.Digest.String()).Scan)
	if errors.Is(err, sql.ErrNoRows) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	needs, err := database.List(blobsOf(m.Bytes))
	if err != nil {
		return nil, err
	}
	var lacks int
	err = tx.QueryRowContext(ctx, `SELECT count(*) FROM `+tx.Texts("$1")+` AS needs
		WHERE NOT EXISTS (SELECT 1 FROM blobs WHERE digest = needs.value AND repo = $2)`, needs, id).Scan(&lacks)
	if err != nil || lacks > 0 {
		return nil, err
	}
	changes := []catalog.Change{{Kind: catalog.ChangedManifest, Repo: repo, Name: m.Digest.String(), Manifest: m}}
	if err := registers.PutManifest(ctx, tx, id, m); err != nil {
		return nil, err
	}
	return registers.ForgetDeleted(ctx, tx, changes, repo, id, catalog.ChangedDeletedManifest, m.Digest.String())
}

// blobsOf returns what a manifest cannot be without. Its own fields count: an annotation may name anything, what an index names are
// manifests, and what has urls is elsewhere.
func blobsOf(manifest []byte) (needs []string) {
	var fields struct{ Layers, Blobs, Config json.RawMessage }
	if json.Unmarshal(manifest, &fields) != nil {
		return nil // nobody knows
	}
	type descriptor struct {
		Digest string
		URLs   json.RawMessage
	}
	var all []descriptor
	for _, list := range []json.RawMessage{fields.Layers, fields.Blobs} {
		var some []descriptor
		if json.Unmarshal(list, &some) == nil {
			all = append(all, some...)
		}
	}
	var config descriptor
	if json.Unmarshal(fields.Config, &config) == nil {
		all = append(all, config)
	}
	for _, d := range all {
		if d.Digest != "" && d.URLs == nil {
			needs = append(needs, d.Digest)
		}
	}
	return needs
}

// undeleteTag brings a tag back whose manifest is there, unless there is another one by now.
func undeleteTag(ctx context.Context, tx *database.Tx, repo string, id int64, it catalog.DeletedItem) ([]catalog.Change, error) {
	var d string
	err := tx.QueryRowContext(ctx, `SELECT digest FROM deleted_tags t WHERE repo = $1 AND name = $2
		AND EXISTS (SELECT 1 FROM manifests WHERE repo = $1 AND digest = t.digest)
		AND NOT EXISTS (SELECT 1 FROM tags WHERE repo = $1 AND name = $2)`, id, it.Tag).Scan(&d)
	if errors.Is(err, sql.ErrNoRows) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	changes := []catalog.Change{{Kind: catalog.ChangedTag, Repo: repo, Name: it.Tag, Target: digest.Digest(d)}}
	if err := registers.PutTag(ctx, tx, id, it.Tag, digest.Digest(d), time.Now()); err != nil {
		return nil, err
	}
	return registers.ForgetDeleted(ctx, tx, changes, repo, id, catalog.ChangedDeletedTag, it.Tag)
}

// Manifests implements catalog.Deleted.
func (g *Garbage) Manifests(ctx context.Context, repo string) (all []digest.Digest, err error) {
	var id int64
	if err := g.db.Row(ctx, `SELECT id FROM repositories WHERE name = $1`, []any{repo}, &id); err != nil {
		return nil, fmt.Errorf("manifests of %s: %w", repo, err)
	}
	all, err = g.digests(ctx, `SELECT digest FROM manifests WHERE repo = $1 ORDER BY id DESC`, id)
	if err != nil {
		return nil, fmt.Errorf("manifests of %s: %w", repo, err)
	}
	return all, nil
}

// Family implements catalog.Deleted.
func (g *Garbage) Family(ctx context.Context, repo string, d digest.Digest) (f catalog.Family, err error) {
	const of = `(SELECT id FROM repositories WHERE name = $1)`
	err = g.db.Row(ctx, `SELECT EXISTS (SELECT 1 FROM tags WHERE repo = `+of+` AND digest = $2)
		OR EXISTS (SELECT 1 FROM refs r JOIN manifests m ON m.repo = r.repo AND m.digest = r.manifest
			WHERE r.digest = $2 AND r.repo = `+of+` AND m.digest <> $2 AND m.subject <> $2)`, []any{repo, d.String()}, &f.Named)
	if err == nil {
		f.Children, err = g.digests(ctx, `SELECT r.digest FROM refs r JOIN known_manifests m ON m.repo = r.repo AND m.digest = r.digest
			WHERE r.repo = `+of+` AND r.manifest = $2 AND r.digest <> $2
				AND r.digest <> (SELECT subject FROM known_manifests WHERE repo = r.repo AND digest = $2)`, repo, d.String())
	}
	if err == nil {
		f.Referrers, err = g.digests(ctx, `SELECT digest FROM known_manifests WHERE repo = `+of+` AND subject = $2`, repo, d.String())
	}
	if err != nil {
		return f, fmt.Errorf("what belongs to manifest %s of %s: %w", d, repo, err)
	}
	return f, nil
}

func (g *Garbage) digests(ctx context.Context, query string, args ...any) (all []digest.Digest, err error) {
	err = g.db.Rows(ctx, query, args, func(scan func(...any) error) error {
		var d string
		err := scan(&d)
		all = append(all, digest.Digest(d))
		return err
	})
	return all, err
}

// Purge implements catalog.Deleted.
func (g *Garbage) Purge(ctx context.Context, before time.Time, limit int) (n int, err error) {
	err = g.db.Change(ctx, 0, func(ctx context.Context, tx *database.Tx) ([]catalog.Change, error) {
		var changes []catalog.Change
		type item struct {
			id         int64
			repo, name string
			kind       catalog.ChangeKind
		}
		var items []item
		err := tx.Rows(ctx, fmt.Sprintf(`SELECT * FROM (SELECT r.id, r.name, d.digest, %d, deleted FROM deleted_manifests d JOIN repositories r ON r.id = d.repo
				WHERE deleted < $1 UNION ALL
			SELECT r.id, r.name, d.name, %d, deleted FROM deleted_tags d JOIN repositories r ON r.id = d.repo WHERE deleted < $1)
			AS items ORDER BY deleted LIMIT $2`, catalog.ChangedDeletedManifest, catalog.ChangedDeletedTag),
			[]any{before.UnixNano(), limit}, func(scan func(...any) error) error {
				var it item
				var at int64
				err := scan(&it.id, &it.repo, &it.name, &it.kind, &at)
				items = append(items, it)
				return err
			})
		if err != nil {
			return nil, err
		}
		slices.SortStableFunc(items, func(a, b item) int { return cmp.Compare(a.id, b.id) })
		for i, it := range items {
			if i == 0 || it.id != items[i-1].id {
				if _, err := registers.HoldID(ctx, tx, it.id); err != nil && !errors.Is(err, catalog.ErrNotFound) {
					return nil, err
				}
			}
			if changes, err = registers.ForgetDeleted(ctx, tx, changes, it.repo, it.id, it.kind, it.name); err != nil {
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
