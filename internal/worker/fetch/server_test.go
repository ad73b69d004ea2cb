package fetch

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/identity"
	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/format/trace"
	"hydrofoil.dev/foil/internal/worker/arena"
	"hydrofoil.dev/foil/internal/worker/remote"
	"hydrofoil.dev/foil/internal/worker/remote/remotetest"
)

// fataler is *testing.T, *testing.B or *rapid.T.
type fataler interface {
	Helper()
	Fatal(...any)
	Fatalf(string, ...any)
	Errorf(string, ...any)
}

// image is an image on the fake server.
type image struct {
	bundle.Image
	toc  *toc.TOC
	data map[segment.ID][]byte
	// startup is the startup set of every service, a frame each, but of those in
	// services, by their first argument.
	startup  [][]trace.Run
	filled   int // of the last frames of sets, at most all
	services map[string][][]trace.Run
	here     []trace.Run // is said to be on the worker
}

// content returns the bytes of a content.
func (m *image) content(i uint32) (b []byte) {
	c := m.toc.Contents[i]
	for _, s := range m.toc.Segments[c.First : c.First+c.Segments] {
		if s.ID.IsHole() {
			b = append(b, make([]byte, s.Length)...)
		} else {
			b = append(b, m.data[s.ID]...)
		}
	}
	return b
}

// index returns the number of the content that file i of newImage has.
func (m *image) index(file []byte) uint32 {
	id := segment.Sum(file)
	return uint32(slices.IndexFunc(m.toc.Contents, func(c toc.Content) bool { return c.ID == id }))
}

// blob returns n bytes that seed decides, compressible a little.
func blob(seed uint64, n int) []byte {
	r := rand.New(rand.NewPCG(seed, 1))
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(r.IntN(64))
	}
	return b
}

// newImage returns an image of the files.
func newImage(t fataler, name string, files ...[]byte) *image {
	t.Helper()
	m := &image{data: make(map[segment.ID][]byte)}
	diff := digest.FromString(name)
	m.ChainID = identity.ChainID([]digest.Digest{diff})
	root := &toc.File{Mode: unix.S_IFDIR | 0o755, Children: map[string]*toc.File{}}
	sp := segment.NewSplitter(nil)
	for i, f := range files {
		file := &toc.File{Mode: unix.S_IFREG | 0o644}
		sp.Reset(bytes.NewReader(f))
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
		root.Children[fmt.Sprintf("%04d", i)] = file
	}
	var err error
	if m.toc, err = toc.Build(m.ChainID, root); err != nil {
		t.Fatal(err)
	}
	if m.TOC, err = toc.Encode(m.toc); err != nil {
		t.Fatal(err)
	}
	m.TOCDigest, m.Segments = toc.Digest(m.TOC), uint32(len(m.toc.Segments))
	m.Config = jsonBlob(ocispec.MediaTypeImageConfig, ocispec.Image{RootFS: ocispec.RootFS{Type: "layers", DiffIDs: []digest.Digest{diff}}})
	m.Manifest = jsonBlob(ocispec.MediaTypeImageManifest, ocispec.Manifest{
		Versioned: specs.Versioned{SchemaVersion: 2},
		Config:    ocispec.Descriptor{Digest: m.Config.Digest},
		Layers:    []ocispec.Descriptor{{Digest: diff}},
	})
	return m
}

func jsonBlob(mediaType string, v any) bundle.Blob {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return bundle.Blob{Digest: digest.FromBytes(b), MediaType: mediaType, Bytes: b}
}

// script is what goes wrong with one stream.
type script struct {
	status  int           // answer with this instead
	after   string        // with this Retry-After
	body    string        // and with this, which is no answer of the protocol
	said    *bundle.Error // an Error section instead of images
	cutAt   int64         // break off after so many bytes; 0: do not
	how     string        // "reset" the stream (default), "close" the connection, "stall"
	damage  map[int]bool  // positions in the order of frames
	shuffle uint64        // seed to send frames in another order
	image   func(*bundle.Image)
	plan    func(*bundle.Plan)
	before  func(pos int, s *serving)           // called before each frame
	leave   map[segment.ID]bool                 // segments left out of the plan
	pages   func(frame int, data []byte) []byte // what is sent of the frames of startup sets
	lie     bool                                // about the bytes of the first page run that is no content
	early   func()                              // called before the plan
	behind  int                                 // frames of the last startup set that come after the plan
	between func(left int, s *serving)          // called before each frame of the last startup set
	header  func(*bundle.Writer)                // called before the images
	empty   bool                                // the answer is 200, and nothing
	noHold  bool                                // the server knows no holds
	along   int                                 // frames that are sent along behind a promoted one, as older servers do
}

