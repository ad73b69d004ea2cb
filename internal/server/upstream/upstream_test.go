package upstream_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/format/layer/layertest"
	"hydrofoil.dev/foil/internal/logtest"
	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/catalog/sqlite"
	"hydrofoil.dev/foil/internal/server/objects"
	"hydrofoil.dev/foil/internal/server/registry"
	"hydrofoil.dev/foil/internal/server/upstream"
	"hydrofoil.dev/foil/internal/server/upstream/upstreamtest"
)

func TestMain(m *testing.M) {
	// The Docker configuration of whoever runs the tests is none of theirs.
	os.Setenv("DOCKER_CONFIG", "/nonexistent")
	os.Exit(m.Run())
}

// front is an accelerator with a registry on it.
type front struct {
	*upstream.Accelerator
	t     *testing.T
	url   string
	dir   string
	local catalog.Catalog
	store objects.Store
	log   *logtest.Buffer
}

func start(t *testing.T, o upstream.Options) *front {
	t.Helper()
	f := &front{t: t, dir: t.TempDir(), log: new(logtest.Buffer)}
	var err error
	if f.local, err = sqlite.Open(t.Context(), filepath.Join(f.dir, "catalog.db")); err != nil {
		t.Fatal(err)
	}
	if f.store, err = objects.OpenDir(filepath.Join(f.dir, "objects")); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := f.local.Close(); err != nil {
			t.Error(err)
		}
	})
	o.Dir, o.Catalog, o.Objects = filepath.Join(f.dir, "fetching"), f.local, f.store
	if o.Pause == 0 {
		o.Pause = time.Millisecond
	}
	o.Log = slog.New(slog.NewTextHandler(io.MultiWriter(f.log, t.Output()), nil))
	f.launch(o)
	return f
}

// launch starts the accelerator over what is there.
func (f *front) launch(o upstream.Options) {
	f.t.Helper()
	a, err := upstream.New(o)
	if err != nil {
		f.t.Fatal(err)
	}
	f.Accelerator = a
	reg, err := registry.New(registry.Options{
		Store: a.Store(), Catalog: a.Catalog(), Uploads: filepath.Join(f.dir, "uploads"), Log: o.Log,
	})
	if err != nil {
		f.t.Fatal(err)
	}
	s := httptest.NewServer(a.ReadOnly(reg))
	f.url = s.URL
	f.t.Cleanup(func() {
		s.Close()
		if err := errors.Join(reg.Close(), a.Close()); err != nil {
			f.t.Error(err)
		}
	})
}

type answer struct {
	status int
	header http.Header
	body   []byte
	err    error // of asking, or of reading the body
}

