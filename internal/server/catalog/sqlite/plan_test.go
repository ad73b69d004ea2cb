package sqlite_test

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"
)

// What is looked up by a list is looked up by an index, however large the table is.
func TestListsUseIndexes(t *testing.T) {
	c := open(t, filepath.Join(t.TempDir(), "db"))
	defer c.Close()
	for _, query := range []string{
		`SELECT id, key FROM packs WHERE id IN (SELECT h.pack FROM json_each($1) AS list CROSS JOIN hooks h WHERE h.id = list.value)`,
		`SELECT id, key FROM packs WHERE id IN (SELECT f.pack FROM json_each($1) AS list CROSS JOIN segments s CROSS JOIN frames f WHERE s.id = unhex(list.value) AND f.id = s.frame)`,
		`DELETE FROM segments WHERE id IN (SELECT unhex(list.value) FROM json_each($1) AS list)`,
		`DELETE FROM hooks WHERE pack = 1 AND id IN (SELECT value FROM json_each($1))`,
		`SELECT size FROM blobs WHERE digest IN (SELECT value FROM json_each($1)) AND repo = (SELECT id FROM repositories WHERE name = 'r')`,
		`SELECT pack, id FROM damaged WHERE pack IN (SELECT value FROM json_each($1))`,
		`SELECT count(*) FROM packs WHERE key IN (SELECT value FROM json_each($1))`,
		`UPDATE packs SET used = used + 1 WHERE key IN (SELECT value FROM json_each($1))`,
		`DELETE FROM layer_packs WHERE pack IN (SELECT value FROM json_each($1))`,
		`SELECT entries FROM layers WHERE entries IN (SELECT value FROM json_each($1)) AND entries <> '' UNION SELECT recipe FROM layers WHERE recipe IN (SELECT value FROM json_each($1)) AND recipe <> ''`,
		`SELECT DISTINCT pack FROM layer_packs WHERE layer IN (SELECT l.value FROM json_each($1) AS l UNION SELECT r.digest FROM images i JOIN refs r ON r.repo = i.repo AND r.manifest = i.manifest WHERE i.chain_id = 'c')`,
		`SELECT key FROM strays WHERE key IN (SELECT value FROM json_each($1)) AND seen < 5`,
	} {
		rows, err := c.Databases()["read"].QueryContext(t.Context(), `EXPLAIN QUERY PLAN `+query, "[1]")
		if err != nil {
			t.Fatalf("%s: %v", query, err)
		}
		plan := ""
		for rows.Next() {
			var id, parent, unused int
			var step string
			if err := rows.Scan(&id, &parent, &unused, &step); err != nil {
				t.Fatal(err)
			}
			plan += fmt.Sprintln(step)
			if strings.HasPrefix(step, "SCAN") && !strings.Contains(step, "VIRTUAL TABLE") {
				t.Errorf("%s:\n%s", query, plan)
			}
		}
		rows.Close()
	}
}
