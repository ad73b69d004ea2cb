package hosts

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"hydrofoil.dev/foil/internal/worker/credentials"
)

// To log in takes three round trips: the answer that credentials are demanded, and a connection to the token server and
// its answer. A start would wait for them. So the daemon logs in early at the servers that it was told to keep a
// connection to, with what Docker's configuration has for them, and a pull shows that at once.
//
// Tokens of foil serve say who one is, whatever the repository. Those of other servers may be for one repository each: then
// what was shown early is refused, as nothing would be, and the pull goes on as usual.
const (
	// earlyFor is how long what was got early is shown before there is new: less than half of what a token
	// of foil serve lasts.
	earlyFor = 2 * time.Minute
	// earlyAgain is after how long a host that demanded nothing, or could not be asked, is asked again.
	earlyAgain = 10 * time.Minute
	// earlyWithin is how long a host and its token server may take.
	earlyWithin = 10 * time.Second
	// earlyRefusals is how often the host may refuse what was got early until it is no longer tried.
	earlyRefusals = 3
)

// early is what a host gave before any pull asked for it.
type early struct {
	header  string    // Authorization; empty: none
	next    time.Time // when to ask for it anew
	refused int       // times
}

// shown is what a request shows before anything was demanded; empty: nothing.
func (a *hostAuth) shown() string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.early.header
}

// refused notes that a host has refused a request, and reports whether that showed what was got early.
func (a *hostAuth) refused(header string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if header == "" || header != a.early.header {
		return false
	}
	a.early.header = ""
	a.early.refused++
	return true
}

// LogIn returns a function that logs in at a server, http://HOST:PORT or https://HOST, with what Docker's configuration has
// for it, when it is time to. It is to be called often, by one goroutine.
func (s *Set) LogIn(base string) func(context.Context) {
	return func(ctx context.Context) {
		k := s.at(base)
		if k == nil {
			return
		}
		a := k.auth(credentials.Credential{}, s.opts.DockerConfig)
		a.mu.Lock()
		wait := time.Now().Before(a.early.next) || a.early.refused >= earlyRefusals
		a.mu.Unlock()
		if wait {
			return
		}
		ctx, cancel := context.WithTimeout(ctx, earlyWithin)
		defer cancel()
		header, err := a.logIn(ctx, k.client.Base())
		if err != nil {
			s.opts.Logger.Debug("not logged in early; a pull does it", "server", base, "error", err)
		}
		a.mu.Lock()
		defer a.mu.Unlock()
		a.early.header, a.early.next = header, time.Now().Add(earlyAgain)
		if header != "" {
			a.early.next = time.Now().Add(earlyFor)
		}
	}
}

// at returns what is known of the host at base; nil: nothing.
func (s *Set) at(base string) *known {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, k := range s.known {
		if k.client.Base() == strings.TrimSuffix(base, "/") {
			return k
		}
	}
	return nil
}

// logIn asks a host what it demands, and gets that. It returns what a request is to show; empty: nothing.
func (a *hostAuth) logIn(ctx context.Context, base string) (header string, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, base+"/v2/", nil)
	if err != nil {
		return "", err
	}
	c, err := lookUp(ctx, a.credential, a.dockerConfig, req.URL.Host)
	if err != nil || c.IsZero() {
		return "", err
	}
	resp, err := a.client.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	_, _ = io.CopyN(io.Discard, resp.Body, 4<<10)
	if resp.StatusCode != http.StatusUnauthorized {
		return "", nil
	}
	if c.Token != "" {
		return "Bearer " + c.Token, nil
	}
	inner := a.newAuthorizer()
	if err := inner.AddResponses(ctx, []*http.Response{resp}); err != nil {
		return "", fmt.Errorf("what %s demands: %w", base, err)
	}
	if err := inner.Authorize(ctx, req); err != nil {
		return "", fmt.Errorf("get what %s demands: %w", base, err)
	}
	return req.Header.Get("Authorization"), nil
}
