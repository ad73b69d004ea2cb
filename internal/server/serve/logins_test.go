package serve_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"math/big"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"

	"hydrofoil.dev/foil/internal/server/serve"
)

// authority issues certificates.
type authority struct {
	t    *testing.T
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	file string
}

func newAuthority(t *testing.T, dir string) *authority {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "authority"}, NotBefore: time.Now().Add(-time.Hour),
		NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	a := &authority{t: t, key: key, file: filepath.Join(dir, "clients.pem")}
	if a.cert, err = x509.ParseCertificate(der); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(a.file, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600); err != nil {
		t.Fatal(err)
	}
	return a
}

// client issues a certificate to who is called name.
func (a *authority) client(name string) tls.Certificate {
	a.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: name},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}, a.cert, key.Public(), a.key)
	if err != nil {
		a.t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

// secured has a guarded server speak TLS.
func secured(t *testing.T, dir string) func(*serve.Options) {
	cert, key := filepath.Join(dir, "cert"), filepath.Join(dir, "key")
	certificate(t, cert, key, 1)
	return func(o *serve.Options) { o.TLSCert, o.TLSKey = cert, key }
}

func TestClientCertificates(t *testing.T) {
	dir := t.TempDir()
	known, stranger := newAuthority(t, dir), newAuthority(t, t.TempDir())
	g := startGuarded(t, fmt.Sprintf("[certificates]\nca = %q\n[[rule]]\nto = [\"cert:build-*\"]\nallow = [\"pull\"]\nrepositories = [\"mine/**\"]\n", known.file), secured(t, dir))
	get := func(path string, certificates ...tls.Certificate) (int, error) {
		t.Helper()
		c := &http.Client{Transport: &http.Transport{DisableKeepAlives: true,
			TLSClientConfig: &tls.Config{InsecureSkipVerify: true, Certificates: certificates}}}
		res, err := c.Get("https://" + g.Addr() + path)
		if err != nil {
			return 0, err
		}
		defer res.Body.Close()
		return res.StatusCode, nil
	}
	for _, test := range []struct {
		path   string
		certs  []tls.Certificate
		status int
	}{
		{"/v2/mine/app/manifests/1", []tls.Certificate{known.client("build-1")}, 200},
		{"/v2/other/app/manifests/1", []tls.Certificate{known.client("build-1")}, 404},
		{"/v2/mine/app/manifests/1", []tls.Certificate{known.client("other")}, 404},
		{"/v2/", []tls.Certificate{known.client("build-1")}, 200},
		{"/v2/mine/app/manifests/1", []tls.Certificate{known.client("")}, 401},
		{"/v2/mine/app/manifests/1", nil, 401},
	} {
		if status, err := get(test.path, test.certs...); status != test.status || err != nil {
			t.Errorf("%s: %d, %v, want %d", test.path, status, err, test.status)
		}
	}
	// One that others have issued is offered only where the server asks for its issuer, and refused.
	c := tls.Certificate{Certificate: stranger.client("build-1").Certificate, PrivateKey: known.client("build-1").PrivateKey}
	conn, err := tls.Dial("tcp", g.Addr(), &tls.Config{InsecureSkipVerify: true, GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &c, nil }})
	if err == nil {
		_, err = conn.Read(make([]byte, 1))
		conn.Close()
	}
	if err == nil {
		t.Error("somebody else's certificate was taken")
	}
	// Without the authority, nobody's certificate counts.
	writeFile(t, g.rules, rulesOf(fmt.Sprintf("[passwords]\nfile = %q\n", g.htpass)))
	if status, err := get("/v2/mine/app/manifests/1", known.client("build-1")); status != 401 || err != nil {
		t.Errorf("without the authority: %d, %v", status, err)
	}
}

