package serve_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/server/serve"
)

// layout writes an OCI layout with one image, tagged latest, and returns the
// digest of its manifest. Another salt is another image.
func layout(t *testing.T, dir string, salt ...string) digest.Digest {
	t.Helper()
	blob := func(mediaType string, b []byte) ocispec.Descriptor {
		t.Helper()
		d := ocispec.Descriptor{MediaType: mediaType, Digest: digest.FromBytes(b), Size: int64(len(b))}
		path := filepath.Join(dir, "blobs", "sha256", d.Digest.Encoded())
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		return d
	}
	object := func(v any) []byte {
		t.Helper()
		b, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	config := ocispec.Image{Platform: ocispec.Platform{Architecture: "amd64", OS: "linux"}, RootFS: ocispec.RootFS{Type: "layers"}}
	manifest := ocispec.Manifest{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageManifest}
	for i := range 3 {
		var plain, packed bytes.Buffer
		w := tar.NewWriter(&plain)
		content := bytes.Repeat(fmt.Appendf(nil, "layer %d %s", i, salt), 50_000)
		header := &tar.Header{Name: fmt.Sprintf("file%d", i), Mode: 0o644, Size: int64(len(content)), Format: tar.FormatPAX}
		if err := w.WriteHeader(header); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(content); err != nil {
			t.Fatal(err)
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		z := gzip.NewWriter(&packed)
		if _, err := z.Write(plain.Bytes()); err != nil {
			t.Fatal(err)
		}
		if err := z.Close(); err != nil {
			t.Fatal(err)
		}
		config.RootFS.DiffIDs = append(config.RootFS.DiffIDs, digest.FromBytes(plain.Bytes()))
		manifest.Layers = append(manifest.Layers, blob(ocispec.MediaTypeImageLayerGzip, packed.Bytes()))
	}
	manifest.Config = blob(ocispec.MediaTypeImageConfig, object(config))
	m := blob(ocispec.MediaTypeImageManifest, object(manifest))
	tagged := m
	tagged.Annotations = map[string]string{ocispec.AnnotationRefName: "latest"}
	index := ocispec.Index{Versioned: specs.Versioned{SchemaVersion: 2}, Manifests: []ocispec.Descriptor{tagged}}
	for name, b := range map[string][]byte{"index.json": object(index), "oci-layout": []byte(`{"imageLayoutVersion":"1.0.0"}`)} {
		if err := os.WriteFile(filepath.Join(dir, name), b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return m.Digest
}

func needProgram(t *testing.T, name string) {
	t.Helper()
	if _, err := exec.LookPath(name); err != nil {
		t.Skipf("%s is not installed: %v", name, err)
	}
}

func command(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

// manifestDigest asks the server.
func manifestDigest(t *testing.T, addr, repo, tag string) digest.Digest {
	t.Helper()
	res := send(t, "HEAD", "http://"+addr+"/v2/"+repo+"/manifests/"+tag, "", nil, http.StatusOK)
	return digest.Digest(res.Header.Get("Docker-Content-Digest"))
}

func TestSkopeo(t *testing.T) {
	needProgram(t, "skopeo")
	s := start(t, serve.Options{})
	dir := t.TempDir()
	pushed, pulled := filepath.Join(dir, "pushed"), filepath.Join(dir, "pulled")
	want := layout(t, pushed)
	for _, version := range []string{"", "v2s2"} { // as it is, and as docker has it
		ref := "docker://" + s.Addr() + "/skopeo/image:t" + version
		push := []string{"copy", "--dest-tls-verify=false", "oci:" + pushed + ":latest", ref}
		if version != "" {
			push = append(push, "--format", version)
		}
		command(t, "skopeo", push...)
		got := manifestDigest(t, s.Addr(), "skopeo/image", "t"+version)
		if version == "" && got != want {
			t.Errorf("pushed %s, the server has %s", want, got)
		}
		to := "dir:" + pulled + version
		command(t, "skopeo", "copy", "--src-tls-verify=false", "--preserve-digests", ref, to)
		b, err := os.ReadFile(filepath.Join(pulled+version, "manifest.json"))
		if err != nil {
			t.Fatal(err)
		}
		if digest.FromBytes(b) != got {
			t.Errorf("pulled %s, want %s", digest.FromBytes(b), got)
		}
		var m ocispec.Manifest
		if err := json.Unmarshal(b, &m); err != nil {
			t.Fatal(err)
		}
		for _, d := range append(m.Layers, m.Config) {
			b, err := os.ReadFile(filepath.Join(pulled+version, d.Digest.Encoded()))
			if err != nil || digest.FromBytes(b) != d.Digest {
				t.Errorf("blob %s: %v", d.Digest, err)
			}
		}
	}
	// By digest, and a whole repository's tags.
	command(t, "skopeo", "copy", "--src-tls-verify=false", "docker://"+s.Addr()+"/skopeo/image@"+want.String(), "dir:"+filepath.Join(dir, "bydigest"))
	if out := command(t, "skopeo", "list-tags", "--tls-verify=false", "docker://"+s.Addr()+"/skopeo/image"); !strings.Contains(out, `"tv2s2"`) {
		t.Errorf("list-tags: %s", out)
	}
	command(t, "skopeo", "delete", "--tls-verify=false", "docker://"+s.Addr()+"/skopeo/image:tv2s2")
}

func TestContainerd(t *testing.T) {
	for _, program := range []string{"containerd", "ctr", "skopeo"} {
		needProgram(t, program)
	}
	if os.Geteuid() != 0 {
		t.Skip("containerd wants root")
	}
	s := start(t, serve.Options{})
	// Short: a socket's path has 108 bytes.
	dir, err := os.MkdirTemp("/tmp", "foil-ctrd")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	socket := filepath.Join(dir, "sock")
	config := filepath.Join(dir, "config.toml")
	err = os.WriteFile(config, fmt.Appendf(nil, `version = 2
root = %q
state = %q
disabled_plugins = ["io.containerd.grpc.v1.cri", "io.containerd.internal.v1.opt", "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.aufs"]
[grpc]
address = %q
[ttrpc]
address = %q
`, filepath.Join(dir, "root"), filepath.Join(dir, "state"), socket, socket+".ttrpc"), 0o600)
	if err != nil {
		t.Fatal(err)
	}
	daemon := exec.Command("containerd", "--config", config, "--log-level", "warn")
	daemon.Stdout, daemon.Stderr = t.Output(), t.Output()
	if err := daemon.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = daemon.Process.Kill()
		_ = daemon.Wait()
	})
	ctr := func(args ...string) string {
		t.Helper()
		return command(t, "ctr", append([]string{"--address", socket}, args...)...)
	}
	for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(50 * time.Millisecond) {
		if exec.Command("ctr", "--address", socket, "version").Run() == nil {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("containerd does not answer")
		}
	}

	from := filepath.Join(dir, "layout")
	want := layout(t, from)
	one, two := s.Addr()+"/ctr/one:latest", s.Addr()+"/ctr/two:latest"
	command(t, "skopeo", "copy", "--dest-tls-verify=false", "oci:"+from+":latest", "docker://"+one)
	pull := func(ref string) {
		t.Helper()
		ctr("images", "pull", "--plain-http", "--snapshotter", "native", ref)
		if out := ctr("images", "ls", "name=="+ref); !strings.Contains(out, want.String()) {
			t.Errorf("pulled another image than %s:\n%s", want, out)
		}
	}
	pull(one)
	// The server forgets the blobs, so that they are pushed and not mounted.
	for _, e := range blobsOf(t, from) {
		send(t, "DELETE", "http://"+s.Addr()+"/v2/ctr/one/blobs/"+e.String(), "", nil, http.StatusAccepted)
	}
	ctr("images", "tag", one, two)
	ctr("images", "push", "--plain-http", two)
	if got := manifestDigest(t, s.Addr(), "ctr/two", "latest"); got != want {
		t.Errorf("pushed %s, the server has %s", want, got)
	}
	ctr("images", "rm", "--sync", one, two)
	pull(two)
}

// blobsOf lists the blobs of the layout's image, without its manifest.
func blobsOf(t *testing.T, dir string) (blobs []digest.Digest) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(dir, "index.json"))
	if err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir(filepath.Join(dir, "blobs", "sha256"))
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if !bytes.Contains(b, []byte(e.Name())) {
			blobs = append(blobs, digest.NewDigestFromEncoded(digest.SHA256, e.Name()))
		}
	}
	return blobs
}

