package guard_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"
	"golang.org/x/crypto/bcrypt"

	"hydrofoil.dev/foil/internal/metrics/metricstest"
	"hydrofoil.dev/foil/internal/server/access"
	"hydrofoil.dev/foil/internal/server/guard"
	"hydrofoil.dev/foil/internal/server/limit"
)

const docs = "../../../docs/access.md"

// setup returns a configuration of the document.
func setup(t *testing.T, name string) string {
	t.Helper()
	b, err := os.ReadFile(docs)
	if err != nil {
		t.Fatal(err)
	}
	_, after, found := strings.Cut(string(b), "<!-- "+name+" -->\n")
	if !found {
		t.Fatalf("%s has no set-up %s", docs, name)
	}
	var config strings.Builder
	for line := range strings.Lines(after) {
		if line != "\n" && !strings.HasPrefix(line, "    ") {
			break
		}
		config.WriteString(strings.TrimPrefix(line, "    "))
	}
	return config.String()
}

// issuer is one of the document's, here.
type issuer struct {
	*httptest.Server
	t   *testing.T
	key *ecdsa.PrivateKey
}

func newIssuer(t *testing.T) *issuer {
	t.Helper()
	i := &issuer{t: t}
	var err error
	if i.key, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader); err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /.well-known/openid-configuration", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintf(w, `{"issuer": %q, "jwks_uri": %q, "id_token_signing_alg_values_supported": ["ES256"]}`, i.URL, i.URL+"/keys")
	})
	mux.HandleFunc("GET /keys", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(i.keys()) })
	i.Server = httptest.NewServer(mux)
	t.Cleanup(i.Close)
	return i
}

func (i *issuer) keys() []byte {
	b, err := json.Marshal(jose.JSONWebKeySet{Keys: []jose.JSONWebKey{{Key: i.key.Public(), KeyID: "1"}}})
	if err != nil {
		panic(err)
	}
	return b
}

func (i *issuer) token(iss string, claims map[string]any) string {
	i.t.Helper()
	signer, err := jose.NewSigner(jose.SigningKey{Algorithm: jose.ES256, Key: i.key}, new(jose.SignerOptions).WithHeader("kid", "1"))
	if err != nil {
		i.t.Fatal(err)
	}
	s, err := jwt.Signed(signer).Claims(jwt.Claims{Issuer: iss, Subject: "s", Audience: jwt.Audience{"registry.example"}, Expiry: jwt.NewNumericDate(time.Now().Add(time.Hour))}).
		Claims(claims).Serialize()
	if err != nil {
		i.t.Fatal(err)
	}
	return s
}

// open reads a configuration, whose files are below dir.
func open(t testing.TB, dir, config string) *guard.Guard {
	t.Helper()
	file := filepath.Join(dir, "access.toml")
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	g, err := guard.Open(guard.Options{File: file, Keys: filepath.Join(dir, "keys.json"), Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatalf("%v\n%s", err, config)
	}
	return g
}

// ask says whether a request may: "yes", "no", "login" (401) or "wrong" (credentials).
func ask(g *guard.Guard, authorize func(*http.Request), right access.Right, repository string) string {
	said := "wrong"
	h := g.Wrap(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		err := g.Check(req.Context(), right, repository)
		d, denied := errors.AsType[*guard.Denied](err)
		switch {
		case err == nil:
			said = "yes"
		case denied && d.Unknown:
			said = "login"
		case denied:
			said = "no"
		default:
			said = err.Error()
		}
	}), func(*http.Request) bool { return false })
	req := httptest.NewRequest("GET", "/v2/", nil)
	if authorize != nil {
		authorize(req)
	}
	h.ServeHTTP(httptest.NewRecorder(), req)
	return said
}

