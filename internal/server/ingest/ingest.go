// Package ingest turns what clients push into what workers pull: a layer blob
// into an entry list and segments in packs, a stack of layers into the TOC of
// its rootfs. Each is done once, at push or at first use.
//
// # One layer
//
// The blob streams from the object store through three goroutines that
// decompress it and hash blob and tar stream, one that takes the tar stream
// apart and splits files into segments, and those of dedup.Writer. The steps
// that leave something behind come in this order:
//
//  1. packs, committed as they fill; the catalog does not know them yet;
//  2. when the blob was read to its end and found right: the entry list and the
//     recipe, objects named by the blob's digest;
//  3. the packs, told to the catalog;
//  4. the catalog's Layer row. That is the commit point.
//
// What is refused, or fails in the first step, deletes what it added: nobody
// else can have come to use it. A process that is killed there leaves packs that
// the catalog does not know: they take room and do no harm. From step 3 on,
// there are segments that are as good as any, and the next ingest of the layer
// finds them stored. An entry list or a recipe without a row is replaced by that
// one: equal blobs have equal lists, and recipes of equal worth.
//
// A refusal is recorded in the Layer row, so that it is found once; a failure
// to read, to write or of the context is not, nor is a blob whose bytes do not
// have its digest (the object store is damaged, not the layer), nor a diff ID
// that differs from the image config's (another image may have it right: the
// layer is ingested, and refused to this image).
//
// # The recipe
//
// Its writer compares what it saw of the tar stream with what files gave, so a
// recipe is right by what it is made from. It is not played at ingest: that takes a
// tenth of the time of an ingest, and finds what reading the packs finds as well.
// Who plays one compares the digest of what comes out. How the blob was compressed is found out
// later (Prove), and makes another recipe of the same.
//
// # Memory
//
// One ingest needs some 60 MiB with two workers (buffers of layer.Reader,
// segment.Splitter, recipe.Writer and dedup.Writer), up to 128 MiB more for a zstd blob that
// wants such a window, and grows by 60 bytes for each distinct segment of the
// layer and by 72 for each segment of the one file at hand. The catalog's caches
// fill up besides, to their own bounds. BenchmarkIngestMemory measures all of it
// together. Flattening holds the entries of all layers of one image.
package ingest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"runtime"
	"sync"
	"time"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sync/errgroup"

	"hydrofoil.dev/foil/internal/format/flatten"
	"hydrofoil.dev/foil/internal/format/layer"
	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/dedup"
	"hydrofoil.dev/foil/internal/server/objects"
	"hydrofoil.dev/foil/internal/server/readers"
)

// Descriptor is one layer of an image, from its manifest and its config.
type Descriptor struct {
	Digest    digest.Digest // of the blob
	MediaType string        // not relied on: formats are seen from the bytes
	Size      int64         // of the blob; 0: not known
	DiffID    digest.Digest // from the config; empty: not known
}

// Options of an Ingester. The zero value is usable.
type Options struct {
	Limits layer.Options
	Packs  dedup.Options
	// Parallel is how many layers are ingested at once. Default: one a
	// processor, at most 4.
	Parallel int
}

// Ingester ingests. Its methods are safe for concurrent use; its fields must
// not be changed once one was called.
type Ingester struct {
	Objects objects.Store
	Catalog catalog.Dedup
	Options Options
	// Readers are told who reads objects; nil: nobody is.
	Readers *readers.Readers
	// Room is asked before a layer is ingested; nil: there is room.
	Room func() error
	// Intact makes a blob that rests in packs alone an object again, and keeps it one until release: what is ingested anew has
	// a new recipe, which nobody has proven. nil: all blobs are objects.
	Intact func(ctx context.Context, blob digest.Digest) (release func(), err error)
	// Metrics counts what is done; nil: nobody counts.
	Metrics *Metrics

	flights flights
	work    work // layers that are being read
	once    sync.Once
	slots   chan struct{} // set by once

	mu   sync.Mutex
	next chan struct{} // guarded by mu: closed when a layer has a recipe; nil: nobody waits
}

