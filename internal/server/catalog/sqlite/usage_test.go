package sqlite_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"slices"
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

// held is what a repository holds, counted in the plainest way.
type held struct {
	blobs     map[digest.Digest]int64
	manifests map[digest.Digest][]digest.Digest // what they name
	sizes     map[digest.Digest]int64
}

func (h *held) usage(repo string) catalog.RepositoryUsage {
	u := catalog.RepositoryUsage{Repository: repo}
	named := map[digest.Digest]bool{}
	for d, names := range h.manifests {
		u.Manifests++
		u.Bytes += h.sizes[d]
		for _, n := range names {
			named[n] = true
		}
	}
	for d, size := range h.blobs {
		if named[d] {
			u.Bytes += size
		} else {
			u.Loose += size
		}
	}
	return u
}

// memoryLog keeps what is logged.
type memoryLog struct{ changes []catalog.Change }

func (l *memoryLog) Append(_ context.Context, changes []catalog.Change) error {
	l.changes = append(l.changes, changes...)
	return nil
}

// Whatever is added and removed, in any order, and replayed in any order: the numbers are those of what is there.
func TestUsage(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "db")
	c := open(t, path)
	log := new(memoryLog)
	must(t, c.SetLog(t.Context(), log))
	random := rand.New(rand.NewPCG(1, 2))
	repos := map[string]*held{}
	for _, name := range []string{"a", "a/b", "z"} {
		repos[name] = &held{map[digest.Digest]int64{}, map[digest.Digest][]digest.Digest{}, map[digest.Digest]int64{}}
		must(t, c.LinkBlob(t.Context(), name, catalog.Blob{Digest: digest.FromString("first"), Size: 1}))
		repos[name].blobs[digest.FromString("first")] = 1
	}
	names := []string{"a", "a/b", "z"}
	documents := []string{"no JSON", `{"layers": 7, "config": []}`, `{"layers": ["x", {"digest": 5}, {"digest": "sha256:1"}, null], "config": {"digest": null}}`, `[]`, `"x"`, ``}
	for range 400 {
		name := names[random.IntN(len(names))]
		h := repos[name]
		b := catalog.Blob{Digest: digest.FromString(fmt.Sprint("blob", random.IntN(8))), Size: 1 + random.Int64N(1000)}
		switch random.IntN(6) {
		case 0, 1:
			must(t, c.LinkBlob(t.Context(), name, b)) // also with another size
			h.blobs[b.Digest] = b.Size
		case 2:
			err := c.UnlinkBlob(t.Context(), name, b.Digest)
			if _, ok := h.blobs[b.Digest]; ok {
				must(t, err)
			} else if !errors.Is(err, catalog.ErrNotFound) {
				t.Fatal(err)
			}
			delete(h.blobs, b.Digest)
		case 3, 4:
			var of []digest.Digest
			for range random.IntN(4) {
				of = append(of, digest.FromString(fmt.Sprint("blob", random.IntN(8))))
			}
			m := catalogtest.Naming(of...)
			if random.IntN(5) == 0 {
				of = nil
				m.Bytes = []byte(documents[random.IntN(len(documents))])
				m.Digest = digest.FromBytes(m.Bytes)
			}
			must(t, c.PutManifest(t.Context(), name, m, "t"))
			h.manifests[m.Digest], h.sizes[m.Digest] = of, int64(len(m.Bytes))
		case 5:
			for d := range h.manifests {
				must(t, c.DeleteManifest(t.Context(), name, d))
				delete(h.manifests, d)
				break
			}
		}
	}
	var want []catalog.RepositoryUsage
	for _, name := range names {
		want = append(want, repos[name].usage(name))
	}
	if diff := cmp.Diff(want, usagesOf(t, c)); diff != "" {
		t.Errorf("usage (-want +got):\n%s", diff)
	}

	random.Shuffle(len(log.changes), func(i, j int) { log.changes[i], log.changes[j] = log.changes[j], log.changes[i] })
	replayed := open(t, filepath.Join(dir, "replayed"))
	defer replayed.Close()
	for part := range slices.Chunk(log.changes, 100) {
		must(t, replayed.Replay(t.Context(), part))
	}
	if diff := cmp.Diff(want, usagesOf(t, replayed)); diff != "" {
		t.Errorf("usage after a replay (-want +got):\n%s", diff)
	}

	must(t, c.Close())
	execute(t, path, withoutUsage()...)
	old := open(t, path)
	defer old.Close()
	if diff := cmp.Diff(want, usagesOf(t, old)); diff != "" {
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

// A manifest that names more than anybody reads is counted in part, and can be deleted.
func TestNamesAreBounded(t *testing.T) {
	c := open(t, filepath.Join(t.TempDir(), "db"))
	defer c.Close()
	var names []digest.Digest
	for i := range 5000 {
		names = append(names, digest.FromString(fmt.Sprint(i)))
	}
	m := catalogtest.Naming(names...)
	rows := func() (n int) {
		t.Helper()
		must(t, c.Databases()["read"].QueryRow(`SELECT count(*) FROM manifest_blobs`).Scan(&n))
		return n
	}
	must(t, c.PutManifest(t.Context(), "r", m))
	if n := rows(); n != 4096 {
		t.Errorf("%d names are kept, want 4096", n)
	}
	must(t, c.DeleteManifest(t.Context(), "r", m.Digest))
	if n := rows(); n != 0 || usagesOf(t, c)[0].Usage != (catalog.Usage{}) {
		t.Errorf("%d names are left, %+v", n, usagesOf(t, c))
	}
}
