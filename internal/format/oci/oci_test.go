package oci_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/format/oci"
)

const (
	image      = ocispec.MediaTypeImageManifest
	index      = ocispec.MediaTypeImageIndex
	dockerList = "application/vnd.docker.distribution.manifest.list.v2+json"
)

func mustJSON(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return b
}

// descriptor is of bytes.
func descriptor(mediaType, b string) ocispec.Descriptor {
	return ocispec.Descriptor{MediaType: mediaType, Digest: digest.FromString(b), Size: int64(len(b))}
}

// wanted compares an error with a part of its text; "" is none.
func wanted(t *testing.T, err error, want string) {
	t.Helper()
	switch {
	case want == "" && err != nil:
		t.Errorf("refused: %v", err)
	case want != "" && (!errors.Is(err, oci.ErrRefused) || !strings.Contains(err.Error(), want)):
		t.Errorf("got %v, want an ErrRefused with %q", err, want)
	}
}

func TestCheck(t *testing.T) {
	for _, test := range []struct{ what, mediaType, body, want string }{
		{"manifest", image, `{"schemaVersion":2,"config":{},"layers":[]}`, ""},
		{"index", index, `{"manifests":[]}`, ""},
		{"list", dockerList, `{"mediaType":"` + dockerList + `","manifests":[]}`, ""},
		{"unknown fields", image, `{"config":{},"custom":{"x":[1,{"X":2,"x":3}]}}`, ""},
		{"annotations that differ in case", image, `{"config":{},"annotations":{"Name":"a","name":"b"}}`, ""},

		{"index and manifest", image, `{"config":{},"layers":[],"manifests":[]}`, "at once"},
		{"manifest and index", index, `{"manifests":[],"config":{}}`, "at once"},
		{"index with layers", index, `{"manifests":[],"layers":null}`, "at once"},
		{"fields in another case", index, `{"manifests":[],"Layers":[]}`, "at once"},
		{"index as a manifest", image, `{"manifests":[]}`, "list of manifests"},
		{"manifest as an index", index, `{"config":{}}`, "config or layers"},
		{"what calls itself another type", image, `{"mediaType":"` + index + `","config":{}}`, "calls itself"},
		{"schema 1", image, `{"fsLayers":[]}`, "schema 1"},
		{"a key twice", image, `{"config":{},"layers":[],"layers":[]}`, `"layers" twice`},
		{"a key in two cases", image, `{"config":{},"layers":[],"LAYERS":[]}`, `"LAYERS" twice`},
		{"a key by a letter that folds", image, `{"config":{},"layers":[],"layerſ":[]}`, "twice"},
		{"a key by an escape", image, `{"config":{},"layers":[],"l\u0061yers":[]}`, "twice"},
		{"a descriptor's digest twice", image, `{"config":{},"layers":[{"digest":"a","digest":"b"}]}`, `"digest" twice`},
		{"a platform in two cases", index, `{"manifests":[{"platform":{"os":"a","OS":"b"}}]}`, `"OS" twice`},
		{"an annotation twice", image, `{"config":{},"annotations":{"a":"","a":""}}`, `"a" twice`},
		{"two documents", image, `{"config":{}}{"config":{}}`, "JSON"},
		{"half a document", image, `{"config":{}`, "no JSON"},
		{"no object", image, `[]`, "JSON"},
		{"nothing", image, ``, "JSON"},
		{"deep", image, `{"x":` + strings.Repeat("[", 1000) + strings.Repeat("]", 1000) + `}`, "nested"},
	} {
		t.Run(test.what, func(t *testing.T) { wanted(t, oci.Check(test.mediaType, []byte(test.body)), test.want) })
	}
}

// document is a manifest and a config that fit, for tests to spoil.
type document struct {
	mediaType string
	manifest  ocispec.Manifest
	config    string
	as        string // the config's media type
}

