// Package clients has programs that others wrote log in at the server, by each way that they know. What is not
// there is skipped: `make test-clients` builds all of them.
package clients

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/crypto/bcrypt"

	"hydrofoil.dev/foil/internal/format/layer/layertest"
	"hydrofoil.dev/foil/internal/logtest"
	"hydrofoil.dev/foil/internal/server/serve"
)

// program finds one: in the directory that FOIL_TEST_CLIENTS names, or in the path.
func program(t testing.TB, name string) string {
	t.Helper()
	dir := os.Getenv("FOIL_TEST_CLIENTS")
	if path := filepath.Join(dir, name); dir != "" {
		if _, err := os.Stat(path); err == nil {
			return path
		}
	}
	path, err := exec.LookPath(name)
	if err != nil {
		t.Skipf("%s is neither in the path nor where FOIL_TEST_CLIENTS says: make test-clients builds it", name)
	}
	return path
}

func write(t testing.TB, path, content string) string {
	t.Helper()
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// eventually repeats what may fail for a while.
func eventually(t testing.TB, what string, try func() error) {
	t.Helper()
	for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(50 * time.Millisecond) {
		err := try()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: %v", what, err)
		}
	}
}

// insideEnv says that this process has a network of its own, where registries listen on insideAddress.
const (
	insideEnv     = "FOIL_CLIENTS_OWN_NETWORK"
	insideAddress = "192.0.2.1"
)

// ownNetwork runs a part of a test once more, in a process that has a network of its own: docker takes no certificates for
// registries on loopback addresses. It reports whether this is that process; else the test has been run.
func ownNetwork(t *testing.T) (inside bool) {
	t.Helper()
	if os.Getenv(insideEnv) != "" {
		return true
	}
	if os.Geteuid() != 0 {
		t.Skip("a network of its own wants root")
	}
	var names []string
	for name := range strings.SplitSeq(t.Name(), "/") {
		names = append(names, "^"+regexp.QuoteMeta(name)+"$")
	}
	script := fmt.Sprintf("ip link set lo up && ip address add %s/32 dev lo && exec %s -test.v -test.run '%s'", insideAddress, os.Args[0], strings.Join(names, "/"))
	cmd := exec.Command("/bin/sh", "-c", script)
	cmd.Env = append(os.Environ(), insideEnv+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("in a network of its own: %v\n%s", err, out)
	}
	if !strings.Contains(string(out), "--- PASS: "+t.Name()+" ") {
		t.Skipf("%s", out)
	}
	t.Logf("%s", out)
	return false
}

// address is where registries listen.
func address() string {
	if os.Getenv(insideEnv) != "" {
		return insideAddress
	}
	return "127.0.0.1"
}

// authority issues certificates, for servers at address and for clients. file has its own.
type authority struct {
	t    testing.TB
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	file string
}

func newAuthority(t testing.TB) *authority {
	t.Helper()
	a := &authority{t: t}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "authority"}, NotBefore: time.Now().Add(-time.Hour),
		NotAfter: time.Now().Add(24 * time.Hour), IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	var der []byte
	der, a.key = a.sign(template, nil)
	var err error
	if a.cert, err = x509.ParseCertificate(der); err != nil {
		t.Fatal(err)
	}
	a.file = filepath.Join(t.TempDir(), "ca.pem")
	write(t, a.file, block("CERTIFICATE", der))
	return a
}

func block(kind string, der []byte) string {
	return string(pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}))
}

// sign signs a certificate with a key of its own; without a parent by itself.
func (a *authority) sign(template, parent *x509.Certificate) ([]byte, *ecdsa.PrivateKey) {
	a.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}
	signer := a.key
	if parent == nil {
		parent, signer = template, key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, key.Public(), signer)
	if err != nil {
		a.t.Fatal(err)
	}
	return der, key
}

// pair issues a certificate with its key, as files NAME.cert and NAME.key of a directory.
func (a *authority) pair(dir, name string) (cert, key string) {
	a.t.Helper()
	der, private := a.sign(&x509.Certificate{SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: name},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1), net.ParseIP(insideAddress)}, DNSNames: []string{"localhost"},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth}}, a.cert)
	b, err := x509.MarshalECPrivateKey(private)
	if err != nil {
		a.t.Fatal(err)
	}
	return write(a.t, filepath.Join(dir, name+".cert"), block("CERTIFICATE", der)), write(a.t, filepath.Join(dir, name+".key"), block("EC PRIVATE KEY", b))
}