// The set-ups of the document do what it says.
func TestSetUps(t *testing.T) {
	cluster, ci := newIssuer(t), newIssuer(t)
	as := func(user string) func(*http.Request) {
		return func(r *http.Request) { r.SetBasicAuth(user, "password of "+user) }
	}
	with := func(token string) func(*http.Request) {
		return func(r *http.Request) { r.SetBasicAuth("ci", token) }
	}
	job := func(project, ref, kind string) func(*http.Request) {
		return with(ci.token(ci.URL, map[string]any{"project_path": project, "ref": ref, "ref_protected": "true", "ref_type": kind}))
	}
	pod := func(namespace, account string) func(*http.Request) {
		return with(cluster.token("https://kubernetes.default.svc.cluster.local", map[string]any{
			"kubernetes.io": map[string]any{"namespace": namespace, "serviceaccount": map[string]any{"name": account}}}))
	}
	type question struct {
		who        func(*http.Request)
		right      access.Right
		repository string
		want       string
	}
	for name, questions := range map[string][]question{
		"one-user": {
			{as("ann"), access.Push, "any/thing", "yes"}, {as("ann"), access.Admin, "", "yes"}, {as("bob"), access.Pull, "any", "no"},
			{nil, access.Pull, "any", "login"}, {as("nobody"), access.Pull, "any", "wrong"},
		},
		"team": {
			{as("ann"), access.Pull, "team/release/app", "yes"}, {as("ann"), access.Push, "team/release/app", "no"}, {as("bob"), access.Push, "team/dev/app", "yes"},
			{as("publisher"), access.Pull, "team/app", "no"}, {nil, access.Pull, "team/app", "login"},
			{job("team/app", "main", "branch"), access.Push, "team/release/app", "yes"}, {job("team/app", "main", "branch"), access.Push, "team/dev/app", "no"},
			{job("team/app", "try", "branch"), access.Push, "team/release/app", "no"}, {job("team/app", "try", "branch"), access.Pull, "team/release/app", "yes"},
			{job("other/app", "main", "branch"), access.Pull, "team/release/app", "no"}, {job("team/app", "main", "tag"), access.Pull, "team/app", "wrong"},
		},
		"kubernetes": {
			{pod("prod", "app"), access.Pull, "release/app", "yes"}, {pod("prod", "app"), access.Push, "release/app", "no"}, {pod("prod", "app"), access.Pull, "team/app", "no"},
			{pod("ci", "builder"), access.Push, "release/app", "yes"}, {pod("ci", "other"), access.Pull, "release/app", "no"}, {pod("prod/app", "x"), access.Pull, "release/app", "wrong"},
			{nil, access.Pull, "release/app", "login"},
		},
		"public": {
			{nil, access.Pull, "any/thing", "yes"}, {as("ann"), access.Pull, "any", "yes"}, {nil, access.Push, "any", "login"}, {as("ann"), access.Push, "any", "no"},
			{as("publisher"), access.Push, "any", "yes"}, {as("publisher"), access.Admin, "", "no"},
		},
		"upstream": {
			{as("ann"), access.Pull, "library/app", "yes"}, {as("ann"), access.Pull, "private/app", "no"}, {nil, access.Pull, "library/app", "login"},
			{as("upstream"), access.Push, "private/app", "yes"}, {as("ann"), access.Push, "library/app", "no"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			var passwords strings.Builder
			for _, u := range []string{"ann", "bob", "publisher", "upstream"} {
				hash, err := bcrypt.GenerateFromPassword([]byte("password of "+u), bcrypt.MinCost)
				if err != nil {
					t.Fatal(err)
				}
				fmt.Fprintf(&passwords, "%s:%s\n", u, hash)
			}
			for file, b := range map[string][]byte{"htpasswd": []byte(passwords.String()), "cluster-keys.json": cluster.keys()} {
				if err := os.WriteFile(filepath.Join(dir, file), b, 0o600); err != nil {
					t.Fatal(err)
				}
			}
			config := strings.ReplaceAll(setup(t, name), "/etc/foil/", dir+"/")
			g := open(t, dir, strings.ReplaceAll(config, "https://gitlab.example", ci.URL))
			for i, q := range questions {
				if got := ask(g, q.who, q.right, q.repository); got != q.want {
					t.Errorf("%d: %s of %s: %s, want %s", i, q.right, q.repository, got, q.want)
				}
			}
		})
	}
}

