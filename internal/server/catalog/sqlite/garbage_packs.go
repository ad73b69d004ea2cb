package sqlite

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/server/catalog"
)

// Unpacked implements catalog.Garbage.
func (c *Catalog) Unpacked(ctx context.Context, limit int) (layers []catalog.Layer, err error) {
	err = c.rows(ctx, `SELECT `+layerColumns+` FROM layers WHERE packed = 0 AND refused = '' ORDER BY blob LIMIT ?`, []any{limit}, func(scan func(...any) error) error {
		var row layerRow
		err := scan(row.dest()...)
		layers = append(layers, row.layer())
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list layers whose packs are not known: %w", err)
	}
	return layers, nil
}

// PutPacks implements catalog.Garbage.
func (c *Catalog) PutPacks(ctx context.Context, blob digest.Digest, packs []string) error {
	err := c.update(ctx, func(tx *sql.Tx) error { return putPacks(ctx, tx, blob, packs) })
	if err != nil {
		return fmt.Errorf("record packs of layer %s: %w", blob, err)
	}
	return nil
}

func putPacks(ctx context.Context, tx *sql.Tx, blob digest.Digest, packs []string) error {
	list, err := json.Marshal(packs)
	if err != nil {
		return err
	}
	if _, err := tx.ExecContext(ctx, `INSERT INTO layer_packs SELECT ?1, id FROM packs WHERE key IN (SELECT value FROM json_each(?2))
		AND EXISTS (SELECT 1 FROM layers WHERE blob = ?1) ON CONFLICT DO NOTHING`, blob.String(), string(list)); err != nil {
		return err
	}
	// Also of those that it needed before: its entry list may be another one now.
	if _, err := tx.ExecContext(ctx, `UPDATE packs SET used = used + 1 WHERE key IN (SELECT value FROM json_each(?))`, string(list)); err != nil {
		return err
	}
	_, err = tx.ExecContext(ctx, `UPDATE layers SET packed = 1 WHERE blob = ?`, blob.String())
	return err
}

// PacksKnown implements catalog.Dedup.
func (c *Catalog) PacksKnown(ctx context.Context, keys []string) (bool, error) {
	list, err := json.Marshal(keys)
	if err != nil {
		return false, err
	}
	var n int
	if err := c.read.QueryRowContext(ctx, `SELECT count(*) FROM packs WHERE key IN (SELECT value FROM json_each(?))`, string(list)).Scan(&n); err != nil {
		return false, fmt.Errorf("look up %d packs: %w", len(keys), known(err))
	}
	return n == len(keys), nil
}

// PacksToReview implements catalog.Garbage.
func (c *Catalog) PacksToReview(ctx context.Context, d catalog.Due) ([]catalog.PackUse, error) {
	if err := c.update(ctx, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `DELETE FROM reviews WHERE kind = ? AND NOT EXISTS (SELECT 1 FROM packs WHERE id = CAST(reviews.name AS INTEGER))`, int(reviewPack))
		return err
	}); err != nil {
		return nil, fmt.Errorf("list packs to review: %w", err)
	}
	condition := due
	if d.Grace < 0 { // also those that could not be collected before
		condition = `v.kind = ?1 AND ?2 + ?3 > 0`
	}
	return c.packUses(ctx, `SELECT p.id, p.key, p.size, p.dead, p.used, v.since FROM reviews v JOIN packs p ON p.id = CAST(v.name AS INTEGER) WHERE `+condition+`
		AND NOT EXISTS (SELECT 1 FROM layers WHERE packed = 0 AND refused = '') ORDER BY v.since LIMIT ?4`, dueArgs(reviewPack, d)...)
}

// PacksToCompact implements catalog.Garbage.
func (c *Catalog) PacksToCompact(ctx context.Context, share float64, limit int) ([]catalog.PackUse, error) {
	return c.packUses(ctx, `SELECT p.id, p.key, p.size, p.dead, p.used, 0 FROM packs p WHERE p.dead > 0 AND p.dead >= ? * p.size
		AND NOT EXISTS (SELECT 1 FROM layers WHERE packed = 0 AND refused = '')
		AND NOT EXISTS (SELECT 1 FROM reviews WHERE kind = 6 AND name = CAST(p.id AS TEXT)) ORDER BY p.dead DESC LIMIT ?`, share, limit)
}

// packUses reads packs with all that a review needs, as one transaction sees it.
func (c *Catalog) packUses(ctx context.Context, query string, args ...any) (packs []catalog.PackUse, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("read packs to collect: %w", known(err))
		}
	}()
	tx, err := c.read.BeginTx(ctx, nil)
	if err != nil {
		return nil, err
	}
	defer tx.Rollback() //nolint:errcheck // it only read
	rows, err := tx.QueryContext(ctx, query, args...)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var ids []int64
	for rows.Next() {
		var id int64
		var p catalog.PackUse
		if err := rows.Scan(&id, &p.Key, &p.Size, &p.Dead, &p.Used, &p.Event); err != nil {
			return nil, err
		}
		ids, packs = append(ids, id), append(packs, p)
	}
	if err := rows.Err(); err != nil {
		return nil, err
	}
	for i, id := range ids {
		if err := readUse(ctx, tx, id, &packs[i]); err != nil {
			return nil, err
		}
	}
	return packs, nil
}