// client trusts the authority.
func (a *authority) client() *http.Client {
	pool := x509.NewCertPool()
	pool.AddCert(a.cert)
	return &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool}}}
}

// registry is a server with rules, over TLS.
type registry struct {
	*serve.Server
	t          testing.TB
	ca         *authority
	log, audit *logtest.Buffer
}

func newRegistry(t testing.TB, ca *authority, access string, change ...func(*serve.Options)) *registry {
	t.Helper()
	dir := t.TempDir()
	cert, key := ca.pair(dir, "server")
	r := &registry{t: t, ca: ca, log: new(logtest.Buffer), audit: new(logtest.Buffer)}
	opts := serve.Options{Root: filepath.Join(dir, "root"), Listen: address() + ":0", TLSCert: cert, TLSKey: key,
		Access: write(t, filepath.Join(dir, "access.toml"), access), Audit: r.audit,
		Log: slog.New(slog.NewTextHandler(io.MultiWriter(r.log, t.Output()), &slog.HandlerOptions{Level: slog.LevelInfo}))}
	for _, c := range change {
		c(&opts)
	}
	var err error
	if r.Server, err = serve.Start(context.Background(), opts); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	})
	return r
}

// ask sends a request, with credentials or without.
func (r *registry) ask(method, path, user, password string, form url.Values) (status int, body string) {
	r.t.Helper()
	req, err := http.NewRequestWithContext(context.Background(), method, "https://"+r.Addr()+path, strings.NewReader(form.Encode()))
	if err != nil {
		r.t.Fatal(err)
	}
	if form != nil {
		req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	}
	switch {
	case user == "bearer":
		req.Header.Set("Authorization", "Bearer "+password)
	case user != "":
		req.SetBasicAuth(user, password)
	}
	res, err := r.ca.client().Do(req)
	if err != nil {
		r.t.Fatal(err)
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		r.t.Fatal(err)
	}
	return res.StatusCode, string(b)
}

// tokens are what a token service gave.
type tokens struct {
	Token   string `json:"token"`
	Access  string `json:"access_token"`
	ID      string `json:"id_token"`
	Refresh string `json:"refresh_token"`
}

func readTokens(t testing.TB, status int, body string) (got tokens) {
	t.Helper()
	if err := json.Unmarshal([]byte(body), &got); err != nil || status != http.StatusOK {
		t.Fatalf("no token: %d %s", status, body)
	}
	return got
}

// subjects are who the audit log says has used a repository.
func (r *registry) subjects(repository string) map[string]bool {
	r.t.Helper()
	found := map[string]bool{}
	for line := range strings.Lines(r.audit.String()) {
		var one struct{ Msg, Subject, Repository, Decision string }
		if err := json.Unmarshal([]byte(line), &one); err != nil {
			r.t.Fatal(err)
		}
		if one.Msg == "access" && one.Repository == repository && one.Decision == "allowed" {
			found[one.Subject] = true
		}
	}
	return found
}

// lineOf is that of htpasswd.
func lineOf(t testing.TB, user, password string) string {
	t.Helper()
	hash, err := bcrypt.GenerateFromPassword([]byte(password), bcrypt.MinCost)
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("%s:%s\n", user, hash)
}

// tokenService is a token service of Docker's kind, which is not the server's own: whoever knows the password gets
// what they ask for.
type tokenService struct {
	url, keys string
	users     map[string]string
}

const (
	externalService = "registry.example"
	externalIssuer  = "tokens.example"
)

func newTokenService(t testing.TB, ca *authority, host string, users map[string]string) *tokenService {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	set, err := json.Marshal(jose.JSONWebKeySet{Keys: []jose.JSONWebKey{{Key: key.Public(), KeyID: "1"}}})
	if err != nil {
		t.Fatal(err)
	}
	signer, err := jose.NewSigner(jose.SigningKey{Algorithm: jose.ES256, Key: key}, new(jose.SignerOptions).WithHeader("kid", "1"))
	if err != nil {
		t.Fatal(err)
	}
	s := &tokenService{users: users, keys: write(t, filepath.Join(t.TempDir(), "keys.json"), string(set))}
	cert, private := ca.pair(t.TempDir(), "tokens")
	pair, err := tls.LoadX509KeyPair(cert, private)
	if err != nil {
		t.Fatal(err)
	}
	l, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{pair}})
	if err != nil {
		t.Fatal(err)
	}
	s.url = fmt.Sprintf("https://%s:%d/token", host, l.Addr().(*net.TCPAddr).Port)
	server := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) { s.answer(t, signer, w, req) })}
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			t.Error(err)
		}
	}()
	t.Cleanup(func() {
		server.Close()
		<-done
	})
	return s
}

