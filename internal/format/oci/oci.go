// Package oci reads the documents that say what an image is: its index, its
// manifest and its config. What it accepts has one meaning: no reader takes
// a document for something else than another reader does, and each names the
// next one by digest, size and media type. Server and worker read by it, so that
// neither serves nor runs what the other would refuse, and both choose from an
// index as containerd does.
//
// Documents are at most MaxDocument bytes long; whoever reads them in sees to
// that.
package oci

import (
	"encoding/json"
	"errors"
	"fmt"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// Limits of what an image may say of itself.
const (
	MaxDocument = 4 << 20 // bytes
	MaxLayers   = 500
	MaxLayer    = 1 << 50 // bytes of a layer's blob: the sum over all layers is an int64
)

// ErrRefused is returned, wrapped, for documents that are not, or do not make, an
// image that can be had lazily. Reading them again ends the same.
var ErrRefused = errors.New("refused")

// ErrNoPlatform is an ErrRefused: an index has no image for a platform.
var ErrNoPlatform = fmt.Errorf("%w for this platform", ErrRefused)

func refused(format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{ErrRefused}, args...)...)
}

// Media types of other times that mean the same as OCI's.
const (
	dockerManifest = "application/vnd.docker.distribution.manifest.v2+json"
	dockerList     = "application/vnd.docker.distribution.manifest.list.v2+json"
	dockerConfig   = "application/vnd.docker.container.image.v1+json"
)

// IsManifest reports whether a media type is one of manifests of images.
func IsManifest(mediaType string) bool {
	return mediaType == ocispec.MediaTypeImageManifest || mediaType == dockerManifest
}

// IsIndex reports whether a media type is one of indexes.
func IsIndex(mediaType string) bool {
	return mediaType == ocispec.MediaTypeImageIndex || mediaType == dockerList
}

// isConfig reports whether a media type is one of configs of images that are run.
func isConfig(mediaType string) bool {
	return mediaType == ocispec.MediaTypeImageConfig || mediaType == dockerConfig
}

// Check checks that a document of a media type that IsManifest or IsIndex knows is
// that, and nothing else to any reader. What is in its descriptors it leaves open:
// artifacts pass.
//
// Errors: ErrRefused.
func Check(mediaType string, b []byte) error {
	if err := unambiguous(b); err != nil {
		return refused("the document is %w", err)
	}
	var doc struct {
		MediaType string          `json:"mediaType"`
		Config    json.RawMessage `json:"config"`
		Layers    json.RawMessage `json:"layers"`
		Manifests json.RawMessage `json:"manifests"`
		FSLayers  json.RawMessage `json:"fsLayers"` // of schema 1
	}
	if err := json.Unmarshal(b, &doc); err != nil {
		return refused("the document is not the JSON that it should be: %w", err)
	}
	image := len(doc.Config) > 0 || len(doc.Layers) > 0
	switch {
	case doc.MediaType != "" && doc.MediaType != mediaType:
		return refused("the document calls itself %s, and came as %s", doc.MediaType, mediaType)
	case len(doc.FSLayers) > 0:
		return refused("the document is of schema 1, which is not supported: push the image with a newer tool")
	case image && len(doc.Manifests) > 0:
		return refused("the document is an index and a manifest at once: it has a list of manifests, and config or layers")
	case IsManifest(mediaType) && len(doc.Manifests) > 0:
		return refused("the document has a list of manifests, and came as %s", mediaType)
	case IsIndex(mediaType) && image:
		return refused("the document has config or layers, and came as %s", mediaType)
	}
	return nil
}

// ReadManifest reads the manifest of an image that is run: config and layers are of
// known kinds and sizes, whether or not its registry keeps the layers.
//
// Errors: ErrRefused.
func ReadManifest(mediaType string, b []byte) (*ocispec.Manifest, error) {
	if !IsManifest(mediaType) {
		return nil, refused("media type %q is not that of an image's manifest", mediaType)
	}
	if err := Check(mediaType, b); err != nil {
		return nil, err
	}
	m := new(ocispec.Manifest)
	if err := json.Unmarshal(b, m); err != nil {
		return nil, refused("the manifest is not the JSON that it should be: %w", err)
	}
	if !isConfig(m.Config.MediaType) {
		return nil, refused("its config is of type %q: it is an artifact and no image", m.Config.MediaType)
	}
	if err := checkDescriptor("config", m.Config, MaxDocument); err != nil {
		return nil, err
	}
	if n := len(m.Layers); n == 0 || n > MaxLayers {
		return nil, refused("it has %d layers, and an image has 1 to %d here", n, MaxLayers)
	}
	for i, l := range m.Layers {
		if !layers[l.MediaType] {
			return nil, refused("layer %d, %s, is of the unknown type %q", i, l.Digest, l.MediaType)
		}
		if err := checkDescriptor(fmt.Sprintf("layer %d", i), l, MaxLayer); err != nil {
			return nil, err
		}
	}
	return m, nil
}

