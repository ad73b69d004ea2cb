package serve_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"math/big"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"hydrofoil.dev/foil/internal/server/serve"
)

// What a scanner of TLS looks at, asked one by one: which versions the server speaks, and with which ciphers and
// protocols. It is the same with rules, which have a configuration for each connection.
func TestTLSIsWhatScannersAccept(t *testing.T) {
	for _, kind := range []string{"ECDSA", "RSA"} {
		for _, rules := range []bool{false, true} {
			dir := t.TempDir()
			cert, key := filepath.Join(dir, "cert"), filepath.Join(dir, "key")
			certificateOf(t, kind, cert, key)
			opts := serve.Options{TLSCert: cert, TLSKey: key}
			if rules {
				opts.Access = filepath.Join(dir, "access.toml")
				writeFile(t, opts.Access, "[[rule]]\nto = [\"everyone\"]\nallow = [\"pull\"]\nrepositories = [\"**\"]\n")
			}
			s := start(t, opts)
			ask := func(version uint16, suite uint16, protocols ...string) (tls.ConnectionState, error) {
				c, err := tls.Dial("tcp", s.Addr(), &tls.Config{InsecureSkipVerify: true, MinVersion: version, MaxVersion: version, CipherSuites: []uint16{suite}, NextProtos: protocols})
				if err != nil {
					return tls.ConnectionState{}, err
				}
				defer c.Close()
				return c.ConnectionState(), nil
			}
			for _, version := range []uint16{tls.VersionTLS10, tls.VersionTLS11} {
				if _, err := ask(version, tls.TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA); err == nil {
					t.Errorf("%s: %s is spoken", kind, tls.VersionName(version))
				}
			}
			var taken []string
			for _, suite := range append(tls.CipherSuites(), tls.InsecureCipherSuites()...) {
				if !slices.Contains(suite.SupportedVersions, tls.VersionTLS12) {
					continue
				}
				if _, err := ask(tls.VersionTLS12, suite.ID); err == nil {
					taken = append(taken, suite.Name)
				}
			}
			slices.Sort(taken)
			want := []string{"TLS_ECDHE_*_WITH_AES_128_GCM_SHA256", "TLS_ECDHE_*_WITH_AES_256_GCM_SHA384", "TLS_ECDHE_*_WITH_CHACHA20_POLY1305_SHA256"}
			for i := range want {
				want[i] = strings.Replace(want[i], "*", kind, 1)
			}
			if !slices.Equal(taken, want) {
				t.Errorf("%s, rules %v: of TLS 1.2 it takes %q, want %q", kind, rules, taken, want)
			}
			for _, version := range []uint16{tls.VersionTLS12, tls.VersionTLS13} {
				for _, protocol := range []string{"h2", "http/1.1"} {
					state, err := ask(version, ciphersOf[kind], protocol)
					if err != nil || state.NegotiatedProtocol != protocol || state.Version != version {
						t.Errorf("%s, %s by %s: %+v, %v", kind, protocol, tls.VersionName(version), state, err)
					}
				}
			}
			// Who offers all gets the newest version, and what hybrid key exchange there is.
			state, err := tls.Dial("tcp", s.Addr(), &tls.Config{InsecureSkipVerify: true})
			if err != nil {
				t.Fatal(err)
			}
			if got := state.ConnectionState(); got.Version != tls.VersionTLS13 || got.CurveID != tls.X25519MLKEM768 {
				t.Errorf("who offers all gets %s with %s", tls.VersionName(got.Version), got.CurveID)
			}
			state.Close()
		}
	}
}

// ciphersOf is one of TLS 1.2 for each kind of key.
var ciphersOf = map[string]uint16{"ECDSA": tls.TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256, "RSA": tls.TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256}

// certificateOf writes one that has signed itself, with a key of a kind.
func certificateOf(t *testing.T, kind, cert, key string) {
	t.Helper()
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour)}
	var der []byte
	var private any
	var err error
	if kind == "RSA" {
		var k *rsa.PrivateKey
		if k, err = rsa.GenerateKey(rand.Reader, 2048); err == nil {
			private = k
			der, err = x509.CreateCertificate(rand.Reader, template, template, k.Public(), k)
		}
	} else {
		var k *ecdsa.PrivateKey
		if k, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader); err == nil {
			private = k
			der, err = x509.CreateCertificate(rand.Reader, template, template, k.Public(), k)
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	b, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	writeFile(t, cert, string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})))
	writeFile(t, key, string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: b})))
}