func (f *front) do(method, path string, header ...string) answer {
	f.t.Helper()
	req, err := http.NewRequestWithContext(f.t.Context(), method, f.url+"/v2/"+path, nil)
	if err != nil {
		f.t.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return answer{err: err} // it was given up before its first byte
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return answer{resp.StatusCode, resp.Header, b, err}
}

// get wants a success.
func (f *front) get(path string, header ...string) []byte {
	f.t.Helper()
	a := f.do("GET", path, header...)
	if a.err != nil || a.status >= 300 {
		f.t.Fatalf("GET %s: %d, %v; %.500s", path, a.status, a.err, a.body)
	}
	return a.body
}

// fails wants an error of the distribution API, and returns its message.
func (f *front) fails(path string, status int, code string) string {
	f.t.Helper()
	a := f.do("GET", path)
	var body struct {
		Errors []struct{ Code, Message string }
	}
	if err := json.Unmarshal(a.body, &body); err != nil || len(body.Errors) != 1 {
		f.t.Fatalf("GET %s: %d, no error of the API: %.300q", path, a.status, a.body)
	}
	if a.status != status || body.Errors[0].Code != code {
		f.t.Errorf("GET %s: %d %s, want %d %s; %s", path, a.status, body.Errors[0].Code, status, code, body.Errors[0].Message)
	}
	return body.Errors[0].Message
}

func noise(n int) []byte {
	b := make([]byte, n)
	r := rand.NewChaCha8([32]byte{byte(n)})
	_, _ = r.Read(b) // never fails
	return b
}

func wantCount(t *testing.T, r *upstreamtest.Registry, what string, n int) {
	t.Helper()
	if got := r.Asked(what); got != n {
		t.Errorf("the upstream was asked %d times for %s, want %d", got, what, n)
	}
}

func layerOf(t *testing.T, data string) layertest.Blob {
	return layertest.Layer{layertest.File("f", 0o644, data)}.Gzip(t)
}

// A plain client pulls through: the same bytes, each downloaded once.
func TestPullThrough(t *testing.T) {
	up := upstreamtest.Start(t)
	blob := layerOf(t, strings.Repeat("hello ", 10_000))
	desc := up.Image("team/app", "1", blob)
	f := start(t, upstream.Options{URL: up.URL + "/team"})
	for range 3 {
		byTag := f.do("GET", "app/manifests/1")
		if got := byTag.header.Get("Docker-Content-Digest"); got != desc.Digest.String() || digest.FromBytes(byTag.body) != desc.Digest {
			t.Fatalf("manifest %s, want %s", got, desc.Digest)
		}
		if got := byTag.header.Get("Content-Type"); got != desc.MediaType {
			t.Errorf("Content-Type %s", got)
		}
		if b := f.get("app/manifests/" + desc.Digest.String()); !bytes.Equal(b, byTag.body) {
			t.Error("another manifest by digest")
		}
		head := f.do("HEAD", "app/blobs/"+blob.Digest.String())
		if got := head.header.Get("Content-Length"); head.status != 200 || got != strconv.Itoa(len(blob.Bytes)) {
			t.Errorf("HEAD of the blob: %d, %s bytes", head.status, got)
		}
		if b := f.get("app/blobs/" + blob.Digest.String()); !bytes.Equal(b, blob.Bytes) {
			t.Error("another blob")
		}
		if b := f.get("app/blobs/"+blob.Digest.String(), "Range", "bytes=5-9"); !bytes.Equal(b, blob.Bytes[5:10]) {
			t.Error("another range")
		}
	}
	wantCount(t, up, "GET manifests", 1)
	wantCount(t, up, "HEAD manifests", 2)
	wantCount(t, up, "HEAD blobs", 1)
	wantCount(t, up, "GET blobs", 1)
	left, err := os.ReadDir(filepath.Join(f.dir, "fetching"))
	if err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

// A range of a blob that is not here comes when the whole was verified.
func TestRangeFirst(t *testing.T) {
	up := upstreamtest.Start(t)
	b := noise(300_000)
	d := up.Blob("app", b)
	f := start(t, upstream.Options{URL: up.URL})
	if got := f.get("app/blobs/"+d.String(), "Range", "bytes=100-199"); !bytes.Equal(got, b[100:200]) {
		t.Error("another range")
	}
	empty := up.Blob("app", nil)
	if got := f.get("app/blobs/" + empty.String()); len(got) != 0 {
		t.Errorf("the empty blob has %d bytes", len(got))
	}
}

func down(w http.ResponseWriter, _ *http.Request) bool {
	w.WriteHeader(http.StatusServiceUnavailable)
	return true
}

// What is here is served when the upstream fails in any of these ways; what is
// not here gives an error that says so.
func TestBridge(t *testing.T) {
	release := make(chan struct{})
	t.Cleanup(func() { close(release) })
	for name, fail := range map[string]func(w http.ResponseWriter, req *http.Request) bool{
		"down": down,
		"cut":  func(http.ResponseWriter, *http.Request) bool { panic(http.ErrAbortHandler) },
		"slow": func(_ http.ResponseWriter, req *http.Request) bool {
			select {
			case <-release:
			case <-req.Context().Done():
			}
			return true
		},
		"busy": func(w http.ResponseWriter, _ *http.Request) bool {
			w.Header().Set("Retry-After", "3600")
			upstreamtest.Fail(w, http.StatusTooManyRequests, "TOOMANYREQUESTS", "pull rate limit")
			return true
		},
		"page": func(w http.ResponseWriter, _ *http.Request) bool {
			w.Header().Set("Content-Type", "text/html; charset=utf-8")
			fmt.Fprint(w, "<html>We will be back soon</html>")
			return true
		},
	} {
		t.Run(name, func(t *testing.T) {
			up := upstreamtest.Start(t)
			blob := layerOf(t, "one")
			desc := up.Image("app", "1", blob)
			f := start(t, upstream.Options{URL: up.URL, TagTimeout: 300 * time.Millisecond})
			f.get("app/manifests/1")
			f.get("app/blobs/" + blob.Digest.String())
			f.get("app/tags/list")
			up.Intercept(fail)
			for _, ref := range []string{"1", desc.Digest.String()} {
				if got := digest.FromBytes(f.get("app/manifests/" + ref)); got != desc.Digest {
					t.Errorf("%s: manifest %s, want %s", ref, got, desc.Digest)
				}
			}
			f.get("app/blobs/" + blob.Digest.String())
			if !strings.Contains(f.log.String(), "a tag is served as it was") {
				t.Error("the log does not say that a tag may be old")
			}
			if name == "slow" {
				return // what is not here may take long
			}
			a := f.do("GET", "app/manifests/2")
			if a.status < 429 || !strings.Contains(string(a.body), "upstream "+up.URL+": manifest app:2: ") {
				t.Errorf("what is not here: %d %s", a.status, a.body)
			}
			if !strings.Contains(string(f.get("app/tags/list")), `["1"]`) {
				t.Error("the tags that are here are not listed")
			}
		})
	}
}

// What the upstream refuses is refused, though it is here, and each error says
// what to do.
func TestErrors(t *testing.T) {
	status := func(code int, c, message string) func(w http.ResponseWriter, req *http.Request) bool {
		return func(w http.ResponseWriter, _ *http.Request) bool {
			upstreamtest.Fail(w, code, c, message)
			return true
		}
	}
	blob := layerOf(t, "data")
	content := func(mediaType string, b []byte) func(w http.ResponseWriter, req *http.Request) bool {
		return func(w http.ResponseWriter, req *http.Request) bool {
			if req.Method == "HEAD" {
				return false
			}
			w.Header().Set("Content-Type", mediaType)
			_, _ = w.Write(b)
			return true
		}
	}
	manifest, blobs := "app/manifests/1", "app/blobs/"+blob.Digest.String()
	for name, test := range map[string]struct {
		path   string
		answer func(w http.ResponseWriter, req *http.Request) bool
		status int
		code   string
		says   []string
		tries  int // requests that the upstream gets; 0: not counted
	}{
		"forbidden":    {manifest, status(403, "DENIED", "no"), 403, "DENIED", []string{"403 Forbidden (DENIED: no)", "--upstream-auth", "manifest app:1"}, 1},
		"unauthorized": {manifest, status(401, "UNAUTHORIZED", "who are you"), 403, "DENIED", []string{"who are you", "--upstream-auth"}, 0},
		"unknown":      {manifest, status(404, "MANIFEST_UNKNOWN", "no such tag"), 404, "MANIFEST_UNKNOWN", []string{"no such tag", "check the name"}, 1},
		"no name":      {manifest, status(404, "NAME_UNKNOWN", "no repo"), 404, "NAME_UNKNOWN", nil, 1},
		"no blob":      {blobs, status(404, "BLOB_UNKNOWN", "no blob"), 404, "BLOB_UNKNOWN", []string{"blob app@" + blob.Digest.String()}, 1},
		"teapot":       {manifest, status(418, "TEA", "pot"), 502, "UPSTREAM", []string{"418"}, 1},
		"trouble":      {manifest, status(500, "UNKNOWN", "disk on fire"), 503, "UNAVAILABLE", []string{"disk on fire", "try again when"}, 4},
		"gateway":      {manifest, status(504, "", ""), 503, "UNAVAILABLE", []string{"504 Gateway Timeout"}, 4},
		"page":         {manifest, content("text/html", []byte("<html>log in here")), 502, "UPSTREAM", []string{"text/html", "<html>log in here", "look at the upstream's address"}, 1},
		"page as json": {manifest, content("application/json", []byte("<html>")), 502, "UPSTREAM", []string{"<html>"}, 1},
		"old schema":   {manifest, content("application/vnd.docker.distribution.manifest.v1+prettyjws", []byte("{}")), 502, "UPSTREAM", []string{"push the image to the upstream again"}, 1},
		"huge": {manifest, content(ocispec.MediaTypeImageManifest, bytes.Repeat([]byte(" "), 5<<20)), 502, "UPSTREAM",
			[]string{"more than 4194304 bytes"}, 1},
		"wrong manifest": {"app/manifests/" + blob.Digest.String(), content(ocispec.MediaTypeImageManifest, []byte(`{"config":{"mediaType":"a/b","digest":"`+blob.Digest.String()+`","size":1}}`)), 502, "UPSTREAM",
			[]string{"its digest is sha256:", "want " + blob.Digest.String()}, 1},
		"wrong size": {blobs, content("application/octet-stream", []byte("short")), 502, "UPSTREAM", []string{"it has 5 bytes, and was said to have"}, 0},
		"blob page":  {blobs, content("text/html", []byte("<html>")), 502, "UPSTREAM", []string{"text/html, which is no blob"}, 0},
		"busy": {manifest, func(w http.ResponseWriter, _ *http.Request) bool {
			w.Header().Set("Retry-After", "3600")
			upstreamtest.Fail(w, 429, "TOOMANYREQUESTS", "slow down")
			return true
		}, 429, "TOOMANYREQUESTS", []string{"slow down", "higher limit"}, 1},
		"busy for a moment": {manifest, func(w http.ResponseWriter, _ *http.Request) bool {
			w.Header().Set("Retry-After", "0")
			upstreamtest.Fail(w, 429, "TOOMANYREQUESTS", "slow down")
			return true
		}, 429, "TOOMANYREQUESTS", nil, 4},
	} {
		t.Run(name, func(t *testing.T) {
			up := upstreamtest.Start(t)
			up.Image("app", "1", blob)
			f := start(t, upstream.Options{URL: up.URL})
			up.Intercept(test.answer)
			message := f.fails(test.path, test.status, test.code)
			for _, s := range append(test.says, "upstream "+up.URL+": ") {
				if !strings.Contains(message, s) {
					t.Errorf("the message does not say %q: %s", s, message)
				}
			}
			if n := up.Asked("GET manifests") + up.Asked("GET blobs") + up.Asked("HEAD blobs"); test.tries != 0 && n != test.tries {
				t.Errorf("the upstream was asked %d times, want %d", n, test.tries)
			}
			// It has left nothing: the next try, of a sound upstream, works.
			up.Intercept(nil)
			if !strings.Contains(name, "wrong manifest") {
				f.get(test.path)
			}
		})
	}
}

// Refusals hold for what is here as well.
func TestDeniedIsNotBridged(t *testing.T) {
	up := upstreamtest.Start(t)
	up.Image("app", "1", layerOf(t, "one"))
	f := start(t, upstream.Options{URL: up.URL})
	f.get("app/manifests/1")
	up.Intercept(func(w http.ResponseWriter, req *http.Request) bool {
		upstreamtest.Fail(w, 403, "DENIED", "not any more")
		return true
	})
	f.fails("app/manifests/1", 403, "DENIED")
}

// A 404 of something in front of the registry does not make tags forgotten.
func TestForeign404(t *testing.T) {
	up := upstreamtest.Start(t)
	desc := up.Image("app", "1", layerOf(t, "one"))
	f := start(t, upstream.Options{URL: up.URL})
	f.get("app/manifests/1")
	up.Intercept(func(w http.ResponseWriter, req *http.Request) bool {
		http.Error(w, "no backend", 404)
		return true
	})
	f.fails("app/manifests/1", 404, "MANIFEST_UNKNOWN")
	if d, err := f.local.Tag(t.Context(), "app", "1"); err != nil || d != desc.Digest {
		t.Errorf("the tag is %s, %v", d, err)
	}
}

func TestPushesAreRefused(t *testing.T) {
	up := upstreamtest.Start(t)
	f := start(t, upstream.Options{URL: up.URL})
	for _, test := range [][2]string{
		{"POST", "app/blobs/uploads/"}, {"PUT", "app/manifests/1"}, {"PATCH", "app/blobs/uploads/x"},
		{"DELETE", "app/manifests/1"}, {"DELETE", "app/blobs/" + digest.FromString("").String()},
	} {
		a := f.do(test[0], test[1])
		if a.status != 405 || !strings.Contains(string(a.body), "UNSUPPORTED") || !strings.Contains(string(a.body), up.URL) {
			t.Errorf("%s: %d %s", test[0], a.status, a.body)
		}
	}
	f.get("")
}

func TestParseURL(t *testing.T) {
	for s, want := range map[string][2]string{
		"https://registry.example":              {"https://registry.example", ""},
		"https://registry.example/":             {"https://registry.example", ""},
		"http://registry.example:5000/team/sub": {"http://registry.example:5000", "team/sub"},
	} {
		base, prefix, err := upstream.ParseURL(s)
		if err != nil || base.String() != want[0] || prefix != want[1] {
			t.Errorf("%s: %v, %q, %v", s, base, prefix, err)
		}
	}
	for s, says := range map[string]string{
		"":                                 "want https://HOST",
		"registry.example":                 "want https://HOST",
		"ftp://registry.example":           "want https://HOST",
		"https://u:pw@registry.example":    "credentials are not read from the URL",
		"https://u:pw%zz@registry.example": "want https://HOST",
		"https://registry.example?x":       "nothing else",
		"https://registry.example/v2":      "leave out /v2",
		"https://registry.example/UP":      "no prefix of repository names",
	} {
		_, _, err := upstream.ParseURL(s)
		if err == nil || !strings.Contains(err.Error(), says) || strings.Contains(err.Error(), "pw") {
			t.Errorf("%s: %v, want %s", s, err, says)
		}
	}
}
