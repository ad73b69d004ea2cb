package sqlite

import (
	"fmt"
)

// garbageSchema is what deleting and collecting need (catalog.Garbage).
//
// A review is a question that an event has raised: does anybody still need this? Triggers ask it, in the
// transaction of the event, whoever makes the change: a request, a replay of the journal, or a collector. Its kinds
// are those of reviewKind.
func garbageSchema() string {
	return `
	-- Until when nobody may take the blob out of the repository: its client was told that it is there.
	ALTER TABLE blobs ADD COLUMN leased INTEGER NOT NULL DEFAULT 0; -- nanoseconds since 1970

	CREATE TABLE deleted_manifests (
		id            INTEGER PRIMARY KEY,
		repo          INTEGER NOT NULL REFERENCES repositories,
		digest        TEXT    NOT NULL,
		media_type    TEXT    NOT NULL,
		artifact_type TEXT    NOT NULL,
		subject       TEXT    NOT NULL,
		annotations   TEXT    NOT NULL,
		bytes         BLOB    NOT NULL,
		pushed        INTEGER NOT NULL,
		deleted       INTEGER NOT NULL, -- nanoseconds since 1970
		UNIQUE (repo, digest)
	) STRICT;
	CREATE INDEX deleted_manifests_by_time ON deleted_manifests (deleted);
	CREATE TABLE deleted_tags (
		repo    INTEGER NOT NULL REFERENCES repositories,
		name    TEXT    NOT NULL,
		digest  TEXT    NOT NULL,
		deleted INTEGER NOT NULL,
		PRIMARY KEY (repo, name)
	) STRICT, WITHOUT ROWID;
	CREATE INDEX deleted_tags_by_time ON deleted_tags (deleted);

	-- What a manifest names, also a deleted one while it can be brought back: every string in it that looks
	-- like a digest. '*' is everything: it is no JSON, and nobody knows.
	CREATE TABLE refs (
		digest   TEXT    NOT NULL,
		repo     INTEGER NOT NULL,
		manifest TEXT    NOT NULL,
		PRIMARY KEY (digest, repo, manifest)
	) STRICT, WITHOUT ROWID;
	CREATE INDEX refs_by_manifest ON refs (repo, manifest);
	-- Which rootfs a manifest is of. Made of its config when the image is reviewed.
	CREATE TABLE images (
		repo     INTEGER NOT NULL,
		manifest TEXT    NOT NULL,
		chain_id TEXT    NOT NULL,
		PRIMARY KEY (repo, manifest)
	) STRICT, WITHOUT ROWID;
	CREATE INDEX images_by_chain ON images (chain_id, repo);

	-- Manifests that are there, or can be brought back.
	CREATE VIEW known_manifests AS SELECT repo, digest, media_type, artifact_type, subject, annotations, bytes, pushed FROM manifests
		UNION SELECT repo, digest, media_type, artifact_type, subject, annotations, bytes, pushed FROM deleted_manifests;

	-- In which packs the segments of a layer are: in all of those, and perhaps in fewer.
	CREATE TABLE layer_packs (
		layer TEXT    NOT NULL,
		pack  INTEGER NOT NULL,
		PRIMARY KEY (layer, pack)
	) STRICT, WITHOUT ROWID;
	CREATE INDEX layer_packs_by_pack ON layer_packs (pack);
	ALTER TABLE layers ADD COLUMN packed INTEGER NOT NULL DEFAULT 0; -- layer_packs has its packs
	CREATE INDEX layers_not_packed ON layers (blob) WHERE packed = 0 AND refused = '';
	ALTER TABLE packs ADD COLUMN dead INTEGER NOT NULL DEFAULT 0; -- bytes that no layer needed at its last review
	ALTER TABLE packs ADD COLUMN used INTEGER NOT NULL DEFAULT 0; -- counts the layers that began to use it
	CREATE INDEX packs_by_dead ON packs (dead) WHERE dead > 0;
	CREATE INDEX frames_by_pack ON frames (pack);
	-- Segments that were forgotten: who needs them, needed this pack.
	CREATE TABLE lost (
		id   BLOB    NOT NULL PRIMARY KEY,
		pack INTEGER NOT NULL
	) STRICT, WITHOUT ROWID;
	CREATE INDEX lost_by_pack ON lost (pack);

	CREATE TABLE reviews (
		kind   INTEGER NOT NULL,
		repo   INTEGER NOT NULL, -- 0: of none
		name   TEXT    NOT NULL,
		since  INTEGER NOT NULL, -- the event, nanoseconds since 1970
		jitter INTEGER NOT NULL, -- thousandths
		tries  INTEGER NOT NULL DEFAULT 0,
		later  INTEGER NOT NULL DEFAULT 0, -- not before, after a try that failed
		PRIMARY KEY (kind, repo, name)
	) STRICT, WITHOUT ROWID;
	CREATE INDEX reviews_by_time ON reviews (kind, since);
	-- Objects that no row names any more, and that readers may still read. One that ends in '*' is all
	-- that begin like it.
	CREATE TABLE doomed (
		key   TEXT    NOT NULL PRIMARY KEY,
		since INTEGER NOT NULL
	) STRICT, WITHOUT ROWID;
	-- Objects that no row names, and perhaps never did, with the time when that was seen first.
	CREATE TABLE strays (
		key  TEXT    NOT NULL PRIMARY KEY,
		seen INTEGER NOT NULL
	) STRICT, WITHOUT ROWID;
	CREATE INDEX layers_by_entries ON layers (entries) WHERE entries <> '';
	CREATE INDEX layers_by_recipe ON layers (recipe) WHERE recipe <> '';
	CREATE INDEX rootfs_by_key ON rootfs (key);
	CREATE INDEX rootfs_by_index ON rootfs (idx);
	CREATE INDEX rootfs_by_toc ON rootfs (toc);
	CREATE INDEX startup_images_by_key ON startup_images (key) WHERE key <> '';
	CREATE INDEX startup_images_by_previous ON startup_images (previous) WHERE previous <> '';
	CREATE INDEX startup_images_by_chain ON startup_images (chain_id);

	CREATE TRIGGER manifests_put AFTER INSERT ON manifests BEGIN
		INSERT OR IGNORE INTO refs SELECT value, NEW.repo, NEW.digest FROM ` + digestsOf("NEW.bytes") + `;
		` + review(1, "NEW.repo", "NEW.digest") + `
	END;
	CREATE TRIGGER manifests_gone AFTER DELETE ON manifests
		WHEN NOT EXISTS (SELECT 1 FROM deleted_manifests WHERE repo = OLD.repo AND digest = OLD.digest) BEGIN
		DELETE FROM refs WHERE repo = OLD.repo AND manifest = OLD.digest;
		DELETE FROM images WHERE repo = OLD.repo AND manifest = OLD.digest;
		` + review(7, "OLD.repo", "''") + `
	END;
	CREATE TRIGGER deleted_manifests_put AFTER INSERT ON deleted_manifests BEGIN
		INSERT OR IGNORE INTO refs SELECT value, NEW.repo, NEW.digest FROM ` + digestsOf("NEW.bytes") + `;
		` + review(1, "NEW.repo", "NEW.digest") + `
	END;
	CREATE TRIGGER deleted_manifests_gone AFTER DELETE ON deleted_manifests
		WHEN NOT EXISTS (SELECT 1 FROM manifests WHERE repo = OLD.repo AND digest = OLD.digest) BEGIN
		DELETE FROM refs WHERE repo = OLD.repo AND manifest = OLD.digest;
		DELETE FROM images WHERE repo = OLD.repo AND manifest = OLD.digest;
		` + review(7, "OLD.repo", "''") + `
	END;
	CREATE TRIGGER deleted_tags_gone AFTER DELETE ON deleted_tags BEGIN
		` + review(7, "OLD.repo", "''") + `
	END;
	CREATE TRIGGER refs_gone AFTER DELETE ON refs BEGIN
		INSERT OR REPLACE INTO reviews (kind, repo, name, since, jitter)
			SELECT 2, repo, digest, ` + now + `, ` + jitter + ` FROM blobs WHERE digest = OLD.digest AND repo = OLD.repo;
		INSERT OR REPLACE INTO reviews (kind, repo, name, since, jitter)
			SELECT 2, repo, digest, ` + now + `, ` + jitter + ` FROM blobs WHERE OLD.digest = '*' AND repo = OLD.repo;
	END;
	CREATE TRIGGER images_gone AFTER DELETE ON images BEGIN
		` + review(4, "0", "OLD.chain_id") + `
		INSERT OR REPLACE INTO reviews (kind, repo, name, since, jitter)
			SELECT 5, 0, id, ` + now + `, ` + jitter + ` FROM startup_images WHERE chain_id = OLD.chain_id
				AND repo = (SELECT name FROM repositories WHERE id = OLD.repo);
	END;
	CREATE TRIGGER blobs_put AFTER INSERT ON blobs BEGIN ` + review(2, "NEW.repo", "NEW.digest") + ` END;
	CREATE TRIGGER blobs_gone AFTER DELETE ON blobs BEGIN
		` + review(3, "0", "OLD.digest") + review(7, "OLD.repo", "''") + `
	END;
	CREATE TRIGGER layers_put AFTER INSERT ON layers BEGIN ` + review(3, "0", "NEW.blob") + ` END;
	CREATE TRIGGER layers_changed AFTER UPDATE OF entries, recipe ON layers BEGIN
		` + doom("OLD.entries", "OLD.entries <> NEW.entries") + doom("OLD.recipe", "OLD.recipe <> NEW.recipe") + `
	END;
	CREATE TRIGGER layers_gone AFTER DELETE ON layers BEGIN
		DELETE FROM layer_packs WHERE layer = OLD.blob;
		` + doom("OLD.entries", "true") + doom("OLD.recipe", "true") + `
	END;
	CREATE TRIGGER layer_packs_put AFTER INSERT ON layer_packs BEGIN
		UPDATE packs SET used = used + 1 WHERE id = NEW.pack;
	END;
	CREATE TRIGGER layer_packs_gone AFTER DELETE ON layer_packs BEGIN ` + review(6, "0", "OLD.pack") + ` END;
	CREATE TRIGGER packs_put AFTER INSERT ON packs BEGIN ` + review(6, "0", "NEW.id") + ` END;
	CREATE TRIGGER packs_gone AFTER DELETE ON packs BEGIN ` + doom("OLD.key", "true") + ` END;
	CREATE TRIGGER rootfs_put AFTER INSERT ON rootfs BEGIN ` + review(4, "0", "NEW.chain_id") + ` END;
	CREATE TRIGGER rootfs_changed AFTER UPDATE ON rootfs BEGIN
		` + doom("OLD.key", "OLD.key <> NEW.key") + doom("OLD.idx", "OLD.idx <> NEW.idx") + `
	END;
	CREATE TRIGGER rootfs_gone AFTER DELETE ON rootfs BEGIN
		` + doom("OLD.key", "true") + doom("OLD.idx", "true") + doom("'orders/' || replace(OLD.toc, ':', '/') || '-*'", "true") + `
	END;
	CREATE TRIGGER startup_images_put AFTER INSERT ON startup_images BEGIN ` + review(5, "0", "NEW.id") + ` END;
	CREATE TRIGGER startup_images_gone AFTER DELETE ON startup_images BEGIN
		` + doom("OLD.key", "true") + doom("OLD.previous", "true") + `
	END;

	-- What was there before all this.
	INSERT OR IGNORE INTO refs SELECT j.value, m.repo, m.digest FROM manifests m, ` + digestsOf("m.bytes") + `;
	INSERT INTO reviews (kind, repo, name, since, jitter) SELECT 1, repo, digest, ` + now + `, ` + jitter + ` FROM manifests;
	INSERT INTO reviews (kind, repo, name, since, jitter) SELECT 2, repo, digest, ` + now + `, ` + jitter + ` FROM blobs b
		WHERE NOT EXISTS (SELECT 1 FROM refs r WHERE r.repo = b.repo AND r.digest IN (b.digest, '*'));
	INSERT INTO reviews (kind, repo, name, since, jitter) SELECT 3, 0, blob, ` + now + `, ` + jitter + ` FROM layers
		WHERE NOT EXISTS (SELECT 1 FROM blobs WHERE digest = blob);
	INSERT INTO reviews (kind, repo, name, since, jitter) SELECT 4, 0, chain_id, ` + now + `, ` + jitter + ` FROM rootfs;
	INSERT INTO reviews (kind, repo, name, since, jitter) SELECT 5, 0, id, ` + now + `, ` + jitter + ` FROM startup_images;
	INSERT INTO reviews (kind, repo, name, since, jitter) SELECT 6, 0, id, ` + now + `, ` + jitter + ` FROM packs;
	`
}

// digestsOf is the SQL of the digests that a manifest's bytes have.
func digestsOf(bytes string) string {
	return `json_tree(CASE WHEN json_valid(CAST(` + bytes + ` AS TEXT)) THEN CAST(` + bytes + ` AS TEXT) ELSE '"*"' END) j
		WHERE j.type = 'text' AND (j.value GLOB 'sha[0-9]*:*' OR j.value = '*' AND j.key IS NULL)`
}

// doom is the SQL that has an object deleted, when nobody reads it any more.
func doom(key, when string) string {
	return fmt.Sprintf("INSERT OR IGNORE INTO doomed SELECT %s, %s WHERE %s <> '' AND %s;\n", key, now, key, when)
}

// now and jitter are SQL.
const (
	now    = `CAST(unixepoch('subsec') * 1e9 AS INTEGER)`
	jitter = `abs(random() % 1000)`
)

// review is the SQL that asks for a review, from now on.
func review(kind int, repo, name string) string {
	return fmt.Sprintf("INSERT OR REPLACE INTO reviews (kind, repo, name, since, jitter) VALUES (%d, %s, %s, %s, %s);\n", kind, repo, name, now, jitter)
}
