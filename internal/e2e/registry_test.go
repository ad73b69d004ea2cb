package e2e

import (
	"crypto/tls"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/layer/layertest"
	"hydrofoil.dev/foil/internal/worker/api"
)

// front is what stands in front of a server: TLS, and tokens for those who know
// the password. It notes the requests.
type front struct {
	*httptest.Server
	open bool // nobody needs a token

	mu       sync.Mutex
	valid    map[string]bool // tokens
	issued   int
	requests []string // method and path of those that were let through, and how they were answered
	conns    int      // that were made
}

const (
	frontUser, frontSecret = "alice", "s3cret-Pa55"
	frontAuth              = "YWxpY2U6czNjcmV0LVBhNTU=" // of both
)

func newFront(t testing.TB, s *server, open bool) *front {
	t.Helper()
	f := &front{open: open, valid: map[string]bool{}}
	proxy := httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "http", Host: s.addr})
	proxy.FlushInterval = -1
	proxy.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelDebug)
	// Small buffers, so that what is slow is slow from end to end.
	transport := &http.Transport{Protocols: new(http.Protocols), HTTP2: &http.HTTP2Config{MaxReceiveBufferPerStream: 64 << 10}}
	transport.Protocols.SetUnencryptedHTTP2(true)
	t.Cleanup(transport.CloseIdleConnections)
	proxy.Transport = transport
	proxy.ModifyResponse = func(r *http.Response) error {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.requests = append(f.requests, fmt.Sprint(r.Request.Method, " ", r.Request.URL.Path, " ", r.StatusCode))
		return nil
	}
	f.Server = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/token" {
			f.token(w, r)
			return
		}
		f.mu.Lock()
		token, _ := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
		ok := f.open || f.valid[token]
		f.mu.Unlock()
		if !ok {
			w.Header().Set("WWW-Authenticate", fmt.Sprintf(`Bearer realm="%s/token",service="front"`, f.URL))
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		proxy.ServeHTTP(w, r)
	}))
	f.Config.ErrorLog = proxy.ErrorLog
	f.Config.ConnState = func(c net.Conn, state http.ConnState) {
		if state == http.StateNew {
			f.mu.Lock()
			f.conns++
			f.mu.Unlock()
			_ = c.(*tls.Conn).NetConn().(*net.TCPConn).SetWriteBuffer(64 << 10)
		}
	}
	f.EnableHTTP2 = true
	f.StartTLS()
	t.Cleanup(func() {
		f.CloseClientConnections()
		f.Close()
	})
	return f
}

