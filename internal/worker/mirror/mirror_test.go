package mirror

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/pull"
	"hydrofoil.dev/foil/internal/worker/remote"
)

func blob(mediaType, text string) bundle.Blob {
	return bundle.Blob{Digest: digest.FromString(text), MediaType: mediaType, Bytes: []byte(text)}
}

// fake is a Node that has headers by reference.
type fake struct {
	headers map[string]*pull.Header
	err     error
	private bool // it wants alice's credentials
	asked   []string
	plainly []string // names of Resolve
}

func (f *fake) Header(_ context.Context, req api.PullRequest) (*pull.Header, error) {
	f.asked = append(f.asked, req.Ref)
	if f.private && (req.Credential.Username != "alice" || req.Credential.Secret != "pw") {
		return nil, &api.Error{Code: api.CodeUnauthorized, Message: "401"}
	}
	if f.err != nil {
		return nil, f.err
	}
	if h := f.headers[req.Ref]; h != nil {
		return h, nil
	}
	return nil, &api.Error{Code: api.CodeNotFound, Message: "no such tag"}
}

func (f *fake) Resolve(_ context.Context, req api.PullRequest) (*pull.Header, error) {
	f.plainly = append(f.plainly, req.Ref)
	if f.private && (req.Credential.Username != "alice" || req.Credential.Secret != "pw") {
		return nil, &api.Error{Code: api.CodeUnauthorized, Message: "401"}
	}
	if h := f.headers["plain "+req.Ref]; h != nil {
		return h, nil
	}
	return nil, &api.Error{Code: api.CodeUnavailable, Message: "the registry is away"}
}

func newFake() (*fake, *pull.Header) {
	index := blob("application/vnd.oci.image.index.v1+json", `{"manifests":[]}`)
	h := &pull.Header{Manifest: blob("application/vnd.oci.image.manifest.v1+json", `{"layers":[]}`), Chosen: &index, Config: blob("application/json", `{"os":"linux"}`)}
	return &fake{headers: map[string]*pull.Header{
		"r.example/a/b:1":                               h,
		"r.example/a/b@" + index.Digest.String():        h,
		"r.example/a/b@" + h.Manifest.Digest.String():   {Manifest: h.Manifest, Config: h.Config},
		"r.example/plain:1":                             {Manifest: h.Manifest, Config: h.Config},
		"r.example/wrong:1":                             {Manifest: bundle.Blob{Digest: h.Manifest.Digest, Bytes: []byte("other")}, Config: h.Config},
		"r.example/wrong@" + h.Config.Digest.String():   {Manifest: h.Manifest, Config: h.Config},
		"r.example/other@" + h.Manifest.Digest.String(): {Manifest: h.Manifest, Config: h.Config},
	}}, h
}

// do is one request; it returns the status and what matters of the answer.
func do(m *Mirror, method, target string, edit ...func(*http.Request)) (int, string) {
	r := httptest.NewRequest(method, target, nil)
	for _, e := range edit {
		e(r)
	}
	w := httptest.NewRecorder()
	m.ServeHTTP(w, r)
	b, _ := io.ReadAll(w.Body)
	if w.Code == http.StatusOK && strings.Contains(target, "/manifests/") && w.Header().Get("Content-Length") == "" {
		return w.Code, "no length"
	}
	if method == http.MethodHead {
		return w.Code, w.Header().Get("Docker-Content-Digest") + " " + w.Header().Get("Content-Type")
	}
	return w.Code, string(b)
}

