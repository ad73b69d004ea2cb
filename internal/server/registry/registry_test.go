package registry_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/catalog/sqlcat"
	"hydrofoil.dev/foil/internal/server/catalog/sqlite"
	"hydrofoil.dev/foil/internal/server/objects"
	"hydrofoil.dev/foil/internal/server/objects/objectstest"
	"hydrofoil.dev/foil/internal/server/registry"
)

// fixture is a registry that can be stopped and started again over the same
// directories.
type fixture struct {
	t     *testing.T
	dir   string
	opts  registry.Options // what differs from the defaults
	store objects.Store
	cat   *sqlcat.Catalog
	reg   *registry.Registry
	http  *httptest.Server

	mu     sync.Mutex
	pushed []string // guarded by mu: what OnManifest was told
}

// newFixture starts a registry; on a directory store unless opts has another.
func newFixture(t *testing.T, opts registry.Options) *fixture {
	t.Helper()
	f := &fixture{t: t, dir: t.TempDir(), opts: opts}
	f.start()
	t.Cleanup(f.stop)
	return f
}

func (f *fixture) start() {
	f.t.Helper()
	opts := f.opts
	var err error
	if f.cat, err = sqlite.Open(context.Background(), filepath.Join(f.dir, "catalog.db")); err != nil {
		f.t.Fatal(err)
	}
	if opts.Store == nil {
		if opts.Store, err = objects.OpenDir(filepath.Join(f.dir, "objects")); err != nil {
			f.t.Fatal(err)
		}
	}
	f.store = opts.Store
	if opts.Catalog == nil {
		opts.Catalog = f.cat
	}
	opts.Uploads = f.uploads()
	opts.Log = slog.New(slog.NewTextHandler(f.t.Output(), nil))
	opts.OnManifest = func(_ context.Context, repo string, m catalog.Manifest) {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.pushed = append(f.pushed, repo+"@"+m.Digest.String())
	}
	if f.reg, err = registry.New(opts); err != nil {
		f.t.Fatal(err)
	}
	f.http = httptest.NewServer(f.reg)
}

func (f *fixture) stop() {
	f.http.CloseClientConnections() // a test that failed may have left one waiting
	f.http.Close()
	if err := f.reg.Close(); err != nil {
		f.t.Error(err)
	}
	if err := f.cat.Close(); err != nil {
		f.t.Error(err)
	}
}

func (f *fixture) uploads() string { return filepath.Join(f.dir, "uploads") }

// answer is a response with its body.
type answer struct {
	*http.Response
	body []byte
}

// code is the first error code of the body, or empty.
func (a answer) code() string {
	var body struct {
		Errors []struct{ Code, Message string }
	}
	if json.Unmarshal(a.body, &body) != nil || len(body.Errors) == 0 {
		return ""
	}
	return body.Errors[0].Code
}

// do sends a request; header is of names and values in turn. target is a path
// or URL.
func (f *fixture) do(method, target string, body io.Reader, header ...string) answer {
	f.t.Helper()
	a, err := f.try(method, target, body, header...)
	if err != nil {
		f.t.Fatal(err)
	}
	return a
}

