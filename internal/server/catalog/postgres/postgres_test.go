package postgres_test

import (
	"testing"

	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/catalog/catalogtest"
	"hydrofoil.dev/foil/internal/server/catalog/postgres"
	"hydrofoil.dev/foil/internal/server/catalog/postgres/postgrestest"
	"hydrofoil.dev/foil/internal/server/catalog/sqlcat"
	"hydrofoil.dev/foil/internal/server/catalog/sqlcat/sqlcattest"
)

func TestCatalog(t *testing.T) {
	s := postgrestest.Start(t)
	catalogtest.Run(t, func(t *testing.T) catalogtest.Opener {
		at := s.Database()
		return func() (catalog.Catalog, error) { return postgres.Open(t.Context(), at, postgres.Options{}) }
	})
}

func TestSQL(t *testing.T) {
	s := postgrestest.Start(t)
	sqlcattest.Run(t, func(t *testing.T) *sqlcat.Catalog { return open(t, s.Database()) })
}

func open(t testing.TB, at string) *sqlcat.Catalog {
	t.Helper()
	c, err := postgres.Open(t.Context(), at, postgres.Options{})
	if err != nil {
		t.Fatal(err)
	}
	return c
}
