// Package startup makes startup sets: from traces of what services touch until
// they are ready, the pages to send first, kept compressed and in the order of
// need, so that a pull reads them in one go.
//
// # Sets
//
// Everything belongs to an image: a rootfs in a repository. Those who may pull
// it may teach it; what they say about their copy of an image in a repository of
// their own changes nothing here. A service is what runs on the image (its ID
// is trace.Service of its arguments). Its set is, in this order of preference,
//
//	traced     pages in a quarter or more of the traces that were recorded on purpose
//	learned    pages in half or more of what workers reported; a report counts
//	           once a client, and the last 16 count
//	inherited  the set that the service has in another version of the image, the
//	           latest that knows it: the same contents, and for those that are
//	           gone, files of the same name, or of one with another version in
//	           it, where what was on the pages is now (alignment)
//	common     for a service that nobody knows: pages in half or more of the
//	           sets of the image's services
//
// Reports add to a set that was traced or inherited, and take from an inherited
// one what most of them say was not used (choose). What lies between pages about which
// traces disagree is filled in (fill). Pages in holes are never in a
// set, and a set has a limit (Limit): what is needed last has to go.
//
// # The store of an image
//
// The pages of all services of an image are one object, each page once:
//
//	magic    8 bytes: "HFPAGES\n"
//	frames   one after the other, each as package segment codes it: the bytes of
//	         page runs of contents, one after the other, the last page of a
//	         content as short as it is
//	index    see below
//	trailer  length of the index (8 bytes, little-endian), its SHA-256 (32 bytes),
//	         magic
//
// A frame holds only pages that the same services have, and those of the same
// services follow each other in the order of need: a service is a few ranges of
// the object. Filled pages, in frames of their own, come after all others of a service. The
// index is the version (2, a uvarint) and
//
//	head      column: blocks: chain ID, digest of the TOC; per service: block, its
//	          origin; uvarint count of arguments, and a block for each
//	lengths   column: per frame, uvarint: its bytes
//	counts    column: per frame, uvarint: its runs
//	sums      column: per frame, 4 bytes, little-endian: CRC-32C of its bytes
//	runs      list of runs as in package trace, frame by frame
//	digests   column: SHA-256 of each run that is not all of its content
//	common    order of the frames of the common set
//	          per service: the order of its frames; uvarint: how many of the last
//	          of them hold filled pages (not in version 1, which had such pages among
//	          the others); list of runs: what traces touched that is not in the set, in
//	          the order of need
//
// where an order is a column of varints: the number of a frame less that of the
// one before and one (-1 before the first).
//
// A store is made from the packs, verified, and can be made again: traces, in the
// catalog, are what it comes from. Each build that changes something writes
// another object (its generation) and then tells the catalog; the one before
// stays for a while, for streams that read it.
package startup

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"strings"
	"sync"
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/format/trace"
	"hydrofoil.dev/foil/internal/server/cache"
	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/objects"
	"hydrofoil.dev/foil/internal/server/planner"
	"hydrofoil.dev/foil/internal/server/readers"
)

// Limits on traces.
const (
	// maxPieces bounds the runs of all sets of an image: cut where others start or
	// end, and into frames, they must not be more than trace.MaxRuns.
	maxPieces = trace.MaxRuns / 4

	tracesKept = 16 // of a service, of each kind
	// versionsAsked is how many other versions of an image are looked at for
	// services to inherit.
	versionsAsked = 8
	staleAtStart  = 256 // images whose sets are built when the server starts
)

// ErrRefused is returned, wrapped, for a trace that is not taken; the message
// says why.
var ErrRefused = errors.New("trace refused")

// Options are what Sets work with.
type Options struct {
	Catalog catalog.Catalog
	Objects objects.Store
	// Load returns the TOC of a rootfs and its frame index.
	Load func(ctx context.Context, chainID digest.Digest) (*toc.TOC, *planner.Index, error)
	// Max is how large a set may be.
	Max Limit
	// Settle is how long after a build the next one of the image waits when
	// workers reported; 0 means 5 seconds.
	Settle time.Duration
	// Retire is how long a store that another one has replaced stays for the streams that read it; 0 means 10 minutes.
	Retire time.Duration
	// Memory bounds the indices kept in memory, bytes; 0 means 32 MiB.
	Memory int64
	// Readers are told who reads objects; nil: nobody is.
	Readers *readers.Readers
	Log     *slog.Logger // nil means slog.Default
}

