package registry_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/server/guard"
	"hydrofoil.dev/foil/internal/server/limit"
	"hydrofoil.dev/foil/internal/server/registry"
)

const (
	dockerManifest = "application/vnd.docker.distribution.manifest.v2+json"
	dockerList     = "application/vnd.docker.distribution.manifest.list.v2+json"
)

func (f *fixture) put(repo, ref, mediaType string, b []byte) answer {
	f.t.Helper()
	return f.do("PUT", "/v2/"+repo+"/manifests/"+ref, bytes.NewReader(b), "Content-Type", mediaType)
}

func (f *fixture) wantManifest(repo, ref, mediaType string, b []byte, d digest.Digest) {
	f.t.Helper()
	for _, method := range []string{"HEAD", "GET"} {
		a := f.do(method, "/v2/"+repo+"/manifests/"+ref, nil)
		f.want(method+" manifest", a, http.StatusOK)
		for header, want := range map[string]string{
			"Content-Type": mediaType, "Docker-Content-Digest": d.String(), "Content-Length": fmt.Sprint(len(b)),
		} {
			if got := a.Header.Get(header); got != want {
				f.t.Errorf("%s manifest: %s is %q, want %q", method, header, got, want)
			}
		}
		if method == "GET" && !bytes.Equal(a.body, b) {
			f.t.Errorf("GET manifest: other bytes: %q", a.body)
		}
	}
}

