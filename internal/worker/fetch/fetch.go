// Package fetch brings bundles to the worker: one request, one stream, one
// pipeline that verifies, decompresses and writes on all cores, until
// everything that was planned is in arenas and durable. A stream that breaks is
// resumed with a request that says what has arrived; a read that waits for a
// segment queued far behind has it promoted.
//
// The way of one pull. Pull's goroutine sends the request and takes section
// after section off the stream. For an image it calls Options.Open, which lays
// out an arena; the plan is turned into "which frame holds this segment"; a
// frame goes to one of Options.Workers workers, which decodes it and hands each of its segments to
// Arena.WriteSegment. A startup set comes before the plan: its frames go to the same workers,
// and each page run to Arena.WriteRun; that of a service that joins the pull comes in a
// stream of its own (join.go). What a start is not likely to need is kept while the server holds,
// and written as it is read (keep.go), by Arena.WritePart. Bytes are verified, written and
// marked in these places only. Every few seconds, and at the end, arenas are synced.
//
// Open is called between two sections and nothing is read meanwhile; what
// arrives waits in the connection's receive window, 16 MiB. So Open should
// return as soon as the arena exists, and build and mount the filesystem in a
// goroutine of its own: frames can be written from then on. A second or so does no
// harm.
package fetch

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sync/semaphore"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/format/trace"
	"hydrofoil.dev/foil/internal/worker/arena"
)

// Options say what to pull and where to. Client, Request and Open are needed.
type Options struct {
	Client  *Client
	Request bundle.Request
	// Head is called, when not nil, each time when all of an image's header but its TOC
	// has arrived, as bundle.ReaderOptions says. An error ends the pull as one of Open does.
	Head func(img *bundle.Image) error
	// Name is what errors call the pull; empty means the images' references.
	Name string
	// Open is called once for each image, with its verified header and its TOC
	// (nil when the server left it out: Request.Have names it). It returns the
	// arena for what is fetched, or nil when all of the rootfs is elsewhere. The arena
	// stays the caller's; it must stay open until Wait returns. An error ends
	// the pull, and Wait returns it wrapped. See the package comment for how
	// long it may take.
	Open func(ctx context.Context, img *bundle.Image, t *toc.TOC) (*arena.Arena, error)
	// TOC returns the encoded TOC of an image whose header left it out. It is
	// called only if a startup set comes, or if frames hold segments that no arena of the image has a
	// place for; nil means that it cannot be had.
	TOC func(ctx context.Context, img *bundle.Image) ([]byte, error)
	// Early is called, when not nil, each time when the plan of a stream has arrived: what the
	// stream had of startup sets has been written, unless it was damaged.
	Early func(Startup)

	// Pages is called by several goroutines, when not nil, with page runs of a startup set that have been
	// written to the arena of the image with that index in the request, in about the order of need.
	Pages func(image int, origin string, runs []trace.Run)

	// Here is called, when not nil, with the pages of a startup set of the image with that
	// index in the request that do not come, since the server was told that they are on this worker, in
	// about the order of need; before those that come. They lie in contents of the image's TOC.
	Here func(image int, runs []trace.Run)

	// Hold, when more than 0, has the server send nothing but promoted frames after a
	// startup set (see bundle.Startup.Held), until Release is called, so much time has passed, or
	// the start turns out to need much that was not in the set (see hold.go): it has the
	// line, the processors and the disk for itself. It is bounded by bundle.MaxHold,
	// and by half of the client's StallTimeout.
	Hold time.Duration

	// GiveUp is how long the pull keeps trying while nothing arrives; 0 means
	// DefaultGiveUp. Then its arenas fail: reads that wait get an error.
	GiveUp time.Duration
	// GiveUpUnopened is the same until the first image's header has arrived,
	// while nobody reads; 0 means 15 seconds, at most GiveUp. A server that
	// refuses connections, whose name is unknown or certificate not trusted, and
	// one that answers as no Hydrofoil server does, gets two seconds.
	GiveUpUnopened time.Duration
	// Pause is the shortest pause between streams when one after the other
	// breaks; it doubles up to 5 seconds. 0 means 100 ms.
	Pause time.Duration
	// Attempts is how often one frame may arrive damaged, or the server break
	// the protocol without a frame in between, before the pull fails; 0 means 3.
	Attempts int
	// SyncEvery and SyncBytes (of contents written, startup sets not counted) are when
	// arenas are synced on the way; 0 means 5 seconds and 64 MiB.
	SyncEvery time.Duration
	SyncBytes int64
	// Workers is how many frames are decoded and written at a time; 0 means GOMAXPROCS.
	Workers int
	// PromoteBeyond is how many bytes may be planned before a wanted frame
	// without it being promoted; 0 means 256 KiB, less than 0 none.
	PromoteBeyond int64

	// JoinPatience is how long reads wait for the server to say which pages of a
	// service that has joined will come, before what they wait for is promoted; 0
	// means 1 second.
	JoinPatience time.Duration

	// Waits is where reads that had to wait are noted; nil means nowhere that
	// anybody sees.
	Waits *Waits

	Logger *slog.Logger // nil means none
}

