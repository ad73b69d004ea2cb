package fetch

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/kernel"
)

// receiveWindow is how much of a stream may be on its way or unread, in bytes.
const receiveWindow = kernel.FlightBytes

// ClientOptions configures a Client. Only Base is needed.
type ClientOptions struct {
	// Base is the server: http://host:port or https://host[:port].
	Base string
	// TLS configures https; nil means the defaults.
	TLS *tls.Config
	// TLSNow, when not nil, returns what TLS has become: files that were replaced on the
	// disk. It is called before the client connects again after a failure, and by Renew;
	// nil keeps what was.
	TLSNow func() *tls.Config
	// FallBack makes a client whose server is named with https speak plain HTTP
	// when it finds that the server does.
	FallBack bool
	// Header is added to every request.
	Header http.Header
	// Dial connects; nil means a net.Dialer.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)

	// ConnectTimeout bounds connecting, TLS included; 0 means 10 s.
	ConnectTimeout time.Duration
	// HeaderTimeout bounds the time from a request to its response's header; 0
	// means 5 minutes: a server may
	// have to ingest an image first.
	HeaderTimeout time.Duration
	// StallTimeout is how long a stream may bring no byte while one is waited
	// for; 0 means 60 s. A connection that is cut is found by pings, sooner.
	StallTimeout time.Duration
	// PingInterval is how long a connection may be silent before a ping checks
	// that it still works, and how long the ping may take; 0 means 10 s.
	PingInterval time.Duration

	Logger *slog.Logger // nil means none
}

// Client talks to one server over one HTTP/2 connection, which it keeps open
// between requests: plain HTTP without upgrade (h2c by prior knowledge), or TLS.
// A server that speaks only HTTP/1.1 works as well, with more connections.
type Client struct {
	*shared
	view View
}

// shared is what all views of a client have in common.
type shared struct {
	opts ClientOptions
	base *url.URL
	log  *slog.Logger

	dials atomic.Int64            // connections made
	kept  atomic.Pointer[Warming] // of the connection that Keep holds open

	mu     sync.Mutex
	link   *link // for new requests
	way    way
	spoken bool // the server has answered a request by this way
	closed bool
}

// way is how to speak to the server.
type way struct {
	scheme string
	old    bool // HTTP/1.1, over a connection without TLS
}

// link is one transport, which has one connection with HTTP/2. When it is
// abandoned, its connections are closed as soon as nothing streams over them.
type link struct {
	transport *http.Transport

	mu        sync.Mutex
	conns     map[net.Conn]struct{}
	streams   int
	abandoned bool
}

func (l *link) begin() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.streams++
}

func (l *link) end() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.streams--
	l.closeUnused()
}

func (l *link) abandon() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.abandoned = true
	l.closeUnused()
}

func (l *link) closeUnused() {
	if !l.abandoned || l.streams > 0 {
		return
	}
	for c := range l.conns {
		c.Close()
	}
	clear(l.conns)
}

func (l *link) opened(c net.Conn) net.Conn {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.conns[c] = struct{}{}
	l.closeUnused() // dialled for a request that has given up since
	return &linkConn{Conn: c, link: l}
}

// linkConn is a connection that its link knows of.
type linkConn struct {
	net.Conn
	link *link
}

func (c *linkConn) Close() error {
	c.link.mu.Lock()
	delete(c.link.conns, c.Conn)
	c.link.mu.Unlock()
	return c.Conn.Close()
}

// NewClient does not connect yet.
func NewClient(opts ClientOptions) (*Client, error) {
	base, err := url.Parse(opts.Base)
	if err != nil {
		return nil, fmt.Errorf("server address: %w", err)
	}
	if base.Scheme != "http" && base.Scheme != "https" || base.Host == "" {
		return nil, fmt.Errorf("server address %q: want http://HOST:PORT or https://HOST", opts.Base)
	}
	for d, v := range map[*time.Duration]time.Duration{
		&opts.ConnectTimeout: 10 * time.Second,
		&opts.HeaderTimeout:  5 * time.Minute,
		&opts.StallTimeout:   60 * time.Second,
		&opts.PingInterval:   10 * time.Second,
	} {
		if *d == 0 {
			*d = v
		}
	}
	if opts.Dial == nil {
		opts.Dial = (&net.Dialer{Control: receiveAhead}).DialContext
	}
	if opts.Logger == nil {
		opts.Logger = slog.New(slog.DiscardHandler)
	}
	c := &shared{opts: opts, base: base, log: opts.Logger, way: way{scheme: base.Scheme}}
	c.link = c.newLink()
	return &Client{shared: c}, nil
}

