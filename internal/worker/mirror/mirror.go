// Package mirror is a registry on a loopback address that containerd asks first
// (hosts.toml): it answers for tags, manifests and configs with what the header
// of the image's bundle says, and begins the pull with the same request. When
// the snapshotter is asked for the image's layers, a moment later, the pull is
// under way: all of it is one request to the server.
//
// What it answers, and what not:
//
//	HEAD a manifest           asks the server, always: a tag may have moved, and
//	                          whether one may pull is the server's to say
//	GET a manifest or config  from memory, for two minutes after that
//	an image that may not     300: see Options.Claim
//	have the snapshots it
//	would find
//	everything else           404
//
// To 404 containerd goes on with the next host, in the end the registry itself,
// with its own credentials and retries, and reports that one's errors. So this
// is no proxy: layers of images that come the plain way do not pass through the
// daemon, and what fails here costs time only.
//
// When the server wants credentials that the daemon does not have, containerd is
// asked for those of its pull, with a Basic challenge. It gives those that it was
// given for the image: a kubelet's, those of ctr --user. Where it must be known which layers
// the image has (Options.Besides) it is asked by a token: then it comes back without
// credentials, too, and is refused if the server does not let the daemon in.
//
// Whoever answers for a tag decides what runs, and whoever may ask reads what only the daemon may pull.
// So both ends show a key that only root of the host can read (KeyPath): a container on the host's network
// is root on no socket that counts.
package mirror

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"regexp"
	"sync"
	"time"

	"github.com/containerd/platforms"
	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/node"
	"hydrofoil.dev/foil/internal/worker/pull"
	"hydrofoil.dev/foil/internal/worker/remote"
)

// Node asks servers; *node.Node is one.
type Node interface {
	Header(ctx context.Context, req api.PullRequest) (*pull.Header, error)
	// Resolve asks the registry itself, and begins no pull.
	Resolve(ctx context.Context, req api.PullRequest) (*pull.Header, error)
}

var _ Node = (*node.Node)(nil)

// Options configure a Mirror. Node is required.
type Options struct {
	Node Node
	// Timeout bounds how long the server may take to answer; 25 s when 0.
	// containerd waits 30.
	Timeout time.Duration
	// Private says that somebody pulls from a repository, HOST/NAME, with
	// credentials just now: they are demanded at once, without asking the server
	// first. Nil: nothing is known of it.
	Private func(repository string) bool
	// Expect, when set, is told of each image that is resolved: it may be pulled
	// next. It must not wait.
	Expect func(*pull.Header)
	// Claim, when set, is asked of each image that is resolved, before anything else: an error refuses it. containerd
	// would ask the next host after any error of HTTP's, and then find snapshots by chain ID without
	// asking again; after a status between 300 and 399 that leads nowhere it gives up.
	Claim func(*pull.Header) error
	// Besides, when set, reports whether an image could be refused by Claim, by its name. Then one that does not come as a
	// bundle is resolved here as well, at its registry, and may not be pulled if that cannot be.
	Besides func(name string) bool
	Logger  *slog.Logger // nil means none
}

const (
	// keepFor is how long manifests and configs are remembered.
	keepFor = 2 * time.Minute
	// keepBytes bounds all of them together.
	keepBytes = 64 << 20
	// plainFor is how long a registry that sends no bundles is not asked again,
	// nor one without credentials that wants some.
	plainFor = time.Minute
)

// Mirror is an http.Handler.
type Mirror struct {
	opts Options
	log  *slog.Logger

	mu     sync.Mutex
	blobs  []remembered // the oldest first
	bytes  int
	plain  map[string]time.Time // registries that send no bundles, until when
	demand map[string]time.Time // repositories that want credentials, until when
}

// remembered is a manifest or config.
type remembered struct {
	name string // REGISTRY/REPOSITORY@DIGEST
	blob bundle.Blob
	till time.Time
}

// New returns a Mirror.
func New(opts Options) *Mirror {
	if opts.Timeout == 0 {
		opts.Timeout = 25 * time.Second
	}
	if opts.Logger == nil {
		opts.Logger = slog.New(slog.DiscardHandler)
	}
	return &Mirror{opts: opts, log: opts.Logger, plain: make(map[string]time.Time), demand: make(map[string]time.Time)}
}

var path = regexp.MustCompile(`^/v2/(.+)/(manifests|blobs)/([^/]+)$`)

