package holdings

import (
	"context"
	"errors"
	"time"

	"hydrofoil.dev/foil/internal/server/catalog"
)

// Tags is where tags are.
type Tags interface {
	ListRepositories(ctx context.Context, after string, limit int) ([]string, error)
	Tagged(ctx context.Context, repo string) ([]catalog.Tagged, error)
}

// Each calls fn with what goes of each repository of which something does, in byte order.
func Each(ctx context.Context, tags Tags, rules *Rules, now time.Time, fn func(repo string, gone []Gone) error) error {
	const page = 1000
	for last := ""; ; {
		repos, err := tags.ListRepositories(ctx, last, page)
		if err != nil {
			return err
		}
		for _, repo := range repos {
			if last = repo; !rules.Retains(repo) {
				continue
			}
			all, err := tags.Tagged(ctx, repo)
			if errors.Is(err, catalog.ErrNotFound) {
				continue // it went meanwhile
			}
			if err != nil {
				return err
			}
			if gone := rules.Retain(repo, all, now); len(gone) > 0 {
				if err := fn(repo, gone); err != nil {
					return err
				}
			}
		}
		if len(repos) < page {
			return nil
		}
	}
}
