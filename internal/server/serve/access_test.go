package serve_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"
	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/crypto/bcrypt"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/layer/layertest"
	"hydrofoil.dev/foil/internal/format/trace"
	"hydrofoil.dev/foil/internal/logtest"
	"hydrofoil.dev/foil/internal/server/access"
	"hydrofoil.dev/foil/internal/server/bundles"
	"hydrofoil.dev/foil/internal/server/registry"
	"hydrofoil.dev/foil/internal/server/serve"
)

// guarded is a server with users, in each of the repositories mine/app and other/app an image with the
// tag 1, and none in gone/app. The password of each user is "password of NAME".
type guarded struct {
	*serve.Server
	t             *testing.T
	root          string
	rules, htpass string // files
	opts          serve.Options
	m             image
	log           *logtest.Buffer
	audit         *logtest.Buffer
}

// rulesOf are rules for root, who may everything, and for each right a user who has just that on mine/**.
func rulesOf(logins string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s\n[[rule]]\nname = \"root\"\nto = [\"user:root\"]\nallow = [\"pull\", \"push\", \"delete\", \"teach\", \"admin\"]\nrepositories = [\"**\"]\n", logins)
	for _, r := range access.Rights() {
		repositories := "mine/**"
		if r == access.Admin {
			repositories = "**"
		}
		fmt.Fprintf(&b, "[[rule]]\nname = \"only %s\"\nto = [\"user:%s\"]\nallow = [\"%s\"]\nrepositories = [\"%s\"]\n", r, r, r, repositories)
	}
	b.WriteString("[[rule]]\nto = [\"user:pusher\", \"user:teacher\", \"user:deleter\"]\nallow = [\"pull\"]\nrepositories = [\"mine/**\"]\n")
	b.WriteString("[[rule]]\nto = [\"user:pusher\"]\nallow = [\"push\"]\nrepositories = [\"mine/**\"]\n")
	b.WriteString("[[rule]]\nto = [\"user:teacher\"]\nallow = [\"teach\"]\nrepositories = [\"mine/**\"]\n")
	b.WriteString("[[rule]]\nto = [\"user:deleter\"]\nallow = [\"delete\"]\nrepositories = [\"mine/**\"]\n")
	return b.String()
}

var guardedUsers = []string{"root", "pull", "push", "delete", "teach", "admin", "pusher", "teacher", "deleter", "none"}

func writeFile(t *testing.T, path, content string) {
	t.Helper()
	if err := os.WriteFile(path+".new", []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
}

func htpasswd(t *testing.T, users ...string) string {
	t.Helper()
	var b strings.Builder
	for _, u := range users {
		hash, err := bcrypt.GenerateFromPassword([]byte("password of "+u), bcrypt.MinCost)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&b, "%s:%s\n", u, hash)
	}
	return b.String()
}

// startGuarded starts one. logins are added to the configuration.
func startGuarded(t *testing.T, logins string, change func(*serve.Options)) *guarded {
	t.Helper()
	dir := t.TempDir()
	g := &guarded{t: t, root: filepath.Join(dir, "root"), rules: filepath.Join(dir, "access.toml"), htpass: filepath.Join(dir, "htpasswd"),
		log: new(logtest.Buffer), audit: new(logtest.Buffer)}
	g.m = makeImage(t, layertest.Layer{layertest.File("app", 0o755, noise(1, 100_000))})
	open := start(t, serve.Options{Root: g.root})
	for _, repo := range []string{"mine/app", "other/app"} {
		g.m.pushTo(t, open.Addr(), repo)
	}
	if err := open.Close(); err != nil {
		t.Fatal(err)
	}
	writeFile(t, g.htpass, htpasswd(t, guardedUsers...))
	writeFile(t, g.rules, rulesOf(fmt.Sprintf("[passwords]\nfile = %q\n%s", g.htpass, logins)))
	opts := serve.Options{Root: g.root, Access: g.rules, Audit: g.audit,
		Log: slog.New(slog.NewTextHandler(io.MultiWriter(g.log, t.Output()), &slog.HandlerOptions{Level: slog.LevelInfo}))}
	if change != nil {
		change(&opts)
	}
	g.opts = opts
	g.Server = start(t, opts)
	return g
}

