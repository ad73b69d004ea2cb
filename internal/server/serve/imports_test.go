package serve_test

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/format/layer/layertest"
	"hydrofoil.dev/foil/internal/server/imports"
	"hydrofoil.dev/foil/internal/server/serve"
)

// elsewhere is a registry that others made, with images: what each path below /v2/ answers with.
type elsewhere struct {
	addr  string
	dir   string // docker/registry/v2 is below it
	holds map[string][]byte
}

func (e *elsewhere) put(t *testing.T, repo string, mediaType string, manifest any, tag string) ocispec.Descriptor {
	t.Helper()
	b, err := json.Marshal(manifest)
	if err != nil {
		t.Fatal(err)
	}
	d := ocispec.Descriptor{MediaType: mediaType, Digest: digest.FromBytes(b), Size: int64(len(b))}
	for _, ref := range []string{d.Digest.String(), tag} {
		if ref != "" {
			send(t, "PUT", "http://"+e.addr+"/v2/"+repo+"/manifests/"+ref, mediaType, b, http.StatusCreated)
			e.holds[repo+"/manifests/"+ref] = b
		}
	}
	return d
}

func (e *elsewhere) blob(t *testing.T, repo string, b []byte) ocispec.Descriptor {
	t.Helper()
	d := digest.FromBytes(b)
	res, err := http.Post("http://"+e.addr+"/v2/"+repo+"/blobs/uploads/", "", nil)
	if err != nil {
		t.Fatal(err)
	}
	res.Body.Close()
	send(t, "PUT", res.Header.Get("Location")+"&digest="+d.String(), "application/octet-stream", b, http.StatusCreated)
	e.holds[repo+"/blobs/"+d.String()] = b
	return ocispec.Descriptor{MediaType: "application/octet-stream", Digest: d, Size: int64(len(b))}
}

func newElsewhere(t *testing.T) *elsewhere {
	t.Helper()
	program := os.Getenv("FOIL_TEST_REGISTRY")
	if program == "" {
		t.Skip("FOIL_TEST_REGISTRY does not name a registry program, as that of tools/registry")
	}
	needProgram(t, program)
	var l net.ListenConfig
	free, err := l.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	e := &elsewhere{addr: free.Addr().String(), dir: t.TempDir(), holds: map[string][]byte{}}
	free.Close()
	startRegistry(t, program, e.addr, e.dir, "")
	shared := layertest.Layer{layertest.File("base", 0o644, noise(1, 300_000))}
	for n, repo := range []string{"team/app", "team/other", "solo"} {
		m := makeImage(t, shared, layertest.Layer{layertest.File("own", 0o644, noise(uint64(10+n), 100_000))})
		for _, b := range m.blobs {
			e.blob(t, repo, b)
		}
		var manifest ocispec.Manifest
		if err := json.Unmarshal(m.manifest, &manifest); err != nil {
			t.Fatal(err)
		}
		image := e.put(t, repo, ocispec.MediaTypeImageManifest, manifest, "1")
		image.Platform = &ocispec.Platform{OS: "linux", Architecture: "amd64"}
		// A second platform, in the index only, and a signature of it by the tag that clients use where there are no referrers.
		manifest.Annotations = map[string]string{"of": "another platform"}
		other := e.put(t, repo, ocispec.MediaTypeImageManifest, manifest, "")
		other.Platform = &ocispec.Platform{OS: "linux", Architecture: "arm64"}
		e.put(t, repo, ocispec.MediaTypeImageIndex, ocispec.Index{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageIndex, Manifests: []ocispec.Descriptor{image, other}}, "index")
		config := e.blob(t, repo, []byte("{}"))
		config.MediaType = ocispec.MediaTypeEmptyJSON
		signature := e.put(t, repo, ocispec.MediaTypeImageManifest, ocispec.Manifest{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageManifest,
			ArtifactType: "text/signature", Config: config, Layers: []ocispec.Descriptor{config}, Subject: &ocispec.Descriptor{MediaType: image.MediaType, Digest: image.Digest, Size: image.Size}}, "")
		e.put(t, repo, ocispec.MediaTypeImageIndex, ocispec.Index{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageIndex, Manifests: []ocispec.Descriptor{signature}},
			"sha256-"+image.Digest.Encoded())
	}
	return e
}

// sources are the ways to name it.
func (e *elsewhere) sources() map[string]string {
	return map[string]string{"registry": "http://" + e.addr, "directory": filepath.Join(e.dir, "data")}
}