// workload is an issuer whose keys are in a file, as a cluster's may be, and what its tokens look like.
func workload(t *testing.T) (config string, token func(sub string) string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	b, err := json.Marshal(jose.JSONWebKeySet{Keys: []jose.JSONWebKey{{Key: key.Public(), KeyID: "1"}}})
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "keys.json")
	if err := os.WriteFile(file, b, 0o600); err != nil {
		t.Fatal(err)
	}
	config = fmt.Sprintf(`[[issuer]]
name = "k8s"
url = "https://kubernetes.default.svc"
keys = %q
audience = "registry.example"
[[issuer.identity]]
name = "{sub}"
[[rule]]
to = ["k8s:system:serviceaccount:prod:*"]
allow = ["pull", "push"]
repositories = ["mine/**"]
`, file)
	return config, func(sub string) string {
		t.Helper()
		signer, err := jose.NewSigner(jose.SigningKey{Algorithm: jose.ES256, Key: key}, new(jose.SignerOptions).WithHeader("kid", "1"))
		if err != nil {
			t.Fatal(err)
		}
		s, err := jwt.Signed(signer).Claims(jwt.Claims{Issuer: "https://kubernetes.default.svc", Subject: sub, Audience: jwt.Audience{"registry.example"},
			Expiry: jwt.NewNumericDate(time.Now().Add(time.Hour))}).Serialize()
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
}

