package serve

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/holdings"
	"hydrofoil.dev/foil/internal/server/limit"
)

// tagsOf is a catalog of one repository, whose tags fail the first time.
type tagsOf struct {
	tags   []catalog.Tagged
	failed bool
}

func (c *tagsOf) ListRepositories(_ context.Context, after string, _ int) ([]string, error) {
	if after != "" {
		return nil, nil
	}
	return []string{"r"}, nil
}

func (c *tagsOf) Tagged(context.Context, string) ([]catalog.Tagged, error) {
	if !c.failed {
		c.failed = true
		return nil, errors.New("the disk is slow")
	}
	return c.tags, nil
}

func (c *tagsOf) Untag(_ context.Context, _ string, tags []catalog.Tagged) ([]catalog.Tagged, error) {
	c.tags = nil
	return tags, nil
}

// Rules are applied an interval after they came, and again when that failed; without rules nothing is.
func TestRetainer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		var told []string
		none, err := holdings.New(holdings.Settings{})
		if err != nil {
			t.Fatal(err)
		}
		some, err := holdings.New(holdings.Settings{RetainEach: limit.Duration(2 * time.Hour), Retention: []holdings.RetentionConfig{{
			Name: "rule", Repositories: []string{"**"}, KeepFor: limit.Duration(time.Hour)}}})
		if err != nil {
			t.Fatal(err)
		}
		tell := func(s string) { told = append(told, time.Since(began).Round(time.Minute).String()+" "+s) }
		r := &retainer{
			catalog: &tagsOf{tags: []catalog.Tagged{{Tag: "old", Pushed: began.Add(-24 * time.Hour)}}},
			rules: func() *holdings.Rules {
				if time.Since(began) < 10*time.Hour {
					return none
				}
				return some
			},
			gone:   func(repo string, g holdings.Gone) { tell(repo + ":" + g.Tag + " by " + g.Rule) },
			failed: func(err error) { tell(err.Error()) },
		}
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Hour)
		defer cancel()
		r.run(ctx)
		if diff := cmp.Diff([]string{"11h59m0s the disk is slow", "13h59m0s r:old by rule"}, told); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	})
}
