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
	"hydrofoil.dev/foil/internal/server/catalog/sqlite/database"
)

// Repository returns the ID of repo, which it makes when missing; made is that change then.
func Repository(ctx context.Context, tx *sql.Tx, repo string) (id int64, made []catalog.Change, err error) {
	err = tx.QueryRowContext(ctx, `SELECT id FROM repositories WHERE name = ?`, repo).Scan(&id)
	if !errors.Is(err, sql.ErrNoRows) {
		return id, nil, err
	}
	err = tx.QueryRowContext(ctx, `INSERT INTO repositories (name) VALUES (?) RETURNING id`, repo).Scan(&id)
	return id, []catalog.Change{{Kind: catalog.ChangedRepository, Repo: repo}}, err
}

// DropRepository removes a repository that has nothing.
func DropRepository(ctx context.Context, tx *sql.Tx, repo string) error {
	return database.Affected(tx.ExecContext(ctx, `DELETE FROM repositories AS r WHERE name = ?
		AND NOT EXISTS (SELECT 1 FROM manifests WHERE repo = r.id)
		AND NOT EXISTS (SELECT 1 FROM deleted_manifests WHERE repo = r.id)
		AND NOT EXISTS (SELECT 1 FROM tags WHERE repo = r.id)
		AND NOT EXISTS (SELECT 1 FROM deleted_tags WHERE repo = r.id)
		AND NOT EXISTS (SELECT 1 FROM blobs WHERE repo = r.id)`, repo))
}

// PutBlob records a blob, and has it stay until the lease ends: nanoseconds since 1970; 0: none.
func PutBlob(ctx context.Context, tx *sql.Tx, repo int64, b catalog.Blob, leased int64) error {
	_, err := tx.ExecContext(ctx, `INSERT INTO blobs (repo, digest, size, media_type, leased) VALUES (?, ?, ?, ?, ?)
		ON CONFLICT (digest, repo) DO UPDATE SET size = excluded.size, media_type = excluded.media_type, leased = max(leased, excluded.leased)`,
		repo, b.Digest.String(), b.Size, b.MediaType, leased)
	return err
}

func DropBlob(ctx context.Context, tx *sql.Tx, repo, d string) error {
	return database.Affected(tx.ExecContext(ctx, `DELETE FROM blobs
		WHERE digest = ? AND repo = (SELECT id FROM repositories WHERE name = ?)`, d, repo))
}

func PutManifest(ctx context.Context, tx *sql.Tx, repo int64, m catalog.Manifest) error {
	annotations, err := encodeAnnotations(m)
	if err != nil {
		return err
	}
	_, err = tx.ExecContext(ctx, `INSERT INTO manifests
			(repo, digest, media_type, artifact_type, subject, annotations, bytes, pushed)
			VALUES (?, ?, ?, ?, ?, ?, ?, ?)
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

func DropManifest(ctx context.Context, tx *sql.Tx, repo, d string) error {
	return database.Affected(tx.ExecContext(ctx, `DELETE FROM manifests
		WHERE repo = (SELECT id FROM repositories WHERE name = ?) AND digest = ?`, repo, d))
}

func PutTag(ctx context.Context, tx *sql.Tx, repo int64, tag string, d digest.Digest, pushed time.Time) error {
	_, err := tx.ExecContext(ctx, `INSERT INTO tags (repo, name, digest, pushed) VALUES (?, ?, ?, ?)
		ON CONFLICT (repo, name) DO UPDATE SET digest = excluded.digest, pushed = excluded.pushed`, repo, tag, d.String(), pushed.UnixNano())
	return err
}

func DropTag(ctx context.Context, tx *sql.Tx, repo, tag string) error {
	return database.Affected(tx.ExecContext(ctx, `DELETE FROM tags
		WHERE repo = (SELECT id FROM repositories WHERE name = ?) AND name = ?`, repo, tag))
}