// DefaultGiveUp is Options.GiveUp when that is 0.
const DefaultGiveUp = 5 * time.Minute

func (o *Options) defaults() {
	if o.GiveUp == 0 {
		o.GiveUp = DefaultGiveUp
	}
	if o.GiveUpUnopened == 0 {
		o.GiveUpUnopened = min(15*time.Second, o.GiveUp)
	}
	if o.Pause == 0 {
		o.Pause = 100 * time.Millisecond
	}
	if o.Attempts == 0 {
		o.Attempts = 3
	}
	if o.SyncEvery == 0 {
		o.SyncEvery = 5 * time.Second
	}
	if o.SyncBytes == 0 {
		o.SyncBytes = 64 << 20
	}
	if o.JoinPatience == 0 {
		o.JoinPatience = time.Second
	}
	if o.Workers <= 0 {
		o.Workers = runtime.GOMAXPROCS(0)
	}
	if o.PromoteBeyond == 0 {
		o.PromoteBeyond = 256 << 10
	}
	if o.Client != nil {
		o.Hold = min(o.Hold, bundle.MaxHold, o.Client.opts.StallTimeout/2)
	}
	if o.Waits == nil {
		o.Waits = new(Waits)
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.Name == "" && len(o.Request.Images) > 0 {
		o.Name = o.Request.Images[0].Repository + ":" + o.Request.Images[0].Reference
	}
}

// inFlight bounds the compressed frames between the stream and the workers,
// bytes.
const inFlight = 8 << 20

// ErrStopped is returned, wrapped, by Wait after Stop.
var ErrStopped = errors.New("stopped")

// ErrDamaged is returned, wrapped, by Wait when something has arrived damaged
// Options.Attempts times.
var ErrDamaged = errors.New("arrived damaged")

// ErrUnreachable is returned, wrapped, by Wait when nothing arrived for
// Options.GiveUp.
var ErrUnreachable = errors.New("no success in reaching")

// Pull is one pull that runs, or has ended.
type Pull struct {
	opts   Options
	log    *slog.Logger
	outer  context.Context // the caller's
	ctx    context.Context
	cancel context.CancelCauseFunc
	work   sync.WaitGroup // every goroutine but run
	done   chan struct{}  // closed after run has ended, and err is set
	err    error

	jobs    chan job
	room    *semaphore.Weighted // of inFlight
	buffers sync.Pool           // *buffer

	moved      atomic.Int64 // bytes of streams
	total      atomic.Int64 // what moved will be at most; 0: unknown
	opened     atomic.Int64 // images
	frames     atomic.Int64 // that were written
	bad        atomic.Int64 // frames that were damaged
	resumes    atomic.Int64
	promotions atomic.Int64 // frames asked for ahead of their turn
	stored     atomic.Int64 // bytes of contents that were written
	unsync     atomic.Int64 // bytes of frames of the plan, decoded, since the last sync
	pagesMoved atomic.Int64 // bytes of frames of startup sets
	pagesRaw   atomic.Int64 // bytes of the page runs in them that were written
	pagesTotal atomic.Int64 // what pagesRaw will be
	rate       rate
	kick       chan struct{} // a sync is due

	mu       sync.Mutex
	images   []bundle.ImageRequest // pinned to digests once resolved
	targets  []*target             // by index in the request
	current  *stream               // the one that runs and has its plan
	wanted   map[*reading]struct{} // reads that wait
	damaged  map[segment.ID]int    // how often a segment or page run arrived damaged
	claims   []segment.ID          // those of them that the server is to be told of
	wholly   bool                  // no more startup sets are asked for: segments alone
	origin   string                // of the first startup set
	promoter promoter
	hold     hold
	kept     []*kept // frames that came while the server holds, and are to be written
	keptSize int64   // bytes of them
	joins    []*join
	over     bool // nobody joins any more
	trouble  trouble

	planned  chan struct{} // closed when the first plan, and what came before it, is here
	planOnce sync.Once
	joining  sync.WaitGroup // the joins' goroutines
	joinCtx  context.Context
	leave    context.CancelFunc // ends joinCtx
}

// target is one image that was opened.
type target struct {
	header bundle.Image // without its bytes
	arena  *arena.Arena // nil: nothing is fetched
	toc    *toc.TOC     // until the plan has been read
}

// layout returns the arena's layout, or nil.
func (t *target) layout() *arena.Layout {
	if t.arena == nil {
		return nil
	}
	return t.arena.Layout()
}

// Start begins a pull, which goes on until it is complete, has failed, ctx ends
// or Stop is called.
func Start(ctx context.Context, opts Options) *Pull {
	p := newPull(ctx, opts)
	go p.run()
	return p
}

func newPull(ctx context.Context, opts Options) *Pull {
	opts.defaults()
	outer := ctx
	ctx, cancel := context.WithCancelCause(ctx)
	p := &Pull{
		outer:   outer,
		opts:    opts,
		log:     opts.Logger.With("pull", opts.Name),
		ctx:     ctx,
		cancel:  cancel,
		done:    make(chan struct{}),
		jobs:    make(chan job),
		planned: make(chan struct{}),
		room:    semaphore.NewWeighted(inFlight),
		kick:    make(chan struct{}, 1),
		images:  slices.Clone(opts.Request.Images),
		targets: make([]*target, len(opts.Request.Images)),
		wanted:  make(map[*reading]struct{}),
		damaged: make(map[segment.ID]int),
	}
	p.joinCtx, p.leave = context.WithCancel(ctx)
	p.promoter.init(p)
	return p
}

// Stop ends the pull soon. Its arenas do not fail: reads go on waiting for the
// next pull.
func (p *Pull) Stop() { p.cancel(ErrStopped) }

// Wait waits for the end of the pull. It returns nil when all that the server
// planned is present and durable.
func (p *Pull) Wait() error {
	<-p.done
	return p.err
}

func (p *Pull) run() {
	defer close(p.done)
	for range p.opts.Workers {
		p.work.Go(p.worker)
	}
	p.work.Go(p.syncer)
	p.work.Go(p.promoter.run)
	err := p.streams()
	p.endJoins()
	p.endHold()
	close(p.jobs)
	if err == nil {
		err = context.Cause(p.ctx) // a worker may have failed with the last frame
	}
	if err == nil {
		// Before anybody is told that it is complete.
		err = p.sync(p.ctx)
	}
	if cause := context.Cause(p.ctx); cause != nil && err != nil {
		err = cause // a worker's or the syncer's error, or Stop's
	}
	p.cancel(errors.New("the pull has ended"))
	p.work.Wait()
	if err != nil {
		p.err = fmt.Errorf("pull %s: %w", p.opts.Name, err)
		p.fail(err)
		return
	}
	p.total.Store(p.moved.Load())
}

// fail makes the arenas fail for reads that would otherwise wait for ever. When
// the pull was stopped from outside, another one will come.
func (p *Pull) fail(err error) {
	if errors.Is(err, ErrStopped) || p.outer.Err() != nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, t := range p.targets {
		if t != nil && t.arena != nil && !t.arena.Complete() {
			t.arena.Fail(p.err)
		}
	}
}

// patience is how long a pull that has not begun tries a server that is not
// likely to change: it refuses connections, its name is unknown, its certificate
// is not trusted, or what answers is no Hydrofoil server. Long enough for one
// that restarts, short enough for a person who mistyped.
const patience = 2 * time.Second

func unlikely(err error) bool {
	dns, ok := errors.AsType[*net.DNSError](err)
	if ok && dns.IsNotFound || errors.Is(err, syscall.ECONNREFUSED) || errors.As(err, new(*tls.CertificateVerificationError)) {
		return true
	}
	status, ok := errors.AsType[*StatusError](err)
	return ok && status.Said == nil && status.After == 0
}

// streams runs one stream after the other until one comes to its end with
// nothing left to ask for.
func (p *Pull) streams() error {
	last := time.Now() // when something arrived
	faults := 0        // streams that broke the protocol, in a row
	stalls := 0        // streams that stalled: a server that needs longer is not to be asked the same for ever
	for pause := time.Duration(0); ; {
		before := p.arrivals()
		err := p.stream(stalls)
		if err == nil {
			return nil
		}
		if p.ctx.Err() != nil || isFinal(err) {
			return err
		}
		now := time.Now()
		if p.arrivals() > before {
			last, faults, pause = now, 0, 0
		}
		if errors.Is(err, errStall) {
			stalls = min(stalls+1, 4)
		}
		if isFault(err) {
			if faults++; faults >= p.opts.Attempts {
				return err
			}
		}
		limit := p.opts.GiveUp
		if p.arrivals() == 0 {
			limit = p.opts.GiveUpUnopened
			if unlikely(err) {
				limit = min(limit, patience)
			}
		}
		if now.Sub(last) >= limit {
			return fmt.Errorf("%w %s for %v, try again when it can be reached: %w", ErrUnreachable, p.opts.Client.Base(), limit.Round(time.Second), err)
		}
		wait := pause + rand.N(pause/2+1)
		if after := Asked(err); after > wait {
			// Not all at once, who were asked the same.
			wait = after + rand.N(after/10+1)
			if now.Sub(last)+wait >= limit {
				return fmt.Errorf("%w %s, which asks to be asked again in %v, try again then: %w", ErrUnreachable, p.opts.Client.Base(), after.Round(time.Second), err)
			}
		}
		p.resumes.Add(1)
		p.log.Warn("stream broke, resuming", "error", err, "pause", wait)
		if !errors.Is(err, errAgain) {
			p.setTrouble(trouble{err.Error(), p.arrivals()})
			timer := time.NewTimer(wait)
			select {
			case <-timer.C:
			case <-p.ctx.Done():
				timer.Stop()
				return context.Cause(p.ctx)
			}
			pause = min(max(2*pause, p.opts.Pause), 5*time.Second)
		}
	}
}

// arrivals counts the steps forward: images opened and frames written.
func (p *Pull) arrivals() int64 { return p.opened.Load() + p.frames.Load() }

// finalError is an error that asking again would not change.
type finalError struct{ error }

func (e finalError) Unwrap() error { return e.error }

// errAgain says that the stream ended, or was ended, to ask for frames that
// arrived damaged.
var errAgain = errors.New("frames have to be sent again")

func isFinal(err error) bool {
	var f finalError
	var status *StatusError
	var said *bundle.Error
	switch {
	case errors.As(err, &f):
		return true
	case errors.As(err, &said):
		switch said.Code {
		case bundle.CodeNotFound, bundle.CodeInvalid, bundle.CodeUnauthorized, bundle.CodeUnsupported:
			return true
		}
		return false
	case errors.As(err, &status):
		return status.Final()
	}
	return false
}

// isFault reports whether the server is at fault, rather than the way to it.
func isFault(err error) bool {
	var said *bundle.Error
	if errors.As(err, &said) {
		return said.Code == bundle.CodeCorrupt || said.Code == bundle.CodeInternal
	}
	var status *StatusError
	if errors.As(err, &status) {
		return status.Status == http.StatusInternalServerError
	}
	return errors.Is(err, bundle.ErrCorrupt)
}

// request returns what to ask for now.
func (p *Pull) request() bundle.Request {
	p.mu.Lock()
	defer p.mu.Unlock()
	req := p.opts.Request
	req.Images = slices.Clone(p.images)
	req.Damaged = slices.Clone(p.claims)
	for i := range req.Images {
		req.Images[i].Startup = req.Images[i].Startup && !p.wholly
	}
	req.Have = nil
	for _, h := range p.opts.Request.Have {
		ours := slices.ContainsFunc(p.targets, func(t *target) bool { return t != nil && t.header.ChainID == h.ChainID })
		if !ours {
			req.Have = append(req.Have, h)
		}
	}
	for i, t := range p.targets {
		if t == nil || slices.ContainsFunc(p.targets[:i], func(o *target) bool { return o != nil && o.header.ChainID == t.header.ChainID }) {
			continue
		}
		h := bundle.Have{ChainID: t.header.ChainID, TOC: t.header.TOCDigest, Present: t.present(p.opts.Request.Have)}
		if t.arena != nil {
			h.Pages = Pages(t.arena)
		}
		req.Have = append(req.Have, h)
	}
	return req
}

// told notes that the server has looked at what a request said arrived damaged. p.mu is held.
func (p *Pull) told(claims []segment.ID) {
	for _, id := range claims {
		if i := slices.Index(p.claims, id); i >= 0 { // once: it may have come damaged again since
			p.claims = slices.Delete(p.claims, i, i+1)
		}
	}
}

// Pages is what to say in bundle.Have.Pages of an arena.
func Pages(a *arena.Arena) []byte {
	if runs := a.PresentRuns(); len(runs) > 0 {
		return trace.AppendRuns(nil, runs)
	}
	return nil
}

// present returns a bitmap of the segments that the server need not send: those
// that have arrived, and those that the caller said were here. Contents that
// are used in place elsewhere are not claimed, for another image of the pull may
// want them: the rootfs that has them is one of Request.Have.
func (t *target) present(said []bundle.Have) []byte {
	b := make([]byte, (t.header.Segments+7)/8)
	if t.arena != nil {
		b = t.arena.PresentBitmap()
	}
	for _, h := range said {
		if h.ChainID != t.header.ChainID || h.TOC != t.header.TOCDigest {
			continue
		}
		if h.Present == nil {
			return nil // all of them
		}
		for i := range min(len(b), len(h.Present)) {
			b[i] |= h.Present[i]
		}
	}
	return b
}

// syncer makes what has arrived durable from time to time.
func (p *Pull) syncer() {
	ticker := time.NewTicker(p.opts.SyncEvery)
	defer ticker.Stop()
	for {
		select {
		case <-p.ctx.Done():
			return
		case <-p.kick:
		case <-ticker.C:
		}
		p.rate.add(time.Now(), p.moved.Load())
		if err := p.sync(p.ctx); err != nil && p.ctx.Err() == nil {
			p.cancel(err)
			return
		}
	}
}

func (p *Pull) sync(ctx context.Context) error {
	p.unsync.Store(0)
	// Before the sync, after which the pages may be in memory no more.
	if err := p.settle(); err != nil {
		return err
	}
	p.mu.Lock()
	targets := slices.Clone(p.targets)
	p.mu.Unlock()
	for _, t := range targets {
		if t != nil && t.arena != nil {
			if err := t.arena.Sync(ctx); err != nil {
				return err
			}
		}
	}
	return nil
}