// Manifests of every kind come back as they were, byte for byte.
func TestManifests(t *testing.T) {
	f := newFixture(t, registry.Options{})
	blob := f.push("r", []byte("{}"))
	descriptor := fmt.Sprintf(`{"mediaType":"application/x","digest":"%s","size":2}`, blob)
	absent := fmt.Sprintf(`{"mediaType":"application/x","digest":"%s","size":2}`, digest.FromString("absent"))
	image := f.putImage("r", "image", "x")
	child := fmt.Sprintf(`{"mediaType":"%s","digest":"%s","size":%d}`, ocispec.MediaTypeImageManifest, image, len(f.do("GET", "/v2/r/manifests/image", nil).body))
	foreign := strings.Replace(absent, "application/x", "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip", 1)
	nondist := strings.Replace(absent, "application/x", "application/vnd.oci.image.layer.nondistributable.v1.tar+gzip", 1)
	urls := strings.Replace(absent, "}", `,"urls":["https://example.com/x"]}`, 1)
	oci, index := ocispec.MediaTypeImageManifest, ocispec.MediaTypeImageIndex
	for _, test := range []struct {
		what, mediaType, body string
		as                    string // the media type it comes back with, if another one
		code                  string // of the error, if there is to be one
	}{
		{what: "image", mediaType: oci, body: ` {"schemaVersion":2,"config":` + descriptor + `,"layers":[` + descriptor + `]}` + "\n"},
		{what: "image that says so", mediaType: oci, body: `{"mediaType":"` + oci + `","config":` + descriptor + `}`},
		{what: "image with parameters", mediaType: oci + "; charset=utf-8", as: oci, body: `{"config":` + descriptor + `}`},
		{what: "image that only says so", mediaType: "", as: oci, body: `{"mediaType":"` + oci + `","config":` + descriptor + `}`},
		{what: "docker image", mediaType: dockerManifest, body: `{"schemaVersion":2,"mediaType":"` + dockerManifest + `","config":` + descriptor + `,"layers":[` + foreign + `]}`},
		{what: "foreign layers", mediaType: oci, body: `{"config":` + descriptor + `,"layers":[` + nondist + `,` + urls + `]}`},
		{what: "missing subject", mediaType: oci, body: `{"config":` + descriptor + `,"subject":` + absent + `}`},
		{what: "unknown fields", mediaType: oci, body: `{"config":` + descriptor + `,"custom":{"x":[1]}}`},
		{what: "index", mediaType: index, body: `{"manifests":[` + child + `]}`},
		{what: "empty index", mediaType: index, body: `{"manifests":[]}`},
		{what: "docker list", mediaType: dockerList, body: `{"manifests":[` + child + `]}`},
		{what: "index of blobs", mediaType: index, body: `{"manifests":[` + descriptor + `]}`},
		{what: "artifact", mediaType: "application/vnd.oci.artifact.manifest.v1+json", body: `{"blobs":[` + descriptor + `]}`},
		{what: "signed docker manifest", mediaType: "application/vnd.docker.distribution.manifest.v1+prettyjws", body: `{"fsLayers":[{"blobSum":"x"}]}`},
		{what: "no JSON", mediaType: "application/x", body: `what is this`},
		{what: "JSON of another kind", mediaType: "application/x", body: `[1,2]`},
		{what: "fields that mean something else", mediaType: "application/x", body: `{"layers":[{"digest":"none"}]}`},
		{what: "nothing", mediaType: "application/x", body: ``},

		{what: "no media type", mediaType: "", body: `{}`, code: "MANIFEST_INVALID"},
		{what: "no JSON, no media type", mediaType: "", body: `x`, code: "MANIFEST_INVALID"},
		{what: "bad Content-Type", mediaType: "/;/", body: `{}`, code: "MANIFEST_INVALID"},
		{what: "image that is no JSON", mediaType: oci, body: `x`, code: "MANIFEST_INVALID"},
		{what: "truncated image", mediaType: oci, body: `{"config":` + descriptor, code: "MANIFEST_INVALID"},
		{what: "image without config", mediaType: oci, body: `{"layers":[` + descriptor + `]}`, code: "MANIFEST_INVALID"},
		{what: "image that says it is an index", mediaType: oci, body: `{"mediaType":"` + index + `","config":` + descriptor + `}`, code: "MANIFEST_INVALID"},
		{what: "image with manifests", mediaType: oci, body: `{"config":` + descriptor + `,"manifests":[` + child + `]}`, code: "MANIFEST_INVALID"},
		{what: "index with layers", mediaType: index, body: `{"manifests":[],"layers":[` + descriptor + `]}`, code: "MANIFEST_INVALID"},
		{what: "image with a bad digest", mediaType: oci, body: `{"config":{"digest":"sha256:x","size":1}}`, code: "MANIFEST_INVALID"},
		{what: "image with a bad subject", mediaType: oci, body: `{"config":` + descriptor + `,"subject":{"digest":"../x"}}`, code: "MANIFEST_INVALID"},
		{what: "image with a negative size", mediaType: oci, body: strings.Replace(`{"config":`+descriptor+`}`, `"size":2`, `"size":-2`, 1), code: "MANIFEST_INVALID"},
		{what: "image with a huge size", mediaType: oci, body: strings.Replace(`{"config":`+descriptor+`}`, `"size":2`, `"size":4611686018427387904`, 1), code: "MANIFEST_INVALID"},
		{what: "image with a config of another size", mediaType: oci, body: strings.Replace(`{"config":`+descriptor+`}`, `"size":2`, `"size":3`, 1), code: "MANIFEST_INVALID"},
		{what: "image that only says so, with a negative size", mediaType: "", body: strings.Replace(`{"mediaType":"`+oci+`","config":`+descriptor+`}`, `"size":2`, `"size":-2`, 1), code: "MANIFEST_INVALID"},
		{what: "image and index at once", mediaType: oci, body: `{"config":` + descriptor + `,"manifests":[]}`, code: "MANIFEST_INVALID"},
		{what: "image with layers twice", mediaType: oci, body: `{"config":` + descriptor + `,"layers":[],"layers":[` + descriptor + `]}`, code: "MANIFEST_INVALID"},
		{what: "index with a manifest of another size", mediaType: index, body: `{"manifests":[` + strings.Replace(child, `"size":`, `"size":1`, 1) + `]}`, code: "MANIFEST_INVALID"},
		{what: "another kind with other sizes", mediaType: "application/x", body: strings.Replace(`{"blobs":[`+descriptor+`]}`, `"size":2`, `"size":3`, 1)},
		{what: "image with an absent config", mediaType: oci, body: `{"config":` + absent + `}`, code: "MANIFEST_BLOB_UNKNOWN"},
		{what: "image with an absent layer", mediaType: oci, body: `{"config":` + descriptor + `,"layers":[` + absent + `]}`, code: "MANIFEST_BLOB_UNKNOWN"},
		{what: "image with a manifest as layer", mediaType: oci, body: `{"config":` + descriptor + `,"layers":[` + child + `]}`, code: "MANIFEST_BLOB_UNKNOWN"},
		{what: "index with an absent manifest", mediaType: index, body: `{"manifests":[` + absent + `]}`, code: "MANIFEST_BLOB_UNKNOWN"},
		{what: "artifact with an absent blob", mediaType: "application/x", body: `{"blobs":[` + absent + `]}`, code: "MANIFEST_BLOB_UNKNOWN"},
	} {
		t.Run(test.what, func(t *testing.T) {
			f.t = t
			b := []byte(test.body)
			before := len(f.pushed)
			for _, alg := range []digest.Algorithm{digest.SHA256, digest.SHA512} {
				d := alg.FromBytes(b)
				refs := []string{d.String()}
				if alg == digest.SHA256 {
					refs = append(refs, "tag")
				}
				for _, ref := range refs {
					a := f.put("r", ref, test.mediaType, b)
					if test.code != "" {
						status := http.StatusBadRequest
						if test.code == "MANIFEST_BLOB_UNKNOWN" {
							status = http.StatusNotFound
						}
						f.want("put", a, status, test.code)
						f.want("get", f.do("GET", "/v2/r/manifests/"+d.String(), nil), http.StatusNotFound, "MANIFEST_UNKNOWN")
						continue
					}
					f.want("put", a, http.StatusCreated)
					if got := a.Header.Get("Docker-Content-Digest"); got != d.String() {
						t.Errorf("digest %q, want %s", got, d)
					}
					as := test.mediaType
					if test.as != "" {
						as = test.as
					}
					f.wantManifest("r", ref, as, b, d)
					f.wantManifest("r", strings.TrimPrefix(a.Header.Get("Location"), "/v2/r/manifests/"), as, b, d)
				}
			}
			want := 3
			if test.code != "" {
				want = 0
			}
			if got := len(f.pushed) - before; got != want {
				t.Errorf("OnManifest was called %d times, want %d", got, want)
			}
		})
	}
}

