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
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/layer/layertest"
	"hydrofoil.dev/foil/internal/logtest"
	"hydrofoil.dev/foil/internal/server/serve"
	"hydrofoil.dev/foil/internal/server/upstream"
	"hydrofoil.dev/foil/internal/server/upstream/upstreamtest"
)

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
	b, err := json.Marshal(&bundle.Request{Versions: []int{bundle.Version}, Image: bundle.ImageRequest{
		Repository: "app", Reference: "1", Platform: &ocispec.Platform{OS: "linux", Architecture: "amd64"},
	}})
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
	log := new(logtest.Buffer)
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
