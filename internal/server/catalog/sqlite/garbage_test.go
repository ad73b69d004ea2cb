package sqlite_test

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/catalog/sqlite"
)

func everything() catalog.Due { return catalog.Due{Now: time.Now(), Grace: -1, Limit: 100} }

// place returns the pack where a segment is found, and "" when there is none.
func place(t *testing.T, c *sqlite.Opened, id segment.ID) string {
	t.Helper()
	keep := c.Keep()
	defer keep.Release()
	found, err := keep.Find(t.Context(), []segment.ID{id})
	if err != nil {
		t.Fatal(err)
	}
	for _, key := range found.Keys {
		if !found.Damaged[catalog.Resting{Pack: key, ID: id}] {
			return key
		}
	}
	return ""
}

// A catalog of before knows what its manifests name, and has everything reviewed.
func TestGarbageOfOldCatalogs(t *testing.T) {
	path := filepath.Join(t.TempDir(), "db")
	named, orphan := digest.FromString("named").String(), digest.FromString("orphan").String()
	older(t, path, 4, `INSERT INTO repositories VALUES (1, 'r')`,
		`INSERT INTO blobs VALUES (1, '`+named+`', 1, ''), (1, '`+orphan+`', 1, '')`,
		`INSERT INTO manifests VALUES (1, 1, 'sha256:m', 'm/t', '', '', '', CAST('{"config":{"digest":"`+named+`"}}' AS BLOB), 0)`,
		`INSERT INTO packs VALUES (1, 'packs/x', 10)`)
	c := open(t, path)
	defer c.Close()
	done, err := c.CollectLinks(t.Context(), everything())
	if err != nil || done.Dead != 1 {
		t.Errorf("collected %+v, %v", done, err)
	}
	if _, err := c.Blob(t.Context(), "r", digest.Digest(named)); err != nil {
		t.Errorf("a blob that a manifest names: %v", err)
	}
	packs, err := c.PacksToReview(t.Context(), everything())
	if err != nil || len(packs) != 1 {
		t.Errorf("packs to review: %+v, %v", packs, err)
	}
}

// What was collected makes the catalog's file smaller.
func TestShrink(t *testing.T) {
	path := filepath.Join(t.TempDir(), "db")
	c := open(t, path)
	defer c.Close()
	ctx := t.Context()
	big := catalog.Manifest{MediaType: "m/t", Bytes: make([]byte, 4<<20), Pushed: time.Now()}
	big.Digest = digest.FromBytes(big.Bytes)
	must(t, c.PutManifest(ctx, "r", big), c.DeleteManifest(ctx, "r", big.Digest))
	if _, err := c.Purge(ctx, time.Now().Add(time.Minute), 10); err != nil {
		t.Fatal(err)
	}
	for more := true; more; {
		var err error
		if more, err = c.Shrink(ctx); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{path, path + "-wal"} {
		if info, err := os.Stat(name); err != nil || info.Size() > 1<<20 {
			t.Errorf("%s: %v, %v", filepath.Base(name), info, err)
		}
	}
}
