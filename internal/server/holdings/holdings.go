// Package holdings says how much repositories may hold, and which of their tags stay: quotas, immutable
// tags, retention. It is a pure function of rules. The catalog keeps to the first two (catalog.Policy), the
// server applies the third from time to time.
//
// # Quotas
//
//	[[quota]]
//	name = "team"                     # for messages; else "quota 1"
//	repositories = ["team/**"]        # patterns of package access
//	bytes = "100G"
//	manifests = 10_000
//	each = true                       # each repository by itself; else all of them together
//
// Bytes are logical: those of the manifests of a repository, and of the blobs that these name, each once in a
// repository, whatever others hold. Blobs that no manifest names yet may be as many again. All quotas that name a
// repository hold.
//
// # Immutable tags
//
//	[[immutable]]
//	repositories = ["release/**"]
//	tags = ["v*"]                     # * stands for any characters; all, if there are none
//
// A tag that is there names the same manifest from then on, and is not deleted, nor what it needs.
//
// # Retention
//
//	retention-every = "1h"
//	[[retention]]
//	name = "nightly builds"
//	repositories = ["team/**"]
//	tags = ["nightly-*"]
//	keep-last = 10                    # the tags that were pushed last
//	keep-for = "30d"                  # those that were pushed in this time
//
// Of the rules that name a repository and a tag the first counts for it. A tag is kept if either of keep-last
// and keep-for keeps it; keep-all = true keeps all, so that later rules do not see them. What goes is the tag, not
// the manifest. Immutable tags stay, and count among the last.
package holdings

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"hydrofoil.dev/foil/internal/server/access"
	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/limit"
)

// Settings are the part of the file of access that are about holdings.
type Settings struct {
	Quotas     []QuotaConfig     `toml:"quota"`
	Immutable  []ImmutableConfig `toml:"immutable"`
	Retention  []RetentionConfig `toml:"retention"`
	RetainEach limit.Duration    `toml:"retention-every"` // 0: an hour
}

// QuotaConfig is a quota as the configuration has it.
type QuotaConfig struct {
	Name         string      `toml:"name"`
	Repositories []string    `toml:"repositories"`
	Bytes        limit.Bytes `toml:"bytes"`
	Manifests    int64       `toml:"manifests"`
	Each         bool        `toml:"each"`
}

// ImmutableConfig is a rule for immutable tags as the configuration has it.
type ImmutableConfig struct {
	Name         string   `toml:"name"`
	Repositories []string `toml:"repositories"`
	Tags         []string `toml:"tags"`
}

// RetentionConfig is a rule of retention as the configuration has it.
type RetentionConfig struct {
	Name         string         `toml:"name"`
	Repositories []string       `toml:"repositories"`
	Tags         []string       `toml:"tags"`
	KeepLast     int            `toml:"keep-last"`
	KeepFor      limit.Duration `toml:"keep-for"`
	KeepAll      bool           `toml:"keep-all"`
}

// Rules are those of one configuration. They do not change.
type Rules struct {
	quotas    []quota
	immutable []tagRule
	retention []tagRule
	every     time.Duration
}

type quota struct {
	catalog.Quota
	repositories []access.Pattern
}

// tagRule names tags of repositories, and what is kept of them.
type tagRule struct {
	name         string
	repositories []access.Pattern
	tags         []string
	last         int
	keep         time.Duration
	all          bool
}

// New reads rules. An error names the one that is wrong.
func New(c Settings) (*Rules, error) {
	r := &Rules{every: time.Duration(c.RetainEach)}
	if r.every == 0 {
		r.every = time.Hour
	}
	if r.every < time.Minute {
		return nil, fmt.Errorf("retention-every: %v is too often: at least a minute", r.every)
	}
	for i, q := range c.Quotas {
		made, err := newQuota(q, fmt.Sprintf("quota %d", i+1))
		if err != nil {
			return nil, fmt.Errorf("[[quota]] %d %q: %w", i+1, q.Name, err)
		}
		r.quotas = append(r.quotas, made)
	}
	for i, x := range c.Immutable {
		made, err := newTagRule(x.Name, fmt.Sprintf("immutable %d", i+1), x.Repositories, x.Tags)
		if err != nil {
			return nil, fmt.Errorf("[[immutable]] %d %q: %w", i+1, x.Name, err)
		}
		r.immutable = append(r.immutable, made)
	}
	for i, x := range c.Retention {
		made, err := newTagRule(x.Name, fmt.Sprintf("retention %d", i+1), x.Repositories, x.Tags)
		made.last, made.keep, made.all = x.KeepLast, time.Duration(x.KeepFor), x.KeepAll
		if err == nil && (x.KeepLast < 0 || made.keep != 0 && made.keep < time.Minute) {
			err = errors.New(`keep-last wants a number above 0, keep-for a duration like "30d"`)
		}
		if some := x.KeepLast > 0 || x.KeepFor > 0; err == nil && some == x.KeepAll {
			err = errors.New("it wants keep-last, keep-for or both; or keep-all alone")
		}
		if err != nil {
			return nil, fmt.Errorf("[[retention]] %d %q: %w", i+1, x.Name, err)
		}
		r.retention = append(r.retention, made)
	}
	return r, nil
}