// reply is what came back, as far as it may tell anything.
type reply struct {
	status    int
	body      string
	challenge string
	header    http.Header
}

// credential puts itself on a request.
type credential func(*http.Request)

func basic(user string) credential {
	return func(r *http.Request) { r.SetBasicAuth(user, "password of "+user) }
}

func bearer(token string) credential {
	return func(r *http.Request) { r.Header.Set("Authorization", "Bearer "+token) }
}

func nobody(*http.Request) {}

// call is a request that can be made often.
type call struct {
	method, path, mediaType string
	body                    []byte
}

func (g *guarded) do(c call, who credential) reply {
	g.t.Helper()
	req, err := http.NewRequestWithContext(g.t.Context(), c.method, "http://"+g.Addr()+c.path, bytes.NewReader(c.body))
	if err != nil {
		g.t.Fatal(err)
	}
	if c.mediaType != "" {
		req.Header.Set("Content-Type", c.mediaType)
	}
	who(req)
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		g.t.Fatal(err)
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		g.t.Fatalf("%s %s: %v", c.method, c.path, err)
	}
	return reply{res.StatusCode, string(b), res.Header.Get("Www-Authenticate"), res.Header}
}

// must has root do something.
func (g *guarded) must(c call, status int) reply {
	g.t.Helper()
	r := g.do(c, basic("root"))
	if r.status != status {
		g.t.Fatalf("%s %s: %d %s, want %d", c.method, c.path, r.status, r.body, status)
	}
	return r
}

// token gets one.
func (g *guarded) token(who credential, query string) (token, refresh string) {
	g.t.Helper()
	r := g.do(call{method: "GET", path: "/token?service=foil" + query}, who)
	var a struct {
		Token   string `json:"token"`
		Refresh string `json:"refresh_token"`
	}
	if err := json.Unmarshal([]byte(r.body), &a); err != nil || r.status != 200 || a.Token == "" {
		g.t.Fatalf("token: %d %s", r.status, r.body)
	}
	return a.Token, a.Refresh
}

// forged signs a token with the server's own key.
func (g *guarded) forged(subject, audience string, expiry time.Time, more map[string]any) string {
	g.t.Helper()
	b, err := os.ReadFile(filepath.Join(g.root, "access", "keys.json"))
	if err != nil {
		g.t.Fatal(err)
	}
	var f struct {
		Keys []struct {
			ID     string `json:"id"`
			Secret []byte `json:"secret"`
		} `json:"keys"`
	}
	if err := json.Unmarshal(b, &f); err != nil {
		g.t.Fatal(err)
	}
	signer, err := jose.NewSigner(jose.SigningKey{Algorithm: jose.HS256, Key: f.Keys[0].Secret}, new(jose.SignerOptions).WithHeader("kid", f.Keys[0].ID))
	if err != nil {
		g.t.Fatal(err)
	}
	s, err := jwt.Signed(signer).Claims(jwt.Claims{Issuer: "foil", Subject: subject, Audience: jwt.Audience{audience}, Expiry: jwt.NewNumericDate(expiry)}).
		Claims(map[string]any{"use": "access"}).Claims(more).Serialize()
	if err != nil {
		g.t.Fatal(err)
	}
	return s
}

