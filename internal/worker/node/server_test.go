package node

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/format/toc/toctest"
)

// files are an image's files by name, in its root directory.
type files = toctest.Files

var some = toctest.Some

// fakeImage is an image on the fake server.
type fakeImage struct {
	bundle.Image
	toc   *toc.TOC
	data  map[segment.ID][]byte
	files files
}

func newFakeImage(t testing.TB, f files) *fakeImage {
	t.Helper()
	m := &fakeImage{files: f}
	var diff digest.Digest
	m.toc, diff, m.data = f.TOC(t)
	m.ChainID = m.toc.ChainID
	var err error
	if m.TOC, err = toc.Encode(m.toc); err != nil {
		t.Fatal(err)
	}
	m.TOCDigest, m.Segments = toc.Digest(m.TOC), uint32(len(m.toc.Segments))
	m.Config = jsonBlob(t, ocispec.MediaTypeImageConfig, ocispec.Image{RootFS: ocispec.RootFS{Type: "layers", DiffIDs: []digest.Digest{diff}}})
	m.Manifest = jsonBlob(t, ocispec.MediaTypeImageManifest, ocispec.Manifest{
		Versioned: specs.Versioned{SchemaVersion: 2},
		Config:    ocispec.Descriptor{MediaType: m.Config.MediaType, Digest: m.Config.Digest, Size: int64(len(m.Config.Bytes))},
		Layers:    []ocispec.Descriptor{{MediaType: ocispec.MediaTypeImageLayer, Digest: diff}},
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
	streams  []*fakeStream
	closed   bool
}

// fakeStream is a stream of the fake server. Guarded by fakeServer.mu.
type fakeStream struct {
	repository string
	skip       map[uint32]bool
	promoted   []uint32
	chosen     bool // the worker has said what it does not want, or was not to say it
	limited    bool // limit counts for it alone
	limit      int
	fail       bool // it ends with an error
	sent       int  // frames
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

// last returns the last stream of a repository, or nil.
func (s *fakeServer) last(repository string) *fakeStream {
	for _, st := range slices.Backward(s.streams) {
		if st.repository == repository {
			return st
		}
	}
	return nil
}

// change changes the last stream of a repository, which there must be.
func (s *fakeServer) change(repository string, fn func(*fakeStream)) {
	s.t.Helper()
	eventually(s.t, "a stream of "+repository, func() error {
		s.mu.Lock()
		defer s.mu.Unlock()
		st := s.last(repository)
		if st == nil {
			return errors.New("there is none")
		}
		fn(st)
		s.changed.Broadcast()
		return nil
	})
}

// sent is how many frames all streams have sent.
func (s *fakeServer) sent() (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, st := range s.streams {
		n += st.sent
	}
	return n
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
	st := &fakeStream{repository: req.Image.Repository, skip: make(map[uint32]bool), chosen: !req.Choose}
	s.mu.Lock()
	s.streams = append(s.streams, st)
	id := fmt.Sprintf("s%d", len(s.streams)-1)
	s.changed.Broadcast()
	s.requests = append(s.requests, *req)
	m := s.find(req.Image)
	s.mu.Unlock()
	out = bundle.NewWriter(w)
	_ = out.Hello(bundle.Hello{Version: 1, Stream: id})
	_ = out.Flush()
	http.NewResponseController(w).Flush() //nolint:errcheck
	if !s.may(r, func() bool { return s.header }) {
		return
	}
	if m == nil {
		_ = out.Error(&bundle.Error{Code: bundle.CodeNotFound, Message: "no image " + req.Image.Repository})
		return
	}
	header := m.Image
	for _, h := range req.Have {
		if h.ChainID == m.ChainID && h.TOC == m.TOCDigest {
			header.TOC = nil
		}
	}
	var section bytes.Buffer
	on := bundle.NewWriter(&section)
	_ = on.Hello(bundle.Hello{Version: 1, Stream: "s"})
	_ = on.Flush()
	section.Reset()
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
	if req.Image.Header {
		plan, frames = &bundle.Plan{}, nil
	}
	_ = out.Plan(plan)
	_ = out.Flush()
	done := make([]bool, len(frames))
	for n := 0; ; n++ {
		http.NewResponseController(w).Flush() //nolint:errcheck
		i := -1                               // that is sent next
		if !s.may(r, func() bool { i = s.next(st, n, done); return i != notYet }) {
			panic(http.ErrAbortHandler)
		}
		s.mu.Lock()
		fail := st.fail
		if i < len(frames) {
			st.sent++
		}
		s.mu.Unlock()
		switch {
		case fail:
			_ = out.Error(&bundle.Error{Code: bundle.CodeNotFound, Message: "it was deleted"})
			return
		case i == len(frames):
			_ = out.End()
			return
		}
		done[i] = true
		if out.Frame(uint32(i), frames[i]) != nil || out.Flush() != nil {
			return
		}
	}
}

const notYet = -1

// next returns which frame a stream sends after n of them; len(done): it ends. Called with mu held.
func (s *fakeServer) next(st *fakeStream, n int, done []bool) int {
	if st.fail {
		return len(done)
	}
	if st.limited { // only there are promoted frames sent
		for _, f := range st.promoted {
			if !done[f] {
				return int(f)
			}
		}
	}
	limit := s.limit
	if st.limited {
		limit = st.limit
	}
	for i := range done {
		if done[i] || st.skip[uint32(i)] {
			continue
		}
		if !st.chosen || limit >= 0 && n >= limit {
			return notYet
		}
		return i
	}
	if !st.chosen {
		return notYet
	}
	return len(done)
}

func (s *fakeServer) promote(w http.ResponseWriter, r *http.Request) {
	var want bundle.Promotion
	if err := json.NewDecoder(r.Body).Decode(&want); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	s.mu.Lock()
	s.promoted = append(s.promoted, want.Frames...)
	var i int
	if _, err := fmt.Sscanf(want.Stream, "s%d", &i); err == nil {
		st := s.streams[i]
		st.promoted = append(st.promoted, want.Frames...)
		for _, f := range want.Skip {
			st.skip[f] = true
		}
		for _, f := range st.promoted {
			delete(st.skip, f)
		}
		st.chosen = st.chosen || want.Chosen
	}
	s.changed.Broadcast()
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
