// Package sqlite is the catalog in one SQLite file (package database). Its tables are in package schema; those
// rows that a log has too are written and read in package registers.
package sqlite

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/catalog/sqlite/bounds"
	"hydrofoil.dev/foil/internal/server/catalog/sqlite/database"
	"hydrofoil.dev/foil/internal/server/catalog/sqlite/garbage"
	"hydrofoil.dev/foil/internal/server/catalog/sqlite/packs"
	"hydrofoil.dev/foil/internal/server/catalog/sqlite/registers"
)

// Catalog implements catalog.Catalog: the repositories, what was ingested of them, and their startup sets. The other parts
// have packages of their own.
type Catalog struct {
	*packs.Packs     // which there are, and who needs them
	*garbage.Garbage // what nobody needs
	*bounds.Bounds   // what repositories may hold

	db     *database.DB
	ask    statements
	lease  atomic.Int64 // nanoseconds
	window atomic.Int64 // nanoseconds
}

// statements are what each pull asks for, compiled when the catalog is opened: the first
// pull of a process need not open a connection, read the schema and compile.
type statements struct {
	tag, manifest, blobs, layers, rootfs, startupImage *sql.Stmt
}

func (c *Catalog) prepare(ctx context.Context) error {
	for _, one := range []struct {
		to    **sql.Stmt
		query string
	}{
		{&c.ask.tag, `SELECT digest FROM tags WHERE repo = (SELECT id FROM repositories WHERE name = ?) AND name = ?`},
		{&c.ask.manifest, `SELECT ` + registers.ManifestColumns + ` FROM manifests
			WHERE repo = (SELECT id FROM repositories WHERE name = ?) AND digest = ?`},
		{&c.ask.blobs, `SELECT digest, size, media_type FROM blobs
			WHERE digest IN (SELECT value FROM json_each(?1)) AND repo = (SELECT id FROM repositories WHERE name = ?2)`},
		{&c.ask.layers, `SELECT ` + registers.LayerColumns + ` FROM layers WHERE blob IN (SELECT value FROM json_each(?1))`},
		{&c.ask.rootfs, `SELECT toc, key, idx FROM rootfs WHERE chain_id = ?`},
		{&c.ask.startupImage, `SELECT ` + imageColumns + ` FROM startup_images WHERE repo = ? AND chain_id = ?`},
	} {
		var err error
		if *one.to, err = c.db.Read.PrepareContext(ctx, one.query); err != nil { // closed with the connections
			return err
		}
	}
	// The connection has the pages of what it reads in its memory: those of a small catalog that
	// these statements look at, the upper ones of a large one.
	for _, query := range []string{
		`SELECT name FROM repositories ORDER BY name LIMIT 1000`,
		`SELECT digest FROM tags LIMIT 1000`,
		`SELECT digest FROM manifests ORDER BY repo, digest LIMIT 1000`,
		`SELECT bytes FROM manifests LIMIT 1000`,
		`SELECT size FROM blobs LIMIT 1000`,
		`SELECT size FROM layers LIMIT 1000`,
		`SELECT toc FROM rootfs LIMIT 1000`,
		`SELECT repo FROM startup_images ORDER BY repo, chain_id LIMIT 1000`,
		`SELECT platform FROM startup_images LIMIT 1000`,
	} {
		if err := c.pass(ctx, query); err != nil {
			return err
		}
	}
	return nil
}

// pass reads what a query selects.
func (c *Catalog) pass(ctx context.Context, query string) error {
	rows, err := c.db.Read.QueryContext(ctx, query)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
	}
	return rows.Err()
}

// listed calls fn with each row of a statement, scanned to dest, whose first argument is a
// list of digests and whose others are args.
func (c *Catalog) listed(ctx context.Context, stmt *sql.Stmt, ds []digest.Digest, fn func(), args []any, dest ...any) error {
	list, err := json.Marshal(ds)
	if err != nil {
		return err
	}
	rows, err := stmt.QueryContext(ctx, append([]any{string(list)}, args...)...)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		if err := rows.Scan(dest...); err != nil {
			return err
		}
		fn()
	}
	return rows.Err()
}

var (
	_ catalog.Catalog = (*Catalog)(nil)
	_ catalog.Logged  = (*Catalog)(nil)
	_ catalog.Garbage = (*Catalog)(nil)
	_ catalog.Bounded = (*Catalog)(nil)
)

// Open opens the catalog in the file at path, which is made when missing.
func Open(ctx context.Context, path string) (*Catalog, error) {
	db, err := database.Open(ctx, path, registers.Apply)
	return opened(ctx, path, db, err)
}

// View opens the catalog in the file at path to read it, also while a server uses it. It changes nothing: of what a foil of
// another version has made there is an error.
func View(ctx context.Context, path string) (*Catalog, error) {
	db, err := database.View(ctx, path)
	return opened(ctx, path, db, err)
}

func opened(ctx context.Context, path string, db *database.DB, err error) (*Catalog, error) {
	var c *Catalog
	if err == nil {
		c = &Catalog{Garbage: garbage.New(db), Bounds: bounds.New(db), db: db}
		c.lease.Store(int64(catalog.DefaultLease))
		c.window.Store(int64(catalog.DefaultWindow))
		if c.Packs, err = packs.Open(ctx, db, packs.MostHooks); err == nil {
			err = c.prepare(ctx)
		}
		if err != nil {
			err = errors.Join(err, db.Close())
		}
	}
	if err != nil {
		return nil, fmt.Errorf("open catalog %s: %w", path, database.Known(err))
	}
	return c, nil
}

// Close implements catalog.Catalog.
func (c *Catalog) Close() error { return c.db.Close() }

// Check reads all of the catalog, and compares what is in it twice. Errors: catalog.ErrDamaged.
func (c *Catalog) Check(ctx context.Context) error { return c.db.Check(ctx) }
