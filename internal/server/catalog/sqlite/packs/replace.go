package packs

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"hydrofoil.dev/foil/internal/server/catalog"
)

// ReplacePack forgets a pack with all that it is the place of, and records another one, if it is not nil, in one
// transaction. What of the old one is not in the new one is lost: layers that need it need what becomes its place. Errors:
// catalog.ErrNotFound; catalog.ErrInUse while an ingest relies on the pack.
func (c *Packs) ReplacePack(ctx context.Context, old catalog.Pack, with *catalog.Pack) error {
	fail := func(err error) error { return fmt.Errorf("replace pack %s: %w", old.Key, err) }
	keys := []string{old.Key}
	if !c.kept.begin(keys) {
		return fail(catalog.ErrInUse)
	}
	defer c.kept.end(keys)
	if err := c.db.Update(ctx, func(tx *sql.Tx) error { return replacePack(ctx, tx, old, with) }); err != nil {
		return fail(err)
	}
	return nil
}

func replacePack(ctx context.Context, tx *sql.Tx, old catalog.Pack, with *catalog.Pack) error {
	var id int64
	if err := tx.QueryRowContext(ctx, `SELECT id FROM packs WHERE key = ?`, old.Key).Scan(&id); err != nil {
		return err
	}
	frames, err := framesOf(ctx, tx, id)
	if err != nil {
		return err
	}
	heir := id // whose layers need what is lost
	if with != nil {
		if err := moveSegments(ctx, tx, fmt.Sprintf("[%d]", id), with); err != nil {
			return err
		}
		if err := tx.QueryRowContext(ctx, `SELECT id FROM packs WHERE key = ?`, with.Key).Scan(&heir); err != nil {
			return err
		}
	}
	// A segment that rests elsewhere stays there.
	lose, err := tx.PrepareContext(ctx, `INSERT INTO lost SELECT id, ?1 FROM segments WHERE id = ?2 AND frame = ?3
		ON CONFLICT (id) DO UPDATE SET pack = excluded.pack`)
	if err != nil {
		return err
	}
	defer lose.Close()
	forget, err := tx.PrepareContext(ctx, `DELETE FROM segments WHERE id = ? AND frame = ?`)
	if err != nil {
		return err
	}
	defer forget.Close()
	for _, f := range frames {
		for i := range f.Segments {
			if _, err := lose.ExecContext(ctx, heir, f.Segments[i].ID[:], f.id); err != nil {
				return err
			}
			if _, err := forget.ExecContext(ctx, f.Segments[i].ID[:], f.id); err != nil {
				return err
			}
		}
	}
	statements := []string{`DELETE FROM frames WHERE pack = ?1`}
	if heir != id {
		if _, err := tx.ExecContext(ctx, `UPDATE lost SET pack = ? WHERE pack = ?`, heir, id); err != nil {
			return err
		}
		statements = append(statements, `DELETE FROM layer_packs WHERE pack = ?1`)
	}
	for _, statement := range append(statements, `DELETE FROM packs WHERE id = ?1`) {
		if _, err := tx.ExecContext(ctx, statement, id); err != nil {
			return err
		}
	}
	return nil
}

// ReplacePacks implements catalog.Garbage. All of it is one transaction: as much as AddPack of a pack.
func (c *Packs) ReplacePacks(ctx context.Context, packs []catalog.PackUse, by *catalog.Pack) error {
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
	if err := c.db.Update(ctx, func(tx *sql.Tx) error { return replacePacks(ctx, tx, packs, by) }); err != nil {
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
