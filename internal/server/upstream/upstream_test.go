package upstream_test

import (
	"bytes"
	"encoding/json"
	"encoding/pem"
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
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/catalog/sqlite"
	"hydrofoil.dev/foil/internal/server/layer/layertest"
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
	log   *lockedBuffer
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

func start(t *testing.T, o upstream.Options) *front {
	t.Helper()
	f := &front{t: t, dir: t.TempDir(), log: new(lockedBuffer)}
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

func pemOf(der []byte) []byte { return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}) }

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

func TestTagMoves(t *testing.T) {
	for _, test := range []struct {
		name  string
		ttl   time.Duration
		moves bool
	}{{"always", 0, true}, {"fresh", time.Hour, false}} {
		t.Run(test.name, func(t *testing.T) {
			up := upstreamtest.Start(t)
			before := up.Image("app", "1", layerOf(t, "one"))
			f := start(t, upstream.Options{URL: up.URL, TagTTL: test.ttl})
			f.get("app/manifests/1")
			after := up.Image("app", "1", layerOf(t, "two"))
			want := before.Digest
			if test.moves {
				want = after.Digest
			}
			for range 2 {
				if got := digest.FromBytes(f.get("app/manifests/1")); got != want {
					t.Errorf("the tag names %s, want %s", got, want)
				}
			}
			// Whatever the tag names, its old manifest stays.
			f.get("app/manifests/" + before.Digest.String())
			if !test.moves {
				wantCount(t, up, "HEAD manifests", 0)
			}
			// A tag that goes is not served from here.
			up.Delete("app", "1")
			if test.moves {
				f.fails("app/manifests/1", 404, "MANIFEST_UNKNOWN")
				up.Intercept(down)
				f.fails("app/manifests/1", 503, "UNAVAILABLE")
			}
		})
	}
}

// Registries that do not say the digest in answer to HEAD are asked by GET.
func TestTagWithoutDigest(t *testing.T) {
	up := upstreamtest.Start(t)
	up.Image("app", "1", layerOf(t, "one"))
	up.Intercept(func(w http.ResponseWriter, req *http.Request) bool {
		if req.Method == "HEAD" {
			w.WriteHeader(200)
		}
		return req.Method == "HEAD"
	})
	f := start(t, upstream.Options{URL: up.URL})
	f.get("app/manifests/1")
	after := up.Image("app", "1", layerOf(t, "two"))
	if got := digest.FromBytes(f.get("app/manifests/1")); got != after.Digest {
		t.Errorf("the tag names %s, want %s", got, after.Digest)
	}
	wantCount(t, up, "GET manifests", 2)
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

// cutter lets through so many bytes of a body.
type cutter struct {
	http.ResponseWriter
	left int
}

func (c *cutter) Write(p []byte) (int, error) {
	n, err := c.ResponseWriter.Write(p[:min(len(p), c.left)])
	if c.left -= n; c.left == 0 && err == nil {
		_ = http.NewResponseController(c.ResponseWriter).Flush() // they arrive
		panic(http.ErrAbortHandler)
	}
	return n, err
}

// breakable is an upstream whose blobs break after a number of bytes.
func breakable(t *testing.T, after func(n int) int, ranges bool) (up *upstreamtest.Registry, gets func() []string) {
	up = upstreamtest.New()
	var mu sync.Mutex
	var asked []string
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if req.Method == "GET" && strings.Contains(req.URL.Path, "/blobs/") {
			mu.Lock()
			asked = append(asked, req.Header.Get("Range"))
			n := after(len(asked))
			mu.Unlock()
			if !ranges {
				req.Header.Del("Range")
			}
			if n > 0 {
				w = &cutter{w, n}
			}
		}
		up.ServeHTTP(w, req)
	}))
	t.Cleanup(s.Close)
	up.URL = s.URL
	return up, func() []string {
		mu.Lock()
		defer mu.Unlock()
		return asked
	}
}

