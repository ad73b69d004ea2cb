package registers

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/catalog/sqlcat/database"
)

// Hold returns the ID of repo. Until the transaction ends nobody else changes what repo has: whoever changes that, or decides by it, calls
// Hold or Repository before it looks. Who needs several repositories takes them in the order of their IDs. Errors: catalog.ErrNotFound.
func Hold(ctx context.Context, tx *database.Tx, repo string) (id int64, err error) {
	err = tx.QueryRowContext(ctx, `SELECT id FROM repositories WHERE name = $1`+tx.Lock, repo).Scan(&id)
	return id, database.Missing(err)
}

// HoldID is Hold by the ID. Errors: catalog.ErrNotFound.
func HoldID(ctx context.Context, tx *database.Tx, id int64) (name string, err error) {
	err = tx.QueryRowContext(ctx, `SELECT name FROM repositories WHERE id = $1`+tx.Lock, id).Scan(&name)
	return name, database.Missing(err)
}

// Repository is Hold of a repository that it makes when missing; made is that change then.
func Repository(ctx context.Context, tx *database.Tx, repo string) (id int64, made []catalog.Change, err error) {
	for {
		if id, err = Hold(ctx, tx, repo); !errors.Is(err, catalog.ErrNotFound) {
			return id, nil, err
		}
		err = tx.QueryRowContext(ctx, `INSERT INTO repositories (name) VALUES ($1) ON CONFLICT (name) DO NOTHING RETURNING id`, repo).Scan(&id)
		if !errors.Is(err, sql.ErrNoRows) { // else somebody else has just made it
			return id, []catalog.Change{{Kind: catalog.ChangedRepository, Repo: repo}}, err
		}
	}
}

// DropRepository removes a repository that has nothing, and is held.
func DropRepository(ctx context.Context, tx *database.Tx, repo string) error {
	return database.Affected(tx.ExecContext(ctx, `DELETE FROM repositories AS r WHERE name = $1
		AND NOT EXISTS (SELECT 1 FROM manifests WHERE repo = r.id)
		AND NOT EXISTS (SELECT 1 FROM deleted_manifests WHERE repo = r.id)
		AND NOT EXISTS (SELECT 1 FROM tags WHERE repo = r.id)
		AND NOT EXISTS (SELECT 1 FROM deleted_tags WHERE repo = r.id)
		AND NOT EXISTS (SELECT 1 FROM blobs WHERE repo = r.id)`, repo))
}

// PutBlob records a blob, and has it stay until the lease ends: nanoseconds since 1970; 0: none.
func PutBlob(ctx context.Context, tx *database.Tx, repo int64, b catalog.Blob, leased int64) error {
	_, err := tx.ExecContext(ctx, `INSERT INTO blobs (repo, digest, size, media_type, leased) VALUES ($1, $2, $3, $4, $5)
		ON CONFLICT (digest, repo) DO UPDATE SET size = excluded.size, media_type = excluded.media_type, leased = CASE WHEN excluded.leased > blobs.leased THEN excluded.leased ELSE blobs.leased END`,
		repo, b.Digest.String(), b.Size, b.MediaType, leased)
	return err
}

func DropBlob(ctx context.Context, tx *database.Tx, repo int64, d string) error {
	return database.Affected(tx.ExecContext(ctx, `DELETE FROM blobs WHERE digest = $1 AND repo = $2`, d, repo))
}

func PutManifest(ctx context.Context, tx *database.Tx, repo int64, m catalog.Manifest) error {
	annotations, err := encodeAnnotations(m)
	if err != nil {
		return err
	}
	_, err = tx.ExecContext(ctx, `INSERT INTO manifests
			(repo, digest, media_type, artifact_type, subject, annotations, bytes, pushed)
			VALUES ($1, $2, $3, $4, $5, $6, $7, $8)
		ON CONFLICT (repo, digest) DO UPDATE SET media_type = excluded.media_type,
			artifact_type = excluded.artifact_type, subject = excluded.subject,
			annotations = excluded.annotations, bytes = excluded.bytes, pushed = excluded.pushed`,
		repo, m.Digest.String(), m.MediaType, m.ArtifactType, m.Subject.String(), string(annotations),
		database.NonNil(m.Bytes), m.Pushed.UnixNano())
	return err
}

func encodeAnnotations(m catalog.Manifest) ([]byte, error) {
	if len(m.Annotations) == 0 {
		return nil, nil
	}
	return json.Marshal(m.Annotations)
}

const ManifestColumns = `digest, media_type, artifact_type, subject, annotations, bytes, pushed`

func ScanManifest(scan func(...any) error) (m catalog.Manifest, err error) {
	var d, subject string
	var annotations []byte
	var pushed int64
	if err := scan(&d, &m.MediaType, &m.ArtifactType, &subject, &annotations, &m.Bytes, &pushed); err != nil {
		return m, err
	}
	m.Digest, m.Subject, m.Pushed = digest.Digest(d), digest.Digest(subject), time.Unix(0, pushed)
	if len(annotations) > 0 {
		if err := json.Unmarshal(annotations, &m.Annotations); err != nil {
			return m, fmt.Errorf("annotations of manifest %s: %w", d, err)
		}
	}
	return m, nil
}

func DropManifest(ctx context.Context, tx *database.Tx, repo int64, d string) error {
	return database.Affected(tx.ExecContext(ctx, `DELETE FROM manifests WHERE repo = $1 AND digest = $2`, repo, d))
}

func PutTag(ctx context.Context, tx *database.Tx, repo int64, tag string, d digest.Digest, pushed time.Time) error {
	_, err := tx.ExecContext(ctx, `INSERT INTO tags (repo, name, digest, pushed) VALUES ($1, $2, $3, $4)
		ON CONFLICT (repo, name) DO UPDATE SET digest = excluded.digest, pushed = excluded.pushed`, repo, tag, d.String(), pushed.UnixNano())
	return err
}

func DropTag(ctx context.Context, tx *database.Tx, repo int64, tag string) error {
	return database.Affected(tx.ExecContext(ctx, `DELETE FROM tags WHERE repo = $1 AND name = $2`, repo, tag))
}
