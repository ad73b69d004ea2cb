package upstream

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/containerd/containerd/v2/core/remotes/docker"
	remoteerrors "github.com/containerd/containerd/v2/core/remotes/errors"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/backoff"
	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/registry"
)

// client speaks the distribution API to the upstream. Its methods try again
// what may be over soon.
type client struct {
	base    *url.URL
	prefix  string
	http    *http.Client
	creds   func(host string) (user, secret string, err error)
	pause   time.Duration
	metrics *accelerated

	mu         sync.Mutex
	authorizer docker.Authorizer // guarded by mu; replaced when it fails
}

const (
	// tries is how often something is asked for that keeps failing, and a
	// download goes on that brings nothing.
	tries = 4
	// maxWait is the longest pause, whatever the upstream asks for: a client that
	// waits longer has gone.
	maxWait     = 20 * time.Second
	maxManifest = 4 << 20 // what this server's own registry takes
	maxList     = 8 << 20 // one page of names
)

func newClient(o Options) (*client, error) {
	base, prefix, err := ParseURL(o.URL)
	if err != nil {
		return nil, err
	}
	dialer := &net.Dialer{Timeout: 10 * time.Second, KeepAlive: 15 * time.Second}
	c := &client{base: base, prefix: prefix, pause: o.Pause, creds: credentialsOf(o.Auth), metrics: newMetrics()}
	trust, err := trusting(&http.Transport{
		Proxy:                 http.ProxyFromEnvironment,
		DialContext:           dialer.DialContext,
		TLSClientConfig:       &tls.Config{MinVersion: tls.VersionTLS12},
		TLSHandshakeTimeout:   10 * time.Second,
		ResponseHeaderTimeout: 30 * time.Second,
		IdleConnTimeout:       90 * time.Second,
		MaxIdleConnsPerHost:   16,
		ForceAttemptHTTP2:     true,
		// Blobs are compressed, and their length and digest are of what is sent.
		DisableCompression: true,
	}, o.CA)
	if err != nil {
		return nil, err
	}
	c.http = &http.Client{Transport: trust, CheckRedirect: redirect}
	return c, nil
}

// redirect lets requests go on elsewhere: blobs are often in a store of their
// own. What authorizes them at the registry stays there, and stores refuse
// requests that have it beside their own.
func redirect(req *http.Request, via []*http.Request) error {
	if len(via) >= 10 {
		return errors.New("redirected 10 times")
	}
	if via[0].URL.Scheme == "https" && req.URL.Scheme != "https" {
		return fmt.Errorf("redirected from https to %s://%s", req.URL.Scheme, req.URL.Host)
	}
	if req.URL.Host != via[0].URL.Host {
		req.Header.Del("Authorization")
	}
	return nil
}

func (c *client) String() string {
	u := *c.base
	u.Path = c.prefix
	return u.String()
}

// repository is the upstream's name of a repository.
func (c *client) repository(repo string) string {
	if c.prefix == "" {
		return repo
	}
	return c.prefix + "/" + repo
}

// do sends one request, authorized, and returns an answer of 2xx or 304.
// path is what follows /v2/; scope what the request needs to be allowed.
func (c *client) do(ctx context.Context, what, method, path, scope string, header http.Header) (*http.Response, error) {
	resp, err := c.ask(ctx, what, method, path, scope, header)
	c.metrics.request(ctx, err)
	return resp, err
}

func (c *client) ask(ctx context.Context, what, method, path, scope string, header http.Header) (*http.Response, error) {
	if shown, ok := shownIn(ctx); ok {
		return c.askAs(ctx, shown, what, method, path, header)
	}
	if scope != "" {
		ctx = docker.WithScope(ctx, scope)
	}
	const attempts = 3 // without credentials, with a token that expired, with a new one
	var responses []*http.Response
	auth := c.auth(nil)
	for {
		req, err := c.request(ctx, method, path, header)
		if err != nil {
			return nil, c.failed(ctx, what, err)
		}
		if err := auth.Authorize(ctx, req); err != nil {
			c.auth(auth)
			return nil, c.refused(ctx, what, err)
		}
		resp, err := c.http.Do(req)
		if err != nil {
			return nil, c.failed(ctx, what, err)
		}
		if resp.StatusCode < 300 || resp.StatusCode == http.StatusNotModified {
			return resp, nil
		}
		responses = append(responses, resp)
		var refused error
		if resp.StatusCode == http.StatusUnauthorized && resp.Request.URL.Host == c.base.Host && len(responses) < attempts {
			if len(responses) == attempts-1 {
				// A token that looked good was not: credentials are read again.
				auth = c.auth(auth)
			}
			if refused = auth.AddResponses(ctx, responses); refused == nil {
				_ = resp.Body.Close()
				continue
			}
			c.auth(auth)
		}
		defer resp.Body.Close()
		e := c.statusError(resp, what)
		e.Err = refused
		return nil, e
	}
}