// newLink makes a link for c.way, which mu guards.
func (c *shared) newLink() *link {
	l := &link{conns: make(map[net.Conn]struct{})}
	t := &http.Transport{
		DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			ctx, cancel := context.WithTimeoutCause(ctx, c.opts.ConnectTimeout, errConnect)
			defer cancel()
			conn, err := c.opts.Dial(ctx, network, address)
			if err != nil && errors.Is(context.Cause(ctx), errConnect) {
				return nil, fmt.Errorf("connect to %s: %w (%v)", address, errConnect, c.opts.ConnectTimeout)
			}
			if err != nil {
				return nil, err
			}
			c.dials.Add(1)
			return l.opened(conn), nil
		},
		TLSClientConfig:     c.opts.TLS,
		TLSHandshakeTimeout: c.opts.ConnectTimeout,
		Protocols:           new(http.Protocols),
		HTTP2: &http.HTTP2Config{
			SendPingTimeout:           c.opts.PingInterval,
			PingTimeout:               c.opts.PingInterval,
			MaxReceiveBufferPerStream: receiveWindow,
			MaxReadFrameSize:          256 << 10,
		},
		// The bytes are compressed already, and their count is reported.
		DisableCompression: true,
	}
	switch {
	case c.way.scheme == "https":
		t.Proxy = http.ProxyFromEnvironment
		t.Protocols.SetHTTP1(true)
		t.Protocols.SetHTTP2(true)
	case c.way.old:
		t.Protocols.SetHTTP1(true)
	default:
		t.Protocols.SetUnencryptedHTTP2(true)
	}
	l.transport = t
	return l
}

// receiveAhead prepares a socket before it is connected. One that may not be is slower on
// a long path, not wrong.
func receiveAhead(_, _ string, socket syscall.RawConn) error {
	_ = kernel.LetReceive(socket)
	return nil
}

// Errors of time running out.
var (
	errConnect = errors.New("no connection in time")
	errHeader  = errors.New("no answer in time")
	errStall   = errors.New("the stream stalled")
)

// Base returns the server's address.
func (c *shared) Base() string { return c.base.String() }

// Close ends the connection once the streams over it have ended. New requests
// fail.
func (c *shared) Close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	c.link.abandon()
}

// begin returns the link for a new request, which is counted as a stream of it.
func (c *shared) begin() (*link, way, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, way{}, fmt.Errorf("%s: the client is closed", c.base)
	}
	c.link.begin()
	return c.link, c.way, nil
}

// answered notes that the server understands how it is spoken to.
func (c *shared) answered(w way) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.spoken = c.spoken || c.way == w
}

// another reports whether a first request, which failed, is to be tried by
// another way, and makes that the one for new requests: plain HTTP where TLS
// was not understood, and HTTP/1.1 where HTTP/2 may not have been. A server that
// is understood once is spoken to in no other way.
func (c *shared) another(l *link, w way, err error) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.spoken || c.closed || c.way != w {
		return false
	}
	var record tls.RecordHeaderError
	var dial *net.OpError
	switch {
	case w.scheme == "https" && c.opts.FallBack && errors.As(err, &record) && string(record.RecordHeader[:]) == "HTTP/":
		c.way = way{scheme: "http"}
	case w.scheme == "http" && !w.old && !errors.Is(err, errConnect) && !(errors.As(err, &dial) && dial.Op == "dial"):
		c.way.old = true
	case w.old:
		c.way.old = false // it was not that
		c.link = c.newLink()
		return false
	default:
		return false
	}
	l.abandon()
	c.link = c.newLink()
	return true
}

// abandon makes new requests connect anew: l's connection let a request down,
// and would keep the next one waiting until a ping finds that it is dead.
func (c *shared) abandon(l *link) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.link == l && !c.closed {
		c.renewLink()
	}
	l.abandon()
}

// Renew makes new requests connect anew, by what TLSNow says. Streams go on.
func (c *shared) Renew() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.closed {
		c.link.abandon()
		c.renewLink()
	}
}

// renewLink makes a new link, by what TLSNow says. mu is held.
func (c *shared) renewLink() {
	if c.opts.TLSNow != nil && c.way.scheme == "https" {
		if t := c.opts.TLSNow(); t != nil {
			c.opts.TLS = t
		}
	}
	c.link = c.newLink()
}

// StatusError is a response that is not a success.
type StatusError struct {
	Method, URL string
	Status      int
	Message     string // the response's body, or what it says
	// Said is the response's body when it is one of the bundle protocol, or nil.
	Said *bundle.Error
	// After is how long the server asks not to be asked again, at most MostAfter; 0: it does not say.
	After time.Duration
}

// MostAfter bounds how long is waited because a server asks for it: readers wait
// as well.
const MostAfter = time.Minute

