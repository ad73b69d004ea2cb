package e2e

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/layer/layertest"
	"hydrofoil.dev/foil/internal/worker/mirror"
	"hydrofoil.dev/foil/internal/worker/snapshotter"
)

// startMirrored starts a worker with a mirror for registry.example, whose server
// is behind a front, configured as deploy/containerd/hosts.toml says.
func startMirrored(t testing.TB, f *front) *worker {
	t.Helper()
	b, err := os.ReadFile("../../deploy/containerd/hosts.toml")
	if err != nil {
		t.Fatal(err)
	}
	at := freeAddr(t)
	text := strings.ReplaceAll(string(b), "127.0.0.1:598", at)
	root := workerRoot(t)
	text = strings.ReplaceAll(text, "/var/lib/foil", root)
	text = strings.Replace(text, `server = "https://registry.example"`, "server = \""+f.URL+"\"\nca = \"../ca.pem\"", 1)
	hosts := hostsDir(t, f, "registry.example", text)
	// Requests are counted: no connection is kept.
	w := startWorker(t, root, "--hosts-dir", hosts, "--docker-config", "", "--mirror-listen", at, "--log-level", "debug", "--keep-servers", "0")
	w.hosts = hosts
	return w
}

// withKey is a client that has the key of a root's mirror.
func withKey(t testing.TB, root string) *http.Client {
	t.Helper()
	b, err := os.ReadFile(mirror.KeyPath(root))
	if err != nil {
		t.Fatal(err)
	}
	pair, err := tls.X509KeyPair(b, b)
	if err != nil {
		t.Fatal(err)
	}
	cas := x509.NewCertPool()
	cas.AppendCertsFromPEM(b)
	c := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: cas, Certificates: []tls.Certificate{pair}}}}
	t.Cleanup(c.CloseIdleConnections)
	return c
}

// taken returns the requests that came to the server since the last call, but for
// promotions, which are the readers' and not the pull's, and what a proof asks later.
func (f *front) taken() (list []string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, r := range f.requests {
		if !strings.Contains(r, bundle.PromotePath) && !strings.Contains(r, bundle.RecipePath) && !strings.Contains(r, bundle.ContentsPath) {
			list = append(list, r)
		}
	}
	f.requests = nil
	return list
}

// oneBundle is what a pull through the mirror costs.
var oneBundle = []string{"POST /hydrofoil/v1/bundle 200"}

// pushIndex pushes an index of an image for this platform, and one for another.
func (s *server) pushIndex(repository, tag string, img image) {
	s.t.Helper()
	index := ocispec.Index{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageIndex}
	other := newImage(s.t, ocispec.ImageConfig{}, layertest.Layer{layertest.File("other", 0o644, "")}.Gzip(s.t))
	for i, m := range []image{other, img} {
		d := digest.FromBytes(m.manifest).String()
		s.push(repository, "for-"+d[7:20], m)
		index.Manifests = append(index.Manifests, ocispec.Descriptor{
			MediaType: ocispec.MediaTypeImageManifest, Digest: digest.Digest(d), Size: int64(len(m.manifest)),
			Platform: &ocispec.Platform{OS: "linux", Architecture: []string{"s390x", "amd64"}[i]},
		})
	}
	b, err := json.Marshal(index)
	if err != nil {
		s.t.Fatal(err)
	}
	u, err := url.Parse("http://" + s.addr + "/v2/" + repository + "/manifests/" + tag)
	if err != nil {
		s.t.Fatal(err)
	}
	if err := do(http.MethodPut, u, ocispec.MediaTypeImageIndex, b); err != nil {
		s.t.Fatal(err)
	}
}

func (c *containerd) pullFrom(t testing.TB, w *worker, ref string, flags ...string) {
	t.Helper()
	args := append([]string{"images", "pull", "--hosts-dir", w.hosts}, flags...)
	c.ctr(t, append(args, ref)...)
}

