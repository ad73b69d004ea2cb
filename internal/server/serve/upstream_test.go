package serve_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/server/layer/layertest"
	"hydrofoil.dev/foil/internal/server/serve"
	"hydrofoil.dev/foil/internal/server/upstream"
	"hydrofoil.dev/foil/internal/server/upstream/upstreamtest"
)

// pulledBundle is what one bundle brought.
type pulledBundle struct {
	manifest digest.Digest
	segments int // in all TOCs, holes aside
	missing  int // of them
	header   time.Time
	frame    time.Time // the first one
}

// pullBundle asks a server for an image that the client has nothing of, and
// verifies all that comes.
func pullBundle(addr, repository, reference string) (*pulledBundle, error) {
	request := &bundle.Request{Versions: []int{bundle.Version}, Images: []bundle.ImageRequest{{
		Repository: repository, Reference: reference, Platform: &ocispec.Platform{OS: "linux", Architecture: "amd64"},
	}}}
	b, err := json.Marshal(request)
	if err != nil {
		return nil, err
	}
	resp, err := http.Post("http://"+addr+bundle.PullPath, "application/json", bytes.NewReader(b))
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		e := new(bundle.Error)
		if err := json.NewDecoder(resp.Body).Decode(e); err != nil {
			return nil, fmt.Errorf("%s: %w", resp.Status, err)
		}
		return nil, e
	}
	p := new(pulledBundle)
	var ids []segment.ID
	var lengths []uint32
	here := map[segment.ID]bool{}
	var plan *bundle.Plan
	r := bundle.NewReader(resp.Body, bundle.ReaderOptions{Request: request})
	for {
		section, err := r.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return nil, err
		}
		switch v := section.(type) {
		case *bundle.Image:
			p.header = time.Now()
			p.manifest = v.Manifest.Digest
			t, err := v.DecodeTOC(nil)
			if err != nil {
				return nil, err
			}
			for _, s := range t.Segments {
				ids, lengths = append(ids, s.ID), append(lengths, s.Length)
			}
		case *bundle.Plan:
			plan = v
		case *bundle.Frame:
			if p.frame.IsZero() {
				p.frame = time.Now()
			}
			f := plan.Frames[v.Index]
			raw, err := segment.DecodeFrame(nil, v.Data, int(f.RawLength))
			if err != nil {
				return nil, err
			}
			for _, n := range plan.Segments[f.First : f.First+f.Segments] {
				if segment.Sum(raw[:lengths[n]]) != ids[n] {
					return nil, fmt.Errorf("segment %d has other bytes", n)
				}
				here[ids[n]] = true
				raw = raw[lengths[n]:]
			}
		}
	}
	for _, id := range ids {
		if !id.IsHole() {
			p.segments++
			if !here[id] {
				p.missing++
			}
		}
	}
	return p, nil
}

func wantBundle(t *testing.T, addr, repository, reference string, want digest.Digest) {
	t.Helper()
	p, err := pullBundle(addr, repository, reference)
	if err != nil {
		t.Fatalf("bundle of %s:%s: %v", repository, reference, err)
	}
	if p.manifest != want || p.segments == 0 || p.missing > 0 {
		t.Errorf("bundle of %s:%s is %s with %d of %d segments missing, want %s", repository, reference, p.manifest, p.missing, p.segments, want)
	}
}

func noisy(seed uint64, n int) string {
	r := rand.New(rand.NewPCG(seed, 0))
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return string(b)
}

// layers are some whose files are not compressible.
func layers(t *testing.T, seed uint64, sizes ...int) []layertest.Blob {
	var all []layertest.Blob
	for i, n := range sizes {
		all = append(all, layertest.Layer{
			layertest.File(fmt.Sprintf("f%d", i), 0o644, noisy(seed+uint64(i), n)),
		}.Gzip(t))
	}
	return all
}

