package postgres

import (
	"context"
	"io/fs"
	"log/slog"

	"hydrofoil.dev/foil/internal/server/catalog/sqlcat/database"
)

// Migrations are those of this foil.
func Migrations() fs.FS {
	files, err := fs.Sub(migrations, "migrations")
	if err != nil {
		panic(err)
	}
	return files
}

// MigrateBy brings a database to the newest version of files.
func MigrateBy(ctx context.Context, location string, files fs.FS) error {
	config, most, err := Parse(location)
	if err != nil {
		return err
	}
	e := &engine{Reader: database.Reader{DB: pool(config, most), Dialect: dialect(), Known: known}, write: pool(config, most), log: slog.New(slog.DiscardHandler), cancel: func() {}}
	defer e.Close() //nolint:errcheck // nothing waits
	return e.migrateBy(ctx, files)
}
