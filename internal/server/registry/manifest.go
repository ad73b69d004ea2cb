package registry

import (
	"encoding/json"
	"mime"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/format/oci"
	"hydrofoil.dev/foil/internal/server/catalog"
)

// manifestFields are the fields of images, indexes and artifacts that refer to
// something. Manifests of types that package oci does not know are stored as they
// are; what they refer to is checked as far as they use the OCI fields.
type manifestFields struct {
	MediaType    string               `json:"mediaType"`
	ArtifactType string               `json:"artifactType"`
	Config       *ocispec.Descriptor  `json:"config"`
	Layers       []ocispec.Descriptor `json:"layers"`
	Manifests    []ocispec.Descriptor `json:"manifests"`
	Blobs        []ocispec.Descriptor `json:"blobs"`
	Subject      *ocispec.Descriptor  `json:"subject"`
	Annotations  map[string]string    `json:"annotations"`
}

// references is what a manifest needs to have in its repository.
type references struct {
	blobs []ocispec.Descriptor
	// any may be manifests or blobs: indexes refer to manifests, but build
	// caches use them for layers.
	any []ocispec.Descriptor
	// sized says that they must have the sizes that the manifest says: no client could
	// pull it otherwise. What fields of unknown types of manifests mean is not known.
	sized bool
}

// ParseManifest reads a manifest that came from another registry with that
// Content-Type, which may be empty. It returns what to record, without digest and
// time. What the manifest refers to need not be here.
func ParseManifest(b []byte, contentType string) (catalog.Manifest, error) {
	m, _, err := parseManifest(b, contentType)
	return m, err
}

// parseManifest reads a manifest with the Content-Type it was pushed with, and
// returns what to record, without digest and time.
func parseManifest(b []byte, contentType string) (catalog.Manifest, references, error) {
	fail := func(format string, args ...any) (catalog.Manifest, references, error) {
		return catalog.Manifest{}, references{}, errorf(manifestInvalid, format, args...)
	}
	m := catalog.Manifest{Bytes: b}
	if contentType != "" {
		mediaType, _, err := mime.ParseMediaType(contentType)
		if err != nil {
			return fail("Content-Type %q: %v", contentType, err)
		}
		m.MediaType = mediaType
	}
	var f manifestFields
	err := json.Unmarshal(b, &f)
	if err != nil {
		if oci.IsManifest(m.MediaType) || oci.IsIndex(m.MediaType) || m.MediaType == "" {
			return fail("the manifest is not the JSON it should be: %v", err)
		}
		return m, references{}, nil // another format: nothing to check
	}
	switch {
	case m.MediaType == "":
		m.MediaType = f.MediaType
	case f.MediaType != "" && f.MediaType != m.MediaType:
		return fail("the manifest calls itself %s and was pushed as %s: use one of them for both", f.MediaType, m.MediaType)
	}
	if m.MediaType == "" {
		return fail("the manifest has no media type: push it with a Content-Type")
	}

	// A document that is an image to one client and something else to another one
	// would be two things with one digest.
	known := oci.IsManifest(m.MediaType) || oci.IsIndex(m.MediaType)
	if known {
		if err := oci.Check(m.MediaType, b); err != nil {
			return fail("%v", err)
		}
	}
	if oci.IsManifest(m.MediaType) && f.Config == nil {
		return fail("an image manifest wants a config")
	}
	refs := references{sized: known}
	check := func(what string, d ocispec.Descriptor, to *[]ocispec.Descriptor) error {
		if _, err := parseDigest(d.Digest.String()); err != nil {
			return errorf(manifestInvalid, "%s: %v", what, err)
		}
		if d.Size < 0 || d.Size > oci.MaxLayer {
			return errorf(manifestInvalid, "%s %s has the size %d", what, d.Digest, d.Size)
		}
		if to != nil && !oci.Foreign(d) {
			*to = append(*to, d)
		}
		return nil
	}
	type part struct {
		what string
		of   []ocispec.Descriptor
		to   *[]ocispec.Descriptor
	}
	parts := []part{
		{"layer", f.Layers, &refs.blobs},
		{"blob", f.Blobs, &refs.blobs},
		{"manifest", f.Manifests, &refs.any},
	}
	if f.Config != nil {
		parts = append(parts, part{"config", []ocispec.Descriptor{*f.Config}, &refs.blobs})
	}
	if f.Subject != nil {
		// The subject may come later, or never.
		parts = append(parts, part{"subject", []ocispec.Descriptor{*f.Subject}, nil})
	}
	for _, p := range parts {
		for _, d := range p.of {
			if err := check(p.what, d, p.to); err != nil {
				if known {
					return catalog.Manifest{}, references{}, err
				}
				// Its fields mean something else.
				return m, references{}, nil
			}
		}
	}
	m.Annotations = f.Annotations
	m.ArtifactType = f.ArtifactType
	if m.ArtifactType == "" && f.Config != nil && !oci.IsIndex(m.MediaType) {
		m.ArtifactType = f.Config.MediaType
	}
	if f.Subject != nil {
		m.Subject = f.Subject.Digest
	}
	return m, refs, nil
}
