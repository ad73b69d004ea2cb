package remote

import (
	"context"
	"errors"
	"net/http"
)

// Authorizer puts on requests what a server demands.
type Authorizer interface {
	// Authorize adds to req what has been demanded so far; it may have to ask a
	// token server for it.
	Authorize(ctx context.Context, req *http.Request) error
	// Challenged takes the answer 401 to a request, which has had as many before,
	// and returns nil if the request is worth sending again.
	Challenged(ctx context.Context, resp *http.Response, before int) error
}

// attempts is how often a request is sent that is answered with 401: without
// credentials, with a token that may have expired, and with a new one.
const attempts = 3

// Refused is an Authorizer's error that trying again would not change: there
// are no credentials, or they are wrong.
type Refused struct{ Err error }

func (r *Refused) Error() string { return r.Err.Error() }
func (r *Refused) Unwrap() error { return r.Err }

// ErrTokenServer is, wrapped, an Authorizer's error when the token server answers that it cannot give one now.
var ErrTokenServer = errors.New("the token server answers")

// View is how one pull uses a Client that others use as well.
type View struct {
	Authorizer Authorizer // nil: none
	// Namespace is the registry that the host is asked for in the name of, when
	// that is another: the query ns, as containerd adds it. Empty: none.
	Namespace string
}

// With returns the client for one pull, over the same connection. It need not
// be closed.
func (c *Client) With(v View) *Client { return &Client{shared: c.shared, view: v} }

// send sends a request made by make, again when the server demands credentials.
func (c *Client) send(ctx context.Context, l *link, make func() (*http.Request, error)) (*http.Response, error) {
	a := c.view.Authorizer
	for before := 0; ; before++ {
		req, err := make()
		if err != nil {
			return nil, err
		}
		if a != nil {
			if err := a.Authorize(ctx, req); err != nil {
				return nil, refusal(req, err)
			}
		}
		resp, err := l.transport.RoundTrip(req.WithContext(ctx))
		if err != nil || resp.StatusCode != http.StatusUnauthorized || a == nil || before == attempts-1 {
			return resp, err
		}
		err = a.Challenged(ctx, resp, before)
		_ = resp.Body.Close()
		if err != nil {
			return nil, refusal(req, err)
		}
	}
}

// refusal makes of an authorizer's error what the server's own would have been.
func refusal(req *http.Request, err error) error {
	if r, ok := errors.AsType[*Refused](err); ok {
		return &StatusError{Method: req.Method, URL: req.URL.String(), Status: http.StatusUnauthorized, Message: r.Error()}
	}
	return &authError{err}
}

// authError is an error of an Authorizer that another try may not meet. It says
// nothing about the connection to the server.
type authError struct{ error }

func (e *authError) Unwrap() error { return e.error }
