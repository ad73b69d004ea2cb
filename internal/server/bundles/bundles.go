// Package bundles answers pulls: the HTTP handler of bundle.PullPath,
// bundle.PromotePath and bundle.WarmPath, of bundle.TracePath and bundle.StartupPath, by which
// it learns what to send first, and of bundle.RecipePath and bundle.ContentsPath, by which workers
// prove what they have pulled.
//
// The way of one pull. The request is decoded and its image is resolved; what
// fails up to here is an HTTP error with a bundle.Error as its body. Then the
// stream begins: Hello; the rootfs is made if it is asked for the
// first time (ingest), or repaired if something is wrong with it that the worker says
// arrived damaged (see damage.go), and its Image section is sent at once; then its index is
// read, without which nothing can be planned; the startup set,
// if it was asked for, is sent, as far as the worker lacks it, while the plan
// of the rest is made; the plan is sent, among the pages to workers that take it there; the frames are read from their packs and
// sent, two runs ahead of the network. What fails now is an Error section. A
// promotion finds the stream by its ID and changes what is read next. The startup
// set of a service that joins a pull comes in a stream of its own, which goes ahead
// of the first (bundle.Request.Ahead): that sends nothing but promoted frames
// meanwhile. So does one whose worker wants the line for itself until a container is
// ready (bundle.Request.Hold), and one whose worker is about to say which frames it does
// not want (bundle.Request.Choose).
package bundles

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/netip"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/opencontainers/go-digest"
	"github.com/prometheus/client_golang/prometheus"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/format/trace"
	"hydrofoil.dev/foil/internal/metrics"
	"hydrofoil.dev/foil/internal/server/access"
	"hydrofoil.dev/foil/internal/server/cache"
	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/dedup"
	"hydrofoil.dev/foil/internal/server/guard"
	"hydrofoil.dev/foil/internal/server/limit"
	"hydrofoil.dev/foil/internal/server/objects"
	"hydrofoil.dev/foil/internal/server/planner"
	"hydrofoil.dev/foil/internal/server/readers"
	"hydrofoil.dev/foil/internal/server/startup"
	"hydrofoil.dev/foil/internal/server/tcp"
	"hydrofoil.dev/foil/internal/server/turns"
	"hydrofoil.dev/foil/internal/server/webhooks"
)

// Options are what a Handler works with.
type Options struct {
	Catalog catalog.Catalog
	Objects objects.Store
	Tables  *dedup.Tables // of packs; nil: the Handler keeps its own
	// Rootfs returns the rootfs of an image, made now if it is not there. A
	// bundle.Error that it returns is what the worker is told.
	Rootfs func(context.Context, *Resolved) (catalog.Rootfs, error)
	// Repair makes anew what is lost or damaged of a rootfs and returns it. Nil
	// means that such images fail.
	Repair func(context.Context, *Resolved) (catalog.Rootfs, error)
	// Recipe returns a layer of an image, by its number, with its recipe, which is made now
	// if there is none. Nil means that this server has none.
	Recipe func(ctx context.Context, m *Resolved, layer int) (catalog.Layer, error)
	// Guard says who may do what; nil: everybody may everything.
	Guard *guard.Guard
	// Heavy is where what is dear to read waits for its turn; nil: nothing does.
	Heavy *limit.Heavy[guard.Client]
	// Webhooks is told of pulls; nil: nobody is.
	Webhooks *webhooks.Sender
	// StartupMax is how large a startup set may be.
	StartupMax startup.Limit
	// Memory bounds the indices, orders and frames kept in memory; 0 means 256 MiB.
	Memory int64
	// HaveSegments is with how many segments, of all rootfs that a worker has, an image is compared at most; 0 means
	// 33,554,432.
	HaveSegments int
	// Patience bounds how long a request may take to arrive, and how long a
	// stream waits for a client that takes nothing; 0 means two minutes. A worker
	// that was cut off resumes.
	Patience time.Duration
	// Alive is how often a worker is told that the server is working on what it asked
	// for, while nothing is sent; 0 means 15 seconds, a quarter of what a worker waits.
	// AliveMost is for how long it is told so at a time; 0 means an hour: what takes longer,
	// or hangs, is to be asked for again.
	Alive, AliveMost time.Duration
	// Readers are told who reads objects; nil: nobody is.
	Readers *readers.Readers
	// Log takes failures; nil means slog.Default.
	Log *slog.Logger
}