// Sets keep the startup sets of all images. Close ends what they do in the
// background.
type Sets struct {
	o       Options
	stores  *cache.Cache[*Store]    // by key of the object
	aligned *cache.Cache[alignment] // by the IDs of the contents
	ctx     context.Context         // ends with Close
	cancel  context.CancelFunc
	work    sync.WaitGroup
	slot    chan struct{} // taken by a build: one at a time

	mu     sync.Mutex
	closed bool           // guarded by mu
	builds map[Image]*job // guarded by mu
}

// Image is a rootfs in a repository.
type Image struct {
	Repository string
	ChainID    digest.Digest
	TOC        digest.Digest // of the encoded TOC
	Platform   string        // such as linux/amd64
}

// job builds the sets of an image, again as long as something changes.
type job struct {
	again bool          // guarded by Sets.mu: something changed since the last build began
	now   bool          // guarded by Sets.mu: somebody waits, the next build does not
	next  chan struct{} // guarded by Sets.mu: closed when the next build has ended
	wake  chan struct{} // has one when now was set
}

// New returns Sets and begins to build what was not built when the server ended.
func New(o Options) *Sets {
	if o.Settle == 0 {
		o.Settle = 5 * time.Second
	}
	if o.Retire == 0 {
		o.Retire = retireAfter
	}
	if o.Memory == 0 {
		o.Memory = 32 << 20
	}
	if o.Log == nil {
		o.Log = slog.Default()
	}
	s := &Sets{o: o, stores: cache.New(o.Memory, (*Store).memory), aligned: cache.New(alignMemory, alignment.memory), builds: map[Image]*job{}, slot: make(chan struct{}, 1)}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.work.Go(func() {
		stale, err := o.Catalog.StaleImages(s.ctx, staleAtStart)
		if err != nil && s.ctx.Err() == nil {
			o.Log.Error("startup sets: cannot tell which are stale", "error", err)
		}
		for _, m := range stale {
			s.build(imageOf(m), true)
		}
		if err := s.retireAll(s.ctx); err != nil && s.ctx.Err() == nil {
			o.Log.Error("startup sets: what was replaced stays", "error", err)
		}
	})
	return s
}

func imageOf(m catalog.StartupImage) Image { return Image{m.Repository, m.ChainID, m.TOC, m.Platform} }

// Close ends the builds under way and waits for them. What they did not do, the
// next New begins with.
func (s *Sets) Close() error {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.cancel()
	s.work.Wait()
	s.stores.Close()
	s.aligned.Close()
	return nil
}

// Add takes an encoded trace of an image from a client (an opaque name). The
// sets are built in the background; for a trace that was recorded on purpose Add waits for
// that. Errors: ErrRefused; the catalog's.
func (s *Sets) Add(ctx context.Context, m Image, table *toc.TOC, client string, body []byte) error {
	t, err := check(m, table, body)
	if err != nil {
		return err
	}
	if err := s.note(ctx, m); err != nil {
		return err
	}
	err = s.o.Catalog.PutTrace(ctx, catalog.Trace{
		Repository: m.Repository, ChainID: m.ChainID, TOC: m.TOC, Service: trace.Service(t.Args),
		Recorded: t.Kind == trace.Recorded, Client: client, Received: time.Now(), Body: body,
	}, catalog.TraceLimits{Traces: tracesKept, Services: maxServices})
	if err != nil {
		return err
	}
	if t.Kind == trace.Recorded {
		s.heirs(ctx, m)
		return s.wait(ctx, s.build(m, true))
	}
	s.build(m, false)
	return nil
}