// ServeHTTP answers containerd.
func (m *Mirror) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	parts := path.FindStringSubmatch(r.URL.Path)
	registry := r.URL.Query().Get("ns")
	switch {
	case r.URL.Path == tokenPath && (r.Method == http.MethodGet || r.Method == http.MethodPost):
		m.token(w, r)
		return
	case r.Method != http.MethodGet && r.Method != http.MethodHead:
		w.WriteHeader(http.StatusMethodNotAllowed)
		return
	case r.URL.Path == "/v2/" || r.URL.Path == "/v2":
		w.WriteHeader(http.StatusOK)
		return
	case parts == nil || registry == "":
		pass(w, "this is a mirror for containerd: see deploy/containerd/README.md")
		return
	}
	name, kind, reference := registry+"/"+parts[1], parts[2], parts[3]
	d, byDigest := digest.Digest(reference), digest.Digest(reference).Validate() == nil
	if byDigest && (kind == "blobs" || r.Method == http.MethodGet) {
		if b := m.recall(name + "@" + reference); b != nil {
			m.answer(w, r, b)
			return
		}
	}
	if kind == "manifests" && byDigest && r.Method == http.MethodGet && m.besides(name+"@"+reference) {
		m.another(w, r, registry, name, name+"@"+reference)
		return
	}
	if kind == "blobs" || byDigest && r.Method == http.MethodGet {
		// Of other platforms, too: an image that is not run needs no bundle.
		pass(w, "not of an image that was just asked for")
		return
	}
	ref := name + ":" + reference
	if byDigest {
		ref = name + "@" + reference
	}
	b, err := m.resolve(r, registry, name, ref)
	if err != nil && m.besides(ref) && (!isDemand(err) || callerOf(r).known) && !errors.As(err, new(*claimError)) {
		b, err = m.resolvePlain(r, name, ref)
	}
	if err != nil {
		m.refuse(w, r, registry, name, ref, err)
		return
	}
	if byDigest && b.Digest != d {
		pass(w, "the server has something else") // the bundle's reader has made sure of it
		return
	}
	m.answer(w, r, b)
}

// resolve asks the server what a reference names.
func (m *Mirror) resolve(r *http.Request, registry, name, ref string) (*bundle.Blob, error) {
	m.mu.Lock()
	plain, demand := time.Now().Before(m.plain[registry]), time.Now().Before(m.demand[name])
	m.mu.Unlock()
	if plain {
		return nil, errPlain
	}
	if !callerOf(r).known && (demand || m.opts.Private != nil && m.opts.Private(name)) {
		return nil, errDemand
	}
	h, err := m.ask(r, m.opts.Node.Header, ref)
	if err != nil {
		return nil, err
	}
	named, err := m.take(name, h)
	if err == nil && m.opts.Expect != nil {
		m.opts.Expect(h)
	}
	return named, err
}

// resolvePlain is resolve for an image that does not come as a bundle: what it would find of others' has to be known.
func (m *Mirror) resolvePlain(r *http.Request, name, ref string) (*bundle.Blob, error) {
	h, err := m.ask(r, m.opts.Node.Resolve, ref)
	switch {
	case isDemand(err):
		return nil, err
	case err != nil:
		return nil, unseen(err)
	}
	return m.take(name, h)
}

// another answers for a manifest that was not asked for by its name: of an index containerd may choose another one than
// the server has. After whatever error containerd would ask the next host for it. So one that is refused is
// answered by what is not it: containerd compares the digest, and gives up.
func (m *Mirror) another(w http.ResponseWriter, r *http.Request, registry, name, ref string) {
	b, err := m.resolvePlain(r, name, ref)
	if isDemand(err) && callerOf(r).known {
		err = unseen(err)
	}
	switch refused := (*claimError)(nil); {
	case err == nil:
		m.answer(w, r, b)
	case errors.As(err, &refused):
		m.log.Error("an image is refused to containerd", "image", ref, "error", err)
		_, _ = fmt.Fprintln(w, err)
	default:
		m.refuse(w, r, registry, name, ref, err)
	}
}

// isDemand reports whether an image is refused for want of credentials.
func isDemand(err error) bool {
	e, ok := errors.AsType[*api.Error](err)
	return errors.Is(err, errDemand) || ok && e.Code == api.CodeUnauthorized
}

// ask asks for an image's header, with the credentials of a request.
func (m *Mirror) ask(r *http.Request, header func(context.Context, api.PullRequest) (*pull.Header, error), ref string) (*pull.Header, error) {
	ctx, cancel := context.WithTimeout(r.Context(), m.opts.Timeout)
	defer cancel()
	return header(ctx, api.PullRequest{Ref: ref, Platform: platform(), Credential: callerOf(r).credential})
}

// take remembers what a header has, unless the image is refused.
func (m *Mirror) take(name string, h *pull.Header) (*bundle.Blob, error) {
	if m.opts.Claim != nil {
		if err := m.opts.Claim(h); err != nil {
			return nil, &claimError{err}
		}
	}
	m.remember(name, h.Manifest)
	m.remember(name, h.Config)
	named := h.Manifest
	if h.Chosen != nil {
		named = *h.Chosen
		m.remember(name, named)
	}
	if named.Digest.Algorithm().FromBytes(named.Bytes) != named.Digest {
		return nil, fmt.Errorf("the server sent something else as %s", named.Digest)
	}
	return &named, nil
}

// Reasons for which a server is not asked.
var (
	errPlain  = errors.New("its registry sends no bundles")
	errDemand = errors.New("its registry wants credentials")
)

// claimError is why an image may not be pulled at all.
type claimError struct{ error }

func (e *claimError) Unwrap() error { return e.error }

// unseen refuses an image of which the daemon cannot see what it is. Its registry may let containerd in all the same.
func unseen(err error) error {
	return &claimError{fmt.Errorf("it is not known which layers it has, and there are images of other registries here that are not proven; once these are, it can be pulled: %w", err)}
}

