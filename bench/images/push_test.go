package images

import (
	"archive/tar"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	digest "github.com/opencontainers/go-digest"
)

// What was pushed is in the registry under its own digest; a second push sends no blob.
func TestPush(t *testing.T) {
	blobs, posts, tagged := map[string]bool{}, 0, ""
	mux := http.NewServeMux()
	mux.HandleFunc("HEAD /v2/team/tiny/blobs/{digest}", func(w http.ResponseWriter, r *http.Request) {
		if !blobs[r.PathValue("digest")] {
			w.WriteHeader(http.StatusNotFound)
		}
	})
	read := func(w http.ResponseWriter, r *http.Request) string {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		w.WriteHeader(http.StatusCreated)
		return digest.FromBytes(body).String()
	}
	mux.HandleFunc("POST /v2/team/tiny/blobs/uploads/", func(w http.ResponseWriter, r *http.Request) {
		got := read(w, r)
		if want := r.URL.Query().Get("digest"); got != want {
			t.Errorf("a blob is %s, and was called %s", got, want)
		}
		blobs[got] = true
		posts++
	})
	mux.HandleFunc("PUT /v2/team/tiny/manifests/1", func(w http.ResponseWriter, r *http.Request) { tagged = read(w, r) })
	mux.HandleFunc("PUT /v2/team/tiny/manifests/full", func(w http.ResponseWriter, _ *http.Request) {
		http.Error(w, "no room", http.StatusInsufficientStorage)
	})
	server := httptest.NewServer(mux)
	defer server.Close()
	host := strings.TrimPrefix(server.URL, "http://")

	built := foreign(t, []tar.Header{{Name: "bin/", Typeflag: tar.TypeDir}, {Name: "bin/sh"}})
	for range 2 {
		if err := built.Push(t.Context(), host+"/team/tiny:1"); err != nil {
			t.Fatal(err)
		}
	}
	if tagged != built.Digest.String() || posts != 2 {
		t.Errorf("the registry has %s after %d blobs, want %s after 2", tagged, posts, built.Digest)
	}
	if err := built.Push(t.Context(), host+"/team/tiny:full"); err == nil || !strings.Contains(err.Error(), "507 Insufficient Storage: no room") {
		t.Errorf("a registry without room: %v", err)
	}
	for _, target := range []string{"", "redis:1", host + "/redis", host + "/redis:"} {
		if err := built.Push(t.Context(), target); err == nil || !strings.Contains(err.Error(), "want HOST") {
			t.Errorf("push to %q: %v", target, err)
		}
	}
}
