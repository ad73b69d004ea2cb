// Package upstreamtest is a registry for tests of what is in front of one: it
// counts what it is asked for, demands credentials, and misbehaves on demand.
package upstreamtest

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/format/layer/layertest"
)

// Registry is a registry in memory. Its methods are safe for concurrent use.
type Registry struct {
	URL string

	// Before, if set, sees each request first, and answers it if it returns true.
	// It is set by Intercept.
	mu     sync.Mutex
	before func(w http.ResponseWriter, req *http.Request) bool // guarded by mu
	asked  map[string]int                                      // guarded by mu
	repos  map[string]*repository                              // guarded by mu
	auth   string                                              // guarded by mu: "basic", "bearer" or empty
	tokens map[string]bool                                     // guarded by mu: those that are good
	last   int                                                 // guarded by mu: number of the last token
}

type repository struct {
	blobs     map[digest.Digest][]byte
	manifests map[digest.Digest]manifest
	tags      map[string]digest.Digest
}

type manifest struct {
	mediaType string
	bytes     []byte
}

// User and Password are what it demands after Demand.
const User, Password = "somebody", "s3cret"

// Start starts a registry, without TLS, that ends with the test.
func Start(t testing.TB) *Registry {
	r := New()
	s := httptest.NewServer(r)
	t.Cleanup(s.Close)
	r.URL = s.URL
	return r
}

// New returns a registry that the caller serves.
func New() *Registry {
	return &Registry{asked: map[string]int{}, repos: map[string]*repository{}, tokens: map[string]bool{}}
}

func (r *Registry) repo(name string) *repository {
	if r.repos[name] == nil {
		r.repos[name] = &repository{map[digest.Digest][]byte{}, map[digest.Digest]manifest{}, map[string]digest.Digest{}}
	}
	return r.repos[name]
}

// Blob puts a blob into a repository.
func (r *Registry) Blob(repo string, b []byte) digest.Digest {
	r.mu.Lock()
	defer r.mu.Unlock()
	d := digest.FromBytes(b)
	r.repo(repo).blobs[d] = b
	return d
}

// Manifest puts a manifest into a repository, as JSON of v, and tags it.
func (r *Registry) Manifest(repo, mediaType string, v any, tags ...string) ocispec.Descriptor {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	d := digest.FromBytes(b)
	r.repo(repo).manifests[d] = manifest{mediaType, b}
	for _, tag := range tags {
		r.repo(repo).tags[tag] = d
	}
	return ocispec.Descriptor{MediaType: mediaType, Digest: d, Size: int64(len(b))}
}

// Image puts an image of these layers into a repository.
func (r *Registry) Image(repo, tag string, layers ...layertest.Blob) ocispec.Descriptor {
	config := ocispec.Image{
		Platform: ocispec.Platform{OS: "linux", Architecture: "amd64"},
		RootFS:   ocispec.RootFS{Type: "layers"},
	}
	m := ocispec.Manifest{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageManifest}
	for _, l := range layers {
		r.Blob(repo, l.Bytes)
		config.RootFS.DiffIDs = append(config.RootFS.DiffIDs, l.DiffID)
		m.Layers = append(m.Layers, l.Descriptor())
	}
	b, err := json.Marshal(config)
	if err != nil {
		panic(err)
	}
	m.Config = ocispec.Descriptor{MediaType: ocispec.MediaTypeImageConfig, Digest: r.Blob(repo, b), Size: int64(len(b))}
	return r.Manifest(repo, m.MediaType, m, tag)
}

// Delete removes a tag, and its manifest.
func (r *Registry) Delete(repo, tag string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	p := r.repo(repo)
	delete(p.manifests, p.tags[tag])
	delete(p.tags, tag)
}

// Intercept has fn see each request first, and answer it if it returns true; nil
// ends that.
func (r *Registry) Intercept(fn func(w http.ResponseWriter, req *http.Request) bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.before = fn
}

// Demand makes it demand credentials: by "basic" or by "bearer", for which it is
// the token server as well; "" ends that.
func (r *Registry) Demand(scheme string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.auth = scheme
}

// Expire makes all tokens bad.
func (r *Registry) Expire() {
	r.mu.Lock()
	defer r.mu.Unlock()
	clear(r.tokens)
}

// Asked returns how often something was asked for: the method, and the kind of
// it, as "GET blobs", "HEAD manifests" or "GET token". Requests that were not let
// in do not count.
func (r *Registry) Asked(what string) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.asked[what]
}

