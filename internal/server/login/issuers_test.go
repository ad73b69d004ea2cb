package login_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"
	"github.com/google/go-cmp/cmp"
	"github.com/pelletier/go-toml/v2"

	"hydrofoil.dev/foil/internal/server/access"
	"hydrofoil.dev/foil/internal/server/login"
)

// provider is an issuer of tokens, with discovery and keys as OpenID Connect has them.
type provider struct {
	*httptest.Server
	t   *testing.T
	key *ecdsa.PrivateKey
	ca  string // file
}

func newProvider(t *testing.T) *provider {
	t.Helper()
	p := &provider{t: t, ca: filepath.Join(t.TempDir(), "ca.pem")}
	var err error
	if p.key, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader); err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /.well-known/openid-configuration", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintf(w, `{"issuer": %q, "jwks_uri": %q, "authorization_endpoint": %q, "id_token_signing_alg_values_supported": ["ES256"]}`, p.URL, p.URL+"/keys", p.URL)
	})
	mux.HandleFunc("GET /keys", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(p.keys()) })
	p.Server = httptest.NewTLSServer(mux)
	t.Cleanup(p.Close)
	b := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: p.Certificate().Raw})
	if err := os.WriteFile(p.ca, b, 0o600); err != nil {
		t.Fatal(err)
	}
	return p
}

// keys are its public ones.
func (p *provider) keys() []byte {
	b, err := json.Marshal(jose.JSONWebKeySet{Keys: []jose.JSONWebKey{{Key: p.key.Public(), KeyID: "1", Algorithm: "ES256", Use: "sig"}}})
	if err != nil {
		panic(err)
	}
	return b
}