// Asked returns how long the server from which err is asks not to be asked again, at
// most MostAfter; 0: it does not say.
func Asked(err error) time.Duration {
	if status, ok := errors.AsType[*StatusError](err); ok {
		return status.After
	}
	return 0
}

// Unwrap returns Said.
func (e *StatusError) Unwrap() error {
	if e.Said == nil {
		return nil
	}
	return e.Said
}

func (e *StatusError) Error() string {
	s := fmt.Sprintf("%s %s: %d %s", e.Method, e.URL, e.Status, http.StatusText(e.Status))
	if e.Message != "" {
		s += ": " + e.Message
	}
	return s
}

// Final reports whether the same request would fail again.
func (e *StatusError) Final() bool {
	switch e.Status {
	case http.StatusRequestTimeout, http.StatusTooEarly, http.StatusTooManyRequests:
		return false
	case http.StatusNotImplemented, http.StatusHTTPVersionNotSupported:
		return true
	}
	return e.Status < 500
}

// call is one request.
type call struct {
	method, path string
	query        url.Values
	mediaType    string // of body; empty: there is none
	body         []byte
}

// post sends body as JSON: see do.
func (c *Client) post(ctx context.Context, path string, body any) (*response, error) {
	b, err := json.Marshal(body)
	if err != nil {
		return nil, fmt.Errorf("encode request to %s: %w", path, err)
	}
	return c.do(ctx, call{method: http.MethodPost, path: path, mediaType: "application/json", body: b})
}

// do returns the response to a request, whose status is 2xx. Its
// body must be closed; reading from it fails once StallTimeout passes without a
// byte.
//
// Errors: *StatusError; those of the connection.
func (c *Client) do(ctx context.Context, q call) (*response, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	timer := time.AfterFunc(c.opts.HeaderTimeout, func() { cancel(errHeader) })
	l, u, resp, err := c.roundTrip(ctx, q)
	timer.Stop()
	if err != nil {
		if errors.Is(context.Cause(ctx), errHeader) {
			err = fmt.Errorf("%w (%v)", errHeader, c.opts.HeaderTimeout)
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
	r := c.response(ctx, cancel, l, u, resp.Body)
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
		l, w, err := c.begin()
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

// describe takes what a person should read out of an error's body: the message
// of the bundle protocol's or the registry's JSON, or the text.
func (e *StatusError) describe(body []byte) {
	var said bundle.Error
	var registry struct {
		Errors []struct{ Message string }
	}
	switch {
	case json.Unmarshal(body, &said) == nil && said.Code != "":
		e.Said, e.Message = &said, said.Message
	case json.Unmarshal(body, &registry) == nil && len(registry.Errors) > 0:
		e.Message = registry.Errors[0].Message
	default:
		e.Message = strings.TrimSpace(string(body))
	}
}

// Post sends body as JSON to path, as a request with a small response, which
// it decodes into answer unless that is nil.
//
// Errors: *StatusError; those of the connection.
func (c *Client) Post(ctx context.Context, path string, body, answer any) error {
	r, err := c.post(ctx, path, body)
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

// response is the body of a response.
type response struct {
	client *Client
	link   *link
	url    string
	body   io.ReadCloser
	ctx    context.Context
	cancel context.CancelCauseFunc
	stall  *time.Timer
	most   time.Duration // how long no byte may come
	moved  *atomic.Int64 // bytes read are added to it, when not nil
	once   sync.Once
}

func (r *response) Read(b []byte) (int, error) {
	// The clock runs only while bytes are waited for: a slow disk here is no
	// stall there.
	r.stall.Reset(r.most)
	n, err := r.body.Read(b)
	r.stall.Stop()
	if r.moved != nil {
		r.moved.Add(int64(n))
	}
	if err != nil && !errors.Is(err, io.EOF) {
		if errors.Is(context.Cause(r.ctx), errStall) {
			err = fmt.Errorf("%w: no byte for %v", errStall, r.most)
		}
		err = fmt.Errorf("read from %s: %w", r.url, err)
	}
	return n, err
}

// response returns the body of a response that cancel ends.
func (c *Client) response(ctx context.Context, cancel context.CancelCauseFunc, l *link, u string, body io.ReadCloser) *response {
	r := &response{client: c, link: l, url: u, body: body, cancel: cancel, ctx: ctx, most: c.opts.StallTimeout}
	r.stall = time.AfterFunc(r.most, func() { cancel(errStall) })
	r.stall.Stop()
	return r
}

// Close ends the stream, wherever it is.
func (r *response) Close() error {
	var err error
	r.once.Do(func() {
		r.stall.Stop()
		r.cancel(nil)
		err = r.body.Close()
		r.link.end()
	})
	return err
}

// broken says that the connection cannot be relied on.
func (r *response) broken() { r.client.abandon(r.link) }
