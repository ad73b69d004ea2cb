package remote

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"hydrofoil.dev/foil/internal/format/bundle"
)

// call is one request.
type call struct {
	method, path string
	query        url.Values
	mediaType    string // of body; empty: there is none
	body         []byte
	within       time.Duration // Options.HeaderTimeout, if that is less or this is 0
	aside        bool
}

// Stream posts body as JSON to path and returns the answer, which must be closed. Its
// header must come within a while, unless that is 0, and within Options.HeaderTimeout.
//
// Errors: *StatusError; those of the connection.
func (c *Client) Stream(ctx context.Context, path string, body any, within time.Duration) (*Stream, error) {
	return c.post(ctx, path, body, call{within: within})
}

// StreamAside is Stream over a connection that pulls do not use: what is small and comes slowly has BBR pause, with
// four packets in flight (docs/network.md), and a pull that begins then is 0.2 s late.
func (c *Client) StreamAside(ctx context.Context, path string, body any) (*Stream, error) {
	return c.post(ctx, path, body, call{aside: true})
}

func (c *Client) post(ctx context.Context, path string, body any, q call) (*Stream, error) {
	b, err := json.Marshal(body)
	if err != nil {
		return nil, fmt.Errorf("encode request to %s: %w", path, err)
	}
	q.method, q.path, q.mediaType, q.body = http.MethodPost, path, "application/json", b
	return c.do(ctx, q)
}

// do returns the response to a request, whose status is 2xx. Its
// body must be closed; reading from it fails once StallTimeout passes without a
// byte.
//
// Errors: *StatusError; those of the connection.
func (c *Client) do(ctx context.Context, q call) (*Stream, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	within := c.opts.HeaderTimeout
	if q.within > 0 {
		within = min(within, q.within)
	}
	timer := time.AfterFunc(within, func() { cancel(errHeader) })
	l, u, resp, err := c.roundTrip(ctx, q)
	timer.Stop()
	if err != nil {
		if errors.Is(context.Cause(ctx), errHeader) {
			err = fmt.Errorf("%w (%v)", errHeader, within)
		}
		if l != nil {
			if (ctx.Err() == nil || errors.Is(context.Cause(ctx), errHeader)) && !isAnswer(err) {
				c.abandon(l)
			}
			l.end()
		}
		cancel(nil)
		if status, ok := errors.AsType[*StatusError](err); ok {
			return nil, status
		}
		return nil, fmt.Errorf("%s %s: %w", strings.ToLower(q.method), u, err)
	}
	r := c.stream(ctx, cancel, l, u, resp.Body)
	if resp.StatusCode/100 != 2 {
		defer r.Close()
		msg, _ := io.ReadAll(io.LimitReader(r, 4<<10))
		e := &StatusError{Method: q.method, URL: u, Status: resp.StatusCode}
		e.describe(msg)
		if to := resp.Header.Get("Location"); to != "" && e.Status/100 == 3 {
			e.Message = "it redirects to " + to
		}
		switch e.Status {
		case http.StatusTooManyRequests, http.StatusServiceUnavailable:
			e.After = min(bundle.RetryAfter(resp.Header, time.Now()), MostAfter)
		}
		return nil, e
	}
	return r, nil
}

// isAnswer reports whether err is no failure of the connection.
func isAnswer(err error) bool {
	return errors.As(err, new(*StatusError)) || errors.As(err, new(*authError))
}

// roundTrip sends a request to the server, by another way if a first request shows
// that it does not understand the one at hand. The link is in use, unless it is
// nil.
func (c *Client) roundTrip(ctx context.Context, q call) (*link, string, *http.Response, error) {
	for {
		l, w, err := c.begin(q.aside)
		if err != nil {
			return nil, c.base.String(), nil, err
		}
		at := c.base.JoinPath(q.path)
		at.Scheme = w.scheme
		u := at.String()
		query := url.Values{}
		for k, v := range q.query {
			query[k] = v
		}
		if c.view.Namespace != "" {
			query.Set("ns", c.view.Namespace)
		}
		at.RawQuery = query.Encode()
		resp, err := c.send(ctx, l, func() (*http.Request, error) {
			req, err := http.NewRequest(q.method, at.String(), bytes.NewReader(q.body))
			if err != nil {
				return nil, err
			}
			for k, v := range c.opts.Header {
				req.Header[k] = slices.Clone(v)
			}
			if q.mediaType != "" {
				req.Header.Set("Content-Type", q.mediaType)
			}
			return req, nil
		})
		if err == nil {
			c.answered(w)
			return l, u, resp, nil
		}
		if ctx.Err() != nil || isAnswer(err) || !c.another(l, w, err) {
			return l, u, nil, err
		}
		c.log.Debug("the server may speak another protocol", "server", c.Base(), "error", err)
		l.end()
	}
}

