package packs

import (
	"context"
	"database/sql"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"

	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/server/catalog/sqlcat/database"
)

// thinAtOnce is how many hooks one transaction deletes.
const thinAtOnce = 20_000

// Tidy implements catalog.Garbage. It is called when it is known which packs layers need.
func (c *Packs) Tidy(ctx context.Context) (more bool, err error) {
	if c.old.Load() {
		err = c.convert(ctx)
		more = true
	} else {
		more, err = c.thin(ctx)
	}
	if err != nil {
		return false, fmt.Errorf("tidy the catalog: %w", err)
	}
	return more, nil
}

// thin deletes some of the hooks that are not those of the level, and raises it when there are too many.
func (c *Packs) thin(ctx context.Context) (more bool, err error) {
	var level int64
	if err := c.db.Row(ctx, `SELECT level FROM sampling`, nil, &level); err != nil { // others raise it too
		return false, err
	}
	c.level.Store(level)
	mask := int64(1)<<level - 1
	var hooks, others, orphans int64
	const orphan = `FROM damaged WHERE pack NOT IN (SELECT id FROM packs) AND pack NOT IN (SELECT pack FROM layer_packs)`
	err = c.db.Row(ctx, `SELECT count(*), count(*) FILTER (WHERE (id & $1) <> 0), (SELECT count(*) `+orphan+`) FROM hooks`, []any{mask}, &hooks, &others, &orphans)
	if err != nil {
		return false, err
	}
	raise := others == 0 && hooks > c.most && level < mostLevel
	if others+orphans == 0 && !raise {
		return false, nil
	}
	err = c.db.Update(ctx, func(tx *database.Tx) error {
		if _, err := tx.ExecContext(ctx, `DELETE `+orphan); err != nil {
			return err
		}
		if raise {
			_, err := tx.ExecContext(ctx, `UPDATE sampling SET level = $1 WHERE level < $1`, level+1)
			return err
		}
		_, err := tx.ExecContext(ctx, `DELETE FROM hooks WHERE id IN (SELECT id FROM hooks WHERE (id & $1) <> 0 LIMIT $2)`, mask, thinAtOnce)
		return err
	})
	if err == nil && raise {
		c.level.Store(level + 1)
	}
	return true, err
}

const (
	idSize      = len(segment.ID{})
	segmentSize = idSize + 4 // of a frame's segments, in a catalog that has frames
	// convertAtOnce is how many frames one transaction makes hooks of.
	convertAtOnce = 64
)

// convert makes hooks of some frames, or drops their table when there are none left.
func (c *Packs) convert(ctx context.Context) error {
	done := false
	err := c.db.Update(ctx, func(tx *database.Tx) error {
		var pack int64
		err := tx.QueryRowContext(ctx, `SELECT pack FROM frames LIMIT 1`).Scan(&pack)
		if errors.Is(err, sql.ErrNoRows) {
			_, err = tx.ExecContext(ctx, `DROP TABLE segments; DROP TABLE frames`)
			done = true
			return err
		}
		if err != nil {
			return err
		}
		ids, err := c.dropFrames(ctx, tx, pack, convertAtOnce)
		if err != nil {
			return err
		}
		return c.putHooks(ctx, tx, pack, ids, false) // a newer pack stays
	})
	if err == nil && done {
		c.old.Store(false)
	}
	return err
}

// dropFrames deletes the rows of frames of a pack, and of their segments, and returns these.
func (c *Packs) dropFrames(ctx context.Context, tx *database.Tx, pack int64, limit int) (ids []segment.ID, err error) {
	rows, err := tx.QueryContext(ctx, `SELECT id, segments FROM frames WHERE pack = $1 LIMIT $2`, pack, limit)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var frames []int64
	for rows.Next() {
		var id int64
		var b sql.RawBytes
		if err := rows.Scan(&id, &b); err != nil {
			return nil, err
		}
		for ; len(b) >= segmentSize; b = b[segmentSize:] {
			ids = append(ids, segment.ID(b[:idSize]))
		}
		frames = append(frames, id)
	}
	if err := rows.Err(); err != nil {
		return nil, err
	}
	for batch := range slices.Chunk(ids, atOnce) {
		list, err := database.List(inHex(batch))
		if err != nil {
			return nil, err
		}
		if _, err := tx.ExecContext(ctx, `DELETE FROM segments WHERE id IN (SELECT unhex(list.value) FROM `+tx.Texts("$1")+` AS list)`, list); err != nil {
			return nil, err
		}
	}
	for batch := range slices.Chunk(frames, atOnce) {
		list, err := database.List(batch)
		if err != nil {
			return nil, err
		}
		if _, err := tx.ExecContext(ctx, `DELETE FROM frames WHERE `+tx.InNumbers("id", "$1"), list); err != nil {
			return nil, err
		}
	}
	return ids, nil
}

// inHex are IDs as a list can have them. Only SQLite has such rows.
func inHex(ids []segment.ID) []string {
	all := make([]string, len(ids))
	for i := range ids {
		all[i] = hex.EncodeToString(ids[i][:])
	}
	return all
}

// findOld adds packs where an older catalog says that segments rest.
func findOld(ctx context.Context, tx *database.Tx, all map[int64]string, ids []segment.ID) error {
	for batch := range slices.Chunk(ids, atOnce) {
		list, err := database.List(inHex(batch))
		if err != nil {
			return err
		}
		if err := foundIn(ctx, tx, all, `SELECT f.pack FROM `+tx.Texts("$1")+` AS list CROSS JOIN segments s CROSS JOIN frames f
			WHERE s.id = unhex(list.value) AND f.id = s.frame`, list); err != nil {
			return err
		}
	}
	return nil
}
