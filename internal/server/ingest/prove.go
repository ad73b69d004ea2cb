package ingest

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/encoder"
	"hydrofoil.dev/foil/internal/format/recipe"
	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/objects"
	"hydrofoil.dev/foil/internal/server/restore"
)

// Proofs are what Prove works with.
type Proofs struct {
	Encoders *encoder.Set
	// Blobs has the blobs. They are not fetched from anywhere: a layer whose blob is not here is passed over.
	Blobs objects.Store
	// Failed is told of a layer that could not be looked at. It is not tried again before the next start.
	Failed func(digest.Digest, error)
	// Proven is told of a layer whose blob can be made again now; nil: nobody is.
	Proven func(digest.Digest)
	// Idle is called when all layers were looked at; nil: it is not.
	Idle func()
}

// Prove finds out, for one layer after the other, how its blob is made of its tar stream, and has it in the
// recipe. A layer that is ingested later is taken when those before it were. It takes at most half of a processor's time
// itself, and waits while anything is ingested.
//
// What is proven is proven on the whole blob, made from what a restore is made from: packs and recipe. That
// nothing is proven is recorded as well, if every encoder was tried. What was found of a layer is in the catalog
// when it was found, so that this may be ended, or killed, at any time, and begun again: of the layer at hand
// nothing is kept.
//
// Prove returns when ctx ends; and errors of the catalog.
func (g *Ingester) Prove(ctx context.Context, p Proofs) error {
	tried := map[digest.Digest]bool{}
	for {
		// Of those that come meanwhile some lie before the one at hand.
		wait := g.arrived()
		some, err := g.proveAll(ctx, &p, tried)
		if err != nil {
			return err
		}
		if some {
			continue
		}
		if p.Idle != nil {
			p.Idle()
		}
		select {
		case <-wait:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// arrived returns what is closed when the next layer has a recipe.
func (g *Ingester) arrived() <-chan struct{} {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.next == nil {
		g.next = make(chan struct{})
	}
	return g.next
}

// arrive says that a layer has a recipe.
func (g *Ingester) arrive() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.next != nil {
		close(g.next)
		g.next = nil
	}
}

// proveAll goes over all layers once. It reports whether there was one to look at.
func (g *Ingester) proveAll(ctx context.Context, p *Proofs, tried map[digest.Digest]bool) (some bool, err error) {
	for after := digest.Digest(""); ; {
		rows, err := g.Catalog.NotLooked(ctx, after, 64)
		if err != nil || len(rows) == 0 {
			return some, err
		}
		for _, row := range rows {
			after = row.Blob
			if tried[row.Blob] {
				continue
			}
			some, tried[row.Blob] = true, true
			size, err := p.Blobs.Stat(ctx, catalog.BlobKey(row.Blob))
			if errors.Is(err, objects.ErrNotFound) {
				continue
			}
			c := recipe.Unknown
			if err == nil {
				c, err = g.proveLayer(ctx, p, row, size)
			}
			if ctx.Err() != nil {
				return some, ctx.Err()
			}
			g.Metrics.proven(c, size, err)
			if err == nil && p.Proven != nil && c != recipe.Unknown && c != recipe.Intact {
				p.Proven(row.Blob)
			}
			if err != nil {
				p.Failed(row.Blob, fmt.Errorf("prove compression of layer %s: %w", row.Blob, err))
			}
		}
	}
}

// proveLayer looks for how a blob is compressed, and records it. It returns Unknown if not everything could be tried.
func (g *Ingester) proveLayer(ctx context.Context, p *Proofs, row catalog.Layer, size int64) (recipe.Compression, error) {
	defer g.Readers.Begin()()
	now, err := g.Catalog.Layer(ctx, row.Blob)
	if errors.Is(err, catalog.ErrNotFound) || err == nil && now.Recipe != row.Recipe {
		return recipe.Unknown, nil // it was collected meanwhile, or repaired
	}
	if err != nil {
		return recipe.Unknown, err
	}
	c, e, begin, err := restore.Compression(ctx, g.Objects, row.Recipe)
	if err != nil {
		return recipe.Unknown, err
	}
	if c == recipe.Unknown {
		var skipped []string
		e, skipped, err = p.Encoders.Prove(ctx, encoder.Input{
			Size:    size,
			TarSize: row.Size,
			Blob: func(ctx context.Context, at int64) (io.ReadCloser, error) {
				return p.Blobs.Open(ctx, catalog.BlobKey(row.Blob), at, -1)
			},
			Tar: func(ctx context.Context, at int64) (io.ReadCloser, error) {
				t, err := restore.OpenTarAt(ctx, g.store(), row, at)
				if err != nil {
					return nil, err
				}
				return struct {
					io.Reader
					io.Closer
				}{&slowReader{ctx: ctx, r: t, work: &g.work}, t}, nil
			},
		})
		switch {
		case err != nil:
			return recipe.Unknown, err
		case e != nil:
			c = e.Compression()
		case len(skipped) > 0:
			return recipe.Unknown, nil
		default:
			c = recipe.Intact
		}
	}
	return c, g.putCompression(ctx, row, begin, c, e)
}

// putCompression writes the recipe of a layer anew, with another compression from begin on.
func (g *Ingester) putCompression(ctx context.Context, row catalog.Layer, begin int64, c recipe.Compression, e *recipe.Encoding) error {
	was := row.Recipe
	end, err := recipe.AppendCompression(nil, begin, c, e)
	if err != nil {
		return err
	}
	old, err := g.Objects.Open(ctx, was.Key, 0, -1)
	if err != nil {
		return err
	}
	defer old.Close()
	key := recipeKey(row.Blob) + "." + c.String()
	object, err := g.Objects.Create(ctx, key)
	if err != nil {
		return err
	}
	defer object.Close()
	read, made := sha256.New(), sha256.New()
	in := io.TeeReader(old, read)
	if _, err := io.CopyN(io.MultiWriter(object, made), in, begin); err != nil {
		return err
	}
	if _, err := io.Copy(io.Discard, in); err != nil {
		return err
	}
	if got := digest.NewDigest(digest.SHA256, read); got != was.Digest {
		return fmt.Errorf("%w: the recipe's digest is %s", recipe.ErrCorrupt, got)
	}
	if _, err := io.MultiWriter(object, made).Write(end); err != nil {
		return err
	}
	if err := object.Commit(); err != nil {
		return err
	}
	// A repair may have made another one: then that is looked at.
	if now, err := g.Catalog.Layer(ctx, row.Blob); err != nil || now.Recipe != was {
		return err
	}
	r := catalog.Recipe{Key: key, Digest: digest.NewDigest(digest.SHA256, made), Size: begin + int64(len(end))}
	return g.Catalog.PutRecipe(ctx, row.Blob, r) // readers may have the old one, which is collected
}
