package hosts

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"

	"github.com/containerd/containerd/v2/core/remotes/docker"
	remoteerrors "github.com/containerd/containerd/v2/core/remotes/errors"

	"hydrofoil.dev/foil/internal/worker/credentials"
	"hydrofoil.dev/foil/internal/worker/remote"
)

// hostAuth is what one host has demanded, and got, with one credential:
// containerd's authorizer, which has a token for each scope and renews it when
// its time is over.
type hostAuth struct {
	client       *http.Client // for token servers
	header       http.Header
	credential   credentials.Credential
	dockerConfig string

	timer *time.Timer // forgets it; pulls that run have it all the same

	mu    sync.Mutex
	inner docker.Authorizer
	token string // the host takes it as it is; empty: none
	early early
}

// rememberFor is how long after the beginning of the last pull that used it a
// credential, with its tokens, is kept for the next one.
const rememberFor = 10 * time.Minute

// auth returns what pulls with the same credential share.
func (k *known) auth(c credentials.Credential, dockerConfig string) *hostAuth {
	k.mu.Lock()
	defer k.mu.Unlock()
	if a := k.auths[c]; a != nil {
		a.timer.Reset(rememberFor)
		return a
	}
	a := &hostAuth{client: k.RegistryHost.Client, header: k.Header, credential: c, dockerConfig: dockerConfig}
	if len(k.auths) >= most {
		return a // a kubelet may bring new ones with every pull
	}
	k.auths[c] = a
	a.timer = time.AfterFunc(rememberFor, func() {
		k.mu.Lock()
		defer k.mu.Unlock()
		delete(k.auths, c)
	})
	return a
}

// forget ends the timers.
func (k *known) forget() {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, a := range k.auths {
		a.timer.Stop()
	}
	clear(k.auths)
}

// lookUp finds the credential for a host.
func lookUp(ctx context.Context, given credentials.Credential, dockerConfig, host string) (credentials.Credential, error) {
	if !given.IsZero() {
		return given.For(host), nil
	}
	return fromDocker(ctx, dockerConfig, host)
}

// current returns the authorizer, made anew after renew.
func (a *hostAuth) current() (docker.Authorizer, string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.inner == nil {
		a.inner = a.newAuthorizer()
	}
	return a.inner, a.token
}

func (a *hostAuth) newAuthorizer() docker.Authorizer {
	return docker.NewDockerAuthorizer(
		docker.WithAuthClient(a.client),
		docker.WithAuthHeader(a.header),
		docker.WithAuthCreds(func(host string) (string, string, error) {
			// There is no context: a helper that hangs is its own trouble.
			c, err := lookUp(context.Background(), a.credential, a.dockerConfig, host)
			return c.Username, c.Secret, err
		}))
}

// renew forgets an authorizer with all its tokens and errors, unless another
// request has done so.
func (a *hostAuth) renew(old docker.Authorizer) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.inner == old {
		a.inner, a.token = nil, ""
	}
}

// authorizer is a hostAuth for one repository: a remote.Authorizer.
type authorizer struct {
	host  *hostAuth
	scope string
}

// Authorize adds a token, or a name and password, once the host has demanded
// them.
func (a *authorizer) Authorize(ctx context.Context, req *http.Request) error {
	inner, token := a.host.current()
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
		return nil
	}
	if early := a.host.shown(); early != "" {
		req.Header.Set("Authorization", early)
		return nil
	}
	if err := inner.Authorize(docker.WithScope(ctx, a.scope), req); err != nil {
		a.host.renew(inner) // it would keep the error
		return a.explain(err)
	}
	return nil
}

// Challenged takes what the host demands. A token that was refused, though its
// time is not over, is asked for anew.
func (a *authorizer) Challenged(ctx context.Context, resp *http.Response, before int) error {
	inner, token := a.host.current()
	if a.host.refused(resp.Request.Header.Get("Authorization")) {
		before = 0 // the host has seen nothing of inner's yet
	}
	if before > 0 || token != "" {
		a.host.renew(inner)
		inner, _ = a.host.current()
	}
	c, err := lookUp(ctx, a.host.credential, a.host.dockerConfig, resp.Request.URL.Host)
	if err != nil {
		return &remote.Refused{Err: err}
	}
	if c.Token != "" {
		if token == c.Token {
			return &remote.Refused{Err: errors.New("it does not take the registry token")}
		}
		a.host.mu.Lock()
		a.host.token = c.Token
		a.host.mu.Unlock()
		return nil
	}
	if err := inner.AddResponses(docker.WithScope(ctx, a.scope), []*http.Response{resp}); err != nil {
		return a.explain(err)
	}
	return nil
}

// explain says which errors trying again would not change.
func (a *authorizer) explain(err error) error {
	var status remoteerrors.ErrUnexpectedStatus
	switch {
	case errors.As(err, &status) && status.StatusCode < 500 && status.StatusCode != http.StatusTooManyRequests:
		// Its message has the answer's body, which is the token server's to say.
		return &remote.Refused{Err: fmt.Errorf("the token server answers %s: are the credentials right?", status.Status)}
	case errors.As(err, &status):
		return fmt.Errorf("%w %s", remote.ErrTokenServer, status.Status)
	case errors.Is(err, docker.ErrInvalidAuthorization):
		return &remote.Refused{Err: fmt.Errorf("no valid credentials: %w", err)}
	}
	return fmt.Errorf("authorize: %w", err)
}
