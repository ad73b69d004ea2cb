// Package hosts finds who answers for a registry, and how to speak to it:
// containerd's configuration of registry hosts (hosts.toml, read by containerd's
// own parser), credentials, and one warm connection for each server.
//
// A registry's hosts are asked in their order, as containerd does. Whether one
// sends bundles is found by asking it. Its address for that is beside the API of
// the registry: https://HOST/PREFIX/hydrofoil/v1/bundle where the API is at
// https://HOST/PREFIX/v2; what comes after v2 (with override_path) goes before
// the name of the repository.
package hosts

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/containerd/containerd/v2/core/remotes/docker"
	"github.com/containerd/containerd/v2/core/remotes/docker/config"
	"github.com/containerd/errdefs"
	"github.com/pelletier/go-toml/v2"

	"hydrofoil.dev/foil/internal/worker/credentials"
	"hydrofoil.dev/foil/internal/worker/remote"
)

// DefaultDirs is where containerd 2.x looks for hosts.toml.
const DefaultDirs = "/etc/containerd/certs.d:/etc/docker/certs.d"

// Options configure a Set. The zero value knows no configuration and no
// credentials.
type Options struct {
	// Dirs is a list, separated by colons, of directories like containerd's
	// certs.d; the first that has something about a registry counts.
	Dirs string
	// DockerConfig is a config.json of Docker's; empty: none.
	DockerConfig string
	// Self are addresses, HOST:PORT, of hosts that are this daemon: they are not
	// asked.
	Self []string
	// Logger is given to clients; nil means none.
	Logger *slog.Logger
}

// Set knows hosts. Close ends their connections.
type Set struct {
	opts Options

	mu     sync.Mutex
	known  []*known
	closed bool
}

// Want is what hosts are looked for.
type Want struct {
	Registry   string // HOST[:PORT] as in the image's name
	Repository string
	// Resolve wants hosts that may say what a tag means.
	Resolve bool
	// PlainHTTP speaks HTTP without TLS to a registry that nothing is configured
	// for. Those on loopback addresses always are spoken to like that.
	PlainHTTP bool
	// Credential is shown to hosts that demand one; none: what Docker's
	// configuration has.
	Credential credentials.Credential
}

// Host is one host that may answer for a registry.
type Host struct {
	// Client speaks to it, with credentials for the repository.
	Client *remote.Client
	// Repository is what it calls the repository.
	Repository string
	// Weak says why nothing shows that it is this host which answers; empty: TLS does, or it is on this machine.
	Weak string
}

// New reads nothing yet: the configuration is read each time it is needed, as
// containerd does.
func New(opts Options) *Set {
	if opts.Logger == nil {
		opts.Logger = slog.New(slog.DiscardHandler)
	}
	return &Set{opts: opts}
}

// Close ends connections once the streams over them have ended.
func (s *Set) Close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	for _, k := range s.known {
		k.client.Close()
		k.forget()
	}
}

// For returns the hosts to ask, in their order: at least one.
//
// Errors: a configuration that cannot be used.
func (s *Set) For(ctx context.Context, w Want) ([]Host, error) {
	found, err := s.find(ctx, w)
	if err != nil {
		return nil, err
	}
	capabilities := docker.HostCapabilityPull
	if w.Resolve {
		capabilities |= docker.HostCapabilityResolve
	}
	var list []Host
	for _, f := range found {
		if !f.Capabilities.Has(capabilities) {
			continue
		}
		k, err := s.knownAs(f, w)
		if err != nil {
			return nil, fmt.Errorf("registry host %s: %w", f.Host, err)
		}
		prefix := f.repositories()
		h := Host{Repository: prefix + w.Repository, Weak: f.weak()}
		v := remote.View{Authorizer: &authorizer{host: k.auth(w.Credential, s.opts.DockerConfig), scope: "repository:" + h.Repository + ":pull"}}
		if origin, err := docker.DefaultHost(w.Registry); err != nil || f.Host != w.Registry && f.Host != origin {
			v.Namespace = w.Registry
		}
		h.Client = k.client.With(v)
		list = append(list, h)
	}
	if len(list) == 0 {
		return nil, fmt.Errorf("no host is configured to pull from for registry %s: see its hosts.toml below %s", w.Registry, s.opts.Dirs)
	}
	return list, nil
}

// Server returns the client for a server, http://HOST:PORT or https://HOST,
// which pulls from a registry of that name use as well.
func (s *Set) Server(ctx context.Context, base string) (*remote.Client, error) {
	u, err := url.Parse(base)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return nil, fmt.Errorf("server address %q: want http://HOST:PORT or https://HOST", base)
	}
	list, err := s.For(ctx, Want{Registry: u.Host, PlainHTTP: u.Scheme == "http"})
	if err != nil {
		return nil, err
	}
	for _, h := range list {
		if h.Client.Base() == strings.TrimSuffix(base, "/") {
			return h.Client, nil
		}
	}
	return list[len(list)-1].Client, nil // the registry's own, after its mirrors
}

