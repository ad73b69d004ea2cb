package upstream

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/server/registry"
)

func testClient(t testing.TB, prefix string) *Accelerator {
	c, err := newClient(Options{URL: "https://registry.example/" + prefix})
	if err != nil {
		t.Fatal(err)
	}
	return &Accelerator{client: c}
}

func TestParseEnvelope(t *testing.T) {
	d := digest.FromString("m")
	event := func(action, mediaType, repo, tag string) string {
		b, err := json.Marshal(map[string]any{"id": "x", "action": action, "target": map[string]any{
			"mediaType": mediaType, "size": 708, "digest": d, "length": 708, "repository": repo, "url": "http://x", "tag": tag,
		}, "request": map[string]any{"id": "y"}})
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	const image = "application/vnd.docker.distribution.manifest.v2+json"
	envelope := func(events ...string) string { return `{"events":[` + strings.Join(events, ",") + `]}` }
	for name, test := range map[string]struct {
		prefix, body string
		want         []Pushed
		fails        bool
	}{
		"push": {"", envelope(event("push", image, "team/app", "1")), []Pushed{{"team/app", "1", d}}, false},
		"by digest, an index": {"", envelope(event("push", "application/vnd.oci.image.index.v1+json", "app", "")),
			[]Pushed{{"app", "", d}}, false},
		"blobs, pulls, deletions": {"", envelope(event("push", "application/octet-stream", "app", ""), event("pull", image, "app", "1"),
			event("delete", image, "app", "1")), nil, false},
		"prefix":         {"team", envelope(event("push", image, "team/app", "1"), event("push", image, "teams/app", "1"), event("push", image, "team", "1")), []Pushed{{"app", "1", d}}, false},
		"none":           {"", envelope(), nil, false},
		"no envelope":    {"", `{}`, nil, true},
		"no JSON":        {"", `<html>`, nil, true},
		"bad repository": {"", envelope(event("push", image, "../app", "1")), nil, true},
		"bad tag":        {"", envelope(event("push", image, "app", "a b")), nil, true},
		"bad digest":     {"", strings.Replace(envelope(event("push", image, "app", "1")), d.String(), "sha256:x", 1), nil, true},
	} {
		got, err := testClient(t, test.prefix).parseEnvelope([]byte(test.body))
		if diff := cmp.Diff(test.want, got); diff != "" || (err != nil) != test.fails {
			t.Errorf("%s: %v (-want +got):\n%s", name, err, diff)
		}
	}
}

func FuzzEnvelope(f *testing.F) {
	f.Add([]byte(`{"events":[{"action":"push","target":{"mediaType":"application/vnd.oci.image.index.v1+json","digest":"` +
		digest.FromString("m").String() + `","repository":"team/app","tag":"1"}}]}`))
	a := testClient(f, "team")
	f.Fuzz(func(t *testing.T, b []byte) {
		all, err := a.parseEnvelope(b)
		for _, p := range all {
			if err != nil || !registry.ValidName(p.Repository) || p.Digest.Validate() != nil || p.Tag != "" && !registry.ValidTag(p.Tag) {
				t.Errorf("%+v, %v", p, err)
			}
		}
	})
}

// What is taken for a manifest has its digest.
func FuzzManifest(f *testing.F) {
	b := `{"mediaType":"application/vnd.oci.image.manifest.v1+json","config":{"mediaType":"a/b","digest":"` + digest.FromString("c").String() + `","size":1},"layers":[]}`
	f.Add([]byte(b), "application/vnd.oci.image.manifest.v1+json", "1", digest.FromString(b).String())
	f.Add([]byte(b), "application/json", digest.FromString(b).String(), "")
	f.Add([]byte("<html>"), "text/html; charset=utf-8", "1", "")
	a := testClient(f, "")
	f.Fuzz(func(t *testing.T, b []byte, mediaType, reference, said string) {
		h := http.Header{"Content-Type": {mediaType}, "Docker-Content-Digest": {said}}
		m, err := a.client.parseManifest("manifest", reference, h, b)
		if err != nil {
			if e := err.Error(); len(e) > 20_000 {
				t.Errorf("an error of %d bytes", len(e))
			}
			return
		}
		if m.MediaType == "" || m.Digest != m.Digest.Algorithm().FromBytes(m.Bytes) || string(m.Bytes) != string(b) {
			t.Errorf("%+v", m)
		}
		if d := digest.Digest(reference); d.Validate() == nil && m.Digest != d {
			t.Errorf("asked for %s, got %s", d, m.Digest)
		}
	})
}

func FuzzContentRange(f *testing.F) {
	for _, s := range []string{"bytes 0-0/1", "bytes 5-9/10", "bytes 0-9/9", "bytes */10", "bytes 0-9/*", ""} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		first, last, size, err := parseContentRange(s)
		if err == nil && (first < 0 || last < first || size <= last) {
			t.Errorf("%q: %d-%d/%d", s, first, last, size)
		}
	})
}

func FuzzErrors(f *testing.F) {
	f.Add([]byte(`{"errors":[{"code":"DENIED","message":"no"}]}`))
	f.Add([]byte(`{"errors":[]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		e, ok := parseErrors(b)
		if !ok {
			return
		}
		for _, s := range []string{e.Code, e.Message} {
			if len(s) > 400 || strings.ContainsAny(s, "\n\r\x00\x1b") {
				t.Errorf("%q is not fit for a line", s)
			}
		}
	})
}

func TestNextLink(t *testing.T) {
	for header, want := range map[string]string{
		"":                                      "",
		`</v2/_catalog?last=b&n=2>; rel="next"`: "_catalog?last=b&n=2",
		`<https://registry.example/v2/app/tags/list?last=b&n=2>; rel="next"`: "app/tags/list?last=b&n=2",
		`</v2/_catalog?last=b>; rel="prev"`:                                  "",
		`</elsewhere>; rel="next"`:                                           "",
		`/v2/_catalog; rel="next"`:                                           "",
	} {
		if got := nextLink(header); got != want {
			t.Errorf("%s: %q, want %q", header, got, want)
		}
	}
}