// readUse reads the frames of a pack, which of their segments have their place there, and which layers need it.
func readUse(ctx context.Context, tx *sql.Tx, id int64, p *catalog.PackUse) error {
	layers, err := textOf(ctx, tx, `SELECT layer FROM layer_packs WHERE pack = ?`, id)
	if err != nil {
		return err
	}
	for _, l := range layers {
		p.Layers = append(p.Layers, digest.Digest(l))
	}
	frames, err := framesOf(ctx, tx, id)
	if err != nil {
		return err
	}
	p.Here = make(map[segment.ID]bool)
	var wanted []any
	at := make(map[segment.ID]int64)
	for _, f := range frames {
		f.Pack = p.Key
		p.Frames = append(p.Frames, f.Frame)
		for i := range f.Segments {
			id := f.Segments[i].ID
			if _, ok := at[id]; !ok {
				at[id] = f.id
				wanted = append(wanted, id[:])
			}
		}
	}
	var row sql.RawBytes
	var frame int64
	for batch := range slices.Chunk(wanted, selectIDs) {
		err := query(ctx, tx, `SELECT id, frame FROM segments WHERE id IN `, batch, func() error {
			if id := segment.ID(row); at[id] == frame {
				p.Here[id] = true
			}
			return nil
		}, &row, &frame)
		if err != nil {
			return err
		}
	}
	return nil
}

// packFrame is a frame with its ID.
type packFrame struct {
	id int64
	catalog.Frame
}

func framesOf(ctx context.Context, tx *sql.Tx, pack int64) (frames []packFrame, err error) {
	rows, err := tx.QueryContext(ctx, `SELECT id, offset, length, raw_length, segments FROM frames WHERE pack = ? ORDER BY offset`, pack)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() {
		var f packFrame
		var segments sql.RawBytes
		if err := rows.Scan(&f.id, &f.Offset, &f.Length, &f.RawLength, &segments); err != nil {
			return nil, err
		}
		if f.Segments, err = decodeSegments(segments); err != nil {
			return nil, err
		}
		frames = append(frames, f)
	}
	return frames, rows.Err()
}

