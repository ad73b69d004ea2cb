package garbage

import (
	"context"
	"fmt"
	"strings"
	"time"

	"hydrofoil.dev/foil/internal/server/catalog/sqlcat/database"
)

// Doomed implements catalog.Garbage.
func (g *Garbage) Doomed(ctx context.Context, before time.Time, limit int) ([]string, error) {
	keys, err := g.db.Strings(ctx, `SELECT key FROM doomed WHERE since < $1 ORDER BY since LIMIT $2`, before.UnixNano(), limit)
	if err != nil {
		return nil, fmt.Errorf("list objects to remove: %w", err)
	}
	return keys, nil
}

// Gone implements catalog.Garbage.
func (g *Garbage) Gone(ctx context.Context, keys []string) error {
	list, err := database.List(keys)
	if err == nil {
		err = g.db.Update(ctx, func(tx *database.Tx) error {
			for _, table := range []string{"doomed", "strays"} {
				if _, err := tx.ExecContext(ctx, `DELETE FROM `+table+` WHERE `+tx.InTexts("key", "$1"), list); err != nil {
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
	err = g.db.Update(ctx, func(tx *database.Tx) error {
		strays, err = findStrays(ctx, tx, keys, before)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("look up %d objects: %w", len(keys), err)
	}
	return strays, nil
}

// named are the queries of keys that rows name, among those of a list.
func named(tx *database.Tx) string {
	var all []string
	for _, c := range []struct{ table, column string }{
		{"packs", "key"}, {"doomed", "key"}, {"layers", "entries"}, {"layers", "recipe"}, {"rootfs", "key"}, {"rootfs", "idx"},
		{"startup_images", "key"}, {"startup_images", "previous"},
	} {
		all = append(all, `SELECT `+c.column+` FROM `+c.table+` WHERE `+tx.InTexts(c.column, "$1")+` AND `+c.column+` <> ''`)
	}
	return strings.Join(all, ` UNION `)
}

func findStrays(ctx context.Context, tx *database.Tx, keys []string, before time.Time) ([]string, error) {
	known := make(map[string]bool)
	lookUp := func(query string, of []string) error {
		list, err := database.List(of)
		if err != nil {
			return err
		}
		found, err := database.TextOf(ctx, tx, query, list)
		for _, f := range found {
			known[f] = true
		}
		return err
	}
	// An order belongs to a TOC.
	orders := make(map[string]string)
	var tocs []string
	for _, key := range keys {
		if rest, ok := strings.CutPrefix(key, "orders/"); ok {
			rest, _, _ = strings.Cut(rest, "-")
			orders[key] = strings.Replace(rest, "/", ":", 1)
			tocs = append(tocs, orders[key])
		}
	}
	if err := lookUp(named(tx), keys); err != nil {
		return nil, err
	}
	if err := lookUp(`SELECT toc FROM rootfs WHERE `+tx.InTexts("toc", "$1"), tocs); err != nil {
		return nil, err
	}
	var named, unnamed []string
	for _, key := range keys {
		if known[key] || known[orders[key]] {
			named = append(named, key)
		} else {
			unnamed = append(unnamed, key)
		}
	}
	list, err := database.List(named)
	if err != nil {
		return nil, err
	}
	if _, err := tx.ExecContext(ctx, `DELETE FROM strays WHERE `+tx.InTexts("key", "$1"), list); err != nil {
		return nil, err
	}
	if list, err = database.List(unnamed); err != nil {
		return nil, err
	}
	if _, err := tx.ExecContext(ctx, `INSERT INTO strays (key, seen) SELECT asked.value, CAST($2 AS BIGINT) FROM `+tx.Texts("$1")+` AS asked WHERE true
		ON CONFLICT DO NOTHING`, list, time.Now().UnixNano()); err != nil {
		return nil, err
	}
	return database.TextOf(ctx, tx, `SELECT key FROM strays WHERE `+tx.InTexts("key", "$1")+` AND seen < $2`, list, before.UnixNano())
}

// Shrink implements catalog.Garbage.
func (g *Garbage) Shrink(ctx context.Context) (more bool, err error) {
	if more, err = g.db.Shrink(ctx); err != nil {
		err = fmt.Errorf("shrink the catalog: %w", err)
	}
	return more, err
}
