package bundles_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/format/trace"
	"hydrofoil.dev/foil/internal/server/bundles"
	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/objects"
	"hydrofoil.dev/foil/internal/server/objects/objectstest"
	"hydrofoil.dev/foil/internal/server/planner/plannertest"
	"hydrofoil.dev/foil/internal/server/startup"
)

// server is a bundle server over HTTP/2 without TLS, and a client of it.
type server struct {
	*plannertest.World
	url     string
	client  *http.Client
	made    atomic.Int32 // rootfs asked for
	refuse  atomic.Pointer[error]
	handler *bundles.Handler
	max     startup.Limit
	stop    func()
	// repairs counts calls of Repair, which repairs nothing but what repair does, if it is not nil.
	repairs      atomic.Int32
	repair       func()
	haveSegments int // bundles.Options.HaveSegments
}

func start(t testing.TB, store objects.Store) *server {
	t.Helper()
	s := &server{World: plannertest.New(t, store)}
	s.serve(t)
	return s
}

// serve starts the server, in place of the one that was running.
func (s *server) serve(t testing.TB) {
	t.Helper()
	if s.stop != nil {
		s.stop()
	}
	h := bundles.New(bundles.Options{
		StartupMax:   s.max,
		HaveSegments: s.haveSegments,
		Catalog:      s.Catalog,
		Objects:      s.Objects,
		Log:          slog.New(slog.DiscardHandler),
		Rootfs: func(ctx context.Context, m *bundles.Resolved) (catalog.Rootfs, error) {
			s.made.Add(1)
			if err := s.refuse.Load(); err != nil {
				return catalog.Rootfs{}, *err
			}
			return s.Catalog.Rootfs(ctx, m.ChainID)
		},
		Repair: func(ctx context.Context, m *bundles.Resolved) (catalog.Rootfs, error) {
			s.repairs.Add(1)
			if s.repair != nil {
				s.repair()
			}
			return s.Catalog.Rootfs(ctx, m.ChainID)
		},
	})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	hs := &http.Server{Handler: h, Protocols: new(http.Protocols)}
	hs.Protocols.SetUnencryptedHTTP2(true)
	hs.Protocols.SetHTTP1(true)
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = hs.Serve(l) // ErrServerClosed
	}()
	tr := &http.Transport{Protocols: new(http.Protocols)}
	tr.Protocols.SetUnencryptedHTTP2(true)
	tr.HTTP2 = &http.HTTP2Config{MaxReadFrameSize: 1<<20 - 1} // as the worker has it
	s.stop = sync.OnceFunc(func() {
		tr.CloseIdleConnections()
		hs.Close()
		<-done
		if err := h.Close(); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(s.stop)
	s.handler, s.url, s.client = h, "http://"+l.Addr().String(), &http.Client{Transport: tr}
}

func mustJSON(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return b
}

// image pushes an image of one layer to a repository and returns its manifest.
func (s *server) image(t testing.TB, repo, tag string, files plannertest.Files, config ocispec.ImageConfig) (ocispec.Descriptor, *toc.TOC) {
	t.Helper()
	ctx := context.Background()
	diffID := digest.FromString(fmt.Sprint(tag, len(files)))
	x, _ := s.Rootfs(t, diffID, files)
	layer := plannertest.LayerOf(diffID)
	blob := func(d digest.Digest, b []byte) {
		s.Put(t, catalog.BlobKey(d), b)
		if err := s.Catalog.LinkBlob(ctx, repo, catalog.Blob{Digest: d, Size: int64(len(b))}); err != nil {
			t.Fatal(err)
		}
	}
	blob(layer, []byte("a layer"))
	c := mustJSON(ocispec.Image{
		Platform: ocispec.Platform{OS: "linux", Architecture: "amd64"},
		Config:   config,
		RootFS:   ocispec.RootFS{Type: "layers", DiffIDs: []digest.Digest{diffID}},
	})
	blob(digest.FromBytes(c), c)
	m := ocispec.Manifest{
		Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageManifest,
		Config: ocispec.Descriptor{MediaType: ocispec.MediaTypeImageConfig, Digest: digest.FromBytes(c), Size: int64(len(c))},
		Layers: []ocispec.Descriptor{{MediaType: ocispec.MediaTypeImageLayerGzip, Digest: layer, Size: 7}},
	}
	return s.manifest(t, repo, tag, m.MediaType, m), x
}

func (s *server) manifest(t testing.TB, repo, tag, mediaType string, m any) ocispec.Descriptor {
	t.Helper()
	b := mustJSON(m)
	d := ocispec.Descriptor{MediaType: mediaType, Digest: digest.FromBytes(b), Size: int64(len(b))}
	if err := s.Catalog.PutManifest(context.Background(), repo, catalog.Manifest{Digest: d.Digest, MediaType: mediaType, Bytes: b}, tag); err != nil {
		t.Fatal(err)
	}
	return d
}

func (s *server) post(t testing.TB, ctx context.Context, path string, body any) *http.Response {
	t.Helper()
	b, ok := body.([]byte)
	if !ok {
		b = mustJSON(body)
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.url+path, bytes.NewReader(b))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := s.client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { resp.Body.Close() })
	return resp
}

