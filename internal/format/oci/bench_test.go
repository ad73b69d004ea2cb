package oci_test

import (
	"fmt"
	"testing"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/format/oci"
)

// What a pull reads of an image of 20 layers whose config says how each was made.
func BenchmarkRead(b *testing.B) {
	d := newDocument()
	c := ocispec.Image{Platform: oci.Own(), RootFS: ocispec.RootFS{Type: "layers"}}
	d.manifest.Layers = nil
	for i := range 20 {
		c.RootFS.DiffIDs = append(c.RootFS.DiffIDs, digest.FromString(fmt.Sprint(i)))
		c.History = append(c.History, ocispec.History{CreatedBy: fmt.Sprintf("RUN /bin/sh -c apt-get install program-%d # and so on, and so on", i)})
		d.manifest.Layers = append(d.manifest.Layers, descriptor(ocispec.MediaTypeImageLayerGzip, fmt.Sprint(i)))
	}
	d.setConfig(string(mustJSON(c)))
	manifest, config := mustJSON(d.manifest), []byte(d.config)
	b.SetBytes(int64(len(manifest) + len(config)))
	b.ReportAllocs()
	for b.Loop() {
		m, err := oci.ReadManifest(image, manifest)
		if err == nil {
			_, err = oci.ReadConfig(m, m.Config.MediaType, config)
		}
		if err != nil {
			b.Fatal(err)
		}
	}
}
