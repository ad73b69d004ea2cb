package serve_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"
	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/layer/layertest"
	"hydrofoil.dev/foil/internal/server/serve"
	"hydrofoil.dev/foil/internal/server/upstream"
	"hydrofoil.dev/foil/internal/server/upstream/upstreamtest"
)

// tokenService is one of the Distribution kind: it knows names by "password of NAME", and grants what is in
// may, "NAME REPOSITORY".
type tokenService struct {
	URL  string
	jwks string // a file
	mu   sync.Mutex
	may  map[string]bool // guarded by mu
}

func startTokenService(t *testing.T) *tokenService {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	s := &tokenService{jwks: filepath.Join(t.TempDir(), "keys.json"), may: map[string]bool{}}
	b, err := json.Marshal(jose.JSONWebKeySet{Keys: []jose.JSONWebKey{{Key: key.Public(), KeyID: "1", Algorithm: "ES256", Use: "sig"}}})
	if err != nil {
		t.Fatal(err)
	}
	writeFile(t, s.jwks, string(b))
	signer, err := jose.NewSigner(jose.SigningKey{Algorithm: jose.ES256, Key: key}, new(jose.SignerOptions).WithType("JWT").WithHeader("kid", "1"))
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		user, password, ok := req.BasicAuth()
		if err := req.ParseForm(); err != nil {
			t.Error(err)
		}
		if !ok { // as OAuth has it, the accelerator's own way
			user, password = req.Form.Get("username"), req.Form.Get("password")
		}
		if user != "" && password != "password of "+user {
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		access := []map[string]any{}
		for _, scope := range strings.Fields(strings.Join(req.Form["scope"], " ")) {
			kind, rest, _ := strings.Cut(scope, ":")
			name, actions, _ := strings.Cut(rest, ":")
			s.mu.Lock()
			if s.may[user+" "+name] {
				access = append(access, map[string]any{"type": kind, "name": name, "actions": strings.Split(actions, ",")})
			}
			s.mu.Unlock()
		}
		now := time.Now()
		token, err := jwt.Signed(signer).Claims(map[string]any{"iss": "tests", "aud": "upstream", "sub": user, "jti": fmt.Sprint(now.UnixNano()),
			"nbf": now.Add(-time.Minute).Unix(), "iat": now.Unix(), "exp": now.Add(time.Hour).Unix(), "access": access}).Serialize()
		if err != nil {
			t.Error(err)
		}
		_ = json.NewEncoder(w).Encode(map[string]any{"token": token, "access_token": token, "expires_in": 3600})
	}))
	t.Cleanup(server.Close)
	s.URL = server.URL
	return s
}

func (s *tokenService) let(user, repository string, may bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.may[user+" "+repository] = may
}

func (s *tokenService) auth() string {
	return fmt.Sprintf("auth: {token: {realm: %s/token, service: upstream, issuer: tests, jwks: %s, signingalgorithms: [ES256]}}\n", s.URL, s.jwks)
}

// askAs sends a request with credentials, which it exchanges for a token if the answer names a token service, as clients do.
func askAs(t *testing.T, user, method, url string, body []byte) reply {
	t.Helper()
	do := func(method, url string, body []byte, who credential) reply {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), method, url, strings.NewReader(string(body)))
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(url, "/manifests/") && method == "PUT" {
			req.Header.Set("Content-Type", ocispec.MediaTypeImageManifest)
		}
		who(req)
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return reply{resp.StatusCode, string(b), resp.Header.Get("Www-Authenticate"), resp.Header}
	}
	r := do(method, url, body, nobody)
	if r.status != 401 || user == "" {
		return r
	}
	var realm, scope string
	if bearerOf, ok := strings.CutPrefix(r.challenge, "Bearer "); ok {
		for p := range strings.SplitSeq(bearerOf, `",`) {
			k, v, _ := strings.Cut(p, `="`)
			switch v = strings.TrimSuffix(v, `"`); k {
			case "realm":
				realm = v
			case "scope":
				scope = v
			}
		}
		got := do("GET", realm+"?scope="+scope, nil, basic(user))
		var a struct{ Token string }
		if err := json.Unmarshal([]byte(got.body), &a); err != nil {
			t.Fatalf("token service: %d %s", got.status, got.body)
		}
		return do(method, url, body, bearer(a.Token))
	}
	return do(method, url, body, basic(user))
}

// put pushes an image to a registry.
func put(t *testing.T, user, base, repo string, m image) {
	t.Helper()
	push := func(b []byte) {
		t.Helper()
		r := askAs(t, user, "POST", base+"/v2/"+repo+"/blobs/uploads/", nil)
		at := r.header.Get("Location")
		if r = askAs(t, user, "PUT", at+"&digest="+digest.FromBytes(b).String(), b); r.status != 201 {
			t.Fatalf("push a blob: %d %s", r.status, r.body)
		}
	}
	for _, b := range m.blobs {
		push(b)
	}
	if r := askAs(t, user, "PUT", base+"/v2/"+repo+"/manifests/1", m.manifest); r.status != 201 {
		t.Fatalf("push a manifest: %d %s", r.status, r.body)
	}
}

