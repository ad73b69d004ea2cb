package registers

import (
	"context"
	"errors"
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/catalog/sqlcat/database"
)

func PutDeletedManifest(ctx context.Context, tx *database.Tx, repo int64, m catalog.Manifest, at time.Time) error {
	annotations, err := encodeAnnotations(m)
	if err != nil {
		return err
	}
	_, err = tx.ExecContext(ctx, `INSERT INTO deleted_manifests
			(repo, digest, media_type, artifact_type, subject, annotations, bytes, pushed, deleted)
			VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)
		ON CONFLICT (repo, digest) DO UPDATE SET deleted = excluded.deleted`,
		repo, m.Digest.String(), m.MediaType, m.ArtifactType, m.Subject.String(), string(annotations),
		database.NonNil(m.Bytes), m.Pushed.UnixNano(), at.UnixNano())
	return err
}

func PutDeletedTag(ctx context.Context, tx *database.Tx, repo int64, tag string, d digest.Digest, at time.Time) error {
	_, err := tx.ExecContext(ctx, `INSERT INTO deleted_tags (repo, name, digest, deleted) VALUES ($1, $2, $3, $4)
		ON CONFLICT (repo, name) DO UPDATE SET digest = excluded.digest, deleted = excluded.deleted`, repo, tag, d.String(), at.UnixNano())
	return err
}

// ForgetDeleted forgets what was deleted, if it was, since it is there again, or its time is over.
func ForgetDeleted(ctx context.Context, tx *database.Tx, changes []catalog.Change, repo string, id int64, kind catalog.ChangeKind, name string) ([]catalog.Change, error) {
	query := `DELETE FROM deleted_tags WHERE repo = $1 AND name = $2`
	if kind == catalog.ChangedDeletedManifest {
		query = `DELETE FROM deleted_manifests WHERE repo = $1 AND digest = $2`
	}
	err := database.Affected(tx.ExecContext(ctx, query, id, name))
	switch {
	case errors.Is(err, catalog.ErrNotFound):
		return changes, nil
	case err != nil:
		return nil, err
	}
	return append(changes, catalog.Change{Kind: kind, Repo: repo, Name: name, Gone: true}), nil
}
