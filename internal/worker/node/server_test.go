package node

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/identity"
	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
)

// files are an image's files by name, in its root directory.
type files map[string]string

// blob returns n bytes that seed decides.
func blob(seed uint64, n int) string {
	r := rand.New(rand.NewPCG(seed, 1))
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(r.IntN(64))
	}
	return string(b)
}

// some returns count files of some size each, whose bytes the seeds from first
// on decide: equal seeds and sizes, equal bytes.
func some(first uint64, count, size int) files {
	f := make(files)
	for i := range count {
		seed := first + uint64(i)
		f[fmt.Sprintf("f%03d-%03d", first, i)] = blob(seed, size+int(seed)-1)
	}
	return f
}

// fakeImage is an image on the fake server.
type fakeImage struct {
	bundle.Image
	toc   *toc.TOC
	data  map[segment.ID][]byte
	files files
}

func newFakeImage(t testing.TB, f files) *fakeImage {
	t.Helper()
	m := &fakeImage{data: make(map[segment.ID][]byte), files: f}
	names := make([]string, 0, len(f))
	all := digest.Canonical.Hash()
	for name := range f {
		names = append(names, name)
	}
	slices.Sort(names)
	root := &toc.File{Mode: unix.S_IFDIR | 0o755, Children: map[string]*toc.File{}}
	sp := segment.NewSplitter(nil)
	for _, name := range names {
		fmt.Fprintf(all, "%s=%s", name, f[name])
		file := &toc.File{Mode: unix.S_IFREG | 0o644}
		sp.Reset(strings.NewReader(f[name]))
		c := &toc.Bytes{}
		for {
			p, err := sp.Next()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			c.Segments = append(c.Segments, toc.Segment{ID: p.ID, Offset: p.Offset, Length: p.Length})
			m.data[p.ID] = slices.Clone(p.Bytes)
		}
		if c.ID, c.Size = sp.Content(); c.Size > 0 {
			file.Content = c
		}
		root.Children[name] = file
	}
	diff := digest.NewDigest(digest.Canonical, all)
	m.ChainID = identity.ChainID([]digest.Digest{diff})
	var err error
	if m.toc, err = toc.Build(m.ChainID, root); err != nil {
		t.Fatal(err)
	}
	if m.TOC, err = toc.Encode(m.toc); err != nil {
		t.Fatal(err)
	}
	m.TOCDigest, m.Segments = toc.Digest(m.TOC), uint32(len(m.toc.Segments))
	m.Config = jsonBlob(t, ocispec.MediaTypeImageConfig, ocispec.Image{RootFS: ocispec.RootFS{Type: "layers", DiffIDs: []digest.Digest{diff}}})
	m.Manifest = jsonBlob(t, ocispec.MediaTypeImageManifest, ocispec.Manifest{
		Versioned: specs.Versioned{SchemaVersion: 2},
		Config:    ocispec.Descriptor{Digest: m.Config.Digest},
		Layers:    []ocispec.Descriptor{{Digest: diff}},
	})
	return m
}

func jsonBlob(t testing.TB, mediaType string, v any) bundle.Blob {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return bundle.Blob{Digest: digest.FromBytes(b), MediaType: mediaType, Bytes: b}
}

// fakeServer is the other side of the pulls: it serves images by name and can
// hold frames back.
type fakeServer struct {
	t    testing.TB
	addr string
	http *http.Server

	mu       sync.Mutex
	changed  *sync.Cond
	images   map[string]*fakeImage // by repository:tag
	limit    int                   // frames that a stream sends before it waits; -1: all
	header   bool                  // whether streams send more than their greeting
	toc      string                // what becomes of a header before its TOC: "wait", "cut" (once) or ""
	requests []bundle.Request
	promoted []uint32 // frames that were asked for ahead of their turn
	closed   bool
}

func newFakeServer(t testing.TB) *fakeServer {
	t.Helper()
	s := &fakeServer{t: t, images: make(map[string]*fakeImage), limit: -1, header: true}
	s.changed = sync.NewCond(&s.mu)
	s.listen("127.0.0.1:0")
	t.Cleanup(s.stop)
	return s
}

func (s *fakeServer) listen(addr string) {
	s.t.Helper()
	l, err := net.Listen("tcp", addr)
	if err != nil {
		s.t.Fatal(err)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("POST "+bundle.PullPath, s.pull)
	mux.HandleFunc("POST "+bundle.PromotePath, s.promote)
	srv := &http.Server{Handler: mux, Protocols: new(http.Protocols)}
	srv.Protocols.SetUnencryptedHTTP2(true)
	s.mu.Lock()
	s.http, s.addr, s.closed = srv, l.Addr().String(), false
	s.mu.Unlock()
	go func() { _ = srv.Serve(l) }()
}

// stop makes the server unreachable; listen(s.addr) brings it back.
func (s *fakeServer) stop() {
	s.mu.Lock()
	s.closed = true
	s.changed.Broadcast()
	srv := s.http
	s.mu.Unlock()
	_ = srv.Close()
}

// serve puts an image under a name and returns its reference.
func (s *fakeServer) serve(name string, m *fakeImage) (ref string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.images[name] = m
	return s.addr + "/" + name
}

// setLimit lets streams send so many frames each; -1: all.
func (s *fakeServer) setLimit(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.limit = n
	s.changed.Broadcast()
}

func (s *fakeServer) setHeader(on bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.header = on
	s.changed.Broadcast()
}

func (s *fakeServer) setTOC(to string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.toc = to
	s.changed.Broadcast()
}

func (s *fakeServer) requestCount() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.requests)
}

