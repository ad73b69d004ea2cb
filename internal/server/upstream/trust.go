package upstream

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net/http"
	"os"
	"sync"
)

// trust is a transport that trusts the certificates of a file, besides the system's.
// When it finds a server that it does not trust, and the file has changed, it reads
// the file again.
type trust struct {
	file string

	mu    sync.Mutex
	read  []byte // of file
	inner *http.Transport
}

// trusting has a transport trust the certificates in the file ca; empty: only the
// system's.
func trusting(t *http.Transport, ca string) (http.RoundTripper, error) {
	if ca == "" {
		return t, nil
	}
	w := &trust{file: ca, inner: t}
	if err := w.renew(t); err != nil {
		return nil, err
	}
	return w, nil
}

var errUnchanged = errors.New("the file has not changed")

// renew replaces old by a transport that trusts what the file has now, unless another
// request has.
func (w *trust) renew(old *http.Transport) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.inner != old {
		return nil
	}
	b, err := os.ReadFile(w.file)
	if err != nil {
		return fmt.Errorf("certificates that vouch for the upstream: %w", err)
	}
	if w.read != nil && bytes.Equal(b, w.read) {
		return errUnchanged
	}
	roots, err := x509.SystemCertPool()
	if err != nil {
		roots = x509.NewCertPool()
	}
	if !roots.AppendCertsFromPEM(b) {
		return fmt.Errorf("certificates that vouch for the upstream: %s has none in PEM form", w.file)
	}
	w.inner, w.read = old.Clone(), b
	w.inner.TLSClientConfig.RootCAs = roots
	old.CloseIdleConnections()
	return nil
}

// RoundTrip sends a request again that was not sent because the server is not
// trusted, if it is by now.
func (w *trust) RoundTrip(req *http.Request) (*http.Response, error) {
	w.mu.Lock()
	inner := w.inner
	w.mu.Unlock()
	resp, err := inner.RoundTrip(req)
	if _, ok := errors.AsType[*tls.CertificateVerificationError](err); !ok {
		return resp, err
	}
	if renewed := w.renew(inner); renewed != nil || req.Body != nil && req.Body != http.NoBody {
		if renewed != nil && !errors.Is(renewed, errUnchanged) {
			err = fmt.Errorf("%w (%w)", err, renewed)
		}
		return nil, err
	}
	w.mu.Lock()
	inner = w.inner
	w.mu.Unlock()
	return inner.RoundTrip(req)
}
