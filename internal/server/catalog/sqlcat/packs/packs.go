// Package packs is which packs there are, which layers need them, and how they are found.
//
// The catalog has no row for each segment: a pack has a table of its own. It has hooks, a sample of the segments of
// each pack. While there are few segments every one is a hook, and no duplicate is missed. When there are more than
// MostHooks, every second hook goes, and so on, as long as a pack of the usual size has some sixty left: then the number of
// hooks grows with that of the packs. Duplicates come in runs, so one hook of a run is enough to find the pack.
//
// # Older catalogs
//
// They have a row for each frame and each segment. Tidy turns those of one pack after the other into hooks, while the
// server serves, and then drops both tables. Until then Find asks both.
package packs

import (
	"context"
	"database/sql"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync/atomic"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/catalog/sqlcat/database"
)

const (
	// MostHooks is how many hooks there may be before they are thinned out.
	MostHooks = 1 << 20
	// mostLevel leaves one segment of 128.
	mostLevel = 7
	// atOnce is how many rows one statement inserts, looks up or deletes.
	atOnce = 512
)

// Packs is the part of a catalog that knows of packs.
type Packs struct {
	db    *database.DB
	kept  kept
	most  int64        // hooks
	level atomic.Int64 // as in the table; it never falls
	old   atomic.Bool  // the tables of an older catalog are there
}

// Open returns that of a file. It thins hooks out when there are more than most.
func Open(ctx context.Context, db *database.DB, most int64) (*Packs, error) {
	c := &Packs{db: db, most: most}
	var level int64
	err := db.Row(ctx, `SELECT level FROM sampling`, nil, &level)
	c.level.Store(level)
	c.old.Store(db.OldSegments)
	return c, err
}

// hook returns the number of a segment in hooks.
func hook(id segment.ID) int64 { return int64(binary.BigEndian.Uint64(id[:])) }

// hooks returns the numbers of those segments that are hooks, sorted, each once.
func (c *Packs) hooks(ids []segment.ID) []int64 {
	mask := int64(1)<<c.level.Load() - 1
	var numbers []int64
	for _, id := range ids {
		if n := hook(id); n&mask == 0 {
			numbers = append(numbers, n)
		}
	}
	slices.Sort(numbers)
	return slices.Compact(numbers)
}

// AddPack implements catalog.Dedup.
func (c *Packs) AddPack(ctx context.Context, p catalog.Pack) error {
	err := c.db.Update(ctx, func(tx *database.Tx) error {
		_, err := c.addPack(ctx, tx, p)
		return err
	})
	if err != nil {
		return fmt.Errorf("record pack %s: %w", p.Key, err)
	}
	return nil
}

func (c *Packs) addPack(ctx context.Context, tx *database.Tx, p catalog.Pack) (pack int64, err error) {
	var size int64
	err = tx.QueryRowContext(ctx, `SELECT id, size FROM packs WHERE key = $1`, p.Key).Scan(&pack, &size)
	switch {
	case err == nil && size != p.Size:
		return 0, fmt.Errorf("it has %d bytes, and was recorded with %d", p.Size, size)
	case err == nil:
		return pack, nil
	case !errors.Is(err, sql.ErrNoRows):
		return 0, err
	}
	err = tx.QueryRowContext(ctx, `INSERT INTO packs (id, key, size) VALUES (`+tx.NextPack+`, $1, $2) ON CONFLICT (key) DO NOTHING RETURNING id`, p.Key, p.Size).Scan(&pack)
	if errors.Is(err, sql.ErrNoRows) { // somebody else has just recorded it
		return c.addPack(ctx, tx, p)
	}
	if err != nil {
		return 0, err
	}
	ids := idsOf(p.Frames)
	if slices.Contains(ids, segment.ID{}) {
		return 0, errors.New("it has a hole, which is never stored")
	}
	if err := c.putHooks(ctx, tx, pack, ids, true); err != nil {
		return 0, err
	}
	return pack, again(ctx, tx, pack, ids)
}

