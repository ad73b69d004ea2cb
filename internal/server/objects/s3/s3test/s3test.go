// Package s3test runs a store that speaks S3, versitygw on a directory, behind a proxy that counts requests and has them fail.
package s3test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"hydrofoil.dev/foil/internal/server/objects"
	"hydrofoil.dev/foil/internal/server/objects/s3"
)

// Credentials that the store knows.
const (
	AccessKey = "user"
	SecretKey = "secret-of-the-tests"
)

// Fault is what becomes of a request.
type Fault int

// Faults. The zero value is none.
const (
	None     Fault = iota
	SlowDown       // 503, in the words of a store
	Trouble        // 500, in the words of a store
	Reset          // the connection ends before anything is done
	Lost           // what is asked for is done, and the connection ends before the answer
	Cut            // the answer ends in the midst of its body
	Stall          // the answer stops in the midst of its body
	Hang           // there is no answer
	Foreign        // 404, in other words than a store's
	Flip           // a bit of the request's body is another one
	Stale          // a listing is what it was the first time
)

// Count is what was asked for.
type Count struct {
	Requests map[string]int // by s3.Operation
	Sent     int64          // bytes of bodies, to the store
	Received int64          // from the store
}

// Total is how many requests there were.
func (c Count) Total() (n int) {
	for _, k := range c.Requests {
		n += k
	}
	return n
}

func (c Count) String() string {
	return fmt.Sprintf("%v, %d bytes sent, %d received", c.Requests, c.Sent, c.Received)
}

// Server is a store with a proxy before it.
type Server struct {
	t      testing.TB
	dir    string
	creds  string
	proxy  *httptest.Server
	client http.RoundTripper
	quit   chan struct{} // closed when the test ends: nobody hangs any longer

	mu      sync.Mutex
	inject  func(n int, op, key string) Fault // guarded by mu
	n       int                               // guarded by mu: requests since Inject
	count   Count                             // guarded by mu
	lists   map[string][]byte                 // guarded by mu: what listings were the first time, by their URLs
	buckets int                               // guarded by mu
}

// Start runs a store until the test ends. Flags are further ones of versitygw.
func Start(t testing.TB, flags ...string) *Server {
	t.Helper()
	program := os.Getenv("FOIL_TEST_VERSITYGW")
	if program == "" {
		t.Skip("FOIL_TEST_VERSITYGW does not name versitygw, as that of tools/versitygw")
	}
	base, err := os.MkdirTemp("", "s3-") // t.TempDir is too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(base) })
	s := &Server{t: t, dir: filepath.Join(base, "buckets"), creds: filepath.Join(base, "credentials"), quit: make(chan struct{}), lists: map[string][]byte{}}
	s.Reset()
	if err := os.Mkdir(s.dir, 0o700); err != nil {
		t.Fatal(err)
	}
	s.SetCredentials(AccessKey, SecretKey)
	socket, versions := filepath.Join(base, "socket"), filepath.Join(base, "versions")
	if err := os.Mkdir(versions, 0o700); err != nil {
		t.Fatal(err)
	}
	args := append([]string{"--quiet", "--keep-alive", "--access", AccessKey, "--secret", SecretKey, "--port", socket}, flags...)
	cmd := exec.Command(program, append(args, "posix", "--versioning-dir", versions, s.dir)...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		_ = cmd.Wait() // it was killed
		if t.Failed() && out.Len() > 0 {
			t.Logf("versitygw: %s", out.Bytes())
		}
	})
	var d net.Dialer
	for began := time.Now(); ; time.Sleep(5 * time.Millisecond) {
		c, err := d.Dial("unix", socket)
		if err == nil {
			c.Close()
			break
		}
		if time.Since(began) > time.Minute {
			t.Fatalf("versitygw does not listen: %v; it says %s", err, out.Bytes())
		}
	}
	s.client = &http.Transport{
		DialContext:         func(ctx context.Context, _, _ string) (net.Conn, error) { return d.DialContext(ctx, "unix", socket) },
		MaxIdleConnsPerHost: 64, DisableCompression: true,
	}
	s.proxy = httptest.NewServer(s)
	t.Cleanup(func() {
		close(s.quit)
		s.proxy.Close()
		s.client.(*http.Transport).CloseIdleConnections()
	})
	return s
}

// SetCredentials writes the file that locations name.
func (s *Server) SetCredentials(access, secret string) {
	s.t.Helper()
	b := fmt.Appendf(nil, "[default]\naws_access_key_id = %s\naws_secret_access_key = %s\n", access, secret)
	if err := os.WriteFile(s.creds+".new", b, 0o600); err != nil {
		s.t.Fatal(err)
	}
	if err := os.Rename(s.creds+".new", s.creds); err != nil {
		s.t.Fatal(err)
	}
}

