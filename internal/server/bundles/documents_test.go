package bundles_test

import (
	"bytes"
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/planner/plannertest"
)

// What is told of images that plain clients may be able to pull, and workers not.
func TestDocuments(t *testing.T) {
	var asked []string
	elsewhere := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { asked = append(asked, r.URL.Path) }))
	defer elsewhere.Close()
	amd64 := &ocispec.Platform{OS: "linux", Architecture: "amd64"}
	for _, c := range []struct {
		name       string
		spoil      func(m *ocispec.Manifest)
		text       func(b []byte) []byte // changes the manifest's bytes
		code, want string                // none: it is served
	}{
		{name: "right"},
		{"foreign layer that is not here", func(m *ocispec.Manifest) {
			m.Layers[0].MediaType, m.Layers[0].Digest = "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip", digest.FromString("elsewhere")
			m.Layers[0].URLs = []string{elsewhere.URL + "/layer"}
		}, nil, bundle.CodeUnsupported, "foreign"},
		{"urls of a layer that is not here", func(m *ocispec.Manifest) {
			m.Layers[0].Digest, m.Layers[0].URLs = digest.FromString("elsewhere"), []string{elsewhere.URL + "/layer"}
		}, nil, bundle.CodeUnsupported, "foreign"},
		{"foreign layer that is here", func(m *ocispec.Manifest) {
			m.Layers[0].MediaType = "application/vnd.oci.image.layer.nondistributable.v1.tar+gzip"
			m.Layers[0].URLs = []string{elsewhere.URL + "/layer"}
		}, nil, "", ""},
		{"layer that is not here", func(m *ocispec.Manifest) { m.Layers[0].Digest = digest.FromString("lost") }, nil, bundle.CodeNotFound, "push the image again"},
		{"layer of another size", func(m *ocispec.Manifest) { m.Layers[0].Size++ }, nil, bundle.CodeUnsupported, "the manifest says 8"},
		{"config of another size", func(m *ocispec.Manifest) { m.Config.Size-- }, nil, bundle.CodeUnsupported, "the manifest says"},
		{"layer of unknown type", func(m *ocispec.Manifest) { m.Layers[0].MediaType = "application/vnd.example" }, nil, bundle.CodeUnsupported, "unknown type"},
		{"diffIDs", func(m *ocispec.Manifest) { m.Layers = append(m.Layers, m.Layers[0]) }, nil, bundle.CodeUnsupported, "names 1 layers"},
		{"layers twice", nil, func(b []byte) []byte {
			return bytes.Replace(b, []byte(`"layers"`), []byte(`"layers":[],"layers"`), 1)
		}, bundle.CodeUnsupported, "twice"},
		{"index and manifest at once", nil, func(b []byte) []byte {
			return bytes.Replace(b, []byte(`"layers"`), []byte(`"manifests":[],"layers"`), 1)
		}, bundle.CodeUnsupported, "at once"},
	} {
		t.Run(c.name, func(t *testing.T) {
			ctx := context.Background()
			s := start(t, nil)
			d, _ := s.image(t, "r", "1", plannertest.Files{"/a": "a"}, ocispec.ImageConfig{})
			whole, err := s.Catalog.Manifest(ctx, "r", d.Digest)
			if err != nil {
				t.Fatal(err)
			}
			var m ocispec.Manifest
			if err := json.Unmarshal(whole.Bytes, &m); err != nil {
				t.Fatal(err)
			}
			if c.spoil != nil {
				c.spoil(&m)
			}
			b := mustJSON(m)
			if c.text != nil {
				b = c.text(b)
			}
			put := catalog.Manifest{Digest: digest.FromBytes(b), MediaType: m.MediaType, Bytes: b}
			if err := s.Catalog.PutManifest(ctx, "r", put, "1"); err != nil {
				t.Fatal(err)
			}
			s.manifest(t, "r", "list", ocispec.MediaTypeImageIndex, ocispec.Index{Manifests: []ocispec.Descriptor{
				{MediaType: m.MediaType, Digest: put.Digest, Size: int64(len(b)), Platform: amd64}}})
			for _, reference := range []string{"1", "list"} {
				req := request("r", reference)
				req.Image.Platform = amd64
				if c.code == "" {
					if p := s.pull(t, req, nil); p.err != nil {
						t.Errorf("%s: %v", reference, p.err)
					}
					continue
				}
				req.Versions = []int{1}
				var e bundle.Error
				resp := s.post(t, ctx, bundle.PullPath, req)
				if err := json.NewDecoder(resp.Body).Decode(&e); err != nil || e.Code != c.code || !strings.Contains(e.Message, c.want) {
					t.Errorf("%s: %s, %+v, %v; want %s with %q", reference, resp.Status, e, err, c.code, c.want)
				}
			}
		})
	}
	if len(asked) > 0 {
		t.Errorf("urls were followed: %q", asked)
	}
}

// An index whose entry says something else than the manifest is refused.
func TestIndexEntries(t *testing.T) {
	s := start(t, nil)
	d, _ := s.image(t, "r", "1", plannertest.Files{"/a": "a"}, ocispec.ImageConfig{})
	for _, c := range []struct {
		name       string
		spoil      func(d *ocispec.Descriptor)
		code, want string
	}{
		{"size", func(d *ocispec.Descriptor) { d.Size++ }, bundle.CodeUnsupported, "bytes"},
		{"media type", func(d *ocispec.Descriptor) { d.MediaType = "application/vnd.docker.distribution.manifest.v2+json" }, bundle.CodeUnsupported, "its descriptor says"},
		{"index of an index", func(d *ocispec.Descriptor) { d.MediaType = ocispec.MediaTypeImageIndex }, bundle.CodeUnsupported, "no image's manifest"},
		{"platform of its config", func(d *ocispec.Descriptor) { d.Platform = nil }, bundle.CodeNotFound, "which is of linux/amd64"},
	} {
		t.Run(c.name, func(t *testing.T) {
			arm64 := &ocispec.Platform{OS: "linux", Architecture: "arm64"}
			entry := d
			entry.Platform = arm64
			c.spoil(&entry)
			s.manifest(t, "r", "list", ocispec.MediaTypeImageIndex, ocispec.Index{Manifests: []ocispec.Descriptor{entry}})
			req := request("r", "list")
			req.Versions, req.Image.Platform = []int{1}, arm64
			var e bundle.Error
			resp := s.post(t, t.Context(), bundle.PullPath, req)
			if err := json.NewDecoder(resp.Body).Decode(&e); err != nil || e.Code != c.code || !strings.Contains(e.Message, c.want) {
				t.Errorf("%s, %+v, %v; want %s with %q", resp.Status, e, err, c.code, c.want)
			}
		})
	}
}
