package holdings

import (
	"strings"

	"hydrofoil.dev/foil/internal/server/catalog"
)

// Used is how much of a quota is used.
type Used struct {
	Quota string `json:"quota,omitempty"` // empty: there is none
	// Of is the repository, or the patterns of those that count together.
	Of string `json:"of"`
	catalog.Usage
	MaxBytes     int64 `json:"max_bytes,omitempty"`
	MaxManifests int64 `json:"max_manifests,omitempty"`
}

// Use returns how much of the quotas the repositories use. With a repository those that it is under; one that is under none
// is there too.
func (r *Rules) Use(all []catalog.RepositoryUsage, repo string) (used []Used) {
	for _, q := range r.quotas {
		if repo != "" && !match(q.repositories, repo) {
			continue
		}
		sum := Used{Quota: q.Name, MaxBytes: q.Bytes, MaxManifests: q.Manifests}
		var patterns []string
		for _, p := range q.repositories {
			patterns = append(patterns, p.String())
		}
		sum.Of = strings.Join(patterns, " ")
		for _, u := range all {
			switch {
			case !match(q.repositories, u.Repository):
			case q.Counts != nil:
				sum.Bytes += u.Bytes
				sum.Loose += u.Loose
				sum.Manifests += u.Manifests
			case repo == "" || repo == u.Repository:
				one := sum
				one.Of, one.Usage = u.Repository, u.Usage
				used = append(used, one)
			}
		}
		if q.Counts != nil {
			used = append(used, sum)
		}
	}
	for _, u := range all {
		if len(used) == 0 && repo == u.Repository {
			used = append(used, Used{Of: repo, Usage: u.Usage})
		}
	}
	return used
}
