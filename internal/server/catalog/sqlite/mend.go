package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/server/catalog"
)

// BlobsAfter returns at most limit blobs after the given one, each once, in byte order of their digests.
func (c *Catalog) BlobsAfter(ctx context.Context, after digest.Digest, limit int) ([]catalog.Blob, error) {
	rows, err := c.read.QueryContext(ctx, `SELECT digest, max(size), max(media_type) FROM blobs WHERE digest > ?
		GROUP BY digest ORDER BY digest LIMIT ?`, after.String(), limit)
	if err != nil {
		return nil, fmt.Errorf("list blobs: %w", known(err))
	}
	defer rows.Close()
	var blobs []catalog.Blob
	for rows.Next() {
		var b catalog.Blob
		if err := rows.Scan(&b.Digest, &b.Size, &b.MediaType); err != nil {
			return nil, fmt.Errorf("list blobs: %w", err)
		}
		blobs = append(blobs, b)
	}
	return blobs, known(rows.Err())
}

// PacksAfter returns the keys of at most limit packs after the given one, in byte order.
func (c *Catalog) PacksAfter(ctx context.Context, after string, limit int) ([]string, error) {
	keys, err := c.strings(ctx, `SELECT key FROM packs WHERE key > ? ORDER BY key LIMIT ?`, after, limit)
	if err != nil {
		return nil, fmt.Errorf("list packs: %w", known(err))
	}
	return keys, nil
}

// Pack returns what was recorded of a pack; its frames in the order of their offsets. Errors: catalog.ErrNotFound.
func (c *Catalog) Pack(ctx context.Context, key string) (catalog.Pack, error) {
	p := catalog.Pack{Key: key}
	err := func() error {
		tx, err := c.read.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer tx.Rollback() //nolint:errcheck // it only reads
		var id int64
		if err := tx.QueryRowContext(ctx, `SELECT id, size FROM packs WHERE key = ?`, key).Scan(&id, &p.Size); err != nil {
			return err
		}
		frames, err := framesOf(ctx, tx, id)
		for _, f := range frames {
			f.Pack = key
			p.Frames = append(p.Frames, f.Frame)
		}
		return err
	}()
	if err != nil {
		return p, fmt.Errorf("pack %s: %w", key, known(err))
	}
	return p, nil
}

// ReplacePack forgets a pack with all that it is the place of, and records another one, if it is not nil, in one
// transaction. What of the old one is not in the new one is lost: layers that need it need what becomes its place. Errors:
// catalog.ErrNotFound; catalog.ErrInUse while an ingest relies on the pack.
func (c *Catalog) ReplacePack(ctx context.Context, old catalog.Pack, with *catalog.Pack) error {
	fail := func(err error) error { return fmt.Errorf("replace pack %s: %w", old.Key, err) }
	keys := []string{old.Key}
	if !c.kept.begin(keys) {
		return fail(catalog.ErrInUse)
	}
	defer c.kept.end(keys)
	if err := c.update(ctx, func(tx *sql.Tx) error { return replacePack(ctx, tx, old, with) }); err != nil {
		return fail(err)
	}
	return nil
}