// Close ends what is under way and waits for it.
func (g *Ingester) Close() error {
	g.flights.close()
	return nil
}

// do runs something once for all who want it at the same time.
func (g *Ingester) do(ctx context.Context, key string, run func(context.Context) (any, error)) (any, error) {
	return g.flights.do(ctx, key, func(ctx context.Context) (any, error) {
		defer g.Readers.Begin()()
		return run(ctx)
	})
}

// Layer ingests the layer, unless that was done before. Calls at the same time,
// for one layer, do it once; it ends when the last of them gives up.
//
// Errors: *layer.RefusedError, recorded, when the layer cannot be served in
// bundles; *layer.DigestError; objects.ErrNotFound when the blob is not there;
// and failures that may be over the next time.
func (g *Ingester) Layer(ctx context.Context, d Descriptor) (catalog.Layer, error) {
	if err := d.Digest.Validate(); err != nil {
		return catalog.Layer{}, fmt.Errorf("ingest layer %q: %w", d.Digest, err)
	}
	row, err := g.Catalog.Layer(ctx, d.Digest)
	if errors.Is(err, catalog.ErrNotFound) {
		var v any
		v, err = g.do(ctx, "layer "+d.Digest.String(), func(ctx context.Context) (any, error) {
			return g.layer(ctx, d)
		})
		row, _ = v.(catalog.Layer)
	}
	if err != nil {
		return catalog.Layer{}, err
	}
	return check(d, row)
}

// check returns a layer that was ingested, if it can be served and is what its image says.
func check(d Descriptor, row catalog.Layer) (catalog.Layer, error) {
	if row.Refused != "" {
		return row, &layer.RefusedError{Layer: d.Digest, Reason: row.Refused}
	}
	// A diff ID of another algorithm than the one in the row cannot be
	// compared without reading the layer; no builder writes one.
	if d.DiffID != "" && d.DiffID != row.DiffID {
		return catalog.Layer{}, &layer.DigestError{Layer: d.Digest, What: "diff ID", Got: row.DiffID, Want: d.DiffID}
	}
	return row, nil
}

// layer runs once for all who wait.
func (g *Ingester) layer(ctx context.Context, d Descriptor) (catalog.Layer, error) {
	release, err := g.slot(ctx)
	if err != nil {
		return catalog.Layer{}, err
	}
	defer release()
	// It may have been done between the look at the catalog and this call.
	if row, err := g.Catalog.Layer(ctx, d.Digest); !errors.Is(err, catalog.ErrNotFound) {
		return row, err
	}
	if g.Room != nil {
		if err := g.Room(); err != nil {
			return catalog.Layer{}, fmt.Errorf("ingest layer %s: %w", d.Digest, err)
		}
	}
	begin, result := time.Now(), failed
	defer func() { g.Metrics.layer(result, time.Since(begin).Seconds()) }()
	keep := g.Catalog.Keep()
	defer keep.Release()
	row, err := g.ingest(ctx, d, keep)
	var refusal *layer.RefusedError
	switch {
	case errors.As(err, &refusal):
		row = catalog.Layer{Blob: d.Digest, Refused: refusal.Detail()}
	case err != nil:
		return catalog.Layer{}, fmt.Errorf("ingest layer %s: %w", d.Digest, err)
	}
	if err := g.Catalog.PutLayer(ctx, row, keep.Packs()...); err != nil {
		return catalog.Layer{}, fmt.Errorf("ingest layer %s: %w", d.Digest, err)
	}
	g.arrive()
	if result = ingested; refusal != nil {
		result = refused
	}
	return row, nil
}