// server is a fake server on a network of pipes.
type server struct {
	image   *image
	scripts []script // of the streams, in their order; then nothing goes wrong
	group   int      // segments a frame

	http  *http.Server
	pipes *remotetest.Pipes

	mu         sync.Mutex
	requests   []bundle.Request
	times      []time.Time // when they came
	frames     int         // sent, of all streams
	pages      int         // frames of startup sets, the same
	promotions [][]uint32
	deaf       int             // promotions that are answered, and forgotten
	holds      []time.Duration // of the requests
	sent       []segment.ID    // of all streams
	// encoded are frames by the IDs of their segments, or by their digest: on a loaded machine a stream
	// would stall, over and over, while they are made.
	encoded map[string][]byte
	running map[string]*serving
}

// serving is one stream.
type serving struct {
	mu       sync.Mutex
	promoted []uint32
	skip     map[uint32]bool
	chosen   bool
	released bool
	arrived  chan struct{} // a promotion did
	changed  chan struct{} // the same; of one that waits in hold
}

// hold sends what is promoted, and nothing else, until there is a release, or for
// so long.
func (s *serving) hold(ctx context.Context, most time.Duration, send func(frame uint32)) {
	over := time.NewTimer(most)
	defer over.Stop()
	for {
		s.mu.Lock()
		promoted, released := s.promoted, s.released
		s.promoted = nil
		s.mu.Unlock()
		for _, f := range promoted {
			send(f)
		}
		if released {
			return
		}
		select {
		case <-s.changed:
		case <-over.C:
			return
		case <-ctx.Done():
			return
		}
	}
}

// choice waits until the worker has said what it does not want.
func (s *serving) choice(ctx context.Context) {
	for {
		s.mu.Lock()
		chosen := s.chosen
		s.mu.Unlock()
		if chosen {
			return
		}
		select {
		case <-s.changed:
		case <-ctx.Done():
			return
		}
	}
}

func newServer(m *image) *server {
	s := &server{image: m, group: 3, running: map[string]*serving{}, encoded: map[string][]byte{}, pipes: remotetest.NewPipes()}
	mux := http.NewServeMux()
	mux.HandleFunc("POST "+bundle.PullPath, s.pull)
	mux.HandleFunc("POST "+bundle.PromotePath, s.promote)
	s.http = &http.Server{Handler: mux, Protocols: new(http.Protocols), ConnContext: func(ctx context.Context, c net.Conn) context.Context { return context.WithValue(ctx, connKey{}, c) }}
	s.http.Protocols.SetUnencryptedHTTP2(true)
	go s.http.Serve(s.pipes)
	return s
}

func (s *server) close() { s.http.Close() }