// may waits until ok, called with mu held, and reports false when the server or
// the request ends before.
func (s *fakeServer) may(r *http.Request, ok func() bool) bool {
	stop := make(chan struct{})
	defer close(stop)
	go func() {
		select {
		case <-r.Context().Done():
			s.mu.Lock()
			s.changed.Broadcast()
			s.mu.Unlock()
		case <-stop:
		}
	}()
	s.mu.Lock()
	defer s.mu.Unlock()
	for !ok() {
		if s.closed || r.Context().Err() != nil {
			return false
		}
		s.changed.Wait()
	}
	return true
}

func (s *fakeServer) find(want bundle.ImageRequest) *fakeImage {
	for name, m := range s.images {
		repository, tag, _ := strings.Cut(name, ":")
		if repository == want.Repository && (tag == want.Reference || m.Manifest.Digest.String() == want.Reference) {
			return m
		}
	}
	return nil
}

func (s *fakeServer) pull(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return
	}
	req, err := bundle.DecodeRequest(body)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	var out *bundle.Writer
	s.mu.Lock()
	s.requests = append(s.requests, *req)
	m := s.find(req.Images[0])
	s.mu.Unlock()
	out = bundle.NewWriter(w)
	_ = out.Hello(bundle.Hello{Version: 1, Stream: "s"})
	_ = out.Flush()
	http.NewResponseController(w).Flush() //nolint:errcheck
	if !s.may(r, func() bool { return s.header }) {
		return
	}
	if m == nil {
		_ = out.Error(&bundle.Error{Code: bundle.CodeNotFound, Message: "no image " + req.Images[0].Repository})
		return
	}
	header := m.Image
	for _, h := range req.Have {
		if h.ChainID == m.ChainID && h.TOC == m.TOCDigest {
			header.TOC = nil
		}
	}
	var section bytes.Buffer
	_ = out.Flush()
	on := out.Continue(&section)
	_ = on.Image(&header)
	_ = on.Flush()
	b := section.Bytes()
	_, _ = w.Write(b[:len(b)-len(header.TOC)])
	http.NewResponseController(w).Flush() //nolint:errcheck
	if !s.may(r, func() bool { return s.toc != "wait" }) {
		return
	}
	s.mu.Lock()
	cut := s.toc == "cut"
	s.toc = ""
	s.mu.Unlock()
	if cut {
		panic(http.ErrAbortHandler)
	}
	_, _ = w.Write(header.TOC)
	plan, frames := s.plan(m, req)
	if req.Images[0].Header {
		plan, frames = &bundle.Plan{}, nil
	}
	_ = out.Plan(plan)
	_ = out.Flush()
	for i, f := range frames {
		http.NewResponseController(w).Flush() //nolint:errcheck
		if !s.may(r, func() bool { return s.limit < 0 || i < s.limit }) {
			panic(http.ErrAbortHandler)
		}
		if out.Frame(uint32(i), f) != nil || out.Flush() != nil {
			return
		}
	}
	_ = out.End()
}

func (s *fakeServer) promote(w http.ResponseWriter, r *http.Request) {
	var want bundle.Promotion
	if err := json.NewDecoder(r.Body).Decode(&want); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	s.mu.Lock()
	s.promoted = append(s.promoted, want.Frames...)
	s.mu.Unlock()
	w.WriteHeader(http.StatusNoContent)
}

func (s *fakeServer) promotedFrames() []uint32 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.promoted)
}

// plan leaves out what the worker has, and puts each segment in a frame of its own.
func (s *fakeServer) plan(m *fakeImage, req *bundle.Request) (*bundle.Plan, [][]byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	have := map[segment.ID]bool{{}: true}
	for _, h := range req.Have {
		for _, o := range s.images {
			if o.ChainID != h.ChainID || o.TOCDigest != h.TOC {
				continue
			}
			for i, seg := range o.toc.Segments {
				if h.Present == nil || h.Present[i/8]>>(i%8)&1 != 0 {
					have[seg.ID] = true
				}
			}
		}
	}
	p := &bundle.Plan{}
	var frames [][]byte
	for i, seg := range m.toc.Segments {
		if have[seg.ID] {
			continue
		}
		have[seg.ID] = true
		b, err := segment.AppendFrame(nil, segment.Zstd, m.data[seg.ID])
		if err != nil {
			panic(err)
		}
		p.Frames = append(p.Frames, bundle.PlanFrame{First: uint32(len(p.Segments)), Segments: 1, RawLength: seg.Length, MaxLength: uint32(len(b))})
		p.Segments = append(p.Segments, uint32(i))
		p.MaxBytes += bundle.SectionLength(len(b))
		p.ContentBytes += int64(seg.Length)
		frames = append(frames, b)
	}
	return p, frames
}
