// Package bundletest has the servers of bundles in tests. A Server has images by name and holds frames back: for
// packages node and hostiletest. A Scripted has one image, and streams that go wrong in all ways: for package fetch.
// An Image can be made to say what is not so; both send it all the same.
package bundletest

import (
	"encoding/json"
	"maps"
	"slices"

	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/format/toc/toctest"
	"hydrofoil.dev/foil/internal/format/trace"
)

// Image is an image of one layer that nobody has, or of real ones (NewLayers).
type Image struct {
	bundle.Image
	Tree  *toc.TOC
	Data  map[segment.ID][]byte // of the segments; what is not there is never sent
	Files toctest.Files
	// Layers are those of NewLayers, the lowest first.
	Layers []*Layer
	Lies   Lies

	// What a Scripted sends of startup sets. Startup is the set of every service, a frame each, but of those in
	// Services, by their first argument; Filled of the last frames of a set are filled, at most all. Here is said to be on the worker.
	Startup  [][]trace.Run
	Filled   int
	Services map[string][][]trace.Run
	Here     []trace.Run
}

// Lies are what a Server does wrong when it sends an image, whatever that says. The functions are called by several
// goroutines.
type Lies struct {
	// Before is called before each section, "image", "plan", "frame" or "end", with how many frames have come, and may
	// write others. From where it returns false nothing comes any more.
	Before func(section string, frames int, out *bundle.Writer) bool
	// Plan changes the plan, and Frame what is sent as a frame.
	Plan  func(*bundle.Plan)
	Frame func(index uint32, frame []byte) (uint32, []byte)
	// Shuffle, unless 0, is the seed of the order in which frames come.
	Shuffle uint64
}

// NewImage returns an image of the files.
func NewImage(t toctest.T, f toctest.Files) *Image {
	t.Helper()
	m := &Image{Files: f}
	var diff digest.Digest
	m.Tree, diff, m.Data = f.TOC(t)
	m.ChainID = m.Tree.ChainID
	m.encode(t)
	m.Config = JSON(t, ocispec.MediaTypeImageConfig, ocispec.Image{RootFS: ocispec.RootFS{Type: "layers", DiffIDs: []digest.Digest{diff}}})
	m.Manifest = JSON(t, ocispec.MediaTypeImageManifest, ocispec.Manifest{
		Versioned: specs.Versioned{SchemaVersion: 2},
		Config:    ocispec.Descriptor{MediaType: m.Config.MediaType, Digest: m.Config.Digest, Size: int64(len(m.Config.Bytes))},
		Layers:    []ocispec.Descriptor{{MediaType: ocispec.MediaTypeImageLayer, Digest: diff}},
	})
	return m
}

func (m *Image) encode(t toctest.T) {
	t.Helper()
	var err error
	if m.TOC, err = toc.Encode(m.Tree); err != nil {
		t.Fatal(err)
	}
	m.TOCDigest, m.Segments = toc.Digest(m.TOC), uint32(len(m.Tree.Segments))
}

// Change changes the TOC: fn is given that of m, and may lie.
func (m *Image) Change(t toctest.T, fn func(*toc.TOC)) *Image {
	t.Helper()
	fn(m.Tree)
	m.encode(t)
	return m
}

// As makes m say that it is another image: of its manifest, config and chain ID. What is in it stays.
func (m *Image) As(t toctest.T, other *Image) *Image {
	t.Helper()
	m.ChainID, m.Config, m.Manifest = other.ChainID, other.Config, other.Manifest
	return m.Change(t, func(x *toc.TOC) { x.ChainID = other.ChainID })
}

// Clone returns a copy that can be changed without m.
func (m *Image) Clone(t toctest.T) *Image {
	t.Helper()
	c := *m
	var err error
	if c.Tree, err = toc.Decode(m.TOC); err != nil {
		t.Fatal(err)
	}
	c.Data, c.Layers = maps.Clone(m.Data), nil
	for _, l := range m.Layers {
		c.Layers = append(c.Layers, new(*l))
	}
	return &c
}

// JSON returns a blob of an image.
func JSON(t toctest.T, mediaType string, v any) bundle.Blob {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return bundle.Blob{Digest: digest.FromBytes(b), MediaType: mediaType, Bytes: b}
}

// Content returns the bytes of a content.
func (m *Image) Content(i uint32) (b []byte) {
	c := m.Tree.Contents[i]
	for _, s := range m.Tree.Segments[c.First : c.First+c.Segments] {
		if s.ID.IsHole() {
			b = append(b, make([]byte, s.Length)...)
		} else {
			b = append(b, m.Data[s.ID]...)
		}
	}
	return b
}

// Index returns the number of the content that a file has.
func (m *Image) Index(file []byte) uint32 {
	id := segment.Sum(file)
	return uint32(slices.IndexFunc(m.Tree.Contents, func(c toc.Content) bool { return c.ID == id }))
}
