package ingest_test

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"

	lt "hydrofoil.dev/foil/internal/format/layer/layertest"
	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/server/catalog/sqlcat"
	"hydrofoil.dev/foil/internal/server/catalog/sqlite"
	"hydrofoil.dev/foil/internal/server/dedup"
	"hydrofoil.dev/foil/internal/server/ingest"
	"hydrofoil.dev/foil/internal/server/objects"
)

// killedDir tells a process of this test binary to ingest in a directory, and
// killedAt at which operation on the object store to kill itself.
const killedDir, killedAt = "FOIL_TEST_INGEST_DIR", "FOIL_TEST_INGEST_KILL_AT"

func TestMain(m *testing.M) {
	for name, run := range map[string]func(dir string, at int) error{killedDir: ingestUntilKilled, provedDir: proveUntilKilled} {
		dir := os.Getenv(name)
		if dir == "" {
			continue
		}
		at, err := strconv.Atoi(os.Getenv(killedAt))
		if err == nil {
			err = run(dir, at)
		}
		if err != nil {
			os.Stderr.WriteString(err.Error())
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// dying is a store whose process kills itself before its nth change.
type dying struct {
	objects.Store
	left chan struct{}
}

func (d dying) step() {
	select {
	case <-d.left:
	default:
		// SIGKILL: no deferred function runs and nothing is flushed.
		p, _ := os.FindProcess(os.Getpid()) // never fails on Linux
		p.Kill()                            //nolint:errcheck // and if not, the parent sees it
		select {}
	}
}

func (d dying) Create(ctx context.Context, key string) (objects.Writer, error) {
	d.step()
	w, err := d.Store.Create(ctx, key)
	return dyingWriter{w, d}, err
}

type dyingWriter struct {
	objects.Writer
	d dying
}

func (w dyingWriter) Write(p []byte) (int, error) {
	w.d.step()
	return w.Writer.Write(p)
}

func (w dyingWriter) Commit() error {
	w.d.step()
	err := w.Writer.Commit()
	w.d.step()
	return err
}

func killedLayers(t testing.TB) []lt.Blob {
	blobs := []lt.Blob{
		lt.Layer{lt.File("a", 0o644, noise(8, 700_000)), lt.File("b", 0o644, "small")}.Gzip(t),
		lt.Layer{lt.File("c", 0o644, noise(9, 200_000))}.Zstd(t),
	}
	// In the order in which the process that is killed lists them.
	slices.SortFunc(blobs, func(a, b lt.Blob) int { return strings.Compare(string(a.Digest), string(b.Digest)) })
	return blobs
}

func openDir(dir string) (objects.Store, *sqlcat.Catalog, error) {
	store, err := objects.OpenDir(filepath.Join(dir, "objects"))
	if err != nil {
		return nil, nil, err
	}
	c, err := sqlite.Open(context.Background(), filepath.Join(dir, "catalog"))
	return store, c, err
}

func ingestUntilKilled(dir string, at int) error {
	store, c, err := openDir(dir)
	if err != nil {
		return err
	}
	d := dying{store, make(chan struct{}, at)}
	for range at {
		d.left <- struct{}{}
	}
	var layers []ingest.Descriptor
	err = store.List(context.Background(), "blobs/", func(key string, size int64) error {
		i := strings.LastIndexByte(key, '/')
		layers = append(layers, ingest.Descriptor{Digest: digest.NewDigestFromEncoded(digest.SHA256, key[i+1:]), Size: size})
		return nil
	})
	if err != nil {
		return err
	}
	g := &ingest.Ingester{Objects: d, Catalog: c, Options: ingest.Options{
		Packs: dedup.Options{PackSize: 100 << 10, Workers: 1}, Parallel: 1,
	}}
	_, err = g.Rootfs(context.Background(), layers)
	return errors.Join(err, g.Close(), c.Close())
}

// unusedPacks returns the packs that no segment of x is found in.
func unusedPacks(t testing.TB, g *ingest.Ingester, x *toc.TOC) (unused []string) {
	t.Helper()
	ids := make([]segment.ID, len(x.Segments))
	for i, s := range x.Segments {
		ids[i] = s.ID
	}
	locations := locate(t, g, ids)
	used := map[string]bool{}
	for _, l := range locations {
		if l.Frame != nil {
			used[l.Frame.Pack] = true
		}
	}
	err := g.Objects.List(context.Background(), "packs/", func(key string, _ int64) error {
		if !used[key] {
			unused = append(unused, key)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return unused
}

// Whenever the process is killed, the next one does the work as if nothing had
// been, what the first one stored is used or known to be unused, and the store
// has nothing that neither is.
func TestKilledAtAnyStep(t *testing.T) {
	blobs := killedLayers(t)
	for at := 0; ; at++ {
		dir := t.TempDir()
		store, c, err := openDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		var layers []ingest.Descriptor
		for _, b := range blobs {
			layers = append(layers, push(t, store, b))
		}
		c.Close()

		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		cmd := exec.CommandContext(ctx, os.Args[0])
		cmd.Env = append(os.Environ(), killedDir+"="+dir, killedAt+"="+strconv.Itoa(at))
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		err = cmd.Run()
		cancel()
		killed := cmd.ProcessState.ExitCode() == -1 && ctx.Err() != context.DeadlineExceeded
		if err != nil && !killed {
			t.Fatalf("step %d: %v: %s", at, err, stderr.Bytes())
		}

		if store, c, err = openDir(dir); err != nil {
			t.Fatalf("killed at step %d: %v", at, err)
		}
		g := &ingest.Ingester{Objects: store, Catalog: c}
		r, err := g.Rootfs(context.Background(), layers)
		if err != nil {
			t.Fatalf("killed at step %d: %v", at, err)
		}
		x, contents := readBack(t, g, r)
		wantFile(t, x, contents, "a", noise(8, 700_000))
		wantFile(t, x, contents, "b", "small")
		wantFile(t, x, contents, "c", noise(9, 200_000))
		orphans := unusedPacks(t, g, x)
		for _, key := range orphans {
			if err := store.Delete(context.Background(), key); err != nil {
				t.Fatalf("killed at step %d: %v", at, err)
			}
		}
		readBack(t, g, r) // nothing that was deleted is missed
		for _, key := range added(t, store) {
			switch {
			case key == r.Key, strings.HasPrefix(key, "packs/"):
			// The collector removes what nothing names.
			case strings.HasPrefix(key, "entries/") && ofLayer(key, layers), strings.HasPrefix(key, "recipes/") && ofLayer(key, layers):
			case strings.HasPrefix(key, "tocs/"):
			default:
				t.Errorf("killed at step %d: %s is left", at, key)
			}
		}
		g.Close()
		c.Close()
		if !killed {
			if at < 10 || len(orphans) != 0 {
				t.Errorf("%d steps, %d packs nothing uses", at, len(orphans))
			}
			t.Logf("killed at each of %d steps", at)
			return
		}
	}
}

// ofLayer reports whether the name of an object has the digest of a layer.
func ofLayer(key string, layers []ingest.Descriptor) bool {
	return slices.ContainsFunc(layers, func(l ingest.Descriptor) bool { return strings.Contains(key, "/"+l.Digest.Encoded()+"-") })
}
