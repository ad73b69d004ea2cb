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

// reviewKind is what is reviewed. The numbers are in the schema.
type reviewKind int

const (
	reviewImage      reviewKind = 1 // a manifest: its chain ID is not known
	reviewLink       reviewKind = 2 // a blob of a repository
	reviewBlob       reviewKind = 3 // of any repository, and what was ingested of it
	reviewRootfs     reviewKind = 4
	reviewStartup    reviewKind = 5 // an ID
	reviewPack       reviewKind = 6 // an ID
	reviewRepository reviewKind = 7
)

var reviewNames = map[reviewKind]string{reviewImage: "images", reviewLink: "links", reviewBlob: "layers", reviewRootfs: "rootfs",
	reviewStartup: "startup sets", reviewPack: "packs", reviewRepository: "repositories"}

// due is the SQL of reviews that are due; its arguments are dueArgs.
const due = `v.kind = ?1 AND v.since <= ?2 - ?3 AND v.since + ?3 + ?3 * v.jitter / 4000 <= ?2 AND v.later <= ?2`

func dueArgs(kind reviewKind, d catalog.Due) []any {
	return []any{int(kind), d.Now.UnixNano(), max(0, int64(d.Grace)), d.Limit}
}

// one is one review, of a kind that has a repository and a name.
type one struct {
	repo int64
	name string
}

// collect decides about the reviews of a kind that are due, in one transaction. dead returns the changes of what is
// forgotten: nil if it is needed, or is not there. A review that is over goes.
func (c *Catalog) collect(ctx context.Context, kind reviewKind, d catalog.Due, unless string, dead func(ctx context.Context, tx *sql.Tx, r one) ([]catalog.Change, error)) (done catalog.Collected, err error) {
	err = c.change(ctx, 0, func(ctx context.Context, tx *sql.Tx) ([]catalog.Change, error) {
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
		all := unlogged
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
		return done, fmt.Errorf("review %s: %w", reviewNames[kind], err)
	}
	return done, nil
}

func dueReviews(ctx context.Context, tx *sql.Tx, kind reviewKind, d catalog.Due) (reviews []one, err error) {
	rows, err := tx.QueryContext(ctx, `SELECT repo, name FROM reviews v WHERE `+due+` ORDER BY v.since LIMIT ?4`, dueArgs(kind, d)...)
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
func (c *Catalog) CollectLinks(ctx context.Context, d catalog.Due) (catalog.Collected, error) {
	return c.collect(ctx, reviewLink, d, "", func(ctx context.Context, tx *sql.Tx, r one) ([]catalog.Change, error) {
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
				leased, int(reviewLink), r.repo, r.name)
			return nil, errors.Join(catalog.ErrInUse, err)
		}
		return []catalog.Change{{Kind: catalog.ChangedBlob, Repo: repo, Name: r.name, Gone: true}}, dropBlob(ctx, tx, repo, r.name)
	})
}

// removing is for how long nobody else is given a blob to remove.
const removing = time.Minute

// CollectLayers implements catalog.Garbage. The review stays until Removed.
func (c *Catalog) CollectLayers(ctx context.Context, d catalog.Due) (blobs []digest.Digest, done catalog.Collected, err error) {
	done, err = c.collect(ctx, reviewBlob, d, "", func(ctx context.Context, tx *sql.Tx, r one) ([]catalog.Change, error) {
		var held bool
		if err := tx.QueryRowContext(ctx, `SELECT EXISTS (SELECT 1 FROM blobs WHERE digest = ?)`, r.name).Scan(&held); err != nil || held {
			return nil, err
		}
		blobs = append(blobs, digest.Digest(r.name))
		if _, err := tx.ExecContext(ctx, `UPDATE reviews SET later = ? WHERE kind = ? AND name = ?`,
			d.Now.Add(removing).UnixNano(), int(reviewBlob), r.name); err != nil {
			return nil, err
		}
		err := affected(tx.ExecContext(ctx, `DELETE FROM layers WHERE blob = ?`, r.name))
		if errors.Is(err, catalog.ErrNotFound) {
			return unlogged, nil
		}
		return []catalog.Change{{Kind: catalog.ChangedLayer, Name: r.name, Gone: true}}, err
	})
	return blobs, done, err
}