func idsOf(frames []catalog.Frame) (ids []segment.ID) {
	for _, f := range frames {
		for i := range f.Segments {
			ids = append(ids, f.Segments[i].ID)
		}
	}
	return ids
}

// putHooks inserts the hooks of a pack, in the order of the table, so that every page is written once, and locks are taken in one order. If
// newer, they are no other pack's any more.
func (c *Packs) putHooks(ctx context.Context, tx *database.Tx, pack int64, ids []segment.ID, newer bool) error {
	query := `INSERT INTO hooks (id, pack) SELECT hook.value, CAST($2 AS BIGINT) FROM ` + tx.Numbers("$1") + ` AS hook WHERE true ON CONFLICT (id) DO `
	if newer {
		query += `UPDATE SET pack = excluded.pack`
	} else {
		query += `NOTHING`
	}
	for batch := range slices.Chunk(c.hooks(ids), atOnce) {
		list, err := database.List(batch)
		if err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, query, list, pack); err != nil {
			return err
		}
	}
	return nil
}

// dropHooks deletes the hooks of a pack.
func (c *Packs) dropHooks(ctx context.Context, tx *database.Tx, pack int64, ids []segment.ID) error {
	for batch := range slices.Chunk(c.hooks(ids), atOnce) {
		list, err := database.List(batch)
		if err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, `DELETE FROM hooks WHERE pack = $1 AND `+tx.InNumbers("id", "$2"), pack, list); err != nil {
			return err
		}
	}
	return nil
}

// again has layers that need a damaged segment need a pack that has it.
func again(ctx context.Context, tx *database.Tx, pack int64, ids []segment.ID) error {
	damaged, err := database.TextOf(ctx, tx, `SELECT DISTINCT id FROM damaged`)
	if err != nil || len(damaged) == 0 {
		return err
	}
	there := make(map[segment.ID]bool, len(ids))
	for _, id := range ids {
		there[id] = true
	}
	for _, d := range damaged {
		if id := segment.ID([]byte(d)); there[id] {
			if _, err := tx.ExecContext(ctx, `INSERT INTO layer_packs (layer, pack) SELECT DISTINCT layer, CAST($1 AS BIGINT) FROM layer_packs WHERE pack IN (SELECT pack FROM damaged WHERE id = $2)
				ON CONFLICT DO NOTHING`, pack, id[:]); err != nil {
				return err
			}
		}
	}
	return nil
}