// pulled is all that one bundle brought.
type pulled struct {
	hello    *bundle.Hello
	image    *bundle.Image
	toc      *toc.TOC
	plan     *bundle.Plan
	order    []uint32
	segments map[segment.ID][]byte // verified
	bytes    int64
	err      error

	startups []*bundle.Startup
	pages    map[trace.Run][]byte // verified, by run
	stored   int                  // bytes of Pages' frames
	heres    []*bundle.Here
}

// pull asks for an image and reads the stream to its end. onFrame is called after
// each frame.
func (s *server) pull(t testing.TB, req *bundle.Request, onFrame func(*pulled)) *pulled {
	t.Helper()
	req.Versions = []int{bundle.Version}
	resp := s.post(t, context.Background(), bundle.PullPath, req)
	if resp.StatusCode != http.StatusOK || resp.ProtoMajor != 2 && s.stop != nil || resp.Header.Get("Content-Type") != bundle.MediaTypeBundle {
		b, _ := io.ReadAll(resp.Body)
		t.Fatalf("%s %s: %s", resp.Proto, resp.Status, b)
	}
	p := &pulled{segments: map[segment.ID][]byte{}, pages: map[trace.Run][]byte{}}
	r := bundle.NewReader(resp.Body, bundle.ReaderOptions{Request: req})
	var ids []segment.ID
	for {
		section, err := r.Next()
		p.bytes = r.Bytes()
		if err != nil {
			if err != io.EOF {
				p.err = err
			}
			_, _ = io.Copy(io.Discard, resp.Body) // so that the connection is free
			resp.Body.Close()
			return p
		}
		switch v := section.(type) {
		case *bundle.Hello:
			p.hello = v
		case *bundle.Image:
			p.image = v
			encoded := v.TOC
			if encoded == nil {
				rootfs, err := s.Catalog.Rootfs(context.Background(), v.ChainID)
				if err != nil {
					t.Fatal(err)
				}
				o, err := s.Objects.Open(context.Background(), rootfs.Key, 0, -1)
				if err != nil {
					t.Fatal(err)
				}
				if encoded, err = io.ReadAll(o); err != nil {
					t.Fatal(err)
				}
				o.Close()
			}
			x, err := v.DecodeTOC(encoded)
			if err != nil {
				t.Fatal(err)
			}
			p.toc = x
			for _, seg := range x.Segments {
				ids = append(ids, seg.ID)
			}
		case *bundle.Startup:
			if err := v.Resolve(p.toc); err != nil {
				t.Fatal(err)
			}
			p.startups = append(p.startups, v)
		case *bundle.Here:
			p.heres = append(p.heres, v)
		case *bundle.Pages:
			x, set := p.toc, p.startups[len(p.startups)-1]
			f := set.Frames[v.Frame]
			raw, err := segment.DecodeFrame(nil, v.Data, int(f.RawLength))
			if err != nil {
				t.Fatal(err)
			}
			p.stored += len(v.Data)
			for i := f.First; i < f.First+f.Count; i++ {
				_, n := set.Runs[i].Range(x.Contents[set.Runs[i].Content].Size)
				if segment.Sum(raw[:n]) != set.Digests[i] {
					t.Fatalf("run %+v of frame %d has other bytes than its digest says", set.Runs[i], v.Frame)
				}
				p.pages[set.Runs[i]] = raw[:n]
				raw = raw[n:]
			}
		case *bundle.Plan:
			p.plan = v
			if err := v.Check(p.toc); err != nil {
				t.Fatal(err)
			}
		case *bundle.Frame:
			f := p.plan.Frames[v.Index]
			raw, err := segment.DecodeFrame(nil, v.Data, int(f.RawLength))
			if err != nil {
				t.Fatal(err)
			}
			for _, n := range p.plan.Segments[f.First : f.First+f.Segments] {
				length := p.toc.Segments[n].Length
				if segment.Sum(raw[:length]) != ids[n] {
					t.Fatalf("frame %d: segment %d has other bytes", v.Index, n)
				}
				p.segments[ids[n]] = raw[:length]
				raw = raw[length:]
			}
			p.order = append(p.order, v.Index)
			if onFrame != nil {
				onFrame(p)
			}
		}
	}
}

