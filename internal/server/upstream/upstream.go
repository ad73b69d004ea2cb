// Package upstream makes a server the accelerator of another registry, its
// upstream: images are fetched from there when they are asked for the first
// time, and are served from here, as bundles and plainly.
//
// # How it fits in
//
// Registry and bundle endpoint work on a catalog and an object store. Catalog
// and Store are wrappers of the server's own that ask the upstream for what is
// not here, so neither endpoint knows of it:
//
//   - a tag is looked up at the upstream, each time or when the last look is
//     older than Options.TagTTL;
//   - a manifest that is not here is fetched, compared with its digest, and kept;
//   - a blob is in a repository when the upstream said so of this repository,
//     once. That another repository's bytes of it are here proves nothing;
//   - the bytes of a blob are fetched when they are read for the first time.
//
// Pushes are refused (Accelerator.ReadOnly): the upstream is where images are
// pushed to.
//
// # One download
//
// Whoever wants a blob, workers through the ingest or plain clients, reads one
// download as it grows (blobs.go). It goes to a file below Options.Dir, is
// continued where it broke, by a range request, and becomes an object when its
// digest has been found right. Until then its readers get all but the last byte:
// what looks whole is verified. The ingest tells nobody of what it stored before
// it has read to the end, so no segment of an unverified blob is served.
//
// # When the upstream does not answer
//
// What is here is served: by digest always, a tag with a warning in the log when
// the upstream cannot be reached, takes longer than Options.TagTimeout, says that
// it is overloaded, or answers what is no answer of a registry. When it says that
// something is not there, or may not be pulled, that holds at once.
//
// # Who may pull
//
// Everybody who reaches the accelerator may pull what the upstream lets the
// accelerator's credentials pull, as far as rules of access allow. With Options.ClientCredentials
// the upstream is asked for each client whether it lets these credentials pull, too (rights.go).
// What was here stays reachable by digest when the upstream deletes it or the
// accelerator's credentials lose the right to it; only a tag is asked for again.
package upstream

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/leftover"
	"hydrofoil.dev/foil/internal/server/objects"
	"hydrofoil.dev/foil/internal/server/registry"
)

// Options configure an Accelerator. URL, Dir, Catalog and Objects are required.
type Options struct {
	// URL is the upstream: http or https, a host, and a path that repositories
	// have there before the names that they have here.
	URL string
	// Dir is the directory of downloads under way, on the file system of Objects.
	Dir     string
	Catalog catalog.Catalog
	Objects objects.Store

	// Auth is a file with the upstream's credentials: USER:PASSWORD in one line,
	// or a Docker configuration (JSON). Empty means AuthEnv, or else the Docker
	// configuration of the user. It is read when the upstream asks for credentials.
	Auth string
	// CA is a file with certificates, in PEM form, that are trusted besides the
	// system's.
	CA string
	// TagTTL is how long an answer about a tag holds; 0: every use asks.
	TagTTL time.Duration
	// TagTimeout is how long the upstream has to answer about a tag that is here;
	// then it is served as it was. 0 means 5 s.
	TagTimeout time.Duration
	// ClientCredentials has the upstream decide who may pull, by the credentials that clients show (MayPull).
	ClientCredentials bool
	// RightsTTL is how long the upstream's answer to that holds; 0 means a minute.
	RightsTTL time.Duration
	// Pause is before the second try of a request that failed; it doubles with
	// each further one. 0 means 250 ms.
	Pause time.Duration
	// Stall is how long a download may bring nothing before it is begun again
	// where it is; 0 means a minute.
	Stall time.Duration
	// Parallel is how many blobs are downloaded at once; 0 means Parallel.
	Parallel int
	// Log takes what clients are not told; nil means slog.Default.
	Log *slog.Logger
}

// Parallel is how many blobs are downloaded at once, and how many layers should
// be ingested at once so that each keeps up with its download: they come side by
// side, and a layer that waited for others would be ingested after all have come.
const Parallel = 6

// Accelerator fetches from one upstream.
type Accelerator struct {
	o      Options
	log    *slog.Logger
	client *client
	ctx    context.Context // of everything that goes on when a request has ended
	stop   context.CancelFunc
	wg     sync.WaitGroup

	tags    checks // by repository:tag
	lookups checks // of manifests and blobs
	rights  rights // of clients

	mu        sync.Mutex
	fresh     map[string]time.Time // guarded by mu: when the upstream was asked for a tag
	downloads map[string]*download // guarded by mu: by digest, those under way
	closed    bool                 // guarded by mu
	slots     chan struct{}
}

// leftFor is how long a download that nobody continues is kept.
const leftFor = 7 * 24 * time.Hour

