// Package rebuild makes the catalog anew from objects alone, when its file is lost or damaged.
//
// What there is, and what it is made from:
//
//	repositories, links, manifests, tags, deletions   the journal
//	layers and rootfs that were ingested              the journal; those whose objects are whole
//	packs, and which of them a layer needs            the packs' own tables
//	startup sets and traces                           nothing: they are learned again
//
// The new catalog is made beside the old one, and takes its name in one step when it is whole and durable. The old one
// stays, as catalog.before-TIME. A process that dies before has changed nothing; what it leaves is removed by the
// next one.
package rebuild

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/backoff"
	"hydrofoil.dev/foil/internal/durable"
	"hydrofoil.dev/foil/internal/format/layer"
	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/catalog/sqlcat"
	"hydrofoil.dev/foil/internal/server/catalog/sqlite"
	"hydrofoil.dev/foil/internal/server/dedup"
	"hydrofoil.dev/foil/internal/server/journal"
	"hydrofoil.dev/foil/internal/server/objects"
	"hydrofoil.dev/foil/internal/server/rootdir"
)

// ErrIncomplete is returned, wrapped, when the objects do not say everything: Options.Incomplete goes on all the same.
var ErrIncomplete = errors.New("the journal does not have everything")

// Options of Run.
type Options struct {
	Root string // of the server. Required
	// Store is the bucket that the objects are in; empty: the one that the root's were in before, or the root itself. Take has it
	// taken from another root.
	Store string
	Take  bool
	// Catalog is an empty PostgreSQL database that becomes the root's (package postgres); empty: the file below the root is made anew.
	Catalog string
	// TakeWait is how long it waits after it has taken a bucket, so that a server that runs all the same has noticed and ended. 0 means
	// DefaultTakeWait.
	TakeWait time.Duration
	// Incomplete puts a catalog in place that may lack something: objects of the journal are damaged, or
	// it was never written to its end.
	Incomplete bool
	// Progress is called now and then; nil: it is not.
	Progress func(Progress)
	// At is called at named points, for tests; nil: it is not.
	At func(point string)
}

// DefaultTakeWait is longer than a server takes to notice, and to end.
const DefaultTakeWait = 90 * time.Second

// Progress is how far a rebuild is.
type Progress struct {
	Phase string // "waiting" for a server to end, "journal", "packs", "layers"
	Done  int64  // objects, or layers
	Total int64  // 0: not known
}

// Report is what was made of what.
type Report struct {
	Catalog sqlcat.Stats `json:"catalog"`
	Journal struct {
		Objects int      `json:"objects"`
		Changes int64    `json:"changes"`
		Damaged []string `json:"damaged,omitempty"` // with the reason
		Whole   bool     `json:"whole"`
	} `json:"journal"`
	DamagedPacks []string `json:"damaged_packs,omitempty"` // with the reason
	// Dropped are layers and rootfs some of whose objects are lost: they are ingested again when they are pulled.
	Dropped int64 `json:"dropped"`
	// Unheld counts blobs that no repository holds: the next start of the server removes them.
	Unheld int64         `json:"unheld"`
	Old    string        `json:"old,omitempty"` // where the catalog is that was there before
	Took   time.Duration `json:"took"`
}

type rebuilder struct {
	o      Options
	store  objects.Store
	dedup  *dedup.Store
	cat    *sqlcat.Catalog
	report *Report
	last   uint64 // version
}