func (s *server) client(t fataler, opts remote.Options) *remote.Client {
	t.Helper()
	opts.Base, opts.Dial = "http://server.test", s.pipes.Dial
	c, err := remote.New(opts)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func (s *server) pull(w http.ResponseWriter, r *http.Request) {
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
	n := len(s.requests)
	s.requests, s.times = append(s.requests, *req), append(s.times, time.Now())
	var sc script
	if n < len(s.scripts) {
		sc = s.scripts[n]
	}
	id := fmt.Sprintf("stream%d", n)
	serving := &serving{arrived: make(chan struct{}, 100), changed: make(chan struct{}, 1)}
	s.holds = append(s.holds, req.Hold)
	s.running[id] = serving
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		delete(s.running, id)
		s.mu.Unlock()
	}()
	if sc.after != "" {
		w.Header().Set("Retry-After", sc.after)
	}
	if sc.empty {
		return
	}
	if sc.body != "" {
		http.Error(w, sc.body, sc.status)
		return
	}
	if sc.status != 0 {
		w.WriteHeader(sc.status)
		said := bundle.Error{Code: bundle.CodeNotFound, Message: "no such image"}
		if sc.status != http.StatusNotFound {
			said = bundle.Error{Code: bundle.CodeUnavailable, Message: "not now"}
		}
		json.NewEncoder(w).Encode(said)
		return
	}
	c := &cutter{w: w, r: r, at: sc.cutAt, how: sc.how}
	out := bundle.NewWriter(c)
	out.Hello(bundle.Hello{Version: 1, Stream: id})
	if sc.said != nil {
		out.Error(sc.said)
		return
	}
	if sc.header != nil {
		out.Flush()
		sc.header(out)
	}
	m := s.image
	header := m.Image
	for _, h := range req.Have {
		if h.ChainID == m.ChainID && h.TOC == m.TOCDigest {
			header.TOC = nil
		}
	}
	if sc.image != nil {
		sc.image(&header)
	}
	out.Image(&header)
	leave := map[segment.ID]bool{}
	maps.Copy(leave, sc.leave)
	var pages func(between func(left int))
	if req.Image.Startup {
		pages = s.startup(out, req, sc, leave)
	}
	if req.Image.Header {
		m = nil
	}
	plan, frames := s.plan(m, req, leave)
	planned := false
	sendPlan := func() {
		if planned {
			return
		}
		planned = true
		if sc.early != nil {
			out.Flush()
			sc.early()
		}
		if sc.plan != nil {
			sc.plan(plan)
		}
		out.Plan(plan)
		out.Flush()
	}
	order := make([]uint32, len(frames))
	for i := range order {
		order[i] = uint32(i)
	}
	if sc.shuffle != 0 {
		rand.New(rand.NewPCG(sc.shuffle, 2)).Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
	}
	done := map[uint32]bool{}
	pos := 0
	send := func(f uint32) {
		if done[f] {
			return
		}
		done[f] = true
		data := frames[f].bytes
		if sc.damage[pos] {
			data = slices.Clone(data)
			data[len(data)*2/3] ^= 0x40
		}
		s.mu.Lock()
		s.sent = append(s.sent, frames[f].ids...)
		s.frames++
		s.mu.Unlock()
		out.Frame(f, data)
		out.Flush()
		pos++
	}
	sendPromoted := func() {
		serving.mu.Lock()
		promoted := serving.promoted
		serving.promoted = nil
		serving.mu.Unlock()
		for _, f := range promoted {
			for k := range min(sc.along+1, len(frames)-int(f)) {
				send(f + uint32(k))
			}
		}
	}
	if pages != nil {
		pages(func(left int) {
			if left <= sc.behind {
				sendPlan()
			}
			if sc.between != nil {
				sc.between(left, serving)
			}
			sendPromoted()
		})
	}
	sendPlan()
	if pages != nil && !sc.noHold && len(frames) > 0 {
		serving.hold(r.Context(), req.Hold, send)
	}
	if req.Choose {
		serving.choice(r.Context())
	}
	for _, f := range order {
		if sc.before != nil {
			sc.before(pos, serving)
		}
		sendPromoted()
		serving.mu.Lock()
		skip := serving.skip[f]
		serving.mu.Unlock()
		if !skip {
			send(f)
		}
	}
	sendPromoted()
	out.End()
}