func TestMirror(t *testing.T) {
	f, h := newFake()
	m := New(Options{Node: f})
	index := *h.Chosen
	const ns = "?ns=r.example"
	for _, step := range []struct {
		method, target string
		status         int
		want           string   // of a success
		asked          []string // of the server
	}{
		{"HEAD", "/v2/", 200, " ", nil},
		// Nothing is known before somebody resolves.
		{"GET", "/v2/a/b/blobs/" + h.Config.Digest.String() + ns, 404, "", nil},
		// A pull by tag is one question.
		{"HEAD", "/v2/a/b/manifests/1" + ns, 200, index.Digest.String() + " " + index.MediaType, []string{"r.example/a/b:1"}},
		{"GET", "/v2/a/b/manifests/" + index.Digest.String() + ns, 200, string(index.Bytes), nil},
		{"GET", "/v2/a/b/manifests/" + h.Manifest.Digest.String() + ns, 200, string(h.Manifest.Bytes), nil},
		{"GET", "/v2/a/b/blobs/" + h.Config.Digest.String() + ns, 200, string(h.Config.Bytes), nil},
		{"HEAD", "/v2/a/b/blobs/" + h.Config.Digest.String() + ns, 200, h.Config.Digest.String() + " application/json", nil},
		// A tag is always asked for, and so is a digest that is resolved.
		{"HEAD", "/v2/a/b/manifests/1" + ns, 200, index.Digest.String() + " " + index.MediaType, []string{"r.example/a/b:1"}},
		{"HEAD", "/v2/a/b/manifests/" + h.Manifest.Digest.String() + ns, 200, h.Manifest.Digest.String() + " " + h.Manifest.MediaType, []string{"r.example/a/b@" + h.Manifest.Digest.String()}},
		// Another repository, or registry, has nothing of this one's.
		{"GET", "/v2/a/c/blobs/" + h.Config.Digest.String() + ns, 404, "", nil},
		{"GET", "/v2/a/b/blobs/" + h.Config.Digest.String() + "?ns=other.example", 404, "", nil},
		// By tag without HEAD; a single manifest.
		{"GET", "/v2/plain/manifests/1" + ns, 200, string(h.Manifest.Bytes), []string{"r.example/plain:1"}},
		// What the origin has to answer.
		{"HEAD", "/v2/a/b/manifests/2" + ns, 404, "", []string{"r.example/a/b:2"}},
		{"GET", "/v2/a/b/blobs/" + digest.FromString("a layer").String() + ns, 404, "", nil},
		{"GET", "/v2/a/b/tags/list" + ns, 404, "", nil},
		{"GET", "/v2/a/b/manifests/1", 404, "", nil},
		{"GET", "/hydrofoil/v1/bundle" + ns, 404, "", nil},
		{"POST", "/v2/a/b/blobs/uploads/" + ns, 405, "", nil},
		// Bytes that are not those of their digest are never sent.
		{"GET", "/v2/wrong/manifests/1" + ns, 404, "", []string{"r.example/wrong:1"}},
		{"GET", "/v2/wrong/manifests/" + h.Manifest.Digest.String() + ns, 404, "", nil},
		{"HEAD", "/v2/wrong/manifests/" + h.Config.Digest.String() + ns, 404, "", []string{"r.example/wrong@" + h.Config.Digest.String()}},
	} {
		f.asked = nil
		status, got := do(m, step.method, step.target)
		if status != step.status || status == 200 && got != step.want {
			t.Errorf("%s %s: %d %q, want %d %q", step.method, step.target, status, got, step.status, step.want)
		}
		if diff := cmp.Diff(step.asked, f.asked); diff != "" {
			t.Errorf("%s %s asks the server:\n%s", step.method, step.target, diff)
		}
	}
	// Whatever resolves may be pulled next.
	var expected []*pull.Header
	m.opts.Expect = func(h *pull.Header) { expected = append(expected, h) }
	do(m, "HEAD", "/v2/a/b/manifests/1"+ns)
	do(m, "HEAD", "/v2/a/b/manifests/2"+ns)
	do(m, "GET", "/v2/a/b/manifests/"+h.Manifest.Digest.String()+ns)
	do(m, "GET", "/v2/wrong/manifests/1"+ns)
	if len(expected) != 1 || expected[0] != h {
		t.Errorf("expected: %v", expected)
	}
	m.opts.Expect = nil
	// An image on another one's rootfs: containerd asks nobody else after a status between 300 and 399.
	m.opts.Claim = func(c *pull.Header) error {
		if c != h {
			t.Errorf("claimed: %v", c)
		}
		return errors.New("no")
	}
	if code, got := do(m, "HEAD", "/v2/a/b/manifests/1"+ns); code != http.StatusMultipleChoices {
		t.Errorf("a claim that is refused: %d %s", code, got)
	}
	m.opts.Claim = nil
	// A tag that moves.
	f.headers["r.example/a/b:1"] = &pull.Header{Manifest: blob("m", "moved"), Config: h.Config}
	if _, got := do(m, "HEAD", "/v2/a/b/manifests/1"+ns); !strings.HasPrefix(got, digest.FromString("moved").String()) {
		t.Errorf("a tag that moved is still %s", got)
	}
}

