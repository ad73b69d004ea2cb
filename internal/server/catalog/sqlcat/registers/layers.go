package registers

import (
	"context"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/catalog/sqlcat/database"
)

// LayerColumns are those that a LayerRow takes.
const LayerColumns = `blob, diff_id, entries, refused, size, files, recipe, recipe_digest, recipe_size`

// LayerRow is a row of layers.
type LayerRow struct {
	blob, diffID, recipe string
	catalog.Layer
}

func (r *LayerRow) Dest() []any {
	l := &r.Layer
	return []any{&r.blob, &r.diffID, &l.Entries, &l.Refused, &l.Size, &l.Files, &l.Recipe.Key, &r.recipe, &l.Recipe.Size}
}

func (r *LayerRow) Value() catalog.Layer {
	l := r.Layer
	l.Blob, l.DiffID, l.Recipe.Digest = digest.Digest(r.blob), digest.Digest(r.diffID), digest.Digest(r.recipe)
	return l
}

func LayerChange(l catalog.Layer) catalog.Change {
	return catalog.Change{Kind: catalog.ChangedLayer, Name: l.Blob.String(), Layer: l}
}

func PutLayer(ctx context.Context, tx *database.Tx, l catalog.Layer) error {
	_, err := tx.ExecContext(ctx, `INSERT INTO layers (`+LayerColumns+`)
		VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)
		ON CONFLICT (blob) DO UPDATE SET diff_id = excluded.diff_id, entries = excluded.entries, refused = excluded.refused,
			size = excluded.size, files = excluded.files, recipe = excluded.recipe, recipe_digest = excluded.recipe_digest,
			recipe_size = excluded.recipe_size, packed = 0`, l.Blob.String(), l.DiffID.String(), l.Entries, l.Refused, l.Size, l.Files,
		l.Recipe.Key, l.Recipe.Digest.String(), l.Recipe.Size)
	return err
}

func PutRootfs(ctx context.Context, tx *database.Tx, r catalog.Rootfs) error {
	_, err := tx.ExecContext(ctx, `INSERT INTO rootfs (chain_id, toc, key, idx) VALUES ($1, $2, $3, $4)
		ON CONFLICT (chain_id) DO UPDATE SET toc = excluded.toc, key = excluded.key, idx = excluded.idx`,
		r.ChainID.String(), r.TOC.String(), r.Key, r.Index)
	return err
}
