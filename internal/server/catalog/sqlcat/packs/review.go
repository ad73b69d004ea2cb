package packs

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/catalog/sqlcat/database"
	"hydrofoil.dev/foil/internal/server/catalog/sqlcat/registers"
	"hydrofoil.dev/foil/internal/server/catalog/sqlcat/schema"
)

// Unpacked implements catalog.Garbage.
func (c *Packs) Unpacked(ctx context.Context, limit int) (layers []catalog.Layer, err error) {
	err = c.db.Rows(ctx, `SELECT `+registers.LayerColumns+` FROM layers WHERE packed = 0 AND refused = '' ORDER BY blob LIMIT $1`, []any{limit}, func(scan func(...any) error) error {
		var row registers.LayerRow
		err := scan(row.Dest()...)
		layers = append(layers, row.Value())
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list layers whose packs are not known: %w", err)
	}
	return layers, nil
}

// PutPacks implements catalog.Garbage.
func (c *Packs) PutPacks(ctx context.Context, blob digest.Digest, packs []string) error {
	err := c.db.Update(ctx, func(tx *database.Tx) error { return Need(ctx, tx, blob, packs) })
	if err != nil {
		return fmt.Errorf("record packs of layer %s: %w", blob, err)
	}
	return nil
}

// Need records in which packs the segments of a layer are.
func Need(ctx context.Context, tx *database.Tx, blob digest.Digest, packs []string) error {
	list, err := database.List(packs)
	if err != nil {
		return err
	}
	// Also of those that it needed before: its entry list may be another one now. And first of all: who replaces one of them at the same
	// time has done so when this returns, or sees it.
	if _, err := tx.ExecContext(ctx, `UPDATE packs SET used = used + 1 WHERE `+tx.InTexts("key", "$1"), list); err != nil {
		return err
	}
	if _, err := tx.ExecContext(ctx, `INSERT INTO layer_packs (layer, pack) SELECT CAST($1 AS TEXT), id FROM packs WHERE `+tx.InTexts("key", "$2")+`
		AND EXISTS (SELECT 1 FROM layers WHERE blob = $1) ON CONFLICT DO NOTHING`, blob.String(), list); err != nil {
		return err
	}
	_, err = tx.ExecContext(ctx, `UPDATE layers SET packed = 1 WHERE blob = $1`, blob.String())
	return err
}

// PacksToReview implements catalog.Garbage.
func (c *Packs) PacksToReview(ctx context.Context, d catalog.Due) ([]catalog.PackUse, error) {
	if err := c.db.Update(ctx, func(tx *database.Tx) error {
		_, err := tx.ExecContext(ctx, `DELETE FROM reviews WHERE kind = $1 AND NOT EXISTS (SELECT 1 FROM packs WHERE id = CASE reviews.kind WHEN 6 THEN CAST(reviews.name AS BIGINT) END)`, int(schema.ReviewPack))
		return err
	}); err != nil {
		return nil, fmt.Errorf("list packs to review: %w", err)
	}
	condition := schema.Due
	if d.Grace < 0 { // also those that could not be collected before
		condition = `v.kind = $1 AND CAST($2 AS BIGINT) + CAST($3 AS BIGINT) > 0`
	}
	return c.packUses(ctx, `SELECT p.id, p.key, p.size, p.dead, p.used, v.since FROM reviews v JOIN packs p ON p.id = CASE v.kind WHEN 6 THEN CAST(v.name AS BIGINT) END WHERE `+condition+`
		AND NOT EXISTS (SELECT 1 FROM layers WHERE packed = 0 AND refused = '') ORDER BY v.since LIMIT $4`, schema.DueArgs(schema.ReviewPack, d)...)
}

// PacksToCompact implements catalog.Garbage.
func (c *Packs) PacksToCompact(ctx context.Context, share float64, limit int) ([]catalog.PackUse, error) {
	return c.packUses(ctx, `SELECT p.id, p.key, p.size, p.dead, p.used, 0 FROM packs p WHERE p.dead > 0 AND p.dead >= CAST($1 AS DOUBLE PRECISION) * p.size
		AND NOT EXISTS (SELECT 1 FROM layers WHERE packed = 0 AND refused = '')
		AND NOT EXISTS (SELECT 1 FROM reviews WHERE kind = 6 AND name = CAST(p.id AS TEXT)) ORDER BY p.dead DESC LIMIT $2`, share, limit)
}

// packUses reads packs with all that a review needs, as one transaction sees it.
func (c *Packs) packUses(ctx context.Context, query string, args ...any) (packs []catalog.PackUse, err error) {
	err = c.db.View(ctx, func(tx *database.Tx) error {
		packs = nil
		var ids []int64
		err := tx.Rows(ctx, query, args, func(scan func(...any) error) error {
			var id int64
			var p catalog.PackUse
			err := scan(&id, &p.Key, &p.Size, &p.Dead, &p.Used, &p.Event)
			ids, packs = append(ids, id), append(packs, p)
			return err
		})
		for i := range ids {
			if err == nil {
				err = readUse(ctx, tx, ids[i], &packs[i])
			}
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("read packs to collect: %w", err)
	}
	return packs, nil
}

// readUse reads which layers need a pack, and what in it is damaged.
func readUse(ctx context.Context, tx *database.Tx, id int64, p *catalog.PackUse) error {
	layers, err := database.TextOf(ctx, tx, `SELECT layer FROM layer_packs WHERE pack = $1`, id)
	if err != nil {
		return err
	}
	for _, l := range layers {
		p.Layers = append(p.Layers, digest.Digest(l))
	}
	of, err := describe(ctx, tx, map[int64]string{id: p.Key})
	if err != nil {
		return err
	}
	p.Damaged = make(map[segment.ID]bool, len(of.Damaged))
	for at := range of.Damaged {
		p.Damaged[at.ID] = true
	}
	return nil
}

// PutDead implements catalog.Garbage.
func (c *Packs) PutDead(ctx context.Context, p catalog.PackUse, dead int64) error {
	err := c.db.Update(ctx, func(tx *database.Tx) error {
		err := database.Affected(tx.ExecContext(ctx, `UPDATE packs SET dead = $1 WHERE key = $2 AND used = $3`, dead, p.Key, p.Used))
		if errors.Is(err, catalog.ErrNotFound) {
			return nil // it is reviewed again
		}
		if err == nil {
			_, err = tx.ExecContext(ctx, `DELETE FROM reviews WHERE kind = $1 AND since = $2 AND name = (SELECT CAST(id AS TEXT) FROM packs WHERE key = $3)`,
				int(schema.ReviewPack), p.Event, p.Key)
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("record review of pack %s: %w", p.Key, err)
	}
	return nil
}

// Postpone implements catalog.Garbage.
func (c *Packs) Postpone(ctx context.Context, packs []catalog.PackUse, until time.Time) error {
	err := c.db.Update(ctx, func(tx *database.Tx) error {
		for _, p := range packs {
			query := schema.Reviews(tx.Dialect, fmt.Sprintf(`SELECT %d, 0, CAST(id AS TEXT), %s, %s FROM packs WHERE key = $1`, schema.ReviewPack, tx.Now, tx.Jitter))
			if _, err := tx.ExecContext(ctx, query, p.Key); err != nil {
				return err
			}
			if _, err := tx.ExecContext(ctx, `UPDATE reviews SET later = $1 WHERE kind = $2 AND name = (SELECT CAST(id AS TEXT) FROM packs WHERE key = $3)`,
				until.UnixNano(), int(schema.ReviewPack), p.Key); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("postpone %d packs: %w", len(packs), err)
	}
	return nil
}