func newQuota(c QuotaConfig, name string) (q quota, err error) {
	if q.repositories, err = patterns(c.Repositories); err != nil {
		return q, err
	}
	if c.Bytes <= 0 && c.Manifests <= 0 || c.Manifests < 0 {
		return q, errors.New("it wants bytes or manifests, above 0")
	}
	q.Quota = catalog.Quota{Name: c.Name, Bytes: int64(c.Bytes), Manifests: c.Manifests}
	if q.Name == "" {
		q.Name = name
	}
	if !c.Each {
		q.Counts = func(repo string) bool { return match(q.repositories, repo) }
		q.Prefix = prefix(c.Repositories)
	}
	return q, nil
}

func newTagRule(name, number string, repositories, tags []string) (r tagRule, err error) {
	r = tagRule{name: name, tags: tags}
	if r.name == "" {
		r.name = number
	}
	r.repositories, err = patterns(repositories)
	for _, tag := range tags {
		for _, c := range tag {
			if !('a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || strings.ContainsRune("._-*", c)) {
				return r, fmt.Errorf("tag pattern %q: no tag has %q in its name", tag, c)
			}
		}
		if tag == "" || len(tag) > 128 {
			return r, fmt.Errorf("tag pattern %q: want 1 to 128 characters", tag)
		}
	}
	return r, err
}

func patterns(list []string) (all []access.Pattern, err error) {
	if len(list) == 0 {
		return nil, errors.New(`it wants repositories, such as ["team/**"]; ["**"] are all`)
	}
	for _, s := range list {
		p, err := access.ParsePattern(s)
		if err != nil {
			return nil, err
		}
		all = append(all, p)
	}
	return all, nil
}

// prefix is what all names begin with that any of the patterns matches.
func prefix(list []string) string {
	common := ""
	for i, s := range list {
		s, _, _ = strings.Cut(s, "*")
		s = strings.TrimSuffix(s, "/") // team/** is team as well
		if i == 0 {
			common = s
		}
		for !strings.HasPrefix(s, common) {
			common = common[:len(common)-1]
		}
	}
	return common
}

func match(list []access.Pattern, repo string) bool {
	return slices.ContainsFunc(list, func(p access.Pattern) bool { return p.Match(repo) })
}

// Any reports whether there are any rules.
func (r *Rules) Any() bool { return len(r.quotas)+len(r.immutable)+len(r.retention) > 0 }

// Every is how often retention is to be applied; 0: there are no rules of it.
func (r *Rules) Every() time.Duration {
	if len(r.retention) == 0 {
		return 0
	}
	return r.every
}

// Quotas implements catalog.Policy.
func (r *Rules) Quotas(repo string) (all []catalog.Quota) {
	for _, q := range r.quotas {
		if match(q.repositories, repo) {
			all = append(all, q.Quota)
		}
	}
	return all
}

// Immutable implements catalog.Policy.
func (r *Rules) Immutable(repo, tag string) (rule string) {
	if x := first(r.immutable, repo, tag); x != nil {
		return x.name
	}
	return ""
}

func first(rules []tagRule, repo, tag string) *tagRule {
	for i := range rules {
		x := &rules[i]
		if match(x.repositories, repo) && (len(x.tags) == 0 || slices.ContainsFunc(x.tags, func(p string) bool { return access.Glob(p, tag) })) {
			return x
		}
	}
	return nil
}

// Gone is a tag that a rule of retention does not keep.
type Gone struct {
	catalog.Tagged
	Rule string
}

// Retains reports whether any rule of retention names a repository.
func (r *Rules) Retains(repo string) bool {
	return slices.ContainsFunc(r.retention, func(x tagRule) bool { return match(x.repositories, repo) })
}

// Retain returns those of all tags of a repository that no rule keeps, those pushed last first.
func (r *Rules) Retain(repo string, tags []catalog.Tagged, now time.Time) (gone []Gone) {
	tags = slices.Clone(tags)
	slices.SortStableFunc(tags, func(a, b catalog.Tagged) int { return b.Pushed.Compare(a.Pushed) })
	seen := make(map[*tagRule]int)
	for _, t := range tags {
		x := first(r.retention, repo, t.Tag)
		if x == nil || x.all {
			continue
		}
		seen[x]++
		if seen[x] <= x.last || x.keep > 0 && now.Sub(t.Pushed) < x.keep || r.Immutable(repo, t.Tag) != "" {
			continue
		}
		gone = append(gone, Gone{t, x.name})
	}
	return gone
}
