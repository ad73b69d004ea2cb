package serve_test

import (
	"bytes"
	"compress/gzip"
	"context"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/format/encoder"
	"hydrofoil.dev/foil/internal/format/encoder/programs"
	"hydrofoil.dev/foil/internal/format/layer/layertest"
	"hydrofoil.dev/foil/internal/server/admin"
	"hydrofoil.dev/foil/internal/server/backup"
	"hydrofoil.dev/foil/internal/server/collect"
	"hydrofoil.dev/foil/internal/server/convert"
	"hydrofoil.dev/foil/internal/server/rebuild"
	"hydrofoil.dev/foil/internal/server/scrub"
	"hydrofoil.dev/foil/internal/server/serve"
	"hydrofoil.dev/foil/internal/server/usage"
)

// goLayer is a layer as builders compress it.
func goLayer(t testing.TB, level int, l layertest.Layer) layertest.Blob {
	t.Helper()
	if v := runtime.Version(); !strings.HasPrefix(v, "go1.26") {
		t.Skipf("compress/flate of %s may make other streams than that of Go 1.26", v)
	}
	plain := l.TarBytes(t)
	var b bytes.Buffer
	w, err := gzip.NewWriterLevel(&b, level)
	if err == nil {
		_, err = w.Write(plain)
	}
	if err == nil {
		err = w.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
	return layertest.Blob{Bytes: b.Bytes(), Digest: digest.FromBytes(b.Bytes()), DiffID: digest.FromBytes(plain), MediaType: ocispec.MediaTypeImageLayerGzip}
}

// moded is a server with one image of two layers that can be made again, and one that cannot, in some stores.
type moded struct {
	*healing
	stores []string // directories with objects/, the root's first
	made   []layertest.Blob
	stays  []byte // the blob of the layer that cannot be made again
	rules  string // file
}

func newModed(t *testing.T, others int, rules string) *moded {
	t.Helper()
	top := t.TempDir()
	m := &moded{rules: filepath.Join(top, "modes.toml")}
	for i := range 2 {
		m.made = append(m.made, goLayer(t, 6-5*i, layertest.Layer{
			layertest.File("shared", 0o644, noise(1, 200_000)),
			layertest.File(fmt.Sprint("own", i), 0o644, noise(uint64(2+i), 300_000)+strings.Repeat("text ", 9999)),
		}))
	}
	unproven := layertest.Layer{layertest.File("unproven", 0o644, noise(9, 9000))}.Zstd(t)
	m.stays = unproven.Bytes
	m.healing = &healing{t: t, root: filepath.Join(top, "root"), image: imageOf(t, m.made[0], m.made[1], unproven)}
	m.stores = []string{m.root}
	for i := range others {
		m.stores = append(m.stores, filepath.Join(top, fmt.Sprint("other", i)))
	}
	m.write(rules)
	m.start()
	t.Cleanup(http.DefaultClient.CloseIdleConnections)
	m.image.push(t, m.Addr())
	m.until("all layers were looked at", func() bool {
		n := m.counts("foil_serve_proof_layers_total")
		return n["reencoded"] == 2 && n["intact"] == 1
	})
	return m
}

func (m *moded) write(rules string) {
	m.t.Helper()
	if err := os.WriteFile(m.rules, []byte(rules), 0o600); err != nil {
		m.t.Fatal(err)
	}
}

// start starts the server; passes are those that now makes.
func (m *moded) start() {
	m.t.Helper()
	m.Server = start(m.t, serve.Options{Root: m.root, Stores: m.stores[1:], Modes: m.rules, Convert: convert.Options{Interval: -1},
		Collect: collect.Options{Interval: -1}, Log: slog.New(slog.NewTextHandler(&m.log, nil))})
}

func (m *moded) stop() {
	m.t.Helper()
	http.DefaultClient.CloseIdleConnections()
	if err := m.Close(); err != nil {
		m.t.Fatal(err)
	}
}

// now makes a pass.
func (m *moded) now() convert.Status {
	m.t.Helper()
	s, err := admin.NewClient(m.root).Mode(m.t.Context(), true)
	if err != nil {
		m.t.Fatalf("%v. Log:\n%s", err, m.log.String())
	}
	return s
}

func (m *moded) path(store int, blob []byte) string {
	d := digest.FromBytes(blob).Encoded()
	return filepath.Join(m.stores[store], "objects", "blobs", "sha256", d[:2], d)
}

// want holds in which stores the blobs that can be made again have intact copies, and that all blobs are served.
func (m *moded) want(in ...bool) {
	m.t.Helper()
	for i, b := range m.made {
		for store := range m.stores {
			if want := store < len(in) && in[store]; exists(m.path(store, b.Bytes)) != want {
				m.t.Errorf("layer %d in store %d: %v, want %v. Log:\n%s", i, store, !want, want, m.log.String())
			}
		}
	}
	m.served()
}

func (m *moded) served() {
	m.t.Helper()
	for _, b := range m.image.blobs {
		for _, r := range []string{"", "bytes=0-0", fmt.Sprintf("bytes=%d-", len(b)/3), "bytes=-9"} {
			want := map[string][]byte{"": b, "bytes=0-0": b[:1], "bytes=-9": b[len(b)-9:], fmt.Sprintf("bytes=%d-", len(b)/3): b[len(b)/3:]}[r]
			if status, got, err := m.get(b, r); err != nil || status >= 300 || !bytes.Equal(got, want) {
				m.t.Errorf("%s, range %q: %d, %d bytes, or others, want %d: %v", digest.FromBytes(b), r, status, len(got), len(want), err)
			}
		}
		res := send(m.t, "HEAD", fmt.Sprintf("http://%s/v2/r/blobs/%s", m.Addr(), digest.FromBytes(b)), "", nil, 200)
		if res.ContentLength != int64(len(b)) {
			m.t.Errorf("HEAD says %d bytes, want %d", res.ContentLength, len(b))
		}
	}
}

func TestModesInOneStore(t *testing.T) {
	m := newModed(t, 0, `mode = "intact"`)
	m.now()
	m.want(true)
	m.write(`mode = "full"`)
	s := m.now()
	m.want(false)
	if !exists(m.path(0, m.stays)) {
		t.Error("what nobody can make again is gone")
	}
	if len(s.Kept) != 1 || s.Kept[0].Why != "unproven" || s.Kept[0].Blobs != 2 { // and the config
		t.Errorf("kept: %+v", s.Kept)
	}
	// Reading makes no copy that the mode does not want.
	m.now()
	m.want(false)
	// A number is a number; there is one store.
	m.write(`mode = "2"`)
	m.now()
	m.want(true)
	m.write("mode = \"full\"\n[[rule]]\nrepositories = [\"r\"]\nmode = \"intact\"")
	m.now()
	m.want(true)
	// What is pushed again is there again, and goes again.
	m.write(`mode = "0"`)
	m.now()
	m.want(false)
	m.image.push(t, m.Addr())
	m.now()
	m.want(false)
	// A file that makes no sense changes nothing.
	m.write(`mode = "fuller"`)
	m.now()
	m.want(false)
}

func TestSelective(t *testing.T) {
	m := newModed(t, 1, "mode = \"selective\"\n[selective]\nstay = \"10m\"")
	m.now()
	m.want(true)
	m.write("mode = \"selective\"\n[selective]\nstay = \"1ns\"\nhot = 500\ncold = 400")
	m.now()
	m.want()
	m.write("mode = \"selective\"\n[selective]\nstay = \"1ns\"\nhot = 1.5\ncold = 1")
	s := m.now() // each was pulled four times
	m.want(true, true)
	if len(s.Stores) != 2 || s.Stores[0].Dir != m.root || s.Stores[1].Away != "" {
		t.Errorf("stores: %+v", s.Stores)
	}
}

// All that works on blobs knows of those that have no intact copy.
func TestWithoutIntactCopies(t *testing.T) {
	m := newModed(t, 0, `mode = "full"`)
	m.now()
	m.want(false)
	// Mounted elsewhere, it is there.
	send(t, "POST", fmt.Sprintf("http://%s/v2/elsewhere/blobs/uploads/?mount=%s&from=r", m.Addr(), m.made[0].Digest), "", nil, http.StatusCreated)
	m.now()
	m.want(false)
	u, err := usage.Look(t.Context(), usage.Options{Root: m.root})
	if err != nil || u.Intact.Blobs != 4 || u.Intact.Intact != 2 {
		t.Errorf("usage: %+v, %v", u, err)
	}
	// A backup is whole, and serves.
	copied := filepath.Join(t.TempDir(), "backup")
	if r, err := backup.Backup(t.Context(), m.root, copied); err != nil || len(r.Missing) > 0 {
		t.Errorf("backup: %+v, %v", r, err)
	}
	m.stop()
	if r, err := scrub.Run(t.Context(), scrub.Options{Root: m.root}); err != nil || len(r.Findings) > 0 {
		t.Errorf("scrub: %+v, %v", r, err)
	}
	if r, err := rebuild.Run(t.Context(), rebuild.Options{Root: m.root}); err != nil || r.Dropped > 0 {
		t.Errorf("rebuild: %+v, %v", r, err)
	}
	m.start()
	m.want(false)
	m.stop()
	restored := filepath.Join(t.TempDir(), "restored")
	if _, err := backup.Restore(t.Context(), copied, restored); err != nil {
		t.Fatal(err)
	}
	m.root, m.stores = restored, []string{restored}
	m.start()
	m.want(false)
	// Deleted, they go.
	send(t, "DELETE", fmt.Sprintf("http://%s/v2/r/manifests/%s", m.Addr(), digest.FromBytes(m.image.manifest)), "", nil, http.StatusAccepted)
	m.stop()
}

// A layer that is ingested again has a new recipe, which nobody has proven: its blob is an object before.
func TestIngestedAgain(t *testing.T) {
	m := newModed(t, 0, `mode = "full"`)
	m.now()
	m.want(false)
	m.stop()
	entries := m.objects("entries")
	if err := os.Truncate(entries[0], 10); err != nil {
		t.Fatal(err)
	}
	r, err := scrub.Run(t.Context(), scrub.Options{Root: m.root})
	if err != nil {
		t.Fatal(err)
	}
	// The list says where contents begin: without it nothing comes back, and that is told with the image. If it was the
	// list of the layer that stays it is made again.
	for _, f := range r.Findings {
		if f.Mended == "" && (len(f.Images) != 1 || f.Images[0] != "r:1") {
			t.Errorf("%+v", f)
		}
	}
	if len(r.Findings) == 0 {
		t.Error("nothing was found")
	}
	m.start()
	// Who pushes the image again is asked for what is lost, once somebody has found that it is.
	m.until("all is there", func() bool {
		m.image.push(t, m.Addr())
		for _, b := range m.image.blobs {
			if _, got, err := m.get(b, ""); err != nil || !bytes.Equal(got, b) {
				return false
			}
		}
		return true
	})
	if err := m.image.pull(m.Addr()); err != nil {
		t.Error(err)
	}
	m.served()
}

// Packs, lists and recipes are in each store: whatever one of them loses, or has other bytes of, comes from the other.
func TestStoresMendEachOther(t *testing.T) {
	m := newModed(t, 1, `mode = "full"`)
	m.now()
	m.want(false)
	kinds := []string{"packs", "entries", "recipes"}
	files := func(store int) (list []string) {
		for _, kind := range kinds {
			err := filepath.WalkDir(filepath.Join(m.stores[store], "objects", kind), func(path string, e os.DirEntry, err error) error {
				if err == nil && e.Type().IsRegular() {
					list = append(list, path)
				}
				return err
			})
			if err != nil {
				t.Fatal(err)
			}
		}
		return list
	}
	if a, b := files(0), files(1); len(a) == 0 || len(a) < len(b) {
		t.Fatalf("%d files in the root's store, %d in the other", len(a), len(b))
	}
	// The root's are gone: reads come from the other, and a pass copies them back.
	for _, path := range files(0) {
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
	}
	m.served()
	m.now()
	if len(files(0)) < len(files(1)) {
		t.Errorf("%d of %d were copied back", len(files(0)), len(files(1)))
	}
	// The root's have other bytes: the scrub finds those, and mends.
	m.stop()
	m.overwrite(files(0)...)
	r, err := scrub.Run(t.Context(), scrub.Options{Root: m.root})
	if err != nil || r.Unmended > 0 || r.Mended == 0 {
		t.Errorf("%+v, %v", r, err)
	}
	m.overwrite(files(1)...)
	if r, err = scrub.Run(t.Context(), scrub.Options{Root: m.root}); err != nil || r.Unmended > 0 || r.Mended == 0 {
		t.Errorf("%+v, %v", r, err)
	}
	if r, err = scrub.Run(t.Context(), scrub.Options{Root: m.root}); err != nil || len(r.Findings) > 0 {
		t.Errorf("after that: %+v, %v", r, err)
	}
	m.start()
	m.want(false)
	// Intact copies: the one in the root is damaged, and cut, and lost.
	m.write(`mode = "intact"`)
	m.now()
	m.want(true, true)
	path := m.path(0, m.made[0].Bytes)
	if err := os.Truncate(path, 1000); err != nil {
		t.Fatal(err)
	}
	m.served()
	m.stop()
	m.overwrite(path)
	if r, err = scrub.Run(t.Context(), scrub.Options{Root: m.root}); err != nil || r.Unmended > 0 {
		t.Errorf("%+v, %v", r, err)
	}
	m.start()
	m.want(true, true)
}

// While a store is away nothing is dropped, and nothing counts as lost; it is filled when it is back.
func TestStoreLostAndBack(t *testing.T) {
	m := newModed(t, 1, `mode = "1"`)
	m.now()
	m.want(true)
	lost := m.stores[1] + ".lost"
	if err := os.Rename(m.stores[1], lost); err != nil {
		t.Fatal(err)
	}
	m.stop()
	m.start()
	m.write(`mode = "full"`)
	s := m.now()
	m.want(true)
	if s.Stores[1].Away == "" || len(s.Kept) == 0 {
		t.Errorf("%+v", s)
	}
	another := makeImage(t, layertest.Layer{layertest.File("pushed while it was away", 0o644, noise(77, 5000))})
	another.pushTo(t, m.Addr(), "another")
	// Its disk is lost: an empty one takes its place.
	if err := os.MkdirAll(m.stores[1], 0o700); err != nil {
		t.Fatal(err)
	}
	if s := m.now(); s.Stores[1].Away == "" {
		t.Error("an empty directory is the store")
	}
	m.stop()
	if err := os.Remove(m.stores[1]); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(lost, m.stores[1]); err != nil {
		t.Fatal(err)
	}
	m.start()
	m.now()
	m.want(false)
	if !exists(m.path(1, another.blobs[0])) {
		t.Error("what came while it was away is not there")
	}
}

// What does not come out of packs as it should keeps its intact copy, whoever makes it wrong.
func TestWrongBytesDropNothing(t *testing.T) {
	m := newModed(t, 0, `mode = "intact"`)
	m.overwrite(m.objects("packs")...)
	m.write(`mode = "full"`)
	s := m.now()
	m.want(true)
	kept := map[string]int64{}
	for _, k := range s.Kept {
		kept[k.Why] = k.Blobs
	}
	if kept["damaged"] == 0 {
		t.Errorf("kept: %v", kept)
	}
}

// An encoder whose program is another one, or missing, is noticed by its golden vectors: nothing is dropped by it, no wrong byte is
// served, and nothing is lost: with the right one all is there.
func TestReplacedEncoder(t *testing.T) {
	if programs.Program(encoder.Zlib) == nil {
		t.Skip("built without programs: make build")
	}
	plain := layertest.Layer{layertest.File("a", 0o644, strings.Repeat("some words ", 30_000)+noise(4, 90_000))}.TarBytes(t)
	cmd := exec.Command("python3", "-c", "import gzip,sys; sys.stdout.buffer.write(gzip.compress(sys.stdin.buffer.read(), 9, mtime=0))")
	cmd.Stdin = bytes.NewReader(plain)
	blob, err := cmd.Output()
	if err != nil {
		t.Skipf("no python3 to compress by zlib with: %v", err)
	}
	h := &healing{t: t, root: t.TempDir(), image: imageOf(t, layertest.Blob{Bytes: blob, Digest: digest.FromBytes(blob),
		DiffID: digest.FromBytes(plain), MediaType: ocispec.MediaTypeImageLayerGzip})}
	t.Cleanup(http.DefaultClient.CloseIdleConnections)
	path := filepath.Join(h.root, "objects", "blobs", "sha256", digest.FromBytes(blob).Encoded()[:2], digest.FromBytes(blob).Encoded())
	run := func(mode string, program func(string) []byte) {
		t.Helper()
		h.Server = start(t, serve.Options{Root: h.root, Mode: mode, Programs: program, Convert: convert.Options{Interval: -1}, Log: slog.New(slog.NewTextHandler(&h.log, nil))})
	}
	stop := func() {
		t.Helper()
		http.DefaultClient.CloseIdleConnections()
		if err := h.Close(); err != nil {
			t.Fatal(err)
		}
	}
	now := func() {
		t.Helper()
		if _, err := admin.NewClient(h.root).Mode(t.Context(), true); err != nil {
			t.Fatal(err)
		}
	}
	run("intact", nil)
	h.image.push(t, h.Addr())
	h.until("the layer is proven", func() bool { return h.counts("foil_serve_proof_layers_total")["reencoded"] == 1 })
	stop()
	liars := map[string]func(string) []byte{
		"missing":    func(string) []byte { return nil },
		"another":    func(string) []byte { return programs.Program(encoder.KlauspostB) },
		"no program": func(string) []byte { return []byte("\x7fELF but not really") },
	}
	for name, liar := range liars {
		run("full", liar)
		if now(); !exists(path) {
			t.Fatalf("%s: the intact copy is gone", name)
		}
		stop()
	}
	run("full", nil)
	if now(); exists(path) {
		t.Fatal("the intact copy stays")
	}
	stop()
	for name, liar := range liars {
		run("full", liar)
		for range 3 {
			if status, got, err := h.get(blob, ""); err == nil && status == 200 {
				t.Errorf("%s: %d bytes came", name, len(got))
			}
		}
		stop()
	}
	run("full", nil)
	if status, got, err := h.get(blob, ""); err != nil || status != 200 || !bytes.Equal(got, blob) {
		t.Errorf("with the right program: %d, %d bytes, or others: %v", status, len(got), err)
	}
}

// TestModesUnderKills kills a server again and again while it converts both ways, and compares everything that it was told to keep.
func TestModesUnderKills(t *testing.T) {
	rounds := 12
	if testing.Short() {
		rounds = 3
	}
	seed := uint64(time.Now().UnixNano())
	rnd := rand.New(rand.NewPCG(seed, 1))
	t.Logf("seed %d", seed)
	top := t.TempDir()
	root, other := filepath.Join(top, "root"), filepath.Join(top, "other")
	t.Setenv(childStores, other)
	pushed := map[digest.Digest][]byte{}
	compared, made := 0, 0
	for round := range rounds {
		t.Setenv(childMode, []string{"full", "intact", "1", "full"}[round%4])
		base, cmd := child(t, root)
		addr := strings.TrimPrefix(base, "http://")
		for i := range 3 {
			n := uint64(round*3 + i)
			m := imageOf(t, goLayer(t, []int{1, 6}[n%2], layertest.Layer{
				layertest.File("shared", 0o644, noise(1, 100_000)),
				layertest.File(fmt.Sprint("own", n), 0o644, noise(100+n, 50_000)),
			}))
			m.pushTo(t, addr, fmt.Sprint("r", n%5))
			for _, b := range m.blobs {
				pushed[digest.FromBytes(b)] = b
			}
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(rnd.IntN(1500))*time.Millisecond)
		for d, want := range pushed {
			for n := range 5 {
				ok, err := compare(ctx, fmt.Sprintf("%s/v2/r%d/blobs/%s", base, n, d), want)
				if ctx.Err() != nil {
					break
				}
				if err != nil {
					t.Fatalf("round %d, seed %d: blob %s: %v", round, seed, d, err)
				}
				if ok {
					compared++
				}
			}
		}
		<-ctx.Done()
		cancel()
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = cmd.Wait()
	}
	// All that was acknowledged is there, in every mode.
	for _, mode := range []string{"full", "intact"} {
		t.Setenv(childMode, mode)
		base, cmd := child(t, root)
		for d, want := range pushed {
			found := false
			for n := range 5 {
				ok, err := compare(t.Context(), fmt.Sprintf("%s/v2/r%d/blobs/%s", base, n, d), want)
				if err != nil {
					t.Fatalf("%s at the end, seed %d: blob %s: %v", mode, seed, d, err)
				}
				found = found || ok
			}
			if !found {
				t.Errorf("%s at the end, seed %d: blob %s is lost", mode, seed, d)
			}
			compared++
			if d := d.Encoded(); !exists(filepath.Join(root, "objects", "blobs", "sha256", d[:2], d)) {
				made++
			}
		}
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = cmd.Wait()
	}
	t.Logf("seed %d: %d kills, %d blobs, %d compared, %d of them without an intact copy below the root", seed, rounds+2, len(pushed), compared, made)
}

// compare gets a blob; not ok: the repository has none.
func compare(ctx context.Context, url string, want []byte) (ok bool, err error) {
	req, err := http.NewRequestWithContext(ctx, "GET", url, nil)
	if err != nil {
		return false, err
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return false, err
	}
	defer res.Body.Close()
	got, err := io.ReadAll(res.Body)
	switch {
	case err != nil:
		return false, err
	case res.StatusCode == http.StatusNotFound:
		return false, nil
	case res.StatusCode != http.StatusOK:
		return false, fmt.Errorf("status %d: %s", res.StatusCode, got)
	case !bytes.Equal(got, want):
		return false, fmt.Errorf("%d other bytes, want %d", len(got), len(want))
	}
	return true, nil
}
