package ingest

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"io"
	"sync"
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/layer"
	"hydrofoil.dev/foil/internal/format/recipe"
	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/objects"
)

// recipeKey is where a new recipe of a layer blob is to rest; it is another one each time.
func recipeKey(blob digest.Digest) string { return objectKey("recipes", blob) }

// recipeObject is a recipe that is being written to the store.
type recipeObject struct {
	*recipe.Writer
	object objects.Writer
	key    string
	hash   hash.Hash
}

func (g *Ingester) newRecipe(ctx context.Context, blob digest.Digest) (*recipeObject, error) {
	o := &recipeObject{key: recipeKey(blob), hash: sha256.New()}
	var err error
	if o.object, err = g.Objects.Create(ctx, o.key); err != nil {
		return nil, err
	}
	o.Writer = recipe.NewWriter(io.MultiWriter(o.object, o.hash))
	return o, nil
}

// finish ends the recipe of a layer that was read to its end.
func (o *recipeObject) finish(blob, diffID digest.Digest) error {
	end := recipe.End{DiffID: diffID}
	if blob == diffID {
		end.Compression = recipe.Plain
	}
	return o.Writer.Close(end)
}

// commit stores it. A recipe without a row of the catalog is replaced by the next
// one.
func (o *recipeObject) commit() (catalog.Recipe, error) {
	if err := o.object.Commit(); err != nil {
		return catalog.Recipe{}, fmt.Errorf("commit recipe %s: %w", o.key, err)
	}
	return catalog.Recipe{Key: o.key, Digest: digest.NewDigest(digest.SHA256, o.hash), Size: o.Written()}, nil
}

// drop ends a recipe that was not committed.
func (o *recipeObject) drop() { o.object.Close() }

// Recipe returns the layer with its recipe, which is made now if there is none: of
// layers that were ingested before there were recipes. Calls at the same time, for
// one layer, do it once. Errors: those of Layer.
func (g *Ingester) Recipe(ctx context.Context, d Descriptor) (catalog.Layer, error) {
	row, err := g.Layer(ctx, d)
	if err != nil || row.Recipe.Key != "" {
		return row, err
	}
	v, err := g.do(ctx, "recipe "+d.Digest.String(), func(ctx context.Context) (any, error) {
		release, err := g.slot(ctx)
		if err != nil {
			return nil, err
		}
		defer release()
		if row, err := g.Catalog.Layer(ctx, d.Digest); err != nil || row.Recipe.Key != "" {
			return row, err
		}
		return g.makeRecipe(ctx, row, func(r io.Reader) io.Reader { return r })
	})
	if err != nil {
		return catalog.Layer{}, err
	}
	return v.(catalog.Layer), nil
}

// makeRecipe reads the blob of a layer again.
func (g *Ingester) makeRecipe(ctx context.Context, row catalog.Layer, slow func(io.Reader) io.Reader) (catalog.Layer, error) {
	defer g.Readers.Begin()()
	fail := func(err error) (catalog.Layer, error) {
		return row, fmt.Errorf("make recipe of layer %s: %w", row.Blob, err)
	}
	blob, err := g.Objects.Open(ctx, catalog.BlobKey(row.Blob), 0, -1)
	if err != nil {
		return fail(err)
	}
	defer blob.Close()
	list, err := g.Objects.Open(ctx, row.Entries, 0, -1)
	if err != nil {
		return fail(err)
	}
	defer list.Close()
	entries, err := layer.NewListReader(list)
	if err != nil {
		return fail(err)
	}
	defer entries.Close()
	o, err := g.newRecipe(ctx, row.Blob)
	if err != nil {
		return fail(err)
	}
	defer o.drop()
	r, err := layer.NewReader(ctx, slow(blob), layer.Descriptor{Digest: row.Blob, DiffID: row.DiffID}, g.Options.Limits)
	if err != nil {
		return fail(err)
	}
	defer r.Close()
	r.Record(o.Writer)
	if err := compare(r, entries); err != nil {
		return fail(err)
	}
	if err := o.finish(row.Blob, r.DiffID()); err != nil {
		return fail(err)
	}
	made, err := o.commit()
	if err != nil {
		return fail(err)
	}
	if err := g.Catalog.PutRecipe(ctx, row.Blob, made); err != nil {
		return fail(err)
	}
	row.Recipe = made
	g.arrive()
	g.Metrics.recipe(made.Size)
	return row, nil
}