func TestManifestOfAnotherRepository(t *testing.T) {
	f := newFixture(t, registry.Options{})
	b := f.image("r", "x")
	f.want("put where the blobs are not", f.put("s", "x", ocispec.MediaTypeImageManifest, b), http.StatusNotFound, "MANIFEST_BLOB_UNKNOWN")
	f.want("put", f.put("r", "x", ocispec.MediaTypeImageManifest, b), http.StatusCreated)
	f.want("get", f.do("GET", "/v2/s/manifests/"+digest.FromBytes(b).String(), nil), http.StatusNotFound, "MANIFEST_UNKNOWN")
	if diff := cmp.Diff([]string{"r@" + digest.FromBytes(b).String()}, f.pushed); diff != "" {
		t.Errorf("OnManifest (-want +got):\n%s", diff)
	}
}

func TestManifestDigest(t *testing.T) {
	f := newFixture(t, registry.Options{})
	b := f.image("r", "x")
	for _, d := range []digest.Digest{digest.FromString("x"), digest.SHA512.FromString("x")} {
		f.want("another digest", f.put("r", d.String(), ocispec.MediaTypeImageManifest, b), http.StatusBadRequest, "DIGEST_INVALID")
	}
	a := f.put("r", digest.FromBytes(b).String()+"?tag=a&tag=b.c&tag=_", ocispec.MediaTypeImageManifest, b)
	f.want("tags beside a digest", a, http.StatusCreated)
	if diff := cmp.Diff([]string{"a", "b.c", "_"}, a.Header.Values("OCI-Tag")); diff != "" {
		t.Errorf("OCI-Tag (-want +got):\n%s", diff)
	}
	for _, tag := range []string{"a", "b.c", "_"} {
		f.wantManifest("r", tag, ocispec.MediaTypeImageManifest, b, digest.FromBytes(b))
	}
	f.want("a bad tag", f.put("r", digest.FromBytes(b).String()+"?tag=a&tag=-", ocispec.MediaTypeImageManifest, b), http.StatusBadRequest, "MANIFEST_INVALID")
}

