// Package e2e holds the tests of the whole: the real program, as processes that
// can be killed, over real mounts, with a link that can be slowed and cut.
package e2e

import (
	"bytes"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"testing"

	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/format/layer/layertest"
)

// image is an image as a client would push it.
type image struct {
	layers   []layertest.Blob
	config   []byte
	manifest []byte
}

func newImage(t testing.TB, cfg ocispec.ImageConfig, layers ...layertest.Blob) image {
	t.Helper()
	img := image{layers: layers}
	c := ocispec.Image{Config: cfg, Platform: ocispec.Platform{OS: "linux", Architecture: "amd64"}}
	c.RootFS.Type = "layers"
	m := ocispec.Manifest{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageManifest}
	for _, l := range layers {
		c.RootFS.DiffIDs = append(c.RootFS.DiffIDs, l.DiffID)
		m.Layers = append(m.Layers, l.Descriptor())
	}
	var err error
	if img.config, err = json.Marshal(c); err != nil {
		t.Fatal(err)
	}
	m.Config = ocispec.Descriptor{
		MediaType: ocispec.MediaTypeImageConfig,
		Digest:    digest.FromBytes(img.config),
		Size:      int64(len(img.config)),
	}
	if img.manifest, err = json.Marshal(m); err != nil {
		t.Fatal(err)
	}
	return img
}

// push does what any client does, and fails the test when the server refuses.
func (s *server) push(repository, tag string, img image) (ref string) {
	s.t.Helper()
	if err := s.tryPush(repository, tag, img); err != nil {
		s.t.Fatal(err)
	}
	return s.addr + "/" + repository + ":" + tag
}

func (s *server) tryPush(repository, tag string, img image) error {
	base := "http://" + s.addr + "/v2/" + repository
	put := func(b []byte) error {
		resp, err := http.Post(base+"/blobs/uploads/", "", nil)
		if err != nil {
			return err
		}
		resp.Body.Close()
		if resp.StatusCode != http.StatusAccepted {
			return fmt.Errorf("start upload: %s", resp.Status)
		}
		at, err := resp.Location()
		if err != nil {
			return err
		}
		q := at.Query()
		q.Set("digest", digest.FromBytes(b).String())
		at.RawQuery = q.Encode()
		return do(http.MethodPut, at, "application/octet-stream", b)
	}
	for _, l := range img.layers {
		if err := put(l.Bytes); err != nil {
			return fmt.Errorf("push layer: %w", err)
		}
	}
	if err := put(img.config); err != nil {
		return fmt.Errorf("push config: %w", err)
	}
	u, err := url.Parse(base + "/manifests/" + tag)
	if err != nil {
		return err
	}
	if err := do(http.MethodPut, u, ocispec.MediaTypeImageManifest, img.manifest); err != nil {
		return fmt.Errorf("push manifest: %w", err)
	}
	return nil
}

func do(method string, u *url.URL, mediaType string, body []byte) error {
	req, err := http.NewRequest(method, u.String(), bytes.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", mediaType)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	b, _ := io.ReadAll(resp.Body)
	if resp.StatusCode != http.StatusCreated {
		return fmt.Errorf("%s %s: %s: %s", method, u, resp.Status, b)
	}
	return nil
}

// noise is bytes that do not compress.
func noise(n int) string {
	b := make([]byte, n)
	_, _ = rand.Read(b)
	return string(b)
}