// startup says what the worker lacks of the startup set, and adds to
// leave the segments whose pages it then has. pages sends it, and calls between before each frame
// with how many are left.
func (s *server) startup(out *bundle.Writer, req *bundle.Request, sc script, leave map[segment.ID]bool) (pages func(between func(left int))) {
	m := s.image
	type page struct{ content, page uint32 }
	here, late := map[page]bool{}, map[page]bool{}
	for _, h := range req.Have {
		if h.ChainID != m.ChainID || h.TOC != m.TOCDigest {
			continue
		}
		if h.Pages != nil {
			runs, _, err := trace.NextRuns(h.Pages)
			if err != nil {
				panic(err)
			}
			for _, r := range runs {
				for i := r.First; i < r.End(); i++ {
					here[page{r.Content, i}] = true
				}
			}
		}
		for c, content := range m.toc.Contents {
			for i := range trace.Pages(content.Size) {
				all := true
				for k, seg := range m.toc.Segments[content.First : content.First+content.Segments] {
					k += int(content.First)
					if seg.Offset < int64(i+1)*4096 && seg.Offset+int64(seg.Length) > int64(i)*4096 {
						all = all && !seg.ID.IsHole() && (h.Present == nil || h.Present[k/8]>>(k%8)&1 != 0)
					}
				}
				if all {
					late[page{uint32(c), i}] = true
				}
			}
		}
	}
	if m.here != nil {
		out.Here(&bundle.Here{Runs: m.here})
	}
	set := &bundle.Startup{Origin: bundle.OriginTraced}
	var frames [][]byte
	lie := sc.lie
	all := m.startup
	if args := req.Image.Args; len(args) > 0 && m.services[args[0]] != nil {
		all = m.services[args[0]]
	}
	for _, runs := range all {
		f := bundle.StartupFrame{First: uint32(len(set.Runs))}
		var raw []byte
		for _, r := range runs {
			size, content := m.toc.Contents[r.Content].Size, m.content(r.Content)
			for i := r.First; i < r.End(); i++ {
				p := page{r.Content, i}
				if here[p] || late[p] {
					continue
				}
				here[p] = true
				one := trace.Run{Content: r.Content, First: i, Blocks: 1}
				if n := len(set.Runs); n > int(f.First) && set.Runs[n-1].Content == r.Content && set.Runs[n-1].End() == i {
					set.Runs[n-1].Blocks++
				} else {
					set.Runs = append(set.Runs, one)
				}
				off, n := one.Range(size)
				raw = append(raw, content[off:off+n]...)
			}
		}
		if f.Count = uint32(len(set.Runs)) - f.First; f.Count == 0 {
			continue
		}
		at := int64(0)
		for _, r := range set.Runs[f.First:] {
			size := m.toc.Contents[r.Content].Size
			_, n := r.Range(size)
			if lie && !r.Whole(size) {
				raw[at] ^= 1
				lie = false
			}
			set.Digests = append(set.Digests, segment.Sum(raw[at:at+n]))
			at += n
		}
		data := s.encode(segment.Sum(raw).String(), raw)
		f.MaxLength = uint32(len(data))
		set.Frames, frames = append(set.Frames, f), append(frames, data)
	}
	set.Filled = min(m.filled, len(set.Frames))
	out.Startup(set, m.toc)
	out.Flush()
	for c, content := range m.toc.Contents {
		for _, seg := range m.toc.Segments[content.First : content.First+content.Segments] {
			all := true
			for i := uint32(seg.Offset / 4096); int64(i)*4096 < seg.Offset+int64(seg.Length); i++ {
				all = all && here[page{uint32(c), i}]
			}
			if all {
				leave[seg.ID] = true
			}
		}
	}
	return func(between func(left int)) {
		for i, data := range frames {
			between(len(frames) - i)
			if sc.pages != nil {
				data = sc.pages(i, data)
			}
			out.Pages(uint32(i), data)
			out.Flush()
			s.mu.Lock()
			s.pages++
			s.mu.Unlock()
		}
	}
}

type sentFrame struct {
	bytes []byte
	ids   []segment.ID
}

// plan leaves out what the worker has, and puts s.group segments in a frame. Of nil nothing is planned.
func (s *server) plan(m *image, req *bundle.Request, leave map[segment.ID]bool) (*bundle.Plan, []sentFrame) {
	have := map[segment.ID]bool{{}: true}
	for id := range leave {
		have[id] = true
	}
	for _, h := range req.Have {
		if m != nil && m.ChainID == h.ChainID && m.TOCDigest == h.TOC {
			for i, seg := range m.toc.Segments {
				if h.Present == nil || h.Present[i/8]>>(i%8)&1 != 0 {
					have[seg.ID] = true
				}
			}
		}
	}
	p := &bundle.Plan{}
	var frames []sentFrame
	var bytes [][]byte
	var ids []segment.ID
	flush := func() {
		if len(bytes) == 0 {
			return
		}
		f := bundle.PlanFrame{First: uint32(len(p.Segments) - len(bytes)), Segments: uint32(len(bytes))}
		for _, b := range bytes {
			f.RawLength += uint32(len(b))
		}
		encoded := s.encode(fmt.Sprint(ids), bytes...)
		f.MaxLength = uint32(len(encoded))
		p.Frames = append(p.Frames, f)
		p.MaxBytes += bundle.SectionLength(len(encoded))
		p.ContentBytes += int64(f.RawLength)
		frames = append(frames, sentFrame{encoded, ids})
		bytes, ids = nil, nil
	}
	size := 0
	if m == nil {
		return p, nil
	}
	for i, seg := range m.toc.Segments {
		if have[seg.ID] {
			continue
		}
		have[seg.ID] = true
		if size += int(seg.Length); len(bytes) == s.group || size > segment.MaxFrameRaw {
			flush()
			size = int(seg.Length)
		}
		p.Segments = append(p.Segments, uint32(i))
		bytes, ids = append(bytes, m.data[seg.ID]), append(ids, seg.ID)
	}
	flush()
	return p, frames
}

// encode returns a frame, which is encoded once for its key.
func (s *server) encode(key string, raw ...[]byte) []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.encoded[key] == nil {
		var err error
		if s.encoded[key], err = segment.AppendFrame(nil, segment.Zstd, raw...); err != nil {
			panic(err)
		}
	}
	return s.encoded[key]
}

