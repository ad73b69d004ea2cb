package sqlite

import (
	"context"
	"database/sql"
	"testing"

	"hydrofoil.dev/foil/internal/server/catalog/sqlcat"
	"hydrofoil.dev/foil/internal/server/catalog/sqlcat/database"
	"hydrofoil.dev/foil/internal/server/catalog/sqlcat/packs"
)

// Opened is a catalog with its connections.
type Opened struct {
	*sqlcat.Catalog
	e *engine
}

// OpenConnections opens a catalog with its connections.
func OpenConnections(ctx context.Context, path string) (*Opened, error) {
	e, err := open(ctx, path)
	if err != nil {
		return nil, err
	}
	c, err := opened(ctx, path, e, nil)
	return &Opened{c, e}, err
}

// Databases returns the catalog's connections.
func (o *Opened) Databases() map[string]*sql.DB {
	return map[string]*sql.DB{"read": o.e.DB, "write": o.e.write}
}

// Migrations are those up to a version.
func Migrations(version int) []string { return steps()[:version] }

// FewHooks has Tidy thin hooks out when there are more than most.
func (o *Opened) FewHooks(t testing.TB, most int64) {
	o.e.Dialect.OldSegments = false // by now
	var err error
	if o.Packs, err = packs.Open(t.Context(), &database.DB{Engine: o.e, Dialect: o.e.Dialect}, most); err != nil {
		t.Fatal(err)
	}
}