var errOtherList = errors.New("its entry list was made by other rules, or is damaged")

// compare reads a layer, and holds that its contents have the places that the entry list gives
// them.
func compare(r *layer.Reader, list *layer.ListReader) error {
	buf := make([]byte, 256<<10)
	for {
		e, err := r.Next()
		if err != nil && err != io.EOF {
			return err
		}
		was, lerr := list.Next()
		if lerr != nil && lerr != io.EOF {
			return lerr
		}
		if (err == nil) != (lerr == nil) {
			return errOtherList
		}
		if err == io.EOF {
			return nil
		}
		if e.Type != was.Type || e.Name != was.Name || e.Size != was.Size {
			return errOtherList
		}
		for rerr := error(nil); e.Size > 0 && rerr != io.EOF; {
			if _, rerr = r.Read(buf); rerr != nil && rerr != io.EOF {
				return rerr
			}
		}
	}
}

// MakeRecipes makes the recipes of layers that were ingested before there were any,
// one at a time and with at most half of a processor's time. It waits while
// anything is ingested. What is done is in the catalog, so it may be ended at
// any time and begun again. One that cannot be made is told to failed, and passed over. It returns when
// all were tried, or ctx ends; and errors of the catalog.
//
// Blobs are not fetched from anywhere: one that is not in blobs is passed over silently.
func (g *Ingester) MakeRecipes(ctx context.Context, blobs objects.Store, failed func(digest.Digest, error)) error {
	for after := digest.Digest(""); ; {
		rows, err := g.Catalog.WithoutRecipe(ctx, after, 64)
		if err != nil || len(rows) == 0 {
			return err
		}
		for _, row := range rows {
			after = row.Blob
			if _, err := blobs.Stat(ctx, catalog.BlobKey(row.Blob)); errors.Is(err, objects.ErrNotFound) {
				continue
			}
			_, err := g.makeRecipe(ctx, row, func(r io.Reader) io.Reader { return &slowReader{ctx: ctx, r: r, work: &g.work} })
			if ctx.Err() != nil {
				return ctx.Err()
			}
			if err != nil {
				failed(row.Blob, err)
			}
		}
	}
}

// slowReader rests as long as what it read kept its reader busy, and while there is
// other work.
type slowReader struct {
	ctx  context.Context
	r    io.Reader
	work *work
	last time.Time // when it returned
}

// pause is the longest rest: of a reader that waited for something else.
const pause = 100 * time.Millisecond

func (s *slowReader) Read(p []byte) (int, error) {
	if !s.last.IsZero() {
		t := time.NewTimer(min(time.Since(s.last), pause))
		defer t.Stop()
		select {
		case <-t.C:
		case <-s.ctx.Done():
		}
	}
	if err := s.work.wait(s.ctx); err != nil {
		return 0, err
	}
	n, err := s.r.Read(p)
	s.last = time.Now()
	return n, err
}

// work counts what goes on.
type work struct {
	mu   sync.Mutex
	n    int           // guarded by mu
	none chan struct{} // guarded by mu: closed when n becomes 0; nil while it is
}

func (w *work) begin() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.n++; w.n == 1 {
		w.none = make(chan struct{})
	}
}

func (w *work) end() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.n--; w.n == 0 {
		close(w.none)
		w.none = nil
	}
}

// wait returns when there is none, or ctx ends.
func (w *work) wait(ctx context.Context) error {
	for {
		w.mu.Lock()
		none := w.none
		w.mu.Unlock()
		if none == nil {
			return ctx.Err()
		}
		select {
		case <-none:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
