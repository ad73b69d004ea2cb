// Package bounds is what repositories hold, and may hold (catalog.Bounded). Triggers of the schema count.
package bounds

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/catalog/sqlcat/database"
	"hydrofoil.dev/foil/internal/server/catalog/sqlcat/registers"
)

// Bounds is the part of a catalog that knows what repositories hold.
type Bounds struct {
	db     *database.DB
	policy func() catalog.Policy // set before changes are made; nil: there is none
}

// New returns that of a file.
func New(db *database.DB) *Bounds { return &Bounds{db: db} }

// SetPolicy implements catalog.Bounded.
func (b *Bounds) SetPolicy(policy func() catalog.Policy) { b.policy = policy }

// quotas are those that a repository is under.
func (b *Bounds) quotas(repo string) []catalog.Quota {
	if b.policy == nil {
		return nil
	}
	return b.policy().Quotas(repo)
}

// Immutable returns the rule by which a tag stays; empty: there is none.
func (b *Bounds) Immutable(repo, tag string) string {
	if b.policy == nil {
		return ""
	}
	return b.policy().Immutable(repo, tag)
}

// ImmutableTag is the refusal of a change of a tag.
func ImmutableTag(repo, tag, rule string) error {
	return &catalog.Refusal{Message: fmt.Sprintf("the tag %s:%s is immutable by the rule %q of this registry: push under another tag, or have an administrator change the rule", repo, tag, rule)}
}

// querier is a transaction, or the database.
type querier interface {
	Rows(ctx context.Context, query string, args []any, fn func(scan func(...any) error) error) error
}

// counted is what the repositories hold that a quota counts together with repo. Names have no ~, nor anything after it.
func counted(ctx context.Context, q querier, quota catalog.Quota, repo string) (sum catalog.Usage, err error) {
	query, args := usageQuery+` WHERE r.name = $1`, []any{repo}
	if quota.Counts != nil {
		query, args = usageQuery+` WHERE r.name BETWEEN $1 AND $1 || '~'`, []any{quota.Prefix}
	}
	all, err := usages(ctx, q, query, args)
	for _, u := range all {
		if quota.Counts == nil || quota.Counts(u.Repository) {
			sum.Bytes += u.Bytes
			sum.Loose += u.Loose
			sum.Manifests += u.Manifests
		}
	}
	return sum, err
}