// Handler serves pulls and promotions, and learns from traces. Close ends what it
// does in the background.
type Handler struct {
	o       Options
	log     *slog.Logger
	hidden  catalog.Repositories // what those find who may not pull: nothing
	warmed  *limit.Buckets[netip.Addr]
	streams streams
	indices *cache.Cache[*planner.Index] // by digest of the encoded TOC
	orders  *cache.Cache[planner.Order]  // by digests of config and encoded TOC
	packs   *dedup.Store
	frames  source
	sets    *startup.Sets
	turns   *turns.Turns
	mux     *http.ServeMux
	results *prometheus.CounterVec
	checks  checks
	work    sync.WaitGroup // what ahead does

	guessing sync.Mutex // held while an order is guessed that is not kept

	mu       sync.Mutex
	suspects map[digest.Digest]bool // guarded by mu: chain IDs to repair before they are served again
}

// New returns a Handler.
func New(o Options) *Handler {
	if o.Memory == 0 {
		o.Memory = 256 << 20
	}
	if o.HaveSegments == 0 {
		o.HaveSegments = 32 << 20
	}
	if o.Patience == 0 {
		o.Patience = 2 * time.Minute
	}
	if o.Alive == 0 {
		o.Alive = 15 * time.Second
	}
	if o.AliveMost == 0 {
		o.AliveMost = time.Hour
	}
	if o.Log == nil {
		o.Log = slog.Default()
	}
	h := &Handler{
		o: o, log: o.Log, mux: http.NewServeMux(), suspects: map[digest.Digest]bool{},
		indices: cache.New(o.Memory*5/8, (*planner.Index).Memory),
		packs:   &dedup.Store{Objects: o.Objects, Catalog: o.Catalog, Tables: o.Tables},
		frames:  source{o.Objects, cache.New(o.Memory/8, func(b []byte) int64 { return int64(cap(b)) + 1024 }), make(chan struct{}, runtime.GOMAXPROCS(0)), o.Guard.Place},
		orders:  cache.New(o.Memory/8, func(x planner.Order) int64 { return int64(4*len(x)) + 1024 }),
		results: metrics.Counters(prometheus.CounterOpts{Name: "foil_serve_bundles_total",
			Help: "Bundles that were asked for: sent to their end, refused (no such image, or not for bundles), failed, or cut off by the worker or the link, which resume."},
			[]string{"result"}, metrics.Each(resultSent, resultRefused, resultFailed, resultCut)...),
		checks: newChecks(),
		hidden: catalog.Hide(o.Catalog),
		warmed: limit.New[netip.Addr](warmRate, warmBurst, warmClients),
		turns:  turns.New(2 * runtime.GOMAXPROCS(0)),
	}
	h.sets = startup.New(startup.Options{
		Catalog: o.Catalog, Objects: o.Objects, Load: h.loadTOC, Max: o.StartupMax, Memory: o.Memory / 8, Readers: o.Readers, Log: o.Log,
	})
	for _, e := range endpoints {
		h.mux.HandleFunc(e.Method+" "+e.Path, func(w http.ResponseWriter, r *http.Request) { e.answer(h, w, r) })
	}
	return h
}

// Endpoint is one of the endpoints for workers.
type Endpoint struct {
	Method, Path string
	// Right is what it asks for, on the repository of the image that the request names; promotions on that of their
	// stream, which they must have begun. Recorded traces want access.Teach besides. Warming up wants none (0).
	Right  access.Right
	answer func(*Handler, http.ResponseWriter, *http.Request)
}