func TestManifestSize(t *testing.T) {
	f := newFixture(t, registry.Options{})
	const limit = 4 << 20
	f.want("4 MiB", f.put("r", "x", "application/x", bytes.Repeat([]byte("x"), limit)), http.StatusCreated)
	a := f.put("r", "y", "application/x", bytes.Repeat([]byte("x"), limit+1))
	f.want("a byte more", a, http.StatusRequestEntityTooLarge, "MANIFEST_INVALID")
	if !strings.Contains(string(a.body), "4194304 bytes") {
		t.Errorf("the limit is not told: %s", a.body)
	}
	f.want("get", f.do("GET", "/v2/r/manifests/y", nil), http.StatusNotFound)
}

func TestDeleteManifest(t *testing.T) {
	f := newFixture(t, registry.Options{})
	d := f.putImage("r", "one", "x")
	f.putImage("r", "two", "x")
	e := f.putImage("r", "other", "y")
	f.want("delete a tag", f.do("DELETE", "/v2/r/manifests/one", nil), http.StatusAccepted)
	f.want("the tag", f.do("GET", "/v2/r/manifests/one", nil), http.StatusNotFound)
	f.want("delete it again", f.do("DELETE", "/v2/r/manifests/one", nil), http.StatusNotFound)
	f.want("the other tag", f.do("GET", "/v2/r/manifests/two", nil), http.StatusOK)
	f.want("delete the manifest", f.do("DELETE", "/v2/r/manifests/"+d.String(), nil), http.StatusAccepted)
	f.want("the manifest", f.do("GET", "/v2/r/manifests/"+d.String(), nil), http.StatusNotFound)
	f.want("its tag", f.do("GET", "/v2/r/manifests/two", nil), http.StatusNotFound)
	f.want("delete it again", f.do("DELETE", "/v2/r/manifests/"+d.String(), nil), http.StatusNotFound)
	f.want("the other manifest", f.do("GET", "/v2/r/manifests/"+e.String(), nil), http.StatusOK)
}

// names follows the Link headers of a list to its end.
func (f *fixture) names(path, field string) (pages [][]string) {
	f.t.Helper()
	for path != "" {
		a := f.do("GET", path, nil)
		f.want(path, a, http.StatusOK)
		var body map[string]json.RawMessage
		var names []string
		if err := json.Unmarshal(a.body, &body); err != nil {
			f.t.Fatal(err)
		}
		if err := json.Unmarshal(body[field], &names); err != nil || names == nil {
			f.t.Fatalf("%s: %s is no list", path, a.body)
		}
		pages = append(pages, names)
		path = f.next(a)
	}
	return pages
}

// next is the target of the Link header, or empty.
func (f *fixture) next(a answer) string {
	f.t.Helper()
	link := a.Header.Get("Link")
	if link == "" {
		return ""
	}
	target, rel, ok := strings.Cut(strings.TrimPrefix(link, "<"), ">; ")
	if !ok || rel != `rel="next"` {
		f.t.Fatalf("Link %q", link)
	}
	return target
}

func TestTags(t *testing.T) {
	f := newFixture(t, registry.Options{MaxPage: 4})
	f.push("r", []byte("{}"))
	if diff := cmp.Diff([][]string{{}}, f.names("/v2/r/tags/list", "tags")); diff != "" {
		t.Errorf("a repository without tags (-want +got):\n%s", diff)
	}
	for _, tag := range []string{"b", "a", "c", "B", "a.1", "a-1"} {
		f.putImage("r", tag, tag)
	}
	for path, want := range map[string][][]string{
		"":              {{"B", "a", "a-1", "a.1"}, {"b", "c"}},
		"?n=100":        {{"B", "a", "a-1", "a.1"}, {"b", "c"}},
		"?n=3":          {{"B", "a", "a-1"}, {"a.1", "b", "c"}},
		"?n=4":          {{"B", "a", "a-1", "a.1"}, {"b", "c"}},
		"?n=1&last=a.1": {{"b"}, {"c"}},
		"?last=a.1":     {{"b", "c"}},
		"?n=2&last=bb":  {{"c"}},
		"?n=2&last=c":   {{}},
		"?n=0":          {{}},
		"?n=0&last=a":   {{}},
	} {
		if diff := cmp.Diff(want, f.names("/v2/r/tags/list"+path, "tags")); diff != "" {
			t.Errorf("tags%s (-want +got):\n%s", path, diff)
		}
	}
	f.push("a/b", nil)
	if diff := cmp.Diff([][]string{{"a/b"}, {"r"}}, f.names("/v2/_catalog?n=1", "repositories")); diff != "" {
		t.Errorf("repositories (-want +got):\n%s", diff)
	}
}

