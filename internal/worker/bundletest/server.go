package bundletest

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/segment"
)

// Server is the other side of the pulls: it serves images by name and can
// hold frames back.
type Server struct {
	t testing.TB
	// Addr is its HOST:PORT.
	Addr string
	http *http.Server

	mu       sync.Mutex
	changed  *sync.Cond
	images   map[string]*Image // by repository:tag
	limit    int               // frames that a stream sends before it waits; -1: all
	header   bool              // whether streams send more than their greeting
	toc      string            // what becomes of a header before its TOC: "wait", "cut" (once) or ""
	requests []bundle.Request
	promoted []uint32 // frames that were asked for ahead of their turn
	streams  []*Stream
	closed   bool
	accept   func(*http.Request) bool // nil: everybody
	headers  []http.Header            // of requests
}

// Stream is a stream of a Server. Change changes it.
type Stream struct {
	// Limited: Limit is how many frames it sends before it waits, whatever the server's is; -1: all.
	// Promoted frames are sent there only.
	Limited bool
	Limit   int
	Fail    bool // it ends with an error

	repository string
	skip       map[uint32]bool
	promoted   []uint32
	chosen     bool // the worker has said what it does not want, or was not to say it
	sent       int  // frames
}

// New returns a server on loopback.
func New(t testing.TB) *Server {
	t.Helper()
	s := &Server{t: t, images: make(map[string]*Image), limit: -1, header: true}
	s.changed = sync.NewCond(&s.mu)
	s.Listen("127.0.0.1:0")
	t.Cleanup(s.Stop)
	return s
}

// Listen makes the server reachable at an address.
func (s *Server) Listen(addr string) {
	s.t.Helper()
	l, err := net.Listen("tcp", addr)
	if err != nil {
		s.t.Fatal(err)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("POST "+bundle.PullPath, s.pull)
	mux.HandleFunc("POST "+bundle.PromotePath, s.promote)
	mux.HandleFunc("POST "+bundle.RecipePath, s.layer)
	mux.HandleFunc("POST "+bundle.ContentsPath, s.layer)
	mux.HandleFunc("GET /v2/{repository}/blobs/{digest}", s.blob)
	srv := &http.Server{Handler: mux, Protocols: new(http.Protocols)}
	srv.Protocols.SetHTTP1(true) // for blobs
	srv.Protocols.SetUnencryptedHTTP2(true)
	s.mu.Lock()
	s.http, s.Addr, s.closed = srv, l.Addr().String(), false
	s.mu.Unlock()
	go func() { _ = srv.Serve(l) }()
}

// Stop makes the server unreachable; Listen(s.Addr) brings it back.
func (s *Server) Stop() {
	s.mu.Lock()
	s.closed = true
	s.changed.Broadcast()
	srv := s.http
	s.mu.Unlock()
	_ = srv.Close()
}

// Serve puts an image under a name and returns its reference.
func (s *Server) Serve(name string, m *Image) (ref string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.images[name] = m
	return s.Addr + "/" + name
}

// Accept has the server refuse whoever fn does not accept.
func (s *Server) Accept(fn func(*http.Request) bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.accept = fn
}

// Headers are those of all requests, refused ones included.
func (s *Server) Headers() []http.Header {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.headers)
}

// SetLimit lets streams send so many frames each; -1: all.
func (s *Server) SetLimit(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.limit = n
	s.changed.Broadcast()
}

// last returns the last stream of a repository, or nil.
func (s *Server) last(repository string) *Stream {
	for _, st := range slices.Backward(s.streams) {
		if st.repository == repository {
			return st
		}
	}
	return nil
}

// Change changes the last stream of a repository, for which it waits.
func (s *Server) Change(repository string, fn func(*Stream)) {
	s.t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	st := s.last(repository)
	for ; st == nil; st = s.last(repository) {
		if s.closed {
			s.t.Fatalf("there is no stream of %s", repository)
		}
		s.changed.Wait()
	}
	fn(st)
	s.changed.Broadcast()
}

// Sent is how many frames all streams have sent.
func (s *Server) Sent() (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, st := range s.streams {
		n += st.sent
	}
	return n
}

// SetHeader says whether streams send more than their greeting.
func (s *Server) SetHeader(on bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.header = on
	s.changed.Broadcast()
}

// SetTOC says what becomes of a header before its TOC: "wait", "cut" (once) or "".
func (s *Server) SetTOC(to string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.toc = to
	s.changed.Broadcast()
}