// whole reports which segments of x are neither among got nor holes.
func missing(x *toc.TOC, got ...map[segment.ID][]byte) (n int) {
	for _, s := range x.Segments {
		if !s.ID.IsHole() && !slices.ContainsFunc(got, func(m map[segment.ID][]byte) bool { return m[s.ID] != nil }) {
			n++
		}
	}
	return n
}

// text returns n bytes that compress a little and repeat nowhere.
func text(seed uint64, n int) string {
	r := rand.New(rand.NewPCG(seed, 1))
	b := make([]byte, n)
	for i := range b {
		b[i] = "abcdefghijklmnopqrstuvwxyz .,;\n0"[r.IntN(32)]
	}
	return string(b)
}

func version(n uint64) plannertest.Files {
	files := plannertest.Files{
		"/usr/bin/app":   "#!/bin/sh\nexec true\n",
		"/bin/sh":        text(1, 150_000),
		"/var/big":       text(2, 3<<20) + strings.Repeat("\x00", 1<<20),
		"/var/holes":     strings.Repeat("\x00", 5000),
		"/etc/passwd":    "root:x:0:0::/:/bin/sh\n",
		"/etc/link":      "-> passwd",
		"/etc/empty":     "",
		"/usr/bin/other": fmt.Sprintf("version %d", n),
	}
	for i := range 200 {
		seed := uint64(i)
		if i%10 == 0 {
			seed += 1000 * n
		}
		files[fmt.Sprintf("/usr/share/f%d", i)] = text(100+seed, 500+i*37)
	}
	return files
}

func request(repository, reference string) *bundle.Request {
	return &bundle.Request{Image: bundle.ImageRequest{Repository: repository, Reference: reference}}
}

func TestPull(t *testing.T) {
	s := start(t, nil)
	m, x := s.image(t, "redis", "1", version(1), ocispec.ImageConfig{Entrypoint: []string{"/usr/bin/app"}})
	p := s.pull(t, request("redis", "1"), nil)
	if p.err != nil {
		t.Fatal(p.err)
	}
	if n := missing(x, p.segments); n > 0 {
		t.Errorf("%d of %d segments are missing", n, len(x.Segments))
	}
	if p.image.Manifest.Digest != m.Digest || p.bytes > p.plan.MaxBytes+100_000 {
		t.Errorf("%s, %d bytes, at most %d planned", p.image.Manifest.Digest, p.bytes, p.plan.MaxBytes)
	}
	// Without a trace: what the entrypoint needs comes first.
	first := map[segment.ID]bool{}
	for _, f := range p.plan.Frames[:3] {
		for _, n := range p.plan.Segments[f.First : f.First+f.Segments] {
			first[x.Segments[n].ID] = true
		}
	}
	for _, name := range []string{"/usr/bin/app", "/bin/sh"} {
		i, _ := x.Lookup(name)
		if !first[x.SegmentsOf(i)[0].ID] {
			t.Errorf("%s is not in the first three frames", name)
		}
	}
	// The index was kept, and a second pull is the same.
	r, err := s.Catalog.Rootfs(context.Background(), x.ChainID)
	if err != nil || r.Index == "" {
		t.Errorf("rootfs %+v, %v", r, err)
	}
	again := s.pull(t, request("redis", string(m.Digest)), nil)
	if again.err != nil || again.bytes != p.bytes || again.hello.Stream == p.hello.Stream {
		t.Errorf("second pull: %d bytes, want %d, %v", again.bytes, p.bytes, again.err)
	}
}