var endpoints = []Endpoint{
	{"POST", bundle.PullPath, access.Pull, (*Handler).pull},
	{"POST", bundle.RecipePath, access.Pull, (*Handler).recipe},
	{"POST", bundle.ContentsPath, access.Pull, (*Handler).contents},
	{"POST", bundle.TracePath, access.Pull, (*Handler).trace},
	{"GET", bundle.StartupPath, access.Pull, (*Handler).startup},
	{"DELETE", bundle.StartupPath, access.Teach, (*Handler).forget},
	{"POST", bundle.PromotePath, access.Pull, (*Handler).promote},
	{"POST", bundle.WarmPath, 0, (*Handler).warm},
}

// Endpoints returns all of them.
func Endpoints() []Endpoint { return slices.Clone(endpoints) }

// How requests for a bundle end.
const (
	resultSent    = "sent"
	resultRefused = "refused"
	resultFailed  = "failed"
	resultCut     = "cut"
)

// refused is how one ended that fails with e.
func refused(e *bundle.Error) string {
	if statuses[e.Code] >= 500 {
		return resultFailed
	}
	return resultRefused
}

// Metrics returns what tells of bundles.
func (h *Handler) Metrics() prometheus.Collector {
	return metrics.Collectors{h.results, h.checks.results, prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "foil_serve_bundles_running",
		Help: "Bundles that are being sent."}, func() float64 { return float64(h.streams.count()) })}
}

// Close ends what goes on in the background and waits for it. Requests must have
// ended.
func (h *Handler) Close() error {
	h.work.Wait()
	err := h.sets.Close()
	h.orders.Close()
	h.frames.made.Close()
	h.indices.Close()
	return err
}

// ServeHTTP serves the paths of package bundle.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	defer h.o.Readers.Begin()()
	h.mux.ServeHTTP(w, r)
}

// body reads a request of at most limit bytes.
func (h *Handler) body(w http.ResponseWriter, r *http.Request, limit int64) ([]byte, error) {
	// A ResponseWriter without deadlines, as in tests, has none.
	rc := http.NewResponseController(w)
	_ = rc.SetReadDeadline(time.Now().Add(h.o.Patience))
	defer func() { _ = rc.SetReadDeadline(time.Time{}) }()
	b, err := io.ReadAll(http.MaxBytesReader(w, r.Body, limit))
	if err != nil {
		return nil, &bundle.Error{Code: bundle.CodeInvalid, Message: fmt.Sprintf("read the request: %v", err)}
	}
	return b, nil
}

func (h *Handler) promote(w http.ResponseWriter, r *http.Request) {
	b, err := h.body(w, r, 1<<20)
	var p bundle.Promotion
	if err == nil && json.Unmarshal(b, &p) != nil {
		err = &bundle.Error{Code: bundle.CodeInvalid, Message: "the promotion is no JSON of one"}
	}
	if err != nil {
		writeError(w, h.log, err, "")
		return
	}
	q := h.stream(r.Context(), p.Stream)
	if q == nil {
		writeError(w, h.log, &bundle.Error{Code: bundle.CodeNotFound, Message: "the stream has ended"}, "")
		return
	}
	if len(p.Skip) > bundle.MaxSkip {
		writeError(w, h.log, &bundle.Error{Code: bundle.CodeInvalid, Message: fmt.Sprintf("%d frames are to be skipped, more than %d", len(p.Skip), bundle.MaxSkip)}, "")
		return
	}
	if p.Rest < 0 || p.Rest > bundle.MaxRest {
		writeError(w, h.log, &bundle.Error{Code: bundle.CodeInvalid, Message: fmt.Sprintf("rest for %v, at most %v", p.Rest, bundle.MaxRest)}, "")
		return
	}
	if p.Rest > 0 {
		q.rest(p.Rest)
	}
	q.promote(p.Number, p.Frames)
	if len(p.Skip) > 0 {
		q.skip(p.Skip)
	}
	if p.Chosen {
		q.choice()
	}
	if p.Release {
		q.release()
	}
	w.WriteHeader(http.StatusNoContent)
}

