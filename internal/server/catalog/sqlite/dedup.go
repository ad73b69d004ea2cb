package sqlite

import (
	"bytes"
	"context"
	"database/sql"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/server/catalog"
)

const (
	idSize      = len(segment.ID{})
	segmentSize = idSize + 4 // in frames.segments
	// insertRows is how many segments one statement inserts. SQLite compiles a
	// row of VALUES to some ten instructions; beyond a few hundred rows nothing
	// is gained.
	insertRows = 256
	// selectIDs is how many rows one statement of locate looks up: measured
	// with 96,000 segments 2.6 µs each, 12 µs when asked for one by one.
	selectIDs = 512
)

// AddPack implements catalog.Dedup.
func (c *Catalog) AddPack(ctx context.Context, p catalog.Pack) error {
	err := c.update(ctx, func(tx *sql.Tx) error { return addPack(ctx, tx, p) })
	if err != nil {
		return fmt.Errorf("record pack %s: %w", p.Key, err)
	}
	return nil
}

func addPack(ctx context.Context, tx *sql.Tx, p catalog.Pack) error {
	var pack, size int64
	err := tx.QueryRowContext(ctx, `SELECT id, size FROM packs WHERE key = ?`, p.Key).Scan(&pack, &size)
	switch {
	case err == nil && size != p.Size:
		return fmt.Errorf("it has %d bytes, and was recorded with %d", p.Size, size)
	case err == nil:
		return nil
	case !errors.Is(err, sql.ErrNoRows):
		return err
	}
	err = tx.QueryRowContext(ctx, `INSERT INTO packs (key, size) VALUES (?, ?) RETURNING id`, p.Key, p.Size).Scan(&pack)
	if err != nil {
		return err
	}

	insertFrame, err := tx.PrepareContext(ctx, `INSERT INTO frames (pack, offset, length, raw_length, segments)
		VALUES (?, ?, ?, ?, ?)`)
	if err != nil {
		return err
	}
	defer insertFrame.Close()
	type row struct {
		id    *segment.ID
		frame int64
		index int
	}
	var rows []row
	for _, f := range p.Frames {
		packed := make([]byte, 0, len(f.Segments)*segmentSize)
		for _, s := range f.Segments {
			if s.ID.IsHole() {
				return fmt.Errorf("the frame at %d has a hole, which is never stored", f.Offset)
			}
			packed = append(packed, s.ID[:]...)
			packed = binary.BigEndian.AppendUint32(packed, s.Length)
		}
		r, err := insertFrame.ExecContext(ctx, pack, f.Offset, f.Length, f.RawLength, packed)
		if err != nil {
			return err
		}
		frame, err := r.LastInsertId()
		if err != nil {
			return err
		}
		for i := range f.Segments {
			rows = append(rows, row{&f.Segments[i].ID, frame, i})
		}
	}
	// In the order of the table every page is written once. Stable: the first
	// of two equal segments stays the first.
	slices.SortStableFunc(rows, func(a, b row) int { return compareIDs(*a.id, *b.id) })

	insert := func(n int) (*sql.Stmt, error) {
		return tx.PrepareContext(ctx, `INSERT INTO segments (id, frame, idx) VALUES (?, ?, ?)`+
			strings.Repeat(`, (?, ?, ?)`, n-1)+` ON CONFLICT (id) DO NOTHING`)
	}
	var many *sql.Stmt
	args := make([]any, 0, 3*insertRows)
	for batch := range slices.Chunk(rows, insertRows) {
		args = args[:0]
		for _, r := range batch {
			args = append(args, r.id[:], r.frame, r.index)
		}
		stmt := many
		if stmt == nil || len(batch) < insertRows {
			if stmt, err = insert(len(batch)); err != nil {
				return err
			}
			defer stmt.Close()
			if len(batch) == insertRows {
				many = stmt
			}
		}
		if _, err := stmt.ExecContext(ctx, args...); err != nil {
			return err
		}
	}
	return found(ctx, tx)
}

