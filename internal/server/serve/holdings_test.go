package serve_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/catalog/sqlite"
	"hydrofoil.dev/foil/internal/server/rootdir"
	"hydrofoil.dev/foil/internal/server/serve"
	"hydrofoil.dev/foil/internal/server/upstream"
)

// artifact is a manifest with one blob.
func artifact(t *testing.T, blob []byte) []byte {
	t.Helper()
	of := func(b []byte) ocispec.Descriptor {
		return ocispec.Descriptor{MediaType: "application/octet-stream", Digest: digest.FromBytes(b), Size: int64(len(b))}
	}
	b, err := json.Marshal(ocispec.Manifest{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageManifest, Config: of(blob), Layers: []ocispec.Descriptor{of(blob)}})
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func (g *guarded) putBlob(repo string, b []byte) reply {
	return g.do(call{"POST", "/v2/" + repo + "/blobs/uploads/?digest=" + digest.FromBytes(b).String(), "", b}, basic("root"))
}

func (g *guarded) putTag(repo, tag string, manifest []byte) reply {
	return g.do(call{"PUT", "/v2/" + repo + "/manifests/" + tag, ocispec.MediaTypeImageManifest, manifest}, basic("root"))
}

// wantDenied checks an answer that says why not.
func (g *guarded) wantDenied(what string, r reply, messages ...string) {
	g.t.Helper()
	for _, message := range append(messages, `"DENIED"`) {
		if r.status != http.StatusForbidden || !strings.Contains(r.body, message) {
			g.t.Errorf("%s: %d %s, want 403 with %q", what, r.status, r.body, message)
		}
	}
}

// usages reads what is used, beside the server.
func (g *guarded) usages() map[string]catalog.Usage {
	g.t.Helper()
	c, err := sqlite.View(g.t.Context(), rootdir.CatalogFile(g.root))
	if err != nil {
		g.t.Fatal(err)
	}
	defer c.Close()
	all, err := c.Usages(g.t.Context(), "", -1)
	if err != nil {
		g.t.Fatal(err)
	}
	used := map[string]catalog.Usage{}
	for _, u := range all {
		used[u.Repository] = u.Usage
	}
	return used
}

// A quota holds for many who push at once, to the byte, and is read again when it changes. What is refused leaves nothing.
func TestQuota(t *testing.T) {
	g := startGuarded(t, "", nil)
	const pushers, size = 12, 10_000
	blobs, manifests := make([][]byte, pushers), make([][]byte, pushers)
	one := int64(0)
	for i := range pushers {
		blobs[i] = []byte(noise(uint64(100+i), size))
		manifests[i] = artifact(t, blobs[i])
		one = int64(size + len(manifests[i]))
	}
	quota := func(bytes int64) string {
		return fmt.Sprintf("[[quota]]\nname = \"the team\"\nrepositories = [\"team/**\"]\nbytes = %d\n", bytes)
	}
	// Room for 5, and most of a sixth.
	g.configure(quota(5*one + size))
	var in atomic.Int64
	var all sync.WaitGroup
	for i := range pushers {
		all.Go(func() {
			repo := fmt.Sprint("team/", i%3)
			if r := g.putBlob(repo, blobs[i]); r.status != 201 {
				g.wantDenied("a blob", r, "the quota \\\"the team\\\"", "raise the quota")
				return
			}
			r := g.putTag(repo, fmt.Sprint(i), manifests[i])
			if r.status == 201 {
				in.Add(1)
				return
			}
			g.wantDenied("a manifest", r, "the quota \\\"the team\\\"")
		})
	}
	all.Wait()
	sum := catalog.Usage{}
	for repo, u := range g.usages() {
		if strings.HasPrefix(repo, "team/") {
			sum.Bytes += u.Bytes
			sum.Manifests += u.Manifests
		}
	}
	if sum.Bytes != in.Load()*one || sum.Manifests != in.Load() || in.Load() != 5 {
		t.Errorf("%d were let in: %+v, want 5 of %d bytes", in.Load(), sum, one)
	}
	// Early: before a byte of it is sent, or as it comes.
	large := []byte(noise(99, 100_000))
	g.wantDenied("a large blob", g.putBlob("team/x", large), "no room for 100000 more")
	if r := g.putBlob("else/x", large); r.status != 201 {
		t.Errorf("another repository: %d %s", r.status, r.body)
	}
	g.wantDenied("a mount", g.do(call{method: "POST", path: "/v2/team/x/blobs/uploads/?from=else/x&mount=" + digest.FromBytes(large).String()}, basic("root")), "no room for 100000 more")
	// What takes nothing more is let in, deleting as well; then there is room again.
	var tag string
	for i := range pushers {
		repo := fmt.Sprint("team/", i%3)
		if g.do(call{method: "HEAD", path: "/v2/" + repo + "/manifests/" + fmt.Sprint(i)}, basic("root")).status != 200 {
			continue
		}
		tag = fmt.Sprint(i)
		if r := g.putTag(repo, "again", manifests[i]); r.status != 201 {
			t.Errorf("another tag: %d %s", r.status, r.body)
		}
		if r := g.putBlob(repo, blobs[i]); r.status != 201 {
			t.Errorf("a blob that is there: %d %s", r.status, r.body)
		}
		g.must(call{method: "DELETE", path: "/v2/" + repo + "/manifests/" + digest.FromBytes(manifests[i]).String()}, 202)
		if r := g.putTag(repo, tag, manifests[i]); r.status != 201 {
			t.Errorf("pushed again: %d %s", r.status, r.body)
		}
		break
	}
	if tag == "" {
		t.Fatal("nothing was let in")
	}
	g.configure(quota(1 << 30))
	for i := range pushers {
		repo := fmt.Sprint("team/", i%3)
		if b, m := g.putBlob(repo, blobs[i]), g.putTag(repo, fmt.Sprint(i), manifests[i]); b.status != 201 || m.status != 201 {
			t.Errorf("with a larger quota: %d %s, %d %s", b.status, b.body, m.status, m.body)
		}
	}
	if v := g.counter(`foil_serve_limited_total{limit="quota"}`); v == "0" || v == "" {
		t.Errorf("counted %q", v)
	}
	// Everything that was refused has gone.
	if left := g.usages()["team/x"]; left != (catalog.Usage{}) {
		t.Errorf("what was refused is there: %+v", left)
	}
}

// A client that does not say how much it sends has no more of the disk than the quota either.
func TestQuotaOfChunked(t *testing.T) {
	g := startGuarded(t, "", nil)
	g.configure("[[quota]]\nrepositories = [\"team/**\"]\nbytes = \"1M\"\n")
	zeros := make([]byte, 1<<20)
	sent, pr := endless(zeros)
	defer pr.Close()
	at := g.must(call{method: "POST", path: "/v2/team/x/blobs/uploads/"}, 202).header.Get("Location")
	req, err := http.NewRequestWithContext(t.Context(), "PATCH", "http://"+g.Addr()+at, pr)
	if err != nil {
		t.Fatal(err)
	}
	basic("root")(req)
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusForbidden || sent.Load() > 80<<20 {
		t.Errorf("%s after %d bytes", res.Status, sent.Load())
	}
	if r := g.do(call{method: "GET", path: at}, basic("root")); r.status != 404 {
		t.Errorf("the upload is still there: %d", r.status)
	}
}

// endless is a body that goes on until it is closed.
func endless(b []byte) (*atomic.Int64, *endlessBody) {
	e := &endlessBody{b: b}
	return &e.sent, e
}

type endlessBody struct {
	b      []byte
	sent   atomic.Int64
	closed atomic.Bool
}

func (e *endlessBody) Read(p []byte) (int, error) {
	if e.closed.Load() {
		return 0, http.ErrBodyReadAfterClose
	}
	n := copy(p, e.b)
	e.sent.Add(int64(n))
	return n, nil
}

func (e *endlessBody) Close() error {
	e.closed.Store(true)
	return nil
}

func TestImmutableTags(t *testing.T) {
	g := startGuarded(t, "", nil)
	g.configure("[[immutable]]\nname = \"releases\"\nrepositories = [\"mine/**\"]\ntags = [\"v*\"]\n")
	blob, other := []byte(noise(1, 100)), []byte(noise(2, 100))
	m, n := artifact(t, blob), artifact(t, other)
	for _, b := range [][]byte{blob, other} {
		if r := g.putBlob("mine/app", b); r.status != 201 {
			t.Fatal(r)
		}
	}
	for _, tag := range []string{"v1", "v1", "latest"} {
		if r := g.putTag("mine/app", tag, m); r.status != 201 {
			t.Fatalf("%s: %d %s", tag, r.status, r.body)
		}
	}
	base, d := "/v2/mine/app/", digest.FromBytes(m).String()
	g.wantDenied("another manifest", g.putTag("mine/app", "v1", n), "mine/app:v1 is immutable", "rule \\\"releases\\\"", "another tag")
	for _, path := range []string{"manifests/v1", "manifests/" + d, "blobs/" + digest.FromBytes(blob).String()} {
		g.wantDenied("DELETE "+path, g.do(call{method: "DELETE", path: base + path}, basic("root")), "immutable", "releases")
	}
	g.wantDenied("with tags as parameters", g.do(call{"PUT", base + "manifests/" + digest.FromBytes(n).String() + "?tag=new&tag=v1", ocispec.MediaTypeImageManifest, n}, basic("root")), "v1 is immutable")
	if r := g.do(call{method: "GET", path: base + "manifests/new"}, basic("root")); r.status != 404 {
		t.Errorf("a refused push has left a tag: %d", r.status)
	}
	if r := g.do(call{method: "GET", path: base + "manifests/v1"}, basic("root")); r.body != string(m) {
		t.Errorf("v1: %d %s", r.status, r.body)
	}
	if r := g.putTag("mine/app", "latest", n); r.status != 201 {
		t.Errorf("latest: %d %s", r.status, r.body)
	}
	if v := g.counter(`foil_serve_limited_total{limit="immutable"}`); v != "5" {
		t.Errorf("counted %q, want 5", v)
	}
	g.configure("")
	if r := g.putTag("mine/app", "v1", n); r.status != 201 {
		t.Errorf("without the rule: %d %s", r.status, r.body)
	}
}

func TestRetention(t *testing.T) {
	g := startGuarded(t, "", nil)
	g.configure("[[immutable]]\nrepositories = [\"mine/**\"]\ntags = [\"nightly-0\"]\n" +
		"[[retention]]\nname = \"nightly\"\nrepositories = [\"mine/*\"]\ntags = [\"nightly-*\"]\nkeep-last = 2\nkeep-for = \"30d\"\n")
	blob := []byte(noise(1, 100))
	m := artifact(t, blob)
	if r := g.putBlob("mine/app", blob); r.status != 201 {
		t.Fatal(r)
	}
	for i := range 6 {
		if r := g.putTag("mine/app", fmt.Sprint("nightly-", i), m); r.status != 201 {
			t.Fatal(r)
		}
	}
	tags := func() string {
		return g.must(call{method: "GET", path: "/v2/mine/app/tags/list"}, 200).body
	}
	before := tags()
	if err := g.Retain(t.Context(), time.Now().Add(29*24*time.Hour)); err != nil || tags() != before {
		t.Errorf("in time: %v, %s", err, tags())
	}
	if err := g.Retain(t.Context(), time.Now().Add(31*24*time.Hour)); err != nil {
		t.Fatal(err)
	}
	if got := tags(); !strings.Contains(got, `["1","nightly-0","nightly-4","nightly-5"]`) {
		t.Errorf("left: %s", got)
	}
	if r := g.do(call{method: "GET", path: "/v2/mine/app/manifests/" + digest.FromBytes(m).String()}, basic("root")); r.status != 200 {
		t.Errorf("the manifest has gone: %d", r.status)
	}
	lines := 0
	for line := range strings.Lines(g.audit.String()) {
		if strings.Contains(line, `"msg":"retention","repository":"mine/app","about":"nightly-`) && strings.Contains(line, `"decision":"untagged","rule":"nightly"`) {
			lines++
		}
	}
	if v := g.counter("foil_serve_untagged_total"); lines != 3 || v != "3" {
		t.Errorf("%d lines in the audit log, %s counted, want 3", lines, v)
	}
}

// What an accelerator holds is the upstream's.
func TestNoQuotaOfAnAccelerator(t *testing.T) {
	g := startGuarded(t, "", nil)
	g.configure("[[quota]]\nrepositories = [\"**\"]\nbytes = \"1M\"\n")
	_, err := serve.Start(t.Context(), serve.Options{Root: t.TempDir(), Listen: "127.0.0.1:0", Access: g.rules, Upstream: upstream.Options{URL: "http://127.0.0.1:1"}})
	if err == nil || !strings.Contains(err.Error(), "not for an accelerator") {
		t.Errorf("%v", err)
	}
}
