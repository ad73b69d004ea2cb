package bundletest

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"sync"
	"time"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc/toctest"
	"hydrofoil.dev/foil/internal/format/trace"
	"hydrofoil.dev/foil/internal/worker/remote"
	"hydrofoil.dev/foil/internal/worker/remote/remotetest"
)

// Script is what goes wrong with one stream of a Scripted.
type Script struct {
	Status  int           // answer with this instead
	After   string        // with this Retry-After
	Body    string        // and with this, which is no answer of the protocol
	Said    *bundle.Error // an Error section instead of images
	CutAt   int64         // break off after so many bytes; 0: do not
	How     string        // "reset" the stream (default), "close" the connection, "stall"
	Damage  map[int]bool  // positions in the order of frames
	Shuffle uint64        // seed to send frames in another order
	Image   func(*bundle.Image)
	Plan    func(*bundle.Plan)
	Before  func(pos int, s *Serving)           // called before each frame
	Leave   map[segment.ID]bool                 // segments left out of the plan
	Pages   func(frame int, data []byte) []byte // what is sent of the frames of startup sets
	Lie     bool                                // about the bytes of the first page run that is no content
	Early   func()                              // called before the plan
	Behind  int                                 // frames of the last startup set that come after the plan
	Between func(left int, s *Serving)          // called before each frame of the last startup set
	Header  func(*bundle.Writer)                // called before the images
	Empty   bool                                // the answer is 200, and nothing
	NoHold  bool                                // the server knows no holds
	Along   int                                 // frames that are sent along behind a promoted one, as older servers do
}

// Scripted is a server of one image, by whatever name, on a network of pipes. What goes wrong with its streams is
// scripted; it sends startup sets and frames of several segments.
type Scripted struct {
	Image   *Image
	Scripts []Script // of the streams, in their order; then nothing goes wrong
	Group   int      // segments a frame

	http  *http.Server
	Pipes *remotetest.Pipes

	Mu         sync.Mutex // guards what follows
	Requests   []bundle.Request
	Times      []time.Time // when they came
	Frames     int         // sent, of all streams
	Pages      int         // frames of startup sets, the same
	Promotions [][]uint32
	Deaf       int             // promotions that are answered, and forgotten
	Holds      []time.Duration // of the requests
	Rests      []time.Duration // that promotions asked for
	Sent       []segment.ID    // of all streams
	// Encoded are frames by the IDs of their segments, or by their digest: on a loaded machine a stream
	// would stall, over and over, while they are made.
	Encoded map[string][]byte
	Running map[string]*Serving
}

// Serving is one stream of a Scripted.
type Serving struct {
	Mu       sync.Mutex
	Promoted []uint32
	Skip     map[uint32]bool
	Chosen   bool
	Released bool
	Arrived  chan struct{} // a promotion did
	Changed  chan struct{} // the same; of one that waits in hold
}

// hold sends what is promoted, and nothing else, until there is a release, or for
// so long.
func (s *Serving) hold(ctx context.Context, most time.Duration, send func(frame uint32)) {
	over := time.NewTimer(most)
	defer over.Stop()
	for {
		s.Mu.Lock()
		promoted, released := s.Promoted, s.Released
		s.Promoted = nil
		s.Mu.Unlock()
		for _, f := range promoted {
			send(f)
		}
		if released {
			return
		}
		select {
		case <-s.Changed:
		case <-over.C:
			return
		case <-ctx.Done():
			return
		}
	}
}

// choice waits until the worker has said what it does not want.
func (s *Serving) choice(ctx context.Context) {
	for {
		s.Mu.Lock()
		chosen := s.Chosen
		s.Mu.Unlock()
		if chosen {
			return
		}
		select {
		case <-s.Changed:
		case <-ctx.Done():
			return
		}
	}
}

// NewScripted returns a server of an image.
func NewScripted(m *Image) *Scripted {
	s := &Scripted{Image: m, Group: 3, Running: map[string]*Serving{}, Encoded: map[string][]byte{}, Pipes: remotetest.NewPipes()}
	mux := http.NewServeMux()
	mux.HandleFunc("POST "+bundle.PullPath, s.pull)
	mux.HandleFunc("POST "+bundle.PromotePath, s.promote)
	s.http = &http.Server{Handler: mux, Protocols: new(http.Protocols), ConnContext: func(ctx context.Context, c net.Conn) context.Context { return context.WithValue(ctx, connKey{}, c) }}
	s.http.Protocols.SetUnencryptedHTTP2(true)
	go s.http.Serve(s.Pipes)
	return s
}

