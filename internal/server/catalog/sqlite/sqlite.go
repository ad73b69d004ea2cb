// Package sqlite is the catalog in one SQLite file.
//
// The file is in WAL mode with synchronous=FULL: every transaction is on disk
// before its method returns. One connection writes; readers have their own and
// never wait for it. Changes of what a log takes (catalog.Logged) are made together, those that
// wait at the same time in one transaction. One server uses the file at a time, though SQLite's locks
// would keep two from harming it.
package sqlite

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"
	sqlite3 "modernc.org/sqlite" // also registers the driver
	codes "modernc.org/sqlite/lib"

	"hydrofoil.dev/foil/internal/durable"
	"hydrofoil.dev/foil/internal/server/catalog"
)

// Catalog implements catalog.Catalog.
type Catalog struct {
	write *sql.DB // one connection; transactions begin with the write lock
	read  *sql.DB
	ask   statements

	policy  func() catalog.Policy // set before changes are made; nil: there is none
	l       logging               // its requests apart, the changer's
	lease   atomic.Int64          // nanoseconds
	window  atomic.Int64          // nanoseconds
	kept    kept
	closing sync.Once
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
		{&c.ask.manifest, `SELECT ` + manifestColumns + ` FROM manifests
			WHERE repo = (SELECT id FROM repositories WHERE name = ?) AND digest = ?`},
		{&c.ask.blobs, `SELECT digest, size, media_type FROM blobs
			WHERE digest IN (SELECT value FROM json_each(?1)) AND repo = (SELECT id FROM repositories WHERE name = ?2)`},
		{&c.ask.layers, `SELECT ` + layerColumns + ` FROM layers WHERE blob IN (SELECT value FROM json_each(?1))`},
		{&c.ask.rootfs, `SELECT toc, key, idx FROM rootfs WHERE chain_id = ?`},
		{&c.ask.startupImage, `SELECT ` + imageColumns + ` FROM startup_images WHERE repo = ? AND chain_id = ?`},
	} {
		var err error
		if *one.to, err = c.read.PrepareContext(ctx, one.query); err != nil { // closed with the connections
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
	rows, err := c.read.QueryContext(ctx, query)
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
	c, err := open(ctx, path)
	if err != nil {
		return nil, fmt.Errorf("open catalog %s: %w", path, known(err))
	}
	return c, nil
}

// connect opens a file; mode rwc makes it when missing.
func connect(file, begin, mode string, pragmas ...string) (*sql.DB, error) {
	q := url.Values{
		"_pragma": append([]string{
			"busy_timeout(10000)",
			"synchronous(FULL)",
			"foreign_keys(1)",
			"cache_size(-16384)", // KiB a connection
		}, pragmas...),
		"_txlock": {begin},
		"mode":    {mode},
	}
	return sql.Open("sqlite", (&url.URL{Scheme: "file", Path: file, RawQuery: q.Encode()}).String())
}

// View opens the catalog in the file at path to read it, also while a server uses it. It changes nothing: of what a foil of
// another version has made there is an error.
func View(ctx context.Context, path string) (*Catalog, error) {
	c, err := view(ctx, path)
	if err != nil {
		return nil, fmt.Errorf("open catalog %s: %w", path, known(err))
	}
	return c, nil
}

func view(ctx context.Context, path string) (*Catalog, error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return nil, err
	}
	if _, err := os.Stat(abs); err != nil {
		return nil, err
	}
	c := new(Catalog)
	if c.read, err = connect(abs, "deferred", "rw", "query_only(1)"); err != nil {
		return nil, err
	}
	var version int
	err = c.read.QueryRowContext(ctx, `PRAGMA user_version`).Scan(&version)
	if err == nil && version != len(migrations()) {
		err = fmt.Errorf("its version is %d, and this foil reads version %d: use the foil that its server was started with last", version, len(migrations()))
	}
	if err == nil {
		err = c.prepare(ctx)
	}
	if err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}

func open(ctx context.Context, path string) (_ *Catalog, err error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return nil, err
	}
	c := new(Catalog)
	c.lease.Store(int64(catalog.DefaultLease))
	c.window.Store(int64(catalog.DefaultWindow))
	defer func() {
		if err != nil {
			c.Close()
		}
	}()
	if c.write, err = connect(abs, "immediate", "rwc", "auto_vacuum(2)", "journal_mode(WAL)"); err != nil {
		return nil, err
	}
	c.write.SetMaxOpenConns(1)
	if err := migrate(ctx, c.write); err != nil {
		return nil, err
	}
	// SQLite syncs the directory for its journals, not for the database itself.
	if err := durable.Sync(filepath.Dir(abs)); err != nil {
		return nil, err
	}
	if c.read, err = connect(abs, "deferred", "rwc", "journal_mode(WAL)", "query_only(1)"); err != nil {
		return nil, err
	}
	c.read.SetMaxOpenConns(4)
	c.read.SetMaxIdleConns(4)
	if err := c.prepare(ctx); err != nil {
		return nil, err
	}
	c.l = newLogging()
	go c.changer() // Close waits for it
	return c, nil
}

// Close implements catalog.Catalog.
func (c *Catalog) Close() error {
	if c.l.closing != nil { // it was opened
		c.closing.Do(func() { close(c.l.closing) })
		<-c.l.stopped
	}
	var errs []error
	for _, db := range []*sql.DB{c.read, c.write} { // the writer last: it checkpoints
		if db != nil {
			errs = append(errs, db.Close())
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("close catalog: %w", err)
	}
	return nil
}

// update runs fn in a transaction that is durable when update returns nil.
func (c *Catalog) update(ctx context.Context, fn func(tx *sql.Tx) error) error {
	tx, err := c.write.BeginTx(ctx, nil)
	if err != nil {
		return known(err)
	}
	defer tx.Rollback()
	if err := fn(tx); err != nil {
		return known(err)
	}
	return known(tx.Commit())
}

// known turns SQLite's errors into those that callers branch on: nothing there
// into catalog.ErrNotFound, a full disk into ENOSPC.
func known(err error) error {
	if errors.Is(err, sql.ErrNoRows) {
		return catalog.ErrNotFound
	}
	if e := new(sqlite3.Error); errors.As(err, &e) && e.Code()&0xff == codes.SQLITE_FULL {
		return fmt.Errorf("%w (%w)", unix.ENOSPC, err)
	}
	if e := new(sqlite3.Error); errors.As(err, &e) && (e.Code()&0xff == codes.SQLITE_CORRUPT || e.Code()&0xff == codes.SQLITE_NOTADB) {
		return fmt.Errorf("%w (%w)", catalog.ErrDamaged, err)
	}
	return err
}

// Check reads all of the catalog, and compares what is in it twice. Errors: catalog.ErrDamaged.
func (c *Catalog) Check(ctx context.Context) error {
	found, err := c.strings(ctx, `PRAGMA integrity_check(3)`)
	if err = known(err); err == nil && (len(found) != 1 || found[0] != "ok") {
		err = fmt.Errorf("%w: %q", catalog.ErrDamaged, found)
	}
	if err != nil {
		return fmt.Errorf("check the catalog: %w", err)
	}
	return nil
}

// affected is catalog.ErrNotFound when a statement changed nothing.
func affected(r sql.Result, err error) error {
	if err != nil {
		return known(err)
	}
	n, err := r.RowsAffected()
	if err == nil && n == 0 {
		err = catalog.ErrNotFound
	}
	return err
}