// Only what is missing is sent, though no layer is shared; and a stream that was
// cut goes on where it ended.
func TestUpdateAndResume(t *testing.T) {
	s := start(t, nil)
	_, old := s.image(t, "redis", "1", version(1), ocispec.ImageConfig{})
	s.image(t, "redis", "2", version(2), ocispec.ImageConfig{})
	fresh := s.pull(t, request("redis", "1"), nil)

	req := request("redis", "2")
	req.Have = []bundle.Have{{ChainID: old.ChainID, TOC: fresh.image.TOCDigest}}
	p := s.pull(t, req, nil)
	if p.err != nil || missing(p.toc, fresh.segments, p.segments) > 0 {
		t.Fatalf("%d segments are missing, %v", missing(p.toc, fresh.segments, p.segments), p.err)
	}
	if n := missing(p.toc, fresh.segments); len(p.segments) != n || p.bytes > fresh.bytes/10 {
		t.Errorf("%d segments were missing, %d sent; %d bytes, fresh %d", n, len(p.segments), p.bytes, fresh.bytes)
	}

	// A rootfs that the server does not know, or knows otherwise, is no reason to
	// send less.
	req.Have = []bundle.Have{{ChainID: old.ChainID, TOC: digest.FromString("x")}, {ChainID: digest.FromString("y"), TOC: digest.FromString("y")}}
	if p := s.pull(t, req, nil); p.err != nil || missing(p.toc, p.segments) > 0 {
		t.Errorf("%v", p.err)
	}

	// Resume: half of the segments are here.
	present := make([]byte, len(old.Segments)/8+1)
	half := map[segment.ID][]byte{}
	for i, seg := range old.Segments {
		if i%2 == 0 {
			present[i/8] |= 1 << (i % 8)
			half[seg.ID] = []byte{1}
		}
	}
	req = request("redis", "1")
	req.Have = []bundle.Have{{ChainID: old.ChainID, TOC: fresh.image.TOCDigest, Present: present}}
	p = s.pull(t, req, nil)
	if p.err != nil || p.image.TOC != nil || missing(old, half, p.segments) > 0 {
		t.Errorf("resumed: %d segments missing, TOC of %d bytes, %v", missing(old, half, p.segments), len(p.image.TOC), p.err)
	}
}

// What a worker says twice is compared once; and beyond the limit nothing is, so that more is sent.
func TestHavesAreBounded(t *testing.T) {
	s := start(t, nil)
	_, old := s.image(t, "redis", "1", version(1), ocispec.ImageConfig{})
	s.image(t, "redis", "2", version(2), ocispec.ImageConfig{})
	_, other := s.image(t, "other", "1", plannertest.Files{"/x": "x"}, ocispec.ImageConfig{})
	first, second := s.pull(t, request("redis", "1"), nil), s.pull(t, request("other", "1"), nil)
	has := bundle.Have{ChainID: old.ChainID, TOC: first.image.TOCDigest}
	tiny := bundle.Have{ChainID: other.ChainID, TOC: second.image.TOCDigest}

	s.haveSegments = len(old.Segments) + 1
	s.serve(t)
	req := request("redis", "2")
	all := s.pull(t, req, nil)
	for what, test := range map[string]struct {
		have []bundle.Have
		less bool
	}{
		"one":                 {[]bundle.Have{has}, true},
		"the same often":      {append(slices.Repeat([]bundle.Have{has}, 4000), tiny), true},
		"behind one":          {[]bundle.Have{tiny, has}, true},
		"behind one too many": {[]bundle.Have{tiny, {ChainID: all.toc.ChainID, TOC: all.image.TOCDigest, Present: []byte{0}}, has}, false},
	} {
		req.Have = test.have
		p := s.pull(t, req, nil)
		if p.err != nil || (len(p.segments) < len(all.segments)) != test.less {
			t.Errorf("%s: %d segments of %d, %v", what, len(p.segments), len(all.segments), p.err)
		}
	}
}

// Of an image of which only the header is wanted nothing is planned.
func TestHeaderOnly(t *testing.T) {
	s := start(t, nil)
	s.image(t, "redis", "1", version(1), ocispec.ImageConfig{})
	req := request("redis", "1")
	req.Image.Header = true
	if p := s.pull(t, req, nil); p.err != nil || p.image == nil || len(p.plan.Frames) != 0 {
		t.Errorf("%+v, %v", p.plan, p.err)
	}
}

func TestIndexAndPlatform(t *testing.T) {
	s := start(t, nil)
	amd, _ := s.image(t, "redis", "amd", plannertest.Files{"/a": "amd64"}, ocispec.ImageConfig{})
	arm, _ := s.image(t, "redis", "arm", plannertest.Files{"/a": "arm64"}, ocispec.ImageConfig{})
	amd.Platform = &ocispec.Platform{OS: "linux", Architecture: "amd64"}
	arm.Platform = &ocispec.Platform{OS: "linux", Architecture: "arm64", Variant: "v8"}
	index := s.manifest(t, "redis", "all", ocispec.MediaTypeImageIndex, ocispec.Index{Manifests: []ocispec.Descriptor{amd, arm}})
	for arch, want := range map[string]digest.Digest{"amd64": amd.Digest, "arm64": arm.Digest} {
		req := request("redis", "all")
		req.Image.Platform = &ocispec.Platform{OS: "linux", Architecture: arch}
		p := s.pull(t, req, nil)
		if p.err != nil || p.image.Manifest.Digest != want || p.image.Chosen.Digest != index.Digest {
			t.Errorf("%s: %v", arch, p.err)
		}
	}
}