func TestResume(t *testing.T) {
	b := noise(1_000_000)
	for _, ranges := range []bool{true, false} {
		t.Run(fmt.Sprint("ranges ", ranges), func(t *testing.T) {
			// It breaks more often than what brings nothing is tried.
			up, gets := breakable(t, func(n int) int {
				switch {
				case n > 8:
					return 0
				case ranges:
					return 120_000
				}
				return n * 110_000
			}, ranges)
			d := up.Blob("app", b)
			f := start(t, upstream.Options{URL: up.URL})
			if got := f.get("app/blobs/" + d.String()); !bytes.Equal(got, b) {
				t.Error("other bytes came")
			}
			if n := len(gets()); n != 9 {
				t.Errorf("asked %d times: %q", n, gets())
			}
			for i, r := range gets()[1:] {
				if !strings.HasPrefix(r, "bytes=") || r == "bytes=0-" {
					t.Errorf("request %d asked for the range %q", i+1, r)
				}
			}
		})
	}
}

// One that breaks without bringing anything is given up; what came stays for
// the next accelerator.
func TestResumeLater(t *testing.T) {
	b := noise(500_000)
	for _, damaged := range []bool{false, true} {
		t.Run(fmt.Sprint("damaged ", damaged), func(t *testing.T) {
			var sound sync.Map
			up, gets := breakable(t, func(n int) int {
				if _, ok := sound.Load(0); ok {
					return 0
				}
				if n == 1 {
					return 200_000
				}
				return 1
			}, true)
			up.Intercept(func(w http.ResponseWriter, req *http.Request) bool {
				if _, ok := sound.Load(0); !ok && req.Header.Get("Range") != "" {
					panic(http.ErrAbortHandler)
				}
				return false
			})
			d := up.Blob("app", b)
			f := start(t, upstream.Options{URL: up.URL})
			if a := f.do("GET", "app/blobs/"+d.String()); a.status == 200 && a.err == nil {
				t.Fatalf("a blob of %d bytes came whole from an upstream that breaks", len(a.body))
			}
			if err := f.Close(); err != nil {
				t.Fatal(err)
			}
			part := filepath.Join(f.dir, "fetching", strings.Replace(d.String(), ":", "-", 1))
			left, err := os.ReadFile(part)
			if err != nil || len(left) == 0 || !bytes.HasPrefix(b, left) {
				t.Fatalf("%d bytes were left, %v", len(left), err)
			}
			if damaged {
				left[100] ^= 1
				if err := os.WriteFile(part, left, 0o600); err != nil {
					t.Fatal(err)
				}
			}
			sound.Store(0, 0)
			before := len(gets())
			f.launch(upstream.Options{URL: up.URL, Dir: filepath.Join(f.dir, "fetching"), Catalog: f.local, Objects: f.store, Log: slog.New(slog.NewTextHandler(t.Output(), nil))})
			a := f.do("GET", "app/blobs/"+d.String())
			if damaged && a.err == nil && !bytes.Equal(a.body, b) {
				t.Fatalf("other bytes came whole")
			}
			// Who had read some of what was wrong reads again.
			if got := f.get("app/blobs/" + d.String()); !bytes.Equal(got, b) {
				t.Error("other bytes came")
			}
			want := []string{fmt.Sprintf("bytes=%d-", len(left))}
			if damaged {
				want = append(want, "")
			}
			// The first reader's going may have ended the download once more.
			if diff := cmp.Diff(want, gets()[before:][:len(want)]); diff != "" {
				t.Errorf("ranges asked for (-want +got):\n%s", diff)
			}
		})
	}
}

