package remote

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/kernel/kerneltest"
	"hydrofoil.dev/foil/internal/worker/remote/remotetest"
)

func TestClientAddress(t *testing.T) {
	for _, base := range []string{"", "host:5000", "ftp://host", "http://", "http://[::1"} {
		if c, err := New(Options{Base: base}); err == nil {
			t.Errorf("%q was taken as %s", base, c.Base())
		}
	}
}

// countDials counts a client's connections.
func countDials(n *atomic.Int64) func(context.Context, string, string) (net.Conn, error) {
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		n.Add(1)
		return new(net.Dialer).DialContext(ctx, network, address)
	}
}

// h2cServer serves on loopback, without TLS.
func h2cServer(t *testing.T, h http.HandlerFunc) string {
	t.Helper()
	s := httptest.NewUnstartedServer(h)
	s.Config.Protocols = new(http.Protocols)
	s.Config.Protocols.SetUnencryptedHTTP2(true)
	s.Start()
	t.Cleanup(s.Close)
	return s.URL
}

// pipeServer serves in memory, without TLS, until the test ends: for tests whose
// time is that of a bubble, so that a loaded machine is in time for it.
func pipeServer(t *testing.T, h http.HandlerFunc) (dial func(ctx context.Context, network, address string) (net.Conn, error)) {
	t.Helper()
	p := remotetest.NewPipes()
	s := &http.Server{Handler: h, Protocols: new(http.Protocols)}
	s.Protocols.SetUnencryptedHTTP2(true)
	go s.Serve(p)
	t.Cleanup(func() { s.Close() })
	return p.Dial
}

func TestClientOneConnection(t *testing.T) {
	protocol := func(w http.ResponseWriter, r *http.Request) {
		io.Copy(w, r.Body)
		if r.ProtoMajor != 2 {
			t.Errorf("a request came over %s", r.Proto)
		}
	}
	secure := httptest.NewUnstartedServer(http.HandlerFunc(protocol))
	secure.EnableHTTP2 = true
	secure.StartTLS()
	defer secure.Close()
	for name, base := range map[string]string{"plain": h2cServer(t, protocol), "TLS": secure.URL} {
		t.Run(name, func(t *testing.T) {
			var dials atomic.Int64
			opts := Options{Base: base, Dial: countDials(&dials)}
			if name == "TLS" {
				opts.TLS = secure.Client().Transport.(*http.Transport).TLSClientConfig
			}
			c, err := New(opts)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			for range 5 {
				var answer string
				if err := c.Post(t.Context(), "/x", "hello", &answer); err != nil || answer != "hello" {
					t.Errorf("answer %q, %v", answer, err)
				}
			}
			// A stream and small requests beside it.
			r, err := c.Stream(t.Context(), "/x", "stream", 0)
			if err != nil {
				t.Fatal(err)
			}
			if err := c.Post(t.Context(), "/x", "beside", nil); err != nil {
				t.Error(err)
			}
			r.Close()
			// net/http gives a new HTTP/2 connection to the request that dialled it before it
			// shares it, so that a request that follows at once may dial another.
			if n := dials.Load(); n > 2 {
				t.Errorf("%d connections", n)
			}
		})
	}
	remotetest.NoneLeft(t, "worker/remote.")
}