// slowStore delays reads of packs after the first few, so that a promotion meets
// a stream that is under way.
type slowStore struct {
	objects.Store
	hold  chan struct{}
	reads atomic.Int32
}

func (s *slowStore) Open(ctx context.Context, key string, offset, length int64) (io.ReadCloser, error) {
	if strings.HasPrefix(key, "packs/") && length > 0 && s.reads.Add(1) > 8 {
		select {
		case <-s.hold:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return s.Store.Open(ctx, key, offset, length)
}

func TestPromote(t *testing.T) {
	slow := &slowStore{Store: objectstest.NewMemory(), hold: make(chan struct{})}
	s := start(t, slow)
	files := plannertest.Files{}
	for i := range 60 {
		files[fmt.Sprintf("/f%02d", i)] = text(uint64(i), 200_000)
	}
	_, x := s.image(t, "r", "1", files, ocispec.ImageConfig{})
	slow.reads.Store(0)
	promoted := false
	p := s.pull(t, request("r", "1"), func(p *pulled) {
		if promoted {
			return
		}
		promoted = true
		last := uint32(len(p.plan.Frames) - 1)
		for _, c := range []struct {
			promotion bundle.Promotion
			want      int
		}{
			{bundle.Promotion{Stream: "guessed", Frames: []uint32{last}}, http.StatusNotFound},
			{bundle.Promotion{Stream: p.hello.Stream, Frames: []uint32{last, last - 1, 1 << 31}}, http.StatusNoContent},
		} {
			if resp := s.post(t, context.Background(), bundle.PromotePath, c.promotion); resp.StatusCode != c.want {
				t.Errorf("promotion: %s, want %d", resp.Status, c.want)
			}
		}
		close(slow.hold)
	})
	if p.err != nil || missing(x, p.segments) > 0 {
		t.Fatalf("%d segments missing, %v", missing(x, p.segments), p.err)
	}
	last := uint32(len(p.plan.Frames) - 1)
	at := slices.Index(p.order, last)
	if at > 20 || p.order[at+1] != last-1 {
		t.Errorf("frame %d came as number %d, the next was %d", last, at, p.order[at+1])
	}
	if resp := s.post(t, context.Background(), bundle.PromotePath, bundle.Promotion{Stream: p.hello.Stream}); resp.StatusCode != http.StatusNotFound {
		t.Errorf("promotion in a stream that has ended: %s", resp.Status)
	}
}

func TestErrors(t *testing.T) {
	s := start(t, nil)
	m, _ := s.image(t, "mine", "1", plannertest.Files{"/a": "a"}, ocispec.ImageConfig{})
	s.manifest(t, "mine", "artifact", ocispec.MediaTypeImageManifest, ocispec.Manifest{Config: ocispec.Descriptor{MediaType: ocispec.MediaTypeEmptyJSON, Digest: m.Digest}})
	s.manifest(t, "mine", "list", ocispec.MediaTypeImageIndex, ocispec.Index{Manifests: []ocispec.Descriptor{
		{Digest: m.Digest, Platform: &ocispec.Platform{OS: "plan9", Architecture: "mips"}}}})
	s.manifest(t, "mine", "text", "text/plain", "hello")

	// The same manifest in a repository that lacks the layer.
	whole, err := s.Catalog.Manifest(context.Background(), "mine", m.Digest)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Catalog.PutManifest(context.Background(), "theirs", whole, "1"); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name   string
		body   any
		status int
		code   string
	}{
		{"no JSON", []byte("hello"), 400, bundle.CodeInvalid},
		{"no versions", &bundle.Request{Image: request("mine", "1").Image}, 400, bundle.CodeInvalid},
		{"two images", []byte(`{"versions":[1],"images":[{"repository":"mine","reference":"1"},{"repository":"mine","reference":"1"}]}`), 400, bundle.CodeInvalid},
		{"no tag", request("mine", "2"), 404, bundle.CodeNotFound},
		{"no repository", request("nobody", "1"), 404, bundle.CodeNotFound},
		{"digest of another repository", request("nobody", string(m.Digest)), 404, bundle.CodeNotFound},
		{"blobs of another repository", request("theirs", "1"), 404, bundle.CodeNotFound},
		{"platform", request("mine", "list"), 404, bundle.CodeNotFound},
		{"artifact", request("mine", "artifact"), 422, bundle.CodeUnsupported},
		{"media type", request("mine", "text"), 422, bundle.CodeUnsupported},
	} {
		t.Run(c.name, func(t *testing.T) {
			if r, ok := c.body.(*bundle.Request); ok && c.name != "no versions" {
				r.Versions = []int{1}
			}
			resp := s.post(t, context.Background(), bundle.PullPath, c.body)
			var e bundle.Error
			if err := json.NewDecoder(resp.Body).Decode(&e); err != nil || resp.StatusCode != c.status || e.Code != c.code || e.Message == "" {
				t.Errorf("%s, %+v, %v", resp.Status, e, err)
			}
		})
	}
	if resp, err := s.client.Get(s.url + bundle.PullPath); err != nil || resp.StatusCode != http.StatusMethodNotAllowed {
		t.Errorf("GET: %v, %v", resp, err)
	}
}

// What goes wrong after the stream has begun is told in the stream.
func TestErrorsInStream(t *testing.T) {
	s := start(t, nil)
	_, x := s.image(t, "r", "1", version(1), ocispec.ImageConfig{})
	pull := func() *bundle.Error {
		t.Helper()
		var e *bundle.Error
		if p := s.pull(t, request("r", "1"), nil); !errors.As(p.err, &e) {
			t.Fatalf("no error section: %v", p.err)
		}
		if e.Ref != "r:1" {
			t.Errorf("about %q", e.Ref)
		}
		return e
	}

	failed := errors.New("disk on fire in /secret/place")
	s.refuse.Store(&failed)
	if e := pull(); e.Code != bundle.CodeInternal || strings.Contains(e.Message, "secret") {
		t.Errorf("an unknown error: %v", e)
	}
	layer := digest.FromString("layer of " + string(digest.FromString(fmt.Sprint("1", len(version(1))))))
	if err := s.Catalog.PutLayer(context.Background(), catalog.Layer{Blob: layer, Refused: "entry ../x leaves the tree"}); err != nil {
		t.Fatal(err)
	}
	if e := pull(); e.Code != bundle.CodeUnsupported || !strings.Contains(e.Message, "../x") || !strings.Contains(e.Message, string(layer)) {
		t.Errorf("a refused layer: %v", e)
	}
	s.refuse.Store(nil)

	// A pack that is gone, while the index still names it.
	if p := s.pull(t, request("r", "1"), nil); p.err != nil {
		t.Fatal(p.err)
	}
	var packs []string
	if err := s.Objects.List(context.Background(), "packs/", func(key string, _ int64) error {
		packs = append(packs, key)
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	for _, key := range packs {
		if err := s.Objects.Delete(context.Background(), key); err != nil {
			t.Fatal(err)
		}
	}
	if e := pull(); e.Code != bundle.CodeCorrupt {
		t.Errorf("a pack that is gone: %v", e)
	}
	if n := s.repairs.Load(); n != 0 {
		t.Errorf("repaired %d times before anything was known", n)
	}
	if e := pull(); e.Code != bundle.CodeCorrupt || s.repairs.Load() != 1 {
		t.Errorf("the pull after it: %v, %d repairs", e, s.repairs.Load())
	}
	r, err := s.Catalog.Rootfs(context.Background(), x.ChainID)
	if err != nil {
		t.Fatal(err)
	}
	s.Put(t, r.Key, []byte("another TOC"))
	if e := pull(); e.Code != bundle.CodeCorrupt || s.repairs.Load() != 2 {
		t.Errorf("a damaged TOC: %v, %d repairs", e, s.repairs.Load())
	}
}

// Clients that stall are cut off: one that does not send its request, and one
// that takes nothing of a stream.
func TestPatience(t *testing.T) {
	w := plannertest.New(t, nil)
	h := bundles.New(bundles.Options{
		Catalog: w.Catalog, Objects: w.Objects, Log: slog.New(slog.DiscardHandler), Patience: 200 * time.Millisecond,
		Rootfs: func(ctx context.Context, m *bundles.Resolved) (catalog.Rootfs, error) {
			return w.Catalog.Rootfs(ctx, m.ChainID)
		},
	})
	defer h.Close()
	s := &server{World: w}
	s.image(t, "r", "1", plannertest.Files{"/large": text(9, 20<<20)}, ocispec.ImageConfig{})
	ended := make(chan string, 4)
	hs := &http.Server{Protocols: new(http.Protocols), Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h.ServeHTTP(w, r)
		ended <- r.Proto
	})}
	hs.Protocols.SetHTTP1(true)
	hs.Protocols.SetUnencryptedHTTP2(true)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	go func() { _ = hs.Serve(l) }() // ErrServerClosed
	defer hs.Close()

	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := fmt.Fprintf(c, "POST %s HTTP/1.1\r\nHost: h\r\nContent-Length: 1000\r\n\r\n{", bundle.PullPath); err != nil {
		t.Fatal(err)
	}
	<-ended
	req := request("r", "1")
	req.Versions = []int{bundle.Version}
	for _, protocol := range []string{"HTTP/1.1", "HTTP/2.0"} {
		tr := &http.Transport{Protocols: new(http.Protocols)}
		tr.Protocols.SetHTTP1(protocol == "HTTP/1.1")
		tr.Protocols.SetUnencryptedHTTP2(protocol == "HTTP/2.0")
		res, err := (&http.Client{Transport: tr}).Post("http://"+l.Addr().String()+bundle.PullPath, bundle.MediaTypeRequest, bytes.NewReader(mustJSON(req)))
		if err != nil {
			t.Fatal(err)
		}
		if got := <-ended; got != protocol { // nothing was read
			t.Errorf("%s ended, want %s", got, protocol)
		}
		if _, err := io.Copy(io.Discard, res.Body); err == nil {
			t.Error("the stream ended as if it were whole")
		}
		res.Body.Close()
		tr.CloseIdleConnections()
	}
}

// TestAlive: while a rootfs is made the worker hears from the server.
func TestAlive(t *testing.T) {
	w := plannertest.New(t, nil)
	heard := make(chan struct{})
	h := bundles.New(bundles.Options{
		Catalog: w.Catalog, Objects: w.Objects, Log: slog.New(slog.DiscardHandler), Alive: time.Millisecond,
		Rootfs: func(ctx context.Context, m *bundles.Resolved) (catalog.Rootfs, error) {
			select {
			case <-heard:
			case <-ctx.Done():
				return catalog.Rootfs{}, ctx.Err()
			}
			return w.Catalog.Rootfs(ctx, m.ChainID)
		},
	})
	s := &server{World: w}
	s.image(t, "r", "1", version(1), ocispec.ImageConfig{})
	hs := httptest.NewServer(h)
	defer func() {
		hs.Close()
		if err := h.Close(); err != nil {
			t.Error(err)
		}
	}()
	req := request("r", "1")
	req.Versions = []int{bundle.Version}
	res, err := hs.Client().Post(hs.URL+bundle.PullPath, bundle.MediaTypeRequest, bytes.NewReader(mustJSON(req)))
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	body := &countReader{r: res.Body, n: 200, reached: heard} // more than Hello takes
	r := bundle.NewReader(body, bundle.ReaderOptions{Request: req})
	for err == nil {
		_, err = r.Next()
	}
	if err != io.EOF {
		t.Errorf("the stream ends with %v", err)
	}
}

// countReader closes reached when n bytes have been read.
type countReader struct {
	r       io.Reader
	n       int
	reached chan struct{}
}

func (c *countReader) Read(b []byte) (int, error) {
	n, err := c.r.Read(b)
	if c.n > 0 {
		if c.n -= n; c.n <= 0 {
			close(c.reached)
		}
	}
	return n, err
}

// A client that goes away ends its stream.
func TestCancel(t *testing.T) {
	slow := &slowStore{Store: objectstest.NewMemory(), hold: make(chan struct{})}
	s := start(t, slow)
	files := plannertest.Files{}
	for i := range 40 {
		files[fmt.Sprintf("/f%02d", i)] = text(uint64(i), 200_000)
	}
	s.image(t, "r", "1", files, ocispec.ImageConfig{})
	ctx, cancel := context.WithCancel(context.Background())
	req := request("r", "1")
	req.Versions = []int{1}
	resp := s.post(t, ctx, bundle.PullPath, req)
	r := bundle.NewReader(resp.Body, bundle.ReaderOptions{Request: req})
	section, err := r.Next()
	if err != nil {
		t.Fatal(err)
	}
	id := section.(*bundle.Hello).Stream
	cancel()
	for s.post(t, context.Background(), bundle.PromotePath, bundle.Promotion{Stream: id}).StatusCode != http.StatusNotFound {
		time.Sleep(time.Millisecond) // the test's own deadline ends this
	}
}

func TestDamagedPick(t *testing.T) {
	s := start(t, nil)
	_, old := s.image(t, "r", "1", version(1), ocispec.ImageConfig{})
	fresh := s.pull(t, request("r", "1"), nil)
	// Ask for one segment of a frame of many, so that it has to be made, and
	// damage that frame.
	present := bytes.Repeat([]byte{0xff}, len(old.Segments)/8+1)
	i, _ := old.Lookup("/usr/share/f7")
	n := old.Contents[old.Inodes[i].Content].First
	present[n/8] &^= 1 << (n % 8)
	place, err := s.Places.Locate(context.Background(), []segment.ID{old.Segments[n].ID})
	if err != nil {
		t.Fatal(err)
	}
	f := place[0].Frame
	o, err := s.Objects.Open(context.Background(), f.Pack, 0, -1)
	if err != nil {
		t.Fatal(err)
	}
	b, err := io.ReadAll(o)
	if err != nil {
		t.Fatal(err)
	}
	o.Close()
	req := request("r", "1")
	req.Have = []bundle.Have{{ChainID: old.ChainID, TOC: fresh.image.TOCDigest, Present: present}}
	if p := s.pull(t, req, nil); p.err != nil || len(p.segments) != 1 || p.segments[old.Segments[n].ID] == nil {
		t.Fatalf("%d segments, %v", len(p.segments), p.err)
	}
	for i := range int64(f.Length) - 1 {
		b[f.Offset+1+i] ^= 0x55
	}
	s.Put(t, f.Pack, b)
	if p := s.pull(t, req, nil); p.err != nil || len(p.segments) != 1 {
		t.Errorf("a frame that was made before: %d segments, %v", len(p.segments), p.err)
	}
	s.serve(t) // forgets it
	var e *bundle.Error
	if p := s.pull(t, req, nil); !errors.As(p.err, &e) || e.Code != bundle.CodeCorrupt {
		t.Errorf("a damaged frame: %v", p.err)
	}
}

// BenchmarkServe sends a bundle of 128 MiB over HTTP/2 on the loopback, and the
// same number of bytes as a plain response, both from a directory.
func BenchmarkServe(b *testing.B) {
	dir, err := objects.OpenDir(b.TempDir())
	if err != nil {
		b.Fatal(err)
	}
	s := start(b, dir)
	files := plannertest.Files{}
	for i := range 1024 {
		files[fmt.Sprintf("/d%d/f%d", i%30, i)] = text(uint64(i), 128<<10)
	}
	s.image(b, "r", "1", files, ocispec.ImageConfig{})
	req := mustJSON(&bundle.Request{Versions: []int{1}, Image: request("r", "1").Image})
	run := func(b *testing.B, get func() *http.Response) {
		before, total := processorTime(b), int64(0)
		for b.Loop() {
			resp := get()
			n, err := io.Copy(io.Discard, resp.Body)
			if err != nil || resp.StatusCode != http.StatusOK {
				b.Fatal(resp.Status, err)
			}
			resp.Body.Close()
			b.SetBytes(n)
			total += n
		}
		// What a busy machine changes least; server and client together.
		b.ReportMetric(float64(total)/1e6/(processorTime(b)-before).Seconds(), "MB/cpu-s")
	}
	b.Run("bundle", func(b *testing.B) {
		run(b, func() *http.Response { return s.post(b, context.Background(), bundle.PullPath, req) })
	})
	b.Run("plain", func(b *testing.B) {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			b.Fatal(err)
		}
		var key string
		if err := dir.List(context.Background(), "packs/", func(k string, size int64) error { key = k; return nil }); err != nil {
			b.Fatal(err)
		}
		hs := &http.Server{Protocols: new(http.Protocols), Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			for range 2 { // as much as the bundle
				o, err := dir.Open(r.Context(), key, 0, -1)
				if err != nil {
					b.Error(err)
					return
				}
				_, _ = io.Copy(w, o)
				o.Close()
			}
		})}
		hs.Protocols.SetUnencryptedHTTP2(true)
		go func() { _ = hs.Serve(l) }()
		defer hs.Close()
		run(b, func() *http.Response {
			resp, err := s.client.Get("http://" + l.Addr().String())
			if err != nil {
				b.Fatal(err)
			}
			return resp
		})
	})
}

func processorTime(b *testing.B) time.Duration {
	var r unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &r); err != nil {
		b.Fatal(err)
	}
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}
