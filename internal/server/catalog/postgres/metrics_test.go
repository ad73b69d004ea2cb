package postgres_test

import (
	"testing"

	"hydrofoil.dev/foil/internal/metrics"
	"hydrofoil.dev/foil/internal/metrics/metricstest"
	"hydrofoil.dev/foil/internal/server/catalog/postgres"
	"hydrofoil.dev/foil/internal/server/catalog/postgres/postgrestest"
)

func TestMetricsAreDocumented(t *testing.T) {
	var m metrics.Collectors
	c, err := postgres.Open(t.Context(), postgrestest.Start(t).Database(), postgres.Options{Metrics: &m})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	metricstest.Table(t, "../../../../docs/metrics.md", "database", m[:len(m)-2]) // those of the pools are client_golang's
}
