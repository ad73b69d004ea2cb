package packs

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"

	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/catalog/sqlcat/database"
)

// ReplacePack forgets a pack and records another one, if it is not nil, in one transaction. Layers that need the old one need
// the new one. What of the old one's frames is not in the new one is lost: layers that need it need what will have it.
// Errors: catalog.ErrNotFound; catalog.ErrInUse while an ingest relies on the pack.
func (c *Packs) ReplacePack(ctx context.Context, old catalog.Pack, with *catalog.Pack) error {
	fail := func(err error) error { return fmt.Errorf("replace pack %s: %w", old.Key, err) }
	keys := []string{old.Key}
	if !c.kept.begin(keys) {
		return fail(catalog.ErrInUse)
	}
	defer c.kept.end(keys)
	err := c.db.Update(ctx, func(tx *database.Tx) error {
		var id int64
		if err := tx.QueryRowContext(ctx, `SELECT id FROM packs WHERE key = $1`+tx.Lock, old.Key).Scan(&id); err != nil {
			return err
		}
		return c.replace(ctx, tx, []int64{id}, [][]catalog.Frame{old.Frames}, with, true)
	})
	if err != nil {
		return fail(err)
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
	err := c.db.Update(ctx, func(tx *database.Tx) error {
		var ids []int64
		var frames [][]catalog.Frame
		for _, p := range packs {
			var id int64
			err := tx.QueryRowContext(ctx, `SELECT id FROM packs p WHERE key = $1 AND used = $2`+tx.Lock, p.Key, p.Used).Scan(&id)
			if errors.Is(err, sql.ErrNoRows) {
				return catalog.ErrInUse
			}
			if err != nil {
				return err
			}
			ids, frames = append(ids, id), append(frames, p.Frames)
		}
		return c.replace(ctx, tx, ids, frames, by, false)
	})
	if err != nil {
		return fail(err)
	}
	return nil
}

// replace forgets packs, by number, with their frames as far as these are known. with takes their place for layers; nil:
// nothing does. If lost, layers need what of them is not in with, and else nobody does.
func (c *Packs) replace(ctx context.Context, tx *database.Tx, olds []int64, frames [][]catalog.Frame, with *catalog.Pack, lost bool) error {
	old, err := database.List(olds)
	if err != nil {
		return err
	}
	heir := olds[0] // by what number layers know what is lost
	here := make(map[segment.ID]bool)
	if with != nil {
		if heir, err = c.addPack(ctx, tx, *with); err != nil {
			return err
		}
		for _, id := range idsOf(with.Frames) {
			here[id] = true
		}
		if _, err := tx.ExecContext(ctx, `INSERT INTO layer_packs (layer, pack) SELECT DISTINCT layer, CAST($1 AS BIGINT) FROM layer_packs
			WHERE `+tx.InNumbers("pack", "$2")+` ON CONFLICT DO NOTHING`, heir, old); err != nil {
			return err
		}
	}
	gone, err := database.TextOf(ctx, tx, `SELECT id FROM damaged WHERE `+tx.InNumbers("pack", "$1"), old)
	if err != nil {
		return err
	}
	missing := make(map[segment.ID]bool)
	for _, id := range gone {
		missing[segment.ID([]byte(id))] = true
	}
	for i := range olds {
		ids := idsOf(frames[i])
		if err := c.dropHooks(ctx, tx, olds[i], ids); err != nil {
			return err
		}
		if lost {
			for _, id := range ids {
				missing[id] = true
			}
		}
		if c.old.Load() {
			if _, err := c.dropFrames(ctx, tx, olds[i], -1); err != nil {
				return err
			}
		}
	}
	if _, err := tx.ExecContext(ctx, `DELETE FROM damaged WHERE `+tx.InNumbers("pack", "$1"), old); err != nil {
		return err
	}
	if with != nil || lost {
		for id := range missing {
			if here[id] {
				continue
			}
			if _, err := tx.ExecContext(ctx, `INSERT INTO damaged (pack, id) VALUES ($1, $2) ON CONFLICT DO NOTHING`, heir, id[:]); err != nil {
				return err
			}
		}
	}
	if with != nil || !lost { // else they still need what is lost
		if _, err := tx.ExecContext(ctx, `DELETE FROM layer_packs WHERE `+tx.InNumbers("pack", "$1"), old); err != nil {
			return err
		}
	}
	_, err = tx.ExecContext(ctx, `DELETE FROM packs WHERE `+tx.InNumbers("id", "$1"), old)
	return err
}
