// Package database is what the catalog's SQL needs of a database.
//
// The SQL is written once, in what SQLite and PostgreSQL both understand: parameters are $1, $2, every number is a 64-bit
// integer, times are nanoseconds since 1970, texts are compared byte by byte. What they do in different ways is an Engine's, or a word of
// its Dialect.
//
// SQLite makes one change at a time. PostgreSQL makes many, each in a transaction that sees what others have committed
// before each statement (READ COMMITTED). So a change takes locks: of a repository's row before it looks at anything that the repository
// has (registers.Hold); of a row that it is about to decide by (Dialect.Lock). In SQLite they are no words at all.
package database

import (
	"context"
	"database/sql"
	"encoding/json"

	"hydrofoil.dev/foil/internal/server/catalog"
)

// Engine is a database.
type Engine interface {
	// Row reads the first row of a query. Errors: catalog.ErrNotFound when there is none.
	Row(ctx context.Context, query string, args []any, dest ...any) error
	// Rows calls fn for the rows of a query. fn may ask the catalog.
	Rows(ctx context.Context, query string, args []any, fn func(scan func(...any) error) error) error
	// View runs fn in a transaction that only reads, and sees the database as it was at one time. fn may run again if it fails.
	View(ctx context.Context, fn func(tx *Tx) error) error
	// Update runs fn in a transaction that is durable when Update returns nil. fn may run again: it begins anew then.
	Update(ctx context.Context, fn func(tx *Tx) error) error
	// Change makes a change, and returns when it is durable. bytes are those of manifests in it. fn makes it and returns what
	// the log is told; versions and times are set later. nil: nothing is different; Unlogged: something is that
	// the log is not told. fn may run again: it begins anew then.
	Change(ctx context.Context, bytes int, fn func(ctx context.Context, tx *Tx) ([]catalog.Change, error)) error
	// Versions returns up to which version of the log everything is in the database, and the greatest that may have been given.
	Versions(ctx context.Context) (applied, reserved uint64, err error)
	// CatchUp makes changes of the log that the database lacks, and then has those of at least version upTo.
	CatchUp(ctx context.Context, changes []catalog.Change, upTo uint64) error
	// Unwritten calls fn with changes that are made, and that the log may lack yet.
	Unwritten(ctx context.Context, fn func([]catalog.Change) error) error
	// SetLog has every change be in log.
	SetLog(ctx context.Context, log catalog.Log) error
	// Shrink gives room back to the file system, some at a time, and reports whether there is more.
	Shrink(ctx context.Context) (more bool, err error)
	// Check reads all, and compares what is there twice. Errors: catalog.ErrDamaged.
	Check(ctx context.Context) error
	Close() error
}

// DB is an Engine that is open, with what all of them have.
type DB struct {
	Engine
	*Dialect
}

// Tx is a transaction.
type Tx struct {
	*sql.Tx
	*Dialect
}

// Apply makes a change that the log has. What it deletes may not be there.
type Apply func(ctx context.Context, tx *Tx, change *catalog.Change) error

// Unlogged is the result of a change that the log need not know.
var Unlogged = []catalog.Change{}

// MaxBatchBytes is of manifests in a transaction.
const MaxBatchBytes = 8 << 20

// Dialect is words of SQL.
type Dialect struct {
	// Texts and Numbers are what comes after FROM: rows with a column "value", of a parameter that is a List.
	Texts, Numbers func(param string) string
	// In is the condition that a column is among the values of a List.
	InTexts, InNumbers func(column, param string) string
	// Lock ends a SELECT whose rows nobody else may change until the transaction ends; it waits for who does. LockFree leaves rows
	// out that somebody else has locked.
	Lock, LockFree string
	// LockLog is a statement that lets nobody change what a log has until the transaction ends; empty: nobody does.
	LockLog string
	// LockName is a statement that waits until nobody else holds the name $1, and holds it until the transaction ends; empty: nobody does.
	LockName string
	// Bytewise has a text that is no column's be compared byte by byte.
	Bytewise string
	// NextPack is the number of a new pack, which no row has ever named.
	NextPack string
	// SetVersion is a statement that has a new catalog be as its log up to version $1.
	SetVersion string
	// Now is the time, and Jitter a random number from 0 to 999.
	Now, Jitter string
	// Warm are queries of what should be in memory before the first pull.
	Warm []string
	// OldSegments says that rows of frames and segments may be there, of an older foil.
	OldSegments bool
}

// List is the parameter of Texts, Numbers, InTexts and InNumbers.
func List[T any](values []T) (string, error) {
	if values == nil {
		return "[]", nil
	}
	b, err := json.Marshal(values)
	return string(b), err
}

// Begin runs statements that a dialect has: none if they are empty.
func (tx *Tx) Begin(ctx context.Context, statement string, args ...any) error {
	if statement == "" {
		return nil
	}
	_, err := tx.ExecContext(ctx, statement, args...)
	return err
}
