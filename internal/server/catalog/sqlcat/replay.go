package sqlcat

import (
	"context"
	"errors"
	"fmt"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/catalog/sqlcat/database"
	"hydrofoil.dev/foil/internal/server/catalog/sqlcat/registers"
)

// replayed is a table of the latest versions of registers, while there is a replay.
const replayed = `CREATE TABLE IF NOT EXISTS replayed (
	repo TEXT NOT NULL, kind BIGINT NOT NULL, name TEXT NOT NULL, version BIGINT NOT NULL, gone BIGINT NOT NULL, PRIMARY KEY (repo, kind, name))`

// Replay makes changes of a log in a catalog that is being rebuilt. They may come in any order and more than
// once: of each register the latest counts. EndReplay has to follow.
func (c *Catalog) Replay(ctx context.Context, changes []catalog.Change) error {
	err := c.db.Update(ctx, func(tx *database.Tx) error {
		if _, err := tx.ExecContext(ctx, replayed); err != nil {
			return err
		}
		later, err := tx.PrepareContext(ctx, `INSERT INTO replayed VALUES ($1, $2, $3, $4, $5)
			ON CONFLICT (repo, kind, name) DO UPDATE SET version = excluded.version, gone = excluded.gone WHERE replayed.version < excluded.version`)
		if err != nil {
			return err
		}
		defer later.Close()
		for i := range changes {
			change, gone := &changes[i], 0
			if change.Gone {
				gone = 1
			}
			err := database.Affected(later.ExecContext(ctx, change.Repo, int(change.Kind), change.Name, int64(change.Version), gone))
			if errors.Is(err, catalog.ErrNotFound) {
				continue // a later one was made
			}
			if err != nil {
				return err
			}
			if err := registers.Apply(ctx, tx, change); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("replay %d changes: %w", len(changes), err)
	}
	return nil
}

// EndReplay ends a replay: the catalog is as the log up to a version, and whole says whether the log has everything.
func (c *Catalog) EndReplay(ctx context.Context, version uint64, whole bool) error {
	stage := 0
	if whole {
		stage = len(registers.Stages)
	}
	err := c.db.Update(ctx, func(tx *database.Tx) error {
		if err := dropReplayed(ctx, tx); err != nil {
			return err
		}
		for _, statement := range []string{`DROP TABLE replayed`, fmt.Sprintf(`UPDATE log SET stage = %d, after_id = 0, after_name = ''`, stage)} {
			if _, err := tx.ExecContext(ctx, statement); err != nil {
				return err
			}
		}
		_, err := tx.ExecContext(ctx, tx.SetVersion, int64(version))
		return err
	})
	if err != nil {
		return fmt.Errorf("end the replay: %w", err)
	}
	return nil
}

// dropReplayed removes repositories that were deleted, and made again by older changes of what they had.
func dropReplayed(ctx context.Context, tx *database.Tx) error {
	if _, err := tx.ExecContext(ctx, replayed); err != nil {
		return err
	}
	names, err := database.TextOf(ctx, tx, `SELECT repo FROM replayed WHERE kind = $1 AND gone = 1`, int(catalog.ChangedRepository))
	if err != nil {
		return err
	}
	for _, name := range names {
		if _, err := registers.Hold(ctx, tx, name); err != nil && !errors.Is(err, catalog.ErrNotFound) {
			return err
		}
		if err := registers.DropRepository(ctx, tx, name); err != nil && !errors.Is(err, catalog.ErrNotFound) {
			return err
		}
	}
	return nil
}

// Stats counts what is in the catalog.
type Stats struct {
	Repositories int64 `json:"repositories"`
	Blobs        int64 `json:"blobs"` // links: a blob of two repositories counts twice
	Manifests    int64 `json:"manifests"`
	Tags         int64 `json:"tags"`
	Packs        int64 `json:"packs"`
	Hooks        int64 `json:"hooks"` // segments by which packs are found
	Layers       int64 `json:"layers"`
	Rootfs       int64 `json:"rootfs"`
}

// Stats counts; it reads every table's keys.
func (c *Catalog) Stats(ctx context.Context) (s Stats, err error) {
	err = c.db.Row(ctx, `SELECT (SELECT count(*) FROM repositories), (SELECT count(*) FROM blobs),
		(SELECT count(*) FROM manifests), (SELECT count(*) FROM tags), (SELECT count(*) FROM packs), (SELECT count(*) FROM hooks),
		(SELECT count(*) FROM layers), (SELECT count(*) FROM rootfs)`, nil,
		&s.Repositories, &s.Blobs, &s.Manifests, &s.Tags, &s.Packs, &s.Hooks, &s.Layers, &s.Rootfs)
	return s, err
}

// EachLayer calls fn for all layers. fn may ask the catalog, and must not change it.
func (c *Catalog) EachLayer(ctx context.Context, fn func(catalog.Layer) error) error {
	return c.each(ctx, registers.Stages[4], func(ch catalog.Change) error { return fn(ch.Layer) })
}

// EachRootfs calls fn for all rootfs. fn may ask the catalog, and must not change it.
func (c *Catalog) EachRootfs(ctx context.Context, fn func(catalog.Rootfs) error) error {
	return c.each(ctx, registers.Stages[5], func(ch catalog.Change) error { return fn(ch.Rootfs) })
}

func (c *Catalog) each(ctx context.Context, s registers.Stage, fn func(catalog.Change) error) error {
	after := ""
	for last := false; !last; {
		var page []catalog.Change
		from := after
		err := c.db.View(ctx, func(tx *database.Tx) (err error) {
			page, _, after, last, err = s.After(ctx, tx, 0, from)
			return err
		})
		if err != nil {
			return err
		}
		for _, ch := range page {
			if err := fn(ch); err != nil {
				return err
			}
		}
	}
	return nil
}

// DropLayer forgets what ingest made of a layer; it is ingested again when it is asked for.
func (c *Catalog) DropLayer(ctx context.Context, blob digest.Digest) error {
	return c.drop(ctx, catalog.Change{Kind: catalog.ChangedLayer, Name: blob.String(), Gone: true})
}

// DropRootfs forgets a rootfs; it is flattened again when it is asked for.
func (c *Catalog) DropRootfs(ctx context.Context, chainID digest.Digest) error {
	return c.drop(ctx, catalog.Change{Kind: catalog.ChangedRootfs, Name: chainID.String(), Gone: true})
}

func (c *Catalog) drop(ctx context.Context, gone catalog.Change) error {
	err := c.db.Change(ctx, 0, func(ctx context.Context, tx *database.Tx) ([]catalog.Change, error) {
		return []catalog.Change{gone}, registers.Apply(ctx, tx, &gone)
	})
	if err != nil {
		return fmt.Errorf("forget %s: %w", gone.Name, err)
	}
	return nil
}