// What a download brought is kept for the next one, but not when whoever read it
// found the disk full.
func TestFullDiskKeepsNothing(t *testing.T) {
	for _, c := range []struct {
		name string
		err  error
		kept bool
	}{
		{"full", fmt.Errorf("write pack: %w", syscall.ENOSPC), false},
		{"quota", fmt.Errorf("write pack: %w", syscall.EDQUOT), false},
		{"other", errors.New("the client went away"), true},
	} {
		t.Run(c.name, func(t *testing.T) {
			up := upstreamtest.Start(t)
			b := noise(400_000)
			d := up.Blob("app", b)
			f := start(t, upstream.Options{URL: up.URL})
			f.do("HEAD", "app/blobs/"+d.String()) // the repository is known to hold it
			up.Intercept(func(w http.ResponseWriter, req *http.Request) bool {
				w.Header().Set("Content-Length", strconv.Itoa(len(b)))
				_, _ = w.Write(b[:100_000])
				_ = http.NewResponseController(w).Flush()
				<-req.Context().Done()
				return true
			})
			fetching := filepath.Join(f.dir, "fetching")
			earlier := filepath.Join(fetching, "sha256-0123")
			if err := os.WriteFile(earlier, []byte("of a download that broke off"), 0o600); err != nil {
				t.Fatal(err)
			}
			release := f.Want(t.Context(), []digest.Digest{d})
			r, err := f.Store().Open(t.Context(), catalog.BlobKey(d), 0, -1)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := io.ReadFull(r, make([]byte, 100_000)); err != nil {
				t.Fatal(err)
			}
			if err := r.Close(); err != nil {
				t.Fatal(err)
			}
			f.Full(c.err)
			release()
			if err := f.Close(); err != nil { // the download has ended
				t.Fatal(err)
			}
			left, err := os.ReadDir(fetching)
			if want := map[bool]int{true: 2}[c.kept]; err != nil || len(left) != want {
				t.Errorf("left behind: %v, %v, want %d files", left, err, want)
			}
		})
	}
}

// Nobody gets a blob with another digest whole, and it is not kept.
func TestWrongBlob(t *testing.T) {
	up := upstreamtest.Start(t)
	b := noise(400_000)
	d := up.Blob("app", b)
	bad := bytes.Clone(b)
	bad[399_999] ^= 1
	up.Intercept(func(w http.ResponseWriter, req *http.Request) bool {
		if req.Method != "GET" {
			return false
		}
		w.Header().Set("Content-Length", strconv.Itoa(len(bad)))
		_, _ = w.Write(bad)
		return true
	})
	f := start(t, upstream.Options{URL: up.URL})
	if a := f.do("GET", "app/blobs/"+d.String()); a.status == 200 && a.err == nil {
		t.Errorf("%d wrong bytes were served as a whole", len(a.body))
	} else if len(a.body) == len(b) {
		t.Error("the last byte was sent")
	}
	if !strings.Contains(f.log.String(), "its bytes have the digest "+digest.FromBytes(bad).String()) {
		t.Error("the log does not say what is wrong")
	}
	if _, err := f.store.Stat(t.Context(), catalog.BlobKey(d)); !errors.Is(err, objects.ErrNotFound) {
		t.Errorf("the object: %v, want none", err)
	}
	up.Intercept(nil)
	if got := f.get("app/blobs/" + d.String()); !bytes.Equal(got, b) {
		t.Error("other bytes came")
	}
}

// A download that brings nothing is begun again where it is.
func TestStall(t *testing.T) {
	up := upstreamtest.Start(t)
	b := noise(300_000)
	d := up.Blob("app", b)
	up.Intercept(func(w http.ResponseWriter, req *http.Request) bool {
		if req.Method != "GET" || req.Header.Get("Range") != "" {
			return false
		}
		w.Header().Set("Content-Length", strconv.Itoa(len(b)))
		_, _ = w.Write(b[:100_000])
		_ = http.NewResponseController(w).Flush()
		<-req.Context().Done()
		return true
	})
	f := start(t, upstream.Options{URL: up.URL, Stall: 500 * time.Millisecond})
	if got := f.get("app/blobs/" + d.String()); !bytes.Equal(got, b) {
		t.Error("other bytes came")
	}
}

// A hundred clients at once are one download.
func TestSingleFlight(t *testing.T) {
	up := upstreamtest.Start(t)
	blob := layerOf(t, string(noise(400_000)))
	desc := up.Image("app", "1", blob)
	f := start(t, upstream.Options{URL: up.URL})
	var wg sync.WaitGroup
	for range 100 {
		wg.Go(func() {
			a := f.do("GET", "app/manifests/1")
			if digest.FromBytes(a.body) != desc.Digest {
				t.Errorf("another manifest: %d", a.status)
			}
			if a := f.do("GET", "app/blobs/"+blob.Digest.String()); !bytes.Equal(a.body, blob.Bytes) {
				t.Errorf("another blob: %d, %v", a.status, a.err)
			}
		})
	}
	wg.Wait()
	wantCount(t, up, "GET manifests", 1)
	wantCount(t, up, "HEAD blobs", 1)
	wantCount(t, up, "GET blobs", 1)
}

