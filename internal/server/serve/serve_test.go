package serve_test

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/server/serve"
)

// start runs a server for the test.
func start(t testing.TB, opts serve.Options) *serve.Server {
	t.Helper()
	if opts.Root == "" {
		opts.Root = t.TempDir()
	}
	if opts.Listen == "" {
		opts.Listen = "127.0.0.1:0"
	}
	if opts.Log == nil {
		opts.Log = slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelWarn}))
	}
	s, err := serve.Start(context.Background(), opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		if err := s.Wait(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// certificate writes a self-signed pair for 127.0.0.1.
func certificate(t *testing.T, cert, key string, serial int64) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(serial),
		Subject:      pkix.Name{CommonName: "test"},
		NotAfter:     time.Now().Add(time.Hour),
		IPAddresses:  []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, private.Public(), private)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	for path, block := range map[string]*pem.Block{
		cert: {Type: "CERTIFICATE", Bytes: der},
		key:  {Type: "PRIVATE KEY", Bytes: keyDER},
	} {
		if err := os.WriteFile(path, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// client speaks only one protocol.
func client(protocol string) *http.Client {
	p := new(http.Protocols)
	switch protocol {
	case "HTTP/1.1":
		p.SetHTTP1(true)
	case "HTTP/2.0 without TLS":
		p.SetUnencryptedHTTP2(true)
	case "HTTP/2.0":
		p.SetHTTP2(true)
	}
	return &http.Client{Transport: &http.Transport{
		Protocols:       p,
		TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, // of the test's own certificate
	}}
}

func TestProtocols(t *testing.T) {
	dir := t.TempDir()
	cert, key := filepath.Join(dir, "cert"), filepath.Join(dir, "key")
	certificate(t, cert, key, 1)
	plain := start(t, serve.Options{})
	secure := start(t, serve.Options{TLSCert: cert, TLSKey: key})
	b := bytes.Repeat([]byte("a blob of some size "), 100_000)
	d := digest.FromBytes(b)
	for _, test := range []struct{ protocol, base string }{
		{"HTTP/1.1", "http://" + plain.Addr()},
		{"HTTP/2.0 without TLS", "http://" + plain.Addr()},
		{"HTTP/1.1", "https://" + secure.Addr()},
		{"HTTP/2.0", "https://" + secure.Addr()},
	} {
		c := client(test.protocol)
		do := func(method, path string, body io.Reader, status int) []byte {
			t.Helper()
			req, err := http.NewRequestWithContext(t.Context(), method, test.base+path, body)
			if err != nil {
				t.Fatal(err)
			}
			res, err := c.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			defer res.Body.Close()
			got, err := io.ReadAll(res.Body)
			if err != nil || res.StatusCode != status {
				t.Fatalf("%s %s: %d, %v, want %d; %.200s", method, path, res.StatusCode, err, status, got)
			}
			if !strings.HasPrefix(test.protocol, res.Proto) {
				t.Errorf("%s was answered in %s", test.protocol, res.Proto)
			}
			return got
		}
		if got := do("GET", "/healthz", nil, 200); string(got) != "ok\n" {
			t.Errorf("healthz: %q", got)
		}
		do("POST", "/v2/r/blobs/uploads/?digest="+d.String(), bytes.NewReader(b), 201)
		if got := do("GET", "/v2/r/blobs/"+d.String(), nil, 200); !bytes.Equal(got, b) {
			t.Errorf("%s: other bytes came back", test.protocol)
		}
		do("GET", "/v2", nil, 200)
		do("GET", "/else", nil, 404)
		c.CloseIdleConnections()
	}
}

func TestCertificateIsRenewed(t *testing.T) {
	dir := t.TempDir()
	cert, key := filepath.Join(dir, "cert"), filepath.Join(dir, "key")
	certificate(t, cert, key, 1)
	s := start(t, serve.Options{TLSCert: cert, TLSKey: key})
	serial := func() int64 {
		t.Helper()
		c, err := tls.Dial("tcp", s.Addr(), &tls.Config{InsecureSkipVerify: true})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		return c.ConnectionState().PeerCertificates[0].SerialNumber.Int64()
	}
	touch := func(at time.Time) {
		t.Helper()
		for _, name := range []string{cert, key} {
			if err := os.Chtimes(name, at, at); err != nil {
				t.Fatal(err)
			}
		}
	}
	if got := serial(); got != 1 {
		t.Errorf("certificate %d, want 1", got)
	}
	certificate(t, cert, key, 2)
	touch(time.Now().Add(time.Minute))
	if got := serial(); got != 2 {
		t.Errorf("certificate %d after it was renewed, want 2", got)
	}
	if err := os.WriteFile(cert, []byte("half"), 0o600); err != nil {
		t.Fatal(err)
	}
	touch(time.Now().Add(2 * time.Minute))
	if got := serial(); got != 2 {
		t.Errorf("certificate %d while it is being written, want 2", got)
	}
}

func TestOneServerARoot(t *testing.T) {
	root := t.TempDir()
	s := start(t, serve.Options{Root: root})
	_, err := serve.Start(t.Context(), serve.Options{Root: root, Listen: "127.0.0.1:0"})
	if err == nil || !strings.Contains(err.Error(), "another server uses "+root) {
		t.Errorf("a second server: %v, want an error that says why", err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	start(t, serve.Options{Root: root})
}

func TestAddressInUse(t *testing.T) {
	s := start(t, serve.Options{Root: t.TempDir()})
	_, err := serve.Start(t.Context(), serve.Options{Root: t.TempDir(), Listen: s.Addr()})
	if err == nil || !strings.Contains(err.Error(), "end what listens there") {
		t.Errorf("%v, want an error that says what to do", err)
	}
}

func TestOptions(t *testing.T) {
	for _, opts := range []serve.Options{
		{},
		{Root: t.TempDir(), TLSCert: "cert"},
		{Root: t.TempDir(), Listen: "127.0.0.1:0", TLSCert: "/missing", TLSKey: "/missing"},
		{Root: "/dev/null/x", Listen: "127.0.0.1:0"},
	} {
		if s, err := serve.Start(t.Context(), opts); err == nil {
			s.Close()
			t.Errorf("a server starts with %+v", opts)
		}
	}
}

// Close lets a request that is under way go on, and takes no new one.
func TestGrace(t *testing.T) {
	root := t.TempDir()
	s := start(t, serve.Options{Root: root, Grace: time.Minute})
	pr, pw := io.Pipe()
	done := make(chan error, 1)
	d := digest.FromString("hello, world")
	go func() {
		res, err := http.Post("http://"+s.Addr()+"/v2/r/blobs/uploads/?digest="+d.String(), "application/octet-stream", pr)
		if err == nil {
			res.Body.Close()
			if res.StatusCode != http.StatusCreated {
				err = fmt.Errorf("status %d", res.StatusCode)
			}
		}
		done <- err
	}()
	if _, err := pw.Write([]byte("hello")); err != nil {
		t.Fatal(err)
	}
	for { // until the request has arrived
		files, err := filepath.Glob(filepath.Join(root, "uploads", "*.data"))
		if err != nil {
			t.Fatal(err)
		}
		if len(files) > 0 {
			break
		}
		time.Sleep(time.Millisecond)
	}
	closed := make(chan error, 1)
	go func() { closed <- s.Close() }()
	for { // until it listens no more
		c, err := net.Dial("tcp", s.Addr())
		if err != nil {
			break
		}
		c.Close()
		time.Sleep(time.Millisecond)
	}
	if _, err := pw.Write([]byte(", world")); err != nil {
		t.Fatal(err)
	}
	pw.Close()
	if err := <-done; err != nil {
		t.Errorf("the request under way: %v", err)
	}
	if err := <-closed; err != nil {
		t.Errorf("close: %v", err)
	}
}

// What does not end in the grace period is cut off.
func TestGraceEnds(t *testing.T) {
	s := start(t, serve.Options{Grace: time.Millisecond})
	pr, pw := io.Pipe()
	defer pw.Close()
	done := make(chan struct{})
	go func() {
		defer close(done)
		res, err := http.Post("http://"+s.Addr()+"/v2/r/blobs/uploads/?digest="+digest.FromString("x").String(), "", pr)
		if err == nil {
			res.Body.Close()
			if res.StatusCode == http.StatusCreated {
				t.Error("a request that was never ended was accepted")
			}
		}
	}()
	if _, err := pw.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	pw.Close()
	<-done
}

// One that the host does not have is said, unless it is the default.
func TestCongestionThatIsNotThere(t *testing.T) {
	_, err := serve.Start(t.Context(), serve.Options{Root: t.TempDir(), Listen: "127.0.0.1:0", Congestion: "no-such"})
	if err == nil || !strings.Contains(err.Error(), "choose congestion control no-such") || !strings.Contains(err.Error(), "modprobe") {
		t.Errorf("%v, want an error that says what there is", err)
	}
}
