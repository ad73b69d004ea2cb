package node

import (
	"context"
	"encoding/json"
	"path"
	"slices"
	"strings"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sync/errgroup"

	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/pull"
)

// askedAtOnce is for how many images a registry is asked side by side.
const askedAtOnce = 8

// Tags implements api.Service.
func (n *Node) Tags(ctx context.Context, req api.TagsRequest) (*api.Tags, error) {
	leave, err := n.enter()
	if err != nil {
		return nil, err
	}
	defer leave()
	if _, err := path.Match(req.Pattern, ""); err != nil {
		return nil, api.Errorf(api.CodeInvalid, "pattern %q of tags: %w", req.Pattern, err)
	}
	r, err := pull.ParseRef(req.Repository)
	if err != nil {
		return nil, err
	}
	name := r.Host + "/" + r.Repository
	about := api.PullRequest{Ref: name, Platform: req.Platform, PlainHTTP: req.PlainHTTP, Credential: req.Credential}
	tags, err := n.pulls.Tags(ctx, about)
	if err != nil {
		return nil, err
	}
	tags = slices.DeleteFunc(tags, func(t string) bool { return !matchesTag(req.Pattern, t) })
	slices.SortFunc(tags, compareVersions)
	answer := &api.Tags{Tags: tags}
	if req.Since.IsZero() {
		return answer, nil
	}
	older := make([]bool, len(tags))
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(askedAtOnce)
	for i, t := range tags {
		g.Go(func() error {
			about := about
			about.Ref = name + ":" + t
			h, err := n.Resolve(ctx, about)
			if err != nil {
				return err
			}
			var config ocispec.Image
			if json.Unmarshal(h.Config.Bytes, &config) == nil && config.Created != nil {
				older[i] = config.Created.Before(req.Since)
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return nil, err
	}
	answer.Tags = make([]string, 0, len(tags))
	for i, t := range tags {
		if older[i] {
			answer.Older++
			continue
		}
		answer.Tags = append(answer.Tags, t)
	}
	return answer, nil
}

// ofDigests is how tags begin that registries and signers make of digests: they name no images.
const ofDigests = "sha256-"

func matchesTag(pattern, tag string) bool {
	if strings.HasPrefix(tag, ofDigests) && !strings.HasPrefix(pattern, ofDigests) {
		return false
	}
	ok, err := path.Match(pattern, tag)
	return pattern == "" || ok && err == nil
}

// compareVersions compares numbers in tags as numbers.
func compareVersions(a, b string) int {
	for a != "" && b != "" {
		m, n := digits(a), digits(b)
		if m == 0 || n == 0 {
			if a[0] != b[0] {
				return int(a[0]) - int(b[0])
			}
			a, b = a[1:], b[1:]
			continue
		}
		x, y := strings.TrimLeft(a[:m], "0"), strings.TrimLeft(b[:n], "0")
		if len(x) != len(y) {
			return len(x) - len(y)
		}
		if c := strings.Compare(x, y); c != 0 {
			return c
		}
		a, b = a[m:], b[n:]
	}
	return len(a) - len(b)
}

// digits is how many digits s begins with.
func digits(s string) int {
	return len(s) - len(strings.TrimLeft(s, "0123456789"))
}
