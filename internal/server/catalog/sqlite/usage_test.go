package sqlite_test

import (
	"database/sql"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/catalog/catalogtest"
	"hydrofoil.dev/foil/internal/server/catalog/sqlite"
)

// execute changes the file of a catalog that is closed.
func execute(t *testing.T, path string, statements ...string) {
	t.Helper()
	db, err := sql.Open("sqlite", path)
	must(t, err)
	for _, statement := range statements {
		if _, err := db.Exec(statement); err != nil {
			t.Fatalf("%s: %v", statement, err)
		}
	}
	must(t, db.Close())
}

// withoutUsage makes a catalog one of before usage was counted.
func withoutUsage() (statements []string) {
	for _, trigger := range []string{"repository_added", "repository_removed", "manifest_blob_added", "manifest_blob_removed", "blob_added",
		"blob_removed", "blob_resized", "manifest_removed", "manifest_added"} {
		statements = append(statements, `DROP TRIGGER `+trigger)
	}
	return append(statements, `DROP TABLE usage`, `DROP TABLE manifest_blobs`, `ALTER TABLE tags DROP COLUMN pushed`,
		`DROP TABLE hooks`, `DROP TABLE sampling`, `DROP TABLE damaged`, `CREATE TABLE lost (id BLOB NOT NULL PRIMARY KEY, pack INTEGER NOT NULL) STRICT, WITHOUT ROWID`,
		`PRAGMA user_version = 6`)
}

func usagesOf(t *testing.T, c *sqlite.Opened) []catalog.RepositoryUsage {
	t.Helper()
	all, err := c.Usages(t.Context(), "", 1000)
	must(t, err)
	return all
}

// What an old catalog has is counted when it is opened.
func TestUsageOfOldCatalogs(t *testing.T) {
	path := filepath.Join(t.TempDir(), "db")
	c := open(t, path)
	named, loose := digest.FromString("named"), digest.FromString("loose")
	must(t, c.LinkBlob(t.Context(), "a", catalog.Blob{Digest: named, Size: 7}), c.LinkBlob(t.Context(), "a", catalog.Blob{Digest: loose, Size: 9}),
		c.PutManifest(t.Context(), "a", catalogtest.Naming(named), "t"), c.LinkBlob(t.Context(), "b", catalog.Blob{Digest: named, Size: 7}))
	want := usagesOf(t, c)
	must(t, c.Close())
	execute(t, path, withoutUsage()...)
	old := open(t, path)
	defer old.Close()
	if diff := cmp.Diff(want, usagesOf(t, old)); diff != "" || len(want) != 2 {
		t.Errorf("usage of an old catalog (-want +got):\n%s", diff)
	}
}

// Tags of an old catalog are as old as their manifests.
func TestTagsOfOldCatalogs(t *testing.T) {
	path := filepath.Join(t.TempDir(), "db")
	c := open(t, path)
	m := catalogtest.Naming()
	must(t, c.PutManifest(t.Context(), "r", m, "1"), c.Close())
	execute(t, path, append(withoutUsage(), `INSERT INTO tags (repo, name, digest) VALUES (1, 'lost', 'sha256:0')`)...)
	c = open(t, path)
	defer c.Close()
	tags, err := c.Tagged(t.Context(), "r")
	must(t, err)
	if len(tags) != 2 || !tags[0].Pushed.Equal(m.Pushed) || time.Since(tags[1].Pushed).Abs() > time.Hour {
		t.Errorf("tags %v, want the first of %v, the other of now", tags, m.Pushed)
	}
}
