package node

import (
	"bytes"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/containerd/platforms"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/bundletest"
)

// indexed lists images in an index, which each of them says it was chosen from.
func indexed(t testing.TB, own *fakeImage, others ...*fakeImage) digest.Digest {
	t.Helper()
	here, riscv := platforms.DefaultSpec(), ocispec.Platform{OS: "linux", Architecture: "riscv64"}
	entry := func(m *fakeImage, p ocispec.Platform) ocispec.Descriptor {
		return ocispec.Descriptor{MediaType: m.Manifest.MediaType, Digest: m.Manifest.Digest, Size: int64(len(m.Manifest.Bytes)), Platform: &p}
	}
	var x ocispec.Index
	for _, m := range others {
		x.Manifests = append(x.Manifests, entry(m, riscv))
	}
	x.Manifests = append(x.Manifests, entry(own, here))
	b := bundletest.JSON(t, ocispec.MediaTypeImageIndex, x)
	for _, m := range append(others, own) {
		m.Chosen = &b
	}
	return b.Digest
}

// A server that sends something else than the reference names does not get it mounted, nor
// recorded.
func TestWhatIsAskedFor(t *testing.T) {
	for _, c := range []struct {
		name       string
		serve      func(own, other *fakeImage) (*fakeImage, string) // what it sends, and for which tag or digest
		code, want string
	}{
		{"an index's entry for this machine", func(own, other *fakeImage) (*fakeImage, string) { return own, own.Chosen.Digest.String() }, "", ""},
		{"the same by tag", func(own, other *fakeImage) (*fakeImage, string) { return own, "1" }, "", ""},
		{"an entry for another machine", func(own, other *fakeImage) (*fakeImage, string) { return other, own.Chosen.Digest.String() }, api.CodeCorrupt, "has chosen"},
		{"the same by tag", func(own, other *fakeImage) (*fakeImage, string) { return other, "1" }, api.CodeCorrupt, "has chosen"},
		{"no index, as a server without them would", func(own, other *fakeImage) (*fakeImage, string) {
			index := own.Chosen.Digest.String()
			own.Chosen = nil
			return own, index
		}, api.CodeCorrupt, "asked for"},
		{"index and manifest at once", func(own, other *fakeImage) (*fakeImage, string) {
			b := bytes.Replace(own.Manifest.Bytes, []byte(`"layers"`), []byte(`"manifests":[],"layers"`), 1)
			own.Manifest.Bytes, own.Manifest.Digest, own.Chosen = b, digest.FromBytes(b), nil
			return own, own.Manifest.Digest.String()
		}, api.CodeUnsupported, "at once"},
	} {
		t.Run(c.name, func(t *testing.T) {
			own, other := newFakeImage(t, some(1, 3, 5000)), newFakeImage(t, some(9, 3, 5000))
			indexed(t, own, other)
			s := newFakeServer(t)
			m, reference := c.serve(own, other)
			s.Serve("app:"+reference, m)
			ref := s.Addr + "/app:" + reference
			if digest.Digest(reference).Validate() == nil {
				ref = s.Addr + "/app@" + reference
			}
			h := newHost(t)
			_, err := h.pull(ref, api.Complete)
			if c.code == "" {
				if err != nil {
					t.Fatal(err)
				}
				h.same(m)
				if got := s.Requests()[0].Image.Platform; got == nil || platforms.Format(*got) != platforms.Format(platforms.DefaultSpec()) {
					t.Errorf("asked for platform %v", got)
				}
				return
			}
			if e := api.AsError(err); err == nil || e.Code != c.code || !strings.Contains(e.Message, c.want) {
				t.Errorf("%v, want %s with %q", err, c.code, c.want)
			}
			if images, _ := h.n.Images(t.Context()); len(images) > 0 || len(h.mounts()) > 0 {
				t.Errorf("images %+v, mounts %q", images, h.mounts())
			}
		})
	}
}

// A layer's urls are the image's own choice of whom this host asks for what.
func TestOpenBlobFollowsNoURLs(t *testing.T) {
	var followed atomic.Int32
	elsewhere := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		followed.Add(1)
		_, _ = io.WriteString(w, "a layer")
	}))
	defer elsewhere.Close()
	registry := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.Contains(r.URL.Path, "/blobs/") {
			_, _ = io.WriteString(w, "a layer")
		}
	}))
	defer registry.Close()
	h := newHost(t)
	body, err := h.n.OpenBlob(t.Context(), strings.TrimPrefix(registry.URL, "http://")+"/app:1", ocispec.Descriptor{
		MediaType: ocispec.MediaTypeImageLayer, Digest: digest.FromString("a layer"), Size: 7, URLs: []string{elsewhere.URL},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer body.Close()
	if b, err := io.ReadAll(body); err != nil || string(b) != "a layer" || followed.Load() > 0 {
		t.Errorf("%q, %v, %d requests to the URL", b, err, followed.Load())
	}
}