// An image that does not come as a bundle may claim layers, too.
func TestMirrorSeesPlainImages(t *testing.T) {
	f, h := newFake()
	f.headers["plain r.example/hub:1"] = h
	besides := true
	var claimed []*pull.Header
	m := New(Options{Node: f, Besides: func(string) bool { return besides }, Claim: func(h *pull.Header) error { claimed = append(claimed, h); return nil }})
	if code, got := do(m, "HEAD", "/v2/hub/manifests/1?ns=r.example"); code != 200 || !strings.HasPrefix(got, h.Digest().String()) {
		t.Errorf("it is answered %d %s", code, got)
	}
	if len(claimed) != 1 || claimed[0] != h {
		t.Errorf("claimed: %v", claimed)
	}
	if code, _ := do(m, "GET", "/v2/hub/manifests/"+h.Manifest.Digest.String()+"?ns=r.example"); code != 200 {
		t.Errorf("its manifest: %d", code)
	}
	m.opts.Claim = func(*pull.Header) error { return errors.New("no") }
	if code, _ := do(m, "HEAD", "/v2/hub/manifests/1?ns=r.example"); code != http.StatusMultipleChoices {
		t.Errorf("a claim that is refused: %d", code)
	}
	if code, _ := do(m, "HEAD", "/v2/away/manifests/1?ns=r.example"); code != http.StatusMultipleChoices {
		t.Errorf("one whose layers are not known: %d", code)
	}
	// A manifest that containerd has chosen itself. After an error it would ask the next host.
	chosen := blob("application/vnd.oci.image.manifest.v1+json", `{"layers":[],"x":1}`)
	name := "r.example/hub@" + chosen.Digest.String()
	f.headers["plain "+name] = &pull.Header{Name: name, Manifest: chosen, Config: h.Config}
	target := "/v2/hub/manifests/" + chosen.Digest.String() + "?ns=r.example"
	if code, got := do(m, "GET", target); code != 200 || strings.Contains(got, string(chosen.Bytes)) {
		t.Errorf("a manifest that is refused: %d %s", code, got)
	}
	m.opts.Claim = func(*pull.Header) error { return nil }
	if code, got := do(m, "GET", target); code != 200 || !strings.Contains(got, string(chosen.Bytes)) {
		t.Errorf("one that is not: %d %s", code, got)
	}
	besides = false
	asked := len(f.plainly)
	if code, _ := do(m, "HEAD", "/v2/away/manifests/1?ns=r.example"); code != 404 || len(f.plainly) != asked {
		t.Errorf("where nothing can be claimed: %d", code)
	}
}

func TestMirrorCredentials(t *testing.T) {
	f, h := newFake()
	f.private = true
	m := New(Options{Node: f})
	const target = "/v2/a/b/manifests/1?ns=r.example"
	for range 2 {
		r := httptest.NewRequest("HEAD", target, nil)
		w := httptest.NewRecorder()
		m.ServeHTTP(w, r)
		if w.Code != 401 || w.Header().Get("WWW-Authenticate") != `Basic realm="r.example"` {
			t.Errorf("without credentials: %d, %v", w.Code, w.Header())
		}
	}
	if len(f.asked) != 1 {
		t.Errorf("the server was asked %d times without credentials", len(f.asked))
	}
	if status, _ := do(m, "HEAD", target, func(r *http.Request) { r.SetBasicAuth("alice", "wrong") }); status != 404 {
		t.Errorf("with wrong credentials: %d, want the origin to say so", status)
	}
	if status, got := do(m, "HEAD", target, func(r *http.Request) { r.SetBasicAuth("alice", "pw") }); status != 200 || !strings.HasPrefix(got, h.Chosen.Digest.String()) {
		t.Errorf("with credentials: %d %s", status, got)
	}
}

// Credentials that another pull has are not this one's: it has to bring its own.
func TestMirrorOfPrivateRepositories(t *testing.T) {
	f, _ := newFake()
	m := New(Options{Node: f, Private: func(name string) bool { return name == "r.example/a/b" }})
	if status, _ := do(m, "HEAD", "/v2/a/b/manifests/1?ns=r.example"); status != 401 || len(f.asked) > 0 {
		t.Errorf("%d, the server was asked for %q", status, f.asked)
	}
	if status, _ := do(m, "HEAD", "/v2/plain/manifests/1?ns=r.example"); status != 200 {
		t.Errorf("another repository: %d", status)
	}
}

func TestMirrorOfPlainRegistries(t *testing.T) {
	f, _ := newFake()
	m := New(Options{Node: f})
	ask := func() (asked int) {
		f.asked = nil
		for range 3 {
			if status, _ := do(m, "HEAD", "/v2/x/manifests/1?ns=r.example"); status != 404 {
				t.Errorf("%v: %d", f.err, status)
			}
		}
		return len(f.asked)
	}
	// An image that is no bundle says nothing about the others.
	f.err = &remote.StatusError{Status: 404, Said: &bundle.Error{Code: bundle.CodeNotFound}}
	if n := ask(); n != 3 {
		t.Errorf("asked %d times for an image that the server does not have", n)
	}
	f.err = errors.New("connection refused")
	if n := ask(); n != 3 {
		t.Errorf("asked a server that is down %d times", n)
	}
	f.err = &remote.StatusError{Status: 404}
	if n := ask(); n != 1 {
		t.Errorf("asked a registry that sends no bundles %d times", n)
	}
}

func TestMemoryIsBounded(t *testing.T) {
	m := New(Options{})
	for i := range 100 {
		m.remember("r.example/a", blob("m", fmt.Sprint(i, strings.Repeat("x", 2<<20))))
		total := 0
		for _, b := range m.blobs {
			total += len(b.blob.Bytes)
		}
		if total != m.bytes || total > keepBytes {
			t.Fatalf("%d bytes are remembered, %d are counted", total, m.bytes)
		}
	}
	if n := len(m.blobs); n < 20 {
		t.Errorf("%d blobs", n)
	}
}

