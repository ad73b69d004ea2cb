// Package postgres is the catalog in a PostgreSQL database, 15 or newer, which several processes may use at a time.
//
// A change is a transaction of its own, durable as far as the database's synchronous_commit and its standbys say. It sees what
// others have committed before each statement, and takes locks (package database). One that fails of a deadlock, or because its connection was
// lost before it was committed, is made again. Of one that was being committed then the database is asked what became of it
// (pg_xact_status): it is made again only if it was not.
//
// What the journal has to know is a row of the outbox, in the transaction of the change. Whichever process comes first takes rows,
// writes them to the journal, and deletes them: so the journal lacks what was changed in the last seconds, which the database has. A process that
// dies in between leaves changes that are written twice, which does no harm (package journal). Versions come from a sequence after the rows
// of a change were locked: of two changes of one register the later one has the greater.
//
// The schema is that of package sqlite; TestSameSchema compares them. Migrations (goose) run when a process starts, one process at a time. Each
// works with the foil before it as well: a process of one version back goes on serving, and may start.
package postgres

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"strconv"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"hydrofoil.dev/foil/internal/metrics"
	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/catalog/sqlcat"
	"hydrofoil.dev/foil/internal/server/catalog/sqlcat/database"
)

const (
	// DefaultConnections is how many a process has at most, half of them to read.
	DefaultConnections = 16
	// connections is the parameter of a URL that says how many there are.
	connections = "pool_max_conns"
	// patience is for how long a change may take from its first statement to the end of its commit.
	patience = time.Minute
)

// Options of Open.
type Options struct {
	// Log takes what nobody waits for; nil means slog.Default.
	Log *slog.Logger
	// Metrics gets what is measured, if it is not nil.
	Metrics *metrics.Collectors
	// ReadOnly opens a catalog that is there, to read it. It changes nothing.
	ReadOnly bool
	// Snapshot has everything be read as it was when it was opened. With ReadOnly.
	Snapshot bool
}

// engine implements database.Engine.
type engine struct {
	database.Reader
	write *sql.DB // nil: the catalog is only read
	log   *slog.Logger

	shipping  sync.Once
	wake      chan struct{} // there may be something to ship
	cancel    context.CancelFunc
	closing   context.Context
	work      sync.WaitGroup
	measuring *measures
	frozen    *sql.Tx // has the snapshot that all others read; nil: there is none
}

// dialect is PostgreSQL's.
func dialect() *database.Dialect {
	texts := func(param string) string { return `jsonb_array_elements_text(CAST(` + param + ` AS JSONB))` }
	numbers := func(param string) string {
		return `(SELECT CAST(value AS BIGINT) AS value FROM jsonb_array_elements_text(CAST(` + param + ` AS JSONB)))`
	}
	return &database.Dialect{
		// A function's column is named as its alias is, unless that says otherwise.
		Texts:   func(param string) string { return `(SELECT value FROM ` + texts(param) + ` AS list (value))` },
		Numbers: numbers,
		InTexts: func(column, param string) string {
			return column + ` = ANY (ARRAY(SELECT value FROM ` + texts(param) + ` AS list (value)))`
		},
		InNumbers: func(column, param string) string {
			return column + ` = ANY (ARRAY(SELECT CAST(value AS BIGINT) FROM ` + texts(param) + ` AS list (value)))`
		},
		Lock:       ` FOR UPDATE`,
		LockFree:   ` FOR UPDATE SKIP LOCKED`,
		LockLog:    `LOCK TABLE log, repositories, blobs, manifests, tags, layers, rootfs, deleted_manifests, deleted_tags IN SHARE ROW EXCLUSIVE MODE`,
		LockName:   `SELECT pg_advisory_xact_lock(hashtextextended($1, 0))`,
		Bytewise:   ` COLLATE "C"`,
		NextPack:   `nextval('packs_id_seq')`,
		SetVersion: `SELECT setval('log_version', CAST($1 AS BIGINT) + 1, false)`,
		Now:        `foil_now()`,
		Jitter:     `CAST(floor(random() * 1000) AS BIGINT)`,
	}
}

// Is reports whether a location is one of this package.
func Is(location string) bool {
	u, err := url.Parse(location)
	return err == nil && (u.Scheme == "postgres" || u.Scheme == "postgresql")
}

// Parse checks a location: postgres://[USER[:PASSWORD]@]HOST[:PORT][,HOST...]/DATABASE[?...], as libpq has it, with pool_max_conns besides.
func Parse(location string) (*pgx.ConnConfig, int, error) {
	fail := func(err error) (*pgx.ConnConfig, int, error) {
		return nil, 0, fmt.Errorf("catalog %s: %w", Shown(location), err)
	}
	if !Is(location) {
		return fail(errors.New("want postgres://[USER[:PASSWORD]@]HOST[:PORT]/DATABASE[?...]"))
	}
	c, err := pgx.ParseConfig(location)
	if err != nil {
		return fail(errors.New("it is no connection URI of PostgreSQL, or names a file that cannot be read")) // the error would show the password
	}
	most := DefaultConnections
	if s, ok := c.RuntimeParams[connections]; ok {
		if most, err = strconv.Atoi(s); err != nil || most < 4 {
			return fail(fmt.Errorf("%s=%s: want 4 at least", connections, s))
		}
		delete(c.RuntimeParams, connections)
	}
	if c.RuntimeParams["application_name"] == "" {
		c.RuntimeParams["application_name"] = "foil"
	}
	if c.ConnectTimeout == 0 {
		c.ConnectTimeout = 5 * time.Second
	}
	return c, most, nil
}

