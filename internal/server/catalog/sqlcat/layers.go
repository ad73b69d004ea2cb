package sqlcat

import (
	"context"
	"fmt"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/catalog/sqlcat/database"
	"hydrofoil.dev/foil/internal/server/catalog/sqlcat/packs"
	"hydrofoil.dev/foil/internal/server/catalog/sqlcat/registers"
)

// PutLayer implements catalog.Dedup.
func (c *Catalog) PutLayer(ctx context.Context, l catalog.Layer, needs ...string) error {
	err := c.db.Change(ctx, 0, func(ctx context.Context, tx *database.Tx) ([]catalog.Change, error) {
		err := registers.PutLayer(ctx, tx, l)
		if err == nil && needs != nil {
			err = packs.Need(ctx, tx, l.Blob, needs)
		}
		return []catalog.Change{registers.LayerChange(l)}, err
	})
	if err != nil {
		return fmt.Errorf("record layer %s: %w", l.Blob, err)
	}
	return nil
}

// Layer implements catalog.Dedup.
func (c *Catalog) Layer(ctx context.Context, blob digest.Digest) (catalog.Layer, error) {
	var row registers.LayerRow
	err := c.db.Row(ctx, `SELECT `+registers.LayerColumns+` FROM layers WHERE blob = $1`, []any{blob.String()}, row.Dest()...)
	if err != nil {
		return catalog.Layer{}, fmt.Errorf("layer %s: %w", blob, err)
	}
	return row.Value(), nil
}

// Layers implements catalog.Dedup.
func (c *Catalog) Layers(ctx context.Context, blobs []digest.Digest) ([]catalog.Layer, error) {
	found := make(map[digest.Digest]catalog.Layer, len(blobs))
	list, err := database.List(blobs)
	if err == nil {
		err = c.db.Rows(ctx, c.ask.layers, []any{list}, func(scan func(...any) error) error {
			var row registers.LayerRow
			err := scan(row.Dest()...)
			l := row.Value()
			found[l.Blob] = l
			return err
		})
	}
	layers := make([]catalog.Layer, len(blobs))
	for i, d := range blobs {
		var ok bool
		if layers[i], ok = found[d]; !ok && err == nil {
			err = fmt.Errorf("layer %s: %w", d, catalog.ErrNotFound)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("%d layers: %w", len(blobs), err)
	}
	return layers, nil
}

// PutRecipe implements catalog.Dedup.
func (c *Catalog) PutRecipe(ctx context.Context, blob digest.Digest, r catalog.Recipe) error {
	err := c.db.Change(ctx, 0, func(ctx context.Context, tx *database.Tx) ([]catalog.Change, error) {
		var row registers.LayerRow
		err := tx.QueryRowContext(ctx, `UPDATE layers SET recipe = $1, recipe_digest = $2, recipe_size = $3 WHERE blob = $4
			RETURNING `+registers.LayerColumns, r.Key, r.Digest.String(), r.Size, blob.String()).Scan(row.Dest()...)
		return []catalog.Change{registers.LayerChange(row.Value())}, err
	})
	if err != nil {
		return fmt.Errorf("record recipe of layer %s: %w", blob, err)
	}
	return nil
}

// WithoutRecipe implements catalog.Dedup.
func (c *Catalog) WithoutRecipe(ctx context.Context, after digest.Digest, limit int) ([]catalog.Layer, error) {
	return c.layersWhere(ctx, "without recipes", `recipe = '' AND refused = ''`, after, limit)
}

// NotLooked implements catalog.Dedup.
func (c *Catalog) NotLooked(ctx context.Context, after digest.Digest, limit int) ([]catalog.Layer, error) {
	return c.layersWhere(ctx, "that nobody looked at", `recipe <> '' AND instr(recipe, '.') = 0`, after, limit)
}

// layersWhere returns layers after one.
func (c *Catalog) layersWhere(ctx context.Context, what, where string, after digest.Digest, limit int) (layers []catalog.Layer, err error) {
	err = c.db.Rows(ctx, `SELECT `+registers.LayerColumns+` FROM layers
		WHERE `+where+` AND blob > $1 ORDER BY blob LIMIT $2`, []any{after.String(), limit}, func(scan func(...any) error) error {
		var row registers.LayerRow
		err := scan(row.Dest()...)
		layers = append(layers, row.Value())
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("layers %s: %w", what, err)
	}
	return layers, nil
}

// PutRootfs implements catalog.Dedup.
func (c *Catalog) PutRootfs(ctx context.Context, r catalog.Rootfs) error {
	err := c.db.Change(ctx, 0, func(ctx context.Context, tx *database.Tx) ([]catalog.Change, error) {
		return []catalog.Change{{Kind: catalog.ChangedRootfs, Name: r.ChainID.String(), Rootfs: r}}, registers.PutRootfs(ctx, tx, r)
	})
	if err != nil {
		return fmt.Errorf("record rootfs %s: %w", r.ChainID, err)
	}
	return nil
}

// Rootfs implements catalog.Dedup.
func (c *Catalog) Rootfs(ctx context.Context, chainID digest.Digest) (catalog.Rootfs, error) {
	r := catalog.Rootfs{ChainID: chainID}
	var toc string
	err := c.db.Row(ctx, c.ask.rootfs, []any{chainID.String()}, &toc, &r.Key, &r.Index)
	if err != nil {
		return catalog.Rootfs{}, fmt.Errorf("rootfs %s: %w", chainID, err)
	}
	r.TOC = digest.Digest(toc)
	return r, nil
}
