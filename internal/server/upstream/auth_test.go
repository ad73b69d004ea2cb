package upstream_test

import (
	"bytes"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/server/upstream"
	"hydrofoil.dev/foil/internal/server/upstream/upstreamtest"
)

func pemOf(der []byte) []byte { return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}) }

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
