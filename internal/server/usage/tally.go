package usage

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	_ "modernc.org/sqlite" // registers the driver

	"hydrofoil.dev/foil/internal/format/layer"
	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/server/dedup"
)

// tally is what was counted, in a database that is thrown away.
type tally struct {
	dir string
	db  *sql.DB
}

// several is the owner of what more than one repository has.
const several = -1

const schema = `
	CREATE TABLE repositories (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
	CREATE TABLE links (repo INTEGER NOT NULL, blob TEXT NOT NULL, size INTEGER NOT NULL, PRIMARY KEY (blob, repo)) WITHOUT ROWID;
	CREATE TABLE tags (repo INTEGER NOT NULL, manifest TEXT NOT NULL, name TEXT NOT NULL, PRIMARY KEY (repo, manifest, name)) WITHOUT ROWID;
	CREATE TABLE manifests (repo INTEGER NOT NULL, digest TEXT NOT NULL, size INTEGER NOT NULL, PRIMARY KEY (repo, digest)) WITHOUT ROWID;
	CREATE TABLE layers (blob TEXT PRIMARY KEY, size INTEGER NOT NULL) WITHOUT ROWID;
	CREATE TABLE needs (repo INTEGER NOT NULL, manifest TEXT NOT NULL, blob TEXT NOT NULL, depth INTEGER NOT NULL,
		PRIMARY KEY (repo, manifest, depth)) WITHOUT ROWID;
	CREATE INDEX needs_by_blob ON needs (blob, manifest);
	CREATE TABLE contents (id BLOB PRIMARY KEY, size INTEGER NOT NULL, copies INTEGER NOT NULL, path TEXT NOT NULL, layer TEXT NOT NULL) WITHOUT ROWID;
	CREATE TABLE segments (id BLOB PRIMARY KEY, length INTEGER NOT NULL, stored INTEGER NOT NULL, copies INTEGER NOT NULL, owner INTEGER NOT NULL) WITHOUT ROWID;
`

// Statements of a batch.
const (
	addRepository = `INSERT INTO repositories (name) VALUES (?)`
	addLink       = `INSERT INTO links SELECT id, ?2, ?3 FROM repositories WHERE name = ?1`
	addTag        = `INSERT INTO tags SELECT id, ?2, ?3 FROM repositories WHERE name = ?1`
	addManifest   = `INSERT INTO manifests SELECT id, ?2, ?3 FROM repositories WHERE name = ?1`
	addNeed       = `INSERT INTO needs SELECT id, ?2, ?3, ?4 FROM repositories WHERE name = ?1`
	addLayer      = `INSERT INTO layers VALUES (?, ?)`
	addContent    = `INSERT INTO contents VALUES (?, ?, 1, ?, ?) ON CONFLICT DO UPDATE SET copies = copies + 1`
	addSegment    = `INSERT INTO segments VALUES (?, ?, ?, 1, ?) ON CONFLICT DO UPDATE SET copies = copies + 1,
		owner = CASE owner WHEN excluded.owner THEN owner ELSE -1 END`
)

func newTally(ctx context.Context) (_ *tally, err error) {
	dir, err := os.MkdirTemp("", "foil-usage-")
	if err != nil {
		return nil, err
	}
	t := &tally{dir: dir}
	defer func() {
		if err != nil {
			err = errors.Join(err, t.close())
		}
	}()
	// What is lost with a crash is made again: nothing waits for the disk.
	t.db, err = sql.Open("sqlite", filepath.Join(dir, "tally.db")+"?_pragma=journal_mode(OFF)&_pragma=synchronous(OFF)&_pragma=cache_size(-32768)")
	if err != nil {
		return nil, err
	}
	t.db.SetMaxOpenConns(1)
	_, err = t.db.ExecContext(ctx, schema)
	return t, err
}

func (t *tally) close() error {
	var err error
	if t.db != nil {
		err = t.db.Close()
	}
	return errors.Join(err, os.RemoveAll(t.dir))
}

