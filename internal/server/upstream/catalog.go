package upstream

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"slices"
	"time"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/guard"
	"hydrofoil.dev/foil/internal/server/registry"
)

// Catalog is the catalog with all that the upstream has.
type Catalog struct {
	catalog.Catalog
	a *Accelerator
}

// Catalog returns the wrapper of Options.Catalog.
func (a *Accelerator) Catalog() Catalog { return Catalog{a.o.Catalog, a} }

// lookupTime bounds what goes on in the background for a request: many tries.
const lookupTime = 2 * time.Minute

// Tag implements catalog.Repositories: it asks the upstream.
func (c Catalog) Tag(ctx context.Context, repo, tag string) (digest.Digest, error) {
	a := c.a
	if !registry.ValidName(repo) || !registry.ValidTag(tag) {
		return "", noName("manifest", repo, tag)
	}
	local, err := c.Catalog.Tag(ctx, repo, tag)
	here := err == nil
	if err != nil && !errors.Is(err, catalog.ErrNotFound) {
		return "", err
	}
	key := repo + ":" + tag
	if here && a.isFresh(key) {
		return local, nil
	}
	waiting := ctx
	if here {
		// The check that counts may have to wait for one that is under way.
		var cancel context.CancelFunc
		waiting, cancel = context.WithTimeout(ctx, a.o.TagTimeout)
		defer cancel()
	}
	v, err := a.share(waiting, &a.tags, key, true, func(ctx context.Context) (any, error) {
		return a.check(ctx, repo, tag)
	})
	if d, ok := v.(digest.Digest); ok && err == nil {
		return d, nil
	}
	if waiting.Err() != nil && ctx.Err() == nil {
		err = a.client.failed(waiting, "manifest "+nameOf(repo, tag), waiting.Err())
	}
	if here && bridged(err) {
		a.client.metrics.bridged.Inc()
		a.log.Warn("upstream does not answer: a tag is served as it was", "repository", repo, "tag", tag, "manifest", local, "error", err)
		return local, nil
	}
	return "", err
}

// noName is an error about names that no upstream has, and that must not become
// part of a URL.
func noName(what, repo, reference string) error {
	return fmt.Errorf("%s %.300q: %w: that is no name", what, nameOf(repo, reference), catalog.ErrNotFound)
}

