package sqlite

import (
	"database/sql"
	"testing"

	"hydrofoil.dev/foil/internal/server/catalog/sqlite/packs"
	"hydrofoil.dev/foil/internal/server/catalog/sqlite/schema"
)

// Databases returns the catalog's connections.
func (c *Catalog) Databases() map[string]*sql.DB {
	return map[string]*sql.DB{"read": c.db.Read, "write": c.db.Write}
}

// Migrations are those up to a version.
func Migrations(version int) []string { return schema.Migrations()[:version] }

// FewHooks has Tidy thin hooks out when there are more than most.
func (c *Catalog) FewHooks(t testing.TB, most int64) {
	var err error
	if c.Packs, err = packs.Open(t.Context(), c.db, most); err != nil {
		t.Fatal(err)
	}
}