// Close ends it.
func (s *Scripted) Close() { s.http.Close() }

// Client returns one that knows no other server.
func (s *Scripted) Client(t toctest.T, opts remote.Options) *remote.Client {
	t.Helper()
	opts.Base, opts.Dial = "http://server.test", s.Pipes.Dial
	c, err := remote.New(opts)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func (s *Scripted) pull(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return
	}
	req, err := bundle.DecodeRequest(body)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	s.Mu.Lock()
	n := len(s.Requests)
	s.Requests, s.Times = append(s.Requests, *req), append(s.Times, time.Now())
	var sc Script
	if n < len(s.Scripts) {
		sc = s.Scripts[n]
	}
	id := fmt.Sprintf("stream%d", n)
	serving := &Serving{Arrived: make(chan struct{}, 100), Changed: make(chan struct{}, 1)}
	s.Holds = append(s.Holds, req.Hold)
	s.Running[id] = serving
	s.Mu.Unlock()
	defer func() {
		s.Mu.Lock()
		delete(s.Running, id)
		s.Mu.Unlock()
	}()
	if sc.After != "" {
		w.Header().Set("Retry-After", sc.After)
	}
	if sc.Empty {
		return
	}
	if sc.Body != "" {
		http.Error(w, sc.Body, sc.Status)
		return
	}
	if sc.Status != 0 {
		w.WriteHeader(sc.Status)
		said := bundle.Error{Code: bundle.CodeNotFound, Message: "no such image"}
		if sc.Status != http.StatusNotFound {
			said = bundle.Error{Code: bundle.CodeUnavailable, Message: "not now"}
		}
		json.NewEncoder(w).Encode(said)
		return
	}
	c := &cutter{w: w, r: r, at: sc.CutAt, how: sc.How}
	out := bundle.NewWriter(c)
	out.Hello(bundle.Hello{Version: 1, Stream: id})
	if sc.Said != nil {
		out.Error(sc.Said)
		return
	}
	if sc.Header != nil {
		out.Flush()
		sc.Header(out)
	}
	m := s.Image
	header := m.Image
	for _, h := range req.Have {
		if h.ChainID == m.ChainID && h.TOC == m.TOCDigest {
			header.TOC = nil
		}
	}
	if sc.Image != nil {
		sc.Image(&header)
	}
	out.Image(&header)
	leave := map[segment.ID]bool{}
	maps.Copy(leave, sc.Leave)
	var pages func(between func(left int))
	if req.Image.Startup {
		pages = s.startup(out, req, sc, leave)
	}
	if req.Image.Header {
		m = nil
	}
	plan, frames := s.Plan(m, req, leave)
	planned := false
	sendPlan := func() {
		if planned {
			return
		}
		planned = true
		if sc.Early != nil {
			out.Flush()
			sc.Early()
		}
		if sc.Plan != nil {
			sc.Plan(plan)
		}
		out.Plan(plan)
		out.Flush()
	}
	order := make([]uint32, len(frames))
	for i := range order {
		order[i] = uint32(i)
	}
	if sc.Shuffle != 0 {
		rand.New(rand.NewPCG(sc.Shuffle, 2)).Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
	}
	done := map[uint32]bool{}
	pos := 0
	send := func(f uint32) {
		if done[f] {
			return
		}
		done[f] = true
		data := frames[f].Bytes
		if sc.Damage[pos] {
			data = slices.Clone(data)
			data[len(data)*2/3] ^= 0x40
		}
		s.Mu.Lock()
		s.Sent = append(s.Sent, frames[f].ids...)
		s.Frames++
		s.Mu.Unlock()
		out.Frame(f, data)
		out.Flush()
		pos++
	}
	sendPromoted := func() {
		serving.Mu.Lock()
		promoted := serving.Promoted
		serving.Promoted = nil
		serving.Mu.Unlock()
		for _, f := range promoted {
			for k := range min(sc.Along+1, len(frames)-int(f)) {
				send(f + uint32(k))
			}
		}
	}
	if pages != nil {
		pages(func(left int) {
			if left <= sc.Behind {
				sendPlan()
			}
			if sc.Between != nil {
				sc.Between(left, serving)
			}
			sendPromoted()
		})
	}
	sendPlan()
	if pages != nil && !sc.NoHold && len(frames) > 0 {
		serving.hold(r.Context(), req.Hold, send)
	}
	if req.Choose {
		serving.choice(r.Context())
	}
	for _, f := range order {
		if sc.Before != nil {
			sc.Before(pos, serving)
		}
		sendPromoted()
		serving.Mu.Lock()
		skip := serving.Skip[f]
		serving.Mu.Unlock()
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
func (s *Scripted) startup(out *bundle.Writer, req *bundle.Request, sc Script, leave map[segment.ID]bool) (pages func(between func(left int))) {
	m := s.Image
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
		for c, content := range m.Tree.Contents {
			for i := range trace.Pages(content.Size) {
				all := true
				for k, seg := range m.Tree.Segments[content.First : content.First+content.Segments] {
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
	if m.Here != nil {
		out.Here(&bundle.Here{Runs: m.Here})
	}
	set := &bundle.Startup{Origin: bundle.OriginTraced}
	var frames [][]byte
	lie := sc.Lie
	all := m.Startup
	if args := req.Image.Args; len(args) > 0 && m.Services[args[0]] != nil {
		all = m.Services[args[0]]
	}
	for _, runs := range all {
		f := bundle.StartupFrame{First: uint32(len(set.Runs))}
		var raw []byte
		for _, r := range runs {
			size, content := m.Tree.Contents[r.Content].Size, m.Content(r.Content)
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
			size := m.Tree.Contents[r.Content].Size
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
	set.Filled = min(m.Filled, len(set.Frames))
	out.Startup(set, m.Tree)
	out.Flush()
	for c, content := range m.Tree.Contents {
		for _, seg := range m.Tree.Segments[content.First : content.First+content.Segments] {
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
			if sc.Pages != nil {
				data = sc.Pages(i, data)
			}
			out.Pages(uint32(i), data)
			out.Flush()
			s.Mu.Lock()
			s.Pages++
			s.Mu.Unlock()
		}
	}
}

// Plan says what is sent of an image, nil: of none, to a request; leave are segments that are left out.
func (s *Scripted) Plan(m *Image, req *bundle.Request, leave map[segment.ID]bool) (*bundle.Plan, []SentFrame) {
	if m == nil {
		return &bundle.Plan{}, nil
	}
	have := maps.Clone(leave)
	if have == nil {
		have = make(map[segment.ID]bool)
	}
	for _, h := range req.Have {
		if m.ChainID == h.ChainID && m.TOCDigest == h.TOC {
			present(have, m, &h)
		}
	}
	return plan(m, have, s.Group, s.encode)
}

// encode returns a frame, which is encoded once for its key.
func (s *Scripted) encode(key string, raw ...[]byte) []byte {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	if s.Encoded[key] == nil {
		var err error
		if s.Encoded[key], err = segment.AppendFrame(nil, segment.Zstd, raw...); err != nil {
			panic(err)
		}
	}
	return s.Encoded[key]
}

func (s *Scripted) promote(w http.ResponseWriter, r *http.Request) {
	var p bundle.Promotion
	if err := json.NewDecoder(r.Body).Decode(&p); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	s.Mu.Lock()
	defer s.Mu.Unlock()
	if len(p.Frames) > 0 {
		s.Promotions = append(s.Promotions, p.Frames)
	}
	if p.Rest > 0 {
		s.Rests = append(s.Rests, p.Rest)
	}
	if s.Deaf > 0 {
		s.Deaf--
		w.WriteHeader(http.StatusNoContent)
		return
	}
	stream := s.Running[p.Stream]
	if stream == nil {
		http.NotFound(w, r)
		return
	}
	stream.Mu.Lock()
	stream.Promoted = append(stream.Promoted, p.Frames...)
	stream.Released, stream.Chosen = stream.Released || p.Release, stream.Chosen || p.Chosen
	for _, f := range p.Skip {
		if stream.Skip == nil {
			stream.Skip = make(map[uint32]bool)
		}
		stream.Skip[f] = true
	}
	stream.Mu.Unlock()
	if len(p.Frames) > 0 {
		stream.Arrived <- struct{}{}
	}
	select {
	case stream.Changed <- struct{}{}:
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
