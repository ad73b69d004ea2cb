package garbage

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"hydrofoil.dev/foil/internal/server/catalog/sqlite/database"
)

// Doomed implements catalog.Garbage.
func (g *Garbage) Doomed(ctx context.Context, before time.Time, limit int) ([]string, error) {
	keys, err := g.db.Strings(ctx, `SELECT key FROM doomed WHERE since < ? ORDER BY since LIMIT ?`, before.UnixNano(), limit)
	if err != nil {
		return nil, fmt.Errorf("list objects to remove: %w", database.Known(err))
	}
	return keys, nil
}

// Gone implements catalog.Garbage.
func (g *Garbage) Gone(ctx context.Context, keys []string) error {
	list, err := json.Marshal(keys)
	if err == nil {
		err = g.db.Update(ctx, func(tx *sql.Tx) error {
			for _, table := range []string{"doomed", "strays"} {
				if _, err := tx.ExecContext(ctx, `DELETE FROM `+table+` WHERE key IN (SELECT value FROM json_each(?))`, string(list)); err != nil {
					return err
				}
			}
			return nil
		})
	}
	if err != nil {
		return fmt.Errorf("record %d objects that were removed: %w", len(keys), err)
	}
	return nil
}

// Strays implements catalog.Garbage.
func (g *Garbage) Strays(ctx context.Context, keys []string, before time.Time) (strays []string, err error) {
	type row struct {
		Key string `json:"key"`
		TOC string `json:"toc"` // of an order: which TOC it belongs to
	}
	rows := make([]row, len(keys))
	for i, key := range keys {
		rows[i].Key = key
		if rest, ok := strings.CutPrefix(key, "orders/"); ok {
			rest, _, _ = strings.Cut(rest, "-")
			rows[i].TOC = strings.Replace(rest, "/", ":", 1)
		}
	}
	list, err := json.Marshal(rows)
	if err == nil {
		err = g.db.Update(ctx, func(tx *sql.Tx) error {
			if _, err := tx.ExecContext(ctx, `CREATE TEMP TABLE IF NOT EXISTS asked (key TEXT PRIMARY KEY, known INTEGER)`); err != nil {
				return err
			}
			for _, statement := range []string{
				`DELETE FROM asked WHERE ?1 <> ''`,
				`INSERT INTO asked SELECT k, EXISTS (SELECT 1 FROM packs WHERE key = k) OR EXISTS (SELECT 1 FROM doomed WHERE key = k)
					OR EXISTS (SELECT 1 FROM layers WHERE entries = k AND entries <> '') OR EXISTS (SELECT 1 FROM layers WHERE recipe = k AND recipe <> '')
					OR EXISTS (SELECT 1 FROM rootfs WHERE key = k) OR EXISTS (SELECT 1 FROM rootfs WHERE idx = k) OR EXISTS (SELECT 1 FROM rootfs WHERE toc = t)
					OR EXISTS (SELECT 1 FROM startup_images WHERE key = k AND key <> '') OR EXISTS (SELECT 1 FROM startup_images WHERE previous = k AND previous <> '')
					FROM (SELECT value ->> 'key' AS k, value ->> 'toc' AS t FROM json_each(?1))`,
				`DELETE FROM strays WHERE key IN (SELECT key FROM asked WHERE known) AND ?1 <> ''`,
			} {
				if _, err := tx.ExecContext(ctx, statement, string(list)); err != nil {
					return err
				}
			}
			if _, err := tx.ExecContext(ctx, `INSERT INTO strays SELECT key, ? FROM asked WHERE NOT known ON CONFLICT DO NOTHING`, time.Now().UnixNano()); err != nil {
				return err
			}
			var err error
			strays, err = database.TextOf(ctx, tx, `SELECT key FROM asked JOIN strays USING (key) WHERE NOT known AND seen < ?`, before.UnixNano())
			return err
		})
	}
	if err != nil {
		return nil, fmt.Errorf("look up %d objects: %w", len(keys), err)
	}
	return strays, nil
}

// shrinkPages is how many pages of 4 KiB Shrink gives back at once.
const shrinkPages = 512

// Shrink implements catalog.Garbage. A catalog of an older version keeps its pages, for rows to come.
func (g *Garbage) Shrink(ctx context.Context) (more bool, err error) {
	fail := func(err error) (bool, error) { return false, fmt.Errorf("shrink the catalog: %w", database.Known(err)) }
	var mode, free int
	if err := g.db.Write.QueryRowContext(ctx, `PRAGMA auto_vacuum`).Scan(&mode); err != nil {
		return fail(err)
	}
	if mode != 2 {
		return false, nil
	}
	if _, err := g.db.Write.ExecContext(ctx, fmt.Sprintf(`PRAGMA incremental_vacuum(%d)`, shrinkPages)); err != nil {
		return fail(err)
	}
	if err := g.db.Write.QueryRowContext(ctx, `PRAGMA freelist_count`).Scan(&free); err != nil {
		return fail(err)
	}
	if free == 0 {
		var busy, log, done int
		if err := g.db.Write.QueryRowContext(ctx, `PRAGMA wal_checkpoint(TRUNCATE)`).Scan(&busy, &log, &done); err != nil {
			return fail(err)
		}
	}
	return free > 0, nil
}
