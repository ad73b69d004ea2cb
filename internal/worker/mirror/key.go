package mirror

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"

	"hydrofoil.dev/foil/internal/durable"
)

// KeyPath is the file by which the daemon of a root and containerd know each other: a private key and its
// certificate, in one PEM file. Both show it, and believe who shows it: it is the ca and the client of
// hosts.toml. Only root of the host can read it.
func KeyPath(root string) string { return filepath.Join(root, "mirror", "key.pem") }

// Hosts is what hosts.toml is to say of the mirror at an address of a root.
func Hosts(root, address string) string {
	return fmt.Sprintf("[host.%q]\n  capabilities = [\"pull\", \"resolve\"]\n  ca = %q\n  client = %q", "https://"+address, KeyPath(root), KeyPath(root))
}

// LoadKey reads the key of a root for a mirror at an address, HOST:PORT. It makes one where there is none, and
// where it is not for this address or others could have read it.
func LoadKey(root, address string) (*tls.Certificate, error) {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return nil, fmt.Errorf("mirror address %q: %w", address, err)
	}
	path := KeyPath(root)
	b, err := readSecret(path)
	if err == nil {
		if key, err := tls.X509KeyPair(b, b); err == nil && key.Leaf.VerifyHostname(host) == nil && time.Now().Before(key.Leaf.NotAfter) {
			return &key, nil
		}
	} else if !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, errExposed) {
		return nil, fmt.Errorf("key of the mirror: %w", err)
	}
	if b, err = newKey(host); err == nil {
		if err = os.MkdirAll(filepath.Dir(path), 0o700); err == nil {
			if err = os.Chmod(filepath.Dir(path), 0o700); err == nil {
				err = durable.Replace(path, b)
			}
		}
	}
	if err != nil {
		return nil, fmt.Errorf("make a key for the mirror: %w", err)
	}
	key, err := tls.X509KeyPair(b, b)
	return &key, err
}

var errExposed = errors.New("others can read it")

// readSecret reads a file that nobody else may read.
func readSecret(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if st.Mode().Perm()&0o077 != 0 || st.Size() > 64<<10 {
		return nil, fmt.Errorf("%s: %w", path, errExposed)
	}
	b := make([]byte, st.Size())
	_, err = f.ReadAt(b, 0)
	return b, err
}

// newKey makes a key and a certificate for it, signed by itself, for a host and the names of loopback. It does not
// expire: who has it is root, and can have another one made by removing it.
func newKey(host string) ([]byte, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		return nil, err
	}
	now := time.Now()
	c := &x509.Certificate{
		SerialNumber: serial,
		Subject:      pkix.Name{CommonName: "Hydrofoil's mirror"},
		NotBefore:    now.Add(-24 * time.Hour), NotAfter: now.AddDate(100, 0, 0),
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		DNSNames:    []string{"localhost"},
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1), net.IPv6loopback},
	}
	if ip := net.ParseIP(host); ip != nil {
		c.IPAddresses = append(c.IPAddresses, ip)
	}
	der, err := x509.CreateCertificate(rand.Reader, c, c, key.Public(), key)
	if err != nil {
		return nil, err
	}
	secret, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, err
	}
	return append(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
		pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: secret})...), nil
}

// onlyBy is the TLS of a server whose clients have its own key, too.
func onlyBy(key *tls.Certificate) *tls.Config {
	return &tls.Config{
		MinVersion:   tls.VersionTLS12,
		Certificates: []tls.Certificate{*key},
		ClientAuth:   tls.RequireAnyClientCert, // which proves that it has the certificate's key
		VerifyConnection: func(s tls.ConnectionState) error {
			if len(s.PeerCertificates) == 0 || !s.PeerCertificates[0].Equal(key.Leaf) {
				return errors.New("the client does not have the mirror's key")
			}
			return nil
		},
	}
}