// skopeo pushes and pulls with a password, and with a workload's token; who may not gets the errors that clients know. internal/e2e/clients
// has more clients.
func TestSkopeoLogsIn(t *testing.T) {
	config, token := workload(t)
	dir := t.TempDir()
	g := startGuarded(t, config, secured(t, dir))
	from := filepath.Join(dir, "layout")
	want := layout(t, from)
	pod := token("system:serviceaccount:prod:app")
	manifest := func(ref string) string {
		t.Helper()
		b, err := os.ReadFile(ref)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	fails := func(want, name string, args ...string) {
		t.Helper()
		out, err := exec.CommandContext(t.Context(), name, args...).CombinedOutput()
		if err == nil || !strings.Contains(strings.ToLower(string(out)), want) {
			t.Errorf("%s %s: %v, want %s\n%s", name, strings.Join(args[:2], " "), err, want, out)
		}
	}
	t.Run("skopeo", func(t *testing.T) {
		needProgram(t, "skopeo")
		for who, creds := range map[string]string{"password": "pusher:password of pusher", "workload": "token:" + pod} {
			ref := "docker://" + g.Addr() + "/mine/" + who + ":1"
			to := filepath.Join(dir, who)
			command(t, "skopeo", "copy", "--dest-tls-verify=false", "--dest-creds", creds, "oci:"+from+":latest", ref)
			command(t, "skopeo", "copy", "--src-tls-verify=false", "--src-creds", creds, "--preserve-digests", ref, "dir:"+to)
			if got := manifest(filepath.Join(to, "manifest.json")); want.Algorithm().FromString(got) != want {
				t.Errorf("%s: another manifest came back", who)
			}
			if out := command(t, "skopeo", "list-tags", "--tls-verify=false", "--creds", creds, "docker://"+g.Addr()+"/mine/"+who); !strings.Contains(out, `"1"`) {
				t.Errorf("tags: %s", out)
			}
		}
		fails("unauthorized", "skopeo", "inspect", "--tls-verify=false", "--creds", "pusher:wrong", "docker://"+g.Addr()+"/mine/app:1")
		fails("unauthorized", "skopeo", "inspect", "--tls-verify=false", "--no-creds", "docker://"+g.Addr()+"/mine/app:1")
		fails("manifest", "skopeo", "inspect", "--tls-verify=false", "--creds", "pusher:password of pusher", "docker://"+g.Addr()+"/other/app:1")
		fails("lack the right push", "skopeo", "copy", "--dest-tls-verify=false", "--dest-creds", "pull:password of pull", "oci:"+from+":latest", "docker://"+g.Addr()+"/mine/no:1")
		fails("unauthorized", "skopeo", "inspect", "--tls-verify=false", "--creds", "token:"+token("system:serviceaccount:prod:app")+"x", "docker://"+g.Addr()+"/mine/app:1")
		fails("manifest", "skopeo", "inspect", "--tls-verify=false", "--creds", "token:"+token("system:serviceaccount:dev:app"), "docker://"+g.Addr()+"/mine/app:1")
		fails("lack the right delete", "skopeo", "delete", "--tls-verify=false", "--creds", "pusher:password of pusher", "docker://"+g.Addr()+"/mine/app:1")
		auth := filepath.Join(dir, "auth.json")
		command(t, "skopeo", "login", "--tls-verify=false", "--authfile", auth, "-u", "pull", "-p", "password of pull", g.Addr())
		command(t, "skopeo", "inspect", "--tls-verify=false", "--authfile", auth, "docker://"+g.Addr()+"/mine/app:1")
		fails("", "skopeo", "login", "--tls-verify=false", "--authfile", auth, "-u", "pull", "-p", "wrong", g.Addr())
	})
}

// The conformance program with each way to log in that it has.
func TestConformanceWithLogins(t *testing.T) {
	program := os.Getenv("FOIL_TEST_CONFORMANCE")
	if program == "" {
		t.Skip("FOIL_TEST_CONFORMANCE does not name the conformance program of the distribution-spec, as that of tools/conformance")
	}
	config, token := workload(t)
	g := startGuarded(t, config+"[[rule]]\nto = [\"k8s:*\"]\nallow = [\"pull\", \"push\", \"delete\"]\nrepositories = [\"**\"]\n", nil)
	for way, creds := range map[string][2]string{"password": {"root", "password of root"}, "workload": {"token", token("system:serviceaccount:dev:ci")}} {
		t.Run(way, func(t *testing.T) {
			results := t.TempDir()
			cmd := exec.CommandContext(t.Context(), program)
			cmd.Dir = results
			cmd.Env = append(os.Environ(), "OCI_VERSION=1.1", "OCI_REGISTRY="+g.Addr(), "OCI_TLS=disabled", "OCI_RESULTS_DIR="+results,
				"OCI_REPO1=conformance/"+way+"/1", "OCI_REPO2=conformance/"+way+"/2", "OCI_USERNAME="+creds[0], "OCI_PASSWORD="+creds[1])
			out, err := cmd.CombinedOutput()
			t.Logf("%s", out)
			if err != nil {
				t.Error(err)
			}
		})
	}
}

// What is behind a proxy that is trusted is known by its own address; others cannot choose theirs.
func TestTrustedProxies(t *testing.T) {
	for _, test := range []struct {
		proxies, forwarded, want string
	}{
		{`[]`, "203.0.113.9", "127.0.0.1"},
		{`["127.0.0.0/8"]`, "203.0.113.9", "203.0.113.9"},
		{`["127.0.0.0/8"]`, "198.51.100.1, 203.0.113.9", "203.0.113.9"},
		{`["127.0.0.0/8", "203.0.113.0/24"]`, "198.51.100.1, 203.0.113.9", "198.51.100.1"},
		{`["127.0.0.0/8"]`, "nonsense", "127.0.0.1"},
		{`["127.0.0.0/8"]`, "", "127.0.0.1"},
	} {
		g := startGuarded(t, "", nil)
		writeFile(t, g.rules, "trusted-proxies = "+test.proxies+"\n"+rulesOf(fmt.Sprintf("[passwords]\nfile = %q\n", g.htpass)))
		g.do(call{method: "GET", path: "/v2/mine/app/manifests/1"}, func(r *http.Request) {
			basic("pull")(r)
			r.Header.Set("X-Forwarded-For", test.forwarded)
		})
		if !strings.Contains(g.audit.String(), fmt.Sprintf(`"address":%q`, test.want)) {
			t.Errorf("%+v: %s", test, g.audit.String())
		}
	}
}