func TestAddresses(t *testing.T) {
	for address, ok := range map[string]bool{"127.0.0.1:598": true, "localhost:1": true, "[::1]:598": true, "0.0.0.0:598": false, ":598": false, "10.0.0.1:598": false, "598": false, "": false} {
		if _, err := Addresses(address); (err == nil) != ok {
			t.Errorf("%q: %v", address, err)
		}
	}
}

// asker is a client as containerd has it with a hosts.toml that names a key as ca and client; client empty: it
// names none.
func asker(t *testing.T, ca, client string) *http.Client {
	t.Helper()
	b, err := os.ReadFile(ca)
	if err != nil {
		t.Fatal(err)
	}
	config := &tls.Config{RootCAs: x509.NewCertPool()}
	if !config.RootCAs.AppendCertsFromPEM(b) {
		t.Fatalf("%s has no certificate", ca)
	}
	if client != "" {
		pair, err := tls.LoadX509KeyPair(client, client)
		if err != nil {
			t.Fatal(err)
		}
		config.Certificates = []tls.Certificate{pair}
	}
	c := &http.Client{Transport: &http.Transport{TLSClientConfig: config, ForceAttemptHTTP2: true}}
	t.Cleanup(c.CloseIdleConnections)
	return c
}

// Who has the key of the root is answered, and nobody else: whatever its user is.
func TestServeOnlyByKey(t *testing.T) {
	f, _ := newFake()
	for _, address := range []string{"127.0.0.1:0", "[::1]:0", "127.0.0.3:0"} {
		t.Run(address, func(t *testing.T) {
			l, err := net.Listen("tcp", address)
			if err != nil && strings.HasPrefix(address, "[") {
				t.Skipf("this host has no IPv6: %v", err)
			}
			if err != nil {
				t.Fatal(err)
			}
			root, other := t.TempDir(), t.TempDir()
			key, err := LoadKey(root, l.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			if _, err := LoadKey(other, l.Addr().String()); err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error, 1)
			go func() { done <- New(Options{Node: f}).Serve(ctx, l, key) }()
			at := l.Addr().String() + "/v2/"
			resp, err := asker(t, KeyPath(root), KeyPath(root)).Get("https://" + at)
			if err != nil {
				t.Fatal(err)
			}
			resp.Body.Close()
			if resp.StatusCode != 200 {
				t.Errorf("with the key: %s", resp.Status)
			}
			for name, c := range map[string]*http.Client{
				"without a key":     asker(t, KeyPath(root), ""),
				"with another key":  asker(t, KeyPath(root), KeyPath(other)),
				"of another mirror": asker(t, KeyPath(other), KeyPath(root)), // which does not give it credentials
			} {
				if resp, err := c.Get("https://" + at); err == nil {
					resp.Body.Close()
					t.Errorf("%s: %s", name, resp.Status)
				}
			}
			if resp, err := http.Get("http://" + at); err != nil || resp.StatusCode != http.StatusBadRequest {
				t.Errorf("without TLS: %v, %v", resp, err) // containerd asks the next host
			} else {
				resp.Body.Close()
			}
			http.DefaultClient.CloseIdleConnections()
			cancel()
			if err := <-done; err != nil {
				t.Error(err)
			}
		})
	}
}

// The key stays, and is one that only root can read.
func TestLoadKey(t *testing.T) {
	root := t.TempDir()
	load := func() []byte {
		t.Helper()
		key, err := LoadKey(root, "127.0.0.1:598")
		if err != nil {
			t.Fatal(err)
		}
		dir, err1 := os.Stat(filepath.Dir(KeyPath(root)))
		file, err2 := os.Stat(KeyPath(root))
		if err1 != nil || err2 != nil || dir.Mode().Perm() != 0o700 || file.Mode().Perm() != 0o600 {
			t.Errorf("%v, %v, %v, %v", dir, file, err1, err2)
		}
		return key.Certificate[0]
	}
	first := load()
	if !bytes.Equal(first, load()) {
		t.Error("a new key, although there was one")
	}
	for name, spoil := range map[string]func() error{
		"others could read it": func() error { return os.Chmod(KeyPath(root), 0o644) },
		"it is damaged":        func() error { return os.WriteFile(KeyPath(root), []byte("x"), 0o600) },
		"it is removed":        func() error { return os.Remove(KeyPath(root)) },
	} {
		if err := spoil(); err != nil {
			t.Fatal(err)
		}
		now := load()
		if bytes.Equal(first, now) {
			t.Errorf("%s: it is the old one", name)
		}
		first = now
	}
}