func TestAccelerator(t *testing.T) {
	up := upstreamtest.Start(t)
	image := up.Image("team/app", "1", layers(t, 1, 300_000, 10, 2_000_000)...)
	index := up.Manifest("team/app", ocispec.MediaTypeImageIndex, ocispec.Index{
		MediaType: ocispec.MediaTypeImageIndex,
		Manifests: []ocispec.Descriptor{{MediaType: image.MediaType, Digest: image.Digest, Size: image.Size,
			Platform: &ocispec.Platform{OS: "linux", Architecture: "amd64"}}},
	}, "multi")
	root := t.TempDir()
	o := serve.Options{Root: root, Upstream: upstream.Options{URL: up.URL + "/team", Pause: time.Millisecond}}
	s := start(t, o)

	// Many workers at once are one download.
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			if p, err := pullBundle(s.Addr(), "app", "1"); err != nil || p.missing > 0 || p.manifest != image.Digest {
				t.Errorf("bundle: %+v, %v", p, err)
			}
		})
	}
	wg.Wait()
	if n := up.Asked("GET blobs"); n != 4 { // with the config
		t.Errorf("%d blobs were downloaded, want 4", n)
	}
	wantBundle(t, s.Addr(), "app", "multi", image.Digest)
	if got := manifestDigest(t, s.Addr(), "app", "multi"); got != index.Digest {
		t.Errorf("the index is %s, want %s", got, index.Digest)
	}

	// The tag moves; the old manifest stays.
	moved := up.Image("team/app", "1", layers(t, 7, 300_000)...)
	wantBundle(t, s.Addr(), "app", "1", moved.Digest)
	wantBundle(t, s.Addr(), "app", image.Digest.String(), image.Digest)

	// A restart while the upstream is down: what was here is served.
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	up.Intercept(func(w http.ResponseWriter, _ *http.Request) bool {
		w.WriteHeader(http.StatusBadGateway)
		return true
	})
	s = start(t, o)
	wantBundle(t, s.Addr(), "app", "1", moved.Digest)
	wantBundle(t, s.Addr(), "app", "multi", image.Digest)
	_, err := pullBundle(s.Addr(), "app", "2")
	told, ok := errors.AsType[*bundle.Error](err)
	if !ok || told.Code != bundle.CodeUnavailable || !strings.Contains(told.Message, "upstream "+up.URL+"/team: manifest app:2: 502 Bad Gateway") {
		t.Errorf("what is not here: %v", err)
	}
	up.Intercept(nil)
	_, err = pullBundle(s.Addr(), "app", "2")
	if told, ok = errors.AsType[*bundle.Error](err); !ok || told.Code != bundle.CodeNotFound || !strings.Contains(told.Message, "push it to the upstream") {
		t.Errorf("what is nowhere: %v", err)
	}
}

// When the upstream wants fewer requests, workers and plain clients are told for how
// long; what it asks for beyond what anybody waits for included.
func TestBusyUpstream(t *testing.T) {
	up := upstreamtest.Start(t)
	up.Intercept(func(w http.ResponseWriter, _ *http.Request) bool {
		w.Header().Set("Retry-After", "3600")
		upstreamtest.Fail(w, http.StatusTooManyRequests, "TOOMANYREQUESTS", "pull rate limit")
		return true
	})
	s := start(t, serve.Options{Root: t.TempDir(), Upstream: upstream.Options{URL: up.URL, Pause: time.Millisecond}})
	plain, err := http.Get("http://" + s.Addr() + "/v2/app/manifests/1")
	if err != nil {
		t.Fatal(err)
	}
	defer plain.Body.Close()
	b, err := json.Marshal(&bundle.Request{Versions: []int{bundle.Version}, Images: []bundle.ImageRequest{{
		Repository: "app", Reference: "1", Platform: &ocispec.Platform{OS: "linux", Architecture: "amd64"},
	}}})
	if err != nil {
		t.Fatal(err)
	}
	worker, err := http.Post("http://"+s.Addr()+bundle.PullPath, "application/json", bytes.NewReader(b))
	if err != nil {
		t.Fatal(err)
	}
	defer worker.Body.Close()
	for resp, status := range map[*http.Response]int{plain: http.StatusTooManyRequests, worker: http.StatusServiceUnavailable} {
		if after := resp.Header.Get("Retry-After"); resp.StatusCode != status || after != "3600" {
			t.Errorf("%s, Retry-After %q; want %d and 3600", resp.Status, after, status)
		}
	}
	if n := up.Asked("GET manifests"); n != 2 {
		t.Errorf("the upstream was asked %d times, want 2", n)
	}
}

