package bundle_test

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/oci"
)

// What a server sends is the image that was asked for, as containerd would have chosen it, or
// nothing.
func TestDocuments(t *testing.T) {
	lied := bundle.ErrCorrupt
	both := func(f *fixture) (manifest []byte) {
		return bytes.Replace(f.image.Manifest.Bytes, []byte(`"layers"`), []byte(`"manifests":[],"layers"`), 1)
	}
	manifest := func(f *fixture, b []byte) {
		f.image.Manifest.Bytes, f.image.Manifest.Digest = b, digest.FromBytes(b)
		f.image.Chosen, f.req.Image.Reference = nil, digest.FromBytes(b).String()
	}
	index := func(f *fixture, entries ...ocispec.Descriptor) {
		b := mustJSON(ocispec.Index{Manifests: entries})
		f.image.Chosen.Bytes, f.image.Chosen.Digest = b, digest.FromBytes(b)
		f.req.Image.Reference = digest.FromBytes(b).String()
	}
	riscv := ocispec.Platform{OS: "linux", Architecture: "riscv64"}
	for _, c := range []struct {
		name  string
		spoil func(f *fixture)
		is    error
		want  string
	}{
		{"an entry that the server prefers", func(f *fixture) {
			other, _ := newImage("of another platform") // the index has it
			other.Chosen = f.image.Chosen
			f.image = other
		}, lied, "for linux/arm64/v8"},
		{"a better entry than the server's", func(f *fixture) {
			other, _ := newImage("32 bits")
			index(f, entry(other, ocispec.Platform{OS: "linux", Architecture: "arm", Variant: "v7"}), entry(f.image, forPlatform))
			other.Chosen = f.image.Chosen
			f.image = other
		}, lied, "for linux/arm64/v8"},
		{"an image that the index does not list", func(f *fixture) {
			other, _ := newImage("other")
			other.Chosen = f.image.Chosen
			f.image = other
		}, lied, "has chosen"},
		{"an index instead of its manifest", func(f *fixture) { f.req.Image.Reference = f.image.Manifest.Digest.String() }, lied, "asked for"},
		{"a manifest instead of its index", func(f *fixture) { f.image.Chosen = nil }, lied, "asked for"},
		{"an index without the platform", func(f *fixture) { index(f, entry(f.image, riscv)) }, oci.ErrNoPlatform, "nothing for linux/arm64"},
		{"an index that says nothing, of an image for another", func(f *fixture) {
			d := entry(f.image, riscv)
			d.Platform = nil
			index(f, d)
			f.req.Image.Platform = &riscv
		}, oci.ErrNoPlatform, "which is of linux/arm64"},
		{"an entry of another size", func(f *fixture) {
			d := entry(f.image, forPlatform)
			d.Size++
			index(f, d)
		}, oci.ErrRefused, "its descriptor says"},
		{"an entry of another type", func(f *fixture) {
			d := entry(f.image, forPlatform)
			d.MediaType = "application/vnd.docker.distribution.manifest.v2+json"
			index(f, d)
		}, oci.ErrRefused, "its descriptor says"},
		{"a manifest as index", func(f *fixture) { f.image.Chosen.MediaType = ocispec.MediaTypeImageManifest }, oci.ErrRefused, "media type"},
		{"an index as manifest", func(f *fixture) { f.image.Manifest.MediaType = ocispec.MediaTypeImageIndex }, oci.ErrRefused, "media type"},
		{"index and manifest at once", func(f *fixture) { manifest(f, both(f)) }, oci.ErrRefused, "at once"},
		{"a size of a config", func(f *fixture) {
			manifest(f, bytes.Replace(f.image.Manifest.Bytes, fmt.Appendf(nil, `"size":%d`, len(f.image.Config.Bytes)), []byte(`"size":7`), 1))
		}, oci.ErrRefused, "its descriptor says 7"},
		{"a layer more than diffIDs", func(f *fixture) {
			manifest(f, bytes.Replace(f.image.Manifest.Bytes, []byte(`"layers":[`),
				append([]byte(`"layers":[`), append(mustJSON(ocispec.Descriptor{MediaType: ocispec.MediaTypeImageLayer, Digest: digest.FromString("x")}), ',')...), 1))
		}, oci.ErrRefused, "names 1 layers, the manifest 2"},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := newFixture()
			c.spoil(f)
			got, _, err := readAll(bytes.NewReader(f.bytes()), f.req)
			if !errors.Is(err, c.is) || !strings.Contains(err.Error(), c.want) || len(got) != 1 {
				t.Errorf("%d sections, %v; want %v with %q", len(got), err, c.is, c.want)
			}
			if errors.Is(err, bundle.ErrCorrupt) != errors.Is(c.is, lied) {
				t.Errorf("%v: whose fault is it?", err)
			}
		})
	}
}