func replacePack(ctx context.Context, tx *sql.Tx, old catalog.Pack, with *catalog.Pack) error {
	var id int64
	if err := tx.QueryRowContext(ctx, `SELECT id FROM packs WHERE key = ?`, old.Key).Scan(&id); err != nil {
		return err
	}
	frames, err := framesOf(ctx, tx, id)
	if err != nil {
		return err
	}
	heir := id // whose layers need what is lost
	if with != nil {
		if err := moveSegments(ctx, tx, fmt.Sprintf("[%d]", id), with); err != nil {
			return err
		}
		if err := tx.QueryRowContext(ctx, `SELECT id FROM packs WHERE key = ?`, with.Key).Scan(&heir); err != nil {
			return err
		}
	}
	// A segment that rests elsewhere stays there.
	lose, err := tx.PrepareContext(ctx, `INSERT INTO lost SELECT id, ?1 FROM segments WHERE id = ?2 AND frame = ?3
		ON CONFLICT (id) DO UPDATE SET pack = excluded.pack`)
	if err != nil {
		return err
	}
	defer lose.Close()
	forget, err := tx.PrepareContext(ctx, `DELETE FROM segments WHERE id = ? AND frame = ?`)
	if err != nil {
		return err
	}
	defer forget.Close()
	for _, f := range frames {
		for i := range f.Segments {
			if _, err := lose.ExecContext(ctx, heir, f.Segments[i].ID[:], f.id); err != nil {
				return err
			}
			if _, err := forget.ExecContext(ctx, f.Segments[i].ID[:], f.id); err != nil {
				return err
			}
		}
	}
	statements := []string{`DELETE FROM frames WHERE pack = ?1`}
	if heir != id {
		if _, err := tx.ExecContext(ctx, `UPDATE lost SET pack = ? WHERE pack = ?`, heir, id); err != nil {
			return err
		}
		statements = append(statements, `DELETE FROM layer_packs WHERE pack = ?1`)
	}
	for _, statement := range append(statements, `DELETE FROM packs WHERE id = ?1`) {
		if _, err := tx.ExecContext(ctx, statement, id); err != nil {
			return err
		}
	}
	return nil
}

// ImageManifest is a manifest of a repository, with its tags.
type ImageManifest struct {
	Repository string
	Tags       []string
	catalog.Manifest
}

// EachManifest calls fn for all manifests of all repositories. fn may ask the catalog.
func (c *Catalog) EachManifest(ctx context.Context, fn func(ImageManifest) error) error {
	for after, last := int64(0), false; !last; {
		var page []catalog.Change
		err := func() error {
			tx, err := c.read.BeginTx(ctx, nil)
			if err != nil {
				return err
			}
			defer tx.Rollback() //nolint:errcheck // it only reads
			page, after, _, last, err = stages[2].after(ctx, tx, after, "")
			return err
		}()
		if err != nil {
			return fmt.Errorf("list manifests: %w", known(err))
		}
		for _, ch := range page {
			m := ImageManifest{Repository: ch.Repo, Manifest: ch.Manifest}
			m.Tags, err = c.strings(ctx, `SELECT name FROM tags WHERE repo = (SELECT id FROM repositories WHERE name = ?) AND digest = ? ORDER BY name`,
				ch.Repo, ch.Name)
			if err != nil {
				return fmt.Errorf("list tags of %s: %w", ch.Name, known(err))
			}
			if err := fn(m); err != nil {
				return err
			}
		}
	}
	return nil
}

// EachStartupImage calls fn for all images that startup sets are kept of. fn may ask the catalog, and change it.
func (c *Catalog) EachStartupImage(ctx context.Context, fn func(catalog.StartupImage) error) error {
	repo, chain := "", ""
	for {
		page, err := c.images(ctx, `WHERE (repo, chain_id) > (?, ?) ORDER BY repo, chain_id LIMIT 500`, repo, chain)
		if err != nil {
			return fmt.Errorf("list startup sets: %w", err)
		}
		for _, m := range page {
			repo, chain = m.Repository, m.ChainID.String()
			if err := fn(m); err != nil {
				return err
			}
		}
		if len(page) == 0 {
			return nil
		}
	}
}

// EachLogged calls fn for all that a log has of the catalog: some rows at a time, as changes without version and time. fn
// may ask the catalog, and change it.
func (c *Catalog) EachLogged(ctx context.Context, fn func([]catalog.Change) error) error {
	for _, s := range stages {
		id, name := int64(0), ""
		for last := false; !last; {
			var page []catalog.Change
			err := func() error {
				tx, err := c.read.BeginTx(ctx, nil)
				if err != nil {
					return err
				}
				defer tx.Rollback() //nolint:errcheck // it only reads
				page, id, name, last, err = s.after(ctx, tx, id, name)
				return err
			}()
			if err == nil && len(page) > 0 {
				err = fn(page)
			}
			if err != nil {
				return known(err)
			}
		}
	}
	return nil
}