func TestReferrers(t *testing.T) {
	f := newFixture(t, registry.Options{})
	config := f.push("r", []byte("{}"))
	subject := digest.FromString("pushed later, or never")
	push := func(mediaType, artifactType string, annotations map[string]string) ocispec.Descriptor {
		t.Helper()
		m := map[string]any{"mediaType": mediaType, "subject": ocispec.Descriptor{Digest: subject, Size: 5}}
		d := ocispec.Descriptor{MediaType: mediaType, ArtifactType: artifactType, Annotations: annotations}
		if mediaType == ocispec.MediaTypeImageManifest {
			m["config"] = ocispec.Descriptor{MediaType: "application/config", Digest: config, Size: 2}
			if artifactType == "" {
				d.ArtifactType = "application/config"
			}
		}
		if artifactType != "" {
			m["artifactType"] = artifactType
		}
		if annotations != nil {
			m["annotations"] = annotations
		}
		b := marshal(t, m)
		d.Digest, d.Size = digest.FromBytes(b), int64(len(b))
		a := f.put("r", d.Digest.String(), mediaType, b)
		f.want("put", a, http.StatusCreated)
		if got := a.Header.Get("OCI-Subject"); got != subject.String() {
			t.Errorf("OCI-Subject %q, want %s", got, subject)
		}
		return d
	}
	list := func(path string) []ocispec.Descriptor {
		t.Helper()
		var all []ocispec.Descriptor
		for path != "" {
			a := f.do("GET", path, nil)
			f.want("referrers", a, http.StatusOK)
			if got := a.Header.Get("Content-Type"); got != ocispec.MediaTypeImageIndex {
				t.Errorf("Content-Type %q", got)
			}
			filters := ""
			if strings.Contains(path, "artifactType") {
				filters = "artifactType"
			}
			if got := a.Header.Get("OCI-Filters-Applied"); got != filters {
				t.Errorf("OCI-Filters-Applied %q, want %q", got, filters)
			}
			var index ocispec.Index
			if err := json.Unmarshal(a.body, &index); err != nil {
				t.Fatal(err)
			}
			if index.SchemaVersion != 2 || index.MediaType != ocispec.MediaTypeImageIndex || index.Manifests == nil {
				t.Errorf("no index: %s", a.body)
			}
			all = append(all, index.Manifests...)
			path = f.next(a)
		}
		return all
	}
	path := "/v2/r/referrers/" + subject.String()
	if got := list("/v2/none/referrers/" + subject.String()); len(got) != 0 {
		t.Errorf("referrers in no repository: %v", got)
	}
	if got := list(path); len(got) != 0 {
		t.Errorf("referrers before there are any: %v", got)
	}
	want := []ocispec.Descriptor{
		push(ocispec.MediaTypeImageManifest, "application/sbom", map[string]string{"a": "1"}),
		push(ocispec.MediaTypeImageManifest, "", nil),
		push(ocispec.MediaTypeImageIndex, "", map[string]string{"b": "2"}),
		push(ocispec.MediaTypeImageIndex, "application/sbom", nil),
	}
	if diff := cmp.Diff(want, list(path)); diff != "" {
		t.Errorf("all (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]ocispec.Descriptor{want[0], want[3]}, list(path+"?artifactType=application/sbom")); diff != "" {
		t.Errorf("of one type (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]ocispec.Descriptor{want[1]}, list(path+"?artifactType=application%2Fconfig")); diff != "" {
		t.Errorf("of a config's type (-want +got):\n%s", diff)
	}
	if got := list(path + "?artifactType=none"); len(got) != 0 {
		t.Errorf("of no type: %v", got)
	}
	f.want("delete", f.do("DELETE", "/v2/r/manifests/"+want[1].Digest.String(), nil), http.StatusAccepted)
	if diff := cmp.Diff([]ocispec.Descriptor{want[0], want[2], want[3]}, list(path)); diff != "" {
		t.Errorf("after a delete (-want +got):\n%s", diff)
	}
}

// A list that is larger than a manifest may be comes in several.
func TestReferrersPages(t *testing.T) {
	f := newFixture(t, registry.Options{MaxManifest: 8192})
	subject := digest.FromString("subject")
	var want []digest.Digest
	for i := range 5 {
		b := marshal(t, map[string]any{
			"subject":      ocispec.Descriptor{Digest: subject},
			"artifactType": "application/sbom",
			"annotations":  map[string]string{"long": strings.Repeat("x", 3000), "i": fmt.Sprint(i)},
		})
		f.want("put", f.put("r", fmt.Sprint(i), ocispec.MediaTypeImageIndex, b), http.StatusCreated)
		want = append(want, digest.FromBytes(b))
	}
	for _, query := range []string{"", "?artifactType=application/sbom"} {
		var got []digest.Digest
		pages := 0
		for path := "/v2/r/referrers/" + subject.String() + query; path != ""; pages++ {
			a := f.do("GET", path, nil)
			f.want("referrers", a, http.StatusOK)
			if len(a.body) > 8192 {
				t.Errorf("a page of %d bytes", len(a.body))
			}
			var index ocispec.Index
			if err := json.Unmarshal(a.body, &index); err != nil {
				t.Fatal(err)
			}
			for _, d := range index.Manifests {
				got = append(got, d.Digest)
			}
			path = f.next(a)
		}
		if diff := cmp.Diff(want, got); diff != "" || pages != 3 {
			t.Errorf("%d pages (-want +got):\n%s", pages, diff)
		}
	}
}

// What is dear to answer waits for its turn, and what is not does not wait for it.
func TestHeavyRequestsWait(t *testing.T) {
	heavy := limit.NewHeavy[guard.Client](1)
	f := newFixture(t, registry.Options{Heavy: heavy})
	b := marshal(t, map[string]any{"schemaVersion": 2})
	f.want("put", f.put("r", "1", ocispec.MediaTypeImageIndex, b), http.StatusCreated)
	large := marshal(t, map[string]any{"schemaVersion": 2, "annotations": map[string]string{"long": strings.Repeat("x", limit.HeavyBytes)}})
	leave, err := heavy.Enter(t.Context(), guard.Client{})
	if err != nil {
		t.Fatal(err)
	}
	answers := make(chan answer, 2)
	for _, ask := range []func() (answer, error){
		func() (answer, error) {
			return f.try("GET", "/v2/r/referrers/"+digest.FromBytes(b).String(), nil)
		},
		func() (answer, error) {
			return f.try("PUT", "/v2/r/manifests/2", bytes.NewReader(large), "Content-Type", ocispec.MediaTypeImageIndex)
		},
	} {
		go func() {
			a, err := ask()
			if err != nil {
				t.Error(err)
			}
			answers <- a
		}()
	}
	f.want("a small manifest", f.put("r", "3", ocispec.MediaTypeImageIndex, b), http.StatusCreated)
	f.wantManifest("r", "1", ocispec.MediaTypeImageIndex, b, digest.FromBytes(b))
	select {
	case a := <-answers:
		t.Errorf("%d before its turn: %s", a.StatusCode, a.body)
	case <-time.After(100 * time.Millisecond): // what does not wait is there long before
	}
	leave()
	for range 2 {
		if a := <-answers; a.StatusCode >= 400 {
			t.Errorf("%d %s", a.StatusCode, a.body)
		}
	}
}