// check decodes a trace and finds what is wrong with it.
func check(m Image, table *toc.TOC, body []byte) (*trace.Trace, error) {
	refuse := func(format string, args ...any) (*trace.Trace, error) {
		return nil, fmt.Errorf("%w: "+format, append([]any{ErrRefused}, args...)...)
	}
	if len(body) > trace.MaxEncoded {
		return refuse("it has %d bytes, at most %d: what is touched last can be left out", len(body), trace.MaxEncoded)
	}
	t, err := trace.Decode(body)
	if err != nil {
		return refuse("%w", err)
	}
	if t.ChainID != m.ChainID || t.TOC != m.TOC {
		return refuse("it is of rootfs %s in TOC %s; the image is %s in %s: pull it again and trace that", t.ChainID, t.TOC, m.ChainID, m.TOC)
	}
	if n := len(t.Touched) + len(t.Unused); n > trace.MaxPieces {
		return refuse("it has %d runs of pages, at most %d: what is touched last can be left out", n, trace.MaxPieces)
	}
	touched := make([]trace.Run, len(t.Touched))
	pages := int64(0)
	for i, r := range t.Touched {
		touched[i] = r.Run
		pages += int64(r.Blocks)
	}
	for _, runs := range [][]trace.Run{touched, t.Unused} {
		if err := trace.Check(runs, table); err != nil {
			return refuse("%w", err)
		}
	}
	for _, r := range trace.Merge(touched) {
		pages -= int64(r.Blocks)
	}
	if pages != 0 {
		return refuse("%d pages are in it twice", pages)
	}
	return t, nil
}

// note records an image that was not known.
func (s *Sets) note(ctx context.Context, m Image) error {
	return s.o.Catalog.NoteImage(ctx, catalog.StartupImage{
		Repository: m.Repository, ChainID: m.ChainID, TOC: m.TOC, Platform: m.Platform, Noted: time.Now(),
	})
}

// heirs begins to build the versions of an image that may inherit from it.
func (s *Sets) heirs(ctx context.Context, m Image) {
	images, err := s.o.Catalog.StartupImages(ctx, m.Repository)
	if err != nil {
		s.o.Log.Error("startup sets: cannot tell who inherits", "repository", m.Repository, "error", err)
	}
	n := 0
	for _, v := range images {
		if v.Platform == m.Platform && v.ChainID != m.ChainID && n < versionsAsked {
			n++
			s.build(imageOf(v), false)
		}
	}
}

// Prepare builds what is not built of an image's sets: for a new version of an
// image, what it inherits.
func (s *Sets) Prepare(ctx context.Context, m Image) error {
	if err := s.note(ctx, m); err != nil {
		return err
	}
	row, err := s.o.Catalog.StartupImage(ctx, m.Repository, m.ChainID)
	if err != nil {
		return err
	}
	if row.Built == row.Wanted {
		return nil
	}
	return s.wait(ctx, s.build(m, true))
}

func (s *Sets) wait(ctx context.Context, done <-chan struct{}) error {
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-s.ctx.Done():
		return errors.New("the server is shutting down")
	}
}

// build has an image built in the background; now says that somebody waits. The channel is
// closed when a build that began after the call has ended.
func (s *Sets) build(m Image, now bool) <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	j := s.builds[m]
	if j == nil {
		j = &job{next: make(chan struct{}), wake: make(chan struct{}, 1)}
		if s.closed {
			return j.next
		}
		s.builds[m] = j
		s.work.Go(func() { s.run(m, j) })
	}
	j.again = true
	if now && !j.now {
		j.now = true
		j.wake <- struct{}{}
	}
	return j.next
}

// run builds until nothing changes any more.
func (s *Sets) run(m Image, j *job) {
	timer := time.NewTimer(0) // the first build waits for nothing
	defer timer.Stop()
	for {
		select {
		case <-timer.C:
		case <-j.wake:
		case <-s.ctx.Done():
			return
		}
		s.mu.Lock()
		if !j.again {
			delete(s.builds, m)
			s.mu.Unlock()
			return
		}
		done := j.next
		j.again, j.now, j.next = false, false, make(chan struct{})
		select {
		case <-j.wake:
		default:
		}
		s.mu.Unlock()

		select {
		case s.slot <- struct{}{}:
		case <-s.ctx.Done():
			return
		}
		end := s.o.Readers.Begin()
		err := s.rebuild(s.ctx, m)
		end()
		<-s.slot
		if err != nil && s.ctx.Err() == nil {
			s.o.Log.Warn("startup sets not built", "repository", m.Repository, "chain_id", m.ChainID, "error", err)
		}
		close(done)
		timer.Reset(s.o.Settle)
	}
}

