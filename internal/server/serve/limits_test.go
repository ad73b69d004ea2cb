package serve_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/layer/layertest"
	"hydrofoil.dev/foil/internal/logtest"
	"hydrofoil.dev/foil/internal/server/serve"
)

// configure writes the rules with more tables, for a server behind a proxy on this machine.
func (g *guarded) configure(tables string) {
	g.t.Helper()
	writeFile(g.t, g.rules, "trusted-proxies = [\"127.0.0.0/8\"]\n"+rulesOf(fmt.Sprintf("[passwords]\nfile = %q\n%s", g.htpass, tables)))
}

// from is a credential of somebody behind the proxy.
func from(address string, who credential) credential {
	return func(r *http.Request) {
		who(r)
		r.Header.Set("X-Forwarded-For", address)
	}
}

// wantLimited checks an answer of a limit that passes.
func (g *guarded) wantLimited(what string, r reply, message string) {
	g.t.Helper()
	if r.status != http.StatusTooManyRequests || r.header.Get("Retry-After") == "" || !strings.Contains(r.body, message) || !strings.Contains(r.body, "[limits]") {
		g.t.Errorf("%s: %d %v %s, want 429 with %q", what, r.status, r.header, r.body, message)
	}
}

// counter reads a metric.
func (g *guarded) counter(name string) string {
	g.t.Helper()
	for line := range strings.Lines(g.must(call{method: "GET", path: "/metrics"}, 200).body) {
		if value, ok := strings.CutPrefix(line, name+" "); ok {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// Bytes of bodies arrive as they are, over each protocol and in both directions, and not faster than they may.
func TestRate(t *testing.T) {
	g := startGuarded(t, "[limits]\nbytes = \"2M\"\nparallel = 16\n", nil)
	b := []byte(noise(5, 4<<20))
	d := digest.FromBytes(b).String()
	for i, protocol := range []string{"HTTP/1.1", "HTTP/2.0 without TLS"} {
		c := client(protocol)
		user := []string{"pusher", "root"}[i]
		for _, method := range []string{"POST", "GET"} {
			path := "/v2/mine/app/blobs/" + d
			if method == "POST" {
				path = "/v2/mine/app/blobs/uploads/?digest=" + d
			}
			req, err := http.NewRequestWithContext(t.Context(), method, "http://"+g.Addr()+path, bytes.NewReader(b))
			if err != nil {
				t.Fatal(err)
			}
			basic(user)(req)
			began := time.Now()
			res, err := c.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			got, err := io.ReadAll(res.Body)
			res.Body.Close()
			if err != nil || res.StatusCode >= 300 || method == "GET" && !bytes.Equal(got, b) {
				t.Fatalf("%s %s: %s, %d bytes, %v", protocol, method, res.Status, len(got), err)
			}
			// 4 MiB, of which 2 may go at once.
			if took := time.Since(began); took < 900*time.Millisecond {
				t.Errorf("%s %s: %v", protocol, method, took)
			}
		}
		c.CloseIdleConnections()
	}
	if v := g.counter("foil_serve_delayed_seconds_total"); v == "" || v == "0" {
		t.Errorf("delayed seconds: %q", v)
	}
}

// bundleCall asks for a bundle, whose stream waits for a choice if it is to stay.
func bundleCall(t *testing.T, stay bool) call {
	t.Helper()
	b, err := json.Marshal(&bundle.Request{Versions: []int{bundle.Version}, Choose: stay, Image: bundle.ImageRequest{
		Repository: "mine/app", Reference: "1", Platform: &ocispec.Platform{OS: "linux", Architecture: "amd64"}}})
	if err != nil {
		t.Fatal(err)
	}
	return call{"POST", bundle.PullPath, "", b}
}

func TestBundlesAtOnce(t *testing.T) {
	g := startGuarded(t, "", nil)
	g.configure("[limits]\nbundles = 1\n")
	c := bundleCall(t, true)
	pull, err := http.NewRequestWithContext(t.Context(), c.method, "http://"+g.Addr()+c.path, bytes.NewReader(c.body))
	if err != nil {
		t.Fatal(err)
	}
	from("203.0.113.1", basic("pull"))(pull)
	res, err := http.DefaultClient.Do(pull)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if res.StatusCode != 200 {
		t.Fatal(res.Status)
	}
	again := bundleCall(t, false)
	r := g.do(again, from("203.0.113.1", basic("pull")))
	g.wantLimited("a second bundle", r, "too many bundles at once")
	var told bundle.Error
	if err := json.Unmarshal([]byte(r.body), &told); err != nil || told.Code != bundle.CodeUnavailable {
		t.Errorf("a worker reads %+v, %v", told, err)
	}
	for what, who := range map[string]credential{"another address": from("203.0.113.2", basic("pull")), "another subject": from("203.0.113.1", basic("root"))} {
		if r := g.do(again, who); r.status != 200 {
			t.Errorf("%s: %d %s", what, r.status, r.body)
		}
	}
	if r := g.do(call{method: "GET", path: "/v2/mine/app/manifests/1"}, from("203.0.113.1", basic("pull"))); r.status != 200 {
		t.Errorf("something else: %d", r.status)
	}
	if _, err := io.Copy(io.Discard, res.Body); err != nil { // without a choice it goes on after a while
		t.Fatal(err)
	}
	if r := g.do(again, from("203.0.113.1", basic("pull"))); r.status != 200 {
		t.Errorf("when the first has ended: %d %s", r.status, r.body)
	}
	if v := g.counter(`foil_serve_limited_total{limit="bundles"}`); v != "1" {
		t.Errorf("counted %q", v)
	}
}

// Who makes the server work all the time is told to wait, by pulls and by pushes; others are not.
func TestWorkIsBounded(t *testing.T) {
	g := startGuarded(t, "", nil)
	g.configure("[limits]\nwork = \"1s\"\nrequests = 100000\nburst = 100000\n")
	busy := from("203.0.113.1", basic("pusher"))
	ask := bundleCall(t, false)
	var r reply
	for n := 0; r.status != 429; n++ {
		if n > 20_000 {
			t.Fatal("20,000 bundles, and no end")
		}
		if r = g.do(ask, busy); r.status != 200 && r.status != 429 {
			t.Fatalf("%d %s", r.status, r.body)
		}
	}
	g.wantLimited("a bundle", r, "has worked too long for you")
	if r := g.do(ask, from("203.0.113.2", basic("pull"))); r.status != 200 {
		t.Errorf("another client: %d %s", r.status, r.body)
	}
	if r := g.do(call{method: "GET", path: "/v2/mine/app/manifests/1"}, busy); r.status != 200 {
		t.Errorf("a plain pull: %d %s", r.status, r.body)
	}
	// A push is taken, and left to its first pull.
	other := makeImage(t, layertest.Layer{layertest.File("other", 0o755, noise(2, 1000))})
	for _, b := range other.blobs {
		if r := g.do(call{"POST", "/v2/mine/other/blobs/uploads/?digest=" + digest.FromBytes(b).String(), "", b}, busy); r.status != 201 {
			t.Fatalf("%d %s", r.status, r.body)
		}
	}
	if r := g.do(call{"PUT", "/v2/mine/other/manifests/1", ocispec.MediaTypeImageManifest, other.manifest}, busy); r.status != 201 {
		t.Errorf("a push: %d %s", r.status, r.body)
	}
	if !strings.Contains(g.log.String(), "an image is prepared by its first pull") {
		t.Error("the log does not say that it is not prepared")
	}
}

// Uploads that nobody finishes are bounded, for each client, however many it begins at once, and after a restart.
func TestUploadsAreBounded(t *testing.T) {
	g := startGuarded(t, "", nil)
	g.configure("[limits]\nuploads = 3\nupload-bytes = \"1M\"\n")
	begin := call{method: "POST", path: "/v2/mine/app/blobs/uploads/"}
	hostile := from("203.0.113.1", basic("pusher"))
	var mu sync.Mutex
	var at []string
	var refused atomic.Int64
	var all sync.WaitGroup
	for range 30 {
		all.Go(func() {
			r := g.do(begin, hostile)
			if r.status == 202 {
				mu.Lock()
				defer mu.Unlock()
				at = append(at, r.header.Get("Location"))
				return
			}
			refused.Add(1)
			g.wantLimited("one more upload", r, "too many uploads that are not finished")
		})
	}
	all.Wait()
	if len(at) != 3 || refused.Load() != 27 {
		t.Fatalf("%d begun, %d refused, want 3 and 27", len(at), refused.Load())
	}
	for what, who := range map[string]credential{"another address": from("203.0.113.2", basic("pusher")), "another subject": from("203.0.113.1", basic("root"))} {
		if r := g.do(begin, who); r.status != 202 {
			t.Errorf("%s: %d %s", what, r.status, r.body)
		}
	}
	// Their bytes, also of two that grow at once.
	part := []byte(noise(3, 600<<10))
	var kept atomic.Int64
	for _, path := range at[:2] {
		all.Go(func() {
			r := g.do(call{method: "PATCH", path: path, body: part}, hostile)
			if r.status == 202 {
				kept.Add(1)
				return
			}
			g.wantLimited("more bytes", r, "have too many bytes")
		})
	}
	all.Wait()
	if kept.Load() > 1 {
		t.Error("uploads have more bytes than they may")
	}
	for _, path := range at[:2] {
		if r := g.do(call{method: "DELETE", path: path}, hostile); r.status != 204 {
			t.Errorf("cancel: %d %s", r.status, r.body)
		}
	}
	large := []byte(noise(4, 2<<20))
	if r := g.do(call{method: "PATCH", path: at[2], body: large}, hostile); r.status != 413 || !strings.Contains(r.body, "SIZE_INVALID") || !strings.Contains(r.body, "upload-bytes") {
		t.Errorf("one that is too large: %d %s", r.status, r.body)
	}
	if r := g.do(call{method: "GET", path: at[2]}, hostile); r.status != 404 {
		t.Errorf("it is still there: %d", r.status)
	}
	// What is finished does not count.
	for range 5 {
		if r := g.do(call{"POST", "/v2/mine/app/blobs/uploads/?digest=" + digest.FromBytes(part).String(), "", part}, hostile); r.status != 201 {
			t.Fatalf("%d %s", r.status, r.body)
		}
	}
	for range 3 {
		if r := g.do(begin, hostile); r.status != 202 {
			t.Fatalf("%d %s", r.status, r.body)
		}
	}
	if err := g.Close(); err != nil {
		t.Fatal(err)
	}
	g.Server = start(t, g.opts)
	g.wantLimited("after a restart", g.do(begin, hostile), "too many uploads")
}

// A body that trickles is ended; its connection too.
func TestTrickle(t *testing.T) {
	s := start(t, serve.Options{IdleBody: 300 * time.Millisecond})
	b := []byte(noise(6, 1000))
	c, err := net.Dial("tcp", s.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	fmt.Fprintf(c, "POST /v2/r/blobs/uploads/?digest=%s HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n", digest.FromBytes(b))
	ended := make(chan string, 1)
	go func() {
		answer, _ := io.ReadAll(c) // the connection is reset if bytes cross the answer
		ended <- string(answer)
	}()
	// Some bytes all the time, and never idle for long.
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for sent := 0; ; sent++ {
		if sent > 3000 {
			t.Fatal("a minute of trickling, and no end")
		}
		select {
		case answer := <-ended:
			if answer != "" && !strings.Contains(answer, "too little for too long") {
				t.Errorf("%s", answer)
			}
			return
		case <-tick.C:
			if _, err := c.Write([]byte("x")); errors.Is(err, net.ErrClosed) {
				return
			}
		}
	}
}

// Who takes nothing of an answer is cut off, over each protocol: a plain pull as well.
func TestAnswersThatNobodyTakes(t *testing.T) {
	log := new(logtest.Buffer)
	s := start(t, serve.Options{IdleAnswer: 200 * time.Millisecond, Log: slog.New(slog.NewTextHandler(log, nil))})
	b := make([]byte, 64<<20) // more than all buffers on the way
	d := digest.FromBytes(b).String()
	res, err := http.Post("http://"+s.Addr()+"/v2/r/blobs/uploads/?digest="+d, "", bytes.NewReader(b))
	if err != nil {
		t.Fatal(err)
	}
	if res.Body.Close(); res.StatusCode != http.StatusCreated {
		t.Fatal(res.Status)
	}
	for i, protocol := range []string{"HTTP/1.1", "HTTP/2.0 without TLS"} {
		res, err := client(protocol).Get("http://" + s.Addr() + "/v2/r/blobs/" + d)
		if err != nil {
			t.Fatal(err)
		}
		deadline := time.Now().Add(time.Minute)
		for strings.Count(log.String(), "status=aborted") <= i {
			if time.Now().After(deadline) {
				t.Fatalf("%s: the answer goes on: %s", protocol, log.String())
			}
			time.Sleep(10 * time.Millisecond)
		}
		if n, err := io.Copy(io.Discard, res.Body); err == nil || n == int64(len(b)) {
			t.Errorf("%s: %d bytes, %v", protocol, n, err)
		}
		res.Body.Close()
	}
}