func newDocument() *document {
	diffIDs := []digest.Digest{digest.FromString("low"), digest.FromString("high")}
	d := &document{mediaType: image, as: ocispec.MediaTypeImageConfig}
	d.config = string(mustJSON(ocispec.Image{Platform: oci.Own(), RootFS: ocispec.RootFS{Type: "layers", DiffIDs: diffIDs}}))
	d.manifest = ocispec.Manifest{
		Config: descriptor(ocispec.MediaTypeImageConfig, d.config),
		Layers: []ocispec.Descriptor{descriptor(ocispec.MediaTypeImageLayerGzip, "low"), descriptor("application/vnd.docker.image.rootfs.diff.tar.gzip", "high")},
	}
	return d
}

func (d *document) setConfig(config string) {
	d.config = config
	d.manifest.Config = descriptor(ocispec.MediaTypeImageConfig, config)
}

func (d *document) read() error {
	m, err := oci.ReadManifest(d.mediaType, mustJSON(d.manifest))
	if err == nil {
		_, err = oci.ReadConfig(m, d.as, []byte(d.config))
	}
	return err
}

func TestRead(t *testing.T) {
	for _, test := range []struct {
		what  string
		spoil func(*document)
		want  string
	}{
		{"right", func(d *document) {}, ""},
		{"foreign layers", func(d *document) {
			d.manifest.Layers[0].MediaType = "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip"
			d.manifest.Layers[1].MediaType = "application/vnd.oci.image.layer.nondistributable.v1.tar+zstd"
		}, ""},
		{"labels that differ in case", func(d *document) {
			d.setConfig(strings.Replace(d.config, `"config":{`, `"config":{"Labels":{"Name":"a","name":"b"}`, 1))
		}, ""},

		{"another type of document", func(d *document) { d.mediaType = index }, "media type"},
		{"artifact", func(d *document) { d.manifest.Config.MediaType = "application/vnd.oci.empty.v1+json" }, "artifact"},
		{"config of no type", func(d *document) { d.manifest.Config.MediaType = "" }, "artifact"},
		{"config of another type", func(d *document) { d.as = "application/vnd.docker.container.image.v1+json" }, "came as"},
		{"config that is larger", func(d *document) { d.manifest.Config.Size-- }, "bytes"},
		{"config that is smaller", func(d *document) { d.manifest.Config.Size++ }, "bytes"},
		{"config of negative size", func(d *document) { d.manifest.Config.Size = -1 }, "-1 bytes"},
		{"huge config", func(d *document) { d.manifest.Config.Size = oci.MaxDocument + 1 }, "bytes"},
		{"other config", func(d *document) { d.config += " " }, "digest"},
		{"config of no digest", func(d *document) { d.manifest.Config.Digest = "../x" }, "digest"},
		{"unknown layer", func(d *document) { d.manifest.Layers[1].MediaType = "application/vnd.example.layer" }, "unknown type"},
		{"encrypted layer", func(d *document) { d.manifest.Layers[1].MediaType += "+encrypted" }, "unknown type"},
		{"layer of no type", func(d *document) { d.manifest.Layers[0].MediaType = "" }, "unknown type"},
		{"layer of negative size", func(d *document) { d.manifest.Layers[0].Size = -1 }, "-1 bytes"},
		{"huge layer", func(d *document) { d.manifest.Layers[0].Size = 1 << 62 }, "bytes"},
		{"layer of no digest", func(d *document) { d.manifest.Layers[0].Digest = "sha256:1" }, "digest"},
		{"no layers", func(d *document) { d.manifest.Layers = nil }, "layers"},
		{"many layers", func(d *document) {
			d.manifest.Layers = append(d.manifest.Layers, make([]ocispec.Descriptor, oci.MaxLayers)...)
		}, "layers"},
		{"a diffID less", func(d *document) { d.manifest.Layers = append(d.manifest.Layers, d.manifest.Layers[0]) }, "names 2 layers, the manifest 3"},
		{"a diffID more", func(d *document) { d.manifest.Layers = d.manifest.Layers[:1] }, "names 2 layers, the manifest 1"},
		{"a diffID that is none", func(d *document) { d.setConfig(strings.Replace(d.config, digest.FromString("low").String(), "low", 1)) }, "diffID 0"},
		{"rootfs of another type", func(d *document) { d.setConfig(strings.Replace(d.config, `"layers"`, `"base"`, 1)) }, "base"},
		{"diffIDs twice", func(d *document) {
			d.setConfig(strings.Replace(d.config, `"diff_ids"`, `"diff_ids":[],"diff_ids"`, 1))
		}, "twice"},
		{"a command twice", func(d *document) {
			d.setConfig(strings.Replace(d.config, `"config":{`, `"config":{"Cmd":["a"],"cmd":["b"]`, 1))
		}, "twice"},
		{"config that is no JSON", func(d *document) { d.setConfig("x") }, "no JSON"},
	} {
		t.Run(test.what, func(t *testing.T) {
			d := newDocument()
			test.spoil(d)
			wanted(t, d.read(), test.want)
		})
	}
	// Numbers that no int64 holds.
	b := strings.Replace(string(mustJSON(newDocument().manifest)), `"size":3`, `"size":9223372036854775808`, 1)
	_, err := oci.ReadManifest(image, []byte(b))
	wanted(t, err, "JSON")
}

