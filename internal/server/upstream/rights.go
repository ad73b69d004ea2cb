package upstream

import (
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/server/access"
	"hydrofoil.dev/foil/internal/server/guard"
	"hydrofoil.dev/foil/internal/server/login"
	"hydrofoil.dev/foil/internal/server/registry"
)

// Rights of clients. A client that wants something of a repository may have it if the upstream lets it pull
// that very thing, or let it pull something else of the repository a moment ago: the upstream is asked for it (HEAD) with
// the Authorization header of the client's request, as it is. So a client logs in as it would there: the challenge is
// the upstream's, and so is the token service that it names. Answers are shared by those who ask at the same time, and
// kept: that a repository may be pulled for Options.RightsTTL, that it may not (401, 403) for refusedFor.
//
// What keeps the upstream from deciding lets nobody in, whatever is here. Redirects are not followed: what a page for
// logins, or a store of blobs, says is no decision.

const (
	// refusedFor is how long a refusal is kept: clients that have just been given a right try again.
	refusedFor = 5 * time.Second
	// maxRights bounds the answers that are kept.
	maxRights = 20_000
)

// rights are what the upstream said of clients.
type rights struct {
	key      []byte // of the hash that credentials are known by: this process's own
	asking   checks
	failures login.Failures

	mu    sync.Mutex
	known map[right]decision      // guarded by mu
	good  map[credential]struct{} // guarded by mu: those that some decision in known let in
}

// credential is a keyed hash of an Authorization header.
type credential [sha256.Size]byte

// right is that to pull from a repository; "": to be known to the registry.
type right struct {
	who        credential
	repository string
}

type decision struct {
	until  time.Time
	denied *guard.Denied // nil: it may be pulled
}

func newRights() rights {
	key := make([]byte, 32)
	_, _ = rand.Read(key) // never fails
	return rights{key: key, failures: login.NewFailures(), known: map[right]decision{}, good: map[credential]struct{}{}}
}

// hash is under what a credential is known.
func (r *rights) hash(shown string) (c credential) {
	h := hmac.New(sha256.New, r.key)
	h.Write([]byte(shown))
	h.Sum(c[:0])
	return c
}

// get returns a decision that holds, and whether the credential has let somebody in lately.
func (r *rights) get(k right) (d decision, ok, good bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	d, ok = r.known[k]
	_, good = r.good[k.who]
	return d, ok && time.Now().Before(d.until), good
}

func (r *rights) put(k right, d decision) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, there := r.known[k]; !there && len(r.known) >= maxRights {
		r.drop()
	}
	r.known[k] = d
	if d.denied == nil {
		r.good[k.who] = struct{}{}
	}
}

// drop makes room: what does not hold any more goes, or everything. mu must be held.
func (r *rights) drop() {
	now := time.Now()
	clear(r.good)
	for k, d := range r.known {
		if !now.Before(d.until) {
			delete(r.known, k)
		} else if d.denied == nil {
			r.good[k.who] = struct{}{}
		}
	}
	if len(r.known) >= maxRights/2 {
		clear(r.known)
		clear(r.good)
	}
}

// MayPull implements guard.Judge.
func (a *Accelerator) MayPull(ctx context.Context, q guard.Asked) error {
	if q.Repository != "" && !registry.ValidName(q.Repository) || q.Reference != "" && !registry.ValidTag(q.Reference) && digest.Digest(q.Reference).Validate() != nil {
		return hidden(q.Repository)
	}
	k := right{a.rights.hash(q.Shown), q.Repository}
	d, ok, good := a.rights.get(k)
	if ok {
		return d.err()
	}
	// Nobody guesses tokens; and a registry answers 401 to one that is for something else.
	guesses := !good && len(q.Shown) > 6 && strings.EqualFold(q.Shown[:6], "basic ")
	if guesses {
		if err := a.rights.failures.Check(q.Address, login.WayExternal); err != nil {
			return a.tooMany(err)
		}
	}
	_, err := a.share(ctx, &a.rights.asking, string(k.who[:])+fmt.Sprintf("%s %s %t", q.Repository, q.Reference, q.Blob), false, func(ctx context.Context) (any, error) {
		ctx, cancel := context.WithTimeout(withShown(ctx, q.Shown), lookupTime)
		defer cancel()
		return nil, a.decide(ctx, k, q)
	})
	if denied, ok := errors.AsType[*guard.Denied](err); ok && denied.Unknown && guesses {
		a.rights.failures.Add(q.Address)
	}
	return err
}

func (d decision) err() error {
	if d.denied == nil {
		return nil
	}
	return d.denied
}

