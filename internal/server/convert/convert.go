// Package convert gives each blob as many intact copies as its mode wants (package modes), in the background, and each store the packs, entry
// lists and recipes that blobs are made again from.
//
// # What is done in which order
//
// An object that another store lacks is copied there. A blob that has fewer intact copies than it should is copied from a store
// that has one, or made from packs, first to the root's store.
//
// A blob that has more loses one, that in the root's store last, if all of this holds:
//
//  1. Somebody has proven how it is made of packs and recipe, and the encoder for that is in this program, makes its golden vectors
//     here, and was proven on this architecture.
//  2. No store is away.
//  3. It was made again now, whole, from what each single store has, and had its digest each time. So packs, entry list and recipe are
//     there, and can be read.
//  4. Nobody takes it apart now, and its recipe is the one of which all this was found. This is looked at, and the copy removed, while
//     nobody can push or ingest the blob.
//
// So nothing depends on what was believed before, and a process that dies leaves a copy more or less, both of which the
// next pass sees.
package convert

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/opencontainers/go-digest"
	"golang.org/x/time/rate"

	"hydrofoil.dev/foil/internal/format/encoder"
	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/modes"
	"hydrofoil.dev/foil/internal/server/objects"
	"hydrofoil.dev/foil/internal/server/popularity"
	"hydrofoil.dev/foil/internal/server/readers"
	"hydrofoil.dev/foil/internal/server/restore"
	"hydrofoil.dev/foil/internal/server/stores"
)

// Catalog is what of the catalog is used.
type Catalog interface {
	BlobsAfter(ctx context.Context, after digest.Digest, limit int) ([]catalog.Blob, error)
	Holders(ctx context.Context, d digest.Digest) ([]string, error)
	AnyBlob(ctx context.Context, d digest.Digest) (catalog.Blob, error)
	Layer(ctx context.Context, blob digest.Digest) (catalog.Layer, error)
	Strays(ctx context.Context, keys []string, before time.Time) ([]string, error)
}

// Options of a Converter. All but the last five are required.
type Options struct {
	Catalog    Catalog
	Stores     *stores.Set
	Blobs      *restore.Blobs
	Pins       *restore.Pins
	Popularity *popularity.Table
	Rules      func() *modes.Rules
	// Exclude keeps others from pushing, removing or ingesting a blob until unlock is called.
	Exclude func(digest.Digest) (unlock func())
	// RemoveUnheld removes a blob from all stores, unless a repository has it.
	RemoveUnheld func(ctx context.Context, d digest.Digest) error

	Readers *readers.Readers
	// Room is asked before something is written; nil: there is room.
	Room func() error
	// Interval is that of whole passes: an hour; negative: there are none but those that Now makes.
	Interval time.Duration
	Log      *slog.Logger       // nil: slog.Default
	At       func(point string) // is called at named points, for tests; nil: it is not
}

const (
	pageSize = 500
	// soon is how long what was told waits for more of it.
	soon = time.Second
	// looked is how often stores that are away are looked for.
	looked = 15 * time.Second
	burst  = 1 << 20
)

// Converter converts. Close ends it.
type Converter struct {
	o       Options
	metrics *Metrics
	limiter *rate.Limiter
	stop    context.CancelFunc
	work    sync.WaitGroup
	turn    chan struct{} // taken by a pass

	mu     sync.Mutex
	told   map[digest.Digest]bool // guarded by mu: blobs to look at; nil: all
	wake   chan struct{}          // of capacity 1
	status Status                 // guarded by mu: of the last whole pass
}

// maxTold is how many blobs are remembered to be looked at; more make a pass over all.
const maxTold = 10_000

