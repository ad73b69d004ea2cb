// Package garbage finds out what nobody needs any more (catalog.Garbage): the queues of reviews, which triggers of the
// schema fill, what was deleted and can be brought back, and the objects that no row names. Packs are reviewed in
// package packs.
package garbage

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/catalog/sqlite/database"
	"hydrofoil.dev/foil/internal/server/catalog/sqlite/registers"
	"hydrofoil.dev/foil/internal/server/catalog/sqlite/schema"
)

// Garbage is the part of a catalog that knows what has to be reviewed.
type Garbage struct{ db *database.DB }

// New returns that of a file.
func New(db *database.DB) *Garbage { return &Garbage{db} }

// one is one review, of a kind that has a repository and a name.
type one struct {
	repo int64
	name string
}

// collect decides about the reviews of a kind that are due, in one transaction. dead returns the changes of what is
// forgotten: nil if it is needed, or is not there. A review that is over goes.
func (g *Garbage) collect(ctx context.Context, kind schema.ReviewKind, d catalog.Due, unless string, dead func(ctx context.Context, tx *sql.Tx, r one) ([]catalog.Change, error)) (done catalog.Collected, err error) {
	err = g.db.Change(ctx, 0, func(ctx context.Context, tx *sql.Tx) ([]catalog.Change, error) {
		done = catalog.Collected{}
		if unless != "" {
			var n int
			if err := tx.QueryRowContext(ctx, `SELECT EXISTS (`+unless+`)`).Scan(&n); err != nil || n > 0 {
				return nil, err
			}
		}
		reviews, err := dueReviews(ctx, tx, kind, d)
		if err != nil || len(reviews) == 0 {
			return nil, err
		}
		all := database.Unlogged
		for _, r := range reviews {
			changes, err := dead(ctx, tx, r)
			done.Reviewed++
			switch {
			case errors.Is(err, catalog.ErrInUse):
				done.Leased++
				continue
			case err != nil:
				return nil, err
			case changes != nil:
				done.Dead++
				all = append(all, changes...)
			}
			if _, err := tx.ExecContext(ctx, `DELETE FROM reviews WHERE kind = ? AND repo = ? AND name = ? AND later <= ?`,
				int(kind), r.repo, r.name, d.Now.UnixNano()); err != nil {
				return nil, err
			}
		}
		return all, nil
	})
	if err != nil {
		return done, fmt.Errorf("review %s: %w", schema.ReviewNames[kind], err)
	}
	return done, nil
}

func dueReviews(ctx context.Context, tx *sql.Tx, kind schema.ReviewKind, d catalog.Due) (reviews []one, err error) {
	rows, err := tx.QueryContext(ctx, `SELECT repo, name FROM reviews v WHERE `+schema.Due+` ORDER BY v.since LIMIT ?4`, schema.DueArgs(kind, d)...)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() {
		var r one
		if err := rows.Scan(&r.repo, &r.name); err != nil {
			return nil, err
		}
		reviews = append(reviews, r)
	}
	return reviews, rows.Err()
}

// CollectLinks implements catalog.Garbage.
func (g *Garbage) CollectLinks(ctx context.Context, d catalog.Due) (catalog.Collected, error) {
	return g.collect(ctx, schema.ReviewLink, d, "", func(ctx context.Context, tx *sql.Tx, r one) ([]catalog.Change, error) {
		var repo string
		var leased int64
		err := tx.QueryRowContext(ctx, `SELECT r.name, b.leased FROM blobs b JOIN repositories r ON r.id = b.repo
			WHERE b.digest = ?1 AND b.repo = ?2 AND NOT EXISTS (SELECT 1 FROM refs WHERE digest IN (?1, '*') AND repo = ?2)`, r.name, r.repo).Scan(&repo, &leased)
		if errors.Is(err, sql.ErrNoRows) {
			return nil, nil
		}
		if err != nil {
			return nil, err
		}
		if leased > d.Now.UnixNano() {
			_, err := tx.ExecContext(ctx, `UPDATE reviews SET later = ?, tries = tries + 1 WHERE kind = ? AND repo = ? AND name = ?`,
				leased, int(schema.ReviewLink), r.repo, r.name)
			return nil, errors.Join(catalog.ErrInUse, err)
		}
		return []catalog.Change{{Kind: catalog.ChangedBlob, Repo: repo, Name: r.name, Gone: true}}, registers.DropBlob(ctx, tx, repo, r.name)
	})
}

// removing is for how long nobody else is given a blob to remove.
const removing = time.Minute