// Two clients push the same image at once, in the way of docker and buildkit:
// ask for each blob, POST, PATCH without a length, PUT.
func TestTwoPushes(t *testing.T) {
	s := start(t, serve.Options{})
	dir := t.TempDir()
	want := layout(t, dir)
	base := "http://" + s.Addr()
	request := func(method, url, mediaType string, body io.Reader) (*http.Response, error) {
		req, err := http.NewRequestWithContext(t.Context(), method, url, body)
		if err != nil {
			return nil, err
		}
		if mediaType != "" {
			req.Header.Set("Content-Type", mediaType)
		}
		res, err := http.DefaultClient.Do(req)
		if err != nil {
			return nil, err
		}
		defer res.Body.Close()
		_, err = io.Copy(io.Discard, res.Body)
		return res, err
	}
	blobs := blobsOf(t, dir)
	push := func(repo string) error {
		for _, d := range blobs {
			b, err := os.ReadFile(filepath.Join(dir, "blobs", "sha256", d.Encoded()))
			if err != nil {
				return err
			}
			res, err := request("HEAD", base+"/v2/"+repo+"/blobs/"+d.String(), "", nil)
			if err != nil {
				return err
			}
			if res.StatusCode == http.StatusOK {
				continue
			}
			if res, err = request("POST", base+"/v2/"+repo+"/blobs/uploads/", "", nil); err != nil {
				return err
			}
			// MultiReader hides the length, so that the body is chunked.
			if res, err = request("PATCH", base+res.Header.Get("Location"), "application/octet-stream", io.MultiReader(bytes.NewReader(b))); err != nil {
				return err
			}
			if res, err = request("PUT", base+res.Header.Get("Location")+"?digest="+d.String(), "", nil); err != nil {
				return err
			}
			if res.StatusCode != http.StatusCreated {
				return fmt.Errorf("blob %s: status %d", d, res.StatusCode)
			}
		}
		b, err := os.ReadFile(filepath.Join(dir, "blobs", "sha256", want.Encoded()))
		if err != nil {
			return err
		}
		res, err := request("PUT", base+"/v2/"+repo+"/manifests/latest", ocispec.MediaTypeImageManifest, bytes.NewReader(b))
		if err == nil && res.StatusCode != http.StatusCreated {
			err = fmt.Errorf("manifest: status %d", res.StatusCode)
		}
		return err
	}
	var wg sync.WaitGroup
	for i := range 6 {
		wg.Go(func() {
			if err := push(fmt.Sprintf("r%d", i%2)); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	for i := range 2 {
		if got := manifestDigest(t, s.Addr(), fmt.Sprintf("r%d", i), "latest"); got != want {
			t.Errorf("repository %d has %s, want %s", i, got, want)
		}
	}
}