func (f *fixture) try(method, target string, body io.Reader, header ...string) (answer, error) {
	base, err := url.Parse(f.http.URL)
	if err != nil {
		return answer{}, err
	}
	u, err := base.Parse(target)
	if err != nil {
		return answer{}, err
	}
	req, err := http.NewRequest(method, u.String(), body)
	if err != nil {
		return answer{}, err
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	res, err := http.DefaultTransport.RoundTrip(req) // no redirects, no surprises
	if err != nil {
		return answer{}, err
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	return answer{res, b}, err
}

// want checks a status and, for errors, the code.
func (f *fixture) want(what string, a answer, status int, code ...string) {
	f.t.Helper()
	if a.StatusCode != status {
		f.t.Fatalf("%s: status %d, want %d; %s", what, a.StatusCode, status, a.body)
	}
	if len(code) > 0 && a.code() != code[0] {
		f.t.Errorf("%s: code %q, want %q; %s", what, a.code(), code[0], a.body)
	}
}

// begin starts an upload and returns its location.
func (f *fixture) begin(repo string) string {
	f.t.Helper()
	a := f.do("POST", "/v2/"+repo+"/blobs/uploads/", nil)
	f.want("begin upload", a, http.StatusAccepted)
	return a.Header.Get("Location")
}

// push pushes a blob in one request.
func (f *fixture) push(repo string, b []byte) digest.Digest {
	f.t.Helper()
	d := digest.FromBytes(b)
	f.want("push blob", f.do("POST", "/v2/"+repo+"/blobs/uploads/?digest="+d.String(), bytes.NewReader(b)), http.StatusCreated)
	return d
}

func (f *fixture) wantBlob(repo string, d digest.Digest, b []byte) {
	f.t.Helper()
	path := "/v2/" + repo + "/blobs/" + d.String()
	for _, method := range []string{"HEAD", "GET"} {
		a := f.do(method, path, nil)
		f.want(method+" blob", a, http.StatusOK)
		if got := a.Header.Get("Docker-Content-Digest"); got != d.String() {
			f.t.Errorf("%s blob: digest %q, want %s", method, got, d)
		}
		if got := a.Header.Get("Content-Length"); got != fmt.Sprint(len(b)) {
			f.t.Errorf("%s blob: Content-Length %q, want %d", method, got, len(b))
		}
		if method == "GET" && !bytes.Equal(a.body, b) {
			f.t.Errorf("GET blob: other bytes")
		}
	}
}

func (f *fixture) wantNoBlob(repo string, d digest.Digest) {
	f.t.Helper()
	f.want("GET blob", f.do("GET", "/v2/"+repo+"/blobs/"+d.String(), nil), http.StatusNotFound, "BLOB_UNKNOWN")
}

// wantFiles checks which files are in the directory of uploads.
func (f *fixture) wantUploads(n int) {
	f.t.Helper()
	entries, err := os.ReadDir(f.uploads())
	if err != nil {
		f.t.Fatal(err)
	}
	if len(entries) != 2*n { // the bytes and the state
		f.t.Errorf("files of uploads: %v, want those of %d", entries, n)
	}
}

// keys are the objects in the store.
func (f *fixture) keys() []string {
	f.t.Helper()
	var keys []string
	err := f.store.List(context.Background(), "", func(key string, _ int64) error {
		keys = append(keys, key)
		return nil
	})
	if err != nil {
		f.t.Fatal(err)
	}
	return keys
}

func (f *fixture) wantKeys(digests ...digest.Digest) {
	f.t.Helper()
	var want []string
	for _, d := range digests {
		want = append(want, catalog.BlobKey(d))
	}
	slices.Sort(want)
	if diff := cmp.Diff(want, f.keys()); diff != "" {
		f.t.Errorf("objects (-want +got):\n%s", diff)
	}
}

func random(n int) []byte {
	b := make([]byte, n)
	rand.NewChaCha8([32]byte{byte(n), byte(n >> 8)}).Read(b)
	return b
}

// eventually waits for what happens in the background.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%s: not within a minute", what)
		}
	}
}

func TestPing(t *testing.T) {
	f := newFixture(t, registry.Options{})
	for _, path := range []string{"/v2/", "/v2"} {
		for _, method := range []string{"GET", "HEAD"} {
			a := f.do(method, path, nil)
			f.want(method+" "+path, a, http.StatusOK)
			if got := a.Header.Get("Docker-Distribution-Api-Version"); got != "registry/2.0" {
				t.Errorf("%s %s: Docker-Distribution-Api-Version %q", method, path, got)
			}
		}
	}
}