// compare says what a server has otherwise than the registry, of repositories with a prefix.
func (e *elsewhere) compare(t *testing.T, addr, prefix string) (wrong []string) {
	t.Helper()
	for path, want := range e.holds {
		if !strings.HasPrefix(path, prefix) {
			continue
		}
		res, err := http.Get("http://" + addr + "/v2/" + path)
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(res.Body)
		res.Body.Close()
		if err != nil || res.StatusCode != http.StatusOK || !bytes.Equal(got, want) {
			wrong = append(wrong, fmt.Sprintf("%s: %s, %d of %d bytes", path, res.Status, len(got), len(want)))
		}
	}
	return wrong
}

func runImport(t *testing.T, o imports.Options) *imports.Report {
	t.Helper()
	o.Log = slog.New(slog.DiscardHandler)
	r, err := imports.Run(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	r.Took = 0
	return r
}

// All that a registry has comes, byte for byte, from its directory and from itself; what is there is not sent again.
func TestImport(t *testing.T) {
	e := newElsewhere(t)
	for name, from := range e.sources() {
		t.Run(name, func(t *testing.T) {
			s := start(t, serve.Options{})
			defer http.DefaultClient.CloseIdleConnections()
			o := imports.Options{From: from, To: "http://" + s.Addr()}
			o.DryRun = true
			dry := runImport(t, o)
			if res, err := http.Get("http://" + s.Addr() + "/v2/_catalog"); err != nil {
				t.Fatal(err)
			} else {
				b, _ := io.ReadAll(res.Body)
				res.Body.Close()
				if strings.Contains(string(b), "team") {
					t.Errorf("a dry run brought %s", b)
				}
			}
			o.DryRun = false
			r := runImport(t, o)
			// Of blobs three layers and three configs of their own, a shared layer and the signatures' config, which two
			// more repositories mount. Of manifests in each: two images, their index, a signature and its index.
			want := &imports.Report{Repositories: 3, Tags: 9, Manifests: 15, Blobs: 8, Mounted: 4}
			want.Bytes = r.Bytes
			if diff := cmp.Diff(want, r); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			if dry.Manifests != r.Manifests || dry.Tags != r.Tags || dry.Blobs+dry.Mounted != r.Blobs+r.Mounted || dry.Bytes != r.Bytes {
				t.Errorf("a dry run said %+v, it was %+v", dry, r)
			}
			if wrong := e.compare(t, s.Addr(), ""); len(wrong) > 0 {
				t.Errorf("after the import:\n%s", strings.Join(wrong, "\n"))
			}
			for _, repo := range []string{"team/app", "team/other", "solo"} {
				if wrong, err := askFor(http.DefaultClient, s.Addr(), repo, nil); err != nil || len(wrong) > 0 {
					t.Errorf("bundle of %s: %v", repo, err)
				}
				image := digest.FromBytes(e.holds[repo+"/manifests/1"])
				res, err := http.Get("http://" + s.Addr() + "/v2/" + repo + "/referrers/" + image.String())
				if err != nil {
					t.Fatal(err)
				}
				b, err := io.ReadAll(res.Body)
				res.Body.Close()
				if err != nil || !strings.Contains(string(b), "text/signature") {
					t.Errorf("referrers of %s: %s, %v", repo, b, err)
				}
			}
			if again := runImport(t, o); again.Bytes != 0 || again.Here != 9 || again.Blobs+again.Mounted+again.Manifests != 0 {
				t.Errorf("the second time: %+v", again)
			}
		})
	}
}

// Patterns bound what comes, and a list needs no catalog. A prefix of the target is kept.
func TestImportPatterns(t *testing.T) {
	e := newElsewhere(t)
	for name, from := range e.sources() {
		s := start(t, serve.Options{})
		if r := runImport(t, imports.Options{From: from, To: "http://" + s.Addr(), Repositories: []string{"team/*"}}); r.Repositories != 2 || len(r.Failures) > 0 {
			t.Errorf("%s: %+v", name, r)
		}
		if wrong := e.compare(t, s.Addr(), "team/"); len(wrong) > 0 {
			t.Errorf("%s: %v", name, wrong)
		}
		if r := runImport(t, imports.Options{From: from, To: "http://" + s.Addr() + "/old", Repositories: []string{"solo"}}); r.Repositories != 1 || len(r.Failures) > 0 {
			t.Errorf("%s: %+v", name, r)
		}
		if wrong, err := askFor(http.DefaultClient, s.Addr(), "old/solo", nil); err != nil || len(wrong) > 0 {
			t.Errorf("%s: %v", name, err)
		}
		http.DefaultClient.CloseIdleConnections()
	}
	if _, err := imports.Run(t.Context(), imports.Options{From: t.TempDir(), To: "http://" + e.addr}); err == nil || !strings.Contains(err.Error(), "no registry's directory") {
		t.Errorf("of an empty directory: %v", err)
	}
}

// What is damaged in the source is named, and all others come.
func TestImportOfDamage(t *testing.T) {
	e := newElsewhere(t)
	own := func(repo string) string { // the layer that only its images have
		var m ocispec.Manifest
		if err := json.Unmarshal(e.holds[repo+"/manifests/1"], &m); err != nil {
			t.Fatal(err)
		}
		d := m.Layers[1].Digest
		return filepath.Join(e.dir, "data/docker/registry/v2/blobs/sha256", d.Encoded()[:2], d.Encoded(), "data")
	}
	for repo, how := range map[string]func(string) error{"team/app": flip, "team/other": os.Remove} {
		if err := how(own(repo)); err != nil {
			t.Fatal(err)
		}
	}
	for name, from := range e.sources() {
		t.Run(name, func(t *testing.T) {
			s := start(t, serve.Options{Log: slog.New(slog.DiscardHandler)})
			defer http.DefaultClient.CloseIdleConnections()
			r := runImport(t, imports.Options{From: from, To: "http://" + s.Addr()})
			named := map[string]bool{}
			for _, f := range r.Failures {
				named[f.Image] = true
				if strings.HasPrefix(f.Image, "solo") {
					t.Errorf("%+v", f)
				}
			}
			for _, image := range []string{"team/app:1", "team/app:index", "team/other:1"} {
				if !named[image] {
					t.Errorf("%s is not named: %+v", image, r.Failures)
				}
			}
			if wrong := e.compare(t, s.Addr(), "solo/"); len(wrong) > 0 {
				t.Errorf("others: %v", wrong)
			}
		})
	}
}

// importChild has the source and the server of an import that ends itself half way.
const importChild = "FOIL_TEST_IMPORT_CHILD"

func TestImportChild(t *testing.T) {
	from, to, ok := strings.Cut(os.Getenv(importChild), " ")
	if !ok {
		t.Skip("it is run by TestImportIsKilled")
	}
	_, err := imports.Run(context.Background(), imports.Options{From: from, To: to, Parallel: 1, Progress: func(r imports.Report) {
		if r.Blobs >= 4 {
			killSelf()
		}
	}})
	t.Fatalf("it came to its end: %v", err)
}

// Killed, it is begun again, and sends what is not there.
func TestImportIsKilled(t *testing.T) {
	e := newElsewhere(t)
	for name, from := range e.sources() {
		t.Run(name, func(t *testing.T) {
			s := start(t, serve.Options{})
			defer http.DefaultClient.CloseIdleConnections()
			killedChild(t, "TestImportChild", importChild+"="+from+" http://"+s.Addr())
			r := runImport(t, imports.Options{From: from, To: "http://" + s.Addr()})
			if r.Blobs == 0 || r.Blobs >= 8 || len(r.Failures) > 0 { // 8 there are, and 4 had come
				t.Errorf("the rest: %+v", r)
			}
			if wrong := e.compare(t, s.Addr(), ""); len(wrong) > 0 {
				t.Errorf("after the import: %v", wrong)
			}
		})
	}
}

// An import needs the right to push, and has it from Docker's configuration.
func TestImportWithRights(t *testing.T) {
	e := newElsewhere(t)
	g := startGuarded(t, "", nil)
	t.Setenv("DOCKER_CONFIG", t.TempDir())
	login := func(user string) {
		secret := base64.StdEncoding.EncodeToString([]byte(user + ":password of " + user))
		writeFile(t, filepath.Join(os.Getenv("DOCKER_CONFIG"), "config.json"), fmt.Sprintf(`{"auths": {%q: {"auth": %q}}}`, g.Addr(), secret))
	}
	o := imports.Options{From: filepath.Join(e.dir, "data"), To: "http://" + g.Addr() + "/mine", Repositories: []string{"team/*"}}
	if r := runImport(t, o); r.Manifests > 0 || len(r.Failures) == 0 || !strings.Contains(r.Failures[0].Error, "401") {
		t.Errorf("without a login: %+v", r)
	}
	login("pull")
	if r := runImport(t, o); r.Manifests > 0 || len(r.Failures) == 0 {
		t.Errorf("without the right: %+v", r)
	}
	login("pusher")
	if r := runImport(t, o); r.Manifests != 10 || len(r.Failures) > 0 {
		t.Errorf("with the right: %+v", r)
	}
}
