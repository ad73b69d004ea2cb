package sqlite

import (
	"context"
	"database/sql"
	"fmt"
)

// steps turn an empty database into one of the newest version, a step
// each; PRAGMA user_version counts the steps taken. A step that was released
// never changes: what has to be different is another step.
//
// Digests of blobs and manifests are text, "sha256:...", as clients write
// them. Segment IDs are 32 bytes.
func steps() []string {
	return []string{
		`
	CREATE TABLE repositories (
		id   INTEGER PRIMARY KEY,
		name TEXT NOT NULL UNIQUE
	) STRICT;

	-- Which repository holds which blob.
	CREATE TABLE blobs (
		repo       INTEGER NOT NULL REFERENCES repositories,
		digest     TEXT    NOT NULL,
		size       INTEGER NOT NULL,
		media_type TEXT    NOT NULL,
		PRIMARY KEY (digest, repo)
	) STRICT, WITHOUT ROWID;

	CREATE TABLE manifests (
		id            INTEGER PRIMARY KEY,
		repo          INTEGER NOT NULL REFERENCES repositories,
		digest        TEXT    NOT NULL,
		media_type    TEXT    NOT NULL,
		artifact_type TEXT    NOT NULL,
		subject       TEXT    NOT NULL, -- a digest, or empty
		annotations   TEXT    NOT NULL, -- a JSON object, or empty
		bytes         BLOB    NOT NULL,
		pushed        INTEGER NOT NULL, -- nanoseconds since 1970
		UNIQUE (repo, digest)
	) STRICT;
	CREATE INDEX manifests_by_subject ON manifests (repo, subject, pushed, id) WHERE subject <> '';

	CREATE TABLE tags (
		repo   INTEGER NOT NULL REFERENCES repositories,
		name   TEXT    NOT NULL,
		digest TEXT    NOT NULL,
		PRIMARY KEY (repo, name)
	) STRICT, WITHOUT ROWID;
	CREATE INDEX tags_by_digest ON tags (repo, digest);

	CREATE TABLE packs (
		id   INTEGER PRIMARY KEY,
		key  TEXT    NOT NULL UNIQUE,
		size INTEGER NOT NULL
	) STRICT;

	CREATE TABLE frames (
		id         INTEGER PRIMARY KEY,
		pack       INTEGER NOT NULL REFERENCES packs,
		offset     INTEGER NOT NULL,
		length     INTEGER NOT NULL,
		raw_length INTEGER NOT NULL,
		-- Each segment: its ID (32 bytes) and its length (4 bytes, big-endian).
		segments   BLOB    NOT NULL
	) STRICT;

	-- Where a segment was stored first.
	CREATE TABLE segments (
		id    BLOB    NOT NULL PRIMARY KEY,
		frame INTEGER NOT NULL,
		idx   INTEGER NOT NULL -- in frames.segments
	) STRICT, WITHOUT ROWID;

	CREATE TABLE layers (
		blob    TEXT    NOT NULL PRIMARY KEY,
		diff_id TEXT    NOT NULL,
		entries TEXT    NOT NULL,
		refused TEXT    NOT NULL,
		size    INTEGER NOT NULL,
		files   INTEGER NOT NULL
	) STRICT, WITHOUT ROWID;

	CREATE TABLE rootfs (
		chain_id TEXT NOT NULL PRIMARY KEY,
		toc      TEXT NOT NULL,
		key      TEXT NOT NULL,
		idx      TEXT NOT NULL
	) STRICT, WITHOUT ROWID;
	`,
		`
	CREATE TABLE startup_images (
		id         INTEGER PRIMARY KEY,
		repo       TEXT    NOT NULL,
		chain_id   TEXT    NOT NULL,
		toc        TEXT    NOT NULL,
		platform   TEXT    NOT NULL,
		noted      INTEGER NOT NULL, -- nanoseconds since 1970
		wanted     INTEGER NOT NULL,
		built      INTEGER NOT NULL,
		generation INTEGER NOT NULL,
		key        TEXT    NOT NULL,
		previous   TEXT    NOT NULL,
		UNIQUE (repo, chain_id)
	) STRICT;
	CREATE INDEX startup_images_stale ON startup_images (noted) WHERE built <> wanted;

	CREATE TABLE traces (
		id       INTEGER PRIMARY KEY AUTOINCREMENT, -- the order of arrival
		image    INTEGER NOT NULL REFERENCES startup_images,
		toc      TEXT    NOT NULL,
		service  TEXT    NOT NULL,
		recorded INTEGER NOT NULL,
		client   TEXT    NOT NULL,
		received INTEGER NOT NULL, -- nanoseconds since 1970
		body     BLOB    NOT NULL
	) STRICT;
	CREATE INDEX traces_by_service ON traces (image, service, recorded);
	`,
		`
	-- All empty: nobody has made it yet.
	ALTER TABLE layers ADD COLUMN recipe        TEXT    NOT NULL DEFAULT '';
	ALTER TABLE layers ADD COLUMN recipe_digest TEXT    NOT NULL DEFAULT '';
	ALTER TABLE layers ADD COLUMN recipe_size   INTEGER NOT NULL DEFAULT 0;
	CREATE INDEX layers_without_recipe ON layers (blob) WHERE recipe = '' AND refused = '';
	`,
		`
	-- One row: how far the catalog is with its log, and the log with what is older.
	CREATE TABLE log (
		id       INTEGER PRIMARY KEY CHECK (id = 1),
		applied  INTEGER NOT NULL,
		reserved INTEGER NOT NULL,
		stage    INTEGER NOT NULL, -- which table is being logged; past the last one: all is
		after_id   INTEGER NOT NULL, -- the last row that was
		after_name TEXT    NOT NULL
	) STRICT;
	INSERT INTO log VALUES (1, 0, 0, 0, 0, '');
	`,
		`
	CREATE INDEX layers_not_looked ON layers (blob) WHERE recipe <> '' AND instr(recipe, '.') = 0;
	`,
		garbageSchema(),
		usageMigration(),
		`
	-- By which a pack is found that may hold a segment: the first eight bytes of the segment's ID, as a number. A pack has
	-- one for each segment, or, at level n, for those whose number is divisible by 2^n.
	CREATE TABLE hooks (
		id   INTEGER PRIMARY KEY,
		pack INTEGER NOT NULL -- the newest of them
	) STRICT;
	CREATE TABLE sampling (
		id    INTEGER PRIMARY KEY CHECK (id = 1),
		level INTEGER NOT NULL
	) STRICT;
	INSERT INTO sampling VALUES (1, 0);

	-- Segments that a pack does not have, whatever its table says, or once had. Who needs the pack needs what has them now.
	CREATE TABLE damaged (
		pack INTEGER NOT NULL,
		id   BLOB    NOT NULL,
		PRIMARY KEY (pack, id)
	) STRICT, WITHOUT ROWID;
	CREATE INDEX damaged_by_id ON damaged (id);
	INSERT INTO damaged SELECT pack, id FROM lost;
	DROP TABLE lost;
	-- What frames and segments have becomes hooks later: package packs.
	`,
	}
}

// migrate brings the database to the newest version.
func migrate(ctx context.Context, db *sql.DB) error {
	var version int
	if err := db.QueryRowContext(ctx, `PRAGMA user_version`).Scan(&version); err != nil {
		return fmt.Errorf("read its version: %w", err)
	}
	all := steps()
	if version > len(all) {
		return fmt.Errorf("its version is %d and this foil knows versions up to %d: use a newer foil", version, len(all))
	}
	for ; version < len(all); version++ {
		err := func() error {
			tx, err := db.BeginTx(ctx, nil)
			if err != nil {
				return err
			}
			defer tx.Rollback()
			if _, err := tx.ExecContext(ctx, all[version]); err != nil {
				return err
			}
			// A PRAGMA takes no parameters.
			if _, err := tx.ExecContext(ctx, fmt.Sprintf(`PRAGMA user_version = %d`, version+1)); err != nil {
				return err
			}
			return tx.Commit()
		}()
		if err != nil {
			return fmt.Errorf("migrate from version %d to %d: %w", version, version+1, err)
		}
	}
	return nil
}