// rebuild makes the sets of an image, and writes its store if they changed.
func (s *Sets) rebuild(ctx context.Context, m Image) error {
	began := time.Now()
	t, x, err := s.o.Load(ctx, m.ChainID)
	if err != nil {
		return err
	}
	m.TOC = x.TOC() // the TOC may have been made anew
	if err := s.note(ctx, m); err != nil {
		return err
	}
	row, err := s.o.Catalog.StartupImage(ctx, m.Repository, m.ChainID)
	if err != nil {
		return err
	}
	services, err := s.services(ctx, m, &planner.Contents{TOC: t, Index: x, Objects: s.o.Objects})
	if err != nil {
		return err
	}
	built := row
	built.Built = row.Wanted
	next := lay(services, t)
	next.TOC = m.TOC
	if row.Key != "" {
		if old, err := s.open(ctx, row, t); err == nil && sameSets(old, next) {
			return s.o.Catalog.PutBuilt(ctx, built)
		}
	}
	if row.Key == "" && len(services) == 0 {
		return s.o.Catalog.PutBuilt(ctx, built)
	}
	built.Generation++
	built.Key, built.Previous = "", row.Key
	if len(services) > 0 {
		built.Key = fmt.Sprintf("%s%d-%s", keyPrefix(m), built.Generation, objects.Random())
		if err := next.write(ctx, s.o.Objects, built.Key, t, &planner.Contents{TOC: t, Index: x, Objects: s.o.Objects}); err != nil {
			return err
		}
	}
	if err := s.o.Catalog.PutBuilt(ctx, built); err != nil {
		return err
	}
	if built.Key != "" {
		s.stores.Put(built.Key, next)
	}
	raw, stored := next.size()
	s.o.Log.Info("startup sets built", "repository", m.Repository, "chain_id", m.ChainID, "services", len(services),
		"bytes", raw, "stored", stored, "took", time.Since(began).Round(time.Millisecond))
	s.retireLater(built)
	return s.sweepObjects(ctx, m, built)
}

// sweepObjects deletes the generations of an image's store that nothing refers
// to, also what a killed build left.
func (s *Sets) sweepObjects(ctx context.Context, m Image, row catalog.StartupImage) error {
	return s.o.Objects.List(ctx, keyPrefix(m), func(key string, _ int64) error {
		if key == row.Key || key == row.Previous {
			return nil
		}
		s.stores.Drop(key)
		return s.o.Objects.Delete(ctx, key)
	})
}

// keyPrefix is what the keys of an image's stores start with; the generation
// follows.
func keyPrefix(m Image) string {
	sum := sha256.Sum256([]byte(m.Repository + "\n" + string(m.ChainID)))
	name := hex.EncodeToString(sum[:16])
	return fmt.Sprintf("startup/%s/%s-", name[:2], name)
}

// size returns the bytes of all pages, and those of their frames.
func (s *Store) size() (raw, stored int64) {
	for _, f := range s.Frames {
		raw, stored = raw+int64(f.Raw), stored+int64(f.Length)
	}
	return raw, stored
}

// sameSets reports whether two stores hold the same pages in the same order for
// the same services.
func sameSets(a, b *Store) bool {
	if a.ChainID != b.ChainID || a.TOC != b.TOC || len(a.Frames) != len(b.Frames) || len(a.Services) != len(b.Services) {
		return false
	}
	for i := range a.Frames {
		if a.Frames[i].First != b.Frames[i].First || a.Frames[i].Count != b.Frames[i].Count {
			return false
		}
	}
	same := func(x, y any) bool { return reflect.DeepEqual(x, y) }
	for i := range a.Services {
		x, y := &a.Services[i], &b.Services[i]
		if x.Origin != y.Origin || strings.Join(x.Args, "\x00") != strings.Join(y.Args, "\x00") ||
			x.Filled != y.Filled || len(x.Frames) != len(y.Frames) || len(x.Frames) > 0 && !same(x.Frames, y.Frames) ||
			len(x.Late) != len(y.Late) || len(x.Late) > 0 && !same(x.Late, y.Late) {
			return false
		}
	}
	return len(a.Runs) == len(b.Runs) && (len(a.Runs) == 0 || same(a.Runs, b.Runs))
}

// open returns the store of an image.
func (s *Sets) open(ctx context.Context, row catalog.StartupImage, table *toc.TOC) (*Store, error) {
	return s.stores.Get(ctx, row.Key, func(ctx context.Context) (*Store, error) {
		return open(ctx, s.o.Objects, row.Key, table, row.TOC)
	})
}
