package bundletest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/flatten"
	"hydrofoil.dev/foil/internal/format/layer"
	"hydrofoil.dev/foil/internal/format/layer/layertest"
	"hydrofoil.dev/foil/internal/format/recipe"
	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
)

// Layer is a layer of an image, and what its server says of it, all of which a test may change.
type Layer struct {
	Blob     layertest.Blob // without Bytes: the registry does not have it
	Recipe   []byte         // nil: the server makes no recipes
	IDs      []segment.ID   // of the contents, by number
	Contents [][]byte
	Silent   bool // what is asked about it is never answered
	// Meets is called when the recipe is asked for, before it is sent, or is not.
	Meets func()
}

// entries is an entry list.
type entries []*layer.Entry

// Next implements flatten.Entries.
func (l *entries) Next() (*layer.Entry, error) {
	if len(*l) == 0 {
		return nil, io.EOF
	}
	e := (*l)[0]
	*l = (*l)[1:]
	return e, nil
}

// NewLayers returns an image of real layers, the lowest first, which can be proven.
func NewLayers(t testing.TB, layers ...layertest.Layer) *Image {
	t.Helper()
	m := &Image{Data: make(map[segment.ID][]byte)}
	var stack []flatten.Layer
	config := ocispec.Image{Platform: ocispec.Platform{OS: "linux", Architecture: runtime.GOARCH}}
	manifest := ocispec.Manifest{Versioned: specs.Versioned{SchemaVersion: 2}}
	config.RootFS.Type = "layers"
	for _, l := range layers {
		made, list := m.read(t, l.Gzip(t))
		m.Layers = append(m.Layers, made)
		d := made.Blob.DiffID
		stack = append(stack, flatten.Layer{Digest: made.Blob.Digest, DiffID: d, Entries: &list})
		config.RootFS.DiffIDs = append(config.RootFS.DiffIDs, d)
		manifest.Layers = append(manifest.Layers, made.Blob.Descriptor())
	}
	var err error
	if m.Tree, err = flatten.Rootfs(context.Background(), stack); err != nil {
		t.Fatal(err)
	}
	m.ChainID = m.Tree.ChainID
	m.encode(t)
	m.Config = JSON(t, ocispec.MediaTypeImageConfig, config)
	manifest.Config = ocispec.Descriptor{MediaType: m.Config.MediaType, Digest: m.Config.Digest, Size: int64(len(m.Config.Bytes))}
	m.Manifest = JSON(t, ocispec.MediaTypeImageManifest, manifest)
	return m
}

// read takes a layer apart.
func (m *Image) read(t testing.TB, blob layertest.Blob) (made *Layer, list entries) {
	t.Helper()
	r, err := layer.NewReader(context.Background(), bytes.NewReader(blob.Bytes), layer.Descriptor{Digest: blob.Digest, DiffID: blob.DiffID}, layer.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	var encoded bytes.Buffer
	w := recipe.NewWriter(&encoded)
	r.Record(w)
	made = &Layer{Blob: blob}
	splitter := segment.NewSplitter(nil)
	for {
		e, err := r.Next()
		if err == io.EOF {
			break
		}
		if err == nil && e.Size > 0 {
			var content bytes.Buffer
			err = e.Split(splitter, io.TeeReader(r, &content), func(id segment.ID, b []byte) error {
				m.Data[id] = slices.Clone(b)
				return nil
			})
			made.IDs, made.Contents = append(made.IDs, e.Content), append(made.Contents, content.Bytes())
		}
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, e)
	}
	if err := w.Close(recipe.End{Size: r.Size(), Contents: int64(len(made.IDs)), DiffID: r.DiffID()}); err != nil {
		t.Fatal(err)
	}
	made.Recipe = encoded.Bytes()
	return made, list
}

// Sections are those of the answer about a layer: its recipe, or the contents in runs.
func (m *Image) Sections(n int, runs []bundle.ContentRun) (list []any, err error) {
	if n < len(m.Layers) && runs == nil && m.Layers[n].Meets != nil {
		m.Layers[n].Meets()
	}
	if n >= len(m.Layers) || m.Layers[n].Recipe == nil {
		return nil, &bundle.Error{Code: bundle.CodeNotFound, Message: "no such layer"}
	}
	l := m.Layers[n]
	if runs == nil {
		p := &bundle.Places{TOC: m.TOCDigest}
		for _, id := range l.IDs {
			p.Numbers = append(p.Numbers, int32(slices.IndexFunc(m.Tree.Contents, func(c toc.Content) bool { return c.ID == id })))
		}
		return []any{p, l.Recipe}, nil
	}
	for _, run := range runs {
		for k := run.First; k < run.First+run.Count && k < int64(len(l.Contents)); k++ {
			for piece := range slices.Chunk(l.Contents[k], 100_000) {
				frame, err := segment.AppendFrame(nil, segment.Zstd, piece)
				if err != nil {
					return nil, err
				}
				list = append(list, &bundle.Contents{Pieces: []bundle.ContentPiece{{Content: k, Length: uint32(len(piece))}}, Frame: frame, RawLength: len(piece)})
			}
		}
	}
	return list, nil
}

// layer answers requests about layers.
func (s *Server) layer(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return
	}
	req, err := bundle.DecodeLayerRequest(body)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	s.mu.Lock()
	m := s.find(req.Image)
	accept := s.accept
	s.mu.Unlock()
	if accept != nil && !accept(r) {
		deny(w)
		return
	}
	if m == nil {
		http.NotFound(w, r)
		return
	}
	if req.Layer < len(m.Layers) && m.Layers[req.Layer].Silent {
		if met := m.Layers[req.Layer].Meets; met != nil {
			met()
		}
		s.may(r, func() bool { return false })
		return
	}
	sections, err := m.Sections(req.Layer, req.Contents)
	if err != nil {
		told, _ := errors.AsType[*bundle.Error](err)
		w.WriteHeader(http.StatusNotFound)
		_ = json.NewEncoder(w).Encode(told)
		return
	}
	out := bundle.NewWriter(w)
	_ = out.Hello(bundle.Hello{Version: bundle.Version})
	last := int64(0)
	for _, section := range sections {
		switch section := section.(type) {
		case *bundle.Places:
			_ = out.Places(section)
		case []byte:
			_ = out.Recipe(section)
		case *bundle.Contents:
			_ = out.Contents(section, last)
			last = section.Pieces[0].Content
		}
	}
	_ = out.End()
}

// blob answers as a registry does for blobs of layers.
func (s *Server) blob(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	accept := s.accept
	var found *Layer
	for name, m := range s.images {
		if repository, _, _ := strings.Cut(name, ":"); repository != r.PathValue("repository") {
			continue
		}
		for _, l := range m.Layers {
			if l.Blob.Digest == digest.Digest(r.PathValue("digest")) && l.Blob.Bytes != nil {
				found = l
			}
		}
	}
	s.mu.Unlock()
	if accept != nil && !accept(r) {
		deny(w)
		return
	}
	if found == nil {
		http.NotFound(w, r)
		return
	}
	if found.Silent {
		s.may(r, func() bool { return false })
		return
	}
	_, _ = w.Write(found.Blob.Bytes)
}

// deny asks for credentials.
func deny(w http.ResponseWriter) {
	w.Header().Set("WWW-Authenticate", `Basic realm="test"`)
	w.WriteHeader(http.StatusUnauthorized)
}