// PutDead implements catalog.Garbage.
func (c *Catalog) PutDead(ctx context.Context, p catalog.PackUse, dead int64) error {
	err := c.update(ctx, func(tx *sql.Tx) error {
		err := affected(tx.ExecContext(ctx, `UPDATE packs SET dead = ? WHERE key = ? AND used = ?`, dead, p.Key, p.Used))
		if errors.Is(err, catalog.ErrNotFound) {
			return nil // it is reviewed again
		}
		if err == nil {
			_, err = tx.ExecContext(ctx, `DELETE FROM reviews WHERE kind = ? AND since = ? AND name = (SELECT CAST(id AS TEXT) FROM packs WHERE key = ?)`,
				int(reviewPack), p.Event, p.Key)
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("record review of pack %s: %w", p.Key, err)
	}
	return nil
}

// Postpone implements catalog.Garbage.
func (c *Catalog) Postpone(ctx context.Context, packs []catalog.PackUse, until time.Time) error {
	err := c.update(ctx, func(tx *sql.Tx) error {
		for _, p := range packs {
			if _, err := tx.ExecContext(ctx, review(reviewPack, "0", "(SELECT CAST(id AS TEXT) FROM packs WHERE key = ?)"), p.Key); err != nil {
				return err
			}
			if _, err := tx.ExecContext(ctx, `UPDATE reviews SET later = ? WHERE kind = ? AND name = (SELECT CAST(id AS TEXT) FROM packs WHERE key = ?)`,
				until.UnixNano(), int(reviewPack), p.Key); err != nil {
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

// ReplacePacks implements catalog.Garbage. All of it is one transaction: as much as AddPack of a pack.
func (c *Catalog) ReplacePacks(ctx context.Context, packs []catalog.PackUse, by *catalog.Pack) error {
	var keys []string
	for _, p := range packs {
		keys = append(keys, p.Key)
	}
	fail := func(err error) error {
		return fmt.Errorf("collect packs %s: %w", strings.Join(keys, ", "), err)
	}
	if !c.kept.begin(keys) {
		return fail(catalog.ErrInUse)
	}
	defer c.kept.end(keys)
	if err := c.update(ctx, func(tx *sql.Tx) error { return replacePacks(ctx, tx, packs, by) }); err != nil {
		return fail(err)
	}
	return nil
}

func replacePacks(ctx context.Context, tx *sql.Tx, packs []catalog.PackUse, by *catalog.Pack) error {
	var ids []int64
	for _, p := range packs {
		var id int64
		err := tx.QueryRowContext(ctx, `SELECT id FROM packs p WHERE key = ? AND used = ?
			AND NOT EXISTS (SELECT 1 FROM lost JOIN layer_packs USING (pack) WHERE pack = p.id)`, p.Key, p.Used).Scan(&id)
		if errors.Is(err, sql.ErrNoRows) {
			return catalog.ErrInUse
		}
		if err != nil {
			return err
		}
		ids = append(ids, id)
	}
	old, err := json.Marshal(ids)
	if err != nil {
		return err
	}
	if by != nil {
		if err := moveSegments(ctx, tx, string(old), by); err != nil {
			return err
		}
	}
	forget, err := tx.PrepareContext(ctx, `DELETE FROM segments WHERE id = ? AND frame = ?`)
	if err != nil {
		return err
	}
	defer forget.Close()
	for _, id := range ids {
		frames, err := framesOf(ctx, tx, id)
		if err != nil {
			return err
		}
		for _, f := range frames {
			for i := range f.Segments {
				if _, err := forget.ExecContext(ctx, f.Segments[i].ID[:], f.id); err != nil {
					return err
				}
			}
		}
	}
	for _, table := range []string{`frames WHERE pack`, `layer_packs WHERE pack`, `lost WHERE pack`, `packs WHERE id`} {
		if _, err := tx.ExecContext(ctx, `DELETE FROM `+table+` IN (SELECT value FROM json_each(?))`, string(old)); err != nil {
			return err
		}
	}
	return nil
}

// moveSegments records a pack, and makes it the place of segments that have it in one of the old ones.
func moveSegments(ctx context.Context, tx *sql.Tx, old string, by *catalog.Pack) error {
	if err := addPack(ctx, tx, *by); err != nil { // segments that are known keep their places
		return err
	}
	var pack int64
	if err := tx.QueryRowContext(ctx, `SELECT id FROM packs WHERE key = ?`, by.Key).Scan(&pack); err != nil {
		return err
	}
	move, err := tx.PrepareContext(ctx, `UPDATE segments SET frame = ?1, idx = ?2 WHERE id = ?3
		AND (SELECT pack FROM frames WHERE id = segments.frame) IN (SELECT value FROM json_each(?4))`)
	if err != nil {
		return err
	}
	defer move.Close()
	frames, err := framesOf(ctx, tx, pack)
	if err != nil {
		return err
	}
	for _, f := range frames {
		for i := range f.Segments {
			if _, err := move.ExecContext(ctx, f.id, i, f.Segments[i].ID[:], old); err != nil {
				return err
			}
		}
	}
	_, err = tx.ExecContext(ctx, `INSERT INTO layer_packs SELECT DISTINCT layer, ?1 FROM layer_packs WHERE pack IN (SELECT value FROM json_each(?2))
		ON CONFLICT DO NOTHING`, pack, old)
	return err
}

// Doomed implements catalog.Garbage.
func (c *Catalog) Doomed(ctx context.Context, before time.Time, limit int) ([]string, error) {
	keys, err := c.strings(ctx, `SELECT key FROM doomed WHERE since < ? ORDER BY since LIMIT ?`, before.UnixNano(), limit)
	if err != nil {
		return nil, fmt.Errorf("list objects to remove: %w", known(err))
	}
	return keys, nil
}

// Gone implements catalog.Garbage.
func (c *Catalog) Gone(ctx context.Context, keys []string) error {
	list, err := json.Marshal(keys)
	if err == nil {
		err = c.update(ctx, func(tx *sql.Tx) error {
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
func (c *Catalog) Strays(ctx context.Context, keys []string, before time.Time) (strays []string, err error) {
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
		err = c.update(ctx, func(tx *sql.Tx) error {
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
			strays, err = textOf(ctx, tx, `SELECT key FROM asked JOIN strays USING (key) WHERE NOT known AND seen < ?`, before.UnixNano())
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
func (c *Catalog) Shrink(ctx context.Context) (more bool, err error) {
	fail := func(err error) (bool, error) { return false, fmt.Errorf("shrink the catalog: %w", known(err)) }
	var mode, free int
	if err := c.write.QueryRowContext(ctx, `PRAGMA auto_vacuum`).Scan(&mode); err != nil {
		return fail(err)
	}
	if mode != 2 {
		return false, nil
	}
	if _, err := c.write.ExecContext(ctx, fmt.Sprintf(`PRAGMA incremental_vacuum(%d)`, shrinkPages)); err != nil {
		return fail(err)
	}
	if err := c.write.QueryRowContext(ctx, `PRAGMA freelist_count`).Scan(&free); err != nil {
		return fail(err)
	}
	if free == 0 {
		var busy, log, done int
		if err := c.write.QueryRowContext(ctx, `PRAGMA wal_checkpoint(TRUNCATE)`).Scan(&busy, &log, &done); err != nil {
			return fail(err)
		}
	}
	return free > 0, nil
}