func TestForeign(t *testing.T) {
	for mediaType, want := range map[string]bool{
		ocispec.MediaTypeImageLayerGzip:                                      false,
		"application/vnd.oci.image.layer.nondistributable.v1.tar+gzip":       true,
		"application/vnd.docker.image.rootfs.foreign.diff.tar.gzip":          true,
		"application/vnd.docker.image.rootfs.diff.tar.gzip":                  false,
		"application/vnd.oci.image.layer.nondistributable.v1.tar+gzip+other": true,
	} {
		if got := oci.Foreign(ocispec.Descriptor{MediaType: mediaType}); got != want {
			t.Errorf("%s: foreign %v", mediaType, got)
		}
	}
	if !oci.Foreign(ocispec.Descriptor{MediaType: ocispec.MediaTypeImageLayer, URLs: []string{"https://example.com/x"}}) {
		t.Error("a layer with urls is not foreign")
	}
}

// Reading foreign bytes ends, and what is accepted is within the limits.
func FuzzRead(f *testing.F) {
	d := newDocument()
	f.Add(mustJSON(d.manifest), []byte(d.config))
	f.Add([]byte(`{"config":{},"layers":[],"manifests":[]}`), []byte(`{"rootfs":{"diff_ids":[]}}`))
	f.Add([]byte(`{"layers":[{"size":-1}],"Layers":null}`), []byte("\xff"))
	f.Fuzz(func(t *testing.T, manifest, config []byte) {
		if _, err := oci.ReadIndex(index, manifest); err != nil && !errors.Is(err, oci.ErrRefused) {
			t.Fatal(err)
		}
		m, err := oci.ReadManifest(image, manifest)
		if err != nil {
			if !errors.Is(err, oci.ErrRefused) {
				t.Fatal(err)
			}
			return
		}
		total := m.Config.Size
		for _, l := range m.Layers {
			if l.Digest.Validate() != nil || l.Size < 0 || total+l.Size < total {
				t.Fatalf("layer %+v", l)
			}
			total += l.Size
		}
		m.Config = descriptor(m.Config.MediaType, string(config))
		c, err := oci.ReadConfig(m, m.Config.MediaType, config)
		if err == nil && len(c.RootFS.DiffIDs) != len(m.Layers) {
			t.Fatalf("%d diffIDs for %d layers", len(c.RootFS.DiffIDs), len(m.Layers))
		}
		if err != nil && !errors.Is(err, oci.ErrRefused) {
			t.Fatal(err)
		}
	})
}

func ExampleCheck() {
	fmt.Println(oci.Check(image, []byte(`{"manifests":[],"config":{},"layers":[]}`)))
	// Output: refused: the document is an index and a manifest at once: it has a list of manifests, and config or layers
}