func (s *tokenService) answer(t testing.TB, signer jose.Signer, w http.ResponseWriter, req *http.Request) {
	if err := req.ParseForm(); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	user, password, _ := req.BasicAuth()
	if req.Method == http.MethodPost {
		user, password = req.Form.Get("username"), req.Form.Get("password")
	}
	if s.users[user] == "" || s.users[user] != password {
		http.Error(w, `{"details": "incorrect username or password"}`, http.StatusUnauthorized)
		return
	}
	type grant struct {
		Type    string   `json:"type"`
		Name    string   `json:"name"`
		Actions []string `json:"actions"`
	}
	grants := []grant{}
	for _, scope := range strings.Fields(strings.Join(req.Form["scope"], " ")) {
		if parts := strings.Split(scope, ":"); len(parts) == 3 {
			grants = append(grants, grant{parts[0], parts[1], strings.Split(parts[2], ",")})
		}
	}
	raw, err := jwt.Signed(signer).Claims(jwt.Claims{Issuer: externalIssuer, Subject: user, Audience: jwt.Audience{externalService},
		Expiry: jwt.NewNumericDate(time.Now().Add(5 * time.Minute)), IssuedAt: jwt.NewNumericDate(time.Now())}).Claims(map[string]any{"access": grants}).Serialize()
	if err != nil {
		t.Error(err)
		return
	}
	if err := json.NewEncoder(w).Encode(map[string]any{"token": raw, "access_token": raw, "expires_in": 300}); err != nil {
		t.Log(err) // the client has gone
	}
}

// layout writes an OCI layout with one image of two layers, tagged latest, and returns its digest.
func layout(t testing.TB, dir, salt string) digest.Digest {
	t.Helper()
	if err := os.MkdirAll(filepath.Join(dir, "blobs", "sha256"), 0o700); err != nil {
		t.Fatal(err)
	}
	blob := func(mediaType string, b []byte) ocispec.Descriptor {
		t.Helper()
		d := ocispec.Descriptor{MediaType: mediaType, Digest: digest.FromBytes(b), Size: int64(len(b))}
		write(t, filepath.Join(dir, "blobs", "sha256", d.Digest.Encoded()), string(b))
		return d
	}
	object := func(v any) []byte {
		t.Helper()
		b, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	config := ocispec.Image{Platform: ocispec.Platform{Architecture: "amd64", OS: "linux"}, RootFS: ocispec.RootFS{Type: "layers"}}
	manifest := ocispec.Manifest{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageManifest}
	for n := range 2 {
		l := layertest.Layer{layertest.File(fmt.Sprintf("file%d", n), 0o644, strings.Repeat(salt+fmt.Sprint(n), 20_000))}
		b := l.Gzip(t)
		config.RootFS.DiffIDs = append(config.RootFS.DiffIDs, b.DiffID)
		manifest.Layers = append(manifest.Layers, blob(b.MediaType, b.Bytes))
	}
	manifest.Config = blob(ocispec.MediaTypeImageConfig, object(config))
	m := blob(ocispec.MediaTypeImageManifest, object(manifest))
	d := m.Digest
	m.Annotations = map[string]string{ocispec.AnnotationRefName: "latest"}
	write(t, filepath.Join(dir, "index.json"), string(object(ocispec.Index{Versioned: specs.Versioned{SchemaVersion: 2}, Manifests: []ocispec.Descriptor{m}})))
	write(t, filepath.Join(dir, "oci-layout"), `{"imageLayoutVersion":"1.0.0"}`)
	return d
}

// run runs a program to its end.
func run(ctx context.Context, dir string, env []string, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir, cmd.Env = dir, append(os.Environ(), env...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	if err != nil {
		err = fmt.Errorf("%s %s: %w\n%s", filepath.Base(name), strings.Join(args, " "), err, out.String())
	}
	return out.String(), err
}