// requests says how each endpoint is called, for a repository: prepared by root, and again before each
// call, since some take away what they find. who is who will call it.
func (g *guarded) request(method, path, repo string, who credential) call {
	t := g.t
	t.Helper()
	base := "/v2/" + repo + "/"
	there := repo != "gone/app"
	blob := []byte(noise(uint64(time.Now().UnixNano()), 100))
	d := digest.FromBytes(blob)
	image := bundle.ImageRequest{Repository: repo, Reference: "1", Platform: &ocispec.Platform{OS: "linux", Architecture: "amd64"}}
	query := "?" + url.Values{"repository": {repo}, "reference": {"1"}}.Encode()
	encode := func(v any) []byte {
		b, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	manifest := call{"PUT", base + "manifests/2", ocispec.MediaTypeImageManifest, g.m.manifest}
	switch path {
	case "blobs/uploads", "blobs/uploads/":
		return call{method: method, path: base + path}
	case "blobs/uploads/*":
		at := base + "blobs/uploads/00000000-0000-4000-8000-000000000000"
		if r := g.do(call{method: "POST", path: base + "blobs/uploads/"}, who); r.status == 202 {
			at = r.header.Get("Location")
		}
		if method == "PUT" {
			at += "?digest=" + digest.FromBytes(blob).String()
		}
		c := call{method: method, path: at}
		if method != "GET" {
			c.body = blob
		}
		return c
	case "blobs/*":
		if there {
			g.must(call{"POST", base + "blobs/uploads/?digest=" + d.String(), "", blob}, 201)
		}
		return call{method: method, path: base + "blobs/" + d.String()}
	case "manifests/*":
		if method == "PUT" {
			return manifest
		}
		if there && method == "DELETE" {
			g.must(manifest, 201)
			return call{method: method, path: base + "manifests/2"}
		}
		return call{method: method, path: base + "manifests/1"}
	case "tags/list":
		return call{method: method, path: base + path}
	case "referrers/*":
		return call{method: method, path: base + "referrers/" + digest.FromBytes(g.m.manifest).String()}
	case bundle.PullPath:
		return call{method, path, "", encode(&bundle.Request{Versions: []int{bundle.Version}, Image: image})}
	case bundle.RecipePath, bundle.ContentsPath:
		l := bundle.LayerRequest{Versions: []int{bundle.Version}, Image: image}
		if path == bundle.ContentsPath {
			l.Contents = []bundle.ContentRun{{First: 0, Count: 1}}
		}
		return call{method, path, "", encode(l)}
	case bundle.TracePath:
		v := trace.Trace{Kind: trace.Reported, Args: []string{"app"}, Touched: []trace.Touch{{Run: trace.Run{Blocks: 1}}}}
		if there {
			var r bundle.StartupReport
			if err := json.Unmarshal([]byte(g.must(call{method: "GET", path: bundle.StartupPath + query}, 200).body), &r); err != nil {
				t.Fatal(err)
			}
			v.ChainID, v.TOC = r.ChainID, r.TOC
		} else {
			v.ChainID, v.TOC = d, d
		}
		return call{method, path + query, bundle.MediaTypeTrace, v.Encode()}
	case bundle.StartupPath:
		return call{method: method, path: path + query}
	case bundle.PromotePath:
		return call{method, path, "", encode(bundle.Promotion{Stream: "no such stream"})}
	case bundle.WarmPath:
		return call{method, path, "", encode(bundle.Warm{Bytes: 10})}
	}
	t.Fatalf("%s %s has no request here: say how it is called, so that its right is tested", method, path)
	return call{}
}

// asked is one endpoint with the right that it names.
type asked struct {
	method, path string
	right        access.Right
}

func endpoints() (all []asked) {
	for _, e := range registry.Endpoints() {
		all = append(all, asked{e.Method, e.Tail, e.Right})
	}
	for _, e := range bundles.Endpoints() {
		all = append(all, asked{e.Method, e.Path, e.Right})
	}
	slices.SortFunc(all, func(a, b asked) int { return strings.Compare(a.path+a.method, b.path+b.method) })
	return all
}

// userFor is one who has a right, and pull where that endpoint asks for it before.
func (a asked) userFor() string {
	switch a.right {
	case access.Pull:
		return "pull"
	case access.Push:
		return "pusher"
	case access.Delete:
		return "deleter"
	case access.Teach:
		return "teacher"
	}
	return "none"
}

// open reports whether an endpoint asks for nothing: warming up, and promotions, whose stream has to be
// known, and answers as one that has ended does.
func (a asked) open() bool { return a.path == bundle.WarmPath || a.path == bundle.PromotePath }

var nameOfRepo = regexp.MustCompile(`(mine|other|gone)/app`)

// tells is what of a reply may differ between something that is there and something that is not, repositories' names and
// digests aside.
func (r reply) tells() string {
	s := nameOfRepo.ReplaceAllString(r.body, "REPO")
	s = regexp.MustCompile(`sha256:[0-9a-f]{64}`).ReplaceAllString(s, "DIGEST")
	return fmt.Sprintf("%d %s %s", r.status, r.header.Get("Content-Type"), s)
}

// Every endpoint that there is, for who may, for who may something else, for other repositories, for nobody in
// particular, and for tokens that do not count.
func TestEveryEndpointAsks(t *testing.T) {
	g := startGuarded(t, "", nil)
	tokens := map[string]string{}
	for _, u := range guardedUsers {
		tokens[u], _ = g.token(basic(u), "")
	}
	hour := time.Now().Add(time.Hour)
	if r := g.do(call{method: "GET", path: "/v2/"}, bearer(g.forged("anonymous", "foil", hour, nil))); r.status != 200 {
		t.Fatalf("what is forged here does not count at all: %d %s", r.status, r.body)
	}
	bad := map[string]string{
		"an expired token":                        g.forged("user:root", "foil", time.Now().Add(-time.Minute), nil),
		"a token for somebody else":               g.forged("user:root", "other", hour, nil),
		"a token of another password":             g.forged("user:root", "foil", hour, map[string]any{"line": "0123"}),
		"a token of a way that is not configured": g.forged("ci:root", "foil", hour, nil),
		"a refresh token":                         func() string { _, r := g.token(basic("root"), "&offline_token=true"); return r }(),
		"no token":                                "x.y.z",
	}
	for _, e := range endpoints() {
		t.Run(e.method+" "+e.path, func(t *testing.T) {
			g := &guarded{Server: g.Server, t: t, root: g.root, m: g.m}
			if e.right == 0 && !e.open() {
				t.Fatal("it names no right")
			}
			ask := func(repo string, who credential) reply {
				t.Helper()
				return g.do(g.request(e.method, e.path, repo, who), who)
			}
			user := e.userFor()
			absent := ask("gone/app", bearer(tokens[user]))
			for way, who := range map[string]credential{"token": bearer(tokens[user]), "password": basic(user)} {
				r := ask("mine/app", who)
				if !e.open() && (r.status >= 400 || r.challenge != "") {
					t.Errorf("%s by %s: %d %s", user, way, r.status, r.body)
				}
				if r.status >= 500 {
					t.Errorf("%s by %s: %d %s", user, way, r.status, r.body)
				}
				// Another repository is as one that there is not.
				if diff := cmp.Diff(absent.tells(), ask("other/app", who).tells()); diff != "" {
					t.Errorf("%s by %s: another repository tells (-absent +there):\n%s", user, way, diff)
				}
			}
			if e.open() {
				return
			}
			for _, other := range []string{"pull", "push", "delete", "teach", "admin", "none"} {
				if other == e.right.String() && other == user {
					continue
				}
				r := ask("mine/app", bearer(tokens[other]))
				if other == e.right.String() && r.status < 400 {
					continue // it does not need to pull
				}
				if r.status != 403 && r.tells() != ask("gone/app", bearer(tokens[other])).tells() {
					t.Errorf("%s, who lacks %s: %d %s", other, e.right, r.status, r.body)
				}
				if r.status < 400 && e.path != "referrers/*" { // those of nothing are an empty list
					t.Errorf("%s, who lacks %s: %d %s", other, e.right, r.status, r.body)
				}
			}
			first := ask("gone/app", nobody)
			for _, repo := range []string{"mine/app", "other/app"} {
				r := ask(repo, nobody)
				if r.status != 401 || !strings.Contains(r.challenge, "Bearer realm=\"http://"+g.Addr()+"/token\",service=\"foil\",scope=\"repository:"+repo+":") {
					t.Errorf("anonymous: %d, challenge %q", r.status, r.challenge)
				}
				if diff := cmp.Diff(first.tells(), r.tells()); diff != "" {
					t.Errorf("anonymous learns what is there (-absent +there):\n%s", diff)
				}
			}
			for what, token := range bad {
				r := ask("mine/app", bearer(token))
				if r.status != 401 || e.method != "HEAD" && !strings.Contains(r.body, "UNAUTHORIZED") {
					t.Errorf("%s: %d %s", what, r.status, r.body)
				}
			}
		})
	}
}

// What is on a server and no repository's.
func TestServerEndpointsAsk(t *testing.T) {
	g := startGuarded(t, "", nil)
	for _, test := range []struct {
		path   string
		who    credential
		status int
		body   string
	}{
		{"/v2/", nobody, 401, "UNAUTHORIZED"},
		{"/v2/", basic("none"), 200, "{}"},
		{"/v2/_catalog", nobody, 401, "UNAUTHORIZED"},
		{"/v2/_catalog", basic("none"), 200, `{"repositories":[]}`},
		{"/v2/_catalog", basic("pull"), 200, `{"repositories":["mine/app"]}`},
		{"/v2/_catalog", basic("root"), 200, `{"repositories":["mine/app","other/app"]}`},
		{"/v2/_catalog?n=1", basic("root"), 200, `{"repositories":["mine/app"]}`},
		{"/v2/_catalog?n=1&last=mine/app", basic("root"), 200, `{"repositories":["other/app"]}`},
		{serve.MetricsPath, nobody, 401, "UNAUTHORIZED"},
		{serve.MetricsPath, basic("pull"), 403, "DENIED"},
		{serve.MetricsPath, basic("admin"), 200, "foil_serve_access_total"},
		{"/healthz", nobody, 200, "ok"},
		{"/token", nobody, 200, "token"},
		{"/token", func(r *http.Request) { r.SetBasicAuth("root", "guess") }, 401, "the name or the password is wrong"},
		{"/token?service=other", basic("root"), 401, "not of"},
	} {
		r := g.do(call{method: "GET", path: test.path}, test.who)
		if r.status != test.status || !strings.Contains(r.body, test.body) {
			t.Errorf("%s: %d %.300s, want %d %s", test.path, r.status, r.body, test.status, test.body)
		}
	}
	// A token of anonymous is one for clients that go on only with some.
	token, _ := g.token(nobody, "")
	if r := g.do(call{method: "GET", path: "/v2/"}, bearer(token)); r.status != 200 {
		t.Errorf("/v2/ with a token of anonymous: %d", r.status)
	}
	// It gives another one that ends when it does (package login), and none to refresh it.
	if _, refresh := g.token(bearer(token), "&offline_token=true"); refresh != "" {
		t.Errorf("a token is refreshed by itself: %s", refresh)
	}
}

// A right, or a user, that is withdrawn is gone with the next request.
func TestWithdrawn(t *testing.T) {
	g := startGuarded(t, "", nil)
	token, refresh := g.token(basic("pull"), "&offline_token=true")
	pull := call{method: "GET", path: "/v2/mine/app/manifests/1"}
	if r := g.do(pull, bearer(token)); r.status != 200 {
		t.Fatalf("%d %s", r.status, r.body)
	}
	b, err := os.ReadFile(g.rules)
	if err != nil {
		t.Fatal(err)
	}
	without := strings.Replace(string(b), `to = ["user:pull"]`, `to = ["user:somebody-else"]`, 1)
	writeFile(t, g.rules, without)
	if r := g.do(pull, bearer(token)); r.status != 404 {
		t.Errorf("the rule is gone: %d %s", r.status, r.body)
	}
	// A file that cannot be used changes nothing, and is told.
	writeFile(t, g.rules, without+"\n[[rule]]\nto = [\"everyone\"]\nallow = [\"evrything\"]\nrepositories = [\"**\"]\n")
	if r := g.do(pull, bearer(token)); r.status != 404 {
		t.Errorf("the rules are wrong: %d %s", r.status, r.body)
	}
	if log := g.log.String(); !strings.Contains(log, "rules and logins stay as they were") || !strings.Contains(log, "is no right") {
		t.Errorf("nobody is told: %s", log)
	}
	writeFile(t, g.rules, string(b))
	if r := g.do(pull, bearer(token)); r.status != 200 {
		t.Errorf("the rule is back: %d %s", r.status, r.body)
	}
	again := func(refresh string) reply {
		return g.do(call{"POST", "/token", "application/x-www-form-urlencoded", []byte(url.Values{
			"grant_type": {"refresh_token"}, "refresh_token": {refresh}, "service": {"foil"}}.Encode())}, nobody)
	}
	if r := again(refresh); r.status != 200 {
		t.Errorf("refresh: %d %s", r.status, r.body)
	}
	// Another password ends tokens and refresh tokens; so does it that the user goes.
	writeFile(t, g.htpass, htpasswd(t, "root", "pull"))
	if r := g.do(pull, bearer(token)); r.status != 401 {
		t.Errorf("another password: %d %s", r.status, r.body)
	}
	if r := again(refresh); r.status != 401 {
		t.Errorf("refresh with another password: %d %s", r.status, r.body)
	}
	token, refresh = g.token(basic("pull"), "&offline_token=true")
	writeFile(t, g.htpass, htpasswd(t, "root"))
	for what, r := range map[string]reply{"token": g.do(pull, bearer(token)), "refresh": again(refresh), "password": g.do(pull, basic("pull"))} {
		if r.status != 401 {
			t.Errorf("the user is gone; %s: %d %s", what, r.status, r.body)
		}
	}
}

// A digest is no permission to mount, and an upload is of who began it.
func TestMountsAndUploads(t *testing.T) {
	g := startGuarded(t, "", nil)
	secret := []byte(noise(77, 1000))
	d := digest.FromBytes(secret).String()
	g.must(call{"POST", "/v2/other/app/blobs/uploads/?digest=" + d, "", secret}, 201)
	mount := "/v2/mine/new/blobs/uploads/?mount=" + d
	for _, path := range []string{mount, mount + "&from=other/app", mount + "&from=gone/app"} {
		if r := g.do(call{method: "POST", path: path}, basic("pusher")); r.status != 202 || r.body != "" {
			t.Errorf("%s: %d %s, want an upload", path, r.status, r.body)
		}
		if r := g.do(call{method: "HEAD", path: "/v2/mine/new/blobs/" + d}, basic("root")); r.status != 404 {
			t.Errorf("%s: the blob was mounted", path)
		}
	}
	g.must(call{"POST", "/v2/mine/app/blobs/uploads/?digest=" + d, "", secret}, 201)
	if r := g.do(call{method: "POST", path: mount}, basic("push")); r.status != 202 {
		t.Errorf("who may push and not pull mounts: %d", r.status)
	}
	if r := g.do(call{method: "POST", path: mount}, basic("pusher")); r.status != 201 {
		t.Errorf("from a repository that one may pull: %d %s", r.status, r.body)
	}
	at := g.do(call{method: "POST", path: "/v2/mine/app/blobs/uploads/"}, basic("pusher")).header.Get("Location")
	for _, c := range []call{{method: "GET", path: at}, {method: "PATCH", path: at, body: []byte("x")}, {method: "PUT", path: at + "?digest=" + d}, {method: "DELETE", path: at}} {
		if r := g.do(c, basic("push")); r.status != 404 || !strings.Contains(r.body, "BLOB_UPLOAD_UNKNOWN") {
			t.Errorf("%s of somebody else's upload: %d %s", c.method, r.status, r.body)
		}
	}
	if r := g.do(call{method: "PATCH", path: at, body: []byte("mine")}, basic("pusher")); r.status != 202 {
		t.Errorf("one's own: %d %s", r.status, r.body)
	}
}

// A recorded trace wants the right to teach, a report does not; a stream is promoted by who began it.
func TestTeachAndPromote(t *testing.T) {
	g := startGuarded(t, "", nil)
	report := g.request("POST", bundle.TracePath, "mine/app", nobody)
	recorded := report
	v, err := trace.Decode(report.body)
	if err != nil {
		t.Fatal(err)
	}
	v.Kind = trace.Recorded
	recorded.body = v.Encode()
	for _, test := range []struct {
		c      call
		who    string
		status int
	}{{report, "pull", 204}, {recorded, "pull", 403}, {recorded, "teacher", 204}, {recorded, "teach", 404}, {report, "teach", 404}} {
		if r := g.do(test.c, basic(test.who)); r.status != test.status {
			t.Errorf("%s: %d %s, want %d", test.who, r.status, r.body, test.status)
		}
	}
	req := &bundle.Request{Versions: []int{bundle.Version}, Choose: true, Image: bundle.ImageRequest{
		Repository: "mine/app", Reference: "1", Platform: &ocispec.Platform{OS: "linux", Architecture: "amd64"}}}
	b, err := json.Marshal(req)
	if err != nil {
		t.Fatal(err)
	}
	pull, err := http.NewRequestWithContext(t.Context(), "POST", "http://"+g.Addr()+bundle.PullPath, bytes.NewReader(b))
	if err != nil {
		t.Fatal(err)
	}
	basic("pull")(pull)
	res, err := http.DefaultClient.Do(pull)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	stream := bundle.NewReader(res.Body, bundle.ReaderOptions{Request: req})
	var hello *bundle.Hello
	for { // until the plan: the stream waits for the choice then
		s, err := stream.Next()
		if err != nil {
			t.Fatal(err)
		}
		if h, ok := s.(*bundle.Hello); ok {
			hello = h
		}
		if _, ok := s.(*bundle.Plan); ok {
			break
		}
	}
	if hello == nil {
		t.Fatal("no hello")
	}
	choice, err := json.Marshal(bundle.Promotion{Stream: hello.Stream, Chosen: true})
	if err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		who    credential
		status int
	}{{basic("root"), 404}, {nobody, 404}, {basic("pull"), 204}} {
		if r := g.do(call{"POST", bundle.PromotePath, "", choice}, test.who); r.status != test.status {
			t.Errorf("promotion: %d %s, want %d", r.status, r.body, test.status)
		}
	}
	for {
		if _, err := stream.Next(); err == io.EOF {
			break
		} else if err != nil {
			t.Fatal(err)
		}
	}
}

