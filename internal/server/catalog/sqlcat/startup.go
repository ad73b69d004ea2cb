package sqlcat

import (
	"context"
	"fmt"
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/catalog/sqlcat/database"
)

// NoteImage implements catalog.Startup.
func (c *Catalog) NoteImage(ctx context.Context, m catalog.StartupImage) error {
	err := c.db.Update(ctx, func(tx *database.Tx) error {
		_, err := tx.ExecContext(ctx, `INSERT INTO startup_images
			(repo, chain_id, toc, platform, noted, wanted, built, generation, key, previous)
			VALUES ($1, $2, $3, $4, $5, 1, 0, 0, '', '')
		ON CONFLICT (repo, chain_id) DO UPDATE SET toc = excluded.toc, wanted = startup_images.wanted + 1, key = '', previous = ''
			WHERE startup_images.toc <> excluded.toc`,
			m.Repository, m.ChainID.String(), m.TOC.String(), m.Platform, m.Noted.UnixNano())
		return err
	})
	if err != nil {
		return fmt.Errorf("note image %s of %s: %w", m.ChainID, m.Repository, err)
	}
	return nil
}

const imageColumns = `repo, chain_id, toc, platform, noted, wanted, built, generation, key, previous`

func scanImage(scan func(...any) error) (m catalog.StartupImage, err error) {
	var chain, toc string
	var noted int64
	err = scan(&m.Repository, &chain, &toc, &m.Platform, &noted, &m.Wanted, &m.Built, &m.Generation, &m.Key, &m.Previous)
	m.ChainID, m.TOC, m.Noted = digest.Digest(chain), digest.Digest(toc), time.Unix(0, noted)
	return m, err
}

// StartupImage implements catalog.Startup.
func (c *Catalog) StartupImage(ctx context.Context, repo string, chainID digest.Digest) (catalog.StartupImage, error) {
	m, err := scanImage(func(dest ...any) error {
		return c.db.Row(ctx, c.ask.startupImage, []any{repo, chainID.String()}, dest...)
	})
	if err != nil {
		return catalog.StartupImage{}, fmt.Errorf("startup sets of %s of %s: %w", chainID, repo, err)
	}
	return m, nil
}

// StartupImages implements catalog.Startup.
func (c *Catalog) StartupImages(ctx context.Context, repo string) ([]catalog.StartupImage, error) {
	images, err := c.images(ctx, `WHERE repo = $1 ORDER BY noted DESC, id DESC`, repo)
	if err != nil {
		return nil, fmt.Errorf("startup sets of %s: %w", repo, err)
	}
	return images, nil
}

// StaleImages implements catalog.Startup.
func (c *Catalog) StaleImages(ctx context.Context, limit int) ([]catalog.StartupImage, error) {
	images, err := c.images(ctx, `WHERE built <> wanted ORDER BY noted DESC, id DESC LIMIT $1`, limit)
	if err != nil {
		return nil, fmt.Errorf("startup sets that are stale: %w", err)
	}
	return images, nil
}

func (c *Catalog) images(ctx context.Context, where string, args ...any) (images []catalog.StartupImage, err error) {
	err = c.db.Rows(ctx, `SELECT `+imageColumns+` FROM startup_images `+where, args, func(scan func(...any) error) error {
		m, err := scanImage(scan)
		images = append(images, m)
		return err
	})
	return images, err
}

// PutBuilt implements catalog.Startup.
func (c *Catalog) PutBuilt(ctx context.Context, m catalog.StartupImage) error {
	err := c.db.Update(ctx, func(tx *database.Tx) error {
		return database.Affected(tx.ExecContext(ctx, `UPDATE startup_images SET built = $1, generation = $2, key = $3, previous = $4
			WHERE repo = $5 AND chain_id = $6`, m.Built, m.Generation, m.Key, m.Previous, m.Repository, m.ChainID.String()))
	})
	if err != nil {
		return fmt.Errorf("record startup sets of %s of %s: %w", m.ChainID, m.Repository, err)
	}
	return nil
}

// PutTrace implements catalog.Startup.
func (c *Catalog) PutTrace(ctx context.Context, t catalog.Trace, limits catalog.TraceLimits) error {
	err := c.db.Update(ctx, func(tx *database.Tx) error { return putTrace(ctx, tx, t, limits) })
	if err != nil {
		return fmt.Errorf("record trace of service %s of %s of %s: %w", t.Service, t.ChainID, t.Repository, err)
	}
	return nil
}