// URL is the proxy's.
func (s *Server) URL() string { return s.proxy.URL }

// Location is that of a new, empty bucket.
func (s *Server) Location() s3.Location {
	s.t.Helper()
	s.mu.Lock()
	s.buckets++
	name := fmt.Sprintf("bucket-%d", s.buckets)
	s.mu.Unlock()
	if err := os.Mkdir(filepath.Join(s.dir, name), 0o755); err != nil {
		s.t.Fatal(err)
	}
	return s3.Location{Bucket: name, Prefix: "some/prefix", Endpoint: s.proxy.URL, Credentials: s.creds}
}

// Dir is where the objects of a location are.
func (s *Server) Dir(at s3.Location) string { return filepath.Join(s.dir, at.Bucket, at.Prefix) }

// Open opens a store at a location.
func Open(t testing.TB, at s3.Location) *s3.Bucket {
	t.Helper()
	b, err := s3.Open(at, nil)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

var _ objects.Store = (*s3.Bucket)(nil)

// Inject has fn decide what becomes of each request, with its number, counted from 1 since Inject. A nil fn ends it.
func (s *Server) Inject(fn func(n int, op, key string) Fault) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.inject, s.n = fn, 0
}

// First is for Inject: a fault of the first requests of an operation.
func First(times int, op string, f Fault) func(int, string, string) Fault {
	var mu sync.Mutex
	left := times
	return func(_ int, is, _ string) Fault {
		mu.Lock()
		defer mu.Unlock()
		if is != op || left == 0 {
			return None
		}
		left--
		return f
	}
}

// Reset has Count begin anew.
func (s *Server) Reset() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.count = Count{Requests: map[string]int{}}
}

// Count returns what was asked for since Reset.
func (s *Server) Count() Count {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.count
	c.Requests = maps.Clone(c.Requests)
	return c
}

func (s *Server) begin(op, key string) Fault {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.count.Requests[op]++
	s.n++
	if s.inject == nil {
		return None
	}
	return s.inject(s.n, op, key)
}

// ServeHTTP is the proxy.
func (s *Server) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	op := s3.Operation(req)
	_, key, _ := strings.Cut(strings.TrimPrefix(req.URL.Path, "/"), "/")
	fault := s.begin(op, key)
	body, err := io.ReadAll(req.Body)
	s.mu.Lock()
	s.count.Sent += int64(len(body))
	s.mu.Unlock()
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	switch fault {
	case SlowDown:
		said(w, http.StatusServiceUnavailable, "SlowDown")
		return
	case Trouble:
		said(w, http.StatusInternalServerError, "InternalError")
		return
	case Foreign:
		http.Error(w, "no such page", http.StatusNotFound)
		return
	case Reset:
		panic(http.ErrAbortHandler)
	case Hang:
		s.hang(req)
	case Flip:
		if len(body) > 0 {
			body[len(body)/2] ^= 1
		}
	}
	// What has begun is done, whoever hangs up.
	out, err := http.NewRequestWithContext(context.WithoutCancel(req.Context()), req.Method, "http://store"+req.URL.RequestURI(), bytes.NewReader(body))
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	out.Header, out.Host = req.Header.Clone(), req.Host
	resp, err := s.client.RoundTrip(out)
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	if err != nil || fault == Lost {
		panic(http.ErrAbortHandler)
	}
	if op == "list" {
		answer = s.listing(req.URL.String(), answer, fault)
	}
	maps.Copy(w.Header(), resp.Header)
	if req.Method != http.MethodHead {
		w.Header().Set("Content-Length", fmt.Sprint(len(answer)))
	}
	w.WriteHeader(resp.StatusCode)
	send := answer
	if fault == Cut || fault == Stall {
		send = send[:(len(send)+1)/2]
	}
	n, _ := w.Write(send)
	s.mu.Lock()
	s.count.Received += int64(n)
	s.mu.Unlock()
	if fault == Cut || fault == Stall {
		_ = http.NewResponseController(w).Flush() // it breaks off all the same
	}
	if fault == Stall {
		s.hang(req)
	}
	if fault == Cut {
		panic(http.ErrAbortHandler)
	}
}

// hang waits until the client has given up.
func (s *Server) hang(req *http.Request) {
	select {
	case <-req.Context().Done():
	case <-s.quit:
	}
	panic(http.ErrAbortHandler)
}

func (s *Server) listing(url string, now []byte, fault Fault) []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	first, ok := s.lists[url]
	if !ok {
		s.lists[url] = now
	}
	if ok && fault == Stale {
		return first
	}
	return now
}

func said(w http.ResponseWriter, status int, code string) {
	w.Header().Set("Content-Type", "application/xml")
	w.WriteHeader(status)
	fmt.Fprintf(w, "<?xml version=\"1.0\"?><Error><Code>%s</Code><Message>as the test wants it</Message></Error>", code)
}
