package ingest_test

import (
	"context"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/dedup"
	"hydrofoil.dev/foil/internal/server/ingest"
	"hydrofoil.dev/foil/internal/server/restore"
)

// layoutEnv names OCI image layouts, separated by colons: what BenchmarkRecipeShare
// and BenchmarkReplay read.
const layoutEnv = "FOIL_BENCH_LAYOUT"

// layoutLayers stores the layer blobs of this platform's image of a layout.
func layoutLayers(b *testing.B, dir string, s *server) (layers []ingest.Descriptor) {
	b.Helper()
	read := func(d digest.Digest) []byte {
		bytes, err := os.ReadFile(filepath.Join(dir, "blobs", string(d.Algorithm()), d.Encoded()))
		if err != nil {
			b.Fatal(err)
		}
		return bytes
	}
	top, err := os.ReadFile(filepath.Join(dir, "index.json"))
	if err != nil {
		b.Fatal(err)
	}
	for {
		var m struct {
			Manifests []ocispec.Descriptor
			Layers    []ocispec.Descriptor
		}
		if err := json.Unmarshal(top, &m); err != nil {
			b.Fatal(err)
		}
		if len(m.Layers) > 0 {
			for _, l := range m.Layers {
				put(b, s.memory, catalog.BlobKey(l.Digest), read(l.Digest))
				layers = append(layers, ingest.Descriptor{Digest: l.Digest, Size: l.Size})
			}
			return layers
		}
		if len(m.Manifests) == 0 {
			b.Fatalf("%s has no image", dir)
		}
		next := m.Manifests[0]
		for _, d := range m.Manifests {
			if p := d.Platform; p != nil && p.OS == "linux" && p.Architecture == runtime.GOARCH {
				next = d
				break
			}
		}
		top = read(next.Digest)
	}
}

// eachLayout runs f for each image of FOIL_BENCH_LAYOUT.
func eachLayout(b *testing.B, f func(b *testing.B, dir string)) {
	dirs := os.Getenv(layoutEnv)
	if dirs == "" {
		b.Skipf("%s names no image layouts", layoutEnv)
	}
	for dir := range strings.SplitSeq(dirs, ":") {
		b.Run(filepath.Base(dir), func(b *testing.B) { f(b, dir) })
	}
}

// BenchmarkRecipeShare says what the recipes of an image's layers take, in 1/1000 of the
// compressed layers.
func BenchmarkRecipeShare(b *testing.B) {
	eachLayout(b, func(b *testing.B, dir string) {
		for b.Loop() {
			s := newServer(b)
			var recipes, blobs, contents int64
			for _, d := range layoutLayers(b, dir, s) {
				row, err := s.Layer(context.Background(), d)
				if err != nil {
					b.Fatal(err)
				}
				recipes, blobs, contents = recipes+row.Recipe.Size, blobs+d.Size, contents+row.Files
				b.Logf("layer of %d bytes, %d files: recipe of %d bytes, %.2f/1000", d.Size, row.Files, row.Recipe.Size, 1000*float64(row.Recipe.Size)/float64(d.Size))
			}
			b.ReportMetric(float64(recipes), "recipe-B")
			b.ReportMetric(float64(blobs), "blob-B")
			b.ReportMetric(1000*float64(recipes)/float64(blobs), "recipe-B/blob-kB")
			b.ReportMetric(float64(recipes)/float64(contents), "recipe-B/file")
		}
	})
}

// BenchmarkReplay makes the tar streams of an image again, and hashes them: what it would take to
// prove a recipe at ingest. BenchmarkIngest's bytes a second are of the same kind.
func BenchmarkReplay(b *testing.B) {
	eachLayout(b, func(b *testing.B, dir string) {
		s := newServer(b)
		var rows []catalog.Layer
		total := int64(0)
		for _, d := range layoutLayers(b, dir, s) {
			row, err := s.Layer(context.Background(), d)
			if err != nil {
				b.Fatal(err)
			}
			rows, total = append(rows, row), total+row.Size
		}
		b.SetBytes(total)
		for b.Loop() {
			for _, row := range rows {
				r, err := restore.OpenTar(context.Background(), &dedup.Store{Objects: s.Objects, Catalog: s.Catalog}, row)
				if err != nil {
					b.Fatal(err)
				}
				hash := digest.SHA256.Digester()
				_, err = io.Copy(hash.Hash(), r)
				r.Close()
				if err != nil || hash.Digest() != row.DiffID {
					b.Fatalf("layer %s: %s, want %s: %v", row.Blob, hash.Digest(), row.DiffID, err)
				}
			}
		}
	})
}
