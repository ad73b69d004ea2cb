// Package database is one SQLite file: its connections, and how rows are changed in it.
//
// The file is in WAL mode with synchronous=FULL: every transaction is on disk
// before its method returns. One connection writes; readers have their own and
// never wait for it. Changes of what a log takes (catalog.Logged) are made together, those that
// wait at the same time in one transaction (Change). One server uses the file at a time, though SQLite's locks
// would keep two from harming it.
package database

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
	"hydrofoil.dev/foil/internal/server/catalog/sqlite/schema"
)

// DB is an open file.
type DB struct {
	Write *sql.DB // one connection; transactions begin with the write lock. nil: the file is only read
	Read  *sql.DB

	apply   Apply
	l       logging // its requests apart, the changer's
	closing sync.Once
}

// Apply makes a change that the log has. What it deletes may not be there.
type Apply func(ctx context.Context, tx *sql.Tx, change *catalog.Change) error

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

// Open opens the file at path, which is made when missing, and brings its schema to the newest version. apply makes
// changes of its log again.
func Open(ctx context.Context, path string, apply Apply) (_ *DB, err error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return nil, err
	}
	d := &DB{apply: apply}
	defer func() {
		if err != nil {
			d.Close()
		}
	}()
	if d.Write, err = connect(abs, "immediate", "rwc", "auto_vacuum(2)", "journal_mode(WAL)"); err != nil {
		return nil, err
	}
	d.Write.SetMaxOpenConns(1)
	if err := schema.Migrate(ctx, d.Write); err != nil {
		return nil, err
	}
	// SQLite syncs the directory for its journals, not for the database itself.
	if err := durable.Sync(filepath.Dir(abs)); err != nil {
		return nil, err
	}
	if d.Read, err = connect(abs, "deferred", "rwc", "journal_mode(WAL)", "query_only(1)"); err != nil {
		return nil, err
	}
	d.Read.SetMaxOpenConns(4)
	d.Read.SetMaxIdleConns(4)
	d.l = newLogging()
	go d.changer() // Close waits for it
	return d, nil
}

// View opens the file at path to read it, also while a server uses it. It changes nothing: of what a foil of
// another version has made there is an error.
func View(ctx context.Context, path string) (*DB, error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return nil, err
	}
	if _, err := os.Stat(abs); err != nil {
		return nil, err
	}
	d := new(DB)
	if d.Read, err = connect(abs, "deferred", "rw", "query_only(1)"); err != nil {
		return nil, err
	}
	var version int
	err = d.Read.QueryRowContext(ctx, `PRAGMA user_version`).Scan(&version)
	if err == nil && version != len(schema.Migrations()) {
		err = fmt.Errorf("its version is %d, and this foil reads version %d: use the foil that its server was started with last", version, len(schema.Migrations()))
	}
	if err != nil {
		return nil, errors.Join(err, d.Close())
	}
	return d, nil
}

// Close ends the changes that wait, and closes the file.
func (d *DB) Close() error {
	if d.l.closing != nil { // it was opened
		d.closing.Do(func() { close(d.l.closing) })
		<-d.l.stopped
	}
	var errs []error
	for _, db := range []*sql.DB{d.Read, d.Write} { // the writer last: it checkpoints
		if db != nil {
			errs = append(errs, db.Close())
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("close catalog: %w", err)
	}
	return nil
}

// Update runs fn in a transaction that is durable when Update returns nil.
func (d *DB) Update(ctx context.Context, fn func(tx *sql.Tx) error) error {
	tx, err := d.Write.BeginTx(ctx, nil)
	if err != nil {
		return Known(err)
	}
	defer tx.Rollback()
	if err := fn(tx); err != nil {
		return Known(err)
	}
	return Known(tx.Commit())
}

// Known turns SQLite's errors into those that callers branch on: nothing there
// into catalog.ErrNotFound, a full disk into ENOSPC.
func Known(err error) error {
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

// Check reads all of the file, and compares what is in it twice. Errors: catalog.ErrDamaged.
func (d *DB) Check(ctx context.Context) error {
	found, err := d.Strings(ctx, `PRAGMA integrity_check(3)`)
	if err = Known(err); err == nil && (len(found) != 1 || found[0] != "ok") {
		err = fmt.Errorf("%w: %q", catalog.ErrDamaged, found)
	}
	if err != nil {
		return fmt.Errorf("check the catalog: %w", err)
	}
	return nil
}
