// Package sqlite is the catalog in one SQLite file.
//
// The file is in WAL mode with synchronous=FULL: every transaction is on disk
// before its method returns. One connection writes; readers have their own and
// never wait for it. Changes of what a log takes (catalog.Logged) are made together, those that
// wait at the same time in one transaction (Change). One server uses the file at a time, though SQLite's locks
// would keep two from harming it.
package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"
	sqlite3 "modernc.org/sqlite" // also registers the driver
	codes "modernc.org/sqlite/lib"

	"hydrofoil.dev/foil/internal/durable"
	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/catalog/sqlcat"
	"hydrofoil.dev/foil/internal/server/catalog/sqlcat/database"
)

// engine implements database.Engine.
type engine struct {
	database.Reader
	write *sql.DB // one connection; transactions begin with the write lock. nil: the file is only read

	l       logging // its requests apart, the changer's
	closing sync.Once
}

// dialect is SQLite's.
func dialect() *database.Dialect {
	values := func(param string) string { return `json_each(` + param + `)` }
	in := func(column, param string) string { return column + ` IN (SELECT value FROM json_each(` + param + `))` }
	return &database.Dialect{
		Texts: values, Numbers: values, InTexts: in, InNumbers: in,
		// Rows may still name packs that are gone.
		NextPack: `1 + max((SELECT coalesce(max(id), 0) FROM packs),
			(SELECT coalesce(max(pack), 0) FROM layer_packs), (SELECT coalesce(max(pack), 0) FROM damaged))`,
		SetVersion: `UPDATE log SET applied = $1, reserved = $1`,
		Now:        `CAST(unixepoch('subsec') * 1e9 AS INTEGER)`,
		Jitter:     `abs(random() % 1000)`,
		Warm: []string{
			`SELECT name FROM repositories ORDER BY name LIMIT 1000`,
			`SELECT digest FROM tags LIMIT 1000`,
			`SELECT digest FROM manifests ORDER BY repo, digest LIMIT 1000`,
			`SELECT bytes FROM manifests LIMIT 1000`,
			`SELECT size FROM blobs LIMIT 1000`,
			`SELECT size FROM layers LIMIT 1000`,
			`SELECT toc FROM rootfs LIMIT 1000`,
			`SELECT repo FROM startup_images ORDER BY repo, chain_id LIMIT 1000`,
			`SELECT platform FROM startup_images LIMIT 1000`,
		},
	}
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

// Open opens the catalog in the file at path, which is made when missing, and brings its schema to the newest version.
func Open(ctx context.Context, path string) (*sqlcat.Catalog, error) {
	e, err := open(ctx, path)
	return opened(ctx, path, e, err)
}

// View opens the catalog in the file at path to read it, also while a server uses it. It changes nothing: of what a foil of
// another version has made there is an error.
func View(ctx context.Context, path string) (*sqlcat.Catalog, error) {
	e, err := view(ctx, path)
	return opened(ctx, path, e, err)
}

func opened(ctx context.Context, path string, e *engine, err error) (*sqlcat.Catalog, error) {
	if err == nil {
		err = e.Row(ctx, `SELECT EXISTS (SELECT 1 FROM sqlite_schema WHERE name = 'segments')`, nil, &e.Dialect.OldSegments)
		if err != nil {
			err = errors.Join(err, e.Close())
		}
	}
	var c *sqlcat.Catalog
	if err == nil {
		c, err = sqlcat.New(ctx, &database.DB{Engine: e, Dialect: e.Dialect})
	}
	if err != nil {
		return nil, fmt.Errorf("open catalog %s: %w", path, known(err))
	}
	return c, nil
}

func newEngine() *engine { return &engine{Reader: database.Reader{Dialect: dialect(), Known: known}} }

func open(ctx context.Context, path string) (_ *engine, err error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return nil, err
	}
	e := newEngine()
	defer func() {
		if err != nil {
			e.Close()
		}
	}()
	if e.write, err = connect(abs, "immediate", "rwc", "auto_vacuum(2)", "journal_mode(WAL)"); err != nil {
		return nil, err
	}
	e.write.SetMaxOpenConns(1)
	if err := migrate(ctx, e.write); err != nil {
		return nil, err
	}
	// SQLite syncs the directory for its journals, not for the database itself.
	if err := durable.Sync(filepath.Dir(abs)); err != nil {
		return nil, err
	}
	if e.DB, err = connect(abs, "deferred", "rwc", "journal_mode(WAL)", "query_only(1)"); err != nil {
		return nil, err
	}
	e.DB.SetMaxOpenConns(4)
	e.DB.SetMaxIdleConns(4)
	e.l = newLogging()
	go e.changer() // Close waits for it
	return e, nil
}

func view(ctx context.Context, path string) (*engine, error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return nil, err
	}
	if _, err := os.Stat(abs); err != nil {
		return nil, err
	}
	e := newEngine()
	if e.DB, err = connect(abs, "deferred", "rw", "query_only(1)"); err != nil {
		return nil, err
	}
	var version int
	err = e.DB.QueryRowContext(ctx, `PRAGMA user_version`).Scan(&version)
	if err == nil && version != len(steps()) {
		err = fmt.Errorf("its version is %d, and this foil reads version %d: use the foil that its server was started with last", version, len(steps()))
	}
	if err != nil {
		return nil, errors.Join(err, e.Close())
	}
	return e, nil
}

// Close ends the changes that wait, and closes the file.
func (e *engine) Close() error {
	if e.l.closing != nil { // it was opened
		e.closing.Do(func() { close(e.l.closing) })
		<-e.l.stopped
	}
	var errs []error
	for _, db := range []*sql.DB{e.DB, e.write} { // the writer last: it checkpoints
		if db != nil {
			errs = append(errs, db.Close())
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("close catalog: %w", err)
	}
	return nil
}

// Update implements database.Engine.
func (e *engine) Update(ctx context.Context, fn func(tx *database.Tx) error) error {
	tx, err := e.write.BeginTx(ctx, nil)
	if err != nil {
		return known(err)
	}
	defer tx.Rollback()
	if err := fn(&database.Tx{Tx: tx, Dialect: e.Dialect}); err != nil {
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

// Check implements database.Engine.
func (e *engine) Check(ctx context.Context) error {
	var found string
	err := e.Row(ctx, `PRAGMA integrity_check(3)`, nil, &found)
	if err == nil && found != "ok" {
		err = fmt.Errorf("%w: %q", catalog.ErrDamaged, found)
	}
	if err != nil {
		return fmt.Errorf("check the catalog: %w", err)
	}
	return nil
}

// shrinkPages is how many pages of 4 KiB Shrink gives back at once.
const shrinkPages = 512

// Shrink implements database.Engine. A catalog of an older version keeps its pages, for rows to come.
func (e *engine) Shrink(ctx context.Context) (more bool, err error) {
	var mode, free int
	if err := e.write.QueryRowContext(ctx, `PRAGMA auto_vacuum`).Scan(&mode); err != nil || mode != 2 {
		return false, known(err)
	}
	if _, err := e.write.ExecContext(ctx, fmt.Sprintf(`PRAGMA incremental_vacuum(%d)`, shrinkPages)); err != nil {
		return false, known(err)
	}
	if err := e.write.QueryRowContext(ctx, `PRAGMA freelist_count`).Scan(&free); err != nil {
		return false, known(err)
	}
	if free == 0 {
		var busy, log, done int
		if err := e.write.QueryRowContext(ctx, `PRAGMA wal_checkpoint(TRUNCATE)`).Scan(&busy, &log, &done); err != nil {
			return false, known(err)
		}
	}
	return free > 0, nil
}
