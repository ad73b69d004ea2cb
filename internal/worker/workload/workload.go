// Package workload is a credential provider plugin of the kubelet: it gives a token of a registry for
// the service-account token of a pod.
//
// # The contract
//
// The kubelet runs the plugin for an image that matches its configuration, and whose credentials it has not got in its cache:
// credentialprovider.kubelet.k8s.io/v1, in JSON. A CredentialProviderRequest comes on standard input, with the image and, if
// the configuration has tokenAttributes (KEP-4412), a token of the service account of the pod. A CredentialProviderResponse goes to
// standard output: names and passwords by registry, and for how long the kubelet may keep them. If the plugin fails
// the kubelet logs what it says on standard error, and pulls with what else it has.
//
// # The exchange
//
//	GET  https://HOST/v2/               401, WWW-Authenticate: Bearer realm="https://HOST/token",service="foil"
//	POST https://HOST/token             grant_type=urn:ietf:params:oauth:grant-type:token-exchange
//	                                    subject_token=TOKEN, subject_token_type=urn:ietf:params:oauth:token-type:jwt
//
// What comes back is the password of the response. A registry decides where its token service is, as it does for
// every client, but cannot have a token sent over plain HTTP that came over TLS. Redirects are not followed.
package workload

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"strings"
	"time"

	dockerauth "github.com/containerd/containerd/v2/core/remotes/docker/auth"
	"github.com/distribution/reference"
)

// Options configure a plugin.
type Options struct {
	// CA is a file with certificates that are trusted besides the system's.
	CA string
	// PlainHTTP has all registries be spoken to without TLS. Those on this machine are if they have none.
	PlainHTTP bool
	// Timeout bounds the whole; 0 means 20 s.
	Timeout time.Duration
}

const (
	// Version is the only one of the contract.
	Version = "credentialprovider.kubelet.k8s.io/v1"
	// User is the name beside a token. Registries look at the token only.
	User = "kubelet"

	maxRequest  = 1 << 20
	maxResponse = 1 << 20
)

// request is a CredentialProviderRequest, as far as it is read. What the kubelet may add is no error.
type request struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	Image      string `json:"image"`
	Token      string `json:"serviceAccountToken"`
}

// response is a CredentialProviderResponse.
type response struct {
	APIVersion    string          `json:"apiVersion"`
	Kind          string          `json:"kind"`
	CacheKeyType  string          `json:"cacheKeyType"`
	CacheDuration string          `json:"cacheDuration"`
	Auth          map[string]auth `json:"auth,omitempty"`
}

type auth struct {
	Username string `json:"username"`
	Password string `json:"password"`
}

// Provide answers one request. Errors have no token in them.
func Provide(ctx context.Context, o Options, in io.Reader, out io.Writer) error {
	if o.Timeout == 0 {
		o.Timeout = 20 * time.Second
	}
	ctx, cancel := context.WithTimeout(ctx, o.Timeout)
	defer cancel()
	b, err := io.ReadAll(io.LimitReader(in, maxRequest+1))
	if err != nil {
		return fmt.Errorf("read the request: %w", err)
	}
	r, registry, err := parse(b)
	if err != nil {
		return err
	}
	x, err := newExchange(o, registry)
	if err != nil {
		return err
	}
	token, lifetime, err := x.run(ctx, r.Token)
	if err != nil {
		return fmt.Errorf("registry %s: %w", registry, err)
	}
	// Half of it is left for the pull, at least.
	a := response{APIVersion: Version, Kind: "CredentialProviderResponse", CacheKeyType: "Registry", CacheDuration: (lifetime / 2).Truncate(time.Second).String()}
	if token != "" {
		a.Auth = map[string]auth{registry: {User, token}}
	}
	return json.NewEncoder(out).Encode(a)
}

// parse reads a request, and which registry it is for.
func parse(b []byte) (r request, registry string, err error) {
	if len(b) > maxRequest {
		return r, "", fmt.Errorf("the request is larger than %d bytes", maxRequest)
	}
	if json.Unmarshal(b, &r) != nil { // whose error may quote the token
		return r, "", errors.New("the request is no JSON of a CredentialProviderRequest: kubelets run this command, with one on standard input")
	}
	if r.APIVersion != Version || r.Kind != "CredentialProviderRequest" {
		return r, "", fmt.Errorf("the request is a %.60q of %.60q: want a CredentialProviderRequest of %s; write that as apiVersion of the provider in the kubelet's CredentialProviderConfig", r.Kind, r.APIVersion, Version)
	}
	named, err := reference.ParseNormalizedNamed(r.Image)
	if err != nil {
		return r, "", fmt.Errorf("image %.300q: %w", r.Image, err)
	}
	if r.Token == "" {
		return r, "", fmt.Errorf("image %s: the kubelet has sent no token of a service account: its CredentialProviderConfig wants tokenAttributes for this provider (serviceAccountTokenAudience: what the registry calls audience; requireServiceAccount: true), and the kubelet to be of Kubernetes 1.34 or later; static pods have no service account", r.Image)
	}
	return r, reference.Domain(named), nil
}

// exchange is how one registry gives tokens.
type exchange struct {
	host  string
	plain bool // HTTP without TLS, from the start
	local bool // plain HTTP will do when there is no TLS
	http  *http.Client
}