// Removed implements catalog.Garbage. An event that came meanwhile has asked again.
func (c *Catalog) Removed(ctx context.Context, blobs []digest.Digest) error {
	err := c.update(ctx, func(tx *sql.Tx) error {
		for _, d := range blobs {
			if _, err := tx.ExecContext(ctx, `DELETE FROM reviews WHERE kind = ? AND name = ? AND later > 0`, int(reviewBlob), d.String()); err != nil {
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
func (c *Catalog) CollectRootfs(ctx context.Context, d catalog.Due) (catalog.Collected, error) {
	return c.collect(ctx, reviewRootfs, d, notIndexed, func(ctx context.Context, tx *sql.Tx, r one) ([]catalog.Change, error) {
		err := affected(tx.ExecContext(ctx, `DELETE FROM rootfs WHERE chain_id = ?1 AND NOT EXISTS (SELECT 1 FROM images WHERE chain_id = ?1)`, r.name))
		if errors.Is(err, catalog.ErrNotFound) {
			return nil, nil
		}
		return []catalog.Change{{Kind: catalog.ChangedRootfs, Name: r.name, Gone: true}}, err
	})
}

// CollectStartup implements catalog.Garbage.
func (c *Catalog) CollectStartup(ctx context.Context, d catalog.Due) (catalog.Collected, error) {
	return c.collect(ctx, reviewStartup, d, notIndexed, func(ctx context.Context, tx *sql.Tx, r one) ([]catalog.Change, error) {
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
		return unlogged, err
	})
}

// CollectRepositories implements catalog.Garbage.
func (c *Catalog) CollectRepositories(ctx context.Context, d catalog.Due) (catalog.Collected, error) {
	return c.collect(ctx, reviewRepository, d, "", func(ctx context.Context, tx *sql.Tx, r one) ([]catalog.Change, error) {
		var name string
		err := tx.QueryRowContext(ctx, `SELECT name FROM repositories WHERE id = ?`, r.repo).Scan(&name)
		if err == nil {
			err = dropRepository(ctx, tx, name)
		}
		if errors.Is(err, sql.ErrNoRows) || errors.Is(err, catalog.ErrNotFound) {
			return nil, nil
		}
		return []catalog.Change{{Kind: catalog.ChangedRepository, Repo: name, Gone: true}}, err
	})
}

// Unindexed implements catalog.Garbage.
func (c *Catalog) Unindexed(ctx context.Context, limit int) (all []catalog.Unindexed, err error) {
	if err := c.update(ctx, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `DELETE FROM reviews WHERE kind = 1 AND NOT EXISTS (SELECT 1 FROM known_manifests WHERE repo = reviews.repo AND digest = reviews.name)`)
		return err
	}); err != nil {
		return nil, fmt.Errorf("list manifests to look at: %w", err)
	}
	err = c.rows(ctx, `SELECT r.name, `+manifestColumns+` FROM (SELECT * FROM reviews WHERE kind = 1 LIMIT ?) v JOIN known_manifests m ON m.repo = v.repo AND m.digest = v.name
		JOIN repositories r ON r.id = v.repo`, []any{limit}, func(scan func(...any) error) error {
		var u catalog.Unindexed
		var err error
		u.Manifest, err = scanManifest(func(dest ...any) error { return scan(append([]any{&u.Repository}, dest...)...) })
		all = append(all, u)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list manifests to look at: %w", err)
	}
	return all, nil
}

// PutImage implements catalog.Garbage. A manifest that is gone by now is no image.
func (c *Catalog) PutImage(ctx context.Context, m catalog.Unindexed, chainID digest.Digest) error {
	err := c.update(ctx, func(tx *sql.Tx) error {
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
func (c *Catalog) GarbageStats(ctx context.Context, d catalog.Due) (s catalog.GarbageStats, err error) {
	fail := func(err error) (catalog.GarbageStats, error) {
		return s, fmt.Errorf("count what is to be collected: %w", known(err))
	}
	for kind := reviewImage; kind <= reviewRepository; kind++ {
		q := catalog.QueueStats{Name: reviewNames[kind]}
		var oldest int64
		err := c.read.QueryRowContext(ctx, `SELECT count(*), coalesce(sum(`+due+`), 0), coalesce(min(since), 0) FROM reviews v WHERE kind = ?1`,
			dueArgs(kind, d)[:3]...).Scan(&q.Length, &q.Due, &oldest)
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
	err = c.read.QueryRowContext(ctx, `SELECT (SELECT count(*) FROM doomed), (SELECT coalesce(min(since), 0) FROM doomed),
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
	err = c.read.QueryRowContext(ctx, `SELECT coalesce(sum(size) FILTER (WHERE n = 0), 0), coalesce(sum(size) FILTER (WHERE n = 1), 0) FROM (
		SELECT max(b.size) AS size, max(CASE WHEN m.digest IS NOT NULL THEN 2 WHEN r.digest IS NOT NULL THEN 1 ELSE 0 END) AS n
			FROM blobs b LEFT JOIN refs r ON r.digest IN (b.digest, '*') AND r.repo = b.repo
			LEFT JOIN manifests m ON m.repo = r.repo AND m.digest = r.manifest GROUP BY b.digest)`).Scan(&s.Unnamed, &s.InWindow)
	if err != nil {
		return fail(err)
	}
	return s, nil
}
