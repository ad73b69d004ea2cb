package sqlite

import (
	"strings"
)

// usageMigration counts what repositories hold. Triggers keep the numbers, so that whoever adds or removes rows,
// a replay too, need not know of them. Blobs are counted by what names them: a blob may be linked before the
// manifest that names it, or after, in a replay.
func usageMigration() string {
	return `
	ALTER TABLE tags ADD COLUMN pushed INTEGER NOT NULL DEFAULT 0; -- nanoseconds since 1970
	UPDATE tags SET pushed = coalesce((SELECT pushed FROM manifests m WHERE m.repo = tags.repo AND m.digest = tags.digest), unixepoch() * 1000000000);

	CREATE TABLE usage (
		repo      INTEGER PRIMARY KEY,
		bytes     INTEGER NOT NULL, -- of manifests, and of blobs that these name
		loose     INTEGER NOT NULL, -- of blobs that no manifest names
		manifests INTEGER NOT NULL
	) STRICT;

	-- What a manifest names, there or not.
	CREATE TABLE manifest_blobs (
		repo     INTEGER NOT NULL,
		digest   TEXT    NOT NULL,
		manifest INTEGER NOT NULL,
		PRIMARY KEY (repo, digest, manifest)
	) STRICT, WITHOUT ROWID;
	CREATE INDEX manifest_blobs_by_manifest ON manifest_blobs (manifest);

	CREATE TRIGGER repository_added AFTER INSERT ON repositories BEGIN
		INSERT INTO usage (repo, bytes, loose, manifests) VALUES (new.id, 0, 0, 0);
	END;
	CREATE TRIGGER repository_removed AFTER DELETE ON repositories BEGIN
		DELETE FROM usage WHERE repo = old.id;
	END;
	CREATE TRIGGER manifest_blob_added AFTER INSERT ON manifest_blobs
	WHEN EXISTS (SELECT 1 FROM blobs WHERE digest = new.digest AND repo = new.repo)
		AND NOT EXISTS (SELECT 1 FROM manifest_blobs WHERE repo = new.repo AND digest = new.digest AND manifest <> new.manifest) BEGIN
		UPDATE usage SET bytes = bytes + ` + sizeOf("new") + `, loose = loose - ` + sizeOf("new") + ` WHERE repo = new.repo;
	END;
	CREATE TRIGGER manifest_blob_removed AFTER DELETE ON manifest_blobs
	WHEN EXISTS (SELECT 1 FROM blobs WHERE digest = old.digest AND repo = old.repo)
		AND NOT EXISTS (SELECT 1 FROM manifest_blobs WHERE repo = old.repo AND digest = old.digest) BEGIN
		UPDATE usage SET bytes = bytes - ` + sizeOf("old") + `, loose = loose + ` + sizeOf("old") + ` WHERE repo = old.repo;
	END;
	CREATE TRIGGER blob_added AFTER INSERT ON blobs BEGIN ` + countBlob("new", "new.size") + ` END;
	CREATE TRIGGER blob_removed AFTER DELETE ON blobs BEGIN ` + countBlob("old", "-old.size") + ` END;
	CREATE TRIGGER blob_resized AFTER UPDATE OF size ON blobs BEGIN ` + countBlob("new", "(new.size - old.size)") + ` END;
	CREATE TRIGGER manifest_removed AFTER DELETE ON manifests BEGIN
		UPDATE usage SET manifests = manifests - 1, bytes = bytes - length(old.bytes) WHERE repo = old.repo;
		DELETE FROM manifest_blobs WHERE manifest = old.id;
	END;

	-- What is there. The trigger moves the blobs that are named from loose to bytes.
	INSERT INTO usage SELECT id,
		(SELECT coalesce(sum(length(bytes)), 0) FROM manifests WHERE repo = r.id), 0,
		(SELECT count(*) FROM manifests WHERE repo = r.id) FROM repositories r;
	UPDATE usage SET loose = total FROM (SELECT repo AS of, sum(size) AS total FROM blobs GROUP BY repo) WHERE repo = of;
	INSERT INTO manifest_blobs ` + named("m", "FROM manifests m") + `;

	CREATE TRIGGER manifest_added AFTER INSERT ON manifests BEGIN
		UPDATE usage SET manifests = manifests + 1, bytes = bytes + length(new.bytes) WHERE repo = new.repo;
		INSERT INTO manifest_blobs ` + named("new", "") + ` LIMIT 4096;
	END;
	`
}

// sizeOf is the size of the blob that a row of manifest_blobs names.
func sizeOf(row string) string {
	return strings.ReplaceAll(`(SELECT size FROM blobs WHERE digest = @row.digest AND repo = @row.repo)`, "@row", row)
}

// countBlob adds a number of bytes of a row of blobs where they count.
func countBlob(row, bytes string) string {
	return strings.NewReplacer("@row", row, "@bytes", bytes).Replace(`
		UPDATE usage SET
			bytes = bytes + iif(EXISTS (SELECT 1 FROM manifest_blobs WHERE repo = @row.repo AND digest = @row.digest), @bytes, 0),
			loose = loose + iif(EXISTS (SELECT 1 FROM manifest_blobs WHERE repo = @row.repo AND digest = @row.digest), 0, @bytes)
		WHERE repo = @row.repo;`)
}

// named selects the rows of manifest_blobs of a row of manifests; of one that is pushed the first 4,096, or it would hold
// up all others, and the rest of its blobs are loose. Of documents that are no JSON there are none. A digest that
// no blob of the repository has counts nothing: it does not matter what fields of unknown types of manifests mean.
func named(row, from string) string {
	one := func(field string) string {
		where := ", "
		if from == "" {
			where = "FROM "
		}
		return `SELECT ` + row + `.repo AS repo, iif(j.type = 'object', json_extract(j.value, '$.digest'), NULL) AS digest, ` + row + `.id AS manifest ` +
			from + where + `json_each(iif(json_valid(CAST(` + row + `.bytes AS TEXT)), CAST(` + row + `.bytes AS TEXT), '{}'), '$.` + field + `') j`
	}
	config := `SELECT ` + row + `.repo, iif(json_valid(CAST(` + row + `.bytes AS TEXT)), json_extract(CAST(` + row + `.bytes AS TEXT), '$.config.digest'), NULL), ` + row + `.id ` + from
	return `SELECT repo, digest, manifest FROM (` + strings.Join([]string{one("layers"), one("blobs"), one("manifests"), config}, " UNION ") +
		`) WHERE typeof(digest) = 'text'`
}