func newExchange(o Options, host string) (*exchange, error) {
	t := &http.Transport{Proxy: http.ProxyFromEnvironment, TLSClientConfig: &tls.Config{MinVersion: tls.VersionTLS12}, ForceAttemptHTTP2: true, DisableKeepAlives: true}
	if o.CA != "" {
		b, err := os.ReadFile(o.CA)
		if err != nil {
			return nil, fmt.Errorf("certificates that vouch for registries: %w", err)
		}
		roots, err := x509.SystemCertPool()
		if err != nil {
			roots = x509.NewCertPool()
		}
		if !roots.AppendCertsFromPEM(b) {
			return nil, fmt.Errorf("certificates that vouch for registries: %s has none in PEM form", o.CA)
		}
		t.TLSClientConfig.RootCAs = roots
	}
	return &exchange{host: host, plain: o.PlainHTTP, local: isLocal(host), http: &http.Client{
		Transport:     t,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}, nil
}

// isLocal reports whether a registry is on this machine.
func isLocal(host string) bool {
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	a, err := netip.ParseAddr(strings.Trim(host, "[]"))
	return host == "localhost" || err == nil && a.Unmap().IsLoopback()
}

// run gives the registry's token for one of a service account; empty if nobody has to log in.
func (x *exchange) run(ctx context.Context, subject string) (token string, lifetime time.Duration, err error) {
	challenge, err := x.challenge(ctx)
	if err != nil || challenge == nil {
		return "", 0, err
	}
	form := url.Values{
		"grant_type":         {"urn:ietf:params:oauth:grant-type:token-exchange"},
		"subject_token":      {subject},
		"subject_token_type": {"urn:ietf:params:oauth:token-type:jwt"},
	}
	if challenge.service != "" {
		form.Set("service", challenge.service)
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, challenge.realm, strings.NewReader(form.Encode()))
	if err != nil {
		return "", 0, err
	}
	req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	resp, b, err := x.do(req)
	if err != nil {
		return "", 0, fmt.Errorf("token service %s: %w", challenge.realm, err)
	}
	if resp.StatusCode != http.StatusOK {
		return "", 0, fmt.Errorf("token service %s: %s: %s: does the registry know the cluster as an issuer ([[issuer]] of its rules), with the audience that serviceAccountTokenAudience says?", challenge.realm, resp.Status, message(b))
	}
	var a struct {
		Token     string `json:"token"`
		Access    string `json:"access_token"`
		ExpiresIn int    `json:"expires_in"` // seconds
	}
	if err := json.Unmarshal(b, &a); err != nil || a.Token == "" && a.Access == "" {
		return "", 0, fmt.Errorf("token service %s: the answer has no token", challenge.realm)
	}
	if a.Access != "" {
		a.Token = a.Access
	}
	if a.ExpiresIn <= 0 {
		a.ExpiresIn = 60 // as the distribution's specification of tokens has it
	}
	return a.Token, time.Duration(min(a.ExpiresIn, 24*3600)) * time.Second, nil
}

// challenge is where a registry's token service is.
type challenge struct{ realm, service string }

// challenge asks the registry how to log in; nil: nobody has to.
func (x *exchange) challenge(ctx context.Context) (*challenge, error) {
	scheme := "https"
	if x.plain {
		scheme = "http"
	}
	resp, err := x.ask(ctx, scheme)
	if err != nil && x.local && !x.plain && strings.Contains(err.Error(), "server gave HTTP response to HTTPS client") {
		scheme = "http"
		resp, err = x.ask(ctx, scheme)
	}
	if err != nil {
		return nil, err
	}
	switch resp.StatusCode {
	case http.StatusOK:
		return nil, nil
	case http.StatusUnauthorized:
	default:
		return nil, fmt.Errorf("/v2/ answers %s: is it a registry?", resp.Status)
	}
	c := parseChallenge(resp.Header.Values("Www-Authenticate"))
	if c == nil {
		return nil, errors.New("it names no token service (WWW-Authenticate: Bearer): tokens of service accounts are exchanged there")
	}
	u, err := url.Parse(c.realm)
	if err != nil || u.Host == "" || u.Scheme != "https" && u.Scheme != "http" {
		return nil, fmt.Errorf("its token service is %.200q, which is no URL", c.realm)
	}
	if scheme == "https" && u.Scheme != "https" {
		return nil, fmt.Errorf("its token service is %s, without TLS: behind a proxy, write its URL into [tokens] url of the registry's rules", c.realm)
	}
	return c, nil
}

func (x *exchange) ask(ctx context.Context, scheme string) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, scheme+"://"+x.host+"/v2/", nil)
	if err != nil {
		return nil, err
	}
	resp, _, err := x.do(req)
	return resp, err
}

// do sends a request and reads the answer.
func (x *exchange) do(req *http.Request) (*http.Response, []byte, error) {
	req.Header.Set("User-Agent", "foil")
	resp, err := x.http.Do(req)
	if err != nil {
		return nil, nil, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, maxResponse))
	return resp, b, err
}

// parseChallenge reads the first Bearer challenge of some.
func parseChallenge(headers []string) *challenge {
	for _, c := range dockerauth.ParseAuthHeader(http.Header{"Www-Authenticate": headers}) {
		if c.Scheme == dockerauth.BearerAuth && c.Parameters["realm"] != "" {
			return &challenge{realm: c.Parameters["realm"], service: c.Parameters["service"]}
		}
	}
	return nil
}

// message is what an answer says is wrong, cut to a line.
func message(b []byte) string {
	var e struct {
		Errors []struct {
			Message string `json:"message"`
		} `json:"errors"`
	}
	s := string(b)
	if json.Unmarshal(b, &e) == nil && len(e.Errors) > 0 {
		s = e.Errors[0].Message
	}
	return fmt.Sprintf("%.200q", s)
}