// stream finds one that whoever asks has begun, and may still pull.
func (h *Handler) stream(ctx context.Context, id string) *queue {
	q, of := h.streams.find(id)
	if q == nil || of.subject != guard.Subject(ctx) || !h.o.Guard.May(ctx, access.Pull, of.repository, of.reference) {
		return nil
	}
	return q
}

func (h *Handler) pull(w http.ResponseWriter, r *http.Request) {
	ctx := r.Context()
	result := resultCut
	defer func() { h.results.WithLabelValues(result).Inc() }()
	fail := func(err error, about string) {
		if result = refused(wireError(err, about)); isBeyond(err) {
			result = resultRefused
		}
		writeError(w, h.log, err, about)
	}
	// Of an image it is known only in the end how large its documents are.
	err := h.o.Guard.Crowded(ctx)
	var small func()
	if err == nil {
		small, err = h.o.Guard.Large(ctx, r.ContentLength)
	}
	if err != nil {
		fail(err, "")
		return
	}
	defer small()
	b, err := h.body(w, r, bundle.MaxRequest)
	if err != nil {
		fail(err, "")
		return
	}
	var req *bundle.Request
	if err := h.heavy(ctx, len(b), func() (err error) {
		req, err = bundle.DecodeRequest(b)
		return err
	}); err != nil {
		fail(&bundle.Error{Code: bundle.CodeInvalid, Message: err.Error()}, "")
		return
	}
	end, charge, err := h.begin(ctx)
	if err != nil {
		fail(err, "")
		return
	}
	defer end()
	image, err := h.resolve(ctx, req.Image)
	if err != nil {
		fail(err, ref(req.Image.Repository, req.Image.Reference))
		return
	}

	pulled := webhooks.Data{Repository: image.Repository, Digest: image.Manifest.Digest.String(), MediaType: image.Manifest.MediaType,
		Size: int64(len(image.Manifest.Bytes)), Subject: guard.Subject(ctx)}
	if digest.Digest(image.Reference).Validate() != nil {
		pulled.Tags = []string{image.Reference}
	}
	h.o.Webhooks.Pulled(pulled)
	w.Header().Set("Content-Type", bundle.MediaTypeBundle)
	w.WriteHeader(http.StatusOK)
	slow := tcp.NewPatient(w, h.o.Patience)
	defer slow.End()
	out := bundle.NewWriter(slow)
	s := &pull{h: h, req: req, image: image, about: ref(image.Repository, image.Reference), w: out, queue: &queue{}, charge: charge, client: client(r), conn: r.RemoteAddr}
	s.flush = func() error { return errors.Join(out.Flush(), slow.Flush()) }
	id := h.streams.add(s.queue, owner{guard.Subject(ctx), image.Repository, image.Manifest.Digest.String()})
	defer h.streams.remove(id)
	if err := s.run(ctx, id); err != nil {
		var gone writeFailed
		if ctx.Err() != nil || errors.As(err, &gone) {
			h.log.Debug("bundle was cut off", "image", s.about, "error", err)
			return
		}
		e := wireError(err, s.about)
		if statuses[e.Code] >= 500 {
			h.log.Error("bundle failed", "image", s.about, "error", err)
		}
		result = refused(e)
		_ = s.w.Error(e) // nobody is there if this fails
		return
	}
	result = resultSent
}

// heavy reads a document of so many bytes, when it is its turn if they are many.
func (h *Handler) heavy(ctx context.Context, n int, read func() error) error {
	if n < limit.HeavyBytes {
		return read()
	}
	leave, err := h.o.Heavy.Enter(ctx, guard.ClientOf(ctx))
	if err != nil {
		return err
	}
	defer leave()
	return read()
}

