package e2e

import (
	"archive/tar"
	"bytes"
	"io"
	"path/filepath"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/format/layer/layertest"
	"hydrofoil.dev/foil/internal/worker/api"
)

// zstdBomb is a layer with a file of so many zeros.
func zstdBomb(t *testing.T, name string, size int64) layertest.Blob {
	t.Helper()
	var blob bytes.Buffer
	z, err := zstd.NewWriter(&blob, zstd.WithEncoderLevel(zstd.SpeedFastest))
	if err != nil {
		t.Fatal(err)
	}
	diff := digest.Canonical.Digester()
	w := tar.NewWriter(io.MultiWriter(z, diff.Hash()))
	if err := w.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: size, Typeflag: tar.TypeReg}); err != nil {
		t.Fatal(err)
	}
	if _, err := io.CopyN(w, zeros{}, size); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return layertest.Blob{Bytes: blob.Bytes(), Digest: digest.FromBytes(blob.Bytes()), DiffID: diff.Digest(), MediaType: ocispec.MediaTypeImageLayerZstd}
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) { clear(b); return len(b), nil }

// header is a tar header, and nothing of what it promises.
func header(t *testing.T, name string, size int64) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := tar.NewWriter(&b).WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: size, Typeflag: tar.TypeReg, Format: tar.FormatGNU}); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func TestHostileLayers(t *testing.T) {
	t.Parallel()
	s := startServer(t, t.TempDir())
	w := startWorker(t, workerRoot(t), "--give-up", "5s")
	good := layertest.Layer{layertest.Dir("etc", 0o755), layertest.File("etc/good", 0o644, strings.Repeat("good", 1000))}
	tarball := good.TarBytes(t)
	altered := func(b layertest.Blob, change func([]byte) []byte) layertest.Blob {
		b.Bytes = change(bytes.Clone(b.Bytes))
		b.Digest = digest.FromBytes(b.Bytes)
		return b
	}
	wrongDiff := good.Gzip(t)
	wrongDiff.DiffID = digest.FromString("something else")
	for name, c := range map[string]struct {
		layer layertest.Blob
		entry string // that the error names
	}{
		"above the root":       {append(good, layertest.File("../evil", 0o644, "x")).Gzip(t), "../evil"},
		"above the root, deep": {append(good, layertest.File("etc/../../evil", 0o644, "x")).Tar(t), "evil"},
		"link out of the tree": {append(good, layertest.Link("evil", "../../etc/passwd")).Zstd(t), "evil"},
		"8 EiB":                {layertest.TarBlob(append(bytes.Clone(tarball[:len(tarball)-1024]), header(t, "huge", 1<<63-1)...)), "huge"},
		"bomb":                 {zstdBomb(t, "boom", 5<<29), "boom"},
		"truncated gzip":       {altered(good.Gzip(t), func(b []byte) []byte { return b[:len(b)/2] }), ""},
		"truncated tar":        {layertest.TarBlob(tarball[:2000]), "etc/good"},
		"trailing garbage":     {altered(good.Gzip(t), func(b []byte) []byte { return append(b, "garbage after the end"...) }), ""},
		"wrong diff ID":        {wrongDiff, ""},
		"no tar":               {layertest.TarBlob(bytes.Repeat([]byte("no tar "), 1000)), ""},
	} {
		// A registry takes any bytes; what they are is found out at the latest
		// when somebody wants to run them.
		img := newImage(t, ocispec.ImageConfig{Cmd: []string{"/bin/true"}}, c.layer)
		if err := s.tryPush("hostile", "1", img); err != nil {
			t.Logf("%s: the push is refused: %v", name, err)
			if !strings.Contains(err.Error(), c.entry) {
				t.Errorf("%s: the error does not name the entry: %v", name, err)
			}
			continue
		}
		_, err := w.pull(s.addr+"/hostile:1", api.Complete)
		if err == nil {
			t.Errorf("%s: pulled", name)
			continue
		}
		t.Logf("%s: %v", name, err)
		if !strings.Contains(err.Error(), c.layer.Digest.String()) || !strings.Contains(err.Error(), c.entry) {
			t.Errorf("%s: the error does not name layer and entry: %v", name, err)
		}
		for _, pattern := range []string{"images/*.json", "rootfs/*"} {
			if left, err := filepath.Glob(filepath.Join(w.root, pattern)); err != nil || len(left) > 0 {
				t.Errorf("%s: left behind on the worker: %v", name, left)
			}
		}
	}
	// Nothing came of them on the server beyond the blobs that were pushed.
	for _, kind := range []string{"tocs", "lists", "packs", "toc", "list", "pack"} {
		if left, _ := filepath.Glob(filepath.Join(s.root, "objects", kind, "*", "*")); len(left) > 0 {
			t.Logf("in the store: %s: %d objects", kind, len(left))
		}
	}
	// And they harm nobody.
	img := newImage(t, ocispec.ImageConfig{}, good.Gzip(t))
	intact(t, w, s.push("good", "1", img), img)
}