// Forget implements catalog.Dedup.
func (c *Packs) Forget(ctx context.Context, damaged []catalog.Resting) error {
	err := c.db.Update(ctx, func(tx *database.Tx) error {
		for i := range damaged {
			var pack int64
			err := tx.QueryRowContext(ctx, `SELECT id FROM packs WHERE key = $1`+tx.Lock, damaged[i].Pack).Scan(&pack)
			if errors.Is(err, sql.ErrNoRows) {
				continue
			}
			if err == nil {
				_, err = tx.ExecContext(ctx, `INSERT INTO damaged (pack, id) VALUES ($1, $2) ON CONFLICT DO NOTHING`, pack, damaged[i].ID[:])
			}
			if err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("forget %d segments: %w", len(damaged), err)
	}
	return nil
}

// PacksOf implements catalog.Dedup.
func (c *Packs) PacksOf(ctx context.Context, layers []digest.Digest, rootfs digest.Digest) (p catalog.Packs, err error) {
	list, err := database.List(layers)
	if err == nil {
		p, err = c.found(ctx, `SELECT DISTINCT pack FROM layer_packs WHERE layer IN (SELECT l.value FROM `+c.db.Texts("$1")+` AS l
			UNION SELECT r.digest FROM images i JOIN refs r ON r.repo = i.repo AND r.manifest = i.manifest WHERE i.chain_id = $2 AND i.chain_id <> '')`, list, rootfs.String())
	}
	if err != nil {
		return p, fmt.Errorf("packs of %d layers: %w", len(layers), err)
	}
	return p, nil
}

// found returns the packs whose numbers a query selects.
func (c *Packs) found(ctx context.Context, query string, args ...any) (p catalog.Packs, err error) {
	err = c.db.View(ctx, func(tx *database.Tx) error {
		all := map[int64]string{}
		if err := foundIn(ctx, tx, all, query, args...); err != nil {
			return err
		}
		p, err = describe(ctx, tx, all)
		return err
	})
	return p, err
}

// foundIn adds packs whose numbers a query selects, those that there are.
func foundIn(ctx context.Context, tx *database.Tx, all map[int64]string, query string, args ...any) error {
	return tx.Rows(ctx, `SELECT id, key FROM packs WHERE id IN (`+query+`)`, args, func(scan func(...any) error) error {
		var id int64
		var key string
		err := scan(&id, &key)
		all[id] = key
		return err
	})
}

// describe makes the answer of packs by number.
func describe(ctx context.Context, tx *database.Tx, all map[int64]string) (p catalog.Packs, err error) {
	ids := slices.Sorted(maps.Keys(all))
	for _, id := range ids {
		p.Keys = append(p.Keys, all[id])
	}
	list, err := database.List(ids)
	if err != nil {
		return p, err
	}
	err = tx.Rows(ctx, `SELECT pack, id FROM damaged WHERE `+tx.InNumbers("pack", "$1"), []any{list}, func(scan func(...any) error) error {
		var pack int64
		var id []byte
		if err := scan(&pack, &id); err != nil {
			return err
		}
		if p.Damaged == nil {
			p.Damaged = make(map[catalog.Resting]bool)
		}
		p.Damaged[catalog.Resting{Pack: all[pack], ID: segment.ID(id)}] = true
		return nil
	})
	return p, err
}

// find is Keep.Find without keeping.
func (c *Packs) find(ctx context.Context, ids []segment.ID) (p catalog.Packs, err error) {
	err = c.db.View(ctx, func(tx *database.Tx) error {
		all := map[int64]string{}
		for batch := range slices.Chunk(c.hooks(ids), atOnce) {
			list, err := database.List(batch)
			if err != nil {
				return err
			}
			if err := foundIn(ctx, tx, all, `SELECT h.pack FROM `+tx.Numbers("$1")+` AS list CROSS JOIN hooks h WHERE h.id = list.value`, list); err != nil {
				return err
			}
		}
		if c.old.Load() {
			if err := findOld(ctx, tx, all, ids); err != nil {
				return err
			}
		}
		if len(all) > 0 {
			p, err = describe(ctx, tx, all)
		}
		return err
	})
	if err != nil {
		return p, fmt.Errorf("find %d segments: %w", len(ids), err)
	}
	return p, nil
}

// PacksKnown implements catalog.Dedup.
func (c *Packs) PacksKnown(ctx context.Context, keys []string) (bool, error) {
	list, err := database.List(keys)
	if err != nil {
		return false, err
	}
	var n int
	if err := c.db.Row(ctx, `SELECT count(*) FROM packs WHERE `+c.db.InTexts("key", "$1"), []any{list}, &n); err != nil {
		return false, fmt.Errorf("look up %d packs: %w", len(keys), err)
	}
	return n == len(keys), nil
}

// PacksAfter returns the keys of at most limit packs after the given one, in byte order.
func (c *Packs) PacksAfter(ctx context.Context, after string, limit int) ([]string, error) {
	keys, err := c.db.Strings(ctx, `SELECT key FROM packs WHERE key > $1 ORDER BY key LIMIT $2`, after, limit)
	if err != nil {
		return nil, fmt.Errorf("list packs: %w", err)
	}
	return keys, nil
}

// Pack returns what was recorded of a pack, without its frames, and what in it is damaged. Errors: catalog.ErrNotFound.
func (c *Packs) Pack(ctx context.Context, key string) (catalog.Pack, catalog.Packs, error) {
	p := catalog.Pack{Key: key}
	err := c.db.Row(ctx, `SELECT size FROM packs WHERE key = $1`, []any{key}, &p.Size)
	var of catalog.Packs
	if err == nil {
		of, err = c.found(ctx, `SELECT id FROM packs WHERE key = $1`, key)
	}
	if err != nil {
		return p, of, fmt.Errorf("pack %s: %w", key, err)
	}
	return p, of, nil
}