func (s *server) promote(w http.ResponseWriter, r *http.Request) {
	var p bundle.Promotion
	if err := json.NewDecoder(r.Body).Decode(&p); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(p.Frames) > 0 {
		s.promotions = append(s.promotions, p.Frames)
	}
	if s.deaf > 0 {
		s.deaf--
		w.WriteHeader(http.StatusNoContent)
		return
	}
	stream := s.running[p.Stream]
	if stream == nil {
		http.NotFound(w, r)
		return
	}
	stream.mu.Lock()
	stream.promoted = append(stream.promoted, p.Frames...)
	stream.released, stream.chosen = stream.released || p.Release, stream.chosen || p.Chosen
	for _, f := range p.Skip {
		if stream.skip == nil {
			stream.skip = make(map[uint32]bool)
		}
		stream.skip[f] = true
	}
	stream.mu.Unlock()
	if len(p.Frames) > 0 {
		stream.arrived <- struct{}{}
	}
	select {
	case stream.changed <- struct{}{}:
	default:
	}
	w.WriteHeader(http.StatusNoContent)
}

// cutter breaks a stream off after so many bytes.
type cutter struct {
	w   http.ResponseWriter
	r   *http.Request
	n   int64
	at  int64
	how string
}

func (c *cutter) Write(b []byte) (int, error) {
	cut := c.at > 0 && c.n+int64(len(b)) > c.at
	if cut {
		b = b[:c.at-c.n]
	}
	n, err := c.w.Write(b)
	c.n += int64(n)
	if err != nil {
		return n, err
	}
	http.NewResponseController(c.w).Flush()
	if !cut {
		return n, nil
	}
	switch c.how {
	case "stall":
		<-c.r.Context().Done()
	case "close":
		c.r.Context().Value(connKey{}).(net.Conn).Close() //nolint:errcheck
	}
	panic(http.ErrAbortHandler)
}

type connKey struct{}

// worker opens arenas for images in a directory.
type worker struct {
	t      fataler
	dir    string
	server *server
	in     func(m *image, content int) bool // what is fetched; nil: all
	mu     sync.Mutex
	arenas map[digest.Digest]*arena.Arena
	opened atomic.Int64
}

func newWorker(t fataler, s *server, dir string) *worker {
	return &worker{t: t, dir: dir, server: s, arenas: map[digest.Digest]*arena.Arena{}}
}

func (w *worker) open(_ context.Context, img *bundle.Image, t *toc.TOC) (*arena.Arena, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	defer w.opened.Add(1)
	if a := w.arenas[img.ChainID]; a != nil {
		return a, nil
	}
	m := w.server.image
	var in func(int) bool
	if w.in != nil {
		in = func(c int) bool { return w.in(m, c) }
	}
	l, err := arena.NewLayout(t, in)
	if err != nil {
		return nil, err
	}
	a, err := arena.Create(filepath.Join(w.dir, img.ChainID.Encoded()), l)
	if err != nil {
		return nil, err
	}
	w.arenas[img.ChainID] = a
	return a, nil
}

func (w *worker) options(c *remote.Client) Options {
	o := Options{Client: c, Pause: time.Millisecond, Open: w.open, TOC: func(context.Context, *bundle.Image) ([]byte, error) {
		return w.server.image.TOC, nil
	}}
	o.Request.Versions = []int{1}
	o.Request.Image = bundle.ImageRequest{Repository: "image0", Reference: "latest"}
	return o
}

// contents returns what m's arena should hold.
func (w *worker) contents(m *image) []byte {
	l := w.arenas[m.ChainID].Layout()
	want := make([]byte, l.Size())
	for i, c := range m.toc.Contents {
		off, ok := l.Offset(i)
		if !ok {
			continue
		}
		for _, s := range m.toc.Segments[c.First : c.First+c.Segments] {
			copy(want[off+s.Offset:], m.data[s.ID])
		}
	}
	return want
}

// check compares the arena with the contents that it should have.
func (w *worker) check() {
	w.t.Helper()
	m := w.server.image
	a := w.arenas[m.ChainID]
	if a == nil {
		return
	}
	if !a.Complete() {
		w.t.Errorf("the arena lacks %d segments", a.Missing())
	}
	got, err := os.ReadFile(filepath.Join(a.Dir(), arena.FileName))
	if err != nil {
		w.t.Fatal(err)
	}
	if !bytes.Equal(got, w.contents(m)) {
		w.t.Errorf("the arena differs from the contents")
	}
}

func (w *worker) close() {
	for _, a := range w.arenas {
		a.Close()
	}
}