// refuse has containerd go on with the next host, or ask again with credentials; or give up.
func (m *Mirror) refuse(w http.ResponseWriter, r *http.Request, registry, name, ref string, err error) {
	if errors.As(err, new(*claimError)) {
		m.log.Error("an image is refused to containerd", "image", ref, "error", err)
		http.Error(w, err.Error(), http.StatusMultipleChoices)
		return
	}
	given, demands := callerOf(r).known, isDemand(err)
	if demands && given && m.besides(ref) {
		m.refuse(w, r, registry, name, ref, unseen(err))
		return
	}
	m.mu.Lock()
	switch {
	case demands && !given:
		note(m.demand, name)
	case noServer(err):
		note(m.plain, registry)
	}
	m.mu.Unlock()
	if !errors.Is(err, errPlain) && !errors.Is(err, errDemand) {
		m.log.Info("the mirror leaves an image to its registry", "image", ref, "reason", err)
	}
	switch {
	case demands && !given && m.besides(ref):
		challenge(w, r, name[len(registry)+1:])
		return
	case demands && !given:
		w.Header().Set("WWW-Authenticate", fmt.Sprintf("Basic realm=%q", registry))
		w.WriteHeader(http.StatusUnauthorized)
		return
	}
	pass(w, err.Error())
}

// besides is Options.Besides.
func (m *Mirror) besides(ref string) bool { return m.opts.Besides != nil && m.opts.Besides(ref) }

// noServer reports whether what answered is no Hydrofoil server.
func noServer(err error) bool {
	status, ok := errors.AsType[*remote.StatusError](err)
	return ok && status.Said == nil && (status.Status == http.StatusNotFound || status.Status == http.StatusMethodNotAllowed)
}

// note remembers something for a while, and forgets what is over.
func note(what map[string]time.Time, key string) {
	now := time.Now()
	for k, till := range what {
		if now.After(till) {
			delete(what, k)
		}
	}
	if len(what) < 1000 {
		what[key] = now.Add(plainFor)
	}
}

// pass makes containerd ask the next host.
func pass(w http.ResponseWriter, why string) { http.Error(w, why, http.StatusNotFound) }

// answer sends a blob: the whole of it, its head or a range.
func (m *Mirror) answer(w http.ResponseWriter, r *http.Request, b *bundle.Blob) {
	w.Header().Set("Content-Type", b.MediaType)
	w.Header().Set("Docker-Content-Digest", b.Digest.String())
	http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(b.Bytes))
}

func (m *Mirror) recall(name string) *bundle.Blob {
	m.mu.Lock()
	defer m.mu.Unlock()
	for i := range m.blobs {
		if b := &m.blobs[i]; b.name == name && time.Now().Before(b.till) {
			blob := b.blob
			return &blob
		}
	}
	return nil
}

// remember keeps a blob if its bytes are those that its digest names.
func (m *Mirror) remember(repository string, b bundle.Blob) {
	if b.Digest.Validate() != nil || b.Digest.Algorithm().FromBytes(b.Bytes) != b.Digest {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	now := time.Now()
	name := repository + "@" + b.Digest.String()
	keep := m.blobs[:0]
	for _, old := range m.blobs {
		if old.name == name || now.After(old.till) || m.bytes+len(b.Bytes) > keepBytes {
			m.bytes -= len(old.blob.Bytes)
			continue
		}
		keep = append(keep, old)
	}
	clear(m.blobs[len(keep):])
	m.blobs = append(keep, remembered{name, b, now.Add(keepFor)})
	m.bytes += len(b.Bytes)
}

// Addresses checks that an address, HOST:PORT, is one of loopback, and returns
// all those by which hosts.toml may name it.
func Addresses(address string) ([]string, error) {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return nil, fmt.Errorf("mirror address %q: %w", address, err)
	}
	if ip := net.ParseIP(host); host != "localhost" && (ip == nil || !ip.IsLoopback()) {
		return nil, fmt.Errorf("mirror address %q: it must be one of loopback, such as 127.0.0.1:598: the mirror shows what this daemon may pull", address)
	}
	list := []string{address}
	for _, host := range []string{"127.0.0.1", "localhost", "::1"} {
		list = append(list, net.JoinHostPort(host, port))
	}
	return list, nil
}

// platform is what containerd pulls on this host.
func platform() string { return platforms.Format(platforms.DefaultSpec()) }

// Serve answers those on a listener who have the key, until ctx ends.
func (m *Mirror) Serve(ctx context.Context, l net.Listener, key *tls.Certificate) error {
	srv := &http.Server{
		Handler:           m,
		TLSConfig:         onlyBy(key),
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       2 * time.Minute,
		ErrorLog:          slog.NewLogLogger(m.log.Handler(), slog.LevelDebug),
		BaseContext:       func(net.Listener) context.Context { return ctx },
	}
	done := make(chan error, 1)
	go func() { done <- srv.ServeTLS(l, "", "") }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
	}
	_ = srv.Close() // requests end with ctx, and containerd goes on with the next host
	<-done
	return nil
}
