package database

import (
	"context"
	"database/sql"

	"hydrofoil.dev/foil/internal/server/catalog"
)

// Strings returns the rows of a query with one column.
func (d *DB) Strings(ctx context.Context, query string, args ...any) ([]string, error) {
	rows, err := d.Read.QueryContext(ctx, query, args...)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var all []string
	for rows.Next() {
		var s string
		if err := rows.Scan(&s); err != nil {
			return nil, err
		}
		all = append(all, s)
	}
	return all, rows.Err()
}

// Rows calls fn for the rows of a query.
func (d *DB) Rows(ctx context.Context, query string, args []any, fn func(scan func(...any) error) error) error {
	rows, err := d.Read.QueryContext(ctx, query, args...)
	if err != nil {
		return Known(err)
	}
	defer rows.Close()
	for rows.Next() {
		if err := fn(rows.Scan); err != nil {
			return err
		}
	}
	return Known(rows.Err())
}

// TextOf returns the rows of a query with one column, as a transaction sees them.
func TextOf(ctx context.Context, tx *sql.Tx, query string, args ...any) (all []string, err error) {
	rows, err := tx.QueryContext(ctx, query, args...)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() {
		var s string
		if err := rows.Scan(&s); err != nil {
			return nil, err
		}
		all = append(all, s)
	}
	return all, rows.Err()
}

// Affected is catalog.ErrNotFound when a statement changed nothing.
func Affected(r sql.Result, err error) error {
	if err != nil {
		return Known(err)
	}
	n, err := r.RowsAffected()
	if err == nil && n == 0 {
		err = catalog.ErrNotFound
	}
	return err
}

// NonNil keeps an empty slice from becoming NULL.
func NonNil(b []byte) []byte {
	if b == nil {
		return []byte{}
	}
	return b
}