// A guard that is there lets nobody past who came around it, and no endpoint without a right.
func TestClosed(t *testing.T) {
	dir := t.TempDir()
	g := open(t, dir, "[[rule]]\nto = [\"everyone\"]\nallow = [\"pull\"]\nrepositories = [\"**\"]\n")
	if err := g.Check(t.Context(), access.Pull, "a"); err == nil {
		t.Error("a request without a caller may pull")
	}
	if g.May(t.Context(), access.Pull, "a") {
		t.Error("a request without a caller may")
	}
	if got := ask(g, nil, access.Pull, "a"); got != "yes" {
		t.Errorf("everyone: %s", got)
	}
	if got := ask(g, nil, 0, "a"); got == "yes" {
		t.Error("an endpoint without a right is open")
	}
	var none *guard.Guard
	if err := none.Check(t.Context(), access.Pull, "a"); err != nil {
		t.Errorf("an open server: %v", err)
	}
	if err := none.Check(t.Context(), 0, "a"); err == nil {
		t.Error("an endpoint without a right is open on an open server")
	}
}

func TestMetricsAreDocumented(t *testing.T) {
	g := open(t, t.TempDir(), "[[rule]]\nto = [\"everyone\"]\nallow = [\"pull\"]\nrepositories = [\"**\"]\n")
	metricstest.Table(t, "../../../docs/metrics.md", "access", g.Metrics())
}

// A client that sends too much is told to wait; others, and the same subject elsewhere, are not.
func TestLimits(t *testing.T) {
	g := open(t, t.TempDir(), "[limits]\nrequests = 0.001\nburst = 3\nparallel = 1\n[[rule]]\nto = [\"everyone\"]\nallow = [\"pull\"]\nrepositories = [\"**\"]\n")
	inside, leave := make(chan struct{}), make(chan struct{})
	h := g.Wrap(http.HandlerFunc(func(_ http.ResponseWriter, req *http.Request) {
		if req.URL.Path == "/wait" {
			close(inside)
			<-leave
		}
	}), func(*http.Request) bool { return false })
	send := func(address, path string) *httptest.ResponseRecorder {
		req := httptest.NewRequest("GET", path, nil)
		req.RemoteAddr = address
		w := httptest.NewRecorder()
		h.ServeHTTP(w, req)
		return w
	}
	const one, other = "192.0.2.1:1", "192.0.2.2:1"
	done := make(chan struct{})
	go func() {
		defer close(done)
		send(one, "/wait")
	}()
	<-inside
	if w := send(one, "/"); w.Code != 429 || !strings.Contains(w.Body.String(), "at once") || w.Header().Get("Retry-After") == "" {
		t.Errorf("a second one at once: %d %s", w.Code, w.Body)
	}
	if w := send(other, "/"); w.Code != 200 {
		t.Errorf("another address: %d", w.Code)
	}
	close(leave)
	<-done
	if w := send(one, "/"); w.Code != 200 {
		t.Errorf("when the first has ended: %d", w.Code)
	}
	if w := send(one, "/"); w.Code != 429 || !strings.Contains(w.Body.String(), "a second") {
		t.Errorf("a fourth one: %d %s", w.Code, w.Body)
	}
	if w := send(other, "/"); w.Code != 200 {
		t.Errorf("another address: %d", w.Code)
	}
}

