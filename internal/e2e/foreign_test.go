package e2e

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/snapshotter"
)

// foreign makes a layer of an image one that its registry does not keep, and that is at a
// URL. It returns the image as it is pushed.
func foreign(t *testing.T, img image, layer int, url string) image {
	t.Helper()
	var m ocispec.Manifest
	if err := json.Unmarshal(img.manifest, &m); err != nil {
		t.Fatal(err)
	}
	l := &m.Layers[layer]
	l.MediaType, l.URLs = "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip", []string{url}
	var err error
	if img.manifest, err = json.Marshal(m); err != nil {
		t.Fatal(err)
	}
	img.layers = append(img.layers[:layer:layer], img.layers[layer+1:]...)
	return img
}

// An image with a layer that the repository lacks, since it is kept elsewhere, goes the plain
// way: containerd fetches the layer, and neither server nor worker asks there.
func TestContainerdForeignLayer(t *testing.T) {
	needBusybox(t)
	img := runnable(t, 10, 3_000)
	base := img.layers[0]
	var mu sync.Mutex
	var asked []string // by whom
	elsewhere := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		asked = append(asked, r.UserAgent())
		mu.Unlock()
		_, _ = w.Write(base.Bytes)
	}))
	defer elsewhere.Close()
	s := startServer(t, t.TempDir())
	ref := s.push("app", "1", foreign(t, img, 0, elsewhere.URL+"/"+base.Digest.Encoded()))
	w := startWorker(t, workerRoot(t))

	_, err := w.pull(ref, api.Mounted)
	if e := api.AsError(err); err == nil || e.Code != api.CodeUnsupported {
		t.Fatalf("foil pulls it: %v", err)
	}
	for _, want := range []string{base.Digest.String(), "foreign", "push it with that layer", "containerd, docker or podman"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("the error does not say %q: %v", want, err)
		}
	}
	mu.Lock()
	if len(asked) > 0 {
		t.Errorf("asked elsewhere: %q", asked)
	}
	mu.Unlock()

	c := startContainerd(t, containerd2, w)
	c.pull(t, ref)
	for _, n := range c.names(t) {
		if l := c.info(t, n).Labels; l[snapshotter.LabelPath] != snapshotter.PathPlain || !strings.Contains(l[snapshotter.LabelReason], "foreign") {
			t.Errorf("labels of snapshot %s: %q", n, l)
		}
	}
	if diff := cmp.Diff(wantData(t, img), c.run(t, ref, "c", dataSums)); diff != "" {
		t.Errorf("a container of it (-want +got):\n%s", diff)
	}
	mu.Lock()
	defer mu.Unlock()
	if len(asked) == 0 {
		t.Error("nobody fetched the layer")
	}
	for _, who := range asked {
		if !strings.HasPrefix(who, "containerd/") {
			t.Errorf("%q asked elsewhere", who)
		}
	}

	// One that is in the repository all the same is as any other.
	whole := foreign(t, img, 0, elsewhere.URL+"/"+digest.FromString("x").Encoded())
	whole.layers = img.layers
	here := s.push("whole", "1", whole)
	intact(t, w, here, img)
}