// batch is a transaction with its statements, compiled.
type batch struct {
	ctx  context.Context
	tx   *sql.Tx
	made map[string]*sql.Stmt
}

// batch runs fn. What fails half way has counted half.
func (t *tally) batch(ctx context.Context, fn func(*batch) error) error {
	tx, err := t.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	err = fn(&batch{ctx, tx, map[string]*sql.Stmt{}})
	return errors.Join(err, tx.Commit())
}

func (b *batch) do(query string, args ...any) error {
	stmt := b.made[query]
	if stmt == nil {
		var err error
		if stmt, err = b.tx.PrepareContext(b.ctx, query); err != nil { // closed with the transaction
			return err
		}
		b.made[query] = stmt
	}
	_, err := stmt.ExecContext(b.ctx, args...)
	return err
}

// segments tallies segments of a layer that a repository owns.
func (l *looker) segments(ctx context.Context, b *batch, in *dedup.Places, list []layer.Segment, owner int64) error {
	ids := make([]segment.ID, len(list))
	for i, g := range list {
		ids[i] = g.ID
	}
	places, err := in.Locate(ctx, ids)
	if err != nil {
		return err
	}
	for i, g := range list {
		stored := int64(0) // lost
		if f := places[i].Frame; f != nil {
			stored = (int64(g.Length)*int64(f.Length) + int64(f.RawLength)/2) / int64(f.RawLength)
		}
		if err := b.do(addSegment, g.ID[:], int64(g.Length), stored, owner); err != nil {
			return err
		}
	}
	return nil
}

func (t *tally) knows(ctx context.Context, repo string) (known bool, err error) {
	err = t.db.QueryRowContext(ctx, `SELECT EXISTS (SELECT 1 FROM repositories WHERE name = ?)`, repo).Scan(&known)
	return known, err
}

// owner returns the repository that alone holds a blob, or several.
func (t *tally) owner(ctx context.Context, blob string) (owner int64, held bool, err error) {
	var n int64
	err = t.db.QueryRowContext(ctx, `SELECT count(*), coalesce(max(repo), 0) FROM links WHERE blob = ?`, blob).Scan(&n, &owner)
	if n > 1 {
		owner = several
	}
	return owner, n > 0, err
}

