package ingest

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/flatten"
	"hydrofoil.dev/foil/internal/format/layer"
	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/server/catalog"
)

// Repair makes anew what is lost or damaged of all that a rootfs is served
// from: it reads the entry list and the recipe of every layer and every segment that it names,
// ingests those layers again of which something is wrong, and flattens. What
// other images share with it is as whole afterwards. Calls at the same time, for
// the same layers, do it once.
//
// It reads everything, so it is for images that failed. Errors: those of Layer
// and Rootfs; a blob that is lost or damaged itself cannot be made good here.
func (g *Ingester) Repair(ctx context.Context, layers []Descriptor) (catalog.Rootfs, error) {
	if len(layers) == 0 {
		return catalog.Rootfs{}, flatten.ErrNoLayers
	}
	var key strings.Builder
	key.WriteString("repair")
	for _, d := range layers {
		key.WriteString(" " + d.Digest.String())
	}
	v, err := g.do(ctx, key.String(), func(ctx context.Context) (any, error) {
		return g.repair(ctx, layers)
	})
	r, _ := v.(catalog.Rootfs)
	return r, err
}

func (g *Ingester) repair(ctx context.Context, layers []Descriptor) (catalog.Rootfs, error) {
	// Also those that nobody ingested, and the comparison with the config.
	rows, err := g.layers(ctx, layers)
	if err != nil {
		return catalog.Rootfs{}, err
	}
	for i, row := range rows {
		if err := g.repairLayer(ctx, layers[i], row); err != nil {
			return catalog.Rootfs{}, fmt.Errorf("repair layer %s: %w", row.Blob, err)
		}
	}
	if rows, err = g.layers(ctx, layers); err != nil { // what was made anew has other names
		return catalog.Rootfs{}, err
	}
	return g.flattenAnew(ctx, rows)
}

func (g *Ingester) repairLayer(ctx context.Context, d Descriptor, row catalog.Layer) error {
	ids, err := g.listed(ctx, row)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	var bad []segment.ID
	if err == nil {
		if bad, err = g.store().Verify(ctx, ids); err != nil || len(bad) == 0 && g.soundRecipe(ctx, row) {
			return err
		}
	}
	// Before anything is forgotten that it may be made from.
	if g.Intact != nil {
		unpin, err := g.Intact(ctx, d.Digest)
		if err != nil {
			return err
		}
		defer unpin()
	}
	if len(bad) > 0 {
		if err := g.Catalog.Forget(ctx, bad); err != nil {
			return err
		}
	}
	release, err := g.slot(ctx)
	if err != nil {
		return err
	}
	defer release()
	// The segments of a layer whose list is lost were not verified: a second
	// look at the new list finds what is wrong with them.
	again := ids == nil
	if row, err = g.ingestAgain(ctx, d); err != nil || !again {
		return err
	}
	if ids, err = g.listed(ctx, row); err != nil {
		return err
	}
	bad, err = g.store().Verify(ctx, ids)
	if err != nil || len(bad) == 0 {
		return err
	}
	if err := g.Catalog.Forget(ctx, bad); err != nil {
		return err
	}
	_, err = g.ingestAgain(ctx, d)
	return err
}

func (g *Ingester) ingestAgain(ctx context.Context, d Descriptor) (catalog.Layer, error) {
	keep := g.Catalog.Keep()
	defer keep.Release()
	row, err := g.ingest(ctx, d, keep)
	if err == nil {
		err = g.Catalog.PutLayer(ctx, row, keep.Packs()...)
	}
	return row, err
}

// RepairLayer does the same for one layer that was ingested: its entry list, its recipe and its segments. Calls at the same time,
// for one layer, do it once. Errors: those of Layer.
func (g *Ingester) RepairLayer(ctx context.Context, blob digest.Digest) error {
	_, err := g.flights.do(ctx, "repair layer "+blob.String(), func(ctx context.Context) (any, error) {
		row, err := g.Catalog.Layer(ctx, blob)
		if err != nil {
			return nil, err
		}
		return nil, g.repairLayer(ctx, Descriptor{Digest: blob, DiffID: row.DiffID}, row)
	})
	if err != nil {
		return fmt.Errorf("repair layer %s: %w", blob, err)
	}
	return nil
}

// soundRecipe reports whether the recipe of a layer is what was recorded, or none was made yet.
func (g *Ingester) soundRecipe(ctx context.Context, row catalog.Layer) bool {
	if row.Recipe.Key == "" {
		return true
	}
	object, err := g.Objects.Open(ctx, row.Recipe.Key, 0, -1)
	if err != nil {
		return false
	}
	defer object.Close()
	d, err := row.Recipe.Digest.Algorithm().FromReader(object)
	return err == nil && d == row.Recipe.Digest
}

// listed returns the segments that the entry list of a layer names, each once.
func (g *Ingester) listed(ctx context.Context, row catalog.Layer) ([]segment.ID, error) {
	object, err := g.Objects.Open(ctx, row.Entries, 0, -1)
	if err != nil {
		return nil, err
	}
	defer object.Close()
	list, err := layer.NewListReader(object)
	if err != nil {
		return nil, err
	}
	defer list.Close()
	seen := map[segment.ID]struct{}{}
	ids := []segment.ID{}
	for {
		e, err := list.Next()
		if err == io.EOF {
			return ids, nil
		}
		if err != nil {
			return nil, err
		}
		for _, s := range e.Segments {
			if _, ok := seen[s.ID]; !ok && !s.ID.IsHole() {
				seen[s.ID] = struct{}{}
				ids = append(ids, s.ID)
			}
		}
	}
}