func (g *Ingester) slot(ctx context.Context) (release func(), err error) {
	g.once.Do(func() {
		n := g.Options.Parallel
		if n <= 0 {
			n = min(runtime.GOMAXPROCS(0), 4)
		}
		g.slots = make(chan struct{}, n)
	})
	select {
	case g.slots <- struct{}{}:
		g.work.begin()
		return func() {
			g.work.end()
			<-g.slots
		}, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (g *Ingester) store() *dedup.Store {
	return &dedup.Store{Objects: g.Objects, Catalog: g.Catalog}
}

// ingest does steps 1 to 3 and returns the row. What it relies on is kept.
func (g *Ingester) ingest(ctx context.Context, d Descriptor, keep catalog.Keep) (row catalog.Layer, err error) {
	blob, err := g.Objects.Open(ctx, catalog.BlobKey(d.Digest), 0, -1)
	if err != nil {
		return row, err
	}
	defer blob.Close()
	options := g.Options.Packs
	options.Keep = keep
	packs := g.store().NewWriter(ctx, options)
	defer func() {
		if closed := packs.Close(); err == nil {
			err = closed
		}
	}()
	key := entriesKey(d.Digest)
	object, err := g.Objects.Create(ctx, key)
	if err != nil {
		return row, err
	}
	defer object.Close()
	made, err := g.newRecipe(ctx, d.Digest)
	if err != nil {
		return row, err
	}
	defer made.drop()

	row = catalog.Layer{Blob: d.Digest, Entries: key}
	if err := g.read(ctx, blob, d, packs, object, made, &row); err != nil {
		return row, err
	}
	if err := packs.Finish(); err != nil {
		return row, err
	}
	if err := object.Commit(); err != nil {
		return row, fmt.Errorf("commit entry list %s: %w", key, err)
	}
	if row.Recipe, err = made.commit(); err != nil {
		return row, err
	}
	if err := packs.Publish(); err != nil {
		return row, err
	}
	g.Metrics.stored(packs.Stats())
	g.Metrics.recipe(row.Recipe.Size)
	return row, nil
}

// read takes the blob apart: segments to packs, entries to list, what is left to made.
func (g *Ingester) read(ctx context.Context, blob io.Reader, d Descriptor, packs *dedup.Writer, list io.Writer, made *recipeObject, row *catalog.Layer) error {
	// The config's diff ID is compared by Layer: see the package comment.
	r, err := layer.NewReader(ctx, blob, layer.Descriptor{Digest: d.Digest, Size: d.Size}, g.Options.Limits)
	if err != nil {
		return err
	}
	defer r.Close()
	r.Record(made.Writer)
	entries, err := layer.NewListWriter(list)
	if err != nil {
		return err
	}
	splitter := segment.NewSplitter(nil)
	for {
		e, err := r.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return err
		}
		if e.Size > 0 {
			if err := e.Split(splitter, r, packs.Add); err != nil {
				return err
			}
		}
		if err := entries.Write(e); err != nil {
			return err
		}
	}
	if err := entries.Close(); err != nil {
		return err
	}
	row.DiffID, row.Size, row.Files = r.DiffID(), r.Size(), r.Files()
	return made.finish(d.Digest, row.DiffID)
}

// entriesKey is where a new entry list of a layer blob is to rest; it is another one each time.
func entriesKey(blob digest.Digest) string { return objectKey("entries", blob) }

// tocKey is where an encoded TOC, of that digest, is to rest; it is another one each time.
func tocKey(toc digest.Digest) string { return objectKey("tocs", toc) }

// objectKey ends with something random: what was deleted is not what comes after it, though it is of the same digest.
func objectKey(kind string, d digest.Digest) string {
	return fmt.Sprintf("%s/%s/%s/%s-%s", kind, d.Algorithm(), d.Encoded()[:2], d.Encoded(), objects.Random())
}

// Rootfs flattens the layers, bottom first, unless that was done before;
// layers that were not ingested yet are. Calls at the same time, for one chain
// ID, do it once.
//
// Errors: those of Layer; flatten.ErrNoLayers; *layer.RefusedError when the
// layers do not go together.
func (g *Ingester) Rootfs(ctx context.Context, layers []Descriptor) (catalog.Rootfs, error) {
	if len(layers) == 0 {
		return catalog.Rootfs{}, flatten.ErrNoLayers
	}
	rows, err := g.layers(ctx, layers)
	if err != nil {
		return catalog.Rootfs{}, err
	}
	diffIDs := make([]digest.Digest, 0, len(rows))
	for _, row := range rows {
		diffIDs = append(diffIDs, row.DiffID)
	}
	chain := flatten.ChainID(diffIDs)
	r, err := g.Catalog.Rootfs(ctx, chain)
	if errors.Is(err, catalog.ErrNotFound) {
		var v any
		v, err = g.do(ctx, "rootfs "+chain.String(), func(ctx context.Context) (any, error) {
			return g.flatten(ctx, chain, rows)
		})
		r, _ = v.(catalog.Rootfs)
	}
	return r, err
}

// layers ingests what is missing.
func (g *Ingester) layers(ctx context.Context, layers []Descriptor) ([]catalog.Layer, error) {
	blobs := make([]digest.Digest, len(layers))
	for i, d := range layers {
		blobs[i] = d.Digest
	}
	if rows, err := g.Catalog.Layers(ctx, blobs); err == nil { // most often: all were ingested when they were pushed
		for i, d := range layers {
			if rows[i], err = check(d, rows[i]); err != nil {
				return rows, err
			}
		}
		return rows, nil
	}
	rows := make([]catalog.Layer, len(layers))
	all, ctx := errgroup.WithContext(ctx)
	all.SetLimit(8)
	for i, d := range layers {
		all.Go(func() error {
			var err error
			rows[i], err = g.Layer(ctx, d)
			return err
		})
	}
	return rows, all.Wait()
}

// flatten runs once for all who wait. The row is the commit point: a TOC object
// without one is written again, under the same name.
func (g *Ingester) flatten(ctx context.Context, chain digest.Digest, rows []catalog.Layer) (catalog.Rootfs, error) {
	if r, err := g.Catalog.Rootfs(ctx, chain); !errors.Is(err, catalog.ErrNotFound) {
		return r, err
	}
	return g.flattenAnew(ctx, rows)
}

func (g *Ingester) flattenAnew(ctx context.Context, rows []catalog.Layer) (catalog.Rootfs, error) {
	diffIDs := make([]digest.Digest, 0, len(rows))
	for _, row := range rows {
		diffIDs = append(diffIDs, row.DiffID)
	}
	chain := flatten.ChainID(diffIDs)
	encoded, err := g.encode(ctx, rows)
	if err != nil {
		return catalog.Rootfs{}, err
	}
	d := toc.Digest(encoded)
	r := catalog.Rootfs{ChainID: chain, TOC: d, Key: tocKey(d)}
	if err := objects.Put(ctx, g.Objects, r.Key, encoded); err != nil {
		return catalog.Rootfs{}, fmt.Errorf("store TOC of rootfs %s: %w", chain, err)
	}
	if err := g.Catalog.PutRootfs(ctx, r); err != nil {
		return catalog.Rootfs{}, fmt.Errorf("record rootfs %s: %w", chain, err)
	}
	g.Metrics.flattened()
	return r, nil
}

func (g *Ingester) encode(ctx context.Context, rows []catalog.Layer) ([]byte, error) {
	var layers []flatten.Layer
	for _, row := range rows {
		object, err := g.Objects.Open(ctx, row.Entries, 0, -1)
		if err != nil {
			return nil, fmt.Errorf("read entries of layer %s: %w", row.Blob, err)
		}
		defer object.Close()
		list, err := layer.NewListReader(object)
		if err != nil {
			return nil, fmt.Errorf("read entries of layer %s: %w", row.Blob, err)
		}
		defer list.Close()
		layers = append(layers, flatten.Layer{Digest: row.Blob, DiffID: row.DiffID, Entries: list})
	}
	t, err := flatten.Rootfs(ctx, layers)
	if err != nil {
		return nil, err
	}
	return toc.Encode(t)
}
