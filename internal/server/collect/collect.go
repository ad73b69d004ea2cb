// Package collect frees what nobody needs any more, while the server serves.
//
// # What is needed
//
//	manifests, tags     until they are deleted, and then for a window, in which they can be brought back
//	blobs               while a manifest of their repository names them, or could be brought back; and for a while
//	                    after a client was told that they are there (a lease), whatever else
//	layers              (entry list, recipe, row) while a repository has the blob
//	rootfs              (TOC, index, order, row) while a manifest is of it
//	startup sets        (pages, traces) while a manifest of their repository is
//	segments            while the entry list of a layer names them
//
// The catalog notes in each transaction what may have become an orphan (catalog.Garbage). A pass of the collector
// reviews what is due, in small transactions, and repeats nothing that a crash has interrupted: every step leaves either
// the row that asks for the next one, or nothing to do.
//
// # Packs
//
// The catalog says which layers may need something of a pack. A review reads their entry lists and counts what is
// dead. A pack that is dead as a whole is forgotten. When more than a twentieth of all bytes is dead, or half of a pack,
// the live segments of the worst packs are copied to a new one, and in one transaction the catalog knows that one instead. It does so only
// if no layer has come to use the old packs since the review began, and none is being ingested that relies on them (catalog.Keep).
//
// # Objects
//
// Objects of forgotten rows are removed when everybody who may read them has ended (package readers). They
// are never overwritten, and their names are never used again. What a crash has left without any row is found by listing:
// it goes when it has been seen without a row for a day.
package collect

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/opencontainers/go-digest"
	"golang.org/x/time/rate"

	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/dedup"
	"hydrofoil.dev/foil/internal/server/objects"
	"hydrofoil.dev/foil/internal/server/readers"
	"hydrofoil.dev/foil/internal/server/stores"
)

// Options of a Collector. Those of a time or a number that are 0 have the default that they say.
type Options struct {
	Garbage catalog.Garbage // required
	Catalog catalog.Dedup   // required
	Objects objects.Store   // required
	// RemoveBlob removes the object of a blob, unless a repository has it. Required.
	RemoveBlob func(ctx context.Context, d digest.Digest) error
	Readers    *readers.Readers

	// Window is for how long what was deleted can be brought back.
	Window time.Duration
	// Grace is how long something is no orphan after it became one: a day.
	Grace time.Duration
	// Leftover is for how long an object stays that no row names: a day.
	Leftover time.Duration
	// Interval is that of passes: a minute. Negative: there are none but those that Now makes.
	Interval time.Duration
	// Rate bounds what is read and written to compact packs, bytes a second: 32 MiB.
	Rate int
	// Begin is called before each pass, and End after it; nil: they are not.
	Begin, End func() error
	// PackSize is that of new packs: 64 MiB.
	PackSize int64
	Log      *slog.Logger // nil means slog.Default
	// At is called at named points, for tests; nil: it is not.
	At func(point string)
}

// perStep is how many reviews one transaction decides about.
const perStep = 200

// Collector collects. Close ends it.
type Collector struct {
	o       Options
	store   *dedup.Store
	limiter *rate.Limiter
	stop    context.CancelFunc
	work    sync.WaitGroup

	turn chan struct{} // taken by a pass

	mu     sync.Mutex
	totals Report    // guarded by mu: since the start
	last   time.Time // guarded by mu: when the last pass ended
}

// Report is what a pass has done.
type Report struct {
	Purged       int   `json:"purged"` // deleted manifests and tags that cannot be brought back any more
	Links        int   `json:"links"`  // blobs taken out of a repository
	Leased       int   `json:"leased"` // that stay, since a client was told that they are there
	Blobs        int   `json:"blobs"`
	Rootfs       int   `json:"rootfs"`
	StartupSets  int   `json:"startup_sets"`
	Repositories int   `json:"repositories"`
	Packs        int   `json:"packs"`     // that were dead as a whole
	Compacted    int   `json:"compacted"` // packs that were replaced
	Copied       int64 `json:"copied"`    // bytes of the packs that replaced them
	Objects      int   `json:"objects"`   // removed
	Bytes        int64 `json:"bytes"`     // of those
	Busy         int   `json:"busy"`      // packs that are in use: later
	Waiting      int   `json:"waiting"`   // objects that somebody may be reading: later
}

func (r *Report) add(s *Report) {
	r.Purged += s.Purged
	r.Links += s.Links
	r.Leased = s.Leased
	r.Blobs += s.Blobs
	r.Rootfs += s.Rootfs
	r.StartupSets += s.StartupSets
	r.Repositories += s.Repositories
	r.Packs += s.Packs
	r.Compacted += s.Compacted
	r.Copied += s.Copied
	r.Objects += s.Objects
	r.Bytes += s.Bytes
	r.Busy, r.Waiting = s.Busy, s.Waiting
}