// Post sends body as JSON to path, as a request with a small response, which
// it decodes into answer unless that is nil.
//
// Errors: *StatusError; those of the connection.
func (c *Client) Post(ctx context.Context, path string, body, answer any) error {
	r, err := c.Stream(ctx, path, body, 0)
	if err != nil {
		return err
	}
	defer r.Close()
	if answer == nil {
		return nil
	}
	if err := json.NewDecoder(io.LimitReader(r, 16<<20)).Decode(answer); err != nil {
		return fmt.Errorf("post %s: answer: %w", r.url, err)
	}
	return nil
}

// Send posts body, of the media type, to path with the query.
//
// Errors: *StatusError; those of the connection.
func (c *Client) Send(ctx context.Context, path string, query url.Values, mediaType string, body []byte) error {
	r, err := c.do(ctx, call{method: http.MethodPost, path: path, query: query, mediaType: mediaType, body: body})
	if err != nil {
		return err
	}
	return r.Close()
}

// Get reads the JSON at path with the query into answer, which takes at most 64
// MiB.
//
// Errors: *StatusError; those of the connection.
func (c *Client) Get(ctx context.Context, path string, query url.Values, answer any) error {
	r, err := c.do(ctx, call{method: http.MethodGet, path: path, query: query})
	if err != nil {
		return err
	}
	defer r.Close()
	if err := json.NewDecoder(io.LimitReader(r, 64<<20)).Decode(answer); err != nil {
		return fmt.Errorf("get %s: answer: %w", r.url, err)
	}
	return nil
}

// Delete deletes what is at path with the query.
//
// Errors: *StatusError; those of the connection.
func (c *Client) Delete(ctx context.Context, path string, query url.Values) error {
	r, err := c.do(ctx, call{method: http.MethodDelete, path: path, query: query})
	if err != nil {
		return err
	}
	return r.Close()
}

// Stream is the body of an answer. Reading from it fails with ErrStall when no byte comes
// for the client's StallTimeout, or for what Patience says, and when reads have waited for as long as
// Limit says.
type Stream struct {
	client *Client
	link   *link
	url    string
	body   io.ReadCloser
	ctx    context.Context
	cancel context.CancelCauseFunc
	stall  *time.Timer
	most   time.Duration // how long no byte may come
	limit  time.Duration // what Limit said; 0: nothing
	left   time.Duration // of that
	once   sync.Once
}

func (r *Stream) Read(b []byte) (int, error) {
	// The clock runs only while bytes are waited for: a slow disk here is no
	// stall there.
	most, what := r.most, "no byte"
	if r.limit > 0 && r.left < most {
		most, what = max(r.left, 0), "nothing but signs of life"
	}
	began := time.Now()
	r.stall.Reset(most)
	n, err := r.body.Read(b)
	r.stall.Stop()
	r.left -= time.Since(began)
	if err != nil && !errors.Is(err, io.EOF) {
		if errors.Is(context.Cause(r.ctx), ErrStall) {
			err = fmt.Errorf("%w: %s for %v", ErrStall, what, max(most, r.limit))
		}
		err = fmt.Errorf("read from %s: %w", r.url, err)
	}
	return n, err
}

// stream returns the body of a response that cancel ends.
func (c *Client) stream(ctx context.Context, cancel context.CancelCauseFunc, l *link, u string, body io.ReadCloser) *Stream {
	r := &Stream{client: c, link: l, url: u, body: body, cancel: cancel, ctx: ctx, most: c.opts.StallTimeout}
	r.stall = time.AfterFunc(r.most, func() { cancel(ErrStall) })
	r.stall.Stop()
	return r
}

// Close ends the stream, wherever it is.
func (r *Stream) Close() error {
	var err error
	r.once.Do(func() {
		r.stall.Stop()
		r.cancel(nil)
		err = r.body.Close()
		r.link.end()
	})
	return err
}

// Patience has the stream wait for so long for a byte.
func (r *Stream) Patience(d time.Duration) { r.most = d }

// Limit has reads wait for so long in all, from now on, whatever bytes come: until it is called again,
// by who has got what it wanted. 0: for ever.
func (r *Stream) Limit(d time.Duration) { r.limit, r.left = d, d }

// Broken says that the connection cannot be relied on: the next request connects anew.
func (r *Stream) Broken() { r.client.abandon(r.link) }
