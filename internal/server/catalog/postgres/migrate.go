package postgres

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"io/fs"

	"github.com/pressly/goose/v3"
	"github.com/pressly/goose/v3/lock"
)

//go:embed migrations/*.sql
var migrations embed.FS

// skew is how many versions ahead of this foil the schema may be.
const skew = 1

// migrate brings the schema to the newest version. Others that start at the same time wait.
func (e *engine) migrate(ctx context.Context) error {
	files, err := fs.Sub(migrations, "migrations")
	if err != nil {
		return err
	}
	return e.migrateBy(ctx, files)
}

func (e *engine) migrateBy(ctx context.Context, files fs.FS) error {
	names, err := fs.Glob(files, "*.sql")
	if err != nil {
		return err
	}
	newest := int64(len(names))
	version, err := e.version(ctx)
	if err != nil {
		return err
	}
	switch {
	case version > newest+skew:
		return fmt.Errorf("its version is %d, and this foil knows versions up to %d, and works with %d: use a newer foil", version, newest, newest+skew)
	case version >= newest:
		return nil
	case e.write == nil:
		return fmt.Errorf("its version is %d, and this foil reads versions from %d: start its server with this foil first", version, newest)
	}
	locker, err := lock.NewPostgresSessionLocker(lock.WithLockTimeout(1, 300))
	if err != nil {
		return err
	}
	p, err := goose.NewProvider(goose.DialectPostgres, e.write, files, goose.WithSessionLocker(locker), goose.WithDisableGlobalRegistry(true), goose.WithTableName("foil_version"))
	if err != nil {
		return err
	}
	done, err := p.Up(ctx)
	for _, m := range done {
		e.log.Info("the catalog was migrated", "migration", m.Source.Path, "took", m.Duration)
	}
	if err != nil {
		return fmt.Errorf("migrate: %w", err)
	}
	return nil
}

// version is that of the schema; 0: there is none.
func (e *engine) version(ctx context.Context) (version int64, err error) {
	var there bool
	if err := e.DB.QueryRowContext(ctx, `SELECT to_regclass('foil_version') IS NOT NULL`).Scan(&there); err != nil || !there {
		if err == nil && e.write == nil {
			err = errors.New("there is no catalog in it")
		}
		return 0, err
	}
	err = e.DB.QueryRowContext(ctx, `SELECT coalesce(max(version_id), 0) FROM foil_version`).Scan(&version)
	return version, err
}