func TestErrors(t *testing.T) {
	f := newFixture(t, registry.Options{})
	f.push("r", []byte("{}"))
	d := digest.FromString("not there")
	long := strings.Repeat("a/", 115)
	for _, test := range []struct {
		method, path string
		status       int
		code         string
	}{
		{"GET", "/", 404, "UNSUPPORTED"},
		{"GET", "/v2/r", 404, "UNSUPPORTED"},
		{"GET", "/v2/r/blobs/", 404, "UNSUPPORTED"},
		{"GET", "/v2/r/manifests/", 404, "UNSUPPORTED"},
		{"GET", "/v2/r/else/x", 404, "UNSUPPORTED"},
		{"GET", "/v2/r/tags/list/", 404, "UNSUPPORTED"},
		{"POST", "/v2/", 405, "UNSUPPORTED"},
		{"POST", "/v2/r/manifests/x", 405, "UNSUPPORTED"},
		{"PUT", "/v2/r/blobs/" + d.String(), 405, "UNSUPPORTED"},
		{"GET", "/v2/r/blobs/uploads/", 405, "UNSUPPORTED"},
		{"DELETE", "/v2/r/tags/list", 405, "UNSUPPORTED"},

		{"GET", "/v2/R/tags/list", 400, "NAME_INVALID"},
		{"GET", "/v2//tags/list", 400, "NAME_INVALID"},
		{"GET", "/v2/a//b/tags/list", 400, "NAME_INVALID"},
		{"GET", "/v2/-a/tags/list", 400, "NAME_INVALID"},
		{"GET", "/v2/a..b/tags/list", 400, "NAME_INVALID"},
		{"GET", "/v2/a___b/tags/list", 400, "NAME_INVALID"},
		{"GET", "/v2/" + long + "b/tags/list", 400, "NAME_INVALID"},
		{"GET", "/v2/a%2fb%20/tags/list", 400, "NAME_INVALID"},
		{"GET", "/v2/none/tags/list", 404, "NAME_UNKNOWN"},
		{"GET", "/v2/a--b__c.d/e/tags/list", 404, "NAME_UNKNOWN"},
		{"GET", "/v2/r/tags/list?n=x", 400, "UNSUPPORTED"},
		{"GET", "/v2/r/tags/list?n=-1", 400, "UNSUPPORTED"},

		{"GET", "/v2/r/blobs/x", 400, "DIGEST_INVALID"},
		{"GET", "/v2/r/blobs/sha256:abc", 400, "DIGEST_INVALID"},
		{"GET", "/v2/r/blobs/md5:d41d8cd98f00b204e9800998ecf8427e", 400, "DIGEST_INVALID"},
		{"GET", "/v2/r/blobs/" + digest.SHA384.FromString("x").String(), 400, "DIGEST_INVALID"},
		{"HEAD", "/v2/r/blobs/" + d.String(), 404, ""},
		{"GET", "/v2/r/blobs/" + d.String(), 404, "BLOB_UNKNOWN"},
		{"GET", "/v2/other/blobs/" + digest.FromString("{}").String(), 404, "BLOB_UNKNOWN"},
		{"DELETE", "/v2/r/blobs/" + d.String(), 404, "BLOB_UNKNOWN"},

		{"POST", "/v2/r/blobs/uploads/?digest=x", 400, "DIGEST_INVALID"},
		{"POST", "/v2/r/blobs/uploads/?digest-algorithm=md5", 400, "DIGEST_INVALID"},
		{"POST", "/v2/r/blobs/uploads/?mount=x", 400, "DIGEST_INVALID"},
		{"POST", "/v2/r/blobs/uploads/?mount=" + d.String() + "&from=..", 400, "NAME_INVALID"},
		{"GET", "/v2/r/blobs/uploads/x", 404, "BLOB_UPLOAD_UNKNOWN"},
		{"GET", "/v2/r/blobs/uploads/..x", 404, "BLOB_UPLOAD_UNKNOWN"},
		{"PATCH", "/v2/r/blobs/uploads/01234567-89ab-cdef-0123-456789abcdef", 404, "BLOB_UPLOAD_UNKNOWN"},
		{"PUT", "/v2/r/blobs/uploads/x?digest=" + d.String(), 404, "BLOB_UPLOAD_UNKNOWN"},
		{"PUT", "/v2/r/blobs/uploads/x", 400, "DIGEST_INVALID"},
		{"DELETE", "/v2/r/blobs/uploads/x", 404, "BLOB_UPLOAD_UNKNOWN"},

		{"GET", "/v2/r/manifests/x", 404, "MANIFEST_UNKNOWN"},
		{"HEAD", "/v2/r/manifests/x", 404, ""},
		{"GET", "/v2/r/manifests/" + d.String(), 404, "MANIFEST_UNKNOWN"},
		{"GET", "/v2/r/manifests/-x", 400, "MANIFEST_INVALID"},
		{"GET", "/v2/r/manifests/" + strings.Repeat("x", 128), 404, "MANIFEST_UNKNOWN"},
		{"GET", "/v2/r/manifests/" + strings.Repeat("x", 129), 400, "MANIFEST_INVALID"},
		{"DELETE", "/v2/r/manifests/x", 404, "MANIFEST_UNKNOWN"},
		{"DELETE", "/v2/none/manifests/" + d.String(), 404, "MANIFEST_UNKNOWN"},
		{"GET", "/v2/r/referrers/x", 400, "DIGEST_INVALID"},
	} {
		a := f.do(test.method, test.path, nil)
		if a.StatusCode != test.status || a.code() != test.code {
			t.Errorf("%s %s: %d %s, want %d %s; %s", test.method, test.path, a.StatusCode, a.code(), test.status, test.code, a.body)
		}
		if a.StatusCode == 405 && a.Header.Get("Allow") == "" {
			t.Errorf("%s %s: no Allow header", test.method, test.path)
		}
	}
}