// ReadIndex reads an index. Its entries are checked when one is chosen: an index
// may list anything.
//
// Errors: ErrRefused.
func ReadIndex(mediaType string, b []byte) (*ocispec.Index, error) {
	if !IsIndex(mediaType) {
		return nil, refused("media type %q is not that of an index", mediaType)
	}
	if err := Check(mediaType, b); err != nil {
		return nil, err
	}
	x := new(ocispec.Index)
	if err := json.Unmarshal(b, x); err != nil {
		return nil, refused("the index is not the JSON that it should be: %w", err)
	}
	return x, nil
}

// ReadConfig reads the config of a manifest that ReadManifest has read: the bytes are
// those that the manifest describes, and there is a diffID for each layer.
//
// Errors: ErrRefused.
func ReadConfig(m *ocispec.Manifest, mediaType string, b []byte) (*ocispec.Image, error) {
	if err := Describes(m.Config, mediaType, b); err != nil {
		return nil, fmt.Errorf("config: %w", err)
	}
	if err := unambiguous(b); err != nil {
		return nil, refused("config %s is %w", m.Config.Digest, err)
	}
	c := new(ocispec.Image)
	if err := json.Unmarshal(b, c); err != nil {
		return nil, refused("config %s is not the JSON that it should be: %w", m.Config.Digest, err)
	}
	if t := c.RootFS.Type; t != "" && t != "layers" {
		return nil, refused("config %s: rootfs of type %q, which is not layers", m.Config.Digest, t)
	}
	if got, want := len(c.RootFS.DiffIDs), len(m.Layers); got != want {
		return nil, refused("config %s names %d layers, the manifest %d", m.Config.Digest, got, want)
	}
	for i, d := range c.RootFS.DiffIDs {
		if err := d.Validate(); err != nil {
			return nil, refused("config %s: diffID %d, %q: %w", m.Config.Digest, i, d, err)
		}
	}
	return c, nil
}

// Describes checks that bytes are those of a descriptor: digest, size and media type.
//
// Errors: ErrRefused.
func Describes(d ocispec.Descriptor, mediaType string, b []byte) error {
	if err := checkDescriptor("descriptor", d, MaxLayer); err != nil {
		return err
	}
	switch got := d.Digest.Algorithm().FromBytes(b); {
	case got != d.Digest:
		return refused("digest %s, its descriptor says %s", got, d.Digest)
	case int64(len(b)) != d.Size:
		return refused("%s has %d bytes, its descriptor says %d", d.Digest, len(b), d.Size)
	case d.MediaType != mediaType:
		return refused("%s came as %q, its descriptor says %q", d.Digest, mediaType, d.MediaType)
	}
	return nil
}

// checkDescriptor checks what a descriptor says of its own; most is the largest size.
func checkDescriptor(what string, d ocispec.Descriptor, most int64) error {
	if err := d.Digest.Validate(); err != nil {
		return refused("%s: digest %q: %w", what, d.Digest, err)
	}
	if d.Size < 0 || d.Size > most {
		return refused("%s %s: %d bytes, which is not 0 to %d", what, d.Digest, d.Size, most)
	}
	return nil
}

// What layers of a rootfs are called. Which compression it is shows in the bytes.
var layers = map[string]bool{
	ocispec.MediaTypeImageLayer:                         true,
	ocispec.MediaTypeImageLayerGzip:                     true,
	ocispec.MediaTypeImageLayerZstd:                     true,
	"application/vnd.docker.image.rootfs.diff.tar":      true,
	"application/vnd.docker.image.rootfs.diff.tar.gzip": true,
	"application/vnd.docker.image.rootfs.diff.tar.zstd": true,
	foreignOCI + "tar":                                  true,
	foreignOCI + "tar+gzip":                             true,
	foreignOCI + "tar+zstd":                             true,
	foreignDocker + "tar":                               true,
	foreignDocker + "tar.gzip":                          true,
}

const (
	foreignOCI    = "application/vnd.oci.image.layer.nondistributable.v1."
	foreignDocker = "application/vnd.docker.image.rootfs.foreign.diff."
)