// Run rebuilds. Errors: rootdir.ErrUsed while a server runs; ErrIncomplete, with the report; those of the
// files.
func Run(ctx context.Context, o Options) (*Report, error) {
	if o.Progress == nil {
		o.Progress = func(Progress) {}
	}
	if o.At == nil {
		o.At = func(string) {}
	}
	begin := time.Now()
	_, inBucket, err := rootdir.InBucket(o.Root)
	if err == nil && o.Store != "" {
		err = os.MkdirAll(o.Root, 0o700) // one that is lost with its machine
	} else if err == nil && !inBucket {
		if _, err = os.Stat(rootdir.Objects(o.Root)); err != nil {
			err = fmt.Errorf("%s is no server's root: %w", o.Root, err)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("rebuild the catalog: %w", err)
	}
	unlock, err := rootdir.Lock(o.Root)
	if err != nil {
		return nil, fmt.Errorf("rebuild the catalog: %w", err)
	}
	defer unlock() //nolint:errcheck // nothing was written to it
	r := &rebuilder{o: o, report: new(Report)}
	if err := r.run(ctx); err != nil {
		return r.report, fmt.Errorf("rebuild the catalog: %w", err)
	}
	r.report.Took = time.Since(begin)
	return r.report, nil
}

func (r *rebuilder) run(ctx context.Context) (err error) {
	if r.o.Store != "" || r.o.Take {
		r.store, err = r.attach(ctx)
	} else {
		r.store, err = rootdir.OpenStore(ctx, r.o.Root)
	}
	if err != nil {
		return err
	}
	if _, is, err := rootdir.InDatabase(r.o.Root); err != nil {
		return err
	} else if is || r.o.Catalog != "" {
		return r.database(ctx)
	}
	beside := rootdir.Catalog(r.o.Root) + ".new"
	if err := os.RemoveAll(beside); err != nil {
		return err
	}
	if err := os.Mkdir(beside, 0o700); err != nil {
		return err
	}
	// What fails leaves the old one alone, and nothing beside it.
	defer func() {
		if err != nil {
			err = errors.Join(err, os.RemoveAll(beside))
		}
	}()
	if r.cat, err = sqlite.Open(ctx, filepath.Join(beside, filepath.Base(rootdir.CatalogFile(r.o.Root)))); err != nil {
		return err
	}
	r.dedup = &dedup.Store{Objects: r.store, Catalog: r.cat}
	err = r.fill(ctx)
	if err := errors.Join(err, r.cat.Close()); err != nil {
		return err
	}
	r.o.At("made")
	return r.swap(beside)
}

// database makes the catalog in a database, which must be empty: what was in another one stays there.
func (r *rebuilder) database(ctx context.Context) (err error) {
	if r.o.Catalog == "" {
		return errors.New("its catalog is in a database: name an empty one with --catalog")
	}
	if r.cat, err = rootdir.NewCatalog(ctx, r.o.Catalog, nil); err != nil {
		return err
	}
	r.dedup = &dedup.Store{Objects: r.store, Catalog: r.cat}
	if err := errors.Join(r.fill(ctx), r.cat.Close()); err != nil {
		return fmt.Errorf("%w; the database is of no use now: make it anew", err)
	}
	r.report.Old, err = rootdir.UseCatalog(ctx, r.o.Root, r.o.Catalog)
	return err
}

// attach opens the bucket.
func (r *rebuilder) attach(ctx context.Context) (objects.Store, error) {
	bucket, err := rootdir.Attach(ctx, r.o.Root, r.o.Store, r.o.Take, nil)
	if err != nil || !bucket.Taken {
		return bucket, err
	}
	r.o.Progress(Progress{"waiting", 0, 0})
	return bucket, backoff.Wait(ctx, cmp.Or(r.o.TakeWait, DefaultTakeWait))
}

// fill makes what is in the new catalog.
func (r *rebuilder) fill(ctx context.Context) error {
	if err := r.replay(ctx); err != nil {
		return err
	}
	if err := r.packs(ctx); err != nil {
		return err
	}
	if err := r.layers(ctx); err != nil {
		return err
	}
	if err := r.unheld(ctx); err != nil {
		return err
	}
	var err error
	r.report.Catalog, err = r.cat.Stats(ctx)
	return err
}

// replay makes the journal's changes.
func (r *rebuilder) replay(ctx context.Context) error {
	j := journal.New(r.store, journal.Options{})
	defer j.Close() //nolint:errcheck // it only reads
	s, err := j.Summary(ctx)
	if err != nil {
		return err
	}
	r.report.Journal.Objects, r.last = s.Objects, max(s.Last, s.Horizon)
	var whole catalog.Change
	done := int64(0)
	damaged, err := j.Read(ctx, func(_ string, changes []catalog.Change) error {
		for i := range changes {
			if c := &changes[i]; c.Kind == catalog.ChangesWhole && c.Version > whole.Version {
				whole = *c
			}
		}
		r.report.Journal.Changes += int64(len(changes))
		done++
		r.o.Progress(Progress{"journal", done, int64(s.Objects)})
		return r.cat.Replay(ctx, changes)
	})
	if err != nil {
		return err
	}
	for _, d := range damaged {
		r.report.Journal.Damaged = append(r.report.Journal.Damaged, d.Err.Error())
	}
	r.report.Journal.Whole = whole.Version > 0 && !whole.Gone
	switch {
	case r.o.Incomplete:
	case len(damaged) > 0:
		return fmt.Errorf("%w: %d of its objects are damaged, the first: %w; a backup may have them; --incomplete goes on without", ErrIncomplete, len(damaged), damaged[0].Err)
	case !r.report.Journal.Whole:
		return fmt.Errorf("%w: it was not written to its end since the upgrade from a version without one; if the old catalog can be opened, start the server and wait for the log to say so; --incomplete goes on with what there is", ErrIncomplete)
	}
	// If anything is lacking, the server writes all that is left to the journal once more.
	return r.cat.EndReplay(ctx, r.last, r.report.Journal.Whole && len(damaged) == 0)
}

// packs records the packs, in the order of their names, each with hooks of all its segments.
func (r *rebuilder) packs(ctx context.Context) error {
	done := int64(0)
	return r.dedup.Rebuild(ctx, func(key string, err error) {
		if done++; err != nil {
			r.report.DamagedPacks = append(r.report.DamagedPacks, err.Error())
		}
		r.o.Progress(Progress{"packs", done, 0})
	})
}

// layers drops what was ingested and cannot be served any more.
func (r *rebuilder) layers(ctx context.Context) error {
	var lost []digest.Digest
	needs := map[digest.Digest][]string{}
	done := int64(0)
	err := r.cat.EachLayer(ctx, func(l catalog.Layer) error {
		done++
		r.o.Progress(Progress{"layers", done, 0})
		if l.Refused != "" {
			return nil
		}
		whole, packs, err := r.whole(ctx, l)
		if err == nil && !whole {
			lost = append(lost, l.Blob)
		}
		needs[l.Blob] = packs
		return err
	})
	if err != nil {
		return err
	}
	for d, packs := range needs {
		if err := r.cat.PutPacks(ctx, d, packs); err != nil {
			return err
		}
	}
	for _, d := range lost {
		if err := r.cat.DropLayer(ctx, d); err != nil {
			return err
		}
	}
	var trees []digest.Digest
	err = r.cat.EachRootfs(ctx, func(t catalog.Rootfs) error {
		_, err := r.store.Stat(ctx, t.Key)
		if errors.Is(err, objects.ErrNotFound) {
			trees = append(trees, t.ChainID)
			err = nil
		}
		return err
	})
	if err != nil {
		return err
	}
	for _, d := range trees {
		if err := r.cat.DropRootfs(ctx, d); err != nil {
			return err
		}
	}
	r.report.Dropped = int64(len(lost) + len(trees))
	return nil
}

// whole reports whether a layer's entry list can be read, and its recipe and all its segments are there, and in which packs.
func (r *rebuilder) whole(ctx context.Context, l catalog.Layer) (whole bool, packs []string, err error) {
	keep := r.cat.Keep()
	defer keep.Release()
	whole, err = r.found(ctx, l, r.dedup.NewFinder(keep))
	return whole, keep.Packs(), err
}

func (r *rebuilder) found(ctx context.Context, l catalog.Layer, finder *dedup.Finder) (bool, error) {
	if l.Recipe.Key != "" {
		if size, err := r.store.Stat(ctx, l.Recipe.Key); errors.Is(err, objects.ErrNotFound) || err == nil && size != l.Recipe.Size {
			return false, nil
		} else if err != nil {
			return false, err
		}
	}
	object, err := r.store.Open(ctx, l.Entries, 0, -1)
	if errors.Is(err, objects.ErrNotFound) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer object.Close()
	list, err := layer.NewListReader(object)
	if err != nil {
		return false, ctx.Err() // damaged: made again
	}
	defer list.Close()
	var ids []segment.ID
	located := func() (bool, error) {
		places, err := finder.Locate(ctx, ids)
		for _, p := range places {
			if p.Frame == nil {
				return false, err
			}
		}
		ids = ids[:0]
		return err == nil, err
	}
	for {
		e, err := list.Next()
		if err == io.EOF {
			return located()
		}
		if err != nil {
			return false, ctx.Err()
		}
		for _, s := range e.Segments {
			if !s.ID.IsHole() {
				ids = append(ids, s.ID)
			}
		}
		if len(ids) >= 4096 {
			if ok, err := located(); !ok || err != nil {
				return false, err
			}
		}
	}
}

// unheld counts blobs that no repository holds.
func (r *rebuilder) unheld(ctx context.Context) error {
	return r.store.List(ctx, "blobs/", func(key string, _ int64) error {
		parts := strings.Split(key, "/")
		d := digest.Digest(parts[1] + ":" + parts[len(parts)-1])
		if d.Validate() != nil || catalog.BlobKey(d) != key {
			return nil
		}
		_, err := r.cat.AnyBlob(ctx, d)
		if errors.Is(err, catalog.ErrNotFound) {
			r.report.Unheld++
			err = nil
		}
		return err
	})
}

// swap puts the new catalog in the place of the old one, which stays.
func (r *rebuilder) swap(beside string) error {
	place := rootdir.Catalog(r.o.Root)
	if err := durable.Sync(beside); err != nil {
		return err
	}
	_, err := os.Stat(place)
	if errors.Is(err, fs.ErrNotExist) {
		if err := os.Rename(beside, place); err != nil {
			return err
		}
		return durable.Sync(r.o.Root)
	}
	if err != nil {
		return err
	}
	old := fmt.Sprintf("%s.before-%s", place, time.Now().UTC().Format("20060102T150405.000000000"))
	if err := os.Rename(beside, old); err != nil {
		return err
	}
	r.o.At("named")
	err = unix.Renameat2(unix.AT_FDCWD, old, unix.AT_FDCWD, place, unix.RENAME_EXCHANGE)
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOSYS) {
		// A filesystem that cannot exchange: in between there is none, and a start would say so.
		if err = os.Rename(old, beside); err == nil {
			if err = os.Rename(place, old); err == nil {
				err = os.Rename(beside, place)
			}
		}
	}
	if err != nil {
		return err
	}
	r.report.Old = old
	r.o.At("swapped")
	return durable.Sync(r.o.Root)
}
