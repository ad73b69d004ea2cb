package database

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sync"

	"hydrofoil.dev/foil/internal/server/catalog"
)

// Reader is the part of an Engine that reads, with database/sql. Each statement is prepared once, on each connection that runs it: so a
// query's text must be one of a few.
type Reader struct {
	DB *sql.DB
	// Options are those of View.
	Options *sql.TxOptions
	Dialect *Dialect
	// Known turns errors of the database into those that callers branch on.
	Known func(error) error
	// Begun is called in each transaction of View first; if there is one, Row and Rows read in such a transaction too.
	Begun func(ctx context.Context, tx *sql.Tx) error
	// Again reports whether a read that failed may succeed now, and waits before it does; nil: never.
	Again func(ctx context.Context, err error, tries int) bool

	statements sync.Map // of *sql.Stmt, by their text
}

// prepared is closed with the connections.
func (r *Reader) prepared(ctx context.Context, query string) (*sql.Stmt, error) {
	if s, ok := r.statements.Load(query); ok {
		return s.(*sql.Stmt), nil
	}
	made, err := r.DB.PrepareContext(ctx, query)
	if err != nil {
		return nil, fmt.Errorf("%w in %q", err, query)
	}
	s, loaded := r.statements.LoadOrStore(query, made)
	if loaded {
		made.Close()
	}
	return s.(*sql.Stmt), nil
}

// again runs what only reads until it succeeds, or must not be tried again.
func (r *Reader) again(ctx context.Context, fn func() error) error {
	for tries := 1; ; tries++ {
		err := fn()
		if err == nil || r.Again == nil || !r.Again(ctx, err, tries) {
			return r.Known(err)
		}
	}
}

// Row implements Engine.
func (r *Reader) Row(ctx context.Context, query string, args []any, dest ...any) error {
	if r.Begun != nil {
		return r.View(ctx, func(tx *Tx) error { return tx.QueryRowContext(ctx, query, args...).Scan(dest...) })
	}
	return r.again(ctx, func() error {
		s, err := r.prepared(ctx, query)
		if err != nil {
			return err
		}
		return s.QueryRowContext(ctx, args...).Scan(dest...)
	})
}

// Rows implements Engine. It is tried again as long as fn was not called.
func (r *Reader) Rows(ctx context.Context, query string, args []any, fn func(scan func(...any) error) error) error {
	if r.Begun != nil {
		return r.View(ctx, func(tx *Tx) error { return tx.Rows(ctx, query, args, fn) })
	}
	begun := false
	var failed error
	for tries := 1; ; tries++ {
		err := func() error {
			s, err := r.prepared(ctx, query)
			if err != nil {
				return err
			}
			rows, err := s.QueryContext(ctx, args...)
			if err != nil {
				return err
			}
			defer rows.Close()
			for rows.Next() {
				begun = true
				if failed = fn(rows.Scan); failed != nil {
					return nil
				}
			}
			return rows.Err()
		}()
		if failed != nil {
			return failed
		}
		if err == nil || begun || r.Again == nil || !r.Again(ctx, err, tries) {
			return r.Known(err)
		}
	}
}

// View implements Engine.
func (r *Reader) View(ctx context.Context, fn func(tx *Tx) error) error {
	return r.again(ctx, func() error {
		tx, err := r.DB.BeginTx(ctx, r.Options)
		if err != nil {
			return err
		}
		defer tx.Rollback() //nolint:errcheck // it only reads
		if r.Begun != nil {
			if err := r.Begun(ctx, tx); err != nil {
				return err
			}
		}
		return fn(&Tx{tx, r.Dialect})
	})
}

// Strings returns the rows of a query with one column.
func (d *DB) Strings(ctx context.Context, query string, args ...any) (all []string, err error) {
	err = d.Rows(ctx, query, args, func(scan func(...any) error) error {
		var s string
		err := scan(&s)
		all = append(all, s)
		return err
	})
	return all, err
}

// TextOf returns the rows of a query with one column, as a transaction sees them.
func TextOf(ctx context.Context, tx *Tx, query string, args ...any) (all []string, err error) {
	err = tx.Rows(ctx, query, args, func(scan func(...any) error) error {
		var s string
		err := scan(&s)
		all = append(all, s)
		return err
	})
	return all, err
}

// Rows calls fn for the rows of a query. fn must not use the transaction.
func (tx *Tx) Rows(ctx context.Context, query string, args []any, fn func(scan func(...any) error) error) error {
	rows, err := tx.QueryContext(ctx, query, args...)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		if err := fn(rows.Scan); err != nil {
			return err
		}
	}
	return rows.Err()
}

// Affected is catalog.ErrNotFound when a statement changed nothing.
func Affected(r sql.Result, err error) error {
	if err != nil {
		return err
	}
	n, err := r.RowsAffected()
	if err == nil && n == 0 {
		err = catalog.ErrNotFound
	}
	return err
}

// Missing turns the error of a query without a row into catalog.ErrNotFound.
func Missing(err error) error {
	if errors.Is(err, sql.ErrNoRows) {
		return catalog.ErrNotFound
	}
	return err
}

// Most is the limit of a query: less than 0 is none.
func Most(limit int) int64 {
	if limit < 0 {
		return 1 << 62
	}
	return int64(limit)
}

// NonNil keeps an empty slice from becoming NULL.
func NonNil(b []byte) []byte {
	if b == nil {
		return []byte{}
	}
	return b
}