// Nothing secret is in the log or the audit log, which has who did what by which rule.
func TestAudit(t *testing.T) {
	g := startGuarded(t, "", nil)
	token, refresh := g.token(basic("pull"), "&offline_token=true")
	g.do(call{method: "GET", path: "/v2/mine/app/manifests/1"}, bearer(token))
	g.do(call{method: "GET", path: "/v2/other/app/manifests/1"}, bearer(token))
	g.do(call{method: "GET", path: "/v2/"}, func(r *http.Request) { r.SetBasicAuth("pull", "hunter2") })
	g.do(call{method: "GET", path: "/v2/"}, bearer(token+"x"))
	type line struct{ Subject, Way, Address, Right, Repository, About, Decision, Rule string }
	var got []line
	for s := range strings.Lines(g.audit.String()) {
		var l struct {
			Msg string
			line
		}
		if err := json.Unmarshal([]byte(s), &l); err != nil {
			t.Fatalf("%v: %s", err, s)
		}
		if l.Msg == "access" {
			got = append(got, l.line)
		}
	}
	want := []line{
		{"user:pull", "token", "127.0.0.1", "pull", "mine/app", "1", "allowed", "only pull"},
		{"user:pull", "token", "127.0.0.1", "pull", "other/app", "1", "denied", ""},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("audit (-want +got):\n%s", diff)
	}
	for _, log := range []string{g.audit.String(), g.log.String()} {
		for _, secret := range []string{token, refresh, "hunter2", "password of"} {
			if strings.Contains(log, secret) {
				t.Errorf("%q is in a log:\n%s", secret, log)
			}
		}
	}
}