// As much as a stream may hold can be on its way, whatever the host's settings are.
func TestClientReceivesAhead(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c, err := New(Options{Base: "http://" + l.Addr().String()})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	conn, err := c.opts.Dial(t.Context(), "tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	got := kerneltest.SocketOption(t, conn.(*net.TCPConn), unix.SOL_SOCKET, unix.SO_RCVBUF)
	if got < 2*receiveWindow {
		if os.Geteuid() != 0 {
			t.Skip("only root may ask for as much")
		}
		t.Errorf("a buffer of %d bytes for a window of %d", got, receiveWindow)
	}
}

func TestClientUntrusted(t *testing.T) {
	s := httptest.NewTLSServer(http.NotFoundHandler())
	defer s.Close()
	s.Config.ErrorLog = nil
	c, err := New(Options{Base: s.URL, TLS: &tls.Config{}})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	var unknown *tls.CertificateVerificationError
	if err := c.Post(t.Context(), "/x", 1, nil); !errors.As(err, &unknown) {
		t.Errorf("a server with a certificate of its own: %v", err)
	}
}

func TestClientStatus(t *testing.T) {
	for _, tc := range []struct {
		status     int
		body, want string
		final      bool
	}{
		{404, `{"code":"not_found","message":"no tag 7"}`, "404 Not Found: no tag 7", true},
		{403, `{"errors":[{"code":"DENIED","message":"not you"}]}`, "403 Forbidden: not you", true},
		{502, "<html>", "502 Bad Gateway: <html>", false},
		{429, "", "429 Too Many Requests", false},
		{501, "", "501 Not Implemented", true},
		{404, "404 page not found\n", "404 Not Found: 404 page not found", true},
	} {
		base := h2cServer(t, func(w http.ResponseWriter, r *http.Request) {
			w.WriteHeader(tc.status)
			io.WriteString(w, tc.body)
		})
		c, err := New(Options{Base: base})
		if err != nil {
			t.Fatal(err)
		}
		err = c.Post(t.Context(), "/x", 1, nil)
		var status *StatusError
		if !errors.As(err, &status) || status.Final() != tc.final || !strings.HasSuffix(err.Error(), tc.want) {
			t.Errorf("%d: %v, final %v", tc.status, err, status.Final())
		}
		var said *bundle.Error
		if strings.Contains(tc.body, "code\":\"not_found") != errors.As(err, &said) {
			t.Errorf("%d: said %v", tc.status, said)
		}
		c.Close()
	}
	remotetest.NoneLeft(t, "worker/remote.")
}

func TestClientTimeouts(t *testing.T) { synctest.Test(t, testClientTimeouts) }

func testClientTimeouts(t *testing.T) {
	hang := make(chan struct{})
	dial := pipeServer(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/stall" {
			io.WriteString(w, "a few bytes")
			http.NewResponseController(w).Flush()
		}
		select {
		case <-hang:
		case <-r.Context().Done():
		}
	})
	defer close(hang)
	var dials atomic.Int64
	c, err := New(Options{Base: "http://server.test", Dial: func(ctx context.Context, network, address string) (net.Conn, error) {
		dials.Add(1)
		return dial(ctx, network, address)
	}, HeaderTimeout: 500 * time.Millisecond, StallTimeout: 500 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.Post(t.Context(), "/hang", 1, nil); !errors.Is(err, errHeader) {
		t.Errorf("a server that does not answer: %v", err)
	}
	r, err := c.Stream(t.Context(), "/stall", 1, 0)
	if err != nil {
		t.Fatal(err)
	}
	b, err := io.ReadAll(r)
	if string(b) != "a few bytes" || !errors.Is(err, ErrStall) {
		t.Errorf("a stream that stalls: %q, %v", b, err)
	}
	// Not reading is no stall.
	r2, err := c.Stream(t.Context(), "/stall", 1, 0)
	if err != nil {
		t.Fatal(err)
	}
	time.Sleep(700 * time.Millisecond)
	if n, err := r2.Read(make([]byte, 100)); n == 0 || err != nil {
		t.Errorf("a reader that was slow: %d bytes, %v", n, err)
	}
	r.Close()
	r2.Close()
	if n := dials.Load(); n != 2 { // the one that hung was given up
		t.Errorf("%d connections", n)
	}
	dead, err := New(Options{Base: "http://server.test", ConnectTimeout: 20 * time.Millisecond, Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
		<-ctx.Done()
		return nil, ctx.Err()
	}})
	if err != nil {
		t.Fatal(err)
	}
	defer dead.Close()
	if err := dead.Post(t.Context(), "/x", 1, nil); !errors.Is(err, errConnect) {
		t.Errorf("an address that nobody answers at: %v", err)
	}
	c.Close()
	if err := c.Post(t.Context(), "/x", 1, nil); err == nil {
		t.Error("a closed client sent a request")
	}
}