func (c *client) request(ctx context.Context, method, path string, header http.Header) (*http.Request, error) {
	u := *c.base
	u.Path, u.RawQuery, _ = strings.Cut("/v2/"+path, "?")
	req, err := http.NewRequestWithContext(ctx, method, u.String(), nil)
	if err != nil {
		return nil, err
	}
	if header != nil {
		req.Header = header.Clone()
	}
	req.Header.Set("User-Agent", "foil")
	return req, nil
}

// auth returns the authorizer; one that failed is replaced by a new one first,
// because it remembers failures for ever.
func (c *client) auth(failed docker.Authorizer) docker.Authorizer {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.authorizer == nil || failed != nil && c.authorizer == failed {
		c.authorizer = docker.NewDockerAuthorizer(docker.WithAuthClient(c.http), docker.WithAuthCreds(c.creds))
	}
	return c.authorizer
}

// refused makes an Error of an authorizer's.
func (c *client) refused(ctx context.Context, what string, err error) error {
	status, ok := errors.AsType[remoteerrors.ErrUnexpectedStatus](err)
	if errors.Is(err, docker.ErrInvalidAuthorization) || ok && (status.StatusCode == 400 || status.StatusCode == 401 || status.StatusCode == 403) {
		return &Error{Upstream: c.String(), What: what, Kind: Denied, Detail: "authorize", Err: err, said: true}
	}
	return c.failed(ctx, what+": authorize", err)
}

// try calls fn until it succeeds or fails for good.
func (c *client) try(ctx context.Context, fn func() error) error { return c.tryTimes(ctx, tries, fn) }

func (c *client) tryTimes(ctx context.Context, most int, fn func() error) error {
	for n := 1; ; n++ {
		err := fn()
		if err == nil || n == most || !again(err) {
			return err
		}
		if !c.wait(ctx, n, err) {
			return err
		}
	}
}

// wait pauses before try n+1 after err, and reports whether there is time for it.
func (c *client) wait(ctx context.Context, n int, err error) bool {
	pause := backoff.Spread(backoff.Backoff{First: c.pause, Most: maxWait}.Pause(n))
	if e, ok := errors.AsType[*Error](err); ok {
		pause = max(pause, e.After)
	}
	if pause > maxWait {
		return false
	}
	if deadline, ok := ctx.Deadline(); ok && time.Until(deadline) < pause {
		return false
	}
	return backoff.Wait(ctx, pause) == nil
}

func (c *client) pull(repo string) string { return "repository:" + c.repository(repo) + ":pull" }

// accept is every type of manifest that is known, and any other one last.
var accept = strings.Join([]string{
	ocispec.MediaTypeImageIndex,
	ocispec.MediaTypeImageManifest,
	"application/vnd.docker.distribution.manifest.list.v2+json",
	"application/vnd.docker.distribution.manifest.v2+json",
	"*/*;q=0.1",
}, ", ")

func nameOf(repo, reference string) string {
	if strings.Contains(reference, ":") {
		return repo + "@" + reference
	}
	return repo + ":" + reference
}

// manifest fetches a manifest by tag or digest.
func (c *client) manifest(ctx context.Context, repo, reference string) (m catalog.Manifest, err error) {
	what := "manifest " + nameOf(repo, reference)
	err = c.try(ctx, func() error {
		resp, err := c.do(ctx, what, http.MethodGet, c.repository(repo)+"/manifests/"+reference, c.pull(repo), http.Header{"Accept": {accept}})
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		b, err := io.ReadAll(io.LimitReader(resp.Body, maxManifest+1))
		if err != nil {
			return c.failed(ctx, what, err)
		}
		if len(b) > maxManifest {
			return c.wrong(what, "more than %d bytes", maxManifest)
		}
		m, err = c.parseManifest(what, reference, resp.Header, b)
		return err
	})
	return m, err
}