// Differs returns those of changes that are not as the catalog is now: another value, or none.
func (c *Catalog) Differs(ctx context.Context, changes []catalog.Change) (other []catalog.Change, err error) {
	tx, err := c.read.BeginTx(ctx, nil)
	if err != nil {
		return nil, known(err)
	}
	defer tx.Rollback() //nolint:errcheck // it only reads
	for _, ch := range changes {
		now, err := register(ctx, tx, ch)
		if err != nil {
			return nil, fmt.Errorf("compare %s %s: %w", ch.Repo, ch.Name, known(err))
		}
		if now.Gone || !sameValue(&now, &ch) {
			other = append(other, ch)
		}
	}
	return other, nil
}

// LogAgain logs the present values of the registers of changes, also those that are gone.
func (c *Catalog) LogAgain(ctx context.Context, changes []catalog.Change) error {
	err := c.change(ctx, 0, func(ctx context.Context, tx *sql.Tx) ([]catalog.Change, error) {
		var out []catalog.Change
		for _, ch := range changes {
			now, err := register(ctx, tx, ch)
			if err != nil {
				return nil, err
			}
			out = append(out, now)
		}
		return out, nil
	})
	if err != nil {
		return fmt.Errorf("log %d registers again: %w", len(changes), err)
	}
	return nil
}

// register returns the present value of the register that a change is of.
func register(ctx context.Context, tx *sql.Tx, of catalog.Change) (catalog.Change, error) {
	now := catalog.Change{Kind: of.Kind, Repo: of.Repo, Name: of.Name}
	const repository = `(SELECT id FROM repositories WHERE name = ?)`
	var err error
	switch of.Kind {
	case catalog.ChangedRepository:
		var id int64
		err = tx.QueryRowContext(ctx, `SELECT id FROM repositories WHERE name = ?`, of.Repo).Scan(&id)
	case catalog.ChangedBlob:
		now.Blob.Digest = digest.Digest(of.Name)
		err = tx.QueryRowContext(ctx, `SELECT size, media_type FROM blobs WHERE repo = `+repository+` AND digest = ?`, of.Repo, of.Name).
			Scan(&now.Blob.Size, &now.Blob.MediaType)
	case catalog.ChangedManifest:
		row := tx.QueryRowContext(ctx, `SELECT `+manifestColumns+` FROM manifests WHERE repo = `+repository+` AND digest = ?`, of.Repo, of.Name)
		now.Manifest, err = scanManifest(row.Scan)
	case catalog.ChangedTag:
		err = tx.QueryRowContext(ctx, `SELECT digest FROM tags WHERE repo = `+repository+` AND name = ?`, of.Repo, of.Name).Scan(&now.Target)
	case catalog.ChangedLayer:
		var row layerRow
		err = tx.QueryRowContext(ctx, `SELECT `+layerColumns+` FROM layers WHERE blob = ?`, of.Name).Scan(row.dest()...)
		now.Layer = row.layer()
	case catalog.ChangedRootfs:
		now.Rootfs.ChainID = digest.Digest(of.Name)
		err = tx.QueryRowContext(ctx, `SELECT toc, key, idx FROM rootfs WHERE chain_id = ?`, of.Name).
			Scan(&now.Rootfs.TOC, &now.Rootfs.Key, &now.Rootfs.Index)
	case catalog.ChangesWhole:
		var stage int
		err = tx.QueryRowContext(ctx, `SELECT stage FROM log`).Scan(&stage)
		now.Gone = stage < len(stages)
	default:
		return now, fmt.Errorf("change of kind %d", of.Kind)
	}
	if err = known(err); errors.Is(err, catalog.ErrNotFound) {
		return catalog.Change{Kind: of.Kind, Repo: of.Repo, Name: of.Name, Gone: true}, nil
	}
	return now, err
}

// sameValue compares two changes of one register. A manifest's digest says what its bytes are.
func sameValue(a, b *catalog.Change) bool {
	return a.Blob == b.Blob && a.Target == b.Target && a.Layer == b.Layer && a.Rootfs == b.Rootfs &&
		a.Manifest.Digest == b.Manifest.Digest && a.Manifest.MediaType == b.Manifest.MediaType
}
