package rootdir

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"hydrofoil.dev/foil/internal/durable"
	"hydrofoil.dev/foil/internal/metrics"
	"hydrofoil.dev/foil/internal/server/catalog/postgres"
	"hydrofoil.dev/foil/internal/server/catalog/sqlcat"
	"hydrofoil.dev/foil/internal/server/catalog/sqlite"
	"hydrofoil.dev/foil/internal/server/objects"
)

// The catalog of a root is a SQLite file below it, or a PostgreSQL database. The file "database" of a root says which one, without its
// password: that is in the environment (PGPASSWORD), or in the file that passfile= or PGPASSFILE names. A database belongs to one root,
// whose random ID it has.

// databaseRecord is the file.
type databaseRecord struct {
	Catalog string `json:"catalog"` // a location of package postgres
	ID      string `json:"id"`
}

func databaseFile(root string) string { return filepath.Join(root, "database") }

// readDatabase returns nil for a root whose catalog is below it.
func readDatabase(root string) (*databaseRecord, error) {
	b, err := os.ReadFile(databaseFile(root))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	r := new(databaseRecord)
	if err == nil {
		if err = json.Unmarshal(b, r); err == nil && (r.Catalog == "" || r.ID == "") {
			err = errors.New("it lacks a catalog or an id")
		}
	}
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", databaseFile(root), err)
	}
	return r, nil
}

// InDatabase reports whether a root's catalog is in a database, and where.
func InDatabase(root string) (at string, is bool, err error) {
	r, err := readDatabase(root)
	if r == nil {
		return "", false, err
	}
	return r.Catalog, true, nil
}

// CatalogOptions are those of OpenCatalog.
type CatalogOptions struct {
	// At is the location of a database; empty: the one that was recorded, or the file below the root.
	At string
	// Store has the objects of the root: beside some there is a catalog. Nil: the catalog may be new.
	Store   objects.Store
	Log     *slog.Logger
	Metrics *metrics.Collectors // gets what is measured, if it is not nil
}

// OpenCatalog opens the catalog of a root that is locked by who calls. Errors: ErrNoCatalog; ErrClaimed.
func OpenCatalog(ctx context.Context, root string, o CatalogOptions) (*sqlcat.Catalog, error) {
	r, err := readDatabase(root)
	if err != nil {
		return nil, err
	}
	if r == nil && o.At == "" {
		if err := os.MkdirAll(Catalog(root), 0o700); err != nil {
			return nil, err
		}
		if o.Store != nil {
			if err := Check(ctx, root, o.Store); err != nil {
				return nil, err
			}
		}
		return sqlite.Open(ctx, CatalogFile(root))
	}
	if r == nil {
		if _, err := os.Stat(CatalogFile(root)); !errors.Is(err, fs.ErrNotExist) {
			return nil, errors.Join(fmt.Errorf("%s has its catalog in %s: name another root for %s", root, CatalogFile(root), postgres.Shown(o.At)), err)
		}
		r = &databaseRecord{ID: objects.Random() + objects.Random()}
	}
	at := o.At
	if at == "" {
		at = r.Catalog
	}
	c, err := postgres.Open(ctx, at, postgres.Options{Log: o.Log, Metrics: o.Metrics})
	if err != nil {
		return nil, err
	}
	fail := func(err error) (*sqlcat.Catalog, error) { return nil, errors.Join(err, c.Close()) }
	owner, err := postgres.Owner(ctx, at, "")
	if err == nil && owner == "" && o.Store != nil {
		var there sqlcat.Stats
		if there, err = c.Stats(ctx); err == nil && there == (sqlcat.Stats{}) {
			err = checkFresh(ctx, root, at, o.Store)
		}
	}
	if err == nil {
		owner, err = postgres.Owner(ctx, at, r.ID)
	}
	if err != nil {
		return fail(err)
	}
	if owner != r.ID {
		return fail(fmt.Errorf("%w: the database %s has the catalog of another root: name another database, or that root", ErrClaimed, postgres.Shown(at)))
	}
	if shown := postgres.WithoutPassword(at); r.Catalog != shown {
		r.Catalog = shown
		if err := r.write(root); err != nil {
			return fail(err)
		}
	}
	return c, nil
}

// checkFresh is Check for a database that is nobody's yet.
func checkFresh(ctx context.Context, root, at string, store objects.Store) error {
	found, err := hasObjects(ctx, store)
	if err == nil && found {
		err = fmt.Errorf("%w: %s is empty, and there are objects. foil server rebuild --root %s --catalog URL makes it anew in an empty database; docs/operations.md has more",
			ErrNoCatalog, postgres.Shown(at), root)
	}
	return err
}

// ViewCatalog opens the catalog of a root to read it, also while a server uses it.
func ViewCatalog(ctx context.Context, root string) (*sqlcat.Catalog, error) {
	at, is, err := InDatabase(root)
	if err != nil {
		return nil, err
	}
	if is {
		return postgres.Open(ctx, at, postgres.Options{ReadOnly: true})
	}
	return sqlite.View(ctx, CatalogFile(root))
}

// SnapshotCatalog opens the catalog of a root as it is now, to read it, also while a server uses it. It does not change until it is
// closed, by end.
func SnapshotCatalog(ctx context.Context, root string) (c *sqlcat.Catalog, end func() error, err error) {
	at, is, err := InDatabase(root)
	if err != nil {
		return nil, nil, err
	}
	if !is {
		if _, err := os.Stat(CatalogFile(root)); err != nil {
			return nil, nil, fmt.Errorf("it is no server's root, or its catalog is gone: %w. %s", err, Mend(root))
		}
		return sqlite.OpenCopy(ctx, CatalogFile(root))
	}
	if c, err = postgres.Open(ctx, at, postgres.Options{ReadOnly: true, Snapshot: true}); err != nil {
		return nil, nil, err
	}
	return c, c.Close, nil
}

// NewCatalog opens an empty database, to be filled. It is nobody's until UseCatalog.
func NewCatalog(ctx context.Context, at string, log *slog.Logger) (*sqlcat.Catalog, error) {
	c, err := postgres.Open(ctx, at, postgres.Options{Log: log})
	if err != nil {
		return nil, err
	}
	owner, err := postgres.Owner(ctx, at, "")
	var there sqlcat.Stats
	if err == nil {
		there, err = c.Stats(ctx)
	}
	if err == nil && (owner != "" || there != sqlcat.Stats{}) {
		err = fmt.Errorf("the database %s has a catalog already: name an empty one", postgres.Shown(at))
	}
	if err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}

// UseCatalog makes the catalog of a root the one in a database that NewCatalog has opened. A catalog below the root stays as
// catalog.before-TIME, which it returns.
func UseCatalog(ctx context.Context, root, at string) (old string, err error) {
	r := &databaseRecord{Catalog: postgres.WithoutPassword(at), ID: objects.Random() + objects.Random()}
	if owner, err := postgres.Owner(ctx, at, r.ID); err != nil || owner != r.ID {
		return "", errors.Join(err, fmt.Errorf("the database %s is another root's", postgres.Shown(at)))
	}
	if err := r.write(root); err != nil {
		return "", err
	}
	old = fmt.Sprintf("%s.before-%s", Catalog(root), time.Now().UTC().Format("20060102T150405.000000000"))
	err = os.Rename(Catalog(root), old)
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	return old, err
}

func (r *databaseRecord) write(root string) error {
	b, err := json.Marshal(r)
	if err != nil {
		return err
	}
	return durable.Replace(databaseFile(root), append(b, '\n'))
}
