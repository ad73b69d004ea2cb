package sqlite_test

import (
	"database/sql"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/opencontainers/go-digest"
	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/catalog/catalogtest"
	"hydrofoil.dev/foil/internal/server/catalog/sqlcat"
	"hydrofoil.dev/foil/internal/server/catalog/sqlcat/sqlcattest"
	"hydrofoil.dev/foil/internal/server/catalog/sqlite"
)

func TestCatalog(t *testing.T) {
	catalogtest.Run(t, func(t *testing.T) catalogtest.Opener {
		// A name with what a URI would take apart.
		path := filepath.Join(t.TempDir(), "the catalog?a=b#c%20.db")
		return func() (catalog.Catalog, error) { return sqlite.Open(t.Context(), path) }
	})
}

func TestSQL(t *testing.T) {
	sqlcattest.Run(t, func(t *testing.T) *sqlcat.Catalog { return open(t, filepath.Join(t.TempDir(), "db")).Catalog })
}

func open(t testing.TB, path string) *sqlite.Opened {
	t.Helper()
	c, err := sqlite.OpenConnections(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// A copy of the files taken while the catalog is open is what a killed process
// leaves: everything that was acknowledged is in it.
func TestCrash(t *testing.T) {
	dir, after := t.TempDir(), t.TempDir()
	c := open(t, filepath.Join(dir, "db"))
	defer c.Close()
	p := catalogtest.Pack("packs/p", 0, 99, 10)
	if err := c.AddPack(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	if err := os.CopyFS(after, os.DirFS(dir)); err != nil {
		t.Fatal(err)
	}
	crashed := open(t, filepath.Join(after, "db"))
	defer crashed.Close()
	if place(t, crashed, catalogtest.ID(99)) != p.Key {
		t.Error("a segment of an acknowledged pack is not found")
	}
}

// What synchronous=FULL and the journal mode are is decided by every
// connection, so ask all of them.
func TestDurability(t *testing.T) {
	path := filepath.Join(t.TempDir(), "db")
	c := open(t, path)
	defer c.Close()
	for name, db := range c.Databases() {
		for pragma, want := range map[string]string{"synchronous": "2", "journal_mode": "wal", "foreign_keys": "1"} {
			var got string
			if err := db.QueryRowContext(t.Context(), `PRAGMA `+pragma).Scan(&got); err != nil || got != want {
				t.Errorf("%s: PRAGMA %s is %q, %v, want %s", name, pragma, got, err, want)
			}
		}
	}
	if _, err := c.Databases()["read"].Exec(`DELETE FROM packs`); err == nil {
		t.Error("a reading connection writes")
	}
}

func TestNewerVersionIsRefused(t *testing.T) {
	path := filepath.Join(t.TempDir(), "db")
	if err := open(t, path).Close(); err != nil {
		t.Fatal(err)
	}
	db, err := sql.Open("sqlite", path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := db.Exec(`PRAGMA user_version = 1000`); err != nil {
		t.Fatal(err)
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	if c, err := sqlite.Open(t.Context(), path); err == nil {
		c.Close()
		t.Error("a catalog of version 1000 is opened")
	} else if !strings.Contains(err.Error(), "newer foil") {
		t.Errorf("%v does not say what to do", err)
	}
}

// older makes a catalog of an earlier version.
func older(t *testing.T, path string, version int, statements ...string) {
	t.Helper()
	db, err := sql.Open("sqlite", path)
	if err != nil {
		t.Fatal(err)
	}
	statements = append(slices.Clone(sqlite.Migrations(version)), statements...)
	for _, s := range append(statements, fmt.Sprintf(`PRAGMA user_version = %d`, version)) {
		if _, err := db.Exec(s); err != nil {
			t.Fatalf("%s: %v", s, err)
		}
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestLayersOfOldCatalogs: what was ingested before there were recipes has none.
func TestLayersOfOldCatalogs(t *testing.T) {
	path := filepath.Join(t.TempDir(), "db")
	want := catalog.Layer{Blob: digest.FromString("blob"), DiffID: digest.FromString("diff"), Entries: "entries/x", Size: 7, Files: 2}
	older(t, path, 2, `INSERT INTO layers VALUES ('`+want.Blob.String()+`', '`+want.DiffID.String()+`', 'entries/x', '', 7, 2)`)
	c := open(t, path)
	defer c.Close()
	got, err := c.WithoutRecipe(t.Context(), "", 10)
	if err != nil || len(got) != 1 || got[0] != want {
		t.Errorf("layers %+v, %v", got, err)
	}
}

func TestNoCatalog(t *testing.T) {
	path := filepath.Join(t.TempDir(), "db")
	if err := os.WriteFile(path, []byte(strings.Repeat("this is no database ", 1000)), 0o600); err != nil {
		t.Fatal(err)
	}
	if c, err := sqlite.Open(t.Context(), path); err == nil {
		c.Close()
		t.Error("a text file is opened as a catalog")
	}
}

func BenchmarkAddPack(b *testing.B) {
	const segments = 84_000
	c := open(b, filepath.Join(b.TempDir(), "db"))
	defer c.Close()
	first := 0
	for b.Loop() {
		p := catalogtest.Pack(fmt.Sprint("packs/", first), first, first+segments-1, 8)
		if err := c.AddPack(b.Context(), p); err != nil {
			b.Fatal(err)
		}
		first += segments
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(first), "ns/segment")
}

func BenchmarkFind(b *testing.B) {
	const segments = 100_000
	c := open(b, filepath.Join(b.TempDir(), "db"))
	defer c.Close()
	for i := range 5 { // half a million are stored
		p := catalogtest.Pack(fmt.Sprint("packs/", i), i*segments, (i+1)*segments-1, 8)
		if err := c.AddPack(b.Context(), p); err != nil {
			b.Fatal(err)
		}
	}
	for _, found := range []struct {
		name  string
		first int
	}{{"stored", 2*segments + segments/2}, {"missing", 5 * segments}} {
		b.Run(found.name, func(b *testing.B) {
			ids := make([]segment.ID, segments)
			for i := range ids {
				ids[i] = catalogtest.ID(found.first + i)
			}
			for b.Loop() {
				keep := c.Keep()
				for batch := range slices.Chunk(ids, 512) {
					if _, err := keep.Find(b.Context(), batch); err != nil {
						b.Fatal(err)
					}
				}
				keep.Release()
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/segments, "ns/segment")
		})
	}
}

// A full disk is told as such, and the catalog goes on when there is room.
func TestFull(t *testing.T) {
	c := open(t, filepath.Join(t.TempDir(), "db"))
	defer c.Close()
	db := c.Databases()["write"]
	if _, err := db.Exec(`PRAGMA max_page_count = 64`); err != nil {
		t.Fatal(err)
	}
	p := catalogtest.Pack("packs/p", 0, 9999, 10)
	if err := c.AddPack(t.Context(), p); !errors.Is(err, syscall.ENOSPC) {
		t.Fatalf("a pack that does not fit: %v, want ENOSPC", err)
	}
	if _, err := db.Exec(`PRAGMA max_page_count = 100000`); err != nil {
		t.Fatal(err)
	}
	if err := c.AddPack(t.Context(), p); err != nil {
		t.Error(err)
	}
}