// CollectLayers implements catalog.Garbage. The review stays until Removed.
func (g *Garbage) CollectLayers(ctx context.Context, d catalog.Due) (blobs []digest.Digest, done catalog.Collected, err error) {
	done, err = g.collect(ctx, schema.ReviewBlob, d, "", func(ctx context.Context, tx *sql.Tx, r one) ([]catalog.Change, error) {
		var held bool
		if err := tx.QueryRowContext(ctx, `SELECT EXISTS (SELECT 1 FROM blobs WHERE digest = ?)`, r.name).Scan(&held); err != nil || held {
			return nil, err
		}
		blobs = append(blobs, digest.Digest(r.name))
		if _, err := tx.ExecContext(ctx, `UPDATE reviews SET later = ? WHERE kind = ? AND name = ?`,
			d.Now.Add(removing).UnixNano(), int(schema.ReviewBlob), r.name); err != nil {
			return nil, err
		}
		err := database.Affected(tx.ExecContext(ctx, `DELETE FROM layers WHERE blob = ?`, r.name))
		if errors.Is(err, catalog.ErrNotFound) {
			return database.Unlogged, nil
		}
		return []catalog.Change{{Kind: catalog.ChangedLayer, Name: r.name, Gone: true}}, err
	})
	return blobs, done, err
}

