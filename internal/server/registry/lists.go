package registry

import (
	"context"
	"net/http"
	"net/url"
	"strconv"

	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/server/guard"
)

// page answers a list request: names is asked for at most limit of them after
// last. It returns them and sets the Link header when there are more.
func (r *Registry) page(w http.ResponseWriter, req *http.Request,
	names func(last string, limit int) ([]string, error)) ([]string, error) {
	q := req.URL.Query()
	n := r.opts.MaxPage
	if s := q.Get("n"); s != "" {
		asked, err := strconv.Atoi(s)
		if err != nil || asked < 0 {
			return nil, errorf(parameterInvalid, "n=%s: want how many names to list, 0 or more", s)
		}
		n = min(n, asked)
	}
	list, err := names(q.Get("last"), n+1) // one more: to see that there is more
	if err != nil {
		return nil, err
	}
	if len(list) > n {
		list = list[:n]
		if n > 0 {
			next := url.Values{"n": {strconv.Itoa(n)}, "last": {list[n-1]}}
			setNext(w, req, next)
		}
	}
	if list == nil {
		list = []string{} // [] in JSON, not null
	}
	return list, nil
}

func setNext(w http.ResponseWriter, req *http.Request, query url.Values) {
	w.Header().Set("Link", "<"+req.URL.Path+"?"+query.Encode()+`>; rel="next"`)
}

func (r *Registry) listTags(w http.ResponseWriter, req *http.Request, name, _ string) error {
	tags, err := r.page(w, req, func(last string, limit int) ([]string, error) {
		return r.opts.Catalog.Tags(req.Context(), name, last, limit)
	})
	if err != nil {
		return orUnknown(err, nameUnknown, "there is no repository %s", name)
	}
	return writeJSON(w, http.StatusOK, "application/json", struct {
		Name string   `json:"name"`
		Tags []string `json:"tags"`
	}{name, tags})
}

// listRepositories is no part of the distribution-spec, but of the API that it
// was made from.
func (r *Registry) listRepositories(w http.ResponseWriter, req *http.Request, _, _ string) error {
	names, err := r.page(w, req, func(last string, limit int) ([]string, error) {
		return r.mayPull(req.Context(), last, limit)
	})
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, "application/json", struct {
		Repositories []string `json:"repositories"`
	}{names})
}

// mayPull lists repositories that whoever asks may pull from.
func (r *Registry) mayPull(ctx context.Context, last string, limit int) (names []string, err error) {
	if r.opts.Guard == nil || r.opts.Guard.Relays() {
		return r.opts.Catalog.ListRepositories(ctx, last, limit)
	}
	for len(names) < limit {
		some, err := r.opts.Catalog.ListRepositories(ctx, last, r.opts.MaxPage)
		if err != nil {
			return nil, err
		}
		for _, name := range some {
			if len(names) < limit && r.opts.Guard.Lists(ctx, name) {
				names = append(names, name)
			}
		}
		if len(some) < r.opts.MaxPage {
			break
		}
		last = some[len(some)-1]
	}
	return names, nil
}

// listReferrers answers with an index of the manifests whose subject is arg.
func (r *Registry) listReferrers(w http.ResponseWriter, req *http.Request, name, arg string) error {
	d, err := parseDigest(arg)
	if err != nil {
		return err
	}
	q := req.URL.Query()
	artifactType := q.Get("artifactType")
	// The last parameter is ours: the digest that the page before ended with.
	// If that one has been deleted meanwhile the list starts over.
	var last digest.Digest
	if s := q.Get("last"); s != "" {
		if last, err = parseDigest(s); err != nil {
			return err
		}
	}
	b, end, err := r.referrers(req.Context(), name, d, artifactType, last)
	if err != nil {
		return err
	}
	taken, err := r.opts.Guard.Large(req.Context(), int64(len(b))) // in memory until the client has taken it
	if err != nil {
		return err
	}
	defer taken()
	if end != "" {
		next := url.Values{"last": {end.String()}}
		if artifactType != "" {
			next.Set("artifactType", artifactType)
		}
		setNext(w, req, next)
	}
	if artifactType != "" {
		w.Header().Set("Oci-Filters-Applied", "artifactType")
	}
	writeEncoded(w, http.StatusOK, ocispec.MediaTypeImageIndex, b)
	return nil
}

// maxReferrers bounds a page of referrers, about: annotations are the part of a descriptor that can be large. An index is a
// manifest, and keeps to the limit of one besides.
const maxReferrers = 1 << 20

// referrers encodes a page of them, when it is the client's turn. It holds one of the catalog's few connections, and hundreds at
// once would have all others wait. end is the last one of the page if there are more.
func (r *Registry) referrers(ctx context.Context, name string, d digest.Digest, artifactType string, last digest.Digest) (b []byte, end digest.Digest, err error) {
	leave, err := r.opts.Heavy.Enter(ctx, guard.ClientOf(ctx))
	if err != nil {
		return nil, "", err
	}
	defer leave()
	if err := r.opts.Guard.Crowded(ctx); err != nil {
		return nil, "", err
	}
	index := ocispec.Index{
		Versioned: specs.Versioned{SchemaVersion: 2},
		MediaType: ocispec.MediaTypeImageIndex,
		Manifests: []ocispec.Descriptor{},
	}
	size := int64(0)
	for m, err := range r.opts.Catalog.Referrers(ctx, name, d, artifactType, last) {
		if err != nil {
			return nil, "", err
		}
		size += 512
		for k, v := range m.Annotations {
			size += int64(len(k) + len(v) + 8)
		}
		if n := len(index.Manifests); n > 0 && (size > min(r.opts.MaxManifest, maxReferrers) || n == r.opts.MaxPage) {
			end = index.Manifests[n-1].Digest
			break
		}
		index.Manifests = append(index.Manifests, ocispec.Descriptor{
			MediaType:    m.MediaType,
			ArtifactType: m.ArtifactType,
			Digest:       m.Digest,
			Size:         m.Size,
			Annotations:  m.Annotations,
		})
	}
	b, err = encodeJSON(index)
	return b, end, err
}
