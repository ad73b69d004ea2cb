package serve_test

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/format/layer/layertest"
	"hydrofoil.dev/foil/internal/server/serve"
)

// newProven is a server with one image, of one layer whose blob can be made again.
func newProven(t *testing.T) (h *healing, blob []byte, path string) {
	t.Helper()
	if v := runtime.Version(); !strings.HasPrefix(v, "go1.26") {
		t.Skipf("compress/flate of %s may make other streams than that of Go 1.26", v)
	}
	plain := layertest.Layer{layertest.File("large", 0o644, noise(1, 1<<20)), layertest.File("text", 0o644, strings.Repeat("text ", 99_999))}.TarBytes(t)
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	_, err := w.Write(plain)
	if err == nil {
		err = w.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
	h = &healing{t: t, root: t.TempDir(), image: imageOf(t, layertest.Blob{Bytes: b.Bytes(), Digest: digest.FromBytes(b.Bytes()),
		DiffID: digest.FromBytes(plain), MediaType: ocispec.MediaTypeImageLayerGzip})}
	h.Server = start(t, serve.Options{Root: h.root, Log: slog.New(slog.NewTextHandler(&h.log, nil))})
	t.Cleanup(http.DefaultClient.CloseIdleConnections)
	h.image.push(t, h.Addr())
	if err := h.image.pull(h.Addr()); err != nil {
		t.Fatal(err)
	}
	h.until("the layer is proven", func() bool { return h.counts("foil_serve_proof_layers_total")["reencoded"] == 1 })
	d := digest.FromBytes(b.Bytes())
	return h, b.Bytes(), filepath.Join(h.root, "objects", "blobs", "sha256", d.Encoded()[:2], d.Encoded())
}

// until asks again and again, for as long as the test may take.
func (h *healing) until(what string, is func() bool) {
	h.t.Helper()
	for tick := time.NewTicker(20 * time.Millisecond); !is(); <-tick.C {
		if d, ok := h.t.Deadline(); ok && time.Until(d) < 10*time.Second {
			h.t.Fatalf("not yet: %s. Log:\n%s", what, h.log.String())
		}
	}
}

// get asks for a blob, or a range of it.
func (h *healing) get(blob []byte, ranged string) (int, []byte, error) {
	req, err := http.NewRequest("GET", fmt.Sprintf("http://%s/v2/r/blobs/%s", h.Addr(), digest.FromBytes(blob)), nil)
	if err != nil {
		return 0, nil, err
	}
	if ranged != "" {
		req.Header.Set("Range", ranged)
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, nil, err
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	return res.StatusCode, b, err
}

// A blob that is lost is served as if it was not, in ranges as well, and is there again after a while.
func TestLostBlobIsRestored(t *testing.T) {
	h, blob, path := newProven(t)
	// Whoever reads it has it made an object.
	again := func() bool {
		if exists(path) {
			return true
		}
		if _, got, err := h.get(blob, ""); err != nil || !bytes.Equal(got, blob) {
			t.Fatalf("%d bytes, or others: %v", len(got), err)
		}
		return false
	}
	for ranged, want := range map[string][]byte{"": blob, "bytes=0-0": blob[:1], "bytes=500000-": blob[500_000:], "bytes=-7": blob[len(blob)-7:]} {
		h.until("the object is there", again)
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		if _, got, err := h.get(blob, ranged); err != nil || !bytes.Equal(got, want) {
			t.Errorf("range %q: %d bytes, or others, want %d: %v", ranged, len(got), len(want), err)
		}
	}
	h.until("the object is there", again)
	if got, err := os.ReadFile(path); err != nil || !bytes.Equal(got, blob) {
		t.Errorf("%d bytes, or others, were made an object: %v", len(got), err)
	}
	if len(h.logged("was made again from packs")) == 0 {
		t.Error("nobody is told")
	}
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// One that is cut is made again before it is served. One that cannot be, since packs are damaged as well, is not served.
func TestCutBlobIsRestored(t *testing.T) {
	h, blob, path := newProven(t)
	if err := os.Truncate(path, 1000); err != nil {
		t.Fatal(err)
	}
	if status, got, err := h.get(blob, ""); err != nil || status != 200 || !bytes.Equal(got, blob) {
		t.Errorf("status %d, %d bytes, or others, want %d: %v", status, len(got), len(blob), err)
	}
	h.overwrite(h.objects("packs")...)
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if status, got, err := h.get(blob, ""); status == 200 && err == nil && len(got) >= len(blob) {
		t.Errorf("status %d, %d bytes of damaged packs", status, len(got))
	}
}
