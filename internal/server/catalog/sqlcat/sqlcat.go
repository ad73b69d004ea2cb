// Package sqlcat is the catalog in a database that speaks SQL (package database). Those rows that a log has too are written and read in
// package registers; the reviews that triggers ask for are in package schema. Packages sqlite and postgres open one.
package sqlcat

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/catalog/sqlcat/bounds"
	"hydrofoil.dev/foil/internal/server/catalog/sqlcat/database"
	"hydrofoil.dev/foil/internal/server/catalog/sqlcat/garbage"
	"hydrofoil.dev/foil/internal/server/catalog/sqlcat/packs"
	"hydrofoil.dev/foil/internal/server/catalog/sqlcat/registers"
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

// statements are what each pull asks for.
type statements struct {
	tag, manifest, blobs, layers, rootfs, startupImage string
}

// prepare has the first pull of a process find what it needs: it need not open a connection, read the schema and compile.
func (c *Catalog) prepare(ctx context.Context) error {
	c.ask = statements{
		tag: `SELECT digest FROM tags WHERE repo = (SELECT id FROM repositories WHERE name = $1) AND name = $2`,
		manifest: `SELECT ` + registers.ManifestColumns + ` FROM manifests
			WHERE repo = (SELECT id FROM repositories WHERE name = $1) AND digest = $2`,
		blobs: `SELECT digest, size, media_type FROM blobs
			WHERE ` + c.db.InTexts("digest", "$1") + ` AND repo = (SELECT id FROM repositories WHERE name = $2)`,
		layers:       `SELECT ` + registers.LayerColumns + ` FROM layers WHERE ` + c.db.InTexts("blob", "$1"),
		rootfs:       `SELECT toc, key, idx FROM rootfs WHERE chain_id = $1`,
		startupImage: `SELECT ` + imageColumns + ` FROM startup_images WHERE repo = $1 AND chain_id = $2`,
	}
	nothing := func(func(...any) error) error { return nil }
	for query, args := range map[string][]any{
		c.ask.tag: {"", ""}, c.ask.manifest: {"", ""}, c.ask.blobs: {"[]", ""}, c.ask.layers: {"[]"}, c.ask.rootfs: {""}, c.ask.startupImage: {"", ""},
	} {
		if err := c.db.Rows(ctx, query, args, nothing); err != nil {
			return err
		}
	}
	// The connection has the pages of what it reads in its memory: those of a small catalog that
	// these statements look at, the upper ones of a large one.
	for _, query := range c.db.Warm {
		if err := c.db.Rows(ctx, query, nil, nothing); err != nil {
			return err
		}
	}
	return nil
}

var (
	_ catalog.Catalog = (*Catalog)(nil)
	_ catalog.Logged  = (*Catalog)(nil)
	_ catalog.Garbage = (*Catalog)(nil)
	_ catalog.Bounded = (*Catalog)(nil)
)

// New returns the catalog in a database, which is closed with it, also when there is an error.
func New(ctx context.Context, db *database.DB) (*Catalog, error) {
	c := &Catalog{Garbage: garbage.New(db), Bounds: bounds.New(db), db: db}
	c.lease.Store(int64(catalog.DefaultLease))
	c.window.Store(int64(catalog.DefaultWindow))
	var err error
	if c.Packs, err = packs.Open(ctx, db, packs.MostHooks); err == nil {
		err = c.prepare(ctx)
	}
	if err != nil {
		return nil, errors.Join(err, db.Close())
	}
	return c, nil
}

// Close implements catalog.Catalog.
func (c *Catalog) Close() error { return c.db.Close() }

// Check reads all of the catalog, and compares what is in it twice. Errors: catalog.ErrDamaged.
func (c *Catalog) Check(ctx context.Context) error { return c.db.Check(ctx) }

// EachKey calls fn for the keys of all objects that cannot be made again: blobs, and packs.
func (c *Catalog) EachKey(ctx context.Context, fn func(key string) error) error {
	for _, query := range []string{
		`SELECT DISTINCT digest FROM blobs WHERE digest > $1 ORDER BY digest LIMIT 1000`,
		`SELECT key FROM packs WHERE key > $1 ORDER BY key LIMIT 1000`,
	} {
		for after := ""; ; {
			page, err := c.db.Strings(ctx, query, after)
			if err != nil {
				return fmt.Errorf("list keys: %w", err)
			}
			if len(page) == 0 {
				break
			}
			for _, key := range page {
				after = key
				if d := digest.Digest(key); d.Validate() == nil {
					key = catalog.BlobKey(d)
				}
				if err := fn(key); err != nil {
					return err
				}
			}
		}
	}
	return nil
}