// Removed implements catalog.Garbage. An event that came meanwhile has asked again.
func (g *Garbage) Removed(ctx context.Context, blobs []digest.Digest) error {
	err := g.db.Update(ctx, func(tx *sql.Tx) error {
		for _, d := range blobs {
			if _, err := tx.ExecContext(ctx, `DELETE FROM reviews WHERE kind = ? AND name = ? AND later > 0`, int(schema.ReviewBlob), d.String()); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("record %d blobs that were removed: %w", len(blobs), err)
	}
	return nil
}

// notIndexed is why nobody knows which rootfs are needed.
const notIndexed = `SELECT 1 FROM reviews WHERE kind = 1`

// CollectRootfs implements catalog.Garbage.
func (g *Garbage) CollectRootfs(ctx context.Context, d catalog.Due) (catalog.Collected, error) {
	return g.collect(ctx, schema.ReviewRootfs, d, notIndexed, func(ctx context.Context, tx *sql.Tx, r one) ([]catalog.Change, error) {
		err := database.Affected(tx.ExecContext(ctx, `DELETE FROM rootfs WHERE chain_id = ?1 AND NOT EXISTS (SELECT 1 FROM images WHERE chain_id = ?1)`, r.name))
		if errors.Is(err, catalog.ErrNotFound) {
			return nil, nil
		}
		return []catalog.Change{{Kind: catalog.ChangedRootfs, Name: r.name, Gone: true}}, err
	})
}

// CollectStartup implements catalog.Garbage.
func (g *Garbage) CollectStartup(ctx context.Context, d catalog.Due) (catalog.Collected, error) {
	return g.collect(ctx, schema.ReviewStartup, d, notIndexed, func(ctx context.Context, tx *sql.Tx, r one) ([]catalog.Change, error) {
		var needed bool
		err := tx.QueryRowContext(ctx, `SELECT EXISTS (SELECT 1 FROM images i JOIN repositories r ON r.id = i.repo
			WHERE i.chain_id = s.chain_id AND r.name = s.repo) FROM startup_images s WHERE id = ?`, r.name).Scan(&needed)
		if errors.Is(err, sql.ErrNoRows) || err == nil && needed {
			return nil, nil
		}
		for _, query := range []string{`DELETE FROM traces WHERE image = ?`, `DELETE FROM startup_images WHERE id = ?`} {
			if err == nil {
				_, err = tx.ExecContext(ctx, query, r.name)
			}
		}
		return database.Unlogged, err
	})
}

// CollectRepositories implements catalog.Garbage.
func (g *Garbage) CollectRepositories(ctx context.Context, d catalog.Due) (catalog.Collected, error) {
	return g.collect(ctx, schema.ReviewRepository, d, "", func(ctx context.Context, tx *sql.Tx, r one) ([]catalog.Change, error) {
		var name string
		err := tx.QueryRowContext(ctx, `SELECT name FROM repositories WHERE id = ?`, r.repo).Scan(&name)
		if err == nil {
			err = registers.DropRepository(ctx, tx, name)
		}
		if errors.Is(err, sql.ErrNoRows) || errors.Is(err, catalog.ErrNotFound) {
			return nil, nil
		}
		return []catalog.Change{{Kind: catalog.ChangedRepository, Repo: name, Gone: true}}, err
	})
}

// Unindexed implements catalog.Garbage.
func (g *Garbage) Unindexed(ctx context.Context, limit int) (all []catalog.Unindexed, err error) {
	if err := g.db.Update(ctx, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `DELETE FROM reviews WHERE kind = 1 AND NOT EXISTS (SELECT 1 FROM known_manifests WHERE repo = reviews.repo AND digest = reviews.name)`)
		return err
	}); err != nil {
		return nil, fmt.Errorf("list manifests to look at: %w", err)
	}
	err = g.db.Rows(ctx, `SELECT r.name, `+registers.ManifestColumns+` FROM (SELECT * FROM reviews WHERE kind = 1 LIMIT ?) v JOIN known_manifests m ON m.repo = v.repo AND m.digest = v.name
		JOIN repositories r ON r.id = v.repo`, []any{limit}, func(scan func(...any) error) error {
		var u catalog.Unindexed
		var err error
		u.Manifest, err = registers.ScanManifest(func(dest ...any) error { return scan(append([]any{&u.Repository}, dest...)...) })
		all = append(all, u)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list manifests to look at: %w", err)
	}
	return all, nil
}

// PutImage implements catalog.Garbage. A manifest that is gone by now is no image.
func (g *Garbage) PutImage(ctx context.Context, m catalog.Unindexed, chainID digest.Digest) error {
	err := g.db.Update(ctx, func(tx *sql.Tx) error {
		var repo int64
		err := tx.QueryRowContext(ctx, `SELECT id FROM repositories WHERE name = ?`, m.Repository).Scan(&repo)
		if errors.Is(err, sql.ErrNoRows) {
			return nil
		}
		d := m.Manifest.Digest.String()
		if err == nil && chainID != "" {
			_, err = tx.ExecContext(ctx, `INSERT INTO images SELECT ?1, ?2, ?3 WHERE EXISTS (SELECT 1 FROM known_manifests WHERE repo = ?1 AND digest = ?2)
				ON CONFLICT (repo, manifest) DO UPDATE SET chain_id = excluded.chain_id`, repo, d, chainID.String())
		}
		if err == nil {
			_, err = tx.ExecContext(ctx, `DELETE FROM reviews WHERE kind = 1 AND repo = ? AND name = ?`, repo, d)
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("record image %s of %s: %w", m.Manifest.Digest, m.Repository, err)
	}
	return nil
}

// GarbageStats implements catalog.Garbage.
func (g *Garbage) GarbageStats(ctx context.Context, d catalog.Due) (s catalog.GarbageStats, err error) {
	fail := func(err error) (catalog.GarbageStats, error) {
		return s, fmt.Errorf("count what is to be collected: %w", database.Known(err))
	}
	for kind := schema.ReviewImage; kind <= schema.ReviewRepository; kind++ {
		q := catalog.QueueStats{Name: schema.ReviewNames[kind]}
		var oldest int64
		err := g.db.Read.QueryRowContext(ctx, `SELECT count(*), coalesce(sum(`+schema.Due+`), 0), coalesce(min(since), 0) FROM reviews v WHERE kind = ?1`,
			schema.DueArgs(kind, d)[:3]...).Scan(&q.Length, &q.Due, &oldest)
		if err != nil {
			return fail(err)
		}
		if q.Length > 0 {
			q.Oldest = time.Unix(0, oldest)
		}
		s.Queues = append(s.Queues, q)
	}
	q := catalog.QueueStats{Name: "objects"}
	var oldest int64
	err = g.db.Read.QueryRowContext(ctx, `SELECT (SELECT count(*) FROM doomed), (SELECT coalesce(min(since), 0) FROM doomed),
		(SELECT count(*) FROM blobs WHERE leased > ?), (SELECT count(*) FROM deleted_manifests) + (SELECT count(*) FROM deleted_tags),
		(SELECT count(*) FROM packs), (SELECT coalesce(sum(size), 0) FROM packs), (SELECT coalesce(sum(dead), 0) FROM packs)`, d.Now.UnixNano()).
		Scan(&q.Length, &oldest, &s.Leased, &s.DeletedThings, &s.Packs, &s.PackBytes, &s.DeadBytes)
	if err != nil {
		return fail(err)
	}
	if q.Due = q.Length; q.Length > 0 {
		q.Oldest = time.Unix(0, oldest)
	}
	s.Queues = append(s.Queues, q)
	err = g.db.Read.QueryRowContext(ctx, `SELECT coalesce(sum(size) FILTER (WHERE n = 0), 0), coalesce(sum(size) FILTER (WHERE n = 1), 0) FROM (
		SELECT max(b.size) AS size, max(CASE WHEN m.digest IS NOT NULL THEN 2 WHEN r.digest IS NOT NULL THEN 1 ELSE 0 END) AS n
			FROM blobs b LEFT JOIN refs r ON r.digest IN (b.digest, '*') AND r.repo = b.repo
			LEFT JOIN manifests m ON m.repo = r.repo AND m.digest = r.manifest GROUP BY b.digest)`).Scan(&s.Unnamed, &s.InWindow)
	if err != nil {
		return fail(err)
	}
	return s, nil
}