// The upstream's certificate and what vouches for it are renewed while the accelerator
// runs.
func TestUpstreamRenewsItsCertificate(t *testing.T) {
	dir := t.TempDir()
	cert, key := filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	certificate(t, cert, key, 1)
	up := start(t, serve.Options{TLSCert: cert, TLSKey: key})
	s := start(t, serve.Options{Root: t.TempDir(), Upstream: upstream.Options{URL: "https://" + up.Addr(), CA: cert, Pause: time.Millisecond}})
	certificate(t, cert, key, 2) // before a connection is there
	resp, err := http.Get("http://" + s.Addr() + "/v2/app/manifests/1")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusNotFound {
		t.Errorf("%s after the certificate was renewed, want 404: nothing has been pushed", resp.Status)
	}
}

// Ingest reads a layer while it is downloaded: packs are written before its last
// byte has come, and the other layers come meanwhile.
func TestIngestStreams(t *testing.T) {
	up := upstreamtest.Start(t)
	all := layers(t, 1, 6<<20, 100_000)
	image := up.Image("app", "1", all...)
	root := t.TempDir()
	var second sync.WaitGroup
	second.Add(1)
	up.Intercept(func(w http.ResponseWriter, req *http.Request) bool {
		if req.Method != "GET" {
			return false
		}
		switch {
		case strings.HasSuffix(req.URL.Path, all[1].Digest.String()):
			second.Done()
		case strings.HasSuffix(req.URL.Path, all[0].Digest.String()):
			b := all[0].Bytes
			w.Header().Set("Content-Length", strconv.Itoa(len(b)))
			_, _ = w.Write(b[:5<<20])
			_ = http.NewResponseController(w).Flush()
			second.Wait()
			// A pack under way is a file without a name below objects.
			for written := int64(0); written < 1<<20 && req.Context().Err() == nil; time.Sleep(time.Millisecond) {
				written = 0
				_ = filepath.WalkDir(filepath.Join(root, "objects", ".tmp"), func(_ string, d fs.DirEntry, err error) error {
					if err == nil && !d.IsDir() {
						if info, err := d.Info(); err == nil {
							written += info.Size()
						}
					}
					return nil
				})
			}
			_, _ = w.Write(b[5<<20:])
			return true
		}
		return false
	})
	s := start(t, serve.Options{Root: root, Upstream: upstream.Options{URL: up.URL}})
	wantBundle(t, s.Addr(), "app", "1", image.Digest)
}

// A layer with another digest than its manifest says is served to nobody, and
// nothing of it stays.
func TestWrongLayerOfUpstream(t *testing.T) {
	up := upstreamtest.Start(t)
	all := layers(t, 1, 3<<20)
	image := up.Image("app", "1", all...)
	up.Intercept(func(w http.ResponseWriter, req *http.Request) bool {
		if req.Method != "GET" || !strings.HasSuffix(req.URL.Path, all[0].Digest.String()) {
			return false
		}
		b := bytes.Clone(all[0].Bytes)
		b[len(b)-1] ^= 1 // after the tar stream: in the checksum of gzip
		w.Header().Set("Content-Length", strconv.Itoa(len(b)))
		_, _ = w.Write(b)
		return true
	})
	root := t.TempDir()
	s := start(t, serve.Options{Root: root, Upstream: upstream.Options{URL: up.URL, Pause: time.Millisecond}})
	p, err := pullBundle(s.Addr(), "app", "1")
	if told, ok := errors.AsType[*bundle.Error](err); !ok || !strings.Contains(told.Message, "blob app@"+all[0].Digest.String()+": its bytes have the digest") {
		t.Errorf("the bundle: %+v, %v", p, err)
	}
	for _, dir := range []string{"objects/packs", "objects/.tmp", "objects/entries", "fetching"} {
		_ = filepath.WalkDir(filepath.Join(root, dir), func(path string, d fs.DirEntry, err error) error {
			if err == nil && !d.IsDir() {
				t.Errorf("%s is left", path)
			}
			return nil
		})
	}
	up.Intercept(nil)
	wantBundle(t, s.Addr(), "app", "1", image.Digest)
}