// Bodies of a client keep to its rate, in both directions; its streams get equal shares, and others are not slowed down.
func TestPace(t *testing.T) {
	const size = 4 << 20
	dir := t.TempDir()
	g := open(t, dir, "[limits]\nbytes = \"1M\"\nparallel = 4\n[[rule]]\nto = [\"everyone\"]\nallow = [\"pull\"]\nrepositories = [\"**\"]\n")
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		h := g.Wrap(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			var err error
			var n int64
			if req.Method == "PUT" {
				n, err = io.Copy(io.Discard, req.Body)
			} else {
				n, err = io.Copy(w, strings.NewReader(strings.Repeat("x", size)))
			}
			if err != nil || n != size {
				t.Errorf("%s: %d bytes, %v", req.Method, n, err)
			}
		}), func(*http.Request) bool { return false })
		var all sync.WaitGroup
		for _, test := range []struct {
			method, address string
			least, most     time.Duration
		}{
			// Either may have had the whole burst, a second's.
			{"GET", "192.0.2.1:1", 5800 * time.Millisecond, 7 * time.Second}, {"PUT", "192.0.2.1:2", 5800 * time.Millisecond, 7 * time.Second},
			{"GET", "192.0.2.2:1", 3 * time.Second, 3 * time.Second},
		} {
			all.Go(func() {
				req := httptest.NewRequest(test.method, "/", strings.NewReader(strings.Repeat("x", size)))
				req.RemoteAddr = test.address
				h.ServeHTTP(httptest.NewRecorder(), req)
				if took := time.Since(began).Round(10 * time.Millisecond); took < test.least || took > test.most {
					t.Errorf("%s of %s: %v, want %v to %v", test.method, test.address, took, test.least, test.most)
				}
			})
		}
		all.Wait()
		if took := time.Since(began); took < 6800*time.Millisecond || took > 7*time.Second { // the last pieces wait for nobody
			t.Errorf("8 MiB at 1 MiB a second with a burst of one: %v", took)
		}
	})
	// Who goes away does not wait.
	ctx, cancel := context.WithCancel(t.Context())
	h := g.Wrap(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		cancel()
		if n, err := io.Copy(w, strings.NewReader(strings.Repeat("x", 64*size))); !errors.Is(err, context.Canceled) || n >= 64*size {
			t.Errorf("%d bytes, %v", n, err)
		}
	}), func(*http.Request) bool { return false })
	h.ServeHTTP(httptest.NewRecorder(), httptest.NewRequestWithContext(ctx, "GET", "/", nil))
}

// What was worked for a client is paid off in the course of an hour.
func TestWork(t *testing.T) {
	g := open(t, t.TempDir(), "[limits]\nwork = \"6m\"\n[[rule]]\nto = [\"everyone\"]\nallow = [\"pull\"]\nrepositories = [\"**\"]\n")
	synctest.Test(t, func(t *testing.T) {
		work := func(address string, d time.Duration) time.Duration {
			t.Helper()
			after := time.Duration(0)
			h := g.Wrap(http.HandlerFunc(func(_ http.ResponseWriter, req *http.Request) {
				charge, err := g.Work(req.Context())
				if e, ok := errors.AsType[*guard.Beyond](err); ok {
					after = e.After
				} else if err != nil {
					t.Error(err)
				} else {
					charge(d)
				}
			}), func(*http.Request) bool { return false })
			req := httptest.NewRequest("GET", "/", nil)
			req.RemoteAddr = address
			h.ServeHTTP(httptest.NewRecorder(), req)
			return after
		}
		const one, other = "192.0.2.1:1", "192.0.2.2:1"
		if after := work(one, 5*time.Minute); after != 0 {
			t.Errorf("the first: %v", after)
		}
		if after := work(one, 20*time.Minute); after != 0 { // what has begun goes on
			t.Errorf("within the hour's 6 minutes: %v", after)
		}
		if after := work(one, 0).Round(time.Second); after != 190*time.Minute {
			t.Errorf("19 minutes too many: after %v, want 3h10m", after)
		}
		if after := work(other, time.Second); after != 0 {
			t.Errorf("another client: %v", after)
		}
		time.Sleep(191 * time.Minute)
		if after := work(one, 0); after != 0 {
			t.Errorf("after that: %v", after)
		}
	})
}