// held is heavy of a document that is in memory already, as manifests are: few of a client may be.
func (h *Handler) held(ctx context.Context, n int, read func() error) error {
	end, err := h.o.Guard.Large(ctx, int64(n))
	if err != nil {
		return err
	}
	defer end()
	return h.heavy(ctx, n, read)
}

// begin lets a request for a bundle, or for what proves one, begin. charge takes how long was worked for it.
func (h *Handler) begin(ctx context.Context) (end func(), charge func(time.Duration), err error) {
	if charge, err = h.o.Guard.Work(ctx); err != nil {
		return nil, nil, err
	}
	end, err = h.o.Guard.Bundle(ctx)
	return end, charge, err
}

// pull is one bundle under way.
type pull struct {
	h      *Handler
	req    *bundle.Request
	image  *Resolved
	w      *bundle.Writer
	flush  func() error
	queue  *queue
	charge func(time.Duration) // takes what was worked for the client
	client string              // who asks, as client says
	conn   string              // the connection
	about  string              // the image, in messages
}

func (p *pull) run(ctx context.Context, id string) error {
	if err := p.w.Hello(bundle.Hello{Version: bundle.Version, Stream: id}); err != nil {
		return writeFailed{err}
	}
	if err := p.flush(); err != nil {
		return writeFailed{err}
	}
	rootfs, encoded, err := p.header(ctx)
	if err != nil {
		return err
	}
	x, err := p.index(ctx, rootfs, encoded)
	if err != nil {
		return err
	}
	head := p.head()
	defer head.close()
	d := planner.NewDifference(x)
	var set *startup.Set
	var delivery *startup.Delivery
	p.meanwhile(ctx, func() {
		var here []trace.Run
		if here, err = p.have(ctx, d, x); err == nil {
			set, delivery = p.startup(ctx, d, x, here)
		}
	})
	if err != nil {
		return err
	}

	// The plan is made while pages are on their way, and goes among them if it may.
	planning, cancel := context.WithCancel(ctx)
	defer cancel()
	plan := p.plan(planning, d, x, encoded, set, delivery)
	p.queue.pause()
	if ahead := p.h.stream(ctx, p.req.Ahead); ahead != nil && ahead != p.queue {
		ahead.pause()
		err = p.pages(ctx, x, delivery, plan)
		ahead.resume()
	} else {
		err = p.pages(ctx, x, delivery, plan)
	}
	p.queue.resume()
	if err != nil {
		cancel()
	}
	p.await(plan.wait)
	if err := cmp.Or(err, plan.err); err != nil {
		return err
	}
	defer p.queue.hold(p.hold(delivery))()
	if p.req.Choose {
		defer p.queue.choose(bundle.MaxChoice)()
	}
	if err := plan.send(); err != nil {
		return err
	}
	if delivery != nil {
		head.end() // what the container needs has gone
	}
	if err := p.queue.send(ctx, p.h.frames, p.w, p.flush, p.h.o.Alive); err != nil {
		return p.suspect(err)
	}
	if err := p.w.End(); err != nil {
		return writeFailed{err}
	}
	return nil
}

// header sends an image's section, at once, and returns its rootfs and TOC. Its index is of no
// use for that, and comes later: the worker has enough to do until then.
func (p *pull) header(ctx context.Context) (r catalog.Rootfs, encoded []byte, err error) {
	m := p.image
	segments := 0
	p.meanwhile(ctx, func() {
		if len(p.req.Damaged) == 0 {
			r, encoded, err = p.h.described(ctx, m)
		} else {
			var x *planner.Index
			if r, encoded, x, err = p.h.whole(ctx, m); err == nil && p.damaged(ctx, m, x) {
				p.h.suspect(m)
				r, encoded, _, err = p.h.whole(ctx, m)
			}
		}
		if err == nil {
			segments, err = toc.CountSegments(encoded)
		}
	})
	if err != nil {
		return r, nil, err
	}
	section := &bundle.Image{
		Manifest: m.Manifest, Chosen: m.Chosen, Config: m.Config,
		ChainID: m.ChainID, TOCDigest: r.TOC, TOC: encoded, Segments: uint32(segments),
	}
	for _, have := range p.req.Have {
		if have.ChainID == m.ChainID && have.TOC == r.TOC {
			section.TOC = nil
		}
	}
	if err := p.w.Image(section); err != nil {
		return r, nil, writeFailed{err}
	}
	if err := p.flush(); err != nil {
		return r, nil, writeFailed{err}
	}
	return r, encoded, nil
}

