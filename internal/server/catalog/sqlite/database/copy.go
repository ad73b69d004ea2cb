package database

import (
	"context"
	"database/sql"
	"fmt"
	"net/url"
	"path/filepath"
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
		return fmt.Errorf("copy catalog %s: %w", from, Known(err))
	}
	return nil
}