// sign makes a token of claims; what is nil is left out.
func sign(t *testing.T, key any, alg jose.SignatureAlgorithm, claims map[string]any) string {
	t.Helper()
	signer, err := jose.NewSigner(jose.SigningKey{Algorithm: alg, Key: key}, new(jose.SignerOptions).WithHeader("kid", "1"))
	if err != nil {
		t.Fatal(err)
	}
	s, err := jwt.Signed(signer).Claims(claims).Serialize()
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func (p *provider) token(change map[string]any) string {
	p.t.Helper()
	claims := map[string]any{"iss": p.URL, "aud": "registry.example", "sub": "joe", "exp": time.Now().Add(time.Hour).Unix(), "iat": time.Now().Unix()}
	for k, v := range change {
		claims[k] = v
	}
	return sign(p.t, p.key, jose.ES256, claims)
}

// logins reads a configuration.
func logins(t *testing.T, config string) (*login.Logins, error) {
	t.Helper()
	var c login.Config
	if err := toml.NewDecoder(strings.NewReader(config)).DisallowUnknownFields().Decode(&c); err != nil {
		t.Fatal(err)
	}
	state, err := login.Open(filepath.Join(t.TempDir(), "access", "keys.json"), slog.New(slog.NewTextHandler(t.Output(), nil)))
	if err != nil {
		t.Fatal(err)
	}
	return login.New(c, state)
}

func mustLogins(t *testing.T, config string) *login.Logins {
	t.Helper()
	l, err := logins(t, config)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

var (
	somewhere = netip.MustParseAddr("192.0.2.7")
	asked     atomic.Uint32
)

// identify says who a request with a header is of, or why of nobody. Each is from an address of its own,
// which has not failed before.
func identify(l *login.Logins, authorization string) string {
	req := httptest.NewRequest("GET", "/v2/", nil)
	if authorization != "" {
		req.Header.Set("Authorization", authorization)
	}
	n := asked.Add(1)
	id, err := l.Identify(req, netip.AddrFrom4([4]byte{10, byte(n >> 16), byte(n >> 8), byte(n)}))
	if err != nil {
		return "refused: " + err.Error()
	}
	s := id.Name
	if len(id.Groups) > 0 {
		s += " in " + strings.Join(id.Groups, ", ")
	}
	return s
}

func TestIssuers(t *testing.T) {
	sso, ci, cluster := newProvider(t), newProvider(t), newProvider(t)
	file := filepath.Join(t.TempDir(), "keys.json")
	if err := os.WriteFile(file, cluster.keys(), 0o600); err != nil {
		t.Fatal(err)
	}
	l := mustLogins(t, fmt.Sprintf(`
[[issuer]]
name = "corp"
url = %q
ca = %q
audience = "registry.example"
[[issuer.identity]]
name = "{email}"
groups = "groups"
where = { email_verified = "true" }

[[issuer]]
name = "ci"
url = %q
keys = %q
ca = %q
audience = "registry.example"
[[issuer.identity]]
name = "{project}:{branch}"
where = { owner = "org", branch = "release-*" }
[[issuer.identity]]
name = "other:{project}"
where = { owner = "org" }

[[issuer]]
name = "k8s"
url = "kubernetes/serviceaccount"
keys = %q
audience = "registry.example"
[[issuer.identity]]
name = "{kubernetes.io/namespace}/{kubernetes.io/serviceaccount/name}"
where = { sub = "system:serviceaccount:*" }
`, sso.URL, sso.ca, ci.URL, ci.URL+"/keys", ci.ca, file))
	pod := func(change map[string]any) string {
		claims := map[string]any{"iss": "kubernetes/serviceaccount", "aud": []string{"registry.example", "api"}, "sub": "system:serviceaccount:prod:app",
			"kubernetes.io": map[string]any{"namespace": "prod", "serviceaccount": map[string]any{"name": "app", "uid": "1"}}}
		for k, v := range change {
			claims[k] = v
		}
		return cluster.token(claims)
	}
	good := sso.token(map[string]any{"email": "joe@corp.example", "email_verified": true, "groups": []string{"dev", "ops"}})
	public, err := json.Marshal(jose.JSONWebKey{Key: sso.key.Public()})
	if err != nil {
		t.Fatal(err)
	}
	none := strings.Split(good, ".")
	for _, test := range []struct{ what, token, want string }{
		{"an ID token", good, "corp:joe@corp.example in corp:dev, corp:ops"},
		{"unverified", sso.token(map[string]any{"email": "root@corp.example", "email_verified": false}), "no identity of its issuer has such claims"},
		{"no claim", sso.token(map[string]any{"email_verified": true}), "its claim email is no name"},
		{"a name with a star", sso.token(map[string]any{"email": "*", "email_verified": true}), "its claim email is no name"},
		{"a name with a line", sso.token(map[string]any{"email": "a\nb", "email_verified": true}), "its claim email is no name"},
		{"CI", ci.token(map[string]any{"owner": "org", "project": "app", "branch": "release-1"}), "ci:app:release-1"},
		{"CI, the other rule", ci.token(map[string]any{"owner": "org", "project": "app", "branch": "main"}), "ci:other:app"},
		{"CI of others", ci.token(map[string]any{"owner": "orgs", "project": "app", "branch": "release-1"}), "no identity"},
		{"a project that plays a branch", ci.token(map[string]any{"owner": "org", "project": "app:release-1", "branch": "release-2"}), `its claim project has ":" in it`},
		{"a pod", pod(nil), "k8s:prod/app"},
		{"a namespace with a slash", pod(map[string]any{"kubernetes.io": map[string]any{"namespace": "a/b", "serviceaccount": map[string]any{"name": "c"}}}), `has "/" in it`},
		{"another audience", sso.token(map[string]any{"aud": "other", "email": "joe@corp.example", "email_verified": true}), "of an issuer that is not configured"},
		{"no audience", pod(map[string]any{"aud": nil}), "refused"},
		{"expired", pod(map[string]any{"exp": time.Now().Add(-time.Hour).Unix()}), "expired"},
		{"without an end", pod(map[string]any{"exp": nil}), "refused"},
		{"of later", pod(map[string]any{"nbf": time.Now().Add(time.Hour).Unix()}), "refused"},
	} {
		kind, _, known := strings.Cut(test.want, ":")
		known = known && slices.Contains([]string{"corp", "ci", "k8s"}, kind)
		if got := identify(l, "Bearer "+test.token); !strings.Contains(got, test.want) || strings.HasPrefix(got, "refused") == known {
			t.Errorf("%s: %s, want %s", test.what, got, test.want)
		}
		// As docker login sends it.
		req := httptest.NewRequest("GET", "/v2/", nil)
		req.SetBasicAuth("oidc", test.token)
		if got := identify(l, req.Header.Get("Authorization")); !strings.Contains(got, test.want) {
			t.Errorf("%s as a password: %s, want %s", test.what, got, test.want)
		}
	}

	// Tokens that nobody has signed, or somebody else.
	l2 := mustLogins(t, fmt.Sprintf("[[issuer]]\nname=\"corp\"\nurl=%q\nca=%q\naudience=\"registry.example\"\n[[issuer.identity]]\nname=\"{sub}\"\n", sso.URL, sso.ca))
	for what, token := range map[string]string{
		"another key":       ci.token(map[string]any{"iss": sso.URL}),
		"its public key":    sign(t, public, jose.HS256, map[string]any{"iss": sso.URL, "aud": "registry.example", "sub": "joe", "exp": time.Now().Add(time.Hour).Unix()}),
		"no signature":      none[0] + "." + none[1] + ".",
		"alg none":          "eyJhbGciOiJub25lIn0." + none[1] + ".",
		"another signature": none[0] + "." + none[1] + "." + strings.Split(sso.token(nil), ".")[2],
	} {
		if got := identify(l2, "Bearer "+token); !strings.HasPrefix(got, "refused") {
			t.Errorf("%s: %s", what, got)
		}
	}
	if got := identify(l2, "Bearer "+sso.token(nil)); got != "corp:joe" {
		t.Errorf("a good one: %s", got)
	}
}

// A token of an issuer is exchanged for one of the server, in each of the ways that clients have.
func TestExchange(t *testing.T) {
	p := newProvider(t)
	l := mustLogins(t, fmt.Sprintf("[[issuer]]\nname=\"ci\"\nurl=%q\nca=%q\naudience=\"registry.example\"\n[[issuer.identity]]\nname=\"{sub}\"\ngroups=\"groups\"\n", p.URL, p.ca))
	token := p.token(map[string]any{"groups": "dev"})
	post := func(v url.Values) *http.Request {
		req := httptest.NewRequest("POST", login.TokenPath, strings.NewReader(v.Encode()))
		req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
		return req
	}
	get := func(authorize func(*http.Request)) *http.Request {
		req := httptest.NewRequest("GET", login.TokenPath+"?service=foil&scope=repository:a:pull&offline_token=true", nil)
		authorize(req)
		return req
	}
	for what, req := range map[string]*http.Request{
		"basic":    get(func(r *http.Request) { r.SetBasicAuth("anything", token) }),
		"bearer":   get(func(r *http.Request) { r.Header.Set("Authorization", "Bearer "+token) }),
		"password": post(url.Values{"grant_type": {"password"}, "username": {"x"}, "password": {token}, "service": {"foil"}}),
		"exchange": post(url.Values{"grant_type": {"urn:ietf:params:oauth:grant-type:token-exchange"}, "subject_token": {token}, "service": {"foil"}}),
		"refresh":  post(url.Values{"grant_type": {"refresh_token"}, "refresh_token": {token}, "service": {"foil"}}),
	} {
		w := httptest.NewRecorder()
		if _, err := l.Token(req, w, somewhere); err != nil {
			t.Errorf("%s: %v", what, err)
			continue
		}
		var a struct {
			Token   string `json:"token"`
			Access  string `json:"access_token"`
			Expires int    `json:"expires_in"`
			Refresh string `json:"refresh_token"`
		}
		if err := json.Unmarshal(w.Body.Bytes(), &a); err != nil || a.Token != a.Access || a.Expires != 300 || a.Refresh != "" {
			t.Errorf("%s: %v %s", what, err, w.Body)
		}
		if got := identify(l, "Bearer "+a.Token); got != "ci:joe in ci:dev" {
			t.Errorf("%s: its token is of %s", what, got)
		}
		// One for a token ends when that does, and nothing refreshes it: they would go on for ever.
		var first, second struct {
			Expiry int64 `json:"exp"`
		}
		claims := func(raw string, to any) {
			t.Helper()
			b, err := base64.RawURLEncoding.DecodeString(strings.Split(raw, ".")[1])
			if err == nil {
				err = json.Unmarshal(b, to)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		claims(a.Token, &first)
		for _, again := range []*http.Request{get(func(r *http.Request) {
			r.Header.Set("Authorization", "Bearer "+a.Token)
			r.URL.RawQuery += "&offline_token=true"
		}), get(func(r *http.Request) { r.SetBasicAuth("x", a.Token) })} {
			w := httptest.NewRecorder()
			if _, err := l.Token(again, w, somewhere); err != nil {
				t.Errorf("%s: a token for a token: %v", what, err)
				continue
			}
			b := a
			if err := json.Unmarshal(w.Body.Bytes(), &b); err != nil || b.Refresh != "" {
				t.Errorf("%s: %v %s", what, err, w.Body)
			}
			if claims(b.Token, &second); second.Expiry > first.Expiry || b.Expires > a.Expires {
				t.Errorf("%s: a token that ends at %d gave one that ends at %d", what, first.Expiry, second.Expiry)
			}
		}
		if _, err := l.Token(post(url.Values{"grant_type": {"refresh_token"}, "refresh_token": {a.Token}}), httptest.NewRecorder(), somewhere); err == nil {
			t.Errorf("%s: a token that refreshes itself", what)
		}
	}
}

// Tokens of an external service say who, and bound what rules allow.
func TestExternalService(t *testing.T) {
	p := newProvider(t)
	l := mustLogins(t, fmt.Sprintf("[external-tokens]\nurl=\"https://auth.example/token\"\nservice=\"registry.example\"\nissuer=%q\nkeys=%q\nca=%q\n", p.URL, p.URL+"/keys", p.ca))
	req := httptest.NewRequest("GET", "/v2/", nil)
	if got, want := l.Challenge(req, "repository:a:pull", false), `Bearer realm="https://auth.example/token",service="registry.example",scope="repository:a:pull"`; got != want {
		t.Errorf("challenge %s, want %s", got, want)
	}
	req.Header.Set("Authorization", "Bearer "+p.token(map[string]any{"access": []map[string]any{
		{"type": "repository", "name": "team/app", "actions": []string{"pull", "push"}}, {"type": "repository", "name": "base", "actions": []string{"*"}}}}))
	id, err := l.Identify(req, somewhere)
	if err != nil || id.Name != "token:joe" {
		t.Fatalf("%+v, %v", id, err)
	}
	for _, test := range []struct {
		right access.Right
		repo  string
		want  bool
	}{{access.Pull, "team/app", true}, {access.Push, "team/app", true}, {access.Delete, "team/app", false}, {access.Delete, "base", true}, {access.Pull, "other", false}} {
		if got := id.Within(test.right, test.repo); got != test.want {
			t.Errorf("%s of %s: %v", test.right, test.repo, got)
		}
	}
	if id.WithinCatalog() {
		t.Error("it grants the catalog")
	}
	req.Header.Set("Authorization", "Bearer "+p.token(map[string]any{"access": []map[string]any{{"type": "registry", "name": "catalog", "actions": []string{"*"}}}}))
	if id, err := l.Identify(req, somewhere); err != nil || !id.WithinCatalog() || id.Within(access.Pull, "base") {
		t.Errorf("a token for the catalog alone: %+v, %v", id, err)
	}
	// By custom a token without a subject is nobody's; one without access grants nothing.
	req.Header.Set("Authorization", "Bearer "+p.token(map[string]any{"sub": nil}))
	if id, err := l.Identify(req, somewhere); err != nil || id.Name != access.Anonymous || id.Within(access.Pull, "base") {
		t.Errorf("%+v, %v", id, err)
	}
	if got := identify(l, "Bearer "+p.token(map[string]any{"aud": "other"})); !strings.HasPrefix(got, "refused") {
		t.Errorf("for somebody else: %s", got)
	}
	if _, err := l.Token(httptest.NewRequest("GET", login.TokenPath, nil), httptest.NewRecorder(), somewhere); err == nil {
		t.Error("there are two token services")
	}
}

func TestWrongConfigurations(t *testing.T) {
	issuer := "[[issuer]]\nname=\"ci\"\nurl=\"https://ci.example\"\naudience=\"a\"\n[[issuer.identity]]\nname=\"{sub}\"\n"
	for _, test := range []struct{ config, want string }{
		{strings.Replace(issuer, `name="ci"`, `name="user"`, 1), "the name is taken"},
		{strings.Replace(issuer, `name="ci"`, `name="C I"`, 1), "it wants a name of a-z"},
		{strings.Replace(issuer, `audience="a"`, ``, 1), "it wants an audience"},
		{strings.Replace(issuer, "{sub}", "all", 1), "everybody would have the same"},
		{strings.Replace(issuer, "{sub}", "{a}{b}", 1), "nothing between them"},
		{strings.Replace(issuer, "{sub}", "{a", 1), "want claims in braces"},
		{strings.Split(issuer, "[[issuer.identity]]")[0], "whose tokens count"},
		{strings.Replace(issuer, "https://ci", "ci", 1), "name them by keys"},
		{issuer + issuer, "the name is taken"},
		{"[tokens]\nlifetime=\"2h\"\n", "lifetime is at most 1h"},
		{"[tokens]\nurl=\"https://a\\\"b\"\n", "quotes"},
		{"[certificates]\nname=\"dns\"\n", "it wants ca"},
		{"[certificates]\nca=\"/dev/null\"\n", "no certificates in PEM form"},
		{"[passwords]\nfile=\"/missing\"\n", "[passwords] file /missing: no such file or directory"},
		{"[external-tokens]\nurl=\"https://a\"\n", "it wants url, service, issuer and keys"},
	} {
		if _, err := logins(t, test.config); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v, want %q", test.config, err, test.want)
		}
	}
}

// What a claim is called may be inside another one.
func TestNestedClaims(t *testing.T) {
	p := newProvider(t)
	l := mustLogins(t, fmt.Sprintf("[[issuer]]\nname=\"x\"\nurl=%q\nca=%q\naudience=\"registry.example\"\n[[issuer.identity]]\nname=\"{https://x.example/a/b}\"\nwhere={\"https://x.example/n\"=\"7\"}\n", p.URL, p.ca))
	got := identify(l, "Bearer "+p.token(map[string]any{"https://x.example/a": map[string]any{"b": "deep"}, "https://x.example/n": 7}))
	if diff := cmp.Diff("x:deep", got); diff != "" {
		t.Error(diff)
	}
}
