package serve

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"

	"github.com/prometheus/client_golang/prometheus/promhttp"

	"hydrofoil.dev/foil/internal/metrics"
	"hydrofoil.dev/foil/internal/server/access"
	"hydrofoil.dev/foil/internal/server/guard"
	"hydrofoil.dev/foil/internal/server/upstream"
)

// MetricsPath is where those with the right admin find the server's metrics, beside the address of
// their own that these may have.
const MetricsPath = "/metrics"

// checkExposed refuses a server that strangers could reach, unless it knows its clients, over TLS.
func checkExposed(o Options) error {
	if o.Access != "" && o.Upstream.ClientCredentials {
		return errors.New("with the credentials of clients the upstream decides who may pull, and rules of access do not: leave out --access, or --upstream-credentials client")
	}
	knows := o.Access != "" || o.Upstream.ClientCredentials
	if o.InsecureOpen || isLoopback(o.Listen) || o.TLSCert != "" && knows {
		return nil
	}
	var lacks, fix []string
	if o.TLSCert == "" {
		lacks, fix = append(lacks, "TLS"), append(fix, "  --tls-cert cert.pem --tls-key key.pem")
	}
	if !knows {
		lacks, fix = append(lacks, "a way to log in"), append(fix, "  --access access.toml     (docs/access.md has examples)")
	}
	return fmt.Errorf("%s can be reached by other machines, and the server has not %s. Add:\n%s\nOr keep it on this machine (--listen %s), or, if everybody who reaches it may do everything, say so: --insecure-open",
		o.Listen, strings.Join(lacks, " and "), strings.Join(fix, "\n"), DefaultListen)
}

// isLoopback reports whether only this machine reaches an address. A name counts if it is localhost: others may
// resolve to something else tomorrow.
func isLoopback(address string) bool {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return true // to listen will say what is wrong with it
	}
	if strings.EqualFold(host, "localhost") {
		return true
	}
	a, err := netip.ParseAddr(host)
	return err == nil && a.Unmap().IsLoopback()
}

// ciphers are those of TLS 1.2 that have forward secrecy and authenticate what they encrypt. Go offers CBC as well, which scanners
// take for weak, and no client needs: all that speak TLS 1.2 and HTTP/2 know these. Those of TLS 1.3 are Go's.
var ciphers = []uint16{
	tls.TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256, tls.TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256,
	tls.TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384, tls.TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384,
	tls.TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256, tls.TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256,
}

// tlsConfig asks clients for certificates while the rules of access want some.
func (s *Server) tlsConfig(pair *keyPair) *tls.Config {
	base := &tls.Config{
		GetCertificate: pair.get,
		NextProtos:     []string{"h2", "http/1.1"},
		MinVersion:     tls.VersionTLS12,
		CipherSuites:   ciphers,
	}
	if s.guard == nil {
		return base
	}
	// A session is resumed under the issuers that it began with only.
	var mu sync.Mutex
	var last *x509.CertPool // guarded by mu
	var config *tls.Config  // guarded by mu: the one for last
	base.GetConfigForClient = func(*tls.ClientHelloInfo) (*tls.Config, error) {
		pool := s.guard.Logins().ClientCAs()
		mu.Lock()
		defer mu.Unlock()
		if config == nil || pool != last {
			config, last = base.Clone(), pool
			config.GetConfigForClient = nil
			if pool != nil {
				config.ClientAuth, config.ClientCAs = tls.VerifyClientCertIfGiven, pool
			}
		}
		return config, nil
	}
	return base
}

// mayNotify reports whether whoever tells of pushes to a repository may push there.
func (s *Server) mayNotify(ctx context.Context, p upstream.Pushed) error {
	return s.guard.Check(ctx, access.Push, p.Repository, p.Digest.String())
}

// refuse answers what the guard does not let pass.
func refuse(w http.ResponseWriter, err error) {
	if denied, ok := errors.AsType[*guard.Denied](err); ok {
		denied.Write(w)
		return
	}
	http.Error(w, "the server failed; its log says why", http.StatusInternalServerError)
}

// serveMetrics shows the metrics to administrators.
func (s *Server) serveMetrics(w http.ResponseWriter, req *http.Request) {
	if err := s.guard.Check(req.Context(), access.Admin, ""); err != nil {
		refuse(w, err)
		return
	}
	registry, err := metrics.Registry(s.metrics)
	if err != nil {
		s.log.Error("metrics cannot be shown", "error", err)
		http.Error(w, "the server failed; its log says why", http.StatusInternalServerError)
		return
	}
	promhttp.HandlerFor(registry, promhttp.HandlerOpts{}).ServeHTTP(w, req)
}