func TestOptions(t *testing.T) {
	for _, opts := range []registry.Options{
		{},
		{Store: objectstest.NewMemory(), Uploads: t.TempDir()},
	} {
		if r, err := registry.New(opts); err == nil {
			r.Close()
			t.Errorf("a registry without all that it needs starts: %+v", opts)
		}
	}
}

func TestRanges(t *testing.T) {
	f := newFixture(t, registry.Options{})
	b := random(2048)
	d := f.push("r", b)
	path := "/v2/r/blobs/" + d.String()
	for _, test := range []struct {
		header     string
		status     int
		first, end int
	}{
		{"bytes=0-0", 206, 0, 1},
		{"bytes=500-1499", 206, 500, 1500},
		{"bytes=500-", 206, 500, 2048},
		{"bytes=-500", 206, 1548, 2048},
		{"bytes=-5000", 206, 0, 2048},
		{"bytes=2047-", 206, 2047, 2048},
		{"bytes=2000-5000", 206, 2000, 2048},
		{"bytes=0-9223372036854775807", 206, 0, 2048},
		{"bytes=2048-", 416, 0, 0},
		{"bytes=5000-6000", 416, 0, 0},
		{"bytes=500-0", 416, 0, 0},
		{"bytes=-0", 416, 0, 0},
		// Not understood, and so ignored.
		{"bytes=0-1,5-6", 200, 0, 2048},
		{"bytes=x-1", 200, 0, 2048},
		{"bytes=1-x", 200, 0, 2048},
		{"bytes=", 200, 0, 2048},
		{"bytes=-", 200, 0, 2048},
		{"bytes=0-99999999999999999999999", 200, 0, 2048},
		{"lines=1-2", 200, 0, 2048},
	} {
		a := f.do("GET", path, nil, "Range", test.header)
		if a.StatusCode != test.status {
			t.Errorf("%s: status %d, want %d", test.header, a.StatusCode, test.status)
			continue
		}
		contentRange := ""
		switch test.status {
		case 206:
			contentRange = fmt.Sprintf("bytes %d-%d/2048", test.first, test.end-1)
		case 416:
			contentRange = "bytes */2048"
			if a.code() != "SIZE_INVALID" {
				t.Errorf("%s: code %q", test.header, a.code())
			}
		}
		if got := a.Header.Get("Content-Range"); got != contentRange {
			t.Errorf("%s: Content-Range %q, want %q", test.header, got, contentRange)
		}
		if test.status != 416 && !bytes.Equal(a.body, b[test.first:test.end]) {
			t.Errorf("%s: other bytes", test.header)
		}
	}
	if a := f.do("GET", path, nil, "Range", "bytes=0-0", "If-Range", `"sha256:other"`); a.StatusCode != 200 || len(a.body) != 2048 {
		t.Errorf("If-Range of another blob: %d with %d bytes, want all of it", a.StatusCode, len(a.body))
	}
	empty := f.push("r", nil)
	f.want("range of nothing", f.do("GET", "/v2/r/blobs/"+empty.String(), nil, "Range", "bytes=0-"), 416)
}

func TestNotModified(t *testing.T) {
	f := newFixture(t, registry.Options{})
	d := f.push("r", []byte("{}"))
	m := f.putImage("r", "latest", "x")
	for _, path := range []string{"/v2/r/blobs/" + d.String(), "/v2/r/manifests/latest", "/v2/r/manifests/" + m.String()} {
		etag := f.do("HEAD", path, nil).Header.Get("Etag")
		if etag == "" {
			t.Errorf("%s has no ETag", path)
		}
		for header, status := range map[string]int{etag: 304, `"x", W/` + etag: 304, "*": 304, `"x"`: 200} {
			if a := f.do("GET", path, nil, "If-None-Match", header); a.StatusCode != status {
				t.Errorf("%s if not %s: status %d, want %d", path, header, a.StatusCode, status)
			}
		}
	}
}

func TestDeleteBlob(t *testing.T) {
	f := newFixture(t, registry.Options{})
	b := random(100)
	d := f.push("r", b)
	f.push("s", b)
	f.want("delete", f.do("DELETE", "/v2/r/blobs/"+d.String(), nil), http.StatusAccepted)
	f.wantNoBlob("r", d)
	f.wantBlob("s", d, b)
	f.want("delete again", f.do("DELETE", "/v2/r/blobs/"+d.String(), nil), http.StatusNotFound, "BLOB_UNKNOWN")
	f.wantKeys(d)
	f.want("delete the last", f.do("DELETE", "/v2/s/blobs/"+d.String(), nil), http.StatusAccepted)
	f.wantKeys()
	f.push("s", b)
	f.wantBlob("s", d, b)
}