// Limits that make no sense are refused.
func TestStrictLimits(t *testing.T) {
	for limits, want := range map[string]string{
		"bytes = \"1K\"":                   "streams would look dead",
		"bytes = \"1M\"\nparallel = 10000": "at least 81920000",
		"upload-idle = \"10m\"":            "at least an hour",
		"work = \"1ms\"":                   "at least a second",
		"uploads = -1":                     "above 0",
		"bundle = 1":                       "there is no setting limits.bundle",
		"upload-bytes = \"much\"":          "want bytes like 500M",
	} {
		dir := t.TempDir()
		file := filepath.Join(dir, "access.toml")
		if err := os.WriteFile(file, []byte("[limits]\n"+limits+"\n[[rule]]\nto = [\"everyone\"]\nallow = [\"pull\"]\nrepositories = [\"**\"]\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := guard.Open(guard.Options{File: file, Keys: filepath.Join(dir, "keys.json")})
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", limits, err, want)
		}
	}
}

// What the document says about how much can be written, is.
func TestDocumentedLimits(t *testing.T) {
	for _, name := range []string{"limits", "holdings"} {
		g := open(t, t.TempDir(), setup(t, name))
		if got := ask(g, nil, access.Pull, "any"); got != "yes" {
			t.Errorf("%s: %s", name, got)
		}
		if l := g.Limits(); name == "limits" && (l.Bytes != 50<<20 || l.Work != limit.Duration(10*time.Minute) || l.UploadIdle != limit.Duration(24*time.Hour) || l.Uploads != 100) {
			t.Errorf("%+v", l)
		}
		if h := g.Holdings(); name == "holdings" && (h.Every() != 6*time.Hour || len(h.Quotas("team/dev/x")) != 2 || h.Immutable("a", "v1") != "releases" || !h.Retains("team/dev/x")) {
			t.Errorf("%+v", h)
		}
	}
}

// A token of an external service that grants less than rules allow is to be exchanged for one that grants it; what rules
// deny stays denied, whatever a token grants.
func TestExternalTokensThatGrantTooLittle(t *testing.T) {
	dir, i := t.TempDir(), newIssuer(t)
	g := open(t, dir, fmt.Sprintf("[external-tokens]\nurl = \"https://auth.example/token\"\nservice = \"registry.example\"\nissuer = \"auth.example\"\nkeys = %q\n"+
		"[[rule]]\nto = [\"token:s\"]\nallow = [\"pull\", \"push\"]\nrepositories = [\"mine/**\"]\n", i.URL+"/keys"))
	grants := func(repository string, actions ...string) func(*http.Request) {
		token := i.token("auth.example", map[string]any{"access": []map[string]any{{"type": "repository", "name": repository, "actions": actions}}})
		return func(r *http.Request) { r.Header.Set("Authorization", "Bearer "+token) }
	}
	for _, test := range []struct {
		who        func(*http.Request)
		right      access.Right
		repository string
		want       string
	}{
		{grants("mine/app", "pull"), access.Pull, "mine/app", "yes"},
		{grants("mine/app", "pull"), access.Push, "mine/app", "login"},
		{grants("mine/app", "pull", "push"), access.Push, "mine/app", "yes"},
		{grants("mine/app", "pull"), access.Pull, "mine/other", "login"},
		{grants("mine/app", "*"), access.Delete, "mine/app", "no"},
		{grants("other/app", "*"), access.Pull, "other/app", "no"},
		{grants("mine/app", "*"), access.Pull, "other/app", "no"},
	} {
		if got := ask(g, test.who, test.right, test.repository); got != test.want {
			t.Errorf("%s of %s: %s, want %s", test.right, test.repository, got, test.want)
		}
	}
}

// BenchmarkGuard is what rules and a token add to a request: who it is, and whether they may.
func BenchmarkGuard(b *testing.B) {
	dir := b.TempDir()
	hash, err := bcrypt.GenerateFromPassword([]byte("password"), bcrypt.MinCost)
	if err != nil {
		b.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "htpasswd"), fmt.Appendf(nil, "ann:%s\n", hash), 0o600); err != nil {
		b.Fatal(err)
	}
	g := open(b, dir, fmt.Sprintf("[passwords]\nfile = %q\n[limits]\nrequests = 1e9\nburst = 1000000000\n[[rule]]\nto = [\"user:ann\"]\nallow = [\"pull\"]\nrepositories = [\"team/**\"]\n",
		filepath.Join(dir, "htpasswd")))
	w := httptest.NewRecorder()
	form := strings.NewReader("grant_type=password&service=foil&username=ann&password=password")
	req := httptest.NewRequest("POST", "/token", form)
	req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	g.Token(w, req)
	var got struct{ Token string }
	if err := json.Unmarshal(w.Body.Bytes(), &got); err != nil || got.Token == "" {
		b.Fatalf("no token: %s", w.Body)
	}
	req = httptest.NewRequest("GET", "/v2/team/app/manifests/1", nil)
	req.Header.Set("Authorization", "Bearer "+got.Token)
	h := g.Wrap(http.HandlerFunc(func(_ http.ResponseWriter, req *http.Request) {
		if err := g.Check(req.Context(), access.Pull, "team/app", "1"); err != nil {
			b.Fatal(err)
		}
	}), func(*http.Request) bool { return false })
	b.ReportAllocs()
	for b.Loop() {
		h.ServeHTTP(w, req)
	}
}