// An address that fails often is slowed down; tokens, and passwords that were right before, are not.
func TestFailuresAreSlowed(t *testing.T) {
	g := startGuarded(t, "", nil)
	token, _ := g.token(basic("pull"), "")
	ping := call{method: "GET", path: "/v2/"}
	var slowed reply
	for n := 0; slowed.status != 429; n++ {
		if n > 100 {
			t.Fatal("100 guesses, and no end")
		}
		slowed = g.do(ping, func(r *http.Request) { r.SetBasicAuth(fmt.Sprintf("user%d", n), "guess") })
	}
	if slowed.header.Get("Retry-After") == "" || !strings.Contains(slowed.body, "TOOMANYREQUESTS") {
		t.Errorf("%v %s", slowed.header, slowed.body)
	}
	if r := g.do(ping, basic("none")); r.status != 429 {
		t.Errorf("a password that was not seen before: %d", r.status)
	}
	for what, who := range map[string]credential{"token": bearer(token), "password": basic("pull")} {
		if r := g.do(ping, who); r.status != 200 {
			t.Errorf("%s: %d %s", what, r.status, r.body)
		}
	}
}

// A server that others reach wants TLS and logins, and says which lines are missing.
func TestExposed(t *testing.T) {
	dir := t.TempDir()
	rules := filepath.Join(dir, "access.toml")
	writeFile(t, rules, "[[rule]]\nto = [\"anonymous\"]\nallow = [\"pull\"]\nrepositories = [\"**\"]\n")
	for _, test := range []struct {
		listen, cert, access string
		insecure             bool
		lacks                []string
	}{
		{listen: ":0", lacks: []string{"has not TLS and a way to log in", "  --tls-cert cert.pem --tls-key key.pem\n  --access access.toml", "--insecure-open"}},
		{listen: "0.0.0.0:0", cert: "x", lacks: []string{"has not a way to log in", "--access"}},
		{listen: "[::]:0", access: rules, lacks: []string{"has not TLS", "--tls-cert"}},
		{listen: "192.0.2.1:0", lacks: []string{"has not TLS and"}},
		{listen: "example.com:0", lacks: []string{"has not TLS and"}},
		{listen: "0.0.0.0:0", insecure: true},
		{listen: "127.0.0.2:0"},
		{listen: "localhost:0"},
		{listen: "127.0.0.1:0", access: rules},
	} {
		s, err := serve.Start(t.Context(), serve.Options{Root: filepath.Join(t.TempDir(), "r"), Listen: test.listen, TLSCert: test.cert, TLSKey: test.cert,
			Access: test.access, InsecureOpen: test.insecure, Log: slog.New(slog.DiscardHandler)})
		if err == nil {
			if err := s.Close(); err != nil {
				t.Error(err)
			}
		}
		if (err == nil) != (test.lacks == nil) {
			t.Errorf("%+v: %v", test, err)
		}
		for _, want := range test.lacks {
			if err != nil && !strings.Contains(err.Error(), want) {
				t.Errorf("%+v: %v, want %q", test, err, want)
			}
		}
	}
}