// Known returns the client by which pulls from a registry speak to the server at base, without
// credentials.
//
// Errors: a configuration that cannot be used, or that names no such server.
func (s *Set) Known(ctx context.Context, registry string, plainHTTP bool, base string) (*remote.Client, error) {
	list, err := s.For(ctx, Want{Registry: registry, PlainHTTP: plainHTTP})
	if err != nil {
		return nil, err
	}
	for _, h := range list {
		if h.Client.Base() == base {
			return h.Client.With(remote.View{}), nil
		}
	}
	return nil, fmt.Errorf("%s is no host of registry %s any more", base, registry)
}

// Registry returns the same hosts for containerd's clients.
func (s *Set) Registry(ctx context.Context, w Want) docker.RegistryHosts {
	return func(registry string) ([]docker.RegistryHost, error) {
		w.Registry = registry
		found, err := s.find(ctx, w)
		if err != nil {
			return nil, err
		}
		list := make([]docker.RegistryHost, len(found))
		for i, f := range found {
			list[i] = f.RegistryHost
		}
		return list, nil
	}
}

// found is a host as the configuration has it.
type found struct {
	docker.RegistryHost
	transport *http.Transport
	// fallBack: it speaks plain HTTP, perhaps, though the scheme is https.
	fallBack bool
	// dialTimeout bounds connecting; 0 where the configuration does not say.
	dialTimeout time.Duration
}

// find reads the configuration.
func (s *Set) find(ctx context.Context, w Want) ([]found, error) {
	configured := false
	transports := make(map[*http.Client]*http.Transport)
	var timeouts map[string]time.Duration
	options := config.HostOptions{
		HostDir: func(registry string) (string, error) {
			for _, root := range filepath.SplitList(s.opts.Dirs) {
				dir, err := config.HostDirFromRoot(root)(registry)
				if err == nil {
					configured = true
					timeouts = dialTimeouts(dir, registry)
					return dir, nil
				}
				if !errdefs.IsNotFound(err) {
					return "", err
				}
			}
			return "", nil
		},
		Credentials: func(host string) (string, string, error) {
			c, err := lookUp(ctx, w.Credential, s.opts.DockerConfig, host)
			return c.Username, c.Secret, err
		},
		UpdateClient: func(c *http.Client) error {
			if t, ok := c.Transport.(*http.Transport); ok {
				transports[c] = t
			}
			return nil
		},
	}
	loopback := isLoopback(w.Registry)
	if w.PlainHTTP || loopback {
		options.DefaultScheme = "http"
	}
	all, err := config.ConfigureHosts(ctx, options)(w.Registry)
	if err != nil {
		return nil, fmt.Errorf("registry %s: %w", w.Registry, err)
	}
	var list []found
	for _, h := range all {
		if slices.Contains(s.opts.Self, h.Host) {
			continue
		}
		f := found{RegistryHost: h, transport: transports[h.Client], dialTimeout: timeouts[h.Host]}
		if f.transport == nil {
			return nil, fmt.Errorf("registry %s: its host %s has an unknown kind of transport", w.Registry, h.Host)
		}
		f.fallBack = h.Client.Transport != f.transport
		if loopback && !configured {
			// containerd would try TLS first, without verifying it.
			f.Scheme, f.fallBack, h.Client.Transport = "http", false, f.transport
		}
		list = append(list, f)
	}
	return list, nil
}

// dialTimeouts returns what the hosts.toml of dir, a registry's, says about connecting, for
// each host that it names. containerd keeps it in a dialer, which shows it to nobody. A file that cannot be
// read is containerd's to tell of.
func dialTimeouts(dir, registry string) map[string]time.Duration {
	type host struct {
		DialTimeout string `toml:"dial_timeout"`
	}
	var file struct {
		host
		Server string          `toml:"server"`
		Hosts  map[string]host `toml:"host"`
	}
	b, err := os.ReadFile(filepath.Join(dir, "hosts.toml"))
	if err != nil || toml.Unmarshal(b, &file) != nil {
		return nil
	}
	timeouts := make(map[string]time.Duration)
	add := func(server, timeout string) {
		if _, after, ok := strings.Cut(server, "://"); ok {
			server = after
		}
		server, _, _ = strings.Cut(server, "/")
		if d, err := time.ParseDuration(timeout); err == nil {
			timeouts[server] = d
		}
	}
	if file.Server == "" {
		file.Server, _ = docker.DefaultHost(registry)
	}
	add(file.Server, file.DialTimeout)
	for server, h := range file.Hosts {
		add(server, h.DialTimeout)
	}
	return timeouts
}

