package upstream_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/upstream"
	"hydrofoil.dev/foil/internal/server/upstream/upstreamtest"
)

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