// A blob whose object is gone or cut, against all promises, is one that the
// repository does not have, so that clients push it again.
func TestLostObject(t *testing.T) {
	for _, method := range []string{"GET", "HEAD"} {
		f := newFixture(t, registry.Options{})
		b := random(10)
		d := f.push("r", b)
		f.push("s", b)
		for _, cut := range []bool{false, true} {
			if err := f.store.Delete(t.Context(), catalog.BlobKey(d)); err != nil {
				t.Fatal(err)
			}
			if cut {
				w, err := f.store.Create(t.Context(), catalog.BlobKey(d))
				if err != nil {
					t.Fatal(err)
				}
				if _, err := w.Write(b[:5]); err != nil {
					t.Fatal(err)
				}
				if err := w.Commit(); err != nil {
					t.Fatal(err)
				}
			}
			if a := f.do("POST", "/v2/new/blobs/uploads/?mount="+d.String()+"&from=s", nil); a.StatusCode != http.StatusAccepted {
				t.Errorf("cut %v: mounted with status %d", cut, a.StatusCode)
			}
			if a := f.do(method, "/v2/r/blobs/"+d.String(), nil); a.StatusCode != http.StatusNotFound {
				t.Errorf("cut %v: %s: status %d", cut, method, a.StatusCode)
			}
			f.push("r", b)
			f.wantBlob("r", d, b)
			f.wantBlob("s", d, b)
		}
	}
}

// A blob that cannot be read to its end breaks the connection: a client that
// got some of it must not take it for all.
func TestBrokenObject(t *testing.T) {
	m := objectstest.NewMemory()
	f := newFixture(t, registry.Options{Store: m})
	d := f.push("r", random(1<<20))
	reads := 0
	m.Inject(func(_ int, op objectstest.Op, _ string) error {
		if op == objectstest.OpRead {
			if reads++; reads > 3 {
				return fmt.Errorf("the disk failed")
			}
		}
		return nil
	})
	if a, err := f.try("GET", "/v2/r/blobs/"+d.String(), nil); err == nil {
		t.Errorf("status %d and %d bytes, and no error", a.StatusCode, len(a.body))
	}
}

func TestOrphans(t *testing.T) {
	f := newFixture(t, registry.Options{})
	kept := f.push("r", []byte("kept"))
	f.stop()
	// As a crash between rename and catalog leaves it.
	orphan := digest.FromString("orphan")
	store, err := objects.OpenDir(filepath.Join(f.dir, "objects"))
	if err != nil {
		t.Fatal(err)
	}
	for _, key := range []string{catalog.BlobKey(orphan), "blobs/what/is/this", "packs/p"} {
		w, err := store.Create(t.Context(), key)
		if err != nil {
			t.Fatal(err)
		}
		if err := w.Commit(); err != nil {
			t.Fatal(err)
		}
	}
	f.start()
	want := []string{catalog.BlobKey(kept), "blobs/what/is/this", "packs/p"}
	eventually(t, "the orphan is removed", func() bool { return slices.Equal(f.keys(), want) })
}

// putImage pushes an image with a config and a layer made from s.
func (f *fixture) putImage(repo, ref, s string) digest.Digest {
	f.t.Helper()
	b := f.image(repo, s)
	a := f.do("PUT", "/v2/"+repo+"/manifests/"+ref, bytes.NewReader(b), "Content-Type", ocispec.MediaTypeImageManifest)
	f.want("put image", a, http.StatusCreated)
	return digest.FromBytes(b)
}

// image pushes the blobs of an image and returns its manifest.
func (f *fixture) image(repo, s string) []byte {
	f.t.Helper()
	config, layer := []byte(`{"made from":"`+s+`"}`), []byte("layer "+s)
	return marshal(f.t, ocispec.Manifest{
		MediaType: ocispec.MediaTypeImageManifest,
		Config:    ocispec.Descriptor{MediaType: ocispec.MediaTypeImageConfig, Digest: f.push(repo, config), Size: int64(len(config))},
		Layers:    []ocispec.Descriptor{{MediaType: ocispec.MediaTypeImageLayer, Digest: f.push(repo, layer), Size: int64(len(layer))}},
	})
}

func marshal(t *testing.T, v any) []byte {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return b
}