// Within makes a change of what repo, which is held, holds, if it stays within its quotas, or takes nothing more of them.
func (b *Bounds) Within(ctx context.Context, tx *database.Tx, repo string, change func() error) error {
	quotas := b.quotas(repo)
	before := make([]catalog.Usage, len(quotas))
	for i, q := range quotas {
		if q.Counts != nil { // others may add to repositories that are not held
			if err := tx.Begin(ctx, tx.LockName, "quota "+q.Name); err != nil {
				return err
			}
		}
		var err error
		if before[i], err = counted(ctx, tx, q, repo); err != nil {
			return err
		}
	}
	if err := change(); err != nil {
		return err
	}
	for i, q := range quotas {
		after, err := counted(ctx, tx, q, repo)
		if err == nil {
			err = fits(q, before[i], after)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// fits reports whether a change is within a quota. What many hold together is nobody's business who pushes to one of
// them: the message does not say how much is used.
func fits(q catalog.Quota, before, after catalog.Usage) error {
	refuse := func(format string, args ...any) error {
		return &catalog.Refusal{Quota: true, Message: fmt.Sprintf(format, args...) + ", or have an administrator raise the quota"}
	}
	more := after.Bytes - before.Bytes
	loose := after.Loose - before.Loose
	switch {
	case q.Manifests > 0 && after.Manifests > q.Manifests && after.Manifests > before.Manifests:
		return refuse("the quota %q has room for %d manifests, and they are there: delete some that nobody needs", q.Name, q.Manifests)
	case q.Bytes > 0 && more > 0 && after.Bytes > q.Bytes:
		return refuse("the quota %q of %d bytes has no room for %d more: delete manifests that nobody needs", q.Name, q.Bytes, more)
	// A blob that could not become part of any image beside what is there now.
	case q.Bytes > 0 && loose > 0 && more >= 0 && after.Bytes+loose > q.Bytes:
		return refuse("the quota %q of %d bytes has no room for %d more: delete manifests that nobody needs", q.Name, q.Bytes, loose)
	case q.Bytes > 0 && loose > 0 && more >= 0 && after.Loose > q.Bytes:
		return refuse("blobs that no manifest names are as many as the quota %q allows, %d bytes: push the manifests that name them", q.Name, q.Bytes)
	}
	return nil
}

// Room implements catalog.Bounded.
func (b *Bounds) Room(ctx context.Context, repo string, bytes int64) error {
	for _, q := range b.quotas(repo) {
		before, err := counted(ctx, b.db, q, repo)
		if err == nil {
			after := before
			after.Loose += bytes
			err = fits(q, before, after)
		}
		if err != nil {
			return fmt.Errorf("room in %s: %w", repo, err)
		}
	}
	return nil
}

// MayMove reports whether a tag may name a manifest from now on.
func (b *Bounds) MayMove(ctx context.Context, tx *database.Tx, repo string, id int64, tag string, to digest.Digest) error {
	rule := b.Immutable(repo, tag)
	if rule == "" {
		return nil
	}
	var now string
	err := tx.QueryRowContext(ctx, `SELECT digest FROM tags WHERE repo = $1 AND name = $2`, id, tag).Scan(&now)
	if errors.Is(err, sql.ErrNoRows) || err == nil && now == to.String() {
		return nil
	}
	if err == nil {
		err = ImmutableTag(repo, tag, rule)
	}
	return err
}

// Removable is MayRemove, in a transaction that removes it.
func (b *Bounds) Removable(ctx context.Context, tx *database.Tx, repo string, d digest.Digest) error {
	return b.mayRemove(ctx, tx, repo, d)
}

// MayRemove implements catalog.Bounded.
func (b *Bounds) MayRemove(ctx context.Context, repo string, d digest.Digest) error {
	if err := b.mayRemove(ctx, b.db, repo, d); err != nil {
		return fmt.Errorf("remove %s from %s: %w", d, repo, err)
	}
	return nil
}

// mayRemove looks at the tags of a manifest, and of all that name it, and so on.
func (b *Bounds) mayRemove(ctx context.Context, q querier, repo string, d digest.Digest) error {
	if b.policy == nil {
		return nil
	}
	return q.Rows(ctx, `WITH RECURSIVE
		this(id) AS (SELECT id FROM repositories WHERE name = $1),
		needs(digest) AS (SELECT CAST($2 AS TEXT)`+b.db.Bytewise+` UNION
			SELECT m.digest FROM needs n JOIN manifest_blobs b ON b.repo = (SELECT id FROM this) AND b.digest = n.digest
			JOIN manifests m ON m.id = b.manifest)
		SELECT t.name FROM needs n JOIN tags t ON t.repo = (SELECT id FROM this) AND t.digest = n.digest ORDER BY t.name`, []any{repo, d.String()}, func(scan func(...any) error) error {
		var tag string
		if err := scan(&tag); err != nil {
			return err
		}
		if rule := b.Immutable(repo, tag); rule != "" {
			return &catalog.Refusal{Message: fmt.Sprintf("the tag %s:%s needs %s, and is immutable by the rule %q of this registry: an administrator may change the rule", repo, tag, d, rule)}
		}
		return nil
	})
}

// Tagged implements catalog.Bounded.
func (b *Bounds) Tagged(ctx context.Context, repo string) (all []catalog.Tagged, err error) {
	var id int64
	err = b.db.Row(ctx, `SELECT id FROM repositories WHERE name = $1`, []any{repo}, &id)
	if err == nil {
		err = b.db.Rows(ctx, `SELECT name, digest, pushed FROM tags WHERE repo = $1 ORDER BY name`, []any{id}, func(scan func(...any) error) error {
			var t catalog.Tagged
			var pushed int64
			err := scan(&t.Tag, &t.Target, &pushed)
			t.Pushed = time.Unix(0, pushed)
			all = append(all, t)
			return err
		})
	}
	if err != nil {
		return nil, fmt.Errorf("tags of %s: %w", repo, err)
	}
	return all, nil
}

// Untag implements catalog.Bounded.
func (b *Bounds) Untag(ctx context.Context, repo string, tags []catalog.Tagged) (gone []catalog.Tagged, err error) {
	err = b.db.Change(ctx, 0, func(ctx context.Context, tx *database.Tx) (changes []catalog.Change, err error) {
		gone = nil
		id, err := registers.Hold(ctx, tx, repo)
		if errors.Is(err, catalog.ErrNotFound) {
			return nil, nil
		}
		if err != nil {
			return nil, err
		}
		for _, t := range tags {
			if b.Immutable(repo, t.Tag) != "" {
				continue
			}
			err := database.Affected(tx.ExecContext(ctx, `DELETE FROM tags WHERE repo = $1 AND name = $2 AND digest = $3 AND pushed = $4`, id, t.Tag, t.Target.String(), t.Pushed.UnixNano()))
			if errors.Is(err, catalog.ErrNotFound) {
				continue
			}
			if err != nil {
				return nil, err
			}
			gone = append(gone, t)
			changes = append(changes, catalog.Change{Kind: catalog.ChangedTag, Repo: repo, Name: t.Tag, Gone: true})
		}
		return changes, nil
	})
	if err != nil {
		return nil, fmt.Errorf("untag %d of %s: %w", len(tags), repo, err)
	}
	return gone, nil
}

const usageQuery = `SELECT r.name, u.bytes, u.loose, u.manifests FROM repositories r JOIN usage u ON u.repo = r.id`

func usages(ctx context.Context, q querier, query string, args []any) (all []catalog.RepositoryUsage, err error) {
	err = q.Rows(ctx, query, args, func(scan func(...any) error) error {
		var u catalog.RepositoryUsage
		err := scan(&u.Repository, &u.Bytes, &u.Loose, &u.Manifests)
		all = append(all, u)
		return err
	})
	return all, err
}

// Usages implements catalog.Bounded.
func (b *Bounds) Usages(ctx context.Context, after string, limit int) ([]catalog.RepositoryUsage, error) {
	all, err := usages(ctx, b.db, usageQuery+` WHERE r.name > $1 ORDER BY r.name LIMIT $2`, []any{after, database.Most(limit)})
	if err != nil {
		return nil, fmt.Errorf("usage of repositories: %w", err)
	}
	return all, nil
}