// pulls are all requests that want something of an image.
func pulls(t *testing.T, base, repo string, m image) map[string]func(user string) reply {
	image := bundle.ImageRequest{Repository: repo, Reference: "1", Platform: &ocispec.Platform{OS: "linux", Architecture: "amd64"}}
	post := func(path string, v any) func(string) reply {
		b, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		return func(user string) reply { return askAs(t, user, "POST", base+path, b) }
	}
	get := func(path string) func(string) reply {
		return func(user string) reply { return askAs(t, user, "GET", base+path, nil) }
	}
	v2 := "/v2/" + repo
	d := digest.FromBytes(m.manifest).String()
	return map[string]func(string) reply{
		"tag":      get(v2 + "/manifests/1"),
		"manifest": get(v2 + "/manifests/" + d),
		"config":   get(v2 + "/blobs/" + digest.FromBytes(m.blobs[len(m.blobs)-1]).String()),
		"layer":    get(v2 + "/blobs/" + digest.FromBytes(m.blobs[0]).String()),
		"tags":     get(v2 + "/tags/list"),
		"bundle":   post(bundle.PullPath, &bundle.Request{Versions: []int{bundle.Version}, Image: image}),
		"recipe":   post(bundle.RecipePath, bundle.LayerRequest{Versions: []int{bundle.Version}, Image: image}),
		"contents": post(bundle.ContentsPath, bundle.LayerRequest{Versions: []int{bundle.Version}, Image: image, Contents: []bundle.ContentRun{{First: 0, Count: 1}}}),
		"startup":  get(bundle.StartupPath + "?repository=" + repo + "&reference=1"),
	}
}

// behind starts two accelerators that ask distribution 3 for each client: one that keeps answers for an hour, one that
// keeps them for no time to speak of.
func behind(t *testing.T, auth string) (base string, kept, fresh *serve.Server) {
	t.Helper()
	program := os.Getenv("FOIL_TEST_REGISTRY")
	if program == "" {
		t.Skip("FOIL_TEST_REGISTRY does not name a registry program, as that of tools/registry")
	}
	needProgram(t, program)
	addr := freeAddress(t)
	dir := t.TempDir()
	startRegistryWith(t, program, addr, dir, auth)
	own := filepath.Join(dir, "own")
	writeFile(t, own, "own:password of own")
	open := func(ttl time.Duration) *serve.Server {
		return start(t, serve.Options{Root: t.TempDir(), Upstream: upstream.Options{URL: "http://" + addr, Auth: own, ClientCredentials: true, RightsTTL: ttl, Pause: time.Millisecond}})
	}
	return "http://" + addr, open(time.Hour), open(time.Nanosecond)
}

func wantStatus(t *testing.T, calls map[string]func(string) reply, user string, want ...int) {
	t.Helper()
	for name, call := range calls {
		if got := call(user); got.status != want[0] && got.status != want[len(want)-1] {
			t.Errorf("%s for %q: %d %.200s, want %d", name, user, got.status, got.body, want)
		}
	}
}

func TestClientsOfATokenService(t *testing.T) {
	s := startTokenService(t)
	base, kept, fresh := behind(t, s.auth())
	m := makeImage(t, layertest.Layer{layertest.File("app", 0o755, noise(1, 100_000))})
	for _, u := range []string{"own", "ann"} {
		s.let(u, "team/app", true)
	}
	s.let("own", "team/secret", true)
	put(t, "own", base, "team/app", m)
	put(t, "own", base, "team/secret", m)
	for name, acc := range map[string]*serve.Server{"kept": kept, "fresh": fresh} {
		t.Run(name, func(t *testing.T) {
			at := "http://" + acc.Addr()
			app, secret := pulls(t, at, "team/app", m), pulls(t, at, "team/secret", m)
			wantStatus(t, app, "", 401)
			wantStatus(t, app, "ann", 200)
			wantStatus(t, app, "bob", 401)
			wantStatus(t, app, "", 401)
			// The very bytes are here, by the other repository.
			wantStatus(t, secret, "ann", 401)
			wantStatus(t, secret, "own", 200)
			wantStatus(t, secret, "ann", 401)
			// The challenge is the upstream's own, for what was asked.
			if diff := cmp.Diff(askAs(t, "", "GET", base+"/v2/team/app/manifests/1", nil).challenge, app["tag"]("").challenge); diff != "" {
				t.Errorf("challenge: %s", diff)
			}
			if c := app["bundle"]("").challenge; !strings.Contains(c, `realm="`+s.URL+`/token"`) || !strings.Contains(c, "repository:team/app:pull") {
				t.Errorf("challenge of a bundle: %s", c)
			}
			// Nobody teaches, or deletes, by the upstream's leave.
			if r := askAs(t, "ann", "DELETE", at+bundle.StartupPath+"?repository=team/app&reference=1", nil); r.status != 403 {
				t.Errorf("forget startup sets: %d %s", r.status, r.body)
			}
			if r := askAs(t, "ann", "GET", at+"/v2/", nil); r.status != 200 {
				t.Errorf("/v2/: %d", r.status)
			}
			if r := askAs(t, "bob", "GET", at+"/v2/_catalog", nil); r.status != 401 || strings.Contains(r.body, "secret") {
				t.Errorf("catalog: %d %s", r.status, r.body)
			}
			if r := askAs(t, "", "GET", at+"/healthz", nil); r.status != 200 {
				t.Errorf("healthz: %d", r.status)
			}
		})
	}
	// Each request fetches a token: the right that is gone is gone with it.
	s.let("ann", "team/app", false)
	wantStatus(t, pulls(t, "http://"+fresh.Addr(), "team/app", m), "ann", 401)
}

