package hosts

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/remotes/docker"
	"github.com/distribution/reference"
	"github.com/google/go-cmp/cmp"

	"hydrofoil.dev/foil/internal/worker/credentials"
	"hydrofoil.dev/foil/internal/worker/remote"
)

// write makes a file below a directory of the test's own.
func write(t testing.TB, path, text string) string {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestFor(t *testing.T) {
	dir := t.TempDir()
	second := t.TempDir()
	write(t, filepath.Join(dir, "mirrored.example", "hosts.toml"), `
server = "https://origin.example"
[host."http://127.0.0.1:598"]
  capabilities = ["pull", "resolve"]
[host."http://near.example:5000"]
  capabilities = ["pull"]
[host."https://far.example/cache/v2/proxy"]
  capabilities = ["pull", "resolve"]
  override_path = true
`)
	write(t, filepath.Join(dir, "port.example_5000_", "hosts.toml"), `server = "http://port.example:5000"`)
	write(t, filepath.Join(second, "port.example_5000_", "hosts.toml"), `server = "http://shadowed.example"`)
	write(t, filepath.Join(dir, "127.0.0.9:5000", "hosts.toml"), `server = "https://127.0.0.9:5000"`)
	s := New(Options{Dirs: dir + ":" + second + ":/nonexistent", Self: []string{"127.0.0.1:598"}})
	defer s.Close()
	named, err := reference.ParseNormalizedNamed("name")
	if err != nil {
		t.Fatal(err)
	}
	hub := reference.Domain(named)
	origin, err := docker.DefaultHost(hub)
	if err != nil || origin == hub {
		t.Fatal(origin, err)
	}
	for name, tc := range map[string]struct {
		want Want
		urls []string
	}{
		"nothing configured": {Want{Registry: "registry.example"}, []string{"https://registry.example a/b"}},
		"plain":              {Want{Registry: "registry.example:80", PlainHTTP: true}, []string{"http://registry.example:80 a/b"}},
		"loopback":           {Want{Registry: "localhost:5000"}, []string{"http://localhost:5000 a/b"}},
		"loopback, IPv6":     {Want{Registry: "[::1]:5000"}, []string{"http://[::1]:5000 a/b"}},
		"loopback, TLS":      {Want{Registry: "127.0.0.9:5000"}, []string{"https://127.0.0.9:5000 a/b"}},
		"a port":             {Want{Registry: "port.example:5000"}, []string{"http://port.example:5000 a/b"}},
		"another name":       {Want{Registry: hub}, []string{"https://" + origin + " a/b"}},
		"mirrors, a digest": {Want{Registry: "mirrored.example"}, []string{
			"http://near.example:5000 a/b", "https://far.example/cache proxy/a/b", "https://origin.example a/b"}},
		"mirrors, a tag": {Want{Registry: "mirrored.example", Resolve: true}, []string{
			"https://far.example/cache proxy/a/b", "https://origin.example a/b"}},
	} {
		t.Run(name, func(t *testing.T) {
			tc.want.Repository = "a/b"
			list, err := s.For(t.Context(), tc.want)
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, h := range list {
				got = append(got, h.Client.Base()+" "+h.Repository)
			}
			if diff := cmp.Diff(tc.urls, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// Who answers is known by TLS, and on this machine.
func TestWhoIsAuthenticated(t *testing.T) {
	dir := t.TempDir()
	for registry, text := range map[string]string{
		"tls.example":      `server = "https://tls.example"`,
		"skip.example":     "server = \"https://skip.example\"\nskip_verify = true",
		"plain.example":    `server = "http://plain.example"`,
		"mirrored.example": "server = \"https://mirrored.example\"\n[host.\"http://near.example\"]\n[host.\"http://127.0.0.1:598\"]\n[host.\"https://far.example\"]\nskip_verify = true",
		"maybe.example":    "server = \"http://maybe.example\"\nskip_verify = true",
		"localhost_5000_":  `server = "http://far.example:5000"`,
		"here.example":     "server = \"https://127.0.0.1:5000\"\nskip_verify = true",
	} {
		write(t, filepath.Join(dir, registry, "hosts.toml"), text)
	}
	s := New(Options{Dirs: dir})
	defer s.Close()
	const plain, unverified = "it is spoken to without TLS", "its certificate is not verified"
	for name, tc := range map[string]struct {
		want Want
		weak []string
	}{
		"nothing configured":       {Want{Registry: "registry.example"}, []string{""}},
		"--plain-http":             {Want{Registry: "registry.example", PlainHTTP: true}, []string{plain}},
		"loopback":                 {Want{Registry: "127.0.0.1:5000"}, []string{""}},
		"any address is none":      {Want{Registry: "0.0.0.0:5000", PlainHTTP: true}, []string{plain}},
		"localhost, it says":       {Want{Registry: "localhost:5000"}, []string{plain}},
		"served here":              {Want{Registry: "here.example"}, []string{""}},
		"TLS":                      {Want{Registry: "tls.example"}, []string{""}},
		"TLS, not verified":        {Want{Registry: "skip.example"}, []string{unverified}},
		"HTTP":                     {Want{Registry: "plain.example"}, []string{plain}},
		"HTTP, with words of TLS":  {Want{Registry: "maybe.example"}, []string{unverified}},
		"each host for itself":     {Want{Registry: "mirrored.example"}, []string{plain, "", unverified, ""}},
		"--plain-http, configured": {Want{Registry: "tls.example", PlainHTTP: true}, []string{""}},
	} {
		t.Run(name, func(t *testing.T) {
			list, err := s.For(t.Context(), tc.want)
			if err != nil {
				t.Fatal(err)
			}
			got := make([]string, len(list))
			for i, h := range list {
				got[i] = h.Weak
			}
			if diff := cmp.Diff(tc.weak, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// A connection that was authenticated is not renewed without it, and a host whose certificate is verified from now on has
// a new one.
func TestAuthenticationChanges(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "r.example", "hosts.toml")
	s := New(Options{Dirs: dir})
	defer s.Close()
	var clients []Host
	for _, text := range []string{"server = \"https://r.example\"", "server = \"https://r.example\"\nskip_verify = true", "server = \"https://r.example\""} {
		write(t, path, text)
		list, err := s.For(t.Context(), Want{Registry: "r.example"})
		if err != nil {
			t.Fatal(err)
		}
		clients = append(clients, list[0])
	}
	if clients[0].Weak != "" || clients[1].Weak == "" || clients[2].Weak != "" {
		t.Errorf("weak: %q, %q, %q", clients[0].Weak, clients[1].Weak, clients[2].Weak)
	}
	found, err := s.find(t.Context(), Want{Registry: "r.example"})
	if err != nil {
		t.Fatal(err)
	}
	write(t, path, "server = \"https://r.example\"\nskip_verify = true")
	if c := s.tlsNow(found[0], Want{Registry: "r.example"}); c != nil {
		t.Error("what was verified is not any more, on a connection that is renewed")
	}
}

// A mirror that is often down should not hold up each pull for the default of ten seconds.
func TestDialTimeout(t *testing.T) {
	dir := t.TempDir()
	write(t, filepath.Join(dir, "mirrored.example", "hosts.toml"), `
server = "https://origin.example/v2"
dial_timeout = "7s"
[host."http://near.example:5000"]
  dial_timeout = "300ms"
[host."far.example"]
[host."third.example/cache/v2"]
  dial_timeout = "2s"
  override_path = true
`)
	write(t, filepath.Join(dir, "alone.example", "hosts.toml"), `dial_timeout = "4s"`)
	write(t, filepath.Join(dir, "certificates.example", "note.txt"), "no hosts.toml")
	s := New(Options{Dirs: dir})
	defer s.Close()
	for registry, want := range map[string][]string{
		"mirrored.example":     {"near.example:5000 300ms", "far.example 0s", "third.example 2s", "origin.example 7s"},
		"alone.example":        {"alone.example 4s"},
		"certificates.example": {"certificates.example 0s"},
		"unknown.example":      {"unknown.example 0s"},
	} {
		list, err := s.find(t.Context(), Want{Registry: registry})
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, f := range list {
			got = append(got, fmt.Sprint(f.Host, " ", f.dialTimeout))
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s: %s", registry, diff)
		}
	}
}

// A host that takes a connection and says nothing is given up after its dial_timeout.
func TestDialTimeoutHolds(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close() // what nobody accepts is connected all the same
	dir := t.TempDir()
	write(t, filepath.Join(dir, "silent.example", "hosts.toml"),
		fmt.Sprintf("server = \"https://%s\"\ndial_timeout = \"50ms\"\nskip_verify = true\n", l.Addr()))
	s := New(Options{Dirs: dir})
	defer s.Close()
	list, err := s.For(t.Context(), Want{Registry: "silent.example", Repository: "a"})
	if err != nil || len(list) != 1 {
		t.Fatal(list, err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second) // half of the default
	defer cancel()
	if err := list[0].Client.Post(ctx, "/x", nil, nil); err == nil || ctx.Err() != nil {
		t.Errorf("%v, %v", err, ctx.Err())
	}
}

func TestForNobody(t *testing.T) {
	dir := t.TempDir()
	write(t, filepath.Join(dir, "r.example", "hosts.toml"), "server = \"https://127.0.0.1:598\"\ncapabilities = [\"pull\"]")
	s := New(Options{Dirs: dir, Self: []string{"127.0.0.1:598"}})
	defer s.Close()
	if list, err := s.For(t.Context(), Want{Registry: "r.example"}); err == nil || !strings.Contains(err.Error(), dir) {
		t.Errorf("%v, %v", list, err)
	}
	write(t, filepath.Join(dir, "r.example", "hosts.toml"), "ca = \"absent.pem\"\nserver = \"https://r.example\"")
	if list, err := s.For(t.Context(), Want{Registry: "r.example"}); err == nil || !strings.Contains(err.Error(), "absent.pem") {
		t.Errorf("%v, %v", list, err)
	}
}

// registry demands credentials as registries do, and answers with what it got.
type registry struct {
	*httptest.Server
	t     testing.TB
	basic bool

	mu     sync.Mutex
	valid  string // token
	issued int
	lives  int // seconds that a token claims to live; 0: it does not say
	down   bool
	log    []string
}

const user, secret = "alice", "s3cret-Pa55"

func (r *registry) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if req.URL.Path == "/token" {
		_ = req.ParseForm()
		if r.down {
			http.Error(w, "busy", http.StatusServiceUnavailable)
			return
		}
		r.log = append(r.log, fmt.Sprint("token ", req.Form["scope"]))
		if req.Form.Get("username") != user || req.Form.Get("password") != secret {
			if req.Form.Get("refresh_token") != secret {
				http.Error(w, "who is "+req.Form.Get("password"), http.StatusUnauthorized)
				return
			}
		}
		r.issued++
		r.valid = fmt.Sprint("t0ken-", r.issued)
		_ = json.NewEncoder(w).Encode(map[string]any{"access_token": r.valid, "expires_in": r.lives})
		return
	}
	r.log = append(r.log, req.URL.Path+"?"+req.URL.RawQuery)
	u, p, ok := req.BasicAuth()
	switch {
	case r.basic && ok && u == user && p == secret, !r.basic && r.valid != "" && req.Header.Get("Authorization") == "Bearer "+r.valid:
		_, _ = io.Copy(w, req.Body)
		return
	case r.basic:
		w.Header().Set("WWW-Authenticate", `Basic realm="here"`)
	default:
		w.Header().Set("WWW-Authenticate", fmt.Sprintf(`Bearer realm="%s/token",service="s",scope="repository:a:pull"`, r.URL))
	}
	w.WriteHeader(http.StatusUnauthorized)
}

func (r *registry) do(fn func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	fn()
}

// newRegistry serves TLS; the directory of hosts.toml says what to trust.
func newRegistry(t testing.TB, basic bool) (r *registry, dirs string) {
	r = &registry{t: t, basic: basic}
	r.Server = httptest.NewUnstartedServer(r)
	r.EnableHTTP2 = true
	r.StartTLS()
	t.Cleanup(r.Close)
	dirs = t.TempDir()
	write(t, filepath.Join(dirs, "ca.pem"), string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: r.Certificate().Raw})))
	write(t, filepath.Join(dirs, "r.example", "hosts.toml"), fmt.Sprintf("server = %q\nca = \"../ca.pem\"\n[header]\nx-site = \"one\"\n", r.URL))
	return r, dirs
}

func post(t testing.TB, s *Set, c credentials.Credential) error {
	t.Helper()
	list, err := s.For(t.Context(), Want{Registry: "r.example", Repository: "a", Credential: c})
	if err != nil {
		t.Fatal(err)
	}
	var answer string
	err = list[0].Client.Post(t.Context(), "/hydrofoil/v1/bundle", "hello", &answer)
	if err == nil && answer != "hello" {
		t.Errorf("answer %q", answer)
	}
	for _, leak := range []string{secret, "t0ken"} {
		if err != nil && strings.Contains(err.Error(), leak) {
			t.Errorf("the error has a secret: %v", err)
		}
	}
	return err
}

func TestCredentials(t *testing.T) {
	good := credentials.Credential{Username: user, Secret: secret}
	helper := t.TempDir()
	t.Setenv("PATH", helper+":"+os.Getenv("PATH"))
	program := write(t, filepath.Join(helper, "docker-credential-test"), "#!/bin/sh\nread host\necho \"{\\\"ServerURL\\\":\\\"$host\\\",\\\"Username\\\":\\\""+user+"\\\",\\\"Secret\\\":\\\""+secret+"\\\"}\"\n")
	if err := os.Chmod(program, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, basic := range []bool{true, false} {
		r, dirs := newRegistry(t, basic)
		host := strings.TrimPrefix(r.URL, "https://")
		docker := func(format string, args ...any) string {
			return write(t, filepath.Join(t.TempDir(), "config.json"), fmt.Sprintf(format, args...))
		}
		for name, tc := range map[string]struct {
			given  credentials.Credential
			config string
			ok     bool
		}{
			"given":              {given: good, ok: true},
			"given for the host": {given: credentials.Credential{Username: user, Secret: secret, Host: host}, ok: true},
			"given for another":  {given: credentials.Credential{Username: user, Secret: secret, Host: "other.example"}},
			"wrong":              {given: credentials.Credential{Username: user, Secret: "wr0ng"}},
			"none":               {},
			"identity token":     {given: credentials.Credential{Secret: secret}, ok: !basic},
			"auths":              {config: docker(`{"auths":{%q:{"auth":"YWxpY2U6czNjcmV0LVBhNTU="}}}`, host), ok: true},
			"auths of another":   {config: docker(`{"auths":{"other.example":{"auth":"YWxpY2U6czNjcmV0LVBhNTU="}}}`)},
			"credHelpers":        {config: docker(`{"credHelpers":{%q:"test"}}`, host), ok: true},
			"credsStore":         {config: docker(`{"credsStore":"test"}`), ok: true},
			"absent helper":      {config: docker(`{"credsStore":"absent"}`)},
			"no JSON":            {config: docker(`{"auths":`)},
			"no such file":       {config: "/nonexistent/config.json"},
		} {
			t.Run(fmt.Sprintf("basic %v/%s", basic, name), func(t *testing.T) {
				s := New(Options{Dirs: dirs, DockerConfig: tc.config})
				defer s.Close()
				r.do(func() { r.valid = "" })
				err := post(t, s, tc.given)
				if tc.ok != (err == nil) {
					t.Fatalf("%v, want success: %v", err, tc.ok)
				}
				var status *remote.StatusError
				if !tc.ok && (!errors.As(err, &status) || status.Status != http.StatusUnauthorized) {
					t.Errorf("%v, want status 401", err)
				}
			})
		}
	}
}

func TestTokens(t *testing.T) {
	r, dirs := newRegistry(t, false)
	s := New(Options{Dirs: dirs})
	defer s.Close()
	good := credentials.Credential{Username: user, Secret: secret}
	must := func() []string {
		t.Helper()
		r.do(func() { r.log = nil })
		if err := post(t, s, good); err != nil {
			t.Fatal(err)
		}
		return r.log
	}
	const ask, token = "/hydrofoil/v1/bundle?ns=r.example", "token [repository:a:pull]"
	if diff := cmp.Diff([]string{ask, token, ask}, must()); diff != "" {
		t.Errorf("the first request:\n%s", diff)
	}
	if diff := cmp.Diff([]string{ask}, must()); diff != "" {
		t.Errorf("the next pull:\n%s", diff)
	}
	// The registry takes the token no more, though its time is not over.
	r.do(func() { r.valid = "" })
	if diff := cmp.Diff([]string{ask, ask, token, ask}, must()); diff != "" {
		t.Errorf("a token that was withdrawn:\n%s", diff)
	}
	// A token server that is down for a while is asked again.
	r.do(func() { r.valid, r.down = "", true })
	var status *remote.StatusError
	if err := post(t, s, good); err == nil || errors.As(err, &status) {
		t.Errorf("without a token server: %v", err)
	}
	r.do(func() { r.down = false })
	must()
	// One that was issued with its time is renewed when that is over, unasked.
	r.do(func() { r.valid, r.lives = "", 1 })
	must()
	deadline := time.Now().Add(time.Minute)
	for {
		if log := must(); cmp.Equal([]string{token, ask}, log) {
			break
		} else if !cmp.Equal([]string{ask}, log) || time.Now().After(deadline) {
			t.Fatalf("requests %q", log)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// One connection for all pulls from a host, until what is configured changes.
func TestOneClient(t *testing.T) {
	r, dirs := newRegistry(t, true)
	s := New(Options{Dirs: dirs})
	defer s.Close()
	good := credentials.Credential{Username: user, Secret: secret}
	for range 3 {
		if err := post(t, s, good); err != nil {
			t.Fatal(err)
		}
	}
	if len(s.known) != 1 {
		t.Errorf("%d clients for one host", len(s.known))
	}
	write(t, filepath.Join(dirs, "r.example", "hosts.toml"), fmt.Sprintf("server = %q\n", r.URL))
	if err := post(t, s, good); !errors.As(err, new(*tls.CertificateVerificationError)) {
		t.Errorf("without the authority: %v", err)
	}
	write(t, filepath.Join(dirs, "r.example", "hosts.toml"), fmt.Sprintf("server = %q\nskip_verify = true\n", r.URL))
	if err := post(t, s, good); err != nil {
		t.Errorf("unverified: %v", err)
	}
}

// A registry, its hosts and the daemon's own mirror on IPv6 addresses.
func TestIPv6(t *testing.T) {
	l, err := net.Listen("tcp6", "[::1]:0")
	if err != nil {
		t.Skipf("this host has no IPv6: %v", err)
	}
	srv := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		_, _ = fmt.Fprintf(w, "%q", req.Header.Get("x-site"))
	}))
	srv.Listener.Close()
	srv.Listener = l
	srv.Start()
	defer srv.Close()
	here := l.Addr().String() // [::1]:PORT
	_, port, _ := strings.Cut(here, "]:")
	for name, tc := range map[string]struct {
		registry, dir string // of hosts.toml; empty: there is none
		want          string
	}{
		"itself":        {here, "", ""},
		"by underlines": {here, "[::1]_" + port + "_", "configured"},
		"by its name":   {here, here, "configured"},
		"as a mirror":   {"[fd00::7]:5000", "[fd00::7]_5000_", "configured"},
	} {
		t.Run(name, func(t *testing.T) {
			dirs := t.TempDir()
			if tc.dir != "" {
				write(t, filepath.Join(dirs, tc.dir, "hosts.toml"), fmt.Sprintf("[host.\"http://[::1]:598\"]\n[host.\"http://%s\"]\ncapabilities = [\"pull\"]\n[host.\"http://%s\".header]\nx-site = \"configured\"\n", here, here))
			}
			s := New(Options{Dirs: dirs, Self: []string{"[::1]:598"}})
			defer s.Close()
			list, err := s.For(t.Context(), Want{Registry: tc.registry, Repository: "a"})
			if err != nil {
				t.Fatal(err)
			}
			var got string
			if err := list[0].Client.Post(t.Context(), "/hydrofoil/v1/bundle", 1, &got); err != nil || got != tc.want {
				t.Errorf("answer %q, %v; want %q", got, err, tc.want)
			}
		})
	}
}

// A host that is configured with TLS and speaks HTTP, and one that speaks
// HTTP/1.1 only.
func TestFallBack(t *testing.T) {
	for name, protocols := range map[string]func(*http.Protocols){
		"HTTP/1.1": func(p *http.Protocols) { p.SetHTTP1(true) },
		"HTTP/2":   func(p *http.Protocols) { p.SetHTTP1(true); p.SetUnencryptedHTTP2(true) },
	} {
		t.Run(name, func(t *testing.T) {
			srv := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) { _, _ = io.Copy(w, req.Body) }))
			srv.Config.Protocols = new(http.Protocols)
			protocols(srv.Config.Protocols)
			srv.Start()
			defer srv.Close()
			dirs := t.TempDir()
			for _, config := range []string{"server = %q\nskip_verify = true", "server = %q"} {
				write(t, filepath.Join(dirs, "r.example", "hosts.toml"), fmt.Sprintf(config, srv.URL))
				s := New(Options{Dirs: dirs})
				if err := post(t, s, credentials.Credential{}); err != nil {
					t.Errorf("%s: %v", config, err)
				}
				s.Close()
			}
		})
	}
}

func TestHeaderAndClientCertificate(t *testing.T) {
	srv := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if len(req.TLS.PeerCertificates) != 1 || req.Header.Get("x-site") != "one" {
			w.WriteHeader(http.StatusForbidden)
			return
		}
		_, _ = io.Copy(w, req.Body)
	}))
	srv.TLS = &tls.Config{ClientAuth: tls.RequireAnyClientCert}
	srv.EnableHTTP2 = true
	srv.StartTLS()
	defer srv.Close()
	dirs := t.TempDir()
	cert := write(t, filepath.Join(dirs, "client.pem"), string(testCert(t)))
	write(t, filepath.Join(dirs, "r.example", "hosts.toml"), fmt.Sprintf("server = %q\nskip_verify = true\nclient = %q\n[header]\nx-site = \"one\"\n", srv.URL, cert))
	s := New(Options{Dirs: dirs})
	defer s.Close()
	if err := post(t, s, credentials.Credential{}); err != nil {
		t.Error(err)
	}
}

// Certificates of both sides, and what vouches for the server's, are replaced while the
// daemon runs: new pulls, and one that runs and connects again, use what is on the disk.
func TestRenewedCertificates(t *testing.T) {
	var mu sync.Mutex
	var own tls.Certificate // the server's
	var client []byte       // the one that it takes
	handshakes := 0
	srv := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) { _, _ = io.Copy(w, req.Body) }))
	srv.TLS = &tls.Config{
		ClientAuth: tls.RequireAnyClientCert,
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
			mu.Lock()
			defer mu.Unlock()
			want := client
			return &tls.Config{
				Certificates: []tls.Certificate{own}, NextProtos: []string{"h2"}, ClientAuth: tls.RequireAnyClientCert,
				VerifyPeerCertificate: func(raw [][]byte, _ [][]*x509.Certificate) error {
					mu.Lock()
					defer mu.Unlock()
					if handshakes++; !bytes.Equal(raw[0], want) {
						return errors.New("not this one any more")
					}
					return nil
				},
			}, nil
		},
	}
	srv.Config.ErrorLog = log.New(io.Discard, "", 0)
	srv.EnableHTTP2 = true
	srv.StartTLS()
	defer srv.Close()
	dirs := t.TempDir()
	write(t, filepath.Join(dirs, "r.example", "hosts.toml"), fmt.Sprintf("server = %q\nca = \"ca.pem\"\nclient = \"client.pem\"\n", srv.URL))
	renew := func() {
		t.Helper()
		ours, theirs := testCert(t), testCert(t)
		write(t, filepath.Join(dirs, "r.example", "client.pem"), string(ours))
		write(t, filepath.Join(dirs, "r.example", "ca.pem"), string(theirs))
		pair, err := tls.X509KeyPair(theirs, theirs)
		if err != nil {
			t.Fatal(err)
		}
		block, _ := pem.Decode(ours)
		mu.Lock()
		defer mu.Unlock()
		own, client = pair, block.Bytes
	}
	renew()
	s := New(Options{Dirs: dirs})
	defer s.Close()
	list, err := s.For(t.Context(), Want{Registry: "r.example", Repository: "a"})
	if err != nil {
		t.Fatal(err)
	}
	running := func() error { return list[0].Client.Post(t.Context(), "/hydrofoil/v1/bundle", "hello", nil) }
	if err := running(); err != nil {
		t.Fatal(err)
	}
	renew()
	srv.CloseClientConnections()
	for range 3 { // a transport may find with the first request that its connection has gone, and with the second what it has to show
		if err = running(); err == nil {
			break
		}
	}
	if err != nil {
		t.Errorf("a pull that runs: %v", err)
	}
	renew()
	before := handshakes
	if err := post(t, s, credentials.Credential{}); err != nil {
		t.Errorf("a new pull: %v", err)
	}
	if handshakes == before {
		t.Error("a new pull uses the connection of before")
	}
	before = handshakes
	if err := running(); err != nil || handshakes != before || len(s.known) != 1 {
		t.Errorf("after a new pull: %v, %d connections, %d clients", err, handshakes-before, len(s.known))
	}
	// Files that are just being written.
	write(t, filepath.Join(dirs, "r.example", "client.pem"), "-----BEGIN")
	srv.CloseClientConnections()
	for range 3 {
		if err = running(); err == nil {
			break
		}
	}
	if err != nil {
		t.Errorf("while files are being replaced: %v", err)
	}
}

func TestCredentialIsHidden(t *testing.T) {
	c := credentials.Credential{Username: user, Secret: secret, Token: secret}
	for _, format := range []string{"%v", "%+v", "%#v", "%s", "%q", "%d"} {
		for _, v := range []any{c, &c, struct{ C credentials.Credential }{c}} {
			if s := fmt.Sprintf(format, v); strings.Contains(s, secret) || strings.Contains(s, user) {
				t.Errorf("%s prints %s", format, s)
			}
		}
	}
}