// repositories is what goes before the names of repositories.
func (f *found) repositories() string {
	if _, after, ok := strings.Cut(f.Path+"/", "/v2/"); ok && strings.Trim(after, "/") != "" {
		return strings.Trim(after, "/") + "/"
	}
	return ""
}

// base is the URL that bundles are below.
func (f *found) base() string {
	before, _, _ := strings.Cut(f.Path+"/", "/v2/")
	return f.Scheme + "://" + f.Host + strings.TrimSuffix(before, "/")
}

// weak says why nothing shows that it is this host which answers, or "".
func (f *found) weak() string {
	switch {
	case isLoopback(f.Host):
		return ""
	case f.Scheme != "https":
		return "it is spoken to without TLS"
	case f.transport.TLSClientConfig != nil && f.transport.TLSClientConfig.InsecureSkipVerify:
		return "its certificate is not verified"
	case f.fallBack:
		return "it is spoken to without TLS when it knows none"
	}
	return ""
}

// known is a host to which there may be a connection.
type known struct {
	registry string // for which it was found first
	client   *remote.Client

	mu    sync.Mutex
	found // the last time
	auths map[credentials.Credential]*hostAuth
}

// most bounds the hosts that are known. One that is forgotten is connected to
// anew.
const most = 64

// knownAs returns the one client for a host that is configured like that. When what
// its registry's configuration says about TLS is not what it was, such as
// certificates that were renewed, the client connects anew.
func (s *Set) knownAs(f found, w Want) (*known, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, errors.New("the daemon is stopping")
	}
	use := func(i int) *known {
		k := s.known[i]
		s.known = append(slices.Delete(s.known, i, i+1), k) // the last one is the youngest
		return k
	}
	renewed := -1
	for i, k := range s.known {
		if k.base() != f.base() || k.fallBack != f.fallBack || !sameHeader(k.Header, f.Header) {
			continue
		}
		if sameTLS(k.transport.TLSClientConfig, f.transport.TLSClientConfig) {
			return use(i), nil
		}
		if k.registry == w.Registry && k.weak() == f.weak() {
			renewed = i
		}
	}
	if renewed >= 0 {
		k := use(renewed)
		k.forget()
		k.mu.Lock()
		k.found = f
		k.mu.Unlock()
		k.client.Renew()
		return k, nil
	}
	again := Want{Registry: w.Registry, PlainHTTP: w.PlainHTTP} // what is kept has no credentials
	k := &known{registry: w.Registry, found: f, auths: make(map[credentials.Credential]*hostAuth)}
	var err error
	k.client, err = remote.New(remote.Options{
		Base:     f.base(),
		TLS:      f.transport.TLSClientConfig.Clone(),
		TLSNow:   func() *tls.Config { return s.tlsNow(f, again) },
		FallBack: f.fallBack,
		Header:   f.Header,
		// In place of the transport's dialer, whose sockets have the host's buffers.
		ConnectTimeout: f.dialTimeout,
		Logger:         s.opts.Logger,
	})
	if err != nil {
		return nil, err
	}
	if len(s.known) == most {
		s.known[0].forget()
		s.known = slices.Delete(s.known, 0, 1) // pulls may use it: it ends with them
	}
	s.known = append(s.known, k)
	return k, nil
}

// tlsNow reads what the configuration says now about a host that was found for w; nil
// if that cannot be used, or the host is gone from it.
func (s *Set) tlsNow(was found, w Want) *tls.Config {
	all, err := s.find(context.Background(), w)
	if err != nil {
		s.opts.Logger.Warn("read the configuration of a registry host again; what it was is used on", "registry", w.Registry, "error", err)
		return nil
	}
	for _, f := range all {
		if f.base() == was.base() && f.fallBack == was.fallBack && f.weak() == was.weak() && sameHeader(f.Header, was.Header) {
			return f.transport.TLSClientConfig
		}
	}
	return nil
}

func sameHeader(a, b http.Header) bool {
	return maps.EqualFunc(a, b, slices.Equal)
}

// sameTLS compares what hosts.toml can say about TLS.
func sameTLS(a, b *tls.Config) bool {
	pools := a.RootCAs == b.RootCAs || a.RootCAs != nil && b.RootCAs != nil && a.RootCAs.Equal(b.RootCAs)
	return pools && a.InsecureSkipVerify == b.InsecureSkipVerify &&
		slices.EqualFunc(a.Certificates, b.Certificates, func(x, y tls.Certificate) bool {
			return slices.EqualFunc(x.Certificate, y.Certificate, slices.Equal)
		})
}

func isLoopback(registry string) bool {
	host := registry
	if h, _, err := net.SplitHostPort(registry); err == nil {
		host = h
	}
	if host == "localhost" {
		return true
	}
	ip := net.ParseIP(strings.Trim(host, "[]"))
	return ip != nil && ip.IsLoopback()
}
