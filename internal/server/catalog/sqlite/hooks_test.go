package sqlite_test

import (
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/catalog/catalogtest"
	"hydrofoil.dev/foil/internal/server/catalog/sqlite"
)

func tidied(t testing.TB, c *sqlite.Opened) {
	t.Helper()
	for more, n := true, 0; more; n++ {
		var err error
		if more, err = c.Tidy(t.Context()); err != nil {
			t.Fatal(err)
		}
		if n > 10_000 {
			t.Fatal("tidying does not come to an end")
		}
	}
}

func count(t testing.TB, c *sqlite.Opened, query string) (n int64) {
	t.Helper()
	if err := c.Databases()["read"].QueryRowContext(t.Context(), query).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

// find returns the packs where segments may be, which are released.
func find(t testing.TB, c *sqlite.Opened, ids ...segment.ID) []string {
	t.Helper()
	keep := c.Keep()
	defer keep.Release()
	found, err := keep.Find(t.Context(), ids)
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(found.Keys)
	return found.Keys
}

// Hooks are thinned out when they are many, down to one of 128, and what was stored together is still found by some of it, also by
// a process that comes later.
func TestHooksAreThinned(t *testing.T) {
	path := filepath.Join(t.TempDir(), "db")
	c := open(t, path)
	const per, packs = 2000, 5
	for p := range packs {
		must(t, c.AddPack(t.Context(), catalogtest.Pack(fmt.Sprint("packs/", p), p*per, (p+1)*per-1, 8)))
	}
	tidied(t, c)
	if n := count(t, c, `SELECT count(*) FROM hooks`); n != per*packs {
		t.Fatalf("%d hooks of %d segments", n, per*packs)
	}
	c.FewHooks(t, 3000)
	tidied(t, c)
	few := count(t, c, `SELECT count(*) FROM hooks`)
	if few > 3000 || few < 1500 {
		t.Errorf("%d hooks are left of 3000 that may be", few)
	}
	must(t, c.AddPack(t.Context(), catalogtest.Pack("packs/late", packs*per, (packs+1)*per-1, 8)))
	if n := count(t, c, `SELECT count(*) FROM hooks`) - few; n > per/2 {
		t.Errorf("a pack of %d segments has %d hooks now", per, n)
	}
	c.FewHooks(t, 1)
	tidied(t, c)
	if n := count(t, c, `SELECT count(*) FROM hooks`); n > (packs+1)*per/64 || n < (packs+1)*per/256 {
		t.Errorf("%d hooks are left of %d segments", n, (packs+1)*per)
	}
	must(t, c.Close())
	c = open(t, path)
	defer c.Close()
	for p := range packs {
		var ids []segment.ID
		for i := range per {
			ids = append(ids, catalogtest.ID(p*per+i))
		}
		if got := find(t, c, ids...); !slices.Equal(got, []string{fmt.Sprint("packs/", p)}) {
			t.Errorf("the segments of pack %d are found in %q", p, got)
		}
	}
}

// A catalog with rows for frames and segments serves as it is, becomes one with hooks step by step, however often that is
// interrupted, and forgets packs meanwhile.
func TestCatalogWithSegments(t *testing.T) {
	path := filepath.Join(t.TempDir(), "db")
	const per, packs = 1000, 4
	lost := segment.Sum([]byte("lost"))
	statements := []string{fmt.Sprintf(`INSERT INTO lost VALUES (x'%x', 2)`, lost[:])}
	for p := range packs {
		statements = append(statements, fmt.Sprintf(`INSERT INTO packs (id, key, size) VALUES (%d, 'packs/%d', 0)`, p+1, p))
		for i, f := range catalogtest.Pack("", p*per, (p+1)*per-1, 4).Frames {
			var b []byte
			frame := p*per + i + 1
			for n, s := range f.Segments {
				b = binary.BigEndian.AppendUint32(append(b, s.ID[:]...), s.Length)
				statements = append(statements, fmt.Sprintf(`INSERT INTO segments VALUES (x'%x', %d, %d)`, s.ID[:], frame, n))
			}
			statements = append(statements, fmt.Sprintf(`INSERT INTO frames VALUES (%d, %d, %d, %d, %d, x'%x')`, frame, p+1, f.Offset, f.Length, f.RawLength, b))
		}
	}
	blob := digest.FromString("layer")
	statements = append(statements, `INSERT INTO layers (blob, diff_id, entries, refused, size, files, packed) VALUES ('`+blob.String()+`', 'd', 'entries/x', '', 1, 1, 1)`,
		`INSERT INTO layer_packs VALUES ('`+blob.String()+`', 2)`)
	older(t, path, 7, append(append([]string{`BEGIN`}, statements...), `COMMIT`)...)

	gone := -1
	all := func(c *sqlite.Opened) {
		t.Helper()
		for p := range packs {
			var want []string
			if p != gone {
				want = []string{fmt.Sprint("packs/", p)}
			}
			for i := 0; i < per; i += 37 {
				if got := find(t, c, catalogtest.ID(p*per+i)); !slices.Equal(got, want) {
					t.Fatalf("segment %d of pack %d is found in %q", i, p, got)
				}
			}
		}
	}
	steps := 0
	for {
		c := open(t, path) // each step is another process's
		all(c)
		if steps == 5 {
			must(t, c.ReplacePack(t.Context(), catalogtest.Pack("packs/3", 3*per, 4*per-1, 4), nil))
			gone = 3
			all(c)
		}
		more, err := c.Tidy(t.Context())
		must(t, err)
		all(c)
		must(t, c.Close())
		if steps++; !more {
			break
		}
	}
	c := open(t, path)
	defer c.Close()
	if n := count(t, c, `SELECT count(*) FROM sqlite_schema WHERE name IN ('frames', 'segments', 'lost')`); n > 0 || steps < 10 {
		t.Errorf("%d old tables are left after %d steps", n, steps)
	}
	got, err := c.PacksOf(t.Context(), []digest.Digest{blob}, "")
	if err != nil || !slices.Equal(got.Keys, []string{"packs/1"}) || !got.Damaged[catalog.Resting{Pack: "packs/1", ID: lost}] {
		t.Errorf("the layer needs %+v, %v", got, err)
	}
	if free := count(t, c, `PRAGMA freelist_count`); free == 0 {
		t.Error("nothing became free")
	}
}

// BenchmarkHooks says what a catalog of FOIL_BENCH_SEGMENTS segments (default 100,000) takes: rows, bytes of its file, memory.
func BenchmarkHooks(b *testing.B) {
	segments := 100_000
	if s := os.Getenv("FOIL_BENCH_SEGMENTS"); s != "" {
		var err error
		if segments, err = strconv.Atoi(s); err != nil {
			b.Fatal(err)
		}
	}
	const per = 8000 // of a pack of 64 MiB
	for b.Loop() {
		path := filepath.Join(b.TempDir(), "db")
		c := open(b, path)
		for first := 0; first < segments; first += per {
			if err := c.AddPack(b.Context(), catalogtest.Pack(fmt.Sprint("packs/", first), first, min(first+per, segments)-1, 8)); err != nil {
				b.Fatal(err)
			}
			if first/per%32 == 0 {
				tidied(b, c)
			}
		}
		tidied(b, c)
		b.ReportMetric(float64(count(b, c, `SELECT count(*) FROM hooks`)), "hooks")
		b.ReportMetric(float64(count(b, c, `SELECT count(*) FROM packs`)), "packs")
		b.ReportMetric(float64(count(b, c, `PRAGMA page_count`)*count(b, c, `PRAGMA page_size`)), "bytes")
		b.ReportMetric(rss(b), "B-peak")
		if err := c.Close(); err != nil {
			b.Fatal(err)
		}
	}
}

// rss is the most memory that the process has had.
func rss(b *testing.B) float64 {
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		b.Fatal(err)
	}
	var kib float64
	for line := range strings.Lines(string(status)) {
		if _, err := fmt.Sscanf(line, "VmHWM: %f kB", &kib); err == nil {
			return kib * 1024
		}
	}
	b.Fatal("no VmHWM")
	return 0
}
