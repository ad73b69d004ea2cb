// Package garbage finds out what nobody needs any more (catalog.Garbage): the queues of reviews, which triggers of the
// schema fill, what was deleted and can be brought back, and the objects that no row names. Packs are reviewed in
// package packs.
package garbage

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/catalog/sqlcat/database"
	"hydrofoil.dev/foil/internal/server/catalog/sqlcat/registers"
	"hydrofoil.dev/foil/internal/server/catalog/sqlcat/schema"
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
func (g *Garbage) collect(ctx context.Context, kind schema.ReviewKind, d catalog.Due, unless string, dead func(ctx context.Context, tx *database.Tx, r one) ([]catalog.Change, error)) (done catalog.Collected, err error) {
	err = g.db.Change(ctx, 0, func(ctx context.Context, tx *database.Tx) ([]catalog.Change, error) {
		done = catalog.Collected{}
		if unless != "" {
			var is bool
			if err := tx.QueryRowContext(ctx, `SELECT EXISTS (`+unless+`)`).Scan(&is); err != nil || is {
				return nil, err
			}
		}
		reviews, err := dueReviews(ctx, tx, kind, d)
		if err != nil || len(reviews) == 0 {
			return nil, err
		}
		all := database.Unlogged
		for _, r := range reviews {
			if mine, err := take(ctx, tx, kind, d, r); err != nil || !mine {
				if err != nil {
					return nil, err
				}
				continue
			}
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
			if _, err := tx.ExecContext(ctx, `DELETE FROM reviews WHERE kind = $1 AND repo = $2 AND name = $3 AND later <= $4`,
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

// take holds the repository of a review, and then the review, in the order of those who ask for reviews; false: somebody else has it, or it
// is not due any more.
func take(ctx context.Context, tx *database.Tx, kind schema.ReviewKind, d catalog.Due, r one) (mine bool, err error) {
	if tx.LockFree == "" {
		return true, nil
	}
	if r.repo != 0 {
		if _, err := registers.HoldID(ctx, tx, r.repo); err != nil && !errors.Is(err, catalog.ErrNotFound) {
			return false, err
		}
	}
	var repo int64
	err = tx.QueryRowContext(ctx, `SELECT repo FROM reviews v WHERE `+schema.Due+` AND repo = $4 AND name = $5`+tx.LockFree,
		append(schema.DueArgs(kind, d)[:3], r.repo, r.name)...).Scan(&repo)
	if errors.Is(err, sql.ErrNoRows) {
		return false, nil
	}
	return err == nil, err
}

// dueReviews returns them in the order of their repositories.
func dueReviews(ctx context.Context, tx *database.Tx, kind schema.ReviewKind, d catalog.Due) (reviews []one, err error) {
	err = tx.Rows(ctx, `SELECT repo, name FROM reviews v WHERE `+schema.Due+` ORDER BY v.since LIMIT $4`, schema.DueArgs(kind, d), func(scan func(...any) error) error {
		var r one
		err := scan(&r.repo, &r.name)
		reviews = append(reviews, r)
		return err
	})
	slices.SortStableFunc(reviews, func(a, b one) int { return cmp.Or(cmp.Compare(a.repo, b.repo), cmp.Compare(a.name, b.name)) })
	return reviews, err
}

// CollectLinks implements catalog.Garbage.
func (g *Garbage) CollectLinks(ctx context.Context, d catalog.Due) (catalog.Collected, error) {
	return g.collect(ctx, schema.ReviewLink, d, "", func(ctx context.Context, tx *database.Tx, r one) ([]catalog.Change, error) {
		var repo string
		var leased int64
		err := tx.QueryRowContext(ctx, `SELECT r.name, b.leased FROM blobs b JOIN repositories r ON r.id = b.repo
			WHERE b.digest = $1 AND b.repo = $2 AND NOT EXISTS (SELECT 1 FROM refs WHERE digest IN ($1, '*') AND repo = $2)`+tx.Lock, r.name, r.repo).Scan(&repo, &leased)
		if errors.Is(err, sql.ErrNoRows) {
			return nil, nil
		}
		if err != nil {
			return nil, err
		}
		if leased > d.Now.UnixNano() {
			_, err := tx.ExecContext(ctx, `UPDATE reviews SET later = $1, tries = tries + 1 WHERE kind = $2 AND repo = $3 AND name = $4`,
				leased, int(schema.ReviewLink), r.repo, r.name)
			return nil, errors.Join(catalog.ErrInUse, err)
		}
		return []catalog.Change{{Kind: catalog.ChangedBlob, Repo: repo, Name: r.name, Gone: true}}, registers.DropBlob(ctx, tx, r.repo, r.name)
	})
}

// removing is for how long nobody else is given a blob to remove.
const removing = time.Minute

// CollectLayers implements catalog.Garbage. The review stays until Removed.
func (g *Garbage) CollectLayers(ctx context.Context, d catalog.Due) (_ []digest.Digest, done catalog.Collected, err error) {
	found := make(map[digest.Digest]bool) // it may run again
	done, err = g.collect(ctx, schema.ReviewBlob, d, "", func(ctx context.Context, tx *database.Tx, r one) ([]catalog.Change, error) {
		var held bool
		if err := tx.QueryRowContext(ctx, `SELECT EXISTS (SELECT 1 FROM blobs WHERE digest = $1)`, r.name).Scan(&held); err != nil || held {
			return nil, err
		}
		found[digest.Digest(r.name)] = true
		if _, err := tx.ExecContext(ctx, `UPDATE reviews SET later = $1 WHERE kind = $2 AND name = $3`,
			d.Now.Add(removing).UnixNano(), int(schema.ReviewBlob), r.name); err != nil {
			return nil, err
		}
		err := database.Affected(tx.ExecContext(ctx, `DELETE FROM layers WHERE blob = $1`, r.name))
		if errors.Is(err, catalog.ErrNotFound) {
			return database.Unlogged, nil
		}
		return []catalog.Change{{Kind: catalog.ChangedLayer, Name: r.name, Gone: true}}, err
	})
	return slices.Sorted(maps.Keys(found)), done, err
}

// Removed implements catalog.Garbage. An event that came meanwhile has asked again.
func (g *Garbage) Removed(ctx context.Context, blobs []digest.Digest) error {
	err := g.db.Update(ctx, func(tx *database.Tx) error {
		for _, d := range blobs {
			if _, err := tx.ExecContext(ctx, `DELETE FROM reviews WHERE kind = $1 AND name = $2 AND later > 0`, int(schema.ReviewBlob), d.String()); err != nil {
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
	return g.collect(ctx, schema.ReviewRootfs, d, notIndexed, func(ctx context.Context, tx *database.Tx, r one) ([]catalog.Change, error) {
		err := database.Affected(tx.ExecContext(ctx, `DELETE FROM rootfs WHERE chain_id = $1 AND NOT EXISTS (SELECT 1 FROM images WHERE chain_id = $1)`, r.name))
		if errors.Is(err, catalog.ErrNotFound) {
			return nil, nil
		}
		return []catalog.Change{{Kind: catalog.ChangedRootfs, Name: r.name, Gone: true}}, err
	})
}

// CollectStartup implements catalog.Garbage.
func (g *Garbage) CollectStartup(ctx context.Context, d catalog.Due) (catalog.Collected, error) {
	return g.collect(ctx, schema.ReviewStartup, d, notIndexed, func(ctx context.Context, tx *database.Tx, r one) ([]catalog.Change, error) {
		var needed bool
		err := tx.QueryRowContext(ctx, `SELECT EXISTS (SELECT 1 FROM images i JOIN repositories r ON r.id = i.repo
			WHERE i.chain_id = s.chain_id AND r.name = s.repo) FROM startup_images s WHERE id = $1`+tx.Lock, r.name).Scan(&needed)
		if errors.Is(err, sql.ErrNoRows) || err == nil && needed {
			return nil, nil
		}
		for _, query := range []string{`DELETE FROM traces WHERE image = $1`, `DELETE FROM startup_images WHERE id = $1`} {
			if err == nil {
				_, err = tx.ExecContext(ctx, query, r.name)
			}
		}
		return database.Unlogged, err
	})
}

// CollectRepositories implements catalog.Garbage.
func (g *Garbage) CollectRepositories(ctx context.Context, d catalog.Due) (catalog.Collected, error) {
	return g.collect(ctx, schema.ReviewRepository, d, "", func(ctx context.Context, tx *database.Tx, r one) ([]catalog.Change, error) {
		name, err := registers.HoldID(ctx, tx, r.repo)
		if err == nil {
			err = registers.DropRepository(ctx, tx, name)
		}
		if errors.Is(err, catalog.ErrNotFound) {
			return nil, nil
		}
		return []catalog.Change{{Kind: catalog.ChangedRepository, Repo: name, Gone: true}}, err
	})
}

// Unindexed implements catalog.Garbage.
func (g *Garbage) Unindexed(ctx context.Context, limit int) (all []catalog.Unindexed, err error) {
	if err := g.dropGone(ctx); err != nil {
		return nil, fmt.Errorf("list manifests to look at: %w", err)
	}
	err = g.db.Rows(ctx, `SELECT r.name, `+registers.ManifestColumns+` FROM (SELECT * FROM reviews WHERE kind = 1 LIMIT $1) v JOIN known_manifests m ON m.repo = v.repo AND m.digest = v.name
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

// dropGone drops reviews of manifests that are gone.
func (g *Garbage) dropGone(ctx context.Context) error {
	const gone = ` kind = 1 AND NOT EXISTS (SELECT 1 FROM known_manifests m WHERE m.repo = reviews.repo AND m.digest = reviews.name)`
	var repos []int64
	err := g.db.Rows(ctx, `SELECT DISTINCT repo FROM reviews WHERE`+gone, nil, func(scan func(...any) error) error {
		var id int64
		err := scan(&id)
		repos = append(repos, id)
		return err
	})
	for _, id := range repos {
		if err != nil {
			return err
		}
		err = g.db.Update(ctx, func(tx *database.Tx) error {
			if _, err := registers.HoldID(ctx, tx, id); err != nil && !errors.Is(err, catalog.ErrNotFound) {
				return err
			}
			_, err := tx.ExecContext(ctx, `DELETE FROM reviews WHERE repo = $1 AND`+gone, id)
			return err
		})
	}
	return err
}

// PutImage implements catalog.Garbage. A manifest that is gone by now is no image.
func (g *Garbage) PutImage(ctx context.Context, m catalog.Unindexed, chainID digest.Digest) error {
	err := g.db.Update(ctx, func(tx *database.Tx) error {
		repo, err := registers.Hold(ctx, tx, m.Repository)
		if errors.Is(err, catalog.ErrNotFound) {
			return nil
		}
		d, known := m.Manifest.Digest.String(), false
		if err == nil && chainID != "" {
			err = tx.QueryRowContext(ctx, `SELECT EXISTS (SELECT 1 FROM known_manifests WHERE repo = $1 AND digest = $2)`, repo, d).Scan(&known)
		}
		if err == nil && known {
			_, err = tx.ExecContext(ctx, `INSERT INTO images (repo, manifest, chain_id) VALUES ($1, $2, $3)
				ON CONFLICT (repo, manifest) DO UPDATE SET chain_id = excluded.chain_id`, repo, d, chainID.String())
		}
		if err == nil {
			_, err = tx.ExecContext(ctx, `DELETE FROM reviews WHERE kind = 1 AND repo = $1 AND name = $2`, repo, d)
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
		return s, fmt.Errorf("count what is to be collected: %w", err)
	}
	for kind := schema.ReviewImage; kind <= schema.ReviewRepository; kind++ {
		q := catalog.QueueStats{Name: schema.ReviewNames[kind]}
		var oldest int64
		err := g.db.Row(ctx, `SELECT count(*), count(*) FILTER (WHERE `+schema.Due+`), coalesce(min(since), 0) FROM reviews v WHERE kind = $1`,
			schema.DueArgs(kind, d)[:3], &q.Length, &q.Due, &oldest)
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
	err = g.db.Row(ctx, `SELECT (SELECT count(*) FROM doomed), (SELECT coalesce(min(since), 0) FROM doomed),
		(SELECT count(*) FROM blobs WHERE leased > $1), (SELECT count(*) FROM deleted_manifests) + (SELECT count(*) FROM deleted_tags),
		(SELECT count(*) FROM packs), CAST((SELECT coalesce(sum(size), 0) FROM packs) AS BIGINT), CAST((SELECT coalesce(sum(dead), 0) FROM packs) AS BIGINT)`,
		[]any{d.Now.UnixNano()}, &q.Length, &oldest, &s.Leased, &s.DeletedThings, &s.Packs, &s.PackBytes, &s.DeadBytes)
	if err != nil {
		return fail(err)
	}
	if q.Due = q.Length; q.Length > 0 {
		q.Oldest = time.Unix(0, oldest)
	}
	s.Queues = append(s.Queues, q)
	err = g.db.Row(ctx, `SELECT CAST(coalesce(sum(size) FILTER (WHERE n = 0), 0) AS BIGINT), CAST(coalesce(sum(size) FILTER (WHERE n = 1), 0) AS BIGINT) FROM (
		SELECT max(b.size) AS size, max(CASE WHEN m.digest IS NOT NULL THEN 2 WHEN r.digest IS NOT NULL THEN 1 ELSE 0 END) AS n
			FROM blobs b LEFT JOIN refs r ON r.digest IN (b.digest, '*') AND r.repo = b.repo
			LEFT JOIN manifests m ON m.repo = r.repo AND m.digest = r.manifest GROUP BY b.digest) AS blobs`, nil, &s.Unnamed, &s.InWindow)
	if err != nil {
		return fail(err)
	}
	return s, nil
}
