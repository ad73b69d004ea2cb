package oci_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/errdefs"
	"github.com/containerd/platforms"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"pgregory.net/rapid"

	"hydrofoil.dev/foil/internal/format/oci"
)

// blobs is a content store of containerd.
type blobs map[digest.Digest][]byte

func (s blobs) put(mediaType string, b []byte) ocispec.Descriptor {
	s[digest.FromBytes(b)] = b
	return descriptor(mediaType, string(b))
}

func (s blobs) ReaderAt(_ context.Context, d ocispec.Descriptor) (content.ReaderAt, error) {
	b, ok := s[d.Digest]
	if !ok {
		return nil, errdefs.ErrNotFound
	}
	return blob{bytes.NewReader(b)}, nil
}

type blob struct{ *bytes.Reader }

func (blob) Close() error { return nil }

// manifest is an image whose config says p; name tells it from others.
func (s blobs) manifest(p ocispec.Platform, name string) ocispec.Descriptor {
	config := s.put(ocispec.MediaTypeImageConfig, mustJSON(ocispec.Image{Author: name, Platform: p,
		RootFS: ocispec.RootFS{Type: "layers", DiffIDs: []digest.Digest{digest.FromString(name)}}}))
	return s.put(image, mustJSON(ocispec.Manifest{Config: config, Layers: []ocispec.Descriptor{descriptor(ocispec.MediaTypeImageLayer, name)}}))
}

// chosen is what this package takes of an index, as bundles are read; "" is nothing.
func (s blobs) chosen(t interface{ Fatal(...any) }, x []byte, p ocispec.Platform) digest.Digest {
	index, err := oci.ReadIndex(index, x)
	if err != nil {
		t.Fatal(err)
	}
	d, err := oci.Choose(index, p)
	if errors.Is(err, oci.ErrNoPlatform) {
		return ""
	}
	if err != nil {
		t.Fatal(err)
	}
	m, err := oci.ReadManifest(image, s[d.Digest])
	if err != nil {
		t.Fatal(err)
	}
	c, err := oci.ReadConfig(m, m.Config.MediaType, s[m.Config.Digest])
	if err != nil {
		t.Fatal(err)
	}
	if err := oci.Fits(d, c, p); err != nil {
		return ""
	}
	return d.Digest
}

// containerd itself says what is right.
func TestChooseIsContainerds(t *testing.T) {
	platform := rapid.Custom(func(t *rapid.T) ocispec.Platform {
		p := ocispec.Platform{
			OS:           rapid.SampledFrom([]string{"linux", "linux", "linux", "windows", "unknown", ""}).Draw(t, "os"),
			Architecture: rapid.SampledFrom([]string{"amd64", "x86_64", "386", "arm64", "aarch64", "arm", "unknown", ""}).Draw(t, "architecture"),
			Variant:      rapid.SampledFrom([]string{"", "", "v1", "v2", "v3", "v5", "v6", "v7", "v8", "v8.2", "v9"}).Draw(t, "variant"),
			OSFeatures:   rapid.SampledFrom([][]string{nil, nil, nil, {"a"}, {"a", "b"}}).Draw(t, "features"),
		}
		return p
	})
	rapid.Check(t, func(t *rapid.T) {
		want := ocispec.Platform{
			OS:           "linux",
			Architecture: rapid.SampledFrom([]string{"amd64", "arm64", "arm", "386"}).Draw(t, "wanted"),
			Variant:      rapid.SampledFrom([]string{"", "v2", "v7", "v8", "v9"}).Draw(t, "wanted variant"),
			OSFeatures:   rapid.SampledFrom([][]string{nil, nil, {"a", "b"}}).Draw(t, "wanted features"),
		}
		s := blobs{}
		var x ocispec.Index
		for i := range rapid.IntRange(0, 6).Draw(t, "entries") {
			p := platform.Draw(t, "platform")
			d := s.manifest(p, fmt.Sprint(i))
			if rapid.IntRange(0, 3).Draw(t, "says so") > 0 {
				d.Platform = &p
			}
			x.Manifests = append(x.Manifests, d)
		}
		b := mustJSON(x)
		m, err := images.Manifest(t.Context(), s, s.put(index, b), platforms.Only(want))
		theirs := digest.Digest("")
		switch {
		case err == nil:
			theirs = m.Config.Digest
		case !errdefs.IsNotFound(err):
			t.Fatal(err)
		}
		ours := s.chosen(t, b, want)
		if ours != "" {
			m, err := oci.ReadManifest(image, s[ours])
			if err != nil {
				t.Fatal(err)
			}
			ours = m.Config.Digest
		}
		if ours != theirs {
			t.Fatalf("for %s containerd takes %q of %s, this package %q", platforms.Format(want), theirs, b, ours)
		}
	})
}

func TestChooseRefuses(t *testing.T) {
	amd64 := ocispec.Platform{OS: "linux", Architecture: "amd64"}
	entry := func(change func(*ocispec.Descriptor)) *ocispec.Index {
		d := descriptor(image, "x")
		d.Platform = &amd64
		change(&d)
		return &ocispec.Index{Manifests: []ocispec.Descriptor{d}}
	}
	for _, test := range []struct {
		what, want string
		index      *ocispec.Index
	}{
		{"an index of nothing", "nothing for linux/amd64", &ocispec.Index{}},
		{"an index of an index", "no image's manifest", entry(func(d *ocispec.Descriptor) { d.MediaType = index })},
		{"an entry of no type", "no image's manifest", entry(func(d *ocispec.Descriptor) { d.MediaType = "" })},
		{"an entry of no digest", "digest", entry(func(d *ocispec.Descriptor) { d.Digest = "x" })},
		{"an entry of negative size", "-1 bytes", entry(func(d *ocispec.Descriptor) { d.Size = -1 })},
		{"a huge entry", "bytes", entry(func(d *ocispec.Descriptor) { d.Size = oci.MaxDocument + 1 })},
	} {
		t.Run(test.what, func(t *testing.T) {
			_, err := oci.Choose(test.index, amd64)
			wanted(t, err, test.want)
		})
	}
}

// Whoever asks a server chooses the platform.
func FuzzChoose(f *testing.F) {
	s := blobs{}
	d := s.manifest(oci.Own(), "x")
	unnamed, named := d, d
	named.Platform = &ocispec.Platform{OS: "linux", Architecture: "arm64", Variant: "v8"}
	x := &ocispec.Index{Manifests: []ocispec.Descriptor{unnamed, named}}
	f.Add("linux", "amd64", "")
	f.Add("linux", "arm64", "v8")
	f.Add("windows(10.0)", "amd64", "v3")
	f.Add("linux", "amd64", "v9223372036854775807")
	f.Add("linux", "arm", "999999999")
	f.Fuzz(func(t *testing.T, os, architecture, variant string) {
		p := ocispec.Platform{OS: os, Architecture: architecture, Variant: variant}
		d, err := oci.Choose(x, p)
		if err != nil && !errors.Is(err, oci.ErrRefused) {
			t.Fatal(err)
		}
		if err := oci.Fits(unnamed, &ocispec.Image{}, p); err != nil && !errors.Is(err, oci.ErrNoPlatform) {
			t.Fatal(err)
		}
		if err == nil && d.Digest != named.Digest {
			t.Fatalf("%+v", d)
		}
	})
}
