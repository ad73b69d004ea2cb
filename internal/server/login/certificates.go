package login

import (
	"crypto/x509"
	"errors"
	"fmt"

	"hydrofoil.dev/foil/internal/server/access"
	"hydrofoil.dev/foil/internal/server/reread"
)

// certificates know clients by those that they show.
type certificates struct {
	pool *reread.File[*x509.CertPool]
	name func(*x509.Certificate) string
}

// certificateNames says what is a certificate's name.
var certificateNames = map[string]func(*x509.Certificate) string{
	"common-name": func(c *x509.Certificate) string { return c.Subject.CommonName },
	"dns":         func(c *x509.Certificate) string { return only(c.DNSNames) },
	"email":       func(c *x509.Certificate) string { return only(c.EmailAddresses) },
	"uri": func(c *x509.Certificate) string {
		if len(c.URIs) != 1 {
			return ""
		}
		return c.URIs[0].String()
	},
}

// only returns the name of who has just one.
func only(names []string) string {
	if len(names) != 1 {
		return ""
	}
	return names[0]
}

func openCertificates(c Certificates, state *State) (*certificates, error) {
	if c.CA == "" {
		return nil, errors.New("it wants ca, a file with the certificates of who issues those of clients")
	}
	if c.Name == "" {
		c.Name = "common-name"
	}
	name, ok := certificateNames[c.Name]
	if !ok {
		return nil, fmt.Errorf("name = %q: want common-name, dns, email or uri", c.Name)
	}
	all := &certificates{name: name, pool: &reread.File[*x509.CertPool]{
		Path: c.CA, Parse: parsePool,
		Failed: func(err error) { state.log.Error("certificates of clients stay as they were", "error", err) },
	}}
	_, err := all.pool.Get()
	return all, err
}

func parsePool(b []byte) (*x509.CertPool, error) {
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(b) {
		return nil, errors.New("it has no certificates in PEM form")
	}
	return pool, nil
}

func (c *certificates) identify(cert *x509.Certificate) (*Identity, error) {
	name := c.name(cert)
	if !printable(name) {
		return nil, &Error{Way: WayCertificate, Message: "the client certificate has no name, or several, where this server looks for one"}
	}
	return &Identity{Subject: access.Subject{Name: "cert:" + name}, Way: WayCertificate, Shown: true}, nil
}

// ClientCAs are the issuers of clients' certificates; nil: none are asked for.
func (l *Logins) ClientCAs() *x509.CertPool {
	if l.certs == nil {
		return nil
	}
	pool, _ := l.certs.pool.Get() // it was read once, and stays
	return pool
}

// printable reports whether a name can be a subject's.
func printable(name string) bool {
	if name == "" || len(name) > 512 {
		return false
	}
	for _, r := range name {
		if r <= ' ' || r == 0x7f || r == '*' || r == 0xfffd {
			return false
		}
	}
	return true
}