// Requests are all that have come.
func (s *Server) Requests() []bundle.Request {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.requests)
}

// Chosen reports whether the worker has said which frames of the last stream of a repository it does not
// want.
func (s *Server) Chosen(repository string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	st := s.last(repository)
	return st != nil && st.chosen
}

// may waits until ok, called with mu held, and reports false when the server or
// the request ends before.
func (s *Server) may(r *http.Request, ok func() bool) bool {
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

func (s *Server) find(want bundle.ImageRequest) *Image {
	for name, m := range s.images {
		repository, tag, _ := strings.Cut(name, ":")
		if repository == want.Repository && (tag == want.Reference || m.Manifest.Digest.String() == want.Reference) {
			return m
		}
	}
	return nil
}

func (s *Server) pull(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return
	}
	req, err := bundle.DecodeRequest(body)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	s.mu.Lock()
	s.headers = append(s.headers, r.Header)
	accept := s.accept
	s.mu.Unlock()
	if accept != nil && !accept(r) {
		deny(w)
		_ = json.NewEncoder(w).Encode(bundle.Error{Code: bundle.CodeUnauthorized, Message: "not you"})
		return
	}
	var out *bundle.Writer
	st := &Stream{repository: req.Image.Repository, skip: make(map[uint32]bool), chosen: !req.Choose}
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
	lies := m.Lies
	before := func(section string, frames int) bool {
		if lies.Before == nil {
			return true
		}
		http.NewResponseController(w).Flush() //nolint:errcheck // it may take its time
		if lies.Before(section, frames, out) {
			return true
		}
		_ = out.Flush()
		http.NewResponseController(w).Flush() //nolint:errcheck
		return s.may(r, func() bool { return false })
	}
	if !before("image", 0) {
		return
	}
	_ = out.Flush()
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
	if lies.Plan != nil {
		lies.Plan(plan)
	}
	if !before("plan", 0) {
		return
	}
	_ = out.Plan(plan)
	_ = out.Flush()
	order := make([]int, len(frames))
	for i := range order {
		order[i] = i
	}
	if lies.Shuffle != 0 {
		order = rand.New(rand.NewPCG(lies.Shuffle, 1)).Perm(len(frames))
	}
	done := make([]bool, len(frames))
	for n := 0; ; n++ {
		http.NewResponseController(w).Flush() //nolint:errcheck
		i := -1                               // that is sent next
		if !s.may(r, func() bool { i = s.next(st, n, done, order); return i != notYet }) {
			panic(http.ErrAbortHandler)
		}
		if section := map[bool]string{true: "end", false: "frame"}[i == len(frames)]; !before(section, n) {
			return
		}
		s.mu.Lock()
		fail := st.Fail
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
		index, frame := uint32(i), frames[i].Bytes
		if lies.Frame != nil {
			index, frame = lies.Frame(index, frame)
		}
		if out.Frame(index, frame) != nil || out.Flush() != nil {
			return
		}
	}
}

const notYet = -1

// next returns which frame a stream sends after n of them; len(done): it ends. Called with mu held.
func (s *Server) next(st *Stream, n int, done []bool, order []int) int {
	if st.Fail {
		return len(done)
	}
	if st.Limited { // only there are promoted frames sent
		for _, f := range st.promoted {
			if !done[f] {
				return int(f)
			}
		}
	}
	limit := s.limit
	if st.Limited {
		limit = st.Limit
	}
	for _, i := range order {
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

func (s *Server) promote(w http.ResponseWriter, r *http.Request) {
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

// Promoted are the frames that were asked for ahead of their turn.
func (s *Server) Promoted() []uint32 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.promoted)
}

// plan leaves out what the worker has, and puts each segment in a frame of its own.
func (s *Server) plan(m *Image, req *bundle.Request) (*bundle.Plan, []SentFrame) {
	s.mu.Lock()
	defer s.mu.Unlock()
	have := make(map[segment.ID]bool)
	for _, h := range req.Have {
		for _, o := range s.images {
			if o.ChainID == h.ChainID && o.TOCDigest == h.TOC {
				present(have, o, &h)
			}
		}
	}
	return plan(m, have, 1, func(_ string, raw ...[]byte) []byte {
		b, err := segment.AppendFrame(nil, segment.Zstd, raw...)
		if err != nil {
			panic(err)
		}
		return b
	})
}