// report fills r in.
func (t *tally) report(ctx context.Context, o Options, r *Report) error {
	one := func(query string, args []any, dest ...any) error {
		return t.db.QueryRowContext(ctx, query, args...).Scan(dest...)
	}
	const duplicates = `SELECT coalesce(sum(copies), 0), coalesce(sum(copies * size), 0), count(*), coalesce(sum(size), 0) FROM `
	err := errors.Join(
		one(duplicates+`(SELECT count(*) AS copies, (SELECT max(size) FROM links WHERE links.blob = needs.blob) AS size FROM needs WHERE depth > 0 GROUP BY blob)`, nil,
			&r.Layers.Count, &r.Layers.Bytes, &r.Layers.Distinct, &r.Layers.DistinctBytes),
		one(duplicates+`contents`, nil, &r.Files.Count, &r.Files.Bytes, &r.Files.Distinct, &r.Files.DistinctBytes),
		one(duplicates+`(SELECT copies, length AS size FROM segments)`, nil, &r.Segments.Count, &r.Segments.Bytes, &r.Segments.Distinct, &r.Segments.DistinctBytes),
		one(`SELECT coalesce(sum(stored), 0) FROM segments`, nil, &r.Packed))
	if err != nil {
		return err
	}
	r.Repositories, err = all(ctx, t, `WITH sole AS (SELECT blob FROM links GROUP BY blob HAVING count(*) = 1),
			theirs AS (SELECT owner, sum(stored) AS stored FROM segments GROUP BY owner)
		SELECT name, (SELECT count(*) FROM manifests WHERE repo = r.id), (SELECT count(*) FROM tags WHERE repo = r.id),
			coalesce(l.plain, 0) + (SELECT coalesce(sum(size), 0) FROM manifests WHERE repo = r.id),
			coalesce(l.alone, 0) + (SELECT coalesce(sum(size), 0) FROM manifests WHERE repo = r.id),
			coalesce(theirs.stored, 0)
		FROM repositories r LEFT JOIN theirs ON theirs.owner = r.id
			LEFT JOIN (SELECT repo, sum(size) AS plain, sum(CASE WHEN blob IN sole THEN size ELSE 0 END) AS alone FROM links GROUP BY repo) l ON l.repo = r.id
		WHERE ?1 = '' OR name = ?1 ORDER BY 4 DESC, name`, []any{o.Repository}, func(v *Repository) []any {
		return []any{&v.Name, &v.Manifests, &v.Tags, &v.Plain, &v.Alone, &v.Packed}
	})
	for i := range r.Repositories {
		v := &r.Repositories[i]
		v.Shared, v.Adds = v.Plain-v.Alone, v.Alone+v.Packed
	}
	if err != nil {
		return fmt.Errorf("repositories: %w", err)
	}
	if r.Largest, err = all(ctx, t, `SELECT lower(hex(id)), size, copies, path, layer FROM contents ORDER BY size DESC, id LIMIT ?`, []any{o.Largest}, func(v *Content) []any {
		return []any{&v.ID, &v.Bytes, &v.Copies, &v.Path, &v.Layer}
	}); err != nil {
		return fmt.Errorf("contents: %w", err)
	}
	if r.Depths, err = all(ctx, t, `SELECT min(depth, 10) AS d, count(*), coalesce(sum(layers.size), 0) FROM needs LEFT JOIN layers ON layers.blob = needs.blob
		WHERE depth > 0 GROUP BY d ORDER BY d`, nil, func(v *Depth) []any { return []any{&v.Layer, &v.Count, &v.Bytes} }); err != nil {
		return fmt.Errorf("depths: %w", err)
	}
	if o.Repository == "" {
		return nil
	}
	r.Images, err = all(ctx, t, `WITH own AS (SELECT repo, manifest, blob, max(depth) AS depth FROM needs
				WHERE repo = (SELECT id FROM repositories WHERE name = ?1) GROUP BY repo, manifest, blob)
		SELECT ?1 || coalesce((SELECT ':' || min(name) FROM tags WHERE tags.repo = own.repo AND tags.manifest = own.manifest), '@' || own.manifest),
			(SELECT count(*) FROM needs n WHERE n.repo = own.repo AND n.manifest = own.manifest AND n.depth > 0), m.size + coalesce(sum(links.size), 0), coalesce(sum(layers.size), 0),
			m.size + coalesce(sum(CASE WHEN (SELECT count(DISTINCT n.manifest) FROM needs n WHERE n.blob = own.blob) = 1 THEN links.size ELSE 0 END), 0)
		FROM own JOIN manifests m ON m.repo = own.repo AND m.digest = own.manifest
			LEFT JOIN links ON links.repo = own.repo AND links.blob = own.blob
			LEFT JOIN layers ON layers.blob = own.blob
		GROUP BY own.manifest ORDER BY 3 DESC, 1`, []any{o.Repository}, func(v *Image) []any {
		return []any{&v.Name, &v.Layers, &v.Plain, &v.Uncompressed, &v.Alone}
	})
	for i := range r.Images {
		v := &r.Images[i]
		v.Shared = v.Plain - v.Alone
	}
	if err != nil {
		return fmt.Errorf("images: %w", err)
	}
	return nil
}

// all returns the rows of a query.
func all[T any](ctx context.Context, t *tally, query string, args []any, dest func(*T) []any) (list []T, err error) {
	rows, err := t.db.QueryContext(ctx, query, args...)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() {
		var v T
		if err := rows.Scan(dest(&v)...); err != nil {
			return nil, err
		}
		list = append(list, v)
	}
	return list, rows.Err()
}