// found has layers that need segments which were lost need the packs that are their places now.
func found(ctx context.Context, tx *sql.Tx) error {
	if _, err := tx.ExecContext(ctx, `INSERT INTO layer_packs SELECT DISTINCT lp.layer, f.pack FROM lost l
		JOIN segments s ON s.id = l.id JOIN frames f ON f.id = s.frame JOIN layer_packs lp ON lp.pack = l.pack
		WHERE true ON CONFLICT DO NOTHING`); err != nil {
		return err
	}
	_, err := tx.ExecContext(ctx, `DELETE FROM lost WHERE id IN (SELECT l.id FROM lost l JOIN segments s ON s.id = l.id)`)
	return err
}

// Forget implements catalog.Dedup.
func (c *Catalog) Forget(ctx context.Context, ids []segment.ID) error {
	err := c.update(ctx, func(tx *sql.Tx) error {
		for batch := range slices.Chunk(ids, selectIDs) {
			args := make([]any, len(batch))
			for i := range batch {
				args[i] = batch[i][:]
			}
			in := `IN (?` + strings.Repeat(`, ?`, len(args)-1) + `)`
			// Who needs them knows this pack: what becomes their place is one that these need too.
			if _, err := tx.ExecContext(ctx, `INSERT OR IGNORE INTO lost SELECT s.id, f.pack FROM segments s JOIN frames f ON f.id = s.frame
				WHERE s.id `+in, args...); err != nil {
				return err
			}
			if _, err := tx.ExecContext(ctx, `DELETE FROM segments WHERE id `+in, args...); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("forget %d segments: %w", len(ids), err)
	}
	return nil
}

// Locate implements catalog.Dedup.
func (c *Catalog) Locate(ctx context.Context, ids []segment.ID) ([]catalog.Location, error) {
	locations, err := c.locate(ctx, ids)
	if err != nil {
		return nil, fmt.Errorf("locate %d segments: %w", len(ids), err)
	}
	return locations, nil
}

func (c *Catalog) locate(ctx context.Context, ids []segment.ID) ([]catalog.Location, error) {
	// One transaction, so that a pack is there as a whole or not at all.
	tx, err := c.read.BeginTx(ctx, nil)
	if err != nil {
		return nil, err
	}
	defer tx.Rollback()

	wanted := slices.Clone(ids)
	slices.SortFunc(wanted, compareIDs)
	wanted = slices.Compact(wanted)
	type place struct {
		frame int64 // its ID in the table; 0: not stored
		index int
	}
	places := make([]place, len(wanted))
	frames := make(map[int64]*catalog.Frame)
	var id sql.RawBytes
	var p place
	first := 0 // of the batch, in wanted
	for batch := range slices.Chunk(wanted, selectIDs) {
		args := make([]any, len(batch))
		for i := range batch {
			args[i] = batch[i][:]
		}
		err := query(ctx, tx, `SELECT id, frame, idx FROM segments WHERE id IN `, args, func() error {
			i, ok := slices.BinarySearchFunc(batch, segment.ID(id), compareIDs)
			if !ok {
				return fmt.Errorf("segment %x was not asked for", id)
			}
			places[first+i] = p
			frames[p.frame] = nil
			return nil
		}, &id, &p.frame, &p.index)
		if err != nil {
			return nil, err
		}
		first += len(batch)
	}
	if err := loadFrames(ctx, tx, frames); err != nil {
		return nil, err
	}

	locations := make([]catalog.Location, len(ids))
	for i := range ids {
		j, _ := slices.BinarySearchFunc(wanted, ids[i], compareIDs)
		if p := places[j]; p.frame != 0 {
			f := frames[p.frame]
			if f == nil || p.index >= len(f.Segments) || f.Segments[p.index].ID != ids[i] {
				return nil, fmt.Errorf("segment %s is not in frame %d, where it was recorded", ids[i], p.frame)
			}
			locations[i] = catalog.Location{Frame: f, Index: p.index}
		}
	}
	return locations, nil
}

func compareIDs(a, b segment.ID) int { return bytes.Compare(a[:], b[:]) }

// loadFrames sets the values of frames, which has the wanted IDs as keys.
func loadFrames(ctx context.Context, tx *sql.Tx, frames map[int64]*catalog.Frame) error {
	packs := make(map[int64]string) // by ID, the keys
	ids := slices.Sorted(maps.Keys(frames))
	var id, pack int64
	var f catalog.Frame
	var segments sql.RawBytes
	for batch := range slices.Chunk(ids, selectIDs) {
		args := make([]any, len(batch))
		for i := range batch {
			args[i] = batch[i]
		}
		err := query(ctx, tx, `SELECT id, pack, offset, length, raw_length, segments FROM frames WHERE id IN `, args, func() error {
			var err error
			if f.Segments, err = decodeSegments(segments); err != nil {
				return err
			}
			if _, ok := packs[pack]; !ok {
				var key string
				if err := tx.QueryRowContext(ctx, `SELECT key FROM packs WHERE id = ?`, pack).Scan(&key); err != nil {
					return err
				}
				packs[pack] = key
			}
			f.Pack = packs[pack]
			frame := f
			frames[id] = &frame
			return nil
		}, &id, &pack, &f.Offset, &f.Length, &f.RawLength, &segments)
		if err != nil {
			return err
		}
	}
	return nil
}

// query asks for the rows whose key is one of keys, and calls fn with each
// scanned to dest.
func query(ctx context.Context, tx *sql.Tx, statement string, keys []any, fn func() error, dest ...any) error {
	rows, err := tx.QueryContext(ctx, statement+`(?`+strings.Repeat(`, ?`, len(keys)-1)+`)`, keys...)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		if err := rows.Scan(dest...); err != nil {
			return err
		}
		if err := fn(); err != nil {
			return err
		}
	}
	return rows.Err()
}

// decodeSegments reads frames.segments.
func decodeSegments(b []byte) ([]catalog.FrameSegment, error) {
	if len(b)%segmentSize != 0 {
		return nil, fmt.Errorf("a frame's segments have %d bytes, not a multiple of %d", len(b), segmentSize)
	}
	segments := make([]catalog.FrameSegment, len(b)/segmentSize)
	for i := range segments {
		s := b[i*segmentSize:][:segmentSize]
		segments[i] = catalog.FrameSegment{ID: segment.ID(s), Length: binary.BigEndian.Uint32(s[idSize:])}
	}
	return segments, nil
}

// layerColumns are those that a layerRow takes.
const layerColumns = `blob, diff_id, entries, refused, size, files, recipe, recipe_digest, recipe_size`

// layerRow is a row of layers.
type layerRow struct {
	blob, diffID, recipe string
	catalog.Layer
}

func (r *layerRow) dest() []any {
	l := &r.Layer
	return []any{&r.blob, &r.diffID, &l.Entries, &l.Refused, &l.Size, &l.Files, &l.Recipe.Key, &r.recipe, &l.Recipe.Size}
}

func (r *layerRow) layer() catalog.Layer {
	l := r.Layer
	l.Blob, l.DiffID, l.Recipe.Digest = digest.Digest(r.blob), digest.Digest(r.diffID), digest.Digest(r.recipe)
	return l
}

// PutLayer implements catalog.Dedup.
func (c *Catalog) PutLayer(ctx context.Context, l catalog.Layer, packs ...string) error {
	err := c.change(ctx, 0, func(ctx context.Context, tx *sql.Tx) ([]catalog.Change, error) {
		err := putLayer(ctx, tx, l)
		if err == nil && packs != nil {
			err = putPacks(ctx, tx, l.Blob, packs)
		}
		return []catalog.Change{layerChange(l)}, err
	})
	if err != nil {
		return fmt.Errorf("record layer %s: %w", l.Blob, err)
	}
	return nil
}

func layerChange(l catalog.Layer) catalog.Change {
	return catalog.Change{Kind: catalog.ChangedLayer, Name: l.Blob.String(), Layer: l}
}

func putLayer(ctx context.Context, tx *sql.Tx, l catalog.Layer) error {
	_, err := tx.ExecContext(ctx, `INSERT INTO layers (`+layerColumns+`)
		VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
		ON CONFLICT (blob) DO UPDATE SET diff_id = excluded.diff_id, entries = excluded.entries, refused = excluded.refused,
			size = excluded.size, files = excluded.files, recipe = excluded.recipe, recipe_digest = excluded.recipe_digest,
			recipe_size = excluded.recipe_size, packed = 0`, l.Blob.String(), l.DiffID.String(), l.Entries, l.Refused, l.Size, l.Files,
		l.Recipe.Key, l.Recipe.Digest.String(), l.Recipe.Size)
	return err
}

// Layer implements catalog.Dedup.
func (c *Catalog) Layer(ctx context.Context, blob digest.Digest) (catalog.Layer, error) {
	var row layerRow
	err := c.read.QueryRowContext(ctx, `SELECT `+layerColumns+` FROM layers WHERE blob = ?`, blob.String()).Scan(row.dest()...)
	if err != nil {
		return catalog.Layer{}, fmt.Errorf("layer %s: %w", blob, known(err))
	}
	return row.layer(), nil
}

// Layers implements catalog.Dedup.
func (c *Catalog) Layers(ctx context.Context, blobs []digest.Digest) ([]catalog.Layer, error) {
	found := make(map[digest.Digest]catalog.Layer, len(blobs))
	var row layerRow
	err := c.listed(ctx, c.ask.layers, blobs, func() {
		l := row.layer()
		found[l.Blob] = l
	}, nil, row.dest()...)
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
	err := c.change(ctx, 0, func(ctx context.Context, tx *sql.Tx) ([]catalog.Change, error) {
		var row layerRow
		err := tx.QueryRowContext(ctx, `UPDATE layers SET recipe = ?, recipe_digest = ?, recipe_size = ? WHERE blob = ?
			RETURNING `+layerColumns, r.Key, r.Digest.String(), r.Size, blob.String()).Scan(row.dest()...)
		return []catalog.Change{layerChange(row.layer())}, err
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
func (c *Catalog) layersWhere(ctx context.Context, what, where string, after digest.Digest, limit int) ([]catalog.Layer, error) {
	fail := func(err error) ([]catalog.Layer, error) {
		return nil, fmt.Errorf("layers %s: %w", what, known(err))
	}
	rows, err := c.read.QueryContext(ctx, `SELECT `+layerColumns+` FROM layers
		WHERE `+where+` AND blob > ? ORDER BY blob LIMIT ?`, after.String(), limit)
	if err != nil {
		return fail(err)
	}
	defer rows.Close()
	var layers []catalog.Layer
	for rows.Next() {
		var row layerRow
		if err := rows.Scan(row.dest()...); err != nil {
			return fail(err)
		}
		layers = append(layers, row.layer())
	}
	if err := rows.Err(); err != nil {
		return fail(err)
	}
	return layers, nil
}

// PutRootfs implements catalog.Dedup.
func (c *Catalog) PutRootfs(ctx context.Context, r catalog.Rootfs) error {
	err := c.change(ctx, 0, func(ctx context.Context, tx *sql.Tx) ([]catalog.Change, error) {
		return []catalog.Change{{Kind: catalog.ChangedRootfs, Name: r.ChainID.String(), Rootfs: r}}, putRootfs(ctx, tx, r)
	})
	if err != nil {
		return fmt.Errorf("record rootfs %s: %w", r.ChainID, err)
	}
	return nil
}

func putRootfs(ctx context.Context, tx *sql.Tx, r catalog.Rootfs) error {
	_, err := tx.ExecContext(ctx, `INSERT INTO rootfs (chain_id, toc, key, idx) VALUES (?, ?, ?, ?)
		ON CONFLICT (chain_id) DO UPDATE SET toc = excluded.toc, key = excluded.key, idx = excluded.idx`,
		r.ChainID.String(), r.TOC.String(), r.Key, r.Index)
	return err
}

// Rootfs implements catalog.Dedup.
func (c *Catalog) Rootfs(ctx context.Context, chainID digest.Digest) (catalog.Rootfs, error) {
	r := catalog.Rootfs{ChainID: chainID}
	var toc string
	err := c.ask.rootfs.QueryRowContext(ctx, chainID.String()).Scan(&toc, &r.Key, &r.Index)
	if err != nil {
		return catalog.Rootfs{}, fmt.Errorf("rootfs %s: %w", chainID, known(err))
	}
	r.TOC = digest.Digest(toc)
	return r, nil
}