// A reader that goes leaves the download to the others; when all have gone it
// ends, and the next one goes on with it.
func TestLeave(t *testing.T) {
	up := upstreamtest.Start(t)
	b := noise(300_000)
	d := up.Blob("app", b)
	ended := make(chan struct{})
	up.Intercept(func(w http.ResponseWriter, req *http.Request) bool {
		if req.Method != "GET" || req.Header.Get("Range") != "" {
			return false
		}
		w.Header().Set("Content-Length", strconv.Itoa(len(b)))
		_, _ = w.Write(b[:100_000])
		_ = http.NewResponseController(w).Flush()
		<-req.Context().Done()
		close(ended)
		return true
	})
	f := start(t, upstream.Options{URL: up.URL})
	if _, err := f.Catalog().Blob(t.Context(), "app", d); err != nil {
		t.Fatal(err)
	}
	open := func() io.ReadCloser {
		t.Helper()
		r, err := f.Store().Open(t.Context(), catalog.BlobKey(d), 0, -1)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	one, two := open(), open()
	one.Close()
	buf := make([]byte, 50_000)
	if _, err := io.ReadFull(two, buf); err != nil || !bytes.Equal(buf, b[:50_000]) {
		t.Fatalf("the reader that stays: %v", err)
	}
	select {
	case <-ended:
		t.Error("the download ended while it was read")
	default:
	}
	two.Close()
	two.Close() // no harm
	<-ended
	three := open()
	defer three.Close()
	if got, err := io.ReadAll(three); err != nil || !bytes.Equal(got, b) {
		t.Errorf("the next reader: %v", err)
	}
}

// A digest is no permission: bytes that are here because one repository has them
// are no other repository's.
func TestDigestIsNoPermission(t *testing.T) {
	up := upstreamtest.Start(t)
	secret := layerOf(t, "secret")
	up.Image("private", "1", secret)
	f := start(t, upstream.Options{URL: up.URL})
	m := f.get("private/manifests/1")
	f.get("private/blobs/" + secret.Digest.String())
	// Somebody pushed the manifest into a repository of his, at a registry that
	// does not look what it refers to.
	up.Manifest("public", ocispec.MediaTypeImageManifest, json.RawMessage(m), "1")
	f.get("public/manifests/1")
	f.fails("public/blobs/"+secret.Digest.String(), 404, "BLOB_UNKNOWN")
	f.fails("public/manifests/"+secret.Digest.String(), 404, "MANIFEST_UNKNOWN")
	// What the repository has as well costs one question, and no download.
	up.Blob("public", secret.Bytes)
	f.get("public/blobs/" + secret.Digest.String())
	wantCount(t, up, "GET blobs", 1)
}

// Names that clients make up do not become another request to the upstream.
func TestNames(t *testing.T) {
	up := upstreamtest.Start(t)
	asked := 0
	up.Intercept(func(http.ResponseWriter, *http.Request) bool { asked++; return false })
	f := start(t, upstream.Options{URL: up.URL})
	cat, d := f.Catalog(), digest.FromString("x")
	for _, repo := range []string{"../admin", "a/../../b", "a?x=", "A", "", "a b", "a%2f"} {
		_, err := cat.Tag(t.Context(), repo, "1")
		_, err2 := cat.Manifest(t.Context(), repo, d)
		_, err3 := cat.Blob(t.Context(), repo, d)
		for _, err := range []error{err, err2, err3} {
			if !errors.Is(err, catalog.ErrNotFound) {
				t.Errorf("%q: %v", repo, err)
			}
		}
	}
	for _, tag := range []string{"../x", "", "a/b", "a?b"} {
		if _, err := cat.Tag(t.Context(), "app", tag); !errors.Is(err, catalog.ErrNotFound) {
			t.Errorf("tag %q: %v", tag, err)
		}
	}
	if asked > 0 {
		t.Errorf("the upstream was asked %d times", asked)
	}
}

func TestCredentials(t *testing.T) {
	dir := t.TempDir()
	write := func(name, content string) string {
		t.Helper()
		name = filepath.Join(dir, name)
		if err := os.WriteFile(name, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		return name
	}
	good := upstreamtest.User + ":" + upstreamtest.Password
	for _, scheme := range []string{"basic", "bearer"} {
		t.Run(scheme, func(t *testing.T) {
			up := upstreamtest.Start(t)
			blob := layerOf(t, "data")
			up.Image("app", "1", blob)
			up.Demand(scheme)
			pull := func(f *front) {
				t.Helper()
				f.get("app/manifests/1")
				f.get("app/blobs/" + blob.Digest.String())
			}
			pull(start(t, upstream.Options{URL: up.URL, Auth: write("line", good+"\n")}))
			host := strings.TrimPrefix(up.URL, "http://")
			docker := fmt.Sprintf(`{"auths":{%q:{"username":%q,"password":%q}}}`, host, upstreamtest.User, upstreamtest.Password)
			pull(start(t, upstream.Options{URL: up.URL, Auth: write("config.json", docker)}))
			t.Setenv("DOCKER_CONFIG", dir)
			pull(start(t, upstream.Options{URL: up.URL}))
			t.Setenv("DOCKER_CONFIG", "/nonexistent")
			t.Setenv(upstream.AuthEnv, good)
			pull(start(t, upstream.Options{URL: up.URL}))
			t.Setenv(upstream.AuthEnv, "")
			start(t, upstream.Options{URL: up.URL}).fails("app/manifests/1", 403, "DENIED")

			// Wrong ones are told, and no longer once they have been corrected.
			file := write("wrong", "somebody:wrong")
			f := start(t, upstream.Options{URL: up.URL, Auth: file})
			if s := f.fails("app/manifests/1", 403, "DENIED"); strings.Contains(s, "wrong\"") || strings.Contains(s, ":wrong") {
				t.Errorf("the message has the password: %s", s)
			}
			write("wrong", good)
			pull(f)
			write("wrong", "no colon")
			up.Expire()
		})
	}
}

// A token is asked for once, and again when it has expired.
func TestTokenExpires(t *testing.T) {
	up := upstreamtest.Start(t)
	blob := layerOf(t, "data")
	up.Image("app", "1", blob)
	up.Demand("bearer")
	t.Setenv(upstream.AuthEnv, upstreamtest.User+":"+upstreamtest.Password)
	f := start(t, upstream.Options{URL: up.URL})
	for range 3 {
		f.get("app/manifests/1")
	}
	wantCount(t, up, "GET token", 1)
	up.Expire()
	f.get("app/manifests/1")
	f.get("app/blobs/" + blob.Digest.String())
	wantCount(t, up, "GET token", 2)
}

// Blobs may be elsewhere, where nobody gets the registry's credentials.
func TestRedirect(t *testing.T) {
	blob := layerOf(t, "data")
	store := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		switch {
		case req.Header.Get("Authorization") != "":
			t.Error("the store of the blobs gets the registry's credentials")
			fallthrough
		case req.Method == "HEAD": // signed for GET
			w.WriteHeader(http.StatusForbidden)
		default:
			http.ServeContent(w, req, "", time.Time{}, bytes.NewReader(blob.Bytes))
		}
	}))
	defer store.Close()
	up := upstreamtest.Start(t)
	up.Image("app", "1", blob)
	up.Demand("basic")
	up.Intercept(func(w http.ResponseWriter, req *http.Request) bool {
		if !strings.Contains(req.URL.Path, "/blobs/") {
			return false
		}
		http.Redirect(w, req, store.URL+"/bucket/x?signature=secret", http.StatusTemporaryRedirect)
		return true
	})
	t.Setenv(upstream.AuthEnv, upstreamtest.User+":"+upstreamtest.Password)
	f := start(t, upstream.Options{URL: up.URL})
	if got := f.get("app/blobs/" + blob.Digest.String()); !bytes.Equal(got, blob.Bytes) {
		t.Error("another blob")
	}
	// What the store cannot give is no reason to look for other credentials, and
	// its address, which is a permission, is not told.
	store.Close()
	other := layerOf(t, "other")
	up.Blob("app", other.Bytes)
	if s := f.fails("app/blobs/"+other.Digest.String(), 503, "UNAVAILABLE"); strings.Contains(s, "signature") {
		t.Errorf("the message has the store's address: %s", s)
	}
}

