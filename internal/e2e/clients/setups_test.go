package clients

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"

	"hydrofoil.dev/foil/internal/server/serve"
	"hydrofoil.dev/foil/internal/server/upstream"
)

// setup returns a configuration of docs/access.md.
func setup(t *testing.T, name string) string {
	t.Helper()
	b, err := os.ReadFile("../../../docs/access.md")
	if err != nil {
		t.Fatal(err)
	}
	_, after, found := strings.Cut(string(b), "<!-- "+name+" -->\n")
	if !found {
		t.Fatalf("the document has no set-up %s", name)
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

// issuer gives tokens as CI systems and clusters do, and says where its keys are.
type issuer struct {
	*httptest.Server
	t      *testing.T
	signer jose.Signer
	keys   string
}

func newIssuer(t *testing.T) *issuer {
	t.Helper()
	i := &issuer{t: t}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	if i.signer, err = jose.NewSigner(jose.SigningKey{Algorithm: jose.ES256, Key: key}, new(jose.SignerOptions).WithHeader("kid", "1")); err != nil {
		t.Fatal(err)
	}
	b, err := json.Marshal(jose.JSONWebKeySet{Keys: []jose.JSONWebKey{{Key: key.Public(), KeyID: "1"}}})
	if err != nil {
		t.Fatal(err)
	}
	i.keys = string(b)
	mux := http.NewServeMux()
	mux.HandleFunc("GET /.well-known/openid-configuration", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintf(w, `{"issuer": %q, "jwks_uri": %q, "id_token_signing_alg_values_supported": ["ES256"]}`, i.URL, i.URL+"/keys")
	})
	mux.HandleFunc("GET /keys", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, i.keys) })
	i.Server = httptest.NewServer(mux)
	t.Cleanup(i.Close)
	return i
}

func (i *issuer) token(iss string, claims map[string]any) string {
	i.t.Helper()
	s, err := jwt.Signed(i.signer).Claims(jwt.Claims{Issuer: iss, Subject: "s", Audience: jwt.Audience{"registry.example"}, Expiry: jwt.NewNumericDate(time.Now().Add(time.Hour))}).
		Claims(claims).Serialize()
	if err != nil {
		i.t.Fatal(err)
	}
	return s
}

// Each set-up of the document is a server over TLS, where skopeo does what the text says, and not what it does not.
// internal/server/guard asks each of them more questions.
func TestSetUps(t *testing.T) {
	skopeo := program(t, "skopeo")
	ci, cluster := newIssuer(t), newIssuer(t)
	job := "ci:" + ci.token(ci.URL, map[string]any{"project_path": "team/app", "ref": "main", "ref_protected": "true", "ref_type": "branch"})
	pod := "pod:" + cluster.token("https://kubernetes.default.svc.cluster.local", map[string]any{"kubernetes.io": map[string]any{"namespace": "prod", "serviceaccount": map[string]any{"name": "app"}}})
	builder := "pod:" + cluster.token("https://kubernetes.default.svc.cluster.local", map[string]any{"kubernetes.io": map[string]any{"namespace": "ci", "serviceaccount": map[string]any{"name": "builder"}}})
	user := func(name string) string { return name + ":password of " + name }
	type step struct {
		push       bool
		creds      string // empty: none
		repository string
		refused    string // what skopeo says; empty: it is done
	}
	const unknown, denied, hidden = "unauthorized", "you lack the right", "manifest unknown"
	for name, steps := range map[string][]step{
		"one-user": {{true, user("ann"), "any/thing", ""}, {false, user("ann"), "any/thing", ""}, {false, "", "any/thing", unknown}, {false, user("bob"), "any/thing", hidden}},
		"team": {{true, job, "team/release/app", ""}, {false, user("ann"), "team/release/app", ""}, {true, user("ann"), "team/release/app", denied},
			{true, user("bob"), "team/dev/app", ""}, {true, job, "team/dev/app", denied}, {false, "", "team/release/app", unknown}},
		"kubernetes": {{true, builder, "release/app", ""}, {true, builder, "other/app", ""}, {false, pod, "release/app", ""}, {true, pod, "release/app", denied}, {false, pod, "other/app", hidden}},
		"public":     {{true, user("publisher"), "any/thing", ""}, {false, "", "any/thing", ""}, {true, user("ann"), "any/thing", denied}},
		"upstream":   {{false, user("ann"), "library/app", ""}, {false, user("ann"), "private/app", hidden}, {false, "", "library/app", unknown}},
	} {
		t.Run(name, func(t *testing.T) {
			ca, dir := newAuthority(t), shortDir(t)
			env := []string{"HOME=" + dir, "XDG_RUNTIME_DIR=" + dir, "REGISTRY_AUTH_FILE=" + write(t, filepath.Join(dir, "auth.json"), "{}"), "SSL_CERT_FILE=" + ca.file}
			from := filepath.Join(dir, "layout")
			layout(t, from, name)
			var passwords strings.Builder
			for _, u := range []string{"ann", "bob", "publisher", "upstream"} {
				passwords.WriteString(lineOf(t, u, "password of "+u))
			}
			write(t, filepath.Join(dir, "htpasswd"), passwords.String())
			write(t, filepath.Join(dir, "cluster-keys.json"), cluster.keys)
			config := strings.ReplaceAll(strings.ReplaceAll(setup(t, name), "/etc/foil/", dir+"/"), "https://gitlab.example", ci.URL)
			copies := func(args ...string) (string, error) {
				return run(t.Context(), dir, env, skopeo, append([]string{"copy"}, args...)...)
			}
			r := newRegistry(t, ca, config, func(o *serve.Options) {
				if name != "upstream" {
					return
				}
				up, err := serve.Start(t.Context(), serve.Options{Root: filepath.Join(dir, "upstream"), Listen: "127.0.0.1:0", Log: o.Log})
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { up.Close() })
				for _, repo := range []string{"library/app", "private/app"} {
					if _, err := copies("--dest-tls-verify=false", "oci:"+from+":latest", "docker://"+up.Addr()+"/"+repo+":1"); err != nil {
						t.Fatal(err)
					}
				}
				o.Upstream = upstream.Options{URL: "http://" + up.Addr()}
			})
			for n, s := range steps {
				image := "docker://" + r.Addr() + "/" + s.repository + ":1"
				side, args := "src", []string{image, "oci:" + filepath.Join(dir, fmt.Sprint("back", n)) + ":latest"}
				if s.push {
					side, args = "dest", []string{"oci:" + from + ":latest", image}
				}
				if s.creds == "" {
					args = append(args, "--"+side+"-no-creds")
				} else {
					args = append(args, "--"+side+"-creds", s.creds)
				}
				out, err := copies(args...)
				if err != nil {
					out += err.Error()
				}
				if (err == nil) != (s.refused == "") || !strings.Contains(out, s.refused) {
					t.Errorf("step %d, %s: %v, want %q", n+1, s.repository, out, s.refused)
				}
			}
		})
	}
}