// TestMirror counts what the pulls of ctr ask the server for.
func TestMirror(t *testing.T) {
	needBusybox(t)
	s := startServer(t, t.TempDir())
	f := newFront(t, s, true)
	w := startMirrored(t, f)
	c := startContainerd(t, containerd2, w)
	lazily := []string{"--snapshotter", "hydrofoil"}
	img := runnable(t, 20, 5_000)
	s.push("app", "1", img)
	s.pushIndex("app", "many", img)
	const ref = "registry.example/app:1"

	c.pullFrom(t, w, ref, lazily...)
	if diff := cmp.Diff(oneBundle, f.taken()); diff != "" {
		t.Errorf("a pull asks the server for:\n%s", diff)
	}
	if got, want := c.run(t, ref, "one", dataSums), wantData(t, img); got != want {
		t.Errorf("a container read\n%s\nwant\n%s", got, want)
	}
	for _, n := range c.names(t) {
		if l := c.info(t, n).Labels; l[snapshotter.LabelPath] != snapshotter.PathLazy {
			t.Errorf("labels of snapshot %s: %q", n, l)
		}
	}
	if got := f.taken(); len(got) > 0 {
		t.Errorf("a container asks the server for %q", got)
	}

	// The same image by an index: its own manifest has the same digest.
	c.pullFrom(t, w, "registry.example/app:many", append(lazily, "--skip-metadata")...)
	if diff := cmp.Diff(oneBundle, f.taken()); diff != "" {
		t.Errorf("a pull by an index asks the server for:\n%s", diff)
	}
	// By digest.
	c.pullFrom(t, w, "registry.example/app@"+digest.FromBytes(img.manifest).String(), lazily...)
	if diff := cmp.Diff(oneBundle, f.taken()); diff != "" {
		t.Errorf("a pull by digest asks the server for:\n%s", diff)
	}

	// The tag moves.
	moved := runnable(t, 5, 3_000)
	s.push("app", "1", moved)
	c.pullFrom(t, w, ref, lazily...)
	if diff := cmp.Diff(oneBundle, f.taken()); diff != "" {
		t.Errorf("a pull of a tag that moved asks the server for:\n%s", diff)
	}
	if got, want := c.run(t, ref, "two", dataSums), wantData(t, moved); got != want {
		t.Errorf("after the tag has moved a container read\n%s\nwant\n%s", got, want)
	}

	f.mu.Lock()
	if f.conns != 1 {
		t.Errorf("%d connections to the server, want the daemon's one", f.conns)
	}
	f.mu.Unlock()

	// Another snapshotter: the header is the mirror's, the layers are not.
	plain := runnable(t, 7, 2_000)
	s.push("plain", "1", plain)
	before := w.imageRefs()
	c.pullFrom(t, w, "registry.example/plain:1", "--local", "--snapshotter", "native")
	got := f.taken()
	if !slices.Equal(got[:1], oneBundle) || len(got) != 1+len(plain.layers) {
		t.Errorf("a pull for another snapshotter asks the server for %q", got)
	}
	if diff := cmp.Diff(before, w.imageRefs()); diff != "" {
		t.Errorf("the worker's images after a pull for another snapshotter:\n%s", diff)
	}

	// What the server does not have, its registry says.
	if out, err := c.tryCtr("images", "pull", "--hosts-dir", w.hosts, "--snapshotter", "hydrofoil", "registry.example/absent:1"); err == nil || !strings.Contains(err.Error(), "not found") {
		t.Errorf("an absent image: %s, %v", out, err)
	}
	// Without the daemon, containerd asks the registry.
	w.kill()
	c.pullFrom(t, w, "registry.example/plain:1", "--local", "--snapshotter", "native")
}

