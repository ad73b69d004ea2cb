package postgres_test

import (
	"fmt"
	"io/fs"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/fstest"

	"database/sql"

	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/catalog/postgres"
	"hydrofoil.dev/foil/internal/server/catalog/postgres/postgrestest"
	"hydrofoil.dev/foil/internal/server/catalog/sqlcat"
	"hydrofoil.dev/foil/internal/server/catalog/sqlite"
)

// columns are those of each table that a query names.
func columns(t *testing.T, db *sql.DB, query string) map[string][]string {
	t.Helper()
	rows, err := db.QueryContext(t.Context(), query)
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	all := map[string][]string{}
	for rows.Next() {
		var table, column string
		if err := rows.Scan(&table, &column); err != nil {
			t.Fatal(err)
		}
		all[table] = append(all[table], column)
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	for _, c := range all {
		slices.Sort(c)
	}
	return all
}

// Tables and columns are those of SQLite. A step there needs a migration here.
func TestSameSchema(t *testing.T) {
	s := postgrestest.Start(t)
	at, path := s.Database(), filepath.Join(t.TempDir(), "db")
	c, err := sqlite.Open(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	for more := true; more; { // the tables of older foils go
		if more, err = c.Tidy(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	if err := open(t, at).Close(); err != nil {
		t.Fatal(err)
	}
	file, err := sql.Open("sqlite", path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	want := columns(t, file, `SELECT m.name, c.name FROM sqlite_schema m, pragma_table_info(m.name) c WHERE m.type IN ('table', 'view') AND m.name NOT LIKE 'sqlite_%'`)
	got := columns(t, postgrestest.Open(t, at), `SELECT table_name, column_name FROM information_schema.columns WHERE table_schema = 'public'`)
	// A sequence counts versions, and what is changed is in the database first.
	want["log"] = slices.DeleteFunc(want["log"], func(c string) bool { return c == "applied" || c == "reserved" })
	for _, own := range []string{"outbox", "owner", "foil_version"} {
		delete(got, own)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("SQLite, and PostgreSQL:\n%s", diff)
	}
}

// Processes that start at the same time make one schema.
func TestMigrateAtOnce(t *testing.T) {
	at := postgrestest.Start(t).Database()
	var all sync.WaitGroup
	for range 6 {
		all.Go(func() {
			c, err := postgres.Open(t.Context(), at, postgres.Options{Log: slog.New(slog.DiscardHandler)})
			if err != nil {
				t.Error(err)
				return
			}
			if err := c.Close(); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
}

// newer are the migrations of a later foil: n more than there are.
func newer(t *testing.T, n int) fs.FS {
	t.Helper()
	files := fstest.MapFS{}
	names, err := fs.Glob(postgres.Migrations(), "*.sql")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		b, err := fs.ReadFile(postgres.Migrations(), name)
		if err != nil {
			t.Fatal(err)
		}
		files[name] = &fstest.MapFile{Data: b}
	}
	for i := range n {
		files[fmt.Sprintf("%05d_later.sql", len(names)+i+1)] = &fstest.MapFile{Data: fmt.Appendf(nil, `-- +goose NO TRANSACTION
-- +goose Up
ALTER TABLE tags ADD COLUMN later%d BIGINT NOT NULL DEFAULT 0;
CREATE INDEX CONCURRENTLY tags_later%d ON tags (later%d);
`, i, i, i)}
	}
	return files
}

// A migration runs while a process of the version before serves; that version may start again afterwards, and the one before it may not.
func TestSkew(t *testing.T) {
	at := postgrestest.Start(t).Database()
	c := open(t, at)
	defer c.Close()
	stop := make(chan struct{})
	pushed := 0
	var pushing sync.WaitGroup
	pushing.Go(func() {
		for ; ; pushed++ {
			select {
			case <-stop:
				return
			default:
			}
			m := catalog.Manifest{Digest: digest.FromString(fmt.Sprint(pushed)), Bytes: []byte("{}")}
			if err := c.PutManifest(t.Context(), "r", m, fmt.Sprint("t", pushed%10)); err != nil {
				t.Error(err)
				return
			}
			if got, err := c.Tag(t.Context(), "r", fmt.Sprint("t", pushed%10)); err != nil || got != m.Digest {
				t.Errorf("%s, %v", got, err)
			}
		}
	})
	if err := postgres.MigrateBy(t.Context(), at, newer(t, 1)); err != nil {
		t.Error(err)
	}
	close(stop)
	pushing.Wait()
	t.Logf("%d pushes during the migration", pushed)
	if err := open(t, at).Close(); err != nil {
		t.Error(err)
	}
	if err := postgres.MigrateBy(t.Context(), at, newer(t, 2)); err != nil {
		t.Error(err)
	}
	if c, err := postgres.Open(t.Context(), at, postgres.Options{}); err == nil {
		c.Close()
		t.Error("a catalog that is two versions ahead is opened")
	} else if !strings.Contains(err.Error(), "newer foil") {
		t.Errorf("%v does not say what to do", err)
	}
}

// Who only reads makes nothing.
func TestReadOnly(t *testing.T) {
	at := postgrestest.Start(t).Database()
	if c, err := postgres.Open(t.Context(), at, postgres.Options{ReadOnly: true}); err == nil {
		c.Close()
		t.Error("an empty database is opened as a catalog")
	}
	c := open(t, at)
	defer c.Close()
	link := func(name string) {
		t.Helper()
		if err := c.LinkBlob(t.Context(), name, catalog.Blob{Digest: digest.FromString("b"), Size: 1}); err != nil {
			t.Fatal(err)
		}
	}
	link("first")
	read := map[string]*sqlcat.Catalog{}
	for name, o := range map[string]postgres.Options{"live": {ReadOnly: true}, "frozen": {ReadOnly: true, Snapshot: true}} {
		r, err := postgres.Open(t.Context(), at, o)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		read[name] = r
	}
	link("second")
	got := map[string][]string{}
	for name, r := range read {
		names, err := r.ListRepositories(t.Context(), "", -1)
		if err != nil {
			t.Fatal(err)
		}
		got[name] = names
	}
	if diff := cmp.Diff(map[string][]string{"live": {"first", "second"}, "frozen": {"first"}}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