func TestClientsOfPasswords(t *testing.T) {
	file := filepath.Join(t.TempDir(), "htpasswd")
	writeFile(t, file, htpasswd(t, "own", "ann"))
	base, kept, fresh := behind(t, fmt.Sprintf("auth: {htpasswd: {realm: upstream, path: %s}}\n", file))
	m := makeImage(t, layertest.Layer{layertest.File("app", 0o755, noise(1, 100_000))})
	put(t, "own", base, "team/app", m)
	long, short := pulls(t, "http://"+kept.Addr(), "team/app", m), pulls(t, "http://"+fresh.Addr(), "team/app", m)
	for _, calls := range []map[string]func(string) reply{long, short} {
		wantStatus(t, calls, "", 401)
		wantStatus(t, calls, "ann", 200)
		wantStatus(t, calls, "", 401)
		if c := calls["tag"]("").challenge; c != `Basic realm="upstream"` {
			t.Errorf("challenge: %s", c)
		}
	}
	for _, calls := range []map[string]func(string) reply{long, short} {
		if r := calls["bundle"]("bob"); r.status != 401 {
			t.Errorf("who is not known: %d", r.status)
		}
		none := pulls(t, "http://"+fresh.Addr(), "team/none", m)
		wantStatus(t, none, "ann", 404)
	}
	// Ann goes. What was said of her holds as long as it was to.
	writeFile(t, file, htpasswd(t, "own"))
	if r := askAs(t, "ann", "GET", base+"/v2/", nil); r.status != 401 {
		t.Fatalf("the upstream: %d", r.status)
	}
	wantStatus(t, short, "ann", 401, 429) // 429: after so many failures
	wantStatus(t, long, "ann", 200)
}

// Passwords are not tried out through an accelerator, and what an upstream cannot decide nobody may.
func TestJudgeIsDown(t *testing.T) {
	up := upstreamtest.Start(t)
	up.Image("app", "1", layers(t, 1, 100_000)...)
	s := start(t, serve.Options{Root: t.TempDir(), Upstream: upstream.Options{URL: up.URL, ClientCredentials: true, RightsTTL: time.Nanosecond, Pause: time.Millisecond}})
	at := "http://" + s.Addr() + "/v2/app/manifests/1"
	send(t, "GET", at, "", nil, 200)
	for name, c := range map[string]struct {
		answer func(w http.ResponseWriter)
		status int
	}{
		"down":         {func(w http.ResponseWriter) { w.WriteHeader(http.StatusBadGateway) }, 503},
		"a login page": {func(w http.ResponseWriter) { w.Header().Set("Content-Type", "text/html"); fmt.Fprint(w, "log in") }, 502},
		"a redirect to one": {func(w http.ResponseWriter) {
			w.Header().Set("Location", "/login")
			w.WriteHeader(http.StatusFound)
		}, 502},
		"denied":  {func(w http.ResponseWriter) { upstreamtest.Fail(w, 403, "DENIED", "no") }, 404},
		"missing": {func(w http.ResponseWriter) { upstreamtest.Fail(w, 404, "MANIFEST_UNKNOWN", "no") }, 404},
	} {
		t.Run(name, func(t *testing.T) {
			up.Intercept(func(w http.ResponseWriter, _ *http.Request) bool {
				c.answer(w)
				return true
			})
			send(t, "GET", at, "", nil, c.status)
		})
	}
	up.Intercept(func(w http.ResponseWriter, req *http.Request) bool {
		w.Header().Set("Www-Authenticate", `Basic realm="up"`)
		upstreamtest.Fail(w, 401, "UNAUTHORIZED", "no")
		return true
	})
	slowed := 0
	before := up.Asked("HEAD manifests")
	for n := range 40 {
		req, err := http.NewRequestWithContext(t.Context(), "GET", at, nil)
		if err != nil {
			t.Fatal(err)
		}
		req.SetBasicAuth("ann", fmt.Sprint(n))
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode == 429 && resp.Header.Get("Retry-After") != "" {
			slowed++
		} else if resp.StatusCode != 401 {
			t.Errorf("a wrong password: %s", resp.Status)
		}
	}
	if asked := up.Asked("HEAD manifests") - before; slowed == 0 || asked+slowed > 41 {
		t.Errorf("of 40 wrong passwords %d were slowed down; the upstream was asked for %d", slowed, asked)
	}
}