// TestMirrorCredentials pulls what only containerd has the credentials of.
func TestMirrorCredentials(t *testing.T) {
	needBusybox(t)
	s := startServer(t, t.TempDir())
	f := newFront(t, s, false)
	w := startMirrored(t, f)
	c := startContainerd(t, containerd2, w)
	img := runnable(t, 20, 5_000)
	s.push("app", "1", img)
	const ref = "registry.example/app:1"
	for _, flags := range [][]string{{}, {"--user", frontUser + ":wr0ng"}} {
		args := append([]string{"images", "pull", "--hosts-dir", w.hosts, "--snapshotter", "hydrofoil"}, flags...)
		if out, err := c.tryCtr(append(args, ref)...); err == nil {
			t.Errorf("a pull with %q: %s", flags, out)
		}
	}
	if got := f.taken(); len(got) > 0 {
		t.Errorf("let through without credentials: %q", got)
	}
	c.pullFrom(t, w, ref, "--snapshotter", "hydrofoil", "--user", frontUser+":"+frontSecret)
	if diff := cmp.Diff(oneBundle, f.taken()); diff != "" {
		t.Errorf("a pull asks the server for:\n%s", diff)
	}
	if got, want := c.run(t, ref, "one", dataSums), wantData(t, img); got != want {
		t.Errorf("a container read\n%s\nwant\n%s", got, want)
	}
	for _, leak := range []string{frontSecret, frontAuth, "wr0ng", "t0ken"} {
		if strings.Contains(w.log.String(), leak) {
			t.Errorf("the daemon's log has %q", leak)
		}
	}
}

// TestMirrorCRI counts what the pull of a kubelet asks the server for.
func TestMirrorCRI(t *testing.T) {
	for _, v := range []containerdVersion{containerd2, containerd1} {
		t.Run(v.name, func(t *testing.T) {
			needBusybox(t)
			s := startServer(t, t.TempDir())
			f := newFront(t, s, false)
			w := startMirrored(t, f)
			c := startContainerdCRI(t, v, w, "registry.example/pause:1")
			images := imageService(t, c.socket())
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			s.push("app", "1", runnable(t, 20, 5_000))
			spec := &cri.ImageSpec{Image: "registry.example/app:1"}
			if _, err := images.PullImage(ctx, &cri.PullImageRequest{Image: spec}); err == nil {
				t.Error("a private image was pulled without credentials")
			}
			if got := f.taken(); len(got) > 0 {
				t.Errorf("let through without credentials: %q", got)
			}
			// As a kubelet has them of a pod's secret.
			auth := &cri.AuthConfig{Username: frontUser, Password: frontSecret}
			if _, err := images.PullImage(ctx, &cri.PullImageRequest{Image: spec, Auth: auth}); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(oneBundle, f.taken()); diff != "" {
				t.Errorf("a pull asks the server for:\n%s", diff)
			}
			for _, n := range c.names(t) {
				if l := c.info(t, n).Labels; l[snapshotter.LabelPath] != snapshotter.PathLazy {
					t.Errorf("labels of snapshot %s: %q", n, l)
				}
			}
		})
	}
}

// The daemon is killed when an image has been resolved and its snapshots are being
// made, for which nobody will ask: the next one has none of it.
func TestMirrorKilled(t *testing.T) {
	needBusybox(t)
	s := startServer(t, t.TempDir())
	f := newFront(t, s, true)
	w := startMirrored(t, f)
	img := runnable(t, 20, 5_000)
	s.push("app", "1", img)
	args := w.cmd.Args
	at := args[slices.Index(args, "--mirror-listen")+1]
	eventually(t, "snapshots are made of an image that is resolved", func() error {
		r, err := withKey(t, w.root).Head("https://" + at + "/v2/app/manifests/1?ns=registry.example")
		if err != nil {
			return err
		}
		r.Body.Close()
		if made, _ := filepath.Glob(filepath.Join(w.root, "snapshotter/expected/*")); len(made) == 0 {
			return fmt.Errorf("the mirror says %s, and none is", r.Status)
		}
		return nil
	})
	w.kill()
	hosts := w.hosts
	w = startWorker(t, w.root, args[slices.Index(args, w.root)+1:]...)
	w.hosts = hosts
	if left, _ := filepath.Glob(filepath.Join(w.root, "snapshotter/*/*")); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
	if refs := w.imageRefs(); len(refs) > 0 {
		t.Errorf("images: %q", refs)
	}
	c := startContainerd(t, containerd2, w)
	c.pullFrom(t, w, "registry.example/app:1", "--snapshotter", "hydrofoil")
	if got, want := c.run(t, "registry.example/app:1", "one", dataSums), wantData(t, img); got != want {
		t.Errorf("a container read\n%s\nwant\n%s", got, want)
	}
}