// New returns an Accelerator. It does not ask the upstream yet: that may be down.
func New(o Options) (*Accelerator, error) {
	if o.TagTimeout == 0 {
		o.TagTimeout = 5 * time.Second
	}
	if o.RightsTTL == 0 {
		o.RightsTTL = time.Minute
	}
	if o.Pause == 0 {
		o.Pause = 250 * time.Millisecond
	}
	if o.Stall == 0 {
		o.Stall = time.Minute
	}
	if o.Parallel == 0 {
		o.Parallel = Parallel
	}
	if o.Log == nil {
		o.Log = slog.Default()
	}
	c, err := newClient(o)
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(o.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("downloads from upstream: %w", err)
	}
	ctx, stop := context.WithCancel(context.Background())
	a := &Accelerator{
		o: o, log: o.Log, client: c, ctx: ctx, stop: stop,
		fresh:     map[string]time.Time{},
		downloads: map[string]*download{},
		slots:     make(chan struct{}, o.Parallel),
		rights:    newRights(),
	}
	a.wg.Go(func() { a.clean(ctx) })
	return a, nil
}

// clean removes downloads that nobody continued, until ctx ends.
func (a *Accelerator) clean(ctx context.Context) {
	tick := time.NewTicker(time.Hour)
	defer tick.Stop()
	begun, ages := time.Now(), leftover.Ages{Keep: leftFor}
	for {
		if err := a.dropLeft(&ages, time.Now(), time.Since(begun)); err != nil {
			a.log.Error("downloads that nobody continues not removed", "directory", a.o.Dir, "error", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// dropLeft removes downloads that nobody has continued for long. now and up are as
// leftover.Ages.Old takes them.
func (a *Accelerator) dropLeft(ages *leftover.Ages, now time.Time, up time.Duration) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	changed := make(map[string]time.Time)
	entries, err := os.ReadDir(a.o.Dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if info, err := e.Info(); err == nil { // else it has just become an object
			changed[filepath.Join(a.o.Dir, e.Name())] = info.ModTime()
		}
	}
	for _, w := range a.downloads {
		delete(changed, a.part(w.digest))
	}
	old, ahead := ages.Old(now, up, changed)
	var errs []error
	for _, path := range ahead {
		errs = append(errs, os.Chtimes(path, now, now))
	}
	for _, path := range old {
		errs = append(errs, os.Remove(path))
	}
	return errors.Join(errs...)
}

// Close ends what is under way and waits for it. Downloads go on with the next
// Accelerator over the same Dir.
func (a *Accelerator) Close() error {
	a.mu.Lock()
	a.closed = true
	a.mu.Unlock()
	a.stop()
	a.wg.Wait()
	a.client.http.CloseIdleConnections()
	return nil
}

var errClosed = errors.New("the server is shutting down")

// run has fn go on in the background, under the Accelerator's own context.
func (a *Accelerator) run(fn func(ctx context.Context)) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed {
		return errClosed
	}
	a.wg.Go(func() { fn(a.ctx) })
	return nil
}

// String is the upstream's URL.
func (a *Accelerator) String() string { return a.client.String() }

// ReadOnly refuses requests that would change the registry next.
func (a *Accelerator) ReadOnly(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if req.Method == http.MethodGet || req.Method == http.MethodHead {
			next.ServeHTTP(w, req)
			return
		}
		w.Header().Set("Allow", "GET, HEAD")
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusMethodNotAllowed)
		// The client has gone if this fails.
		_ = writeErrors(w, "UNSUPPORTED", fmt.Sprintf("this is an accelerator of %s and takes no pushes or deletions: send them there", a))
	})
}

// ParseURL reads the URL of an upstream.
func ParseURL(s string) (base *url.URL, prefix string, err error) {
	u, err := url.Parse(s)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return nil, "", fmt.Errorf("upstream %q: want https://HOST[:PORT][/PREFIX], or http://", redact(s))
	}
	prefix = strings.Trim(u.Path, "/")
	switch {
	case u.User != nil:
		return nil, "", fmt.Errorf("upstream %s: credentials are not read from the URL, which others can see: use --upstream-auth or %s", u.Redacted(), AuthEnv)
	case u.RawQuery != "" || u.Fragment != "":
		return nil, "", fmt.Errorf("upstream %s: want a host and the prefix of its repositories, nothing else", u)
	case prefix != "" && !registry.ValidName(prefix):
		return nil, "", fmt.Errorf("upstream %s: %q is no prefix of repository names", u, prefix)
	case prefix == "v2" || strings.HasPrefix(prefix, "v2/"):
		return nil, "", fmt.Errorf("upstream %s: leave out /v2, which is added", u)
	}
	return &url.URL{Scheme: u.Scheme, Host: u.Host}, prefix, nil
}

// redact hides what may be a password.
func redact(s string) string {
	if i := strings.LastIndexByte(s, '@'); i >= 0 {
		return "...@" + s[i+1:]
	}
	return s
}
