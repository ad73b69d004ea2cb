package sqlite

import (
	"database/sql"

	"hydrofoil.dev/foil/internal/server/catalog/sqlite/schema"
)

// Databases returns the catalog's connections.
func (c *Catalog) Databases() map[string]*sql.DB {
	return map[string]*sql.DB{"read": c.db.Read, "write": c.db.Write}
}

// Migrations are those up to a version.
func Migrations(version int) []string { return schema.Migrations()[:version] }