// What is large and in memory is counted for each client; what is small is not.
func TestLarge(t *testing.T) {
	g := open(t, t.TempDir(), "[[rule]]\nto = [\"everyone\"]\nallow = [\"pull\"]\nrepositories = [\"**\"]\n")
	var ends []func()
	large := func(address string, length int64) (err error) {
		h := g.Wrap(http.HandlerFunc(func(_ http.ResponseWriter, req *http.Request) {
			var end func()
			if end, err = g.Large(req.Context(), length); err == nil {
				ends = append(ends, end)
			}
		}), func(*http.Request) bool { return false })
		req := httptest.NewRequest("GET", "/", nil)
		req.RemoteAddr = address
		h.ServeHTTP(httptest.NewRecorder(), req)
		return err
	}
	const one, other = "192.0.2.1:1", "192.0.2.2:1"
	for n := range 16 {
		if err := large(one, []int64{-1, limit.HeavyBytes}[n%2]); err != nil {
			t.Fatal(err)
		}
	}
	var beyond *guard.Beyond
	if err := large(one, -1); !errors.As(err, &beyond) || beyond.After == 0 || !strings.Contains(err.Error(), "too many large requests") {
		t.Errorf("one more: %v", err)
	}
	if err := large(one, limit.HeavyBytes-1); err != nil {
		t.Errorf("a small one: %v", err)
	}
	if err := large(other, -1); err != nil {
		t.Errorf("another client: %v", err)
	}
	ends[0]()
	if err := large(one, -1); err != nil {
		t.Errorf("when one has ended: %v", err)
	}
}

// What costs more than an answer counts as several requests.
func TestDearRequestsCountMore(t *testing.T) {
	g := open(t, t.TempDir(), "[limits]\nrequests = 0.001\nburst = 20\n[[rule]]\nto = [\"everyone\"]\nallow = [\"pull\"]\nrepositories = [\"**\"]\n")
	for address, test := range map[string]struct {
		do   func(context.Context)
		want int // requests of this kind until the client has had its 20
	}{
		"192.0.2.1:1": {func(context.Context) {}, 20},
		"192.0.2.2:1": {g.Dear, 5},
		"192.0.2.3:1": {func(ctx context.Context) {
			end, err := g.Large(ctx, 9*limit.HeavyBytes)
			if err != nil {
				t.Error(err)
				return
			}
			end()
		}, 2},
	} {
		h := g.Wrap(http.HandlerFunc(func(_ http.ResponseWriter, req *http.Request) { test.do(req.Context()) }), func(*http.Request) bool { return false })
		got := 0
		for ; got < 100; got++ {
			req, w := httptest.NewRequest("GET", "/", nil), httptest.NewRecorder()
			req.RemoteAddr = address
			if h.ServeHTTP(w, req); w.Code == 429 {
				break
			}
		}
		if got != test.want {
			t.Errorf("%s: %d requests were let in, want %d", address, got, test.want)
		}
	}
}