// ServeHTTP implements http.Handler.
func (r *Registry) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	r.mu.Lock()
	before := r.before
	r.mu.Unlock()
	if req.URL.Path == "/token" {
		r.token(w, req)
		return
	}
	if !r.admit(w, req) {
		return
	}
	path := strings.Split(strings.TrimPrefix(req.URL.Path, "/v2/"), "/")
	kind := path[0]
	if n := len(path); n >= 3 {
		kind = path[n-2]
		if kind == "tags" {
			path = path[:n-1]
			path = append(path, "")
		}
	}
	r.mu.Lock()
	r.asked[req.Method+" "+kind]++
	r.mu.Unlock()
	if before != nil && before(w, req) {
		return
	}
	if kind == "_catalog" {
		r.mu.Lock()
		var names []string
		for name := range r.repos {
			names = append(names, name)
		}
		r.mu.Unlock()
		page(w, req, "repositories", names)
		return
	}
	if len(path) < 3 {
		Fail(w, http.StatusNotFound, "UNSUPPORTED", "no such place")
		return
	}
	name, arg := strings.Join(path[:len(path)-2], "/"), path[len(path)-1]
	r.mu.Lock()
	p := r.repos[name]
	if p == nil {
		r.mu.Unlock()
		Fail(w, http.StatusNotFound, "NAME_UNKNOWN", "repository name not known to registry")
		return
	}
	switch kind {
	case "manifests":
		d := digest.Digest(arg)
		if to, ok := p.tags[arg]; ok {
			d = to
		}
		m, ok := p.manifests[d]
		r.mu.Unlock()
		if !ok {
			Fail(w, http.StatusNotFound, "MANIFEST_UNKNOWN", "manifest unknown")
			return
		}
		w.Header().Set("Docker-Content-Digest", d.String())
		w.Header().Set("Etag", `"`+d.String()+`"`)
		w.Header().Set("Content-Type", m.mediaType)
		http.ServeContent(w, req, "", time.Time{}, bytes.NewReader(m.bytes))
	case "blobs":
		b, ok := p.blobs[digest.Digest(arg)]
		r.mu.Unlock()
		if !ok {
			Fail(w, http.StatusNotFound, "BLOB_UNKNOWN", "blob unknown to registry")
			return
		}
		w.Header().Set("Content-Type", "application/octet-stream")
		http.ServeContent(w, req, "", time.Time{}, bytes.NewReader(b))
	case "tags":
		var names []string
		for name := range p.tags {
			names = append(names, name)
		}
		r.mu.Unlock()
		page(w, req, "tags", names)
	case "referrers":
		index := ocispec.Index{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageIndex}
		for d, m := range p.manifests {
			var fields ocispec.Manifest
			if json.Unmarshal(m.bytes, &fields) == nil && fields.Subject != nil && fields.Subject.Digest.String() == arg {
				index.Manifests = append(index.Manifests, ocispec.Descriptor{MediaType: m.mediaType, Digest: d, Size: int64(len(m.bytes))})
			}
		}
		r.mu.Unlock()
		w.Header().Set("Content-Type", index.MediaType)
		_ = json.NewEncoder(w).Encode(index)
	default:
		r.mu.Unlock()
		Fail(w, http.StatusNotFound, "UNSUPPORTED", "no such place")
	}
}

// page answers with a page of names, with a Link to the next.
func page(w http.ResponseWriter, req *http.Request, key string, names []string) {
	slices.Sort(names)
	q := req.URL.Query()
	i, found := slices.BinarySearch(names, q.Get("last"))
	if found {
		i++
	}
	names = names[i:]
	if n, err := strconv.Atoi(q.Get("n")); err == nil && n > 0 {
		n = min(n, 2) // as registries that have a limit of their own
		if n < len(names) {
			names = names[:n]
			w.Header().Set("Link", fmt.Sprintf(`<%s?n=%d&last=%s>; rel="next"`, req.URL.Path, n, names[n-1]))
		}
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(map[string]any{key: names})
}

// Fail answers with an error of the distribution API.
func Fail(w http.ResponseWriter, status int, code, message string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	fmt.Fprintf(w, `{"errors":[{"code":%q,"message":%q}]}`, code, message)
}

// admit lets those in who may.
func (r *Registry) admit(w http.ResponseWriter, req *http.Request) bool {
	r.mu.Lock()
	auth := r.auth
	good := r.tokens[strings.TrimPrefix(req.Header.Get("Authorization"), "Bearer ")]
	r.mu.Unlock()
	user, password, basic := req.BasicAuth()
	switch {
	case auth == "", auth == "basic" && basic && user == User && password == Password, auth == "bearer" && good:
		return true
	case auth == "basic":
		w.Header().Set("WWW-Authenticate", `Basic realm="test"`)
	default:
		challenge := fmt.Sprintf(`Bearer realm="http://%s/token",service="test"`, req.Host)
		if req.Header.Get("Authorization") != "" {
			challenge += `,error="invalid_token"`
		}
		w.Header().Set("WWW-Authenticate", challenge)
	}
	Fail(w, http.StatusUnauthorized, "UNAUTHORIZED", "authentication required")
	return false
}

// token is the token server.
func (r *Registry) token(w http.ResponseWriter, req *http.Request) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if req.Method != http.MethodGet {
		w.WriteHeader(http.StatusNotFound) // as those that know no OAuth2
		return
	}
	r.asked["GET token"]++
	if user, password, ok := req.BasicAuth(); !ok || user != User || password != Password || !strings.HasSuffix(req.FormValue("scope"), ":pull") {
		Fail(w, http.StatusUnauthorized, "UNAUTHORIZED", "wrong user or password")
		return
	}
	r.last++
	token := fmt.Sprintf("token-%d", r.last)
	r.tokens[token] = true
	fmt.Fprintf(w, `{"token":%q}`, token)
}
