package pull

import (
	"context"
	"fmt"
	"net/url"
	"strconv"

	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/remote"
)

// tagsPage is for how many tags at once a registry is asked; one that gives fewer is asked again. mostTags bounds
// what is believed of one repository.
const (
	tagsPage = 1000
	mostTags = 100_000
)

// Tags asks the registry of an image for all tags of its repository, in the order in which it tells them.
func (s *Puller) Tags(ctx context.Context, req api.PullRequest) (tags []string, err error) {
	err = s.Ask(ctx, req, "", func(c *remote.Client, query url.Values) (err error) {
		tags, err = listTags(func(last string, page any) error {
			q := url.Values{"n": {strconv.Itoa(tagsPage)}}
			if last != "" {
				q.Set("last", last)
			}
			return c.Get(ctx, "/v2/"+query.Get("repository")+"/tags/list", q, page)
		})
		return err
	})
	if err != nil {
		return nil, AsError(fmt.Errorf("tags of %s: %w", req.Ref, err))
	}
	return tags, nil
}

// listTags gets page after page, each what comes after the last tag of the one before. Registries differ in how many
// tags a page has at most, and some send all, whatever is asked: the end is a page with nothing new.
func listTags(get func(last string, page any) error) (tags []string, err error) {
	seen := make(map[string]bool)
	for last := ""; ; {
		var page struct{ Tags []string }
		if err := get(last, &page); err != nil {
			return nil, err
		}
		before := len(tags)
		for _, t := range page.Tags {
			if !seen[t] {
				seen[t] = true
				tags = append(tags, t)
			}
		}
		switch {
		case len(tags) == before:
			return tags, nil
		case len(tags) > mostTags:
			return nil, fmt.Errorf("the repository has more than %d tags: name the images, in a file perhaps", mostTags)
		}
		last = page.Tags[len(page.Tags)-1]
	}
}
