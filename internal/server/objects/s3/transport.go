package s3

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"time"
)

// newTransport makes connections that end when they bring and take nothing for the timeout. An answer may take as long as
// answer to begin.
func newTransport(l Location, answer time.Duration, m *Metrics) (http.RoundTripper, error) {
	dialer := net.Dialer{Timeout: min(l.Timeout, 10*time.Second), KeepAlive: 15 * time.Second}
	t := &http.Transport{
		Proxy: http.ProxyFromEnvironment,
		DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
			c, err := dialer.DialContext(ctx, network, addr)
			if err != nil {
				return nil, err
			}
			return &impatient{c, l.Timeout}, nil
		},
		TLSHandshakeTimeout:   10 * time.Second,
		ResponseHeaderTimeout: answer,
		MaxIdleConnsPerHost:   64,
		MaxConnsPerHost:       512,
		IdleConnTimeout:       time.Minute,
		DisableCompression:    true, // objects are what they are
		TLSNextProto:          map[string]func(string, *tls.Conn) http.RoundTripper{},
		TLSClientConfig:       &tls.Config{MinVersion: tls.VersionTLS12},
	}
	if l.CA != "" {
		pem, err := os.ReadFile(l.CA)
		if err != nil {
			return nil, fmt.Errorf("ca: %w", err)
		}
		pool, err := x509.SystemCertPool()
		if err != nil {
			pool = x509.NewCertPool()
		}
		if !pool.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("ca: %s has no certificate in PEM form", l.CA)
		}
		t.TLSClientConfig.RootCAs = pool
	}
	return &transport{t, m}, nil
}

// impatient is a connection whose writes end when nothing is taken for a while. Reads have other limits: an idle connection
// waits for no answer.
type impatient struct {
	net.Conn
	timeout time.Duration
}

func (c *impatient) Write(p []byte) (int, error) {
	if err := c.SetWriteDeadline(time.Now().Add(c.timeout)); err != nil {
		return 0, err
	}
	return c.Conn.Write(p)
}

// transport counts requests, and sees to it that only the store itself says that an object is not there.
type transport struct {
	http.RoundTripper
	m *Metrics
}

// attempt is what a try of a request learns besides its error.
type attempt struct{ after time.Duration }

type attemptKey struct{}

func (t *transport) RoundTrip(req *http.Request) (*http.Response, error) {
	op := Operation(req)
	began := time.Now()
	resp, err := t.RoundTripper.RoundTrip(req)
	t.m.request(op, resp, err, time.Since(began), max(0, req.ContentLength))
	if err != nil {
		return nil, err
	}
	resp.Body = &countedBody{resp.Body, t.m}
	if a, ok := req.Context().Value(attemptKey{}).(*attempt); ok {
		if s, err := strconv.Atoi(resp.Header.Get("Retry-After")); err == nil && s > 0 {
			a.after = time.Duration(min(s, 3600)) * time.Second
		}
	}
	if resp.StatusCode != http.StatusNotFound || req.Method == http.MethodHead {
		return resp, nil
	}
	// Something in between, a proxy that knows of no store at the moment, says 404 as well.
	b, err := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	err = errors.Join(err, resp.Body.Close())
	var said struct{ Code string }
	if err != nil || xml.Unmarshal(b, &said) != nil || said.Code == "" {
		resp.StatusCode, resp.Status = http.StatusBadGateway, "502 it said 404 Not Found, not in the words of a store"
		b = nil
	}
	resp.Body = io.NopCloser(bytes.NewReader(b))
	return resp, nil
}

// Operation names what a request asks for: list, list_uploads, create, complete, part, abort, get, head, put, delete, other.
func Operation(req *http.Request) string {
	q := req.URL.Query()
	switch {
	case req.Method == http.MethodGet && q.Has("list-type"):
		return "list"
	case req.Method == http.MethodGet && q.Has("uploads"):
		return "list_uploads"
	case req.Method == http.MethodPost && q.Has("uploads"):
		return "create"
	case req.Method == http.MethodPost && q.Has("uploadId"):
		return "complete"
	case req.Method == http.MethodPut && q.Has("uploadId"):
		return "part"
	case req.Method == http.MethodDelete && q.Has("uploadId"):
		return "abort"
	}
	switch req.Method {
	case http.MethodGet:
		return "get"
	case http.MethodHead:
		return "head"
	case http.MethodPut:
		return "put"
	case http.MethodDelete:
		return "delete"
	}
	return "other"
}

type countedBody struct {
	io.ReadCloser
	m *Metrics
}

func (b *countedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	b.m.received.Add(float64(n))
	return n, err
}
