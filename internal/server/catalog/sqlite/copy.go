package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"

	"hydrofoil.dev/foil/internal/server/catalog/sqlcat"
)

// Copy makes the file to, which must not be there, the catalog in the file from as one transaction sees it. A server may use
// from meanwhile.
func Copy(ctx context.Context, from, to string) error {
	abs, err := filepath.Abs(from)
	if err != nil {
		return fmt.Errorf("copy catalog %s: %w", from, err)
	}
	q := url.Values{"_pragma": {"busy_timeout(10000)"}, "mode": {"rw"}} // rw, or it would make what is not there
	db, err := sql.Open("sqlite", (&url.URL{Scheme: "file", Path: abs, RawQuery: q.Encode()}).String())
	if err != nil {
		return fmt.Errorf("copy catalog %s: %w", from, err)
	}
	defer db.Close() //nolint:errcheck // it only read
	if _, err := db.ExecContext(ctx, `VACUUM INTO ?`, to); err != nil {
		return fmt.Errorf("copy catalog %s: %w", from, known(err))
	}
	return nil
}

// OpenCopy opens a copy of the catalog in the file from, as one transaction sees it. A server may use from meanwhile. The
// copy is in the directory for temporary files, and gone when it is closed.
func OpenCopy(ctx context.Context, from string) (c *sqlcat.Catalog, end func() error, err error) {
	dir, err := os.MkdirTemp("", "foil-catalog-")
	if err != nil {
		return nil, nil, err
	}
	to := filepath.Join(dir, "catalog.db")
	if err = Copy(ctx, from, to); err == nil {
		c, err = Open(ctx, to)
	}
	if err != nil {
		return nil, nil, errors.Join(err, os.RemoveAll(dir))
	}
	return c, func() error { return errors.Join(c.Close(), os.RemoveAll(dir)) }, nil
}