// parseManifest checks what came as a manifest.
func (c *client) parseManifest(what, reference string, h http.Header, b []byte) (catalog.Manifest, error) {
	mediaType := strings.TrimSpace(strings.Split(h.Get("Content-Type"), ";")[0])
	switch {
	case strings.HasPrefix(mediaType, "application/vnd.docker.distribution.manifest.v1"):
		e := c.wrong(what, "it is of the schema of before 2016")
		e.advice = "push the image to the upstream again, with a client of today"
		return catalog.Manifest{}, e
	case mediaType == "text/html" || mediaType == "text/plain":
		return catalog.Manifest{}, c.wrong(what, "the answer is of type %s, which is no manifest: %.80q", mediaType, b)
	case mediaType == "application/json" || mediaType == "application/octet-stream":
		mediaType = "" // it says itself what it is
	}
	m, err := registry.ParseManifest(b, mediaType)
	if err != nil {
		return m, c.wrong(what, "%v; it begins with %.80q", err, b)
	}
	algorithm, want := digest.Canonical, digest.Digest("")
	if d, err := digest.Parse(reference); err == nil {
		want = d
	} else if d, err := digest.Parse(h.Get("Docker-Content-Digest")); err == nil {
		want = d
	}
	if want != "" {
		algorithm = want.Algorithm()
	}
	if m.Digest = algorithm.FromBytes(b); want != "" && m.Digest != want {
		return m, c.wrong(what, "its digest is %s, want %s", m.Digest, want)
	}
	m.Pushed = time.Now()
	return m, nil
}

// tag asks which manifest a tag names that is here. The answer is empty if the
// upstream does not say it without sending the manifest. Somebody waits, and what
// is here will do: there is one more try.
func (c *client) tag(ctx context.Context, repo, tag string, known digest.Digest) (d digest.Digest, err error) {
	what := "manifest " + nameOf(repo, tag)
	header := http.Header{"Accept": {accept}, "If-None-Match": {`"` + known.String() + `"`}}
	err = c.tryTimes(ctx, 2, func() error {
		resp, err := c.do(ctx, what, http.MethodHead, c.repository(repo)+"/manifests/"+tag, c.pull(repo), header)
		if err != nil {
			return err
		}
		_ = resp.Body.Close()
		if resp.StatusCode == http.StatusNotModified {
			d = known
		} else if d, err = digest.Parse(resp.Header.Get("Docker-Content-Digest")); err != nil {
			d = ""
		}
		return nil
	})
	return d, err
}

// size asks whether a repository has a blob, and how large it is.
func (c *client) size(ctx context.Context, repo string, d digest.Digest) (size int64, err error) {
	what := "blob " + nameOf(repo, d.String())
	path := c.repository(repo) + "/blobs/" + d.String()
	err = c.try(ctx, func() error {
		resp, err := c.do(ctx, what, http.MethodHead, path, c.pull(repo), nil)
		if err == nil {
			_ = resp.Body.Close()
			if size = resp.ContentLength; size >= 0 {
				return nil
			}
		} else if e, ok := errors.AsType[*Error](err); !ok || e.Kind != Wrong {
			return err
		}
		// Stores that blobs are redirected to may know no HEAD.
		resp, err = c.do(ctx, what, http.MethodGet, path, c.pull(repo), http.Header{"Range": {"bytes=0-0"}})
		if err != nil {
			return err
		}
		_ = resp.Body.Close()
		size = resp.ContentLength
		if resp.StatusCode == http.StatusPartialContent {
			if _, _, size, err = parseContentRange(resp.Header.Get("Content-Range")); err != nil {
				return c.wrong(what, "%v", err)
			}
		}
		if size < 0 {
			return c.wrong(what, "its size is not said")
		}
		return nil
	})
	return size, err
}