func (a *Accelerator) isFresh(key string) bool {
	if a.o.TagTTL <= 0 {
		return false
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	at, ok := a.fresh[key]
	return ok && time.Since(at) < a.o.TagTTL
}

// check asks the upstream for a tag, and makes the catalog agree. It runs once
// for all who wait.
func (a *Accelerator) check(ctx context.Context, repo, tag string) (digest.Digest, error) {
	cat := a.o.Catalog
	asked := time.Now()
	local, err := cat.Tag(ctx, repo, tag)
	if err != nil && !errors.Is(err, catalog.ErrNotFound) {
		return "", err
	}
	limit := lookupTime
	if err == nil {
		limit = a.o.TagTimeout
	}
	own, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	d := digest.Digest("")
	if local != "" {
		d, err = a.client.tag(own, repo, tag, local)
		if e, ok := errors.AsType[*Error](err); ok && e.Kind == Missing {
			err = nil // an answer to HEAD does not say who says so
		}
		if err != nil {
			return "", err
		}
	}
	var m catalog.Manifest
	switch {
	case d == "":
		if m, err = a.client.manifest(own, repo, tag); err != nil {
			a.gone(ctx, repo, tag, err)
			return "", err
		}
	case d == local:
		a.checked(repo+":"+tag, asked)
		return d, nil
	default:
		if m, err = a.manifest(own, repo, d); err != nil {
			return "", err
		}
	}
	if local != m.Digest {
		if err := cat.PutManifest(ctx, repo, m, tag); err != nil {
			return "", err
		}
		if local != "" {
			a.log.Info("a tag has moved", "repository", repo, "tag", tag, "manifest", m.Digest, "before", local)
		}
	}
	a.checked(repo+":"+tag, asked)
	return m.Digest, nil
}

func (a *Accelerator) checked(key string, at time.Time) {
	if a.o.TagTTL <= 0 {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.fresh) > 100_000 { // some are long over
		clear(a.fresh)
	}
	a.fresh[key] = at
}

// gone forgets a tag that the upstream says it does not have: it must not come
// back when the upstream is down.
func (a *Accelerator) gone(ctx context.Context, repo, tag string, err error) {
	if e, ok := errors.AsType[*Error](err); !ok || e.Kind != Missing || !e.said {
		return
	}
	err = a.o.Catalog.DeleteTag(ctx, repo, tag)
	switch {
	case err == nil:
		a.log.Info("a tag was deleted at the upstream", "repository", repo, "tag", tag)
	case !errors.Is(err, catalog.ErrNotFound):
		a.log.Error("a tag that was deleted at the upstream is still here", "repository", repo, "tag", tag, "error", err)
	}
}

// Manifest implements catalog.Repositories: it fetches what is not here.
func (c Catalog) Manifest(ctx context.Context, repo string, d digest.Digest) (catalog.Manifest, error) {
	m, err := c.Catalog.Manifest(ctx, repo, d)
	if !errors.Is(err, catalog.ErrNotFound) {
		return m, err
	}
	if !registry.ValidName(repo) || d.Validate() != nil {
		return m, noName("manifest", repo, d.String())
	}
	v, err := c.a.share(ctx, &c.a.lookups, "manifest "+nameOf(repo, d.String()), false, func(ctx context.Context) (any, error) {
		ctx, cancel := context.WithTimeout(ctx, lookupTime)
		defer cancel()
		return c.a.manifest(ctx, repo, d)
	})
	m, _ = v.(catalog.Manifest)
	return m, err
}

// manifest returns a manifest by digest, which it fetches and records if it is
// not here.
func (a *Accelerator) manifest(ctx context.Context, repo string, d digest.Digest) (catalog.Manifest, error) {
	m, err := a.o.Catalog.Manifest(ctx, repo, d)
	if !errors.Is(err, catalog.ErrNotFound) {
		return m, err
	}
	if m, err = a.client.manifest(ctx, repo, d.String()); err != nil {
		return m, err
	}
	return m, a.o.Catalog.PutManifest(ctx, repo, m)
}

// Exists implements catalog.Repositories.
func (c Catalog) Exists(ctx context.Context, repo string, d digest.Digest) (catalog.Blob, error) {
	return c.Blob(ctx, repo, d)
}

// Blob implements catalog.Repositories. A repository has the blob once the
// upstream has said so.
func (c Catalog) Blob(ctx context.Context, repo string, d digest.Digest) (catalog.Blob, error) {
	b, err := c.Catalog.Blob(ctx, repo, d)
	if !errors.Is(err, catalog.ErrNotFound) {
		return b, err
	}
	if !registry.ValidName(repo) || d.Validate() != nil {
		return b, noName("blob", repo, d.String())
	}
	v, err := c.a.share(ctx, &c.a.lookups, "blob "+nameOf(repo, d.String()), false, func(ctx context.Context) (any, error) {
		ctx, cancel := context.WithTimeout(ctx, lookupTime)
		defer cancel()
		// It may have been asked between the look at the catalog and this run.
		if b, err := c.Catalog.Blob(ctx, repo, d); !errors.Is(err, catalog.ErrNotFound) {
			return b, err
		}
		size, err := c.a.client.size(ctx, repo, d)
		if err != nil {
			return nil, err
		}
		b := catalog.Blob{Digest: d, Size: size}
		return b, c.Catalog.LinkBlob(ctx, repo, b)
	})
	b, _ = v.(catalog.Blob)
	return b, err
}

// UnlinkBlob implements catalog.Repositories. Nobody deletes from an accelerator:
// this is called when the bytes of the blob turned out to be lost or damaged.
// They are removed, and fetched again when they are needed; that the repository
// holds the blob is as true as before.
func (c Catalog) UnlinkBlob(ctx context.Context, repo string, d digest.Digest) error {
	if _, err := c.Catalog.Blob(ctx, repo, d); err != nil {
		return err
	}
	return c.a.Store().Delete(ctx, catalog.BlobKey(d))
}

// Tags implements catalog.Repositories: those of the upstream.
func (c Catalog) Tags(ctx context.Context, repo, after string, limit int) ([]string, error) {
	a := c.a
	asking, cancel := context.WithTimeout(ctx, lookupTime)
	defer cancel()
	what := "tags of " + repo
	names, err := a.client.list(asking, what, a.client.repository(repo)+"/tags/list", a.client.pull(repo), "tags", after, limit)
	if bridged(err) {
		if local, lerr := c.Catalog.Tags(ctx, repo, after, limit); lerr == nil {
			a.log.Warn("upstream does not answer: the tags that are here are listed", "repository", repo, "error", err)
			return local, nil
		}
	}
	return cut(names, after, limit), err
}

// ListRepositories implements catalog.Repositories: those of the upstream below
// its prefix.
func (c Catalog) ListRepositories(ctx context.Context, after string, limit int) ([]string, error) {
	a := c.a
	asking, cancel := context.WithTimeout(ctx, lookupTime)
	defer cancel()
	shown, relayed := guard.Shown(ctx)
	if relayed {
		asking = withShown(asking, shown) // which names there are may depend on who asks
	}
	const scope = "registry:catalog:*"
	var names []string
	var err error
	if a.client.prefix == "" {
		names, err = a.client.list(asking, "repositories", "_catalog", scope, "repositories", after, limit)
	} else {
		// What is below the prefix may begin anywhere in the list.
		var all []string
		all, err = a.client.list(asking, "repositories", "_catalog", scope, "repositories", "", -1)
		for _, name := range all {
			if prefix := a.client.prefix + "/"; len(name) > len(prefix) && name[:len(prefix)] == prefix {
				names = append(names, name[len(prefix):])
			}
		}
	}
	if denied := a.denied("", err); relayed && denied != nil {
		return nil, denied
	}
	if bridged(err) && !relayed {
		a.log.Warn("upstream does not answer: the repositories that are here are listed", "error", err)
		return c.Catalog.ListRepositories(ctx, after, limit)
	}
	return cut(names, after, limit), err
}

// cut makes a page of a list of which not every registry keeps order and limit.
func cut(names []string, after string, limit int) []string {
	slices.Sort(names)
	names = slices.Compact(names)
	i, found := slices.BinarySearch(names, after)
	if found {
		i++
	}
	names = names[i:]
	if limit >= 0 && len(names) > limit {
		names = names[:limit]
	}
	return names
}

// maxReferrers bounds how many manifests one list of referrers makes the
// accelerator fetch.
const maxReferrers = 1000

// Referrers implements catalog.Repositories: those of the upstream, which are
// fetched, one after the other. An upstream without that API says so, and clients go on with the tags
// that stand for it.
func (c Catalog) Referrers(ctx context.Context, repo string, d digest.Digest, artifactType string, after digest.Digest) iter.Seq2[catalog.Referrer, error] {
	return func(yield func(catalog.Referrer, error) bool) {
		list, err := c.a.referrers(ctx, repo, d)
		if bridged(err) {
			here := false
			for r, lerr := range c.Catalog.Referrers(ctx, repo, d, artifactType, after) {
				if lerr != nil {
					break
				}
				if !here {
					c.a.log.Warn("upstream does not answer: the referrers that are here are listed", "repository", repo, "subject", d, "error", err)
				}
				if here = true; !yield(r, nil) {
					return
				}
			}
			if here {
				return
			}
		}
		if err != nil {
			yield(catalog.Referrer{}, err)
			return
		}
		for _, one := range list[slices.Index(list, after)+1:] {
			m, err := c.Manifest(ctx, repo, one)
			if err != nil {
				yield(catalog.Referrer{}, err)
				return
			}
			r := catalog.Referrer{Digest: m.Digest, MediaType: m.MediaType, ArtifactType: m.ArtifactType, Annotations: m.Annotations, Size: int64(len(m.Bytes))}
			if (artifactType == "" || m.ArtifactType == artifactType) && !yield(r, nil) {
				return
			}
		}
	}
}

// referrers asks the upstream which there are.
func (a *Accelerator) referrers(ctx context.Context, repo string, d digest.Digest) ([]digest.Digest, error) {
	asking, cancel := context.WithTimeout(ctx, lookupTime)
	defer cancel()
	if !registry.ValidName(repo) {
		return nil, nil // the list of what there is not
	}
	what := "referrers of " + nameOf(repo, d.String())
	var b []byte
	err := a.client.try(asking, func() (err error) {
		b, _, err = a.client.json(asking, what, a.client.repository(repo)+"/referrers/"+d.String(), a.client.pull(repo))
		return err
	})
	if err != nil {
		return nil, err
	}
	var index ocispec.Index
	if jerr := json.Unmarshal(b, &index); jerr != nil || index.MediaType != "" && index.MediaType != ocispec.MediaTypeImageIndex || len(index.Manifests) > maxReferrers {
		return nil, a.client.wrong(what, "the answer is no index of at most %d manifests; it begins with %.80q", maxReferrers, b)
	}
	all := make([]digest.Digest, len(index.Manifests))
	for i, desc := range index.Manifests {
		if all[i] = desc.Digest; desc.Digest.Validate() != nil {
			return nil, a.client.wrong(what, "%.80q is no digest", desc.Digest)
		}
	}
	return all, nil
}
