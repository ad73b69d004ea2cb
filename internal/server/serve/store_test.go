package serve_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/layer/layertest"
	"hydrofoil.dev/foil/internal/server/backup"
	"hydrofoil.dev/foil/internal/server/objects/s3/s3test"
	"hydrofoil.dev/foil/internal/server/rebuild"
	"hydrofoil.dev/foil/internal/server/rootdir"
	"hydrofoil.dev/foil/internal/server/serve"
)

// quiet waits until nothing more is asked of the store, and returns what was since the last time.
func quiet(t *testing.T, server *s3test.Server) s3test.Count {
	t.Helper()
	for last, began := -1, time.Now(); ; time.Sleep(700 * time.Millisecond) {
		c := server.Count()
		if c.Total() == last {
			server.Reset()
			return c
		}
		if last = c.Total(); time.Since(began) > 2*time.Minute {
			t.Fatalf("the server goes on asking: %s", c)
		}
	}
}

// What each thing costs in requests to the bucket, and in bytes. docs/operations.md has the figures.
func TestStoreCosts(t *testing.T) {
	server := s3test.Start(t)
	root, location := t.TempDir(), server.Location()
	s, err := serve.Start(context.Background(), serve.Options{Root: root, Listen: "127.0.0.1:0", Store: location.String(), Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	closeServer := sync.OnceFunc(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	defer closeServer()
	quiet(t, server)

	m := makeImage(t, layertest.Layer{layertest.File("a", 0o644, noise(1, 6<<20)), layertest.File("b", 0o644, strings.Repeat("text ", 100_000))}, layertest.Layer{layertest.File("c", 0o644, noise(2, 40<<20))})
	size := func(kind string) (n int64) { // of what rests in the bucket
		err := filepath.WalkDir(filepath.Join(server.Dir(location), kind), func(_ string, e os.DirEntry, err error) error {
			if err == nil && !e.IsDir() {
				info, ierr := e.Info()
				if err = ierr; err == nil {
					n += info.Size()
				}
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	m.push(t, s.Addr())
	if err := m.pull(s.Addr()); err != nil {
		t.Fatal(err)
	}
	c := quiet(t, server)
	all := size("")
	t.Logf("push of 3 blobs, %d bytes of %d, ingest and bundle: %s", size("blobs"), all, c)
	// Blobs and packs are read where they came by, and nothing is written twice.
	if c.Received > 100_000 || c.Sent > all+all/20 || c.Requests["put"]+c.Requests["part"] > 40 {
		t.Errorf("push and ingest: %s", c)
	}

	layer := digest.FromBytes(m.blobs[1])
	blob := "http://" + s.Addr() + "/v2/r/blobs/" + layer.String()
	wantGet := func(what, path string, body []byte, most int) {
		t.Helper()
		server.Reset()
		status, got := get(t, path)
		if status != http.StatusOK || !bytes.Equal(got, body) {
			t.Errorf("%s: %d, %d bytes", what, status, len(got))
		}
		if c := server.Count(); c.Total() > most {
			t.Errorf("%s: %s; want %d requests at most", what, c, most)
		}
	}
	wantGet("a manifest", "http://"+s.Addr()+"/v2/r/manifests/1", m.manifest, 0)
	wantGet("a blob that was pushed lately", blob, m.blobs[1], 0)

	closeServer()
	s = start(t, serve.Options{Root: root, StoreCache: 1 << 30}) // the root knows the bucket
	quiet(t, server)
	blob = "http://" + s.Addr() + "/v2/r/blobs/" + layer.String()
	wantGet("a manifest", "http://"+s.Addr()+"/v2/r/manifests/1", m.manifest, 0)
	wantGet("a blob", blob, m.blobs[1], 1)
	req, err := http.NewRequest("GET", blob, nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Range", "bytes=1000000-1999999")
	server.Reset()
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	got, err := io.ReadAll(res.Body)
	res.Body.Close()
	if err != nil || !bytes.Equal(got, m.blobs[1][1_000_000:2_000_000]) {
		t.Errorf("a range: %s, %d bytes, %v", res.Status, len(got), err)
	}
	if c := server.Count(); c.Total() != 1 || c.Received > 1_100_000 {
		t.Errorf("a range of a blob: %s", c)
	}

	// The first bundle reads the packs in large pieces, and nothing twice; the second one reads nothing.
	if err := m.pull(s.Addr()); err != nil {
		t.Fatal(err)
	}
	c = quiet(t, server)
	packs := size("packs")
	t.Logf("bundle of %d bytes of packs, nothing near: %s", packs, c)
	if c.Total() > 24 || c.Received > packs+packs/20 {
		t.Errorf("a bundle with nothing near: %s", c)
	}
	if err := m.pull(s.Addr()); err != nil {
		t.Fatal(err)
	}
	if c = quiet(t, server); c.Total() > 0 {
		t.Errorf("a bundle with everything near: %s", c)
	}
}

// While the bucket does not answer clients are told to come again; nothing is taken for lost.
func TestStoreIsAway(t *testing.T) {
	server := s3test.Start(t)
	root := t.TempDir()
	s := start(t, serve.Options{Root: root, Store: server.Location().String() + "&timeout=5s", Log: slog.New(slog.DiscardHandler)})
	m := makeImage(t, layertest.Layer{layertest.File("a", 0o644, noise(3, 1<<20))})
	m.push(t, s.Addr())
	if err := m.pull(s.Addr()); err != nil {
		t.Fatal(err)
	}
	quiet(t, server)
	base := "http://" + s.Addr() + "/v2/r/"
	for _, fault := range []s3test.Fault{s3test.SlowDown, s3test.Foreign, s3test.Reset} {
		server.Inject(func(int, string, string) s3test.Fault { return fault })
		if status, _ := get(t, base+"manifests/1"); status != http.StatusOK {
			t.Errorf("a manifest: %d", status)
		}
		res, err := http.Head(base + "blobs/" + digest.FromBytes(m.blobs[0]).String())
		if err != nil {
			t.Fatal(err)
		}
		res.Body.Close()
		if res.StatusCode != http.StatusServiceUnavailable || res.Header.Get("Retry-After") == "" {
			t.Errorf("fault %d: HEAD of a blob: %s, Retry-After %q; want 503", fault, res.Status, res.Header.Get("Retry-After"))
		}
	}
	server.Inject(nil)
	if status, got := get(t, base+"blobs/"+digest.FromBytes(m.blobs[0]).String()); status != http.StatusOK || !bytes.Equal(got, m.blobs[0]) {
		t.Errorf("the blob afterwards: %d, %d bytes", status, len(got))
	}
}

// A bucket belongs to one root; another one takes it when it is told to, with everything; then the first server ends.
func TestBucketIsTaken(t *testing.T) {
	server := s3test.Start(t)
	location := server.Location()
	at := location.String()
	first := t.TempDir()
	s, err := serve.Start(context.Background(), serve.Options{Root: first, Listen: "127.0.0.1:0", Store: at, StoreCheck: 50 * time.Millisecond, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close() //nolint:errcheck // it has ended
	m := makeImage(t, layertest.Layer{layertest.File("a", 0o644, noise(4, 2<<20))})
	m.push(t, s.Addr())
	if err := m.pull(s.Addr()); err != nil {
		t.Fatal(err)
	}
	second := filepath.Join(t.TempDir(), "new")
	if _, err := serve.Start(t.Context(), serve.Options{Root: second, Listen: "127.0.0.1:0", Store: at}); !errors.Is(err, rootdir.ErrClaimed) || !strings.Contains(err.Error(), first) {
		t.Errorf("a second root: %v; want whose it is", err)
	}
	if _, err := rebuild.Run(t.Context(), rebuild.Options{Root: second, Store: at}); !errors.Is(err, rootdir.ErrClaimed) {
		t.Errorf("rebuild of a bucket that is in use: %v", err)
	}
	ended := make(chan error, 1)
	taken := rebuild.Options{Root: second, Store: at, Take: true, TakeWait: time.Hour}
	taking, goOn := context.WithCancel(t.Context())
	waiting := make(chan struct{})
	taken.Progress = func(p rebuild.Progress) {
		if p.Phase == "waiting" {
			close(waiting)
		}
	}
	go func() {
		_, err := rebuild.Run(taking, taken)
		ended <- err
	}()
	<-waiting
	if err := s.Wait(); !errors.Is(err, rootdir.ErrClaimed) {
		t.Errorf("the first server ends with %v", err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	// It has ended: who waits need not wait any longer.
	goOn()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("who waited for the first server: %v", err)
	}
	if _, err := rebuild.Run(t.Context(), rebuild.Options{Root: second}); err != nil {
		t.Fatal(err)
	}
	if _, err := serve.Start(t.Context(), serve.Options{Root: first, Listen: "127.0.0.1:0"}); !errors.Is(err, rootdir.ErrClaimed) {
		t.Errorf("the first root: %v", err)
	}
	now := start(t, serve.Options{Root: second})
	if status, got := get(t, "http://"+now.Addr()+"/v2/r/manifests/1"); status != http.StatusOK || !bytes.Equal(got, m.manifest) {
		t.Errorf("the manifest: %d", status)
	}
	if err := m.pull(now.Addr()); err != nil {
		t.Error(err)
	}

	// A root that keeps its objects itself goes on doing so, and another prefix is another bucket.
	embedded := t.TempDir()
	start(t, serve.Options{Root: embedded}).Close()
	if _, err := serve.Start(t.Context(), serve.Options{Root: embedded, Listen: "127.0.0.1:0", Store: at}); err == nil || !strings.Contains(err.Error(), "another root") {
		t.Errorf("a bucket for a root with objects of its own: %v", err)
	}
	location.Prefix = "other"
	start(t, serve.Options{Root: t.TempDir(), Store: location.String()})
	if _, err := backup.Backup(t.Context(), second, filepath.Join(t.TempDir(), "copy")); !errors.Is(err, rootdir.ErrElsewhere) {
		t.Errorf("a backup: %v", err)
	}
}

// Whatever was answered survives kills of the server, while the bucket fails now and then; what is deleted goes.
func TestStoreKills(t *testing.T) {
	if testing.Short() {
		t.Skip("it takes half a minute")
	}
	server := s3test.Start(t)
	t.Setenv(childStore, server.Location().String())
	root := t.TempDir()
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	faults := []s3test.Fault{s3test.SlowDown, s3test.Reset, s3test.Lost, s3test.Cut, s3test.Trouble, s3test.Flip}
	var mu sync.Mutex
	rng := rand.New(rand.NewPCG(seed, 1))
	clients := make([]*busyClient, 4)
	for i := range clients {
		clients[i] = &busyClient{id: i, rng: rand.New(rand.NewPCG(seed, uint64(i+2))), held: map[string][][]byte{}}
	}
	m := makeImage(t, layertest.Layer{layertest.File("a", 0o644, noise(5, 3<<20))})
	acked, checked := 0, 0
	for round := range 4 {
		base, cmd := child(t, root)
		addr := strings.TrimPrefix(base, "http://")
		for _, c := range clients {
			c.base = base
			checked += c.check(t)
		}
		if round == 0 {
			m.push(t, addr)
		}
		if err := m.pull(addr); err != nil {
			t.Errorf("round %d: %v", round, err)
		}
		server.Inject(func(int, string, string) s3test.Fault {
			mu.Lock()
			defer mu.Unlock()
			if rng.IntN(12) == 0 {
				return faults[rng.IntN(len(faults))]
			}
			return s3test.None
		})
		var wg sync.WaitGroup
		for _, c := range clients {
			wg.Go(func() {
				for range 40 {
					if !c.step() {
						return
					}
				}
			})
		}
		time.Sleep(500*time.Millisecond + time.Duration(round)*700*time.Millisecond)
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = cmd.Wait() // it was killed
		wg.Wait()
		server.Inject(nil)
	}
	s := start(t, serve.Options{Root: root})
	for _, c := range clients {
		c.base = "http://" + s.Addr()
		checked += c.check(t)
		acked += c.acked
		for _, w := range c.wrong {
			t.Errorf("client %d: %s", c.id, w)
		}
	}
	if err := m.pull(s.Addr()); err != nil {
		t.Error(err)
	}
	t.Logf("%d answers, %d compared", acked, checked)
	if acked < 20 {
		t.Errorf("%d answers are too few to show anything", acked)
	}
}

// What nobody needs goes from the bucket.
func TestStoreIsCollected(t *testing.T) {
	server := s3test.Start(t)
	location := server.Location()
	o := onDemand(t.TempDir())
	o.Store = location.String()
	s := start(t, o)
	m := makeImage(t, layertest.Layer{layertest.File("a", 0o644, noise(6, 8<<20))})
	m.push(t, s.Addr())
	if err := m.pull(s.Addr()); err != nil {
		t.Fatal(err)
	}
	quiet(t, server)
	send(t, "DELETE", "http://"+s.Addr()+"/v2/r/manifests/"+digest.FromBytes(m.manifest).String(), "", nil, http.StatusAccepted)
	total := collectAll(t, s.Addr())
	left := int64(0)
	err := filepath.WalkDir(server.Dir(location), func(path string, e os.DirEntry, err error) error {
		if err != nil || e.IsDir() || strings.Contains(path, "/journal/") {
			return err
		}
		info, err := e.Info()
		if err == nil {
			left += info.Size()
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("collection of %d objects: %s", total.Objects, server.Count())
	if left > 100_000 || total.Objects == 0 {
		t.Errorf("%d bytes are left of an image that was deleted; %+v", left, total)
	}
}

// The conformance program against a server on a bucket.
func TestConformanceOnBucket(t *testing.T) {
	program := os.Getenv("FOIL_TEST_CONFORMANCE")
	if program == "" {
		t.Skip("FOIL_TEST_CONFORMANCE does not name the conformance program of the distribution-spec, as that of tools/conformance")
	}
	s := start(t, serve.Options{Store: s3test.Start(t).Location().String()})
	results := t.TempDir()
	cmd := exec.CommandContext(t.Context(), program)
	cmd.Dir = results
	cmd.Env = append(os.Environ(), "OCI_VERSION=1.1", "OCI_REGISTRY="+s.Addr(), "OCI_TLS=disabled", "OCI_RESULTS_DIR="+results)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}

// A server that ends says so while it goes on answering.
func TestDrain(t *testing.T) {
	s, err := serve.Start(t.Context(), serve.Options{Root: t.TempDir(), Listen: "127.0.0.1:0", Drain: time.Hour, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	base := "http://" + s.Addr()
	if status, b := get(t, base+serve.ReadyPath); status != http.StatusOK {
		t.Errorf("before: %d %s", status, b)
	}
	closed := make(chan error, 1)
	go func() { closed <- s.Close() }()
	for {
		if status, b := get(t, base+serve.ReadyPath); status == http.StatusServiceUnavailable {
			if !strings.Contains(string(b), "ends") {
				t.Errorf("it is not ready: %s", b)
			}
			break
		}
	}
	for _, path := range []string{"/healthz", "/v2/"} {
		if status, _ := get(t, base+path); status != http.StatusOK {
			t.Errorf("%s meanwhile: %d", path, status)
		}
	}
	s.EndDrain()
	if err := <-closed; err != nil {
		t.Error(err)
	}
	if err := s.Wait(); err != nil {
		t.Error(err)
	}
}

// Plain clients read blobs from the store themselves, for a while.
func TestStoreRedirects(t *testing.T) {
	server := s3test.Start(t)
	root, location := t.TempDir(), server.Location()
	s := start(t, serve.Options{Root: root, Store: location.String(), StoreRedirect: server.URL(), StoreRedirectFor: 10 * time.Second})
	m := makeImage(t, layertest.Layer{layertest.File("a", 0o644, noise(7, 1<<20))})
	m.push(t, s.Addr())
	if err := m.pull(s.Addr()); err != nil {
		t.Fatal(err)
	}
	quiet(t, server)
	path := "http://" + s.Addr() + "/v2/r/blobs/" + digest.FromBytes(m.blobs[0]).String()
	follow := func(c *http.Client, ranged string) (*http.Response, []byte) {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), "GET", path, nil)
		if err != nil {
			t.Fatal(err)
		}
		if ranged != "" {
			req.Header.Set("Range", ranged)
		}
		res, err := c.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		b, err := io.ReadAll(res.Body)
		if err != nil {
			t.Fatal(err)
		}
		return res, b
	}
	if _, b := follow(http.DefaultClient, ""); !bytes.Equal(b, m.blobs[0]) {
		t.Errorf("a blob by a redirect: %d bytes", len(b))
	}
	if c := server.Count(); c.Requests["head"] != 1 || c.Requests["get"] != 1 || c.Total() != 2 {
		t.Errorf("a blob by a redirect: %s; want a HEAD of the server and a GET of the client", c)
	}
	if res, b := follow(http.DefaultClient, "bytes=1000-1999"); res.StatusCode != http.StatusPartialContent || !bytes.Equal(b, m.blobs[0][1000:2000]) {
		t.Errorf("a range by a redirect: %s, %d bytes", res.Status, len(b))
	}
	if status, b := get(t, "http://"+s.Addr()+"/v2/r/manifests/1"); status != http.StatusOK || !bytes.Equal(b, m.manifest) {
		t.Errorf("a manifest: %d", status)
	}
	stay := &http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	res, _ := follow(stay, "")
	to := res.Header.Get("Location")
	if res.StatusCode != http.StatusTemporaryRedirect || !strings.HasPrefix(to, server.URL()) || !strings.Contains(to, "X-Amz-Expires=10&") || res.Header.Get("Cache-Control") != "no-store" {
		t.Errorf("%s to %q, %v", res.Status, to, res.Header)
	}
	// It is a right to this object alone.
	if status, _ := get(t, strings.Replace(to, "/blobs/", "/packs/", 1)); status != http.StatusForbidden {
		t.Errorf("another object with the same signature: %d", status)
	}
	// What is lost is no redirect.
	if err := os.RemoveAll(filepath.Join(server.Dir(location), "blobs")); err != nil {
		t.Fatal(err)
	}
	if res, _ := follow(stay, ""); res.StatusCode != http.StatusNotFound {
		t.Errorf("a lost blob: %s", res.Status)
	}
	if _, err := serve.Start(t.Context(), serve.Options{Root: t.TempDir(), Listen: "127.0.0.1:0", StoreRedirect: server.URL()}); err == nil || !strings.Contains(err.Error(), "--store") {
		t.Errorf("redirects without a bucket: %v", err)
	}
}