func TestTLS(t *testing.T) {
	up := upstreamtest.New()
	s := httptest.NewTLSServer(up)
	defer s.Close()
	up.Image("app", "1", layerOf(t, "data"))
	f := start(t, upstream.Options{URL: s.URL})
	if m := f.fails("app/manifests/1", 503, "UNAVAILABLE"); !strings.Contains(m, "--upstream-ca") {
		t.Errorf("the message says nothing about certificates: %s", m)
	}
	ca := filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(ca, pemOf(s.Certificate().Raw), 0o600); err != nil {
		t.Fatal(err)
	}
	start(t, upstream.Options{URL: s.URL, CA: ca}).get("app/manifests/1")

	plain := upstreamtest.Start(t)
	f = start(t, upstream.Options{URL: strings.Replace(plain.URL, "http:", "https:", 1)})
	if m := f.fails("app/manifests/1", 503, "UNAVAILABLE"); !strings.Contains(m, "write http://") {
		t.Errorf("the message says nothing about plain HTTP: %s", m)
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

func TestLists(t *testing.T) {
	up := upstreamtest.Start(t)
	var tags []string
	for i := range 7 {
		tags = append(tags, fmt.Sprintf("t%d", i))
		up.Image("team/app", tags[i], layerOf(t, "data"))
	}
	up.Image("other/app", "1", layerOf(t, "data"))
	up.Image("team/zoo", "1", layerOf(t, "data"))
	f := start(t, upstream.Options{URL: up.URL + "/team"})
	list := func(path, key string) (names []string, link string) {
		t.Helper()
		a := f.do("GET", path)
		var body map[string]json.RawMessage
		if err := json.Unmarshal(a.body, &body); err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(body[key], &names); err != nil {
			t.Fatalf("%s: %s", path, a.body)
		}
		return names, a.header.Get("Link")
	}
	got, _ := list("app/tags/list", "tags")
	if diff := cmp.Diff(tags, got); diff != "" {
		t.Errorf("tags (-want +got):\n%s", diff)
	}
	got, link := list("app/tags/list?n=3&last=t1", "tags")
	if diff := cmp.Diff(tags[2:5], got); diff != "" || !strings.Contains(link, "last=t4") {
		t.Errorf("a page of tags, link %s (-want +got):\n%s", link, diff)
	}
	got, _ = list("_catalog", "repositories")
	if diff := cmp.Diff([]string{"app", "zoo"}, got); diff != "" {
		t.Errorf("repositories (-want +got):\n%s", diff)
	}
	f.fails("nothing/tags/list", 404, "NAME_UNKNOWN")
}

func TestReferrers(t *testing.T) {
	up := upstreamtest.Start(t)
	subject := up.Image("app", "1", layerOf(t, "data"))
	m := ocispec.Manifest{MediaType: ocispec.MediaTypeImageManifest, ArtifactType: "application/signature",
		Config: ocispec.DescriptorEmptyJSON, Layers: []ocispec.Descriptor{}, Subject: &subject}
	signature := up.Manifest("app", m.MediaType, m)
	f := start(t, upstream.Options{URL: up.URL})
	want := func(query string, digests ...digest.Digest) {
		t.Helper()
		var index ocispec.Index
		if err := json.Unmarshal(f.get("app/referrers/"+subject.Digest.String()+query), &index); err != nil {
			t.Fatal(err)
		}
		var got []digest.Digest
		for _, d := range index.Manifests {
			got = append(got, d.Digest)
		}
		if diff := cmp.Diff(digests, got); diff != "" {
			t.Errorf("referrers%s (-want +got):\n%s", query, diff)
		}
	}
	want("", signature.Digest)
	want("?artifactType=application/signature", signature.Digest)
	want("?artifactType=application/other")
	up.Intercept(down)
	want("", signature.Digest) // what is here
	// An upstream without the API says so, and clients take its tags instead.
	up.Intercept(func(w http.ResponseWriter, req *http.Request) bool {
		if strings.Contains(req.URL.Path, "/referrers/") {
			http.NotFound(w, req)
		}
		return strings.Contains(req.URL.Path, "/referrers/")
	})
	f.fails("app/referrers/"+subject.Digest.String(), 404, "NAME_UNKNOWN")
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