// Blobs and packs that are lost or damaged here come from the upstream again.
func TestDamageIsFetchedAgain(t *testing.T) {
	up := upstreamtest.Start(t)
	all := layers(t, 1, 400_000, 100_000)
	image := up.Image("app", "1", all...)
	root := t.TempDir()
	s := start(t, serve.Options{Root: root, Upstream: upstream.Options{URL: up.URL}})
	wantBundle(t, s.Addr(), "app", "1", image.Digest)
	object := func(d digest.Digest) string {
		return filepath.Join(root, "objects", "blobs", "sha256", d.Encoded()[:2], d.Encoded())
	}
	if err := os.Remove(object(all[0].Digest)); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(object(all[1].Digest), bytes.Repeat([]byte("x"), len(all[1].Bytes)), 0o600); err != nil {
		t.Fatal(err)
	}
	err := filepath.WalkDir(filepath.Join(root, "objects", "packs"), func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			err = os.Remove(path)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	// The pull that meets the damage may fail; those after it do not.
	_, _ = pullBundle(s.Addr(), "app", "1")
	wantBundle(t, s.Addr(), "app", "1", image.Digest)
	for _, l := range all {
		send(t, "GET", "http://"+s.Addr()+"/v2/app/blobs/"+l.Digest.String(), "", nil, http.StatusOK)
		if b, err := os.ReadFile(object(l.Digest)); err != nil || !bytes.Equal(b, l.Bytes) {
			t.Errorf("the object of %s: %v", l.Digest, err)
		}
	}
}

// An accelerator that is killed while it downloads goes on where it was, and what
// a pull was given is there after the next kill.
func TestAcceleratorKilled(t *testing.T) {
	up := upstreamtest.Start(t)
	all := layers(t, 1, 1<<20, 200_000)
	blob := all[0]
	image := up.Image("app", "1", all...)
	var mu sync.Mutex
	var ranges []string
	stop := 0 // bytes of the blob that come before nothing comes any more; guarded by mu
	up.Intercept(func(w http.ResponseWriter, req *http.Request) bool {
		if req.Method != "GET" || !strings.HasSuffix(req.URL.Path, blob.Digest.String()) {
			return false
		}
		mu.Lock()
		defer mu.Unlock()
		ranges = append(ranges, req.Header.Get("Range"))
		if stop == 0 {
			return false
		}
		from := 0
		if r := req.Header.Get("Range"); r != "" {
			if _, err := fmt.Sscanf(r, "bytes=%d-", &from); err != nil {
				t.Error(err)
			}
			w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", from, len(blob.Bytes)-1, len(blob.Bytes)))
		}
		w.Header().Set("Content-Length", strconv.Itoa(len(blob.Bytes)-from))
		if from > 0 {
			w.WriteHeader(http.StatusPartialContent)
		}
		_, _ = w.Write(blob.Bytes[from:max(from, stop)])
		_ = http.NewResponseController(w).Flush()
		mu.Unlock()
		<-req.Context().Done()
		mu.Lock()
		return true
	})
	t.Setenv(childUpstream, up.URL)
	root := t.TempDir()
	part := filepath.Join(root, "fetching", strings.Replace(blob.Digest.String(), ":", "-", 1))
	for _, n := range []int{100_000, 100_001, 900_000} {
		mu.Lock()
		stop = n
		mu.Unlock()
		base, cmd := child(t, root)
		failed := make(chan error, 1)
		go func() {
			_, err := pullBundle(strings.TrimPrefix(base, "http://"), "app", "1")
			failed <- err
		}()
		for {
			if info, err := os.Stat(part); err == nil && info.Size() >= int64(n) {
				break
			}
			time.Sleep(time.Millisecond)
		}
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = cmd.Wait()
		if err := <-failed; err == nil {
			t.Error("a pull ended though the layer did not")
		}
	}
	mu.Lock()
	stop = 0
	mu.Unlock()
	base, cmd := child(t, root)
	wantBundle(t, strings.TrimPrefix(base, "http://"), "app", "1", image.Digest)
	mu.Lock()
	if got := strings.Join(ranges, ","); got != ",bytes=100000-,bytes=100001-,bytes=900000-" {
		t.Errorf("ranges asked for: %q", got)
	}
	mu.Unlock()
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	up.Intercept(func(w http.ResponseWriter, _ *http.Request) bool {
		w.WriteHeader(http.StatusBadGateway)
		return true
	})
	base, _ = child(t, root)
	wantBundle(t, strings.TrimPrefix(base, "http://"), "app", "1", image.Digest)
	send(t, "GET", base+"/v2/app/blobs/"+blob.Digest.String(), "", nil, http.StatusOK)
}

// What was pushed to the upstream is here before anybody asks.
func TestWebhook(t *testing.T) {
	up := upstreamtest.Start(t)
	image := up.Image("app", "1", layers(t, 1, 100_000)...)
	log := new(logBuffer)
	s := start(t, serve.Options{
		Upstream: upstream.Options{URL: up.URL, Pause: time.Millisecond},
		Log:      slog.New(slog.NewTextHandler(io.MultiWriter(log, t.Output()), nil)),
	})
	hook := "http://" + s.Addr() + upstream.WebhookPath
	send(t, "POST", hook, "", []byte("no JSON"), http.StatusBadRequest)
	send(t, "POST", hook, "", fmt.Appendf(nil,
		`{"events":[{"action":"push","target":{"mediaType":%q,"digest":%q,"repository":"app","tag":"1"}}]}`,
		image.MediaType, image.Digest), http.StatusAccepted)
	for !strings.Contains(log.String(), "msg=prepared repository=app manifest="+image.Digest.String()+" tag=1 ") {
		time.Sleep(time.Millisecond)
	}
	up.Intercept(func(w http.ResponseWriter, _ *http.Request) bool {
		w.WriteHeader(http.StatusBadGateway)
		return true
	})
	wantBundle(t, s.Addr(), "app", "1", image.Digest)
}

func TestRootOfAnAccelerator(t *testing.T) {
	root, pushedTo := t.TempDir(), t.TempDir()
	fails := func(o serve.Options, says string) {
		t.Helper()
		o.Listen = "127.0.0.1:0"
		s, err := serve.Start(t.Context(), o)
		if err == nil {
			s.Close()
		}
		if err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%+v: %v, want %s", o, err, says)
		}
	}
	one := upstream.Options{URL: "http://127.0.0.1:1"}
	if err := start(t, serve.Options{Root: root, Upstream: one}).Close(); err != nil {
		t.Fatal(err)
	}
	fails(serve.Options{Root: root}, "accelerator of http://127.0.0.1:1")
	fails(serve.Options{Root: root, Upstream: upstream.Options{URL: "http://127.0.0.1:2"}}, "name another one")
	fails(serve.Options{Root: t.TempDir(), Upstream: upstream.Options{URL: "nowhere"}}, "want https://HOST")
	if err := start(t, serve.Options{Root: root, Upstream: one}).Close(); err != nil {
		t.Fatal(err)
	}
	s := start(t, serve.Options{Root: pushedTo})
	send(t, "POST", "http://"+s.Addr()+"/v2/r/blobs/uploads/?digest="+digest.FromString("x").String(), "", []byte("x"), http.StatusCreated)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	fails(serve.Options{Root: pushedTo, Upstream: one}, "a registry that was pushed to")
}