// New returns a Converter that begins to convert.
func New(o Options) *Converter {
	if o.Interval == 0 {
		o.Interval = time.Hour
	}
	if o.Log == nil {
		o.Log = slog.Default()
	}
	if o.At == nil {
		o.At = func(string) {}
	}
	if o.Room == nil {
		o.Room = func() error { return nil }
	}
	ctx, stop := context.WithCancel(context.Background())
	c := &Converter{o: o, metrics: newMetrics(), limiter: rate.NewLimiter(rate.Inf, burst), stop: stop, turn: make(chan struct{}, 1),
		told: map[digest.Digest]bool{}, wake: make(chan struct{}, 1)}
	if o.Interval > 0 {
		c.work.Go(func() { c.run(ctx) })
	}
	return c
}

// Close ends what is under way and waits for it.
func (c *Converter) Close() error {
	c.stop()
	c.work.Wait()
	return nil
}

// Look has blobs looked at soon; none: all of them.
func (c *Converter) Look(blobs ...digest.Digest) {
	c.mu.Lock()
	for _, d := range blobs {
		if c.told != nil {
			c.told[d] = true
		}
	}
	if len(blobs) == 0 || len(c.told) > maxTold {
		c.told = nil
	}
	c.mu.Unlock()
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// run makes passes.
func (c *Converter) run(ctx context.Context) {
	away := time.NewTicker(looked)
	defer away.Stop()
	due := time.NewTimer(soon)
	defer due.Stop()
	rules := c.o.Rules()
	whole := true
	for {
		select {
		case <-ctx.Done():
			return
		case <-c.wake:
			due.Reset(soon)
			continue
		case <-away.C:
			if changed := c.look(); !changed && c.o.Rules() == rules {
				continue
			}
			whole = true
		case <-due.C:
		}
		c.mu.Lock()
		told := c.told
		c.told = map[digest.Digest]bool{}
		c.mu.Unlock()
		rules = c.o.Rules()
		var err error
		if told == nil || whole || len(told) == 0 {
			_, err = c.Now(ctx)
			whole = err != nil
			due.Reset(c.o.Interval)
		} else {
			err = c.some(ctx, told)
			c.mu.Lock()
			due.Reset(max(soon, time.Until(c.status.Ended.Add(c.o.Interval))))
			c.mu.Unlock()
		}
		if err != nil && ctx.Err() == nil {
			c.o.Log.Error("stores are not as their modes want; it is tried again", "error", err)
			due.Reset(min(c.o.Interval, time.Minute))
		}
	}
}

// look looks which stores are here, and reports whether that has changed.
func (c *Converter) look() (changed bool) {
	for _, o := range c.o.Stores.Others() {
		if !o.Look() {
			continue
		}
		changed = true
		if err := o.Err(); err != nil {
			c.o.Log.Error("a store is away", "error", err)
		} else {
			c.o.Log.Info("a store is here again", "store", o.Dir)
		}
	}
	return changed
}

// take waits for its turn.
func (c *Converter) take(ctx context.Context) (release func(), err error) {
	select {
	case c.turn <- struct{}{}:
		c.limiter.SetLimit(rate.Limit(c.o.Rules().Rate()))
		return func() { <-c.turn }, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// some looks at some blobs.
func (c *Converter) some(ctx context.Context, blobs map[digest.Digest]bool) error {
	release, err := c.take(ctx)
	if err != nil {
		return err
	}
	defer release()
	var errs []error
	for d := range blobs {
		b, err := c.o.Catalog.AnyBlob(ctx, d)
		if errors.Is(err, catalog.ErrNotFound) {
			continue
		}
		if err == nil {
			_, err = c.blob(ctx, b)
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// Now makes a pass over everything.
func (c *Converter) Now(ctx context.Context) (Status, error) {
	release, err := c.take(ctx)
	if err != nil {
		return Status{}, err
	}
	defer release()
	c.metrics.passes.Inc()
	c.look()
	s := Status{Began: time.Now()}
	errs := []error{c.copies(ctx)}
	for after := digest.Digest(""); ctx.Err() == nil; {
		page, err := c.o.Catalog.BlobsAfter(ctx, after, pageSize)
		if err != nil || len(page) == 0 {
			errs = append(errs, err)
			break
		}
		for _, b := range page {
			after = b.Digest
			found, err := c.blob(ctx, b)
			if ctx.Err() != nil {
				break
			}
			if err != nil {
				errs = append(errs, fmt.Errorf("blob %s: %w", b.Digest, err))
			}
			s.add(b.Size, found)
		}
	}
	s.Ended = time.Now()
	if err := errors.Join(append(errs, ctx.Err())...); err != nil {
		return s, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.status = s
	c.metrics.found(&s)
	return s, nil
}

// found is what there is of a blob, after it was looked at.
type found struct {
	mode   modes.Mode
	copies int
	want   int
	kept   string // why it has more copies than it should; one of those below
}

// Why a blob keeps a copy.
const (
	unproven    = "unproven"    // nobody has proven how it is made again
	unpromised  = "encoder"     // its encoder is not in this program, or makes other bytes here
	away        = "away"        // a store is
	notVerified = "damaged"     // it did not come out of what a store has
	busy        = "busy"        // it is being ingested
	failed      = "not-written" // a copy that it should have could not be written
)

var reasons = []string{unproven, unpromised, away, notVerified, busy, failed}

// blob gives a blob the copies that it should have.
func (c *Converter) blob(ctx context.Context, b catalog.Blob) (f found, err error) {
	repos, err := c.o.Catalog.Holders(ctx, b.Digest)
	if err != nil || len(repos) == 0 {
		return f, err
	}
	key := catalog.BlobKey(b.Digest)
	here := c.o.Stores.Here()
	var have []objects.Store
	for _, store := range here {
		size, err := store.Stat(ctx, key)
		if err == nil && size == b.Size {
			have = append(have, store)
		} else if err != nil && !errors.Is(err, objects.ErrNotFound) {
			return f, err
		}
	}
	f.copies = len(have)
	now := time.Now()
	score, pushed := c.o.Popularity.Get(b.Digest, now)
	f.want, f.mode = c.o.Rules().Want(repos, modes.State{Have: f.copies, Score: score, Age: now.Sub(pushed)}, c.o.Stores.Len())
	blob, err := c.o.Blobs.Find(ctx, b.Digest)
	proven := err == nil
	if !proven && (errors.Is(err, restore.ErrUnproven) || restore.Damage(err)) {
		err = nil
	}
	if err != nil {
		return f, err
	}
	least := f.want
	if !proven {
		least = c.o.Stores.Len() // it has no other way to rest in them
		f.kept = unproven
	} else if err := c.o.Blobs.Promised(ctx, blob); err != nil {
		f.kept = unpromised
	}
	if f.copies == 0 && !proven {
		f.kept = failed // it is lost: whoever reads it, and the scrub, tells
		return f, nil
	}
	if f.copies < least {
		err = c.add(ctx, b, here, have, least, proven, &f)
		return f, err
	}
	for f.copies > f.want && f.kept == "" {
		if len(here) < c.o.Stores.Len() {
			f.kept = away
			break
		}
		last := have[f.copies-1]
		if f.kept, err = c.drop(ctx, b, last); err != nil || f.kept != "" {
			break
		}
		f.copies--
	}
	return f, err
}

// add makes copies, up to least of them.
func (c *Converter) add(ctx context.Context, b catalog.Blob, here, have []objects.Store, least int, proven bool, f *found) error {
	key := catalog.BlobKey(b.Digest)
	for _, to := range here {
		if f.copies >= least {
			return nil
		}
		if slices.Contains(have, to) {
			continue
		}
		err := c.o.Room()
		if err == nil {
			err = c.addTo(ctx, b, key, to, have, proven)
		}
		if err != nil {
			f.kept = failed
			return err
		}
		have = append(have, to)
		f.copies++
	}
	return nil
}

func (c *Converter) addTo(ctx context.Context, b catalog.Blob, key string, to objects.Store, have []objects.Store, proven bool) error {
	// Who deletes it meanwhile waits; who pushes it too.
	defer c.o.Exclude(b.Digest)()
	if _, err := c.o.Catalog.AnyBlob(ctx, b.Digest); errors.Is(err, catalog.ErrNotFound) {
		return nil
	}
	paced := &paced{to, c.limiter}
	var errs []error
	for _, from := range have {
		err := stores.CopyDigest(ctx, paced, from, key, b.Digest)
		if err == nil {
			c.metrics.copied.Inc()
			c.o.At("copied")
			return nil
		}
		errs = append(errs, err)
	}
	if proven {
		err := c.o.Blobs.Make(ctx, b.Digest, paced)
		if err == nil {
			c.metrics.made.Inc()
			c.o.At("made")
			return nil
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// drop removes a copy of a blob that is proven, if nothing speaks against it, or says what does.
func (c *Converter) drop(ctx context.Context, b catalog.Blob, from objects.Store) (kept string, err error) {
	// What a restore reads now is not removed before this has ended.
	defer c.o.Readers.Begin()()
	row, err := c.o.Catalog.Layer(ctx, b.Digest)
	if err != nil {
		return busy, ignore(err, catalog.ErrNotFound)
	}
	for i, store := range c.o.Stores.Here() {
		blobs := c.o.Blobs.From(&pacedReads{store, c.limiter})
		blobs.Workers, blobs.Readers = 1, nil
		n, err := blobs.Verify(ctx, b.Digest)
		if err == nil && n == b.Size {
			continue
		}
		if ctx.Err() != nil {
			return "", ctx.Err()
		}
		c.metrics.refused.Inc()
		if errors.Is(err, encoder.ErrUnavailable) {
			return unpromised, nil
		}
		c.o.Log.Error("a blob does not come out of packs and recipe as it should: its intact copy stays", "digest", b.Digest, "store", i, "error", err)
		return notVerified, nil
	}
	c.o.At("verified")
	defer c.o.Exclude(b.Digest)()
	now, err := c.o.Catalog.Layer(ctx, b.Digest)
	if err != nil || now.Recipe != row.Recipe || now.Entries != row.Entries || c.o.Pins.Pinned(b.Digest) {
		return busy, ignore(err, catalog.ErrNotFound)
	}
	if err := from.Delete(ctx, catalog.BlobKey(b.Digest)); err != nil {
		return "", err
	}
	c.metrics.dropped.Inc()
	c.metrics.droppedBytes.Add(float64(b.Size))
	c.o.At("dropped")
	return "", nil
}

func ignore(err, target error) error {
	if errors.Is(err, target) {
		return nil
	}
	return err
}

// paced is a store to which so much is written a second.
type paced struct {
	objects.Store
	limiter *rate.Limiter
}

func (p *paced) Create(ctx context.Context, key string) (objects.Writer, error) {
	w, err := p.Store.Create(ctx, key)
	return pacedWriter{ctx, w, p.limiter}, err
}

type pacedWriter struct {
	ctx context.Context
	objects.Writer
	limiter *rate.Limiter
}

func (w pacedWriter) Write(b []byte) (int, error) {
	if err := wait(w.ctx, w.limiter, len(b)); err != nil {
		return 0, err
	}
	return w.Writer.Write(b)
}

// pacedReads is a store of which so much is read a second.
type pacedReads struct {
	objects.Store
	limiter *rate.Limiter
}

func (p *pacedReads) Open(ctx context.Context, key string, offset, length int64) (io.ReadCloser, error) {
	r, err := p.Store.Open(ctx, key, offset, length)
	if err != nil {
		return nil, err
	}
	return &pacedReader{ctx, r, p.limiter}, nil
}

type pacedReader struct {
	ctx context.Context
	io.ReadCloser
	limiter *rate.Limiter
}

func (r *pacedReader) Read(b []byte) (int, error) {
	n, err := r.ReadCloser.Read(b)
	if werr := wait(r.ctx, r.limiter, n); werr != nil {
		return n, werr
	}
	return n, err
}

func wait(ctx context.Context, l *rate.Limiter, n int) error {
	for n > 0 {
		some := min(n, burst)
		if err := l.WaitN(ctx, some); err != nil {
			return err
		}
		n -= some
	}
	return nil
}