func putTrace(ctx context.Context, tx *database.Tx, t catalog.Trace, limits catalog.TraceLimits) error {
	image, err := changed(ctx, tx, t.Repository, t.ChainID)
	if err != nil {
		return err
	}
	recorded := 0
	if t.Recorded {
		recorded = 1
	} else if _, err := tx.ExecContext(ctx, `DELETE FROM traces WHERE image = $1 AND service = $2 AND recorded = 0 AND client = $3`,
		image, t.Service, t.Client); err != nil {
		return err
	}
	if _, err := tx.ExecContext(ctx, `INSERT INTO traces (image, toc, service, recorded, client, received, body)
		VALUES ($1, $2, $3, $4, $5, $6, $7)`, image, t.TOC.String(), t.Service, recorded, t.Client, t.Received.UnixNano(), database.NonNil(t.Body)); err != nil {
		return err
	}
	for {
		var n int
		if err := tx.QueryRowContext(ctx, `SELECT count(*) FROM traces WHERE image = $1 AND service = $2 AND recorded = $3`,
			image, t.Service, recorded).Scan(&n); err != nil {
			return err
		}
		if n <= limits.Traces {
			break
		}
		if _, err := tx.ExecContext(ctx, `DELETE FROM traces WHERE id = (
			SELECT min(id) FROM traces WHERE image = $1 AND service = $2 AND recorded = $3
				GROUP BY client ORDER BY count(*) DESC, min(id) LIMIT 1)`, image, t.Service, recorded); err != nil {
			return err
		}
	}
	_, err = tx.ExecContext(ctx, `DELETE FROM traces WHERE image = $1 AND service NOT IN (
		SELECT service FROM traces WHERE image = $1 GROUP BY service
			ORDER BY service = $2 DESC, max(recorded) DESC, count(DISTINCT client) DESC, max(id) DESC LIMIT $3)`,
		image, t.Service, limits.Services)
	return err
}

// changed has an image, and those that may inherit from it, want a build.
func changed(ctx context.Context, tx *database.Tx, repo string, chainID digest.Digest) (image int64, err error) {
	var platform string
	if err := tx.QueryRowContext(ctx, `SELECT id, platform FROM startup_images WHERE repo = $1 AND chain_id = $2`,
		repo, chainID.String()).Scan(&image, &platform); err != nil {
		return 0, err
	}
	_, err = tx.ExecContext(ctx, `UPDATE startup_images SET wanted = wanted + 1 WHERE repo = $1 AND platform = $2`, repo, platform)
	return image, err
}

// Traces implements catalog.Startup.
func (c *Catalog) Traces(ctx context.Context, repo string, chainID digest.Digest) ([]catalog.Trace, error) {
	var traces []catalog.Trace
	err := c.db.Rows(ctx, `SELECT toc, service, recorded, client, received, body FROM traces
		WHERE image = (SELECT id FROM startup_images WHERE repo = $1 AND chain_id = $2) ORDER BY id`, []any{repo, chainID.String()}, func(scan func(...any) error) error {
		t := catalog.Trace{Repository: repo, ChainID: chainID}
		var toc string
		var received int64
		err := scan(&toc, &t.Service, &t.Recorded, &t.Client, &received, &t.Body)
		t.TOC, t.Received = digest.Digest(toc), time.Unix(0, received)
		traces = append(traces, t)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("traces of %s of %s: %w", chainID, repo, err)
	}
	return traces, nil
}

// DeleteTraces implements catalog.Startup.
func (c *Catalog) DeleteTraces(ctx context.Context, repo string, chainID digest.Digest, service string) error {
	err := c.db.Update(ctx, func(tx *database.Tx) error {
		image, err := changed(ctx, tx, repo, chainID)
		if err != nil {
			return err
		}
		return database.Affected(tx.ExecContext(ctx, `DELETE FROM traces WHERE image = $1 AND (service = $2 OR $2 = '')`, image, service))
	})
	if err != nil {
		return fmt.Errorf("forget traces of %s of %s: %w", chainID, repo, err)
	}
	return nil
}
