// Package fetch brings an image to the worker: one request, one stream, one
// pipeline that verifies, decompresses and writes on all cores, until
// everything that was planned is in the arena and durable. A stream that breaks is
// resumed with a request that says what has arrived.
//
// The way of one pull, in the order of the files. Pull sends one request after the other until all has
// come (pull.go), and takes section after section off the stream (stream.go). With the header it calls
// Options.Open, which lays out an arena. The plan is turned into "which frame holds this segment"
// (index.go). A frame goes to one of Options.Workers workers, which decodes it and hands each of its
// segments to Arena.WriteSegment (pipeline.go). A startup set comes before the plan: its
// frames go to the same workers, and each page run to Arena.WriteRun (pages.go). The set of a
// service that joins the pull comes in a stream of its own (join.go). What a start is not likely to need
// is kept while the server holds, and written as it is read, by Arena.WritePart (parts.go). Bytes are
// verified, written and marked in these places only. Every few seconds, and at the end, the arena is synced.
//
// The way of one read that waits (need.go). It is told to a schedule (package schedule), as everything is that
// happens: frames that came, sets, damage, time. That is a value that decides what is promoted, kept,
// written and asked for again; Pull.decide does what it orders.
//
// Open is called between two sections and nothing is read meanwhile; what
// arrives waits in the connection's receive window, 16 MiB. So Open should
// return as soon as the arena exists, and build and mount the filesystem in a
// goroutine of its own: frames can be written from then on. A second or so does no
// harm.
package fetch

import (
	"context"
	"errors"
	"log/slog"
	"runtime"
	"time"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/format/trace"
	"hydrofoil.dev/foil/internal/worker/arena"
	"hydrofoil.dev/foil/internal/worker/remote"
	"hydrofoil.dev/foil/internal/worker/waits"
)

// Options say what to pull and where to. Client, Request and Open are needed.
type Options struct {
	Client  *remote.Client
	Request bundle.Request
	// Head is called, when not nil, each time when all of the image's header but its TOC
	// has arrived, as bundle.ReaderOptions says. An error ends the pull as one of Open does.
	Head func(img *bundle.Image) error
	// Name is what errors call the pull; empty means the image's reference.
	Name string
	// Open is called once, with the image's verified header and its TOC
	// (nil when the server left it out: Request.Have names it). It returns the
	// arena for what is fetched, or nil when all of the rootfs is elsewhere. The arena
	// stays the caller's; it must stay open until Wait returns. An error ends
	// the pull, and Wait returns it wrapped. See the package comment for how
	// long it may take.
	Open func(ctx context.Context, img *bundle.Image, t *toc.TOC) (*arena.Arena, error)
	// TOC returns the encoded TOC of the image when its header left it out. It is
	// called only if a startup set comes, or if frames hold segments that the arena has no
	// place for; nil means that it cannot be had.
	TOC func(ctx context.Context, img *bundle.Image) ([]byte, error)
	// Early is called, when not nil, each time when the plan of a stream has arrived: what the
	// stream had of startup sets has been written, unless it was damaged.
	Early func(Startup)

	// Pages is called by several goroutines, when not nil, with page runs of a startup set that have been
	// written to the arena, in about the order of need.
	Pages func(origin string, runs []trace.Run)

	// Here is called, when not nil, with the pages of a startup set that do not come, since the
	// server was told that they are on this worker, in about the order of need; before those that
	// come. They lie in contents of the image's TOC.
	Here func(runs []trace.Run)

	// Hold, when more than 0, has the server send nothing but promoted frames after a
	// startup set (see bundle.Startup.Held), until Release is called, so much time has passed, or
	// the start turns out to need much that was not in the set (see package schedule, hold.go): it has the
	// line, the processors and the disk for itself. It is bounded by bundle.MaxHold,
	// by half of the client's StallTimeout, and by a quarter of GiveUp.
	Hold time.Duration

	// Elsewhere, when not nil, is called when a plan has come, with the segments of the arena that
	// it brings and that are absent, in its order; it returns those of them that come another way, ascending. The server is told to
	// skip frames that bring nothing else; until then it sends only what is promoted
	// (bundle.Request.Choose). ctx ends with the stream. Whoever answers writes them to the arena, or has
	// Bring ask for them; what is absent when the last stream has ended is no error of the pull.
	Elsewhere func(ctx context.Context, absent []int) []int

	// GiveUp is how long the pull keeps trying while nothing arrives that the arena lacks; 0 means
	// DefaultGiveUp. That the server says it is at work is nothing that arrives, nor is what it sends again; only
	// for the header an hour is given to one that does.
	GiveUp time.Duration
	// Failed is called, when not nil, when the pull fails and its arena lacks something. Nil makes the arena
	// fail: reads that wait get an error.
	Failed func(err error)
	// GiveUpUnopened is the same until the header has arrived,
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
	// Tight, when not nil, reports whether memory is short. While it is, what has been written does not stay in the
	// page cache, and is synced more often.
	Tight func() bool
	// Yields, when not nil, is asked every yield.Turn whether others want the processors, and nobody waits for a
	// start on the image. Then the server rests for most of the next one.
	Yields func() bool
	// PromoteBeyond is how many bytes may be planned before a wanted frame
	// without it being promoted; 0 means 256 KiB, less than 0 none.
	PromoteBeyond int64

	// JoinPatience is how long reads wait for the server to say which pages of a
	// service that has joined will come, before what they wait for is promoted; 0
	// means 1 second.
	JoinPatience time.Duration

	// Waits is where reads that had to wait are noted; nil means nowhere that
	// anybody sees.
	Waits *waits.List

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
	if o.Tight == nil {
		o.Tight = func() bool { return false }
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
		o.Hold = min(o.Hold, bundle.MaxHold, o.Client.StallTimeout()/2, o.GiveUp/4)
	}
	if o.Waits == nil {
		o.Waits = new(waits.List)
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.Name == "" {
		o.Name = o.Request.Image.Repository + ":" + o.Request.Image.Reference
	}
}

// ErrStopped is returned, wrapped, by Wait after Stop.
var ErrStopped = errors.New("stopped")

// ErrDamaged is returned, wrapped, by Wait when something has arrived damaged
// Options.Attempts times.
var ErrDamaged = errors.New("arrived damaged")

// ErrEmpty is returned, wrapped, by Wait when the server answers that all is well, and ends its answer
// before the first byte.
var ErrEmpty = errors.New("the server's answer ends before it begins")

// ErrUnreachable is returned, wrapped, by Wait when nothing arrived for
// Options.GiveUp.
var ErrUnreachable = errors.New("no success in reaching")
