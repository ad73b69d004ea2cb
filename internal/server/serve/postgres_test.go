package serve_test

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/layer/layertest"
	"hydrofoil.dev/foil/internal/server/backup"
	"hydrofoil.dev/foil/internal/server/catalog/postgres/postgrestest"
	"hydrofoil.dev/foil/internal/server/collect"
	"hydrofoil.dev/foil/internal/server/rebuild"
	"hydrofoil.dev/foil/internal/server/rootdir"
	"hydrofoil.dev/foil/internal/server/scrub"
	"hydrofoil.dev/foil/internal/server/serve"
	"hydrofoil.dev/foil/internal/server/usage"
)

// A server whose catalog is in a database does what others do: it serves, collects, waits for the database, and is rebuilt.
func TestDatabase(t *testing.T) {
	db := postgrestest.Start(t)
	root, at := t.TempDir(), db.Database()
	// Of a server that is named nowhere else: its root knows the database.
	s := start(t, serve.Options{Root: root, Catalog: at, Collect: collect.Options{Window: -1, Interval: time.Hour}, Lease: 1})
	images := overlapping(t, 2, 6, 100_000)
	pushAll(t, s.Addr(), images, func(int) bool { return true })
	for i, m := range images {
		wantWhole(t, s.Addr(), i, m)
	}
	remove(t, s.Addr(), 0)
	collectAll(t, s.Addr())
	wantWhole(t, s.Addr(), 1, images[1])
	stop(t, s)

	// A GET is one query for a blob, two for a manifest by its tag; others may ask beside it.
	proxy := db.Proxy()
	s = start(t, serve.Options{Root: root, Catalog: proxy.Through(at), Collect: collect.Options{Window: -1, Interval: time.Hour}})
	for path, want := range map[string]int{"/blobs/" + digest.FromBytes(images[1].blobs[0]).String(): 1, "/manifests/1": 2} {
		least := 100
		for range 10 {
			_, before := proxy.Messages()
			if status, _ := get(t, "http://"+s.Addr()+"/v2/"+repositoryOf(1)+path); status != http.StatusOK {
				t.Fatalf("%s: %d", path, status)
			}
			_, after := proxy.Messages()
			least = min(least, after-before)
		}
		if least != want {
			t.Errorf("GET %s: %d queries, want %d", path, least, want)
		}
	}
	stop(t, s)

	if _, err := serve.Start(context.Background(), serve.Options{Root: t.TempDir(), Catalog: at, Listen: "127.0.0.1:0", Log: slog.New(slog.DiscardHandler)}); !errors.Is(err, rootdir.ErrClaimed) {
		t.Errorf("another root with the same database: %v, want ErrClaimed", err)
	}
	if _, err := backup.Backup(t.Context(), root, t.TempDir()+"/b"); err == nil || !strings.Contains(err.Error(), "pg_dump") {
		t.Errorf("a backup of it: %v, which does not say what to do", err)
	}
	s = start(t, serve.Options{Root: root, Collect: collect.Options{Window: -1, Interval: time.Hour}})
	wantWhole(t, s.Addr(), 1, images[1])
	r, err := usage.Look(t.Context(), usage.Options{Root: root})
	if err != nil || len(r.Repositories) != 1 || r.Repositories[0].Name != repositoryOf(1) {
		t.Errorf("usage %+v, %v", r, err)
	}
	if found, err := scrub.Run(t.Context(), scrub.Options{Root: root, Check: true}); err != nil || found.Mended+found.Unmended > 0 {
		t.Errorf("scrub --check: %+v, %v", found, err)
	}

	// Without the database nothing is known, and nobody is told that something is not there.
	db.Kill()
	for _, path := range []string{"/v2/" + repositoryOf(1) + "/manifests/1", "/readyz"} {
		res, err := http.Get("http://" + s.Addr() + path)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.Copy(io.Discard, res.Body)
		res.Body.Close()
		if res.StatusCode != http.StatusServiceUnavailable || path != "/readyz" && res.Header.Get("Retry-After") == "" {
			t.Errorf("%s without the database: %s, Retry-After %q", path, res.Status, res.Header.Get("Retry-After"))
		}
	}
	db.Restart()
	wantWhole(t, s.Addr(), 1, images[1])
	stop(t, s)

	db.Exec("test1", `DELETE FROM owner`) // as who has lost the root does; or restored a dump
	s = start(t, serve.Options{Root: root, Catalog: at})
	wantWhole(t, s.Addr(), 1, images[1])
	stop(t, s)

	other := db.Database()
	if _, err := rebuild.Run(t.Context(), rebuild.Options{Root: root}); err == nil || !strings.Contains(err.Error(), "--catalog") {
		t.Errorf("rebuild without a database: %v, which does not say what to do", err)
	}
	made, err := rebuild.Run(t.Context(), rebuild.Options{Root: root, Catalog: other})
	if err != nil || !made.Journal.Whole || made.Catalog.Manifests != 1 || made.Dropped != 0 {
		t.Errorf("rebuilt: %+v, %v", made, err)
	}
	if _, err := rebuild.Run(t.Context(), rebuild.Options{Root: root, Catalog: at}); err == nil {
		t.Error("a database that has a catalog is filled")
	}
	s = start(t, serve.Options{Root: root})
	wantWhole(t, s.Addr(), 1, images[1])
	more := makeImage(t, layertest.Layer{layertest.File("more", 0o644, noise(9, 100_000))})
	more.push(t, s.Addr())
	if err := more.pull(s.Addr()); err != nil {
		t.Error(err)
	}
}
