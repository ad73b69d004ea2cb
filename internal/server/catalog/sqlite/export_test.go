package sqlite

import "database/sql"

// Databases returns the catalog's connections.
func (c *Catalog) Databases() map[string]*sql.DB {
	return map[string]*sql.DB{"read": c.read, "write": c.write}
}

// Migrations are those up to a version.
func Migrations(version int) []string { return migrations()[:version] }