// index returns the index of the image, whose header was sent. What turns out to be damaged
// now is repaired, as it would have been before.
func (p *pull) index(ctx context.Context, r catalog.Rootfs, encoded []byte) (x *planner.Index, err error) {
	m := p.image
	p.meanwhile(ctx, func() {
		x, err = p.h.index(ctx, r, m.blobs(), encoded)
		if err == nil || !isDamage(err) || ctx.Err() != nil || p.h.o.Repair == nil {
			return
		}
		p.h.log.Warn("image is repaired", "image", ref(m.Repository, m.Reference), "error", err)
		p.h.suspect(m)
		var now catalog.Rootfs
		if now, _, x, err = p.h.whole(ctx, m); err == nil && now.TOC != r.TOC {
			err = &bundle.Error{Code: bundle.CodeUnavailable, Message: "it was damaged on the server, and has been repaired; try again"}
		}
	})
	return x, err
}

// haveTime is for how long an image is compared with what a worker has. With more, more is sent than it lacks; and so beyond
// Options.HaveSegments: workers have some millions at most.
const haveTime = 30 * time.Second

// have takes away what the worker has, one rootfs after the other, so that not
// all of them need to be in memory. It returns the pages of the image that are here, merged. What is
// said twice counts once.
func (p *pull) have(ctx context.Context, d *planner.Difference, wanted *planner.Index) (pages []trace.Run, err error) {
	type rootfs struct{ chainID, toc digest.Digest }
	seen := make(map[rootfs]bool, len(p.req.Have))
	began, left := time.Now(), p.h.o.HaveSegments
	for n, have := range p.req.Have {
		if left <= 0 || time.Since(began) > haveTime {
			p.h.log.Warn("a worker has too much to compare it all: more is sent than it lacks", "image", p.about, "rootfs", len(p.req.Have), "compared", n)
			break
		}
		if key := (rootfs{have.ChainID, have.TOC}); seen[key] {
			continue
		} else {
			seen[key] = true
		}
		r, err := p.h.o.Catalog.Rootfs(ctx, have.ChainID)
		if errors.Is(err, catalog.ErrNotFound) || err == nil && r.TOC != have.TOC {
			continue // a rootfs of another server, or of another time
		}
		if err != nil {
			return nil, fmt.Errorf("find rootfs %s: %w", have.ChainID, err)
		}
		x, err := p.h.index(ctx, r, nil, nil)
		if err != nil {
			if ctx.Err() != nil {
				return nil, err
			}
			// More is sent than needed; that is all.
			p.h.log.Warn("a rootfs that a worker has cannot be read", "chain_id", have.ChainID, "error", err)
			continue
		}
		left -= len(x.Table().Segments)
		d.Have(x, have.Present)
		if len(have.Pages) == 0 {
			continue
		}
		runs, rest, err := trace.NextRuns(have.Pages)
		if err == nil {
			err = trace.Check(runs, x.Table())
		}
		if err != nil || len(rest) > 0 {
			return nil, &bundle.Error{Code: bundle.CodeInvalid, Message: fmt.Sprintf("pages of rootfs %s: %v, %d bytes too many", have.ChainID, err, len(rest))}
		}
		if wanted.TOC() == r.TOC {
			pages = trace.Merge(append(pages, runs...))
		}
	}
	return pages, nil
}
