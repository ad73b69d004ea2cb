package catalog

import (
	"context"
	"time"

	"github.com/opencontainers/go-digest"
)

// Usage is what repositories hold, each as if nobody else held any of it.
type Usage struct {
	// Bytes are those of manifests, and of the blobs that manifests of the same repository name, each once.
	Bytes int64 `json:"bytes"`
	// Loose are the bytes of blobs that no manifest of the repository names: pushes under way, and what
	// deletions have left.
	Loose     int64 `json:"loose"`
	Manifests int64 `json:"manifests"`
}

// RepositoryUsage is the usage of one repository.
type RepositoryUsage struct {
	Repository string `json:"repository"`
	Usage
}

// Tagged is a tag as it is.
type Tagged struct {
	Tag    string
	Target digest.Digest
	Pushed time.Time // when the tag was pushed last
}

// Quota bounds what repositories hold.
type Quota struct {
	Name string
	// Bytes bounds Usage.Bytes, and Usage.Loose as well; Manifests bounds those. 0: no bound.
	Bytes, Manifests int64
	// Counts says which repositories are counted together; all of them begin with Prefix. Nil: the one that is
	// asked about alone.
	Counts func(repo string) bool
	Prefix string
}

// A Policy says what repositories may hold. It is asked in the midst of changes: it must neither wait nor ask the
// catalog.
type Policy interface {
	// Quotas returns those that a repository is under. All of them hold.
	Quotas(repo string) []Quota
	// Immutable returns the rule by which a tag that is there stays what it is; empty: there is none.
	Immutable(repo, tag string) (rule string)
}

// Refusal is returned, wrapped, for a change that the Policy forbids. Nothing was changed.
type Refusal struct {
	// Quota: there is no room; else a tag is immutable.
	Quota   bool
	Message string // for the client, with what to do
}

func (e *Refusal) Error() string { return e.Message }

// Bounded is a catalog whose repositories are under a policy: what LinkBlob and PutManifest add is within
// the quotas, exactly, however many add at once; what takes nothing more is always allowed. PutManifest, DeleteTag
// and DeleteManifest leave immutable tags as they are, with all manifests that they need. Changes of a log are made
// whatever the policy says.
type Bounded interface {
	// SetPolicy has policy asked for the one that counts, at each change. Called before changes are made.
	SetPolicy(policy func() Policy)
	// Room returns the *Refusal that a new blob of so many bytes would meet now.
	Room(ctx context.Context, repo string, bytes int64) error
	// MayRemove returns a *Refusal for a blob or manifest that an immutable tag needs.
	MayRemove(ctx context.Context, repo string, d digest.Digest) error
	// Tagged returns all tags of a repository, in byte order. Errors: ErrNotFound when there is no such repository.
	Tagged(ctx context.Context, repo string) ([]Tagged, error)
	// Untag removes those tags that are still as they are given, and not immutable, and returns them.
	Untag(ctx context.Context, repo string, tags []Tagged) ([]Tagged, error)
	// Usages returns at most limit repositories after the given one, in byte order.
	Usages(ctx context.Context, after string, limit int) ([]RepositoryUsage, error)
}
