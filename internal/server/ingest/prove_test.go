package ingest_test

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/encoder"
	lt "hydrofoil.dev/foil/internal/format/layer/layertest"
	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/dedup"
	"hydrofoil.dev/foil/internal/server/ingest"
	"hydrofoil.dev/foil/internal/server/objects"
	"hydrofoil.dev/foil/internal/server/restore"
)

// goGzip is a layer as builders compress it. It skips the test where the library does so otherwise.
func goGzip(t testing.TB, l lt.Layer) lt.Blob {
	t.Helper()
	if v := runtime.Version(); !strings.HasPrefix(v, "go1.26") {
		t.Skipf("compress/flate of %s may make other streams than that of Go 1.26", v)
	}
	plain := l.TarBytes(t)
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	if _, err := w.Write(plain); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return lt.Blob{Bytes: b.Bytes(), Digest: digest.FromBytes(b.Bytes()), DiffID: digest.FromBytes(plain)}
}

// prove looks at all layers that there are.
func prove(t testing.TB, g *ingest.Ingester, blobs objects.Store) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	err := g.Prove(ctx, ingest.Proofs{Encoders: &encoder.Set{}, Blobs: blobs, Idle: cancel,
		Failed: func(d digest.Digest, err error) { t.Errorf("%s: %v", d, err) }})
	if !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
}

// wantRestored restores a blob that is not there, and ranges of it.
func wantRestored(t testing.TB, g *ingest.Ingester, want lt.Blob) {
	t.Helper()
	blobs := &restore.Blobs{Store: &dedup.Store{Objects: g.Objects, Catalog: g.Catalog}, Encoders: &encoder.Set{}}
	n := int64(len(want.Bytes))
	for _, r := range [][2]int64{{0, -1}, {0, n}, {n - 1, 1}, {n / 2, n / 3}, {0, 0}, {n, 0}} {
		length := r[1]
		if length < 0 {
			length = n
		}
		object, err := blobs.Open(t.Context(), want.Digest, r[0], r[1])
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(object)
		object.Close()
		if err != nil || !bytes.Equal(got, want.Bytes[r[0]:r[0]+length]) {
			t.Errorf("%d bytes at %d: got %d, or others, %v", length, r[0], len(got), err)
		}
	}
}

func TestProve(t *testing.T) {
	s := newServer(t)
	l := lt.Layer{lt.File("a", 0o644, noise(1, 900_000)), lt.File("b", 0o644, strings.Repeat("many words ", 40_000))}
	other := lt.Layer{lt.File("c", 0o644, noise(2, 9000))}
	blobs := map[string]lt.Blob{".reencoded": goGzip(t, l), ".plain": l.Tar(t), ".intact": other.Zstd(t)}
	var keys []string
	for _, b := range blobs {
		row, err := s.Layer(t.Context(), push(t, s.memory, b))
		if err != nil {
			t.Fatal(err)
		}
		keys = append(keys, row.Recipe.Key)
	}
	lost := lt.Layer{lt.File("lost", 0o644, "x")}.Gzip(t)
	if _, err := s.Layer(t.Context(), push(t, s.memory, lost)); err != nil {
		t.Fatal(err)
	}
	if err := s.memory.Delete(t.Context(), catalog.BlobKey(lost.Digest)); err != nil {
		t.Fatal(err)
	}
	// Without programs zstd would be tried later, if it had anything to do with them.
	prove(t, s.Ingester, s.memory)
	for kind, b := range blobs {
		row, err := s.Catalog.Layer(t.Context(), b.Digest)
		if err != nil {
			t.Fatal(err)
		}
		if !strings.HasSuffix(row.Recipe.Key, kind) {
			t.Errorf("want %s: %s", kind, row.Recipe.Key)
		}
		wantTar(t, s, row)
		if err := s.memory.Delete(t.Context(), catalog.BlobKey(b.Digest)); err != nil {
			t.Fatal(err)
		}
		if kind != ".intact" {
			wantRestored(t, s.Ingester, b)
		}
	}
	doomed, err := s.Catalog.(catalog.Garbage).Doomed(t.Context(), time.Now().Add(time.Hour), 100)
	if err != nil {
		t.Fatal(err)
	}
	for _, key := range keys {
		if !slices.Contains(doomed, key) {
			t.Errorf("the recipe %s is not to be removed", key)
		}
	}
	restorer := &restore.Blobs{Store: &dedup.Store{Objects: s.memory, Catalog: s.Catalog}, Encoders: &encoder.Set{}}
	for _, d := range []digest.Digest{blobs[".intact"].Digest, lost.Digest, digest.FromString("unknown")} {
		if _, err := restorer.Open(t.Context(), d, 0, -1); !errors.Is(err, restore.ErrUnproven) {
			t.Errorf("%s: %v", d, err)
		}
	}
	// What comes later is looked at as well.
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	idle := make(chan struct{}, 10)
	ended := make(chan error, 1)
	go func() {
		ended <- s.Prove(ctx, ingest.Proofs{Encoders: &encoder.Set{}, Blobs: s.memory, Failed: func(d digest.Digest, err error) { t.Error(d, err) },
			Idle: func() { idle <- struct{}{} }})
	}()
	<-idle
	later := goGzip(t, lt.Layer{lt.File("later", 0o644, "x")})
	if _, err := s.Layer(t.Context(), push(t, s.memory, later)); err != nil {
		t.Fatal(err)
	}
	<-idle
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	wantRestored(t, s.Ingester, later)
}