func (f *front) token(w http.ResponseWriter, r *http.Request) {
	_ = r.ParseForm()
	if r.Form.Get("username") != frontUser || r.Form.Get("password") != frontSecret {
		http.Error(w, "no", http.StatusUnauthorized)
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.issued++
	token := fmt.Sprint("t0ken-", f.issued)
	f.valid[token] = true
	_ = json.NewEncoder(w).Encode(map[string]any{"access_token": token, "expires_in": 3600})
}

// expire makes every token invalid.
func (f *front) expire() {
	f.mu.Lock()
	defer f.mu.Unlock()
	clear(f.valid)
}

func (f *front) count(request string) (n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, r := range f.requests {
		if strings.HasPrefix(r, request) {
			n++
		}
	}
	return n
}

// hostsDir is a directory like containerd's certs.d with one registry.
func hostsDir(t testing.TB, f *front, registry, text string) string {
	t.Helper()
	dir := t.TempDir()
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: f.Certificate().Raw})
	for name, b := range map[string][]byte{"ca.pem": ca, registry + "/hosts.toml": []byte(text)} {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// TestRegistryWithCredentials pulls from a server behind TLS and tokens, which
// expire while the pull runs.
func TestRegistryWithCredentials(t *testing.T) {
	s := startServer(t, t.TempDir())
	layer := layertest.Layer{layertest.Dir("data", 0o755)}
	for i := range 120 {
		layer = append(layer, layertest.File(fmt.Sprintf("data/%05d", i), 0o644, noise(100_000)))
	}
	img := newImage(t, ocispec.ImageConfig{}, layer.Gzip(t))
	s.push("app", "1", img)
	f := newFront(t, s, false)
	slow := newLink(t, strings.TrimPrefix(f.URL, "https://"), 768<<10)
	hosts := hostsDir(t, f, "registry.example", fmt.Sprintf("server = \"https://%s\"\nca = \"../ca.pem\"\n", slow.addr))
	docker := filepath.Join(hosts, "config.json")
	if err := os.WriteFile(docker, []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	w := startWorker(t, workerRoot(t), "--hosts-dir", hosts, "--docker-config", docker, "--log-level", "debug")
	const ref = "registry.example/app:1"

	for what, args := range map[string][]string{
		"no credentials":    {"pull", "--root", w.root, ref},
		"wrong credentials": {"pull", "--root", w.root, "--creds", "alice:wr0ng-Pa55", ref},
		"half credentials":  {"pull", "--root", w.root, "--creds", frontSecret, ref},
	} {
		out, errs, code := command(t, args...)
		if code == 0 || !strings.Contains(errs, "--creds") && !strings.Contains(errs, "USER:PASSWORD") {
			t.Errorf("%s: exit code %d: %s", what, code, errs)
		}
		if strings.Contains(out+errs, "Pa55") {
			t.Errorf("%s: printed: %s%s", what, out, errs)
		}
	}

	// docker login, while the daemon runs.
	login, err := json.Marshal(map[string]any{"auths": map[string]any{slow.addr: map[string]string{"auth": frontAuth}}})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(docker, login, 0o600); err != nil {
		t.Fatal(err)
	}
	w.mustPull(ref, api.Mounted)
	f.expire()
	// A promotion needs a token, and so does the request that resumes.
	last := filepath.Join(w.mountOf(ref), "data", "00119")
	if _, err := os.ReadFile(last); err != nil {
		t.Error(err)
	}
	if got := f.count("POST " + bundle.PromotePath + " 204"); got == 0 {
		t.Errorf("no promotion was let through: %q", f.requests)
	}
	f.expire()
	slow.setCut(true)
	slow.setCut(false)
	slow.setRate(0)
	w.mustPull(ref, api.Complete)
	if got := f.count("POST " + bundle.PullPath + " 200"); got < 2 {
		t.Errorf("%d bundles, want one that was resumed", got)
	}
	if diff := differs(t, img, w.mountOf(ref)); diff != "" {
		t.Errorf("the image:\n%s", diff)
	}

	// Credentials of one pull, by another name of the image.
	if err := os.WriteFile(docker, []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	s.push("app", "2", img)
	f.expire()
	t.Setenv("FOIL_CREDS", frontUser+":"+frontSecret)
	if out, errs, code := command(t, "pull", "--root", w.root, "registry.example/app:2"); code != 0 {
		t.Errorf("foil pull with FOIL_CREDS: %s%s", out, errs)
	}
	for _, leak := range []string{frontSecret, frontAuth, "wr0ng", "t0ken"} {
		if strings.Contains(w.log.String(), leak) {
			t.Errorf("the daemon's log has %q", leak)
		}
	}
	if leaks := grepTree(t, w.root, frontSecret, frontAuth, "t0ken"); leaks != "" {
		t.Errorf("a secret is on the worker's disk: %s", leaks)
	}
}

// grepTree names a small file below a directory that holds one of the strings.
func grepTree(t testing.TB, dir string, secrets ...string) (path string) {
	t.Helper()
	err := filepath.WalkDir(dir, func(p string, d os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && d.Name() == "mnt" {
			return filepath.SkipDir
		}
		if !d.Type().IsRegular() || d.Name() == "arena" || d.Name() == "data" {
			return nil
		}
		b, err := os.ReadFile(p)
		for _, s := range secrets {
			if strings.Contains(string(b), s) {
				path = p
			}
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
	return path
}

// A mirror that is no Hydrofoil server, and one that is down, before the server
// that has the image.
func TestRegistryWithMirrors(t *testing.T) {
	s := startServer(t, t.TempDir())
	img := newImage(t, ocispec.ImageConfig{}, layertest.Layer{layertest.File("a", 0o644, noise(1000))}.Gzip(t))
	s.push("app", "1", img)
	f := newFront(t, s, true)
	hosts := hostsDir(t, f, "registry.example", fmt.Sprintf(`
server = %q
ca = "../ca.pem"
[host."http://%s"]
[host."http://%s"]
`, f.URL, freeAddr(t), plainRegistry(t, s)))
	w := startWorker(t, workerRoot(t), "--hosts-dir", hosts)
	w.mustPull("registry.example/app:1", api.Complete)
	if diff := differs(t, img, w.mountOf("registry.example/app:1")); diff != "" {
		t.Errorf("the image:\n%s", diff)
	}
	if _, err := w.pull("registry.example/app:2", api.Complete); err == nil || !strings.Contains(err.Error(), "no such tag") {
		t.Errorf("a tag that nobody has: %v", err)
	}
}