// hidden is the refusal of what is to look as if it were not there.
func hidden(repository string) *guard.Denied {
	return &guard.Denied{Right: access.Pull, Repository: repository}
}

// tooMany tells a client that has failed too often when to try again.
func (a *Accelerator) tooMany(err error) error {
	e := &Error{Upstream: a.client.String(), What: "log in", Kind: Busy, Detail: "not asked", advice: "too many failed logins from this address: wait, and check the credentials"}
	if l, ok := login.IsError(err); ok {
		e.After = l.After
	}
	return e
}

// decide asks the upstream, and keeps what it says.
func (a *Accelerator) decide(ctx context.Context, k right, q guard.Asked) error {
	asked := time.Now() // the answer may be as old as that
	err := a.client.try(ctx, func() error { return a.client.let(ctx, q) })
	denied := a.denied(q.Repository, err)
	switch {
	case err == nil:
		a.rights.put(k, decision{until: asked.Add(a.o.RightsTTL)})
		return nil
	case denied == nil:
		return err
	}
	if e, ok := errors.AsType[*Error](err); ok && e.Kind == Denied {
		a.rights.put(k, decision{until: asked.Add(min(refusedFor, a.o.RightsTTL)), denied: denied})
	}
	return denied
}

// denied is the refusal that an upstream's error is; nil: it is none.
func (a *Accelerator) denied(repository string, err error) *guard.Denied {
	e, ok := errors.AsType[*Error](err)
	switch {
	case ok && e.Kind == Denied && e.unauthorized:
		return &guard.Denied{Right: access.Pull, Repository: repository, Unknown: true, Challenge: e.challenge}
	case ok && (e.Kind == Denied || e.Kind == Missing):
		return hidden(repository)
	}
	return nil
}

// let asks for what a client wants, as the client. An error says that the upstream does not let it.
func (c *client) let(ctx context.Context, q guard.Asked) error {
	repo := c.repository(q.Repository)
	switch {
	case q.Repository == "":
		return c.peek(ctx, "log in", http.MethodGet, "", "")
	case q.Blob:
		err := c.peek(ctx, "blob "+nameOf(q.Repository, q.Reference), http.MethodHead, repo+"/blobs/"+q.Reference, "")
		if !errors.Is(err, errRedirected) {
			return err
		}
	case q.Reference != "":
		return c.peek(ctx, "manifest "+nameOf(q.Repository, q.Reference), http.MethodHead, repo+"/manifests/"+q.Reference, "Docker-Content-Digest")
	}
	return c.peek(ctx, "tags of "+q.Repository, http.MethodGet, repo+"/tags/list?n=1", "")
}

// errRedirected says that the upstream wants a client to ask elsewhere, which is no decision.
var errRedirected = errors.New("it redirects clients")

// peek sends a request as a client and throws the answer away. One of a registry has the header that is named, or is no page for
// people.
func (c *client) peek(ctx context.Context, what, method, path, header string) error {
	resp, err := c.do(ctx, what, method, path, "", http.Header{"Accept": {accept}})
	if err != nil {
		return err
	}
	_ = resp.Body.Close()
	mediaType := resp.Header.Get("Content-Type")
	if header != "" && resp.Header.Get(header) == "" && !strings.Contains(mediaType, "json") || strings.HasPrefix(mediaType, "text/html") {
		return c.wrong(what, "the answer is of type %.80q, which is none of a registry", mediaType)
	}
	return nil
}

type shownKey struct{}

// withShown has requests of ctx be sent with what a client shows, in place of the accelerator's credentials.
func withShown(ctx context.Context, shown string) context.Context {
	return context.WithValue(ctx, shownKey{}, shown)
}

func shownIn(ctx context.Context) (string, bool) {
	s, ok := ctx.Value(shownKey{}).(string)
	return s, ok
}

// askAs sends one request with a client's Authorization header, or none. It follows no redirect.
func (c *client) askAs(ctx context.Context, shown, what, method, path string, header http.Header) (*http.Response, error) {
	req, err := c.request(ctx, method, path, header)
	if err != nil {
		return nil, c.failed(ctx, what, err)
	}
	if shown != "" {
		req.Header.Set("Authorization", shown)
	}
	staying := *c.http
	staying.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	resp, err := staying.Do(req)
	if err != nil {
		return nil, c.failed(ctx, what, err)
	}
	if resp.StatusCode < 300 {
		return resp, nil
	}
	defer resp.Body.Close()
	e := c.statusError(resp, what)
	if resp.StatusCode < 400 {
		e.Err = errRedirected
	}
	return nil, e
}

var _ guard.Judge = (*Accelerator)(nil)