// blob asks once for the bytes of a blob from offset on. The body's first byte is
// that at the offset returned, which is 0 where ranges are not known.
func (c *client) blob(ctx context.Context, repo string, d digest.Digest, offset, size int64) (body io.ReadCloser, at int64, err error) {
	what := "blob " + nameOf(repo, d.String())
	var header http.Header
	if offset > 0 {
		header = http.Header{"Range": {fmt.Sprintf("bytes=%d-", offset)}}
	}
	resp, err := c.do(ctx, what, http.MethodGet, c.repository(repo)+"/blobs/"+d.String(), c.pull(repo), header)
	if err != nil {
		return nil, 0, err
	}
	whole := resp.ContentLength
	if resp.StatusCode == http.StatusPartialContent {
		var total int64
		if at, _, total, err = parseContentRange(resp.Header.Get("Content-Range")); err != nil || at != offset {
			_ = resp.Body.Close()
			return nil, 0, c.wrong(what, "asked for the bytes from %d on, got the range %.80q", offset, resp.Header.Get("Content-Range"))
		}
		whole = total
	}
	if whole >= 0 && whole != size {
		_ = resp.Body.Close()
		if e := c.htmlInstead(resp, what); e != nil {
			return nil, 0, e
		}
		return nil, 0, c.wrong(what, "it has %d bytes, and was said to have %d", whole, size)
	}
	return resp.Body, at, nil
}

// htmlInstead is an Error if an answer is a page for people.
func (c *client) htmlInstead(resp *http.Response, what string) *Error {
	if t := resp.Header.Get("Content-Type"); strings.HasPrefix(t, "text/html") {
		return c.wrong(what, "the answer is of type %s, which is no blob", t)
	}
	return nil
}

// parseContentRange reads "bytes FIRST-LAST/SIZE".
func parseContentRange(s string) (first, last, size int64, err error) {
	spec, ok := strings.CutPrefix(s, "bytes ")
	rng, total, ok2 := strings.Cut(spec, "/")
	from, to, ok3 := strings.Cut(rng, "-")
	if ok && ok2 && ok3 {
		var errs [3]error
		first, errs[0] = strconv.ParseInt(from, 10, 64)
		last, errs[1] = strconv.ParseInt(to, 10, 64)
		size, errs[2] = strconv.ParseInt(total, 10, 64)
		if errors.Join(errs[:]...) == nil && first >= 0 && first <= last && last < size {
			return first, last, size, nil
		}
	}
	return 0, 0, 0, fmt.Errorf("%.80q is no range of bytes", s)
}

// list reads a list of names: key of the JSON object that path answers with,
// those after the given one, at most limit of them (limit < 0: all there are).
func (c *client) list(ctx context.Context, what, path, scope, key, after string, limit int) ([]string, error) {
	var names []string
	query := url.Values{}
	if limit >= 0 {
		query.Set("n", strconv.Itoa(min(limit, 1000))) // more is refused by some
	}
	if after != "" {
		query.Set("last", after)
	}
	next := path + "?" + query.Encode()
	for range 10_000 { // pages
		var page []string
		var link string
		err := c.try(ctx, func() error {
			b, h, err := c.json(ctx, what, next, scope)
			if err != nil {
				return err
			}
			page, link = nil, nextLink(h.Get("Link"))
			var fields map[string]json.RawMessage
			if err = json.Unmarshal(b, &fields); err == nil && len(fields[key]) > 0 {
				err = json.Unmarshal(fields[key], &page)
			}
			if err != nil {
				return c.wrong(what, "the answer is no list of names: %v; it begins with %.80q", err, b)
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
		names = append(names, page...)
		if link == "" || len(page) == 0 || limit >= 0 && len(names) >= limit {
			return names, nil
		}
		next = link
	}
	return nil, c.wrong(what, "a list of pages without end")
}

// nextLink returns the path below /v2/, with its query, that a Link header of
// RFC 5988 calls the next; empty if none.
func nextLink(header string) string {
	target, rest, ok := strings.Cut(strings.TrimPrefix(strings.TrimSpace(header), "<"), ">")
	if !ok || !strings.Contains(rest, "next") {
		return ""
	}
	u, err := url.Parse(target)
	if err != nil {
		return ""
	}
	path, ok := strings.CutPrefix(u.Path, "/v2/")
	if !ok {
		return ""
	}
	return path + "?" + u.RawQuery
}

// json fetches a short document.
func (c *client) json(ctx context.Context, what, path, scope string) ([]byte, http.Header, error) {
	resp, err := c.do(ctx, what, http.MethodGet, path, scope, http.Header{"Accept": {"application/json, " + ocispec.MediaTypeImageIndex}})
	if err != nil {
		return nil, nil, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, maxList+1))
	if err != nil {
		return nil, nil, c.failed(ctx, what, err)
	}
	if len(b) > maxList {
		return nil, nil, c.wrong(what, "more than %d bytes", maxList)
	}
	return b, resp.Header, nil
}