// New returns a collector that begins to collect.
func New(o Options) *Collector {
	for _, d := range []struct {
		of   *time.Duration
		when time.Duration
	}{{&o.Grace, 24 * time.Hour}, {&o.Leftover, 24 * time.Hour}, {&o.Interval, time.Minute}} {
		if *d.of == 0 {
			*d.of = d.when
		}
	}
	if o.Rate == 0 {
		o.Rate = 32 << 20
	}
	if o.PackSize == 0 {
		o.PackSize = 64 << 20
	}
	if o.Log == nil {
		o.Log = slog.Default()
	}
	if o.At == nil {
		o.At = func(string) {}
	}
	c := &Collector{o: o, store: &dedup.Store{Objects: o.Objects, Catalog: o.Catalog},
		limiter: rate.NewLimiter(rate.Limit(o.Rate), max(o.Rate, 4<<20)), turn: make(chan struct{}, 1)}
	ctx, stop := context.WithCancel(context.Background())
	c.stop = stop
	if o.Interval > 0 {
		c.work.Go(func() { c.run(ctx) })
	}
	return c
}

// Close ends what is under way and waits for it.
func (c *Collector) Close() error {
	c.stop()
	c.work.Wait()
	return nil
}

// run makes passes, and now and then looks for what crashes have left.
func (c *Collector) run(ctx context.Context) {
	tick := time.NewTicker(c.o.Interval)
	defer tick.Stop()
	var swept time.Time
	for {
		report, err := c.pass(ctx, Mode{})
		if err == nil && time.Since(swept) > c.o.Leftover/4 {
			swept = time.Now()
			err = c.sweep(ctx, &report)
		}
		if err != nil && ctx.Err() == nil {
			c.o.Log.Error("what nobody needs is not collected; it is tried again", "error", err)
		}
		if report.Objects > 0 || report.Blobs > 0 {
			c.o.Log.Info("collected what nobody needs", "blobs", report.Blobs, "packs", report.Packs, "compacted", report.Compacted, "objects", report.Objects, "bytes", report.Bytes)
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// Mode is how a pass is made.
type Mode struct {
	// Now waives the grace, never a lease.
	Now bool
	// Purge ends the time in which what was deleted can be brought back.
	Purge bool
}

// patience is how long Now waits for those who read what is to be removed.
const patience = 10 * time.Second

// Now makes a pass, and waits a while for those who still read what is to be removed.
func (c *Collector) Now(ctx context.Context, m Mode) (Report, error) {
	m.Now = true
	report, err := c.pass(ctx, m)
	if err == nil {
		err = c.sweep(ctx, &report)
	}
	deadline := time.Now().Add(patience)
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for err == nil && report.Waiting > 0 && time.Now().Before(deadline) {
		select {
		case <-ctx.Done():
			return report, ctx.Err()
		case <-tick.C:
		}
		var more Report
		err = c.removeDoomed(ctx, &more)
		report.Objects, report.Bytes, report.Waiting = report.Objects+more.Objects, report.Bytes+more.Bytes, more.Waiting
	}
	return report, err
}

// Totals is what was done since the start, and when the last pass ended.
func (c *Collector) Totals() (Report, time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.totals, c.last
}

// Due says what is due now.
func (c *Collector) Due(m Mode) catalog.Due {
	d := catalog.Due{Now: time.Now(), Grace: c.o.Grace, Limit: perStep}
	if m.Now {
		d.Grace = -1
	}
	return d
}

// pass does everything that is due, once.
func (c *Collector) pass(ctx context.Context, m Mode) (r Report, err error) {
	select {
	case c.turn <- struct{}{}:
		defer func() { <-c.turn }()
	case <-ctx.Done():
		return r, ctx.Err()
	}
	defer func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.totals.add(&r)
		c.last = time.Now()
	}()
	var errs []error
	if c.o.Begin != nil {
		errs = append(errs, c.o.Begin())
	}
	for _, step := range []func(context.Context, Mode, *Report) error{
		c.index, c.purge, c.links, c.layers, c.trees, c.packs,
		func(ctx context.Context, _ Mode, r *Report) error { return c.removeDoomed(ctx, r) },
		func(ctx context.Context, _ Mode, r *Report) error { return c.shrink(ctx, r) },
	} {
		// What one step cannot do must not keep the others from freeing something.
		if err := step(ctx, m, &r); err != nil {
			errs = append(errs, err)
		}
		if ctx.Err() != nil {
			break
		}
	}
	if c.o.End != nil {
		errs = append(errs, c.o.End())
	}
	return r, errors.Join(errs...)
}

// purge ends what cannot be brought back any more.
func (c *Collector) purge(ctx context.Context, m Mode, r *Report) error {
	before := time.Now().Add(-c.o.Window)
	if m.Purge {
		before = time.Now()
	}
	for {
		n, err := c.o.Garbage.Purge(ctx, before, perStep)
		r.Purged += n
		if err != nil || n == 0 {
			return err
		}
		c.o.At("purged")
	}
}

// links takes blobs out of repositories.
func (c *Collector) links(ctx context.Context, m Mode, r *Report) error {
	for {
		done, err := c.o.Garbage.CollectLinks(ctx, c.Due(m))
		r.Links += done.Dead
		r.Leased += done.Leased
		if err != nil || done.Reviewed == 0 {
			return err
		}
		c.o.At("links")
	}
}

// layers removes blobs, and what was ingested of them.
func (c *Collector) layers(ctx context.Context, _ Mode, r *Report) error {
	for {
		blobs, done, err := c.o.Garbage.CollectLayers(ctx, c.Due(Mode{Now: true})) // no repository has them: their grace was there
		if err != nil || done.Reviewed == 0 {
			return err
		}
		c.o.At("layers")
		for _, d := range blobs {
			size, err := c.o.Objects.Stat(ctx, catalog.BlobKey(d))
			if err == nil {
				err = c.o.RemoveBlob(ctx, d)
				r.Objects, r.Bytes = r.Objects+1, r.Bytes+size
			}
			if err != nil && !stores.Absent(err) {
				return fmt.Errorf("remove blob %s: %w", d, err)
			}
			c.o.At("blob")
		}
		r.Blobs += len(blobs)
		if err := c.o.Garbage.Removed(ctx, blobs); err != nil {
			return err
		}
	}
}

// trees forgets rootfs, startup sets and repositories.
func (c *Collector) trees(ctx context.Context, m Mode, r *Report) error {
	for _, step := range []struct {
		collect func(context.Context, catalog.Due) (catalog.Collected, error)
		count   *int
	}{{c.o.Garbage.CollectRootfs, &r.Rootfs}, {c.o.Garbage.CollectStartup, &r.StartupSets}, {c.o.Garbage.CollectRepositories, &r.Repositories}} {
		for {
			done, err := step.collect(ctx, c.Due(m))
			*step.count += done.Dead
			if err != nil {
				return err
			}
			if done.Reviewed == 0 {
				break
			}
			c.o.At("trees")
		}
	}
	return nil
}

// longest is for how long a reader keeps what it may read from being removed: it hangs.
const longest = 24 * time.Hour

// sooner is what the catalog's clock may be behind the readers'.
const sooner = 100 * time.Millisecond

// removeDoomed removes objects that were forgotten, and that nobody reads.
func (c *Collector) removeDoomed(ctx context.Context, r *Report) error {
	before := c.o.Readers.Oldest().Add(-sooner)
	if oldest := time.Now().Add(-longest); before.Before(oldest) {
		before = oldest
	}
	for {
		keys, err := c.o.Garbage.Doomed(ctx, before, perStep)
		if err != nil {
			return err
		}
		if len(keys) == 0 {
			break
		}
		if err := c.remove(ctx, keys, r); err != nil {
			return err
		}
	}
	left, err := c.o.Garbage.Doomed(ctx, time.Now().Add(time.Hour), 1000)
	r.Waiting = len(left)
	return err
}

// remove removes objects, and then forgets their names.
func (c *Collector) remove(ctx context.Context, keys []string, r *Report) error {
	one := func(key string, size int64) error {
		if err := c.o.Objects.Delete(ctx, key); err != nil {
			return err
		}
		r.Objects, r.Bytes = r.Objects+1, r.Bytes+size
		c.o.At("object")
		return nil
	}
	for _, key := range keys {
		if prefix, ok := strings.CutSuffix(key, "*"); ok {
			if err := c.o.Objects.List(ctx, prefix, one); err != nil {
				return err
			}
			continue
		}
		size, err := c.o.Objects.Stat(ctx, key)
		if stores.Absent(err) {
			continue // a store that is away has it removed when it is back
		}
		if err == nil {
			err = one(key, size)
		}
		if err != nil {
			return err
		}
	}
	return c.o.Garbage.Gone(ctx, keys)
}

// swept are the objects that rows name. Blobs are the registry's, and the journal looks after itself.
var swept = []string{"packs/", "entries/", "recipes/", "tocs/", "indices/", "orders/", "startup/"}

// sweep removes what crashes have left.
func (c *Collector) sweep(ctx context.Context, r *Report) error {
	for _, prefix := range swept {
		var keys []string
		flush := func() error {
			if len(keys) == 0 {
				return nil
			}
			strays, err := c.o.Garbage.Strays(ctx, keys, time.Now().Add(-c.o.Leftover))
			if keys = keys[:0]; err != nil || len(strays) == 0 {
				return err
			}
			c.o.Log.Info("removing objects that nothing names: a crash has left them", "objects", len(strays), "first", strays[0])
			return c.remove(ctx, strays, r)
		}
		err := c.o.Objects.List(ctx, prefix, func(key string, _ int64) error {
			if keys = append(keys, key); len(keys) < perStep {
				return nil
			}
			return flush()
		})
		if err = errors.Join(err, flush()); err != nil {
			return err
		}
	}
	return nil
}

// shrink gives room of the catalog back, when something was removed.
func (c *Collector) shrink(ctx context.Context, r *Report) error {
	for more := r.Objects > 0; more; {
		var err error
		if more, err = c.o.Garbage.Shrink(ctx); err != nil {
			return err
		}
	}
	return nil
}