// TestDamageIsNotRestored: a blob that comes out otherwise has no last byte.
func TestDamageIsNotRestored(t *testing.T) {
	s := newServer(t)
	b := goGzip(t, lt.Layer{lt.File("a", 0o644, noise(1, 300_000))})
	if _, err := s.Layer(t.Context(), push(t, s.memory, b)); err != nil {
		t.Fatal(err)
	}
	prove(t, s.Ingester, s.memory)
	row, err := s.Catalog.Layer(t.Context(), b.Digest)
	if err != nil {
		t.Fatal(err)
	}
	keys := []string{row.Recipe.Key}
	for _, key := range added(t, s.memory) {
		if strings.HasPrefix(key, "packs/") {
			keys = append(keys, key)
		}
	}
	blobs := &restore.Blobs{Store: &dedup.Store{Objects: s.memory, Catalog: s.Catalog}, Encoders: &encoder.Set{}}
	failed := 0
	for _, key := range keys {
		whole := get(t, s.memory, key)
		for i := range 40 {
			damaged := bytes.Clone(whole)
			damaged[i*len(damaged)/40] ^= 0x10
			put(t, s.memory, key, damaged)
			for _, from := range []int64{0, 5} {
				object, err := blobs.Open(t.Context(), b.Digest, from, -1)
				if err != nil {
					failed++
					continue
				}
				got, err := io.ReadAll(object)
				object.Close()
				if err == nil && !bytes.Equal(got, b.Bytes[from:]) {
					t.Fatalf("%s, byte %d: other bytes from %d on, and no error", key, i*len(damaged)/40, from)
				}
				if err != nil {
					failed++
					if len(got) >= len(b.Bytes)-int(from) {
						t.Errorf("all %d bytes came, and then %v", len(got), err)
					}
				}
			}
		}
		put(t, s.memory, key, whole)
	}
	if failed < 20 {
		t.Errorf("only %d of the damages were found", failed)
	}
	wantRestored(t, s.Ingester, b)
}

// provedDir tells a process of this test binary to look at the layers in a directory, and killedAt at which
// operation to kill itself.
const provedDir = "FOIL_TEST_PROVE_DIR"

// dyingProof counts reads and removals as well.
type dyingProof struct{ dying }

func (d dyingProof) Open(ctx context.Context, key string, offset, length int64) (io.ReadCloser, error) {
	d.step()
	return d.Store.Open(ctx, key, offset, length)
}

func (d dyingProof) Delete(ctx context.Context, key string) error {
	d.step()
	return d.Store.Delete(ctx, key)
}

func proveUntilKilled(dir string, at int) error {
	store, c, err := openDir(dir)
	if err != nil {
		return err
	}
	d := dyingProof{dying{store, make(chan struct{}, at)}}
	for range at {
		d.left <- struct{}{}
	}
	g := &ingest.Ingester{Objects: d, Catalog: c}
	ctx, cancel := context.WithCancel(context.Background())
	err = g.Prove(ctx, ingest.Proofs{Encoders: &encoder.Set{}, Blobs: d, Idle: cancel, Failed: func(digest.Digest, error) {}})
	if errors.Is(err, context.Canceled) {
		err = nil
	}
	return errors.Join(err, g.Close(), c.Close())
}

// Whenever a proof is killed, the blob is there or can be restored, the recipe plays, and the next one ends it.
func TestProofKilledAtAnyStep(t *testing.T) {
	b := goGzip(t, lt.Layer{lt.File("a", 0o644, noise(8, 200_000)), lt.File("b", 0o644, "small")})
	for at := 0; ; at++ {
		dir := t.TempDir()
		store, c, err := openDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		g := &ingest.Ingester{Objects: store, Catalog: c}
		if _, err := g.Layer(t.Context(), push(t, store, b)); err != nil {
			t.Fatal(err)
		}
		g.Close()
		c.Close()

		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
		cmd := exec.CommandContext(ctx, os.Args[0])
		cmd.Env = append(os.Environ(), provedDir+"="+dir, killedAt+"="+strconv.Itoa(at))
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		err = cmd.Run()
		cancel()
		killed := cmd.ProcessState.ExitCode() == -1 && ctx.Err() == context.Canceled
		if err != nil && !killed {
			t.Fatalf("step %d: %v: %s", at, err, stderr.Bytes())
		}
		if store, c, err = openDir(dir); err != nil {
			t.Fatalf("killed at step %d: %v", at, err)
		}
		g = &ingest.Ingester{Objects: store, Catalog: c}
		row, err := c.Layer(t.Context(), b.Digest)
		if err != nil {
			t.Fatal(err)
		}
		if got, _, err := tarOf(g, row); err != nil || digest.FromBytes(got) != b.DiffID {
			t.Errorf("killed at step %d: its recipe: %v", at, err)
		}
		prove(t, g, store)
		wantRestored(t, g, b)
		g.Close()
		c.Close()
		if !killed {
			if at < 8 {
				t.Errorf("%d steps", at)
			}
			t.Logf("killed at each of %d steps", at)
			return
		}
	}
}