// freeze has all that is read be of one time. What it reads is lost with its connection: nothing is tried again.
func (e *engine) freeze(ctx context.Context) (err error) {
	if e.frozen, err = e.DB.BeginTx(context.WithoutCancel(ctx), e.Options); err != nil {
		return err
	}
	var snapshot string
	if err := e.frozen.QueryRowContext(ctx, `SELECT pg_export_snapshot()`).Scan(&snapshot); err != nil {
		return err
	}
	e.Again = nil
	e.Begun = func(ctx context.Context, tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `SET TRANSACTION SNAPSHOT '`+snapshot+`'`)
		return err
	}
	return nil
}

// WithoutPassword is a location with everything but its password.
func WithoutPassword(location string) string {
	u, err := url.Parse(location)
	if err != nil {
		return location
	}
	if u.User != nil {
		u.User = url.User(u.User.Username())
	}
	q := u.Query()
	q.Del("password")
	u.RawQuery = q.Encode()
	return u.String()
}

// Owner returns whose the database of a catalog is; empty: nobody's. Unless id is empty, it is its from then on if it was nobody's.
func Owner(ctx context.Context, location, id string) (owner string, err error) {
	config, _, err := Parse(location)
	if err != nil {
		return "", err
	}
	db := pool(config, 1)
	defer db.Close() //nolint:errcheck // what it did is committed
	if id != "" {
		_, err = db.ExecContext(ctx, `INSERT INTO owner (id, root) VALUES (1, $1) ON CONFLICT DO NOTHING`, id)
	}
	if err == nil {
		err = db.QueryRowContext(ctx, `SELECT root FROM owner`).Scan(&owner)
		if errors.Is(err, sql.ErrNoRows) {
			err = nil
		}
	}
	if err != nil {
		return "", fmt.Errorf("whose is catalog %s: %w", Shown(location), known(err))
	}
	return owner, nil
}

// Shown is a location without its password, for people.
func Shown(location string) string {
	u, err := url.Parse(location)
	if err != nil {
		return "that cannot be parsed"
	}
	q := u.Query()
	q.Del("password")
	u.RawQuery = q.Encode()
	return u.Redacted()
}

// Open opens the catalog at a location, and brings its schema to the newest version.
func Open(ctx context.Context, location string, o Options) (*sqlcat.Catalog, error) {
	fail := func(err error) (*sqlcat.Catalog, error) {
		return nil, fmt.Errorf("open catalog %s: %w", Shown(location), err)
	}
	config, most, err := Parse(location)
	if err != nil {
		return nil, err
	}
	if o.Log == nil {
		o.Log = slog.Default()
	}
	e := &engine{Reader: database.Reader{Dialect: dialect(), Known: knownReading}, log: o.Log, wake: make(chan struct{}, 1), measuring: newMeasures()}
	e.closing, e.cancel = context.WithCancel(context.Background())
	e.Again = e.readAgain
	e.Options = &sql.TxOptions{Isolation: sql.LevelRepeatableRead, ReadOnly: true}
	reading := config.Copy()
	reading.RuntimeParams["default_transaction_read_only"] = "on"
	e.DB = pool(reading, most/2)
	if !o.ReadOnly {
		e.write = pool(config, most-most/2)
	}
	if o.Metrics != nil {
		*o.Metrics = append(append(*o.Metrics, e.measuring.all()...), collectors.NewDBStatsCollector(e.DB, "read"))
		if e.write != nil {
			*o.Metrics = append(*o.Metrics, collectors.NewDBStatsCollector(e.write, "write"))
		}
	}
	if err := e.migrate(ctx); err != nil {
		return fail(errors.Join(known(err), e.Close()))
	}
	if o.Snapshot {
		if err := e.freeze(ctx); err != nil {
			return fail(errors.Join(known(err), e.Close()))
		}
	}
	c, err := sqlcat.New(ctx, &database.DB{Engine: e, Dialect: e.Dialect})
	if err != nil {
		return fail(err)
	}
	return c, nil
}

func pool(config *pgx.ConnConfig, most int) *sql.DB {
	db := stdlib.OpenDB(*config)
	db.SetMaxOpenConns(most)
	db.SetMaxIdleConns(most)
	db.SetConnMaxIdleTime(5 * time.Minute)
	db.SetConnMaxLifetime(time.Hour)
	return db
}

// Close ends what is done in the background, and all connections.
func (e *engine) Close() error {
	e.cancel()
	e.work.Wait()
	var err error
	if e.frozen != nil {
		err = e.frozen.Rollback()
	}
	err = errors.Join(err, e.DB.Close())
	if e.write != nil {
		err = errors.Join(err, e.write.Close())
	}
	return err
}

// Shrink implements database.Engine: the database does so by itself.
func (e *engine) Shrink(context.Context) (bool, error) { return false, nil }

// Check implements database.Engine: that is the database's business (checksums, pg_amcheck).
func (e *engine) Check(ctx context.Context) error {
	var one int
	return e.Row(ctx, `SELECT 1`, nil, &one)
}

// Versions implements database.Engine: what is committed is all there is.
func (e *engine) Versions(ctx context.Context) (applied, reserved uint64, err error) {
	err = e.Row(ctx, `SELECT CASE WHEN is_called THEN last_value ELSE last_value - 1 END FROM log_version`, nil, &applied)
	return applied, applied, err
}

// CatchUp implements database.Engine. It is never needed: a database that lacks what its journal has is an old copy.
func (e *engine) CatchUp(context.Context, []catalog.Change, uint64) error {
	return errors.New("the database lacks changes that its journal has: it is an old copy, or another one")
}