// logBuffer is a log that is read while it is written.
type logBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// startRegistry runs a registry that others made, over an empty directory, which
// notifies a server of pushes. It returns its address and what ends it.
func startRegistry(t *testing.T, program, addr, dir, hook string) (stop func()) {
	t.Helper()
	config := filepath.Join(dir, "config.yml")
	content := fmt.Sprintf(`version: 0.1
log: {level: warn}
storage: {filesystem: {rootdirectory: %s}}
http: {addr: %s}
notifications:
  endpoints:
    - {name: accelerator, url: %s, timeout: 5s, threshold: 5, backoff: 100ms}
`, filepath.Join(dir, "data"), addr, hook)
	if err := os.WriteFile(config, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(program, "serve", config)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	cmd.Env = append(os.Environ(), "OTEL_TRACES_EXPORTER=none")
	var log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &log, &log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = cmd.Wait() // it is killed
	}()
	stop = sync.OnceFunc(func() {
		_ = cmd.Process.Kill()
		<-ended
		if t.Failed() {
			t.Logf("log of %s:\n%s", program, clip(log.Bytes()))
		}
	})
	t.Cleanup(stop)
	for {
		select {
		case <-ended:
			t.Fatalf("%s ended: %s", program, log.Bytes())
		default:
		}
		if resp, err := http.Get("http://" + addr + "/v2/"); err == nil {
			resp.Body.Close()
			return stop
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// The accelerator of real registries: Debian's docker-registry, which is
// distribution 2.8, and the one that FOIL_TEST_REGISTRY names, for instance
// distribution 3.
func TestRealUpstreams(t *testing.T) {
	needProgram(t, "skopeo")
	for name, program := range map[string]string{"docker-registry": "docker-registry", "FOIL_TEST_REGISTRY": os.Getenv("FOIL_TEST_REGISTRY")} {
		t.Run(name, func(t *testing.T) {
			if program == "" {
				t.Skip("FOIL_TEST_REGISTRY does not name a registry program")
			}
			needProgram(t, program)
			var l net.ListenConfig
			free, err := l.Listen(t.Context(), "tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			addr := free.Addr().String()
			free.Close()
			dir, log := t.TempDir(), new(logBuffer)
			s := start(t, serve.Options{
				Upstream: upstream.Options{URL: "http://" + addr},
				Log:      slog.New(slog.NewTextHandler(io.MultiWriter(log, t.Output()), nil)),
			})
			stop := startRegistry(t, program, addr, dir, "http://"+s.Addr()+upstream.WebhookPath)

			// Push to the upstream; plainly and as a bundle from the accelerator.
			image := filepath.Join(dir, "image")
			want := layout(t, image)
			push := func(tag string) {
				t.Helper()
				command(t, "skopeo", "copy", "--dest-tls-verify=false", "oci:"+image+":latest", "docker://"+addr+"/team/app:"+tag)
			}
			push("1")
			to := filepath.Join(dir, "pulled")
			command(t, "skopeo", "copy", "--src-tls-verify=false", "--preserve-digests", "docker://"+s.Addr()+"/team/app:1", "dir:"+to)
			if b, err := os.ReadFile(filepath.Join(to, "manifest.json")); err != nil || digest.FromBytes(b) != want {
				t.Errorf("pulled %s, %v, want %s", digest.FromBytes(b), err, want)
			}
			wantBundle(t, s.Addr(), "team/app", "1", want)
			if out := command(t, "skopeo", "list-tags", "--tls-verify=false", "docker://"+s.Addr()+"/team/app"); !strings.Contains(out, `"1"`) {
				t.Errorf("tags: %s", out)
			}
			out, err := exec.CommandContext(t.Context(), "skopeo", "copy", "--dest-tls-verify=false", "oci:"+image+":latest", "docker://"+s.Addr()+"/team/new:1").CombinedOutput()
			if err == nil || !strings.Contains(string(out), "accelerator of http://"+addr) {
				t.Errorf("a push to the accelerator: %v %s", err, out)
			}

			// The tag moves. What was pushed is here before anybody asks: also
			// under a tag that the accelerator hears of by the webhook only.
			image = filepath.Join(dir, "other")
			moved := layout(t, image, "other")
			push("1")
			wantBundle(t, s.Addr(), "team/app", "1", moved)
			push("2")
			for !strings.Contains(log.String(), "msg=prepared repository=team/app manifest="+moved.String()+" tag=2 ") {
				time.Sleep(10 * time.Millisecond)
			}
			stop()
			wantBundle(t, s.Addr(), "team/app", "1", moved)
			wantBundle(t, s.Addr(), "team/app", "2", moved)
			wantBundle(t, s.Addr(), "team/app", want.String(), want)
			command(t, "skopeo", "copy", "--src-tls-verify=false", "--preserve-digests", "docker://"+s.Addr()+"/team/app@"+want.String(), "dir:"+to)
		})
	}
}
