package layertest_test

import (
	"archive/tar"
	"bytes"
	"io"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/layer/layertest"
)

func TestBlobsHoldWhatTheListSays(t *testing.T) {
	l := layertest.Layer{
		layertest.Dir("a", 0o755),
		layertest.File("a/f", 0o4755, "data").Owner(1, 2).Xattr("user.k", "v"),
		layertest.Link("a/l", "a/f"),
		layertest.Symlink("a/s", "f"),
		layertest.Char("a/c", 0o600, 1, 3),
		layertest.Whiteout("a/gone"),
		layertest.Opaque("b"),
	}
	for name, blob := range map[string]layertest.Blob{
		"tar": l.Tar(t), "gzip": l.Gzip(t), "zstd": l.Zstd(t),
		"gzip members": layertest.GzipBlob(t, l.TarBytes(t), 512, 700),
		"zstd frames":  layertest.ZstdBlob(t, l.TarBytes(t), 512, 700),
	} {
		t.Run(name, func(t *testing.T) {
			if blob.Digest != digest.FromBytes(blob.Bytes) {
				t.Error("wrong digest")
			}
			var r io.Reader = bytes.NewReader(blob.Bytes)
			var err error
			switch name[:2] {
			case "gz":
				r, err = gzip.NewReader(r)
			case "zs":
				r, err = zstd.NewReader(r)
			}
			if err != nil {
				t.Fatal(err)
			}
			stream, err := io.ReadAll(r)
			if err != nil {
				t.Fatal(err)
			}
			if blob.DiffID != digest.FromBytes(stream) {
				t.Error("wrong diff ID")
			}
			var names []string
			tr := tar.NewReader(bytes.NewReader(stream))
			for {
				h, err := tr.Next()
				if err == io.EOF {
					break
				}
				if err != nil {
					t.Fatal(err)
				}
				names = append(names, h.Name)
			}
			want := []string{"a/", "a/f", "a/l", "a/s", "a/c", "a/.wh.gone", "b/.wh..wh..opq"}
			if d := cmp.Diff(want, names); d != "" {
				t.Error(d)
			}
		})
	}
}