// TestClientCut has a connection go dead without a word, as when a cable is
// pulled: pings find out, and the next request connects anew.
func TestClientCut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dial := pipeServer(t, func(w http.ResponseWriter, r *http.Request) { io.Copy(w, r.Body) })
		var dials atomic.Int64
		var cut atomic.Bool
		c, err := New(Options{Base: "http://server.test", PingInterval: 50 * time.Millisecond, Dial: func(ctx context.Context, network, address string) (net.Conn, error) {
			conn, err := dial(ctx, network, address)
			return &cutConn{Conn: conn, cut: &cut, dials: dials.Add(1)}, err
		}})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if err := c.Post(t.Context(), "/x", 1, nil); err != nil {
			t.Fatal(err)
		}
		cut.Store(true)
		for range 100 {
			if err = c.Post(t.Context(), "/x", 1, nil); err == nil {
				break
			}
		}
		if err != nil || dials.Load() != 2 {
			t.Errorf("after the cut: %v, %d connections", err, dials.Load())
		}
	})
}

// cutConn swallows what is written to the first connection once cut is set.
type cutConn struct {
	net.Conn
	cut   *atomic.Bool
	dials int64
}

func (c *cutConn) Write(b []byte) (int, error) {
	if c.dials == 1 && c.cut.Load() {
		return len(b), nil
	}
	return c.Conn.Write(b)
}

// TestStall: a server that says every 15 seconds that it is at work is waited for; one that says
// nothing for a minute has stalled; and so has one that goes on saying it for longer than Limit allows.
func TestStall(t *testing.T) {
	for name, c := range map[string]struct {
		every, limit time.Duration
		want         error
	}{
		"at work": {15 * time.Second, 0, io.EOF}, "silent": {61 * time.Second, 0, ErrStall},
		"at work, but not for so long": {15 * time.Second, 50 * time.Minute, ErrStall},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				body, to := io.Pipe()
				var server sync.WaitGroup
				defer server.Wait()
				server.Go(func() {
					out := bundle.NewWriter(to)
					for began := time.Now(); time.Since(began) < time.Hour; time.Sleep(c.every) {
						if out.Alive() != nil {
							return
						}
					}
					to.Close()
				})
				client, err := New(Options{Base: "http://server.test"})
				if err != nil {
					t.Fatal(err)
				}
				defer client.Close()
				l, _, err := client.begin(false)
				if err != nil {
					t.Fatal(err)
				}
				ctx, cancel := context.WithCancelCause(t.Context())
				context.AfterFunc(ctx, func() { body.CloseWithError(context.Cause(ctx)) })
				r := client.stream(ctx, cancel, l, "http://server.test", body)
				defer r.Close()
				r.Limit(c.limit)
				if _, err := io.Copy(io.Discard, r); !errors.Is(err, c.want) && !(err == nil && c.want == io.EOF) {
					t.Errorf("got %v, want %v", err, c.want)
				}
			})
		})
	}
}

// What is asked for is bounded, and taken from those who may ask.
func TestAsked(t *testing.T) {
	for _, tc := range []struct {
		status int
		after  string
		want   time.Duration
	}{
		{http.StatusServiceUnavailable, "5", 5 * time.Second},
		{http.StatusTooManyRequests, "86400", MostAfter},
		{http.StatusTooManyRequests, "", 0},
		{http.StatusBadGateway, "5", 0},
		{http.StatusNotFound, "5", 0},
	} {
		srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Retry-After", tc.after)
			w.WriteHeader(tc.status)
		}))
		c, err := New(Options{Base: srv.URL})
		if err != nil {
			t.Fatal(err)
		}
		err = c.Post(t.Context(), bundle.PullPath, nil, nil)
		if got := Asked(fmt.Errorf("pull: %w", err)); got != tc.want {
			t.Errorf("%d, %q: %v, want %v (%v)", tc.status, tc.after, got, tc.want, err)
		}
		c.Close()
		srv.Close()
	}
	remotetest.NoneLeft(t, "worker/remote.")
}
