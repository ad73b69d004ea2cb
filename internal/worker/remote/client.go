// Package remote talks to one server: a connection that is kept open and warm, credentials,
// requests with small answers, and answers that are streams.
package remote

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"hydrofoil.dev/foil/internal/kernel"
)

// receiveWindow is how much of a stream may be on its way or unread, in bytes.
const receiveWindow = kernel.FlightBytes

// idleTimeout is how long a connection stays that nobody uses: HTTP/2 pings it all the time. asideTimeout is that of one
// for requests aside.
const (
	idleTimeout  = 15 * time.Minute
	asideTimeout = 5 * time.Second
)

// Options configures a Client. Only Base is needed.
type Options struct {
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
// between requests: plain HTTP without upgrade (h2c by prior knowledge), or TLS. Requests aside have another one, for as
// long as there are any.
// A server that speaks only HTTP/1.1 works as well, with more connections.
type Client struct {
	*shared
	view View
}

// shared is what all views of a client have in common.
type shared struct {
	opts Options
	base *url.URL
	log  *slog.Logger

	dials atomic.Int64            // connections made, but for those of requests aside
	kept  atomic.Pointer[Warming] // of the connection that Keep holds open

	mu     sync.Mutex
	link   *link // for new requests
	side   *link // for new requests aside; nil: there was none yet
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

// New does not connect yet.
func New(opts Options) (*Client, error) {
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
	c.link = c.newLink(false)
	return &Client{shared: c}, nil
}

// newLink makes a link for c.way, which mu guards.
func (c *shared) newLink(aside bool) *link {
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
			if !aside {
				c.dials.Add(1)
			}
			return l.opened(conn), nil
		},
		TLSClientConfig:     c.opts.TLS,
		TLSHandshakeTimeout: c.opts.ConnectTimeout,
		IdleConnTimeout:     idleTimeout,
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
	if aside {
		t.IdleConnTimeout = asideTimeout
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
	// ErrStall is returned, wrapped, by Stream.Read when no byte came for too long.
	ErrStall = errors.New("the stream stalled")
)

// Base returns the server's address.
func (c *shared) Base() string { return c.base.String() }

// StallTimeout returns Options.StallTimeout, or what it means when it is 0.
func (c *shared) StallTimeout() time.Duration { return c.opts.StallTimeout }

// Close ends the connection once the streams over it have ended. New requests
// fail.
func (c *shared) Close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	c.abandonAll()
}

// begin returns the link for a new request, which is counted as a stream of it.
func (c *shared) begin(aside bool) (*link, way, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, way{}, fmt.Errorf("%s: the client is closed", c.base)
	}
	l := c.link
	if aside {
		if c.side == nil {
			c.side = c.newLink(true)
		}
		l = c.side
	}
	l.begin()
	return l, c.way, nil
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
		c.abandonAll()
		return false
	default:
		return false
	}
	c.abandonAll()
	return true
}

// abandonAll makes new requests connect anew, by c.way. mu is held.
func (c *shared) abandonAll() {
	c.link.abandon()
	c.link = c.newLink(false)
	if c.side != nil {
		c.side.abandon()
		c.side = nil
	}
}

// abandon makes new requests connect anew: l's connection let a request down,
// and would keep the next one waiting until a ping finds that it is dead.
func (c *shared) abandon(l *link) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.side == l:
		c.side = nil
	case c.link == l && !c.closed:
		c.renew()
	}
	l.abandon()
}

// Renew makes new requests connect anew, by what TLSNow says. Streams go on.
func (c *shared) Renew() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.closed {
		c.renew()
	}
}

// renew makes new requests connect anew, by what TLSNow says. mu is held.
func (c *shared) renew() {
	if c.opts.TLSNow != nil && c.way.scheme == "https" {
		if t := c.opts.TLSNow(); t != nil {
			c.opts.TLS = t
		}
	}
	c.abandonAll()
}
