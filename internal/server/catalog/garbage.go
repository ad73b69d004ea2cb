package catalog

import (
	"context"
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/segment"
)

// DefaultWindow is for how long a deleted manifest or tag can be brought back, unless somebody says otherwise.
const DefaultWindow = 7 * 24 * time.Hour

// DefaultLease is for how long a blob stays in a repository after a client was told that it is there.
const DefaultLease = time.Hour

// Deleted is the part of what was deleted and can be brought back. What DeleteManifest and DeleteTag delete is kept
// for a window: its blobs stay as if it were there.
type Deleted interface {
	// Deleted returns what can be brought back of a repository, or, if it is empty, of all: manifests, then tags, each in
	// the order of deletion.
	Deleted(ctx context.Context, repo string) ([]DeletedItem, error)
	// Undelete brings manifests and tags of repo back. A tag that is there, and a manifest some of whose blobs are gone,
	// are left alone and are not in the answer. Durable when it returns.
	Undelete(ctx context.Context, repo string, items []DeletedItem) (restored []DeletedItem, err error)
	// Manifests returns those of a repository. Errors: ErrNotFound.
	Manifests(ctx context.Context, repo string) ([]digest.Digest, error)
	// Family returns what belongs to a manifest.
	Family(ctx context.Context, repo string, d digest.Digest) (Family, error)
	// Purge forgets at most limit things that were deleted before a time, the oldest first.
	Purge(ctx context.Context, before time.Time, limit int) (n int, err error)
}

// Family is what belongs to a manifest, here or deleted.
type Family struct {
	Named     bool            // a tag names it, or an index that is here
	Children  []digest.Digest // manifests that it names
	Referrers []digest.Digest // manifests whose subject it is
}

// DeletedItem is a manifest or a tag that was deleted.
type DeletedItem struct {
	Repository string        `json:"repository"`
	Tag        string        `json:"tag,omitempty"` // empty: the manifest itself
	Digest     digest.Digest `json:"digest"`        // the manifest, or what the tag named
	Deleted    time.Time     `json:"deleted"`
	Size       int64         `json:"-"` // bytes of the manifest
}

// Garbage is the part of a catalog that finds out what nobody needs. The catalog itself notes, in the transaction of
// every change that may orphan something, that it has to be reviewed. Each method is one transaction.
//
// What a review finds dead is forgotten in the transaction that found it so: nothing can come to need it in between.
// The objects that a forgotten row named are doomed. They go when nobody can read them any more.
type Garbage interface {
	Deleted

	// Unindexed returns manifests of which the catalog does not know yet whether they are images. Until there are none,
	// no rootfs and no startup sets are collected.
	Unindexed(ctx context.Context, limit int) ([]Unindexed, error)
	// PutImage records the chain ID of an image; empty: it is none.
	PutImage(ctx context.Context, m Unindexed, chainID digest.Digest) error
	// Unpacked returns layers whose packs the catalog does not know: of old catalogs, and of those that were rebuilt. Until
	// there are none, no pack is collected.
	Unpacked(ctx context.Context, limit int) ([]Layer, error)
	// DropLayer forgets what was ingested of a layer: it is ingested again when it is asked for.
	DropLayer(ctx context.Context, blob digest.Digest) error
	// PutPacks records the packs that a layer's segments are in.
	PutPacks(ctx context.Context, blob digest.Digest, packs []string) error

	// CollectLinks takes blobs out of repositories whose manifests do not name them, unless they are leased.
	CollectLinks(ctx context.Context, d Due) (Collected, error)
	// CollectLayers forgets what was ingested of blobs that no repository has, and returns these. Their
	// objects are the caller's, who then calls Removed.
	CollectLayers(ctx context.Context, d Due) ([]digest.Digest, Collected, error)
	Removed(ctx context.Context, blobs []digest.Digest) error
	// CollectRootfs forgets rootfs that no manifest is of; CollectStartup their startup sets and traces;
	// CollectRepositories repositories that have nothing.
	CollectRootfs(ctx context.Context, d Due) (Collected, error)
	CollectStartup(ctx context.Context, d Due) (Collected, error)
	CollectRepositories(ctx context.Context, d Due) (Collected, error)

	// PacksToReview returns packs that may hold what nobody needs.
	PacksToReview(ctx context.Context, d Due) ([]PackUse, error)
	// PacksToCompact returns those with most dead bytes of those with at least a share of dead bytes.
	PacksToCompact(ctx context.Context, share float64, limit int) ([]PackUse, error)
	// PutDead records a review. It counts only if no layer began to use the pack since.
	PutDead(ctx context.Context, p PackUse, dead int64) error
	// ReplacePacks forgets packs; by, if there is one, holds what of them is needed. Errors: ErrInUse when a layer began to
	// use one of them since, or is being ingested; then nothing has changed. The Frames of packs are set.
	ReplacePacks(ctx context.Context, packs []PackUse, by *Pack) error
	// Postpone has packs reviewed later.
	Postpone(ctx context.Context, packs []PackUse, until time.Time) error

	// Tidy does some of what keeps the catalog small: it makes hooks of what an older catalog knows of each segment, and
	// thins them out when they are many. It reports whether there is more to do.
	Tidy(ctx context.Context) (more bool, err error)

	// Doomed returns objects that were forgotten before a time, the oldest first; Gone forgets their names.
	Doomed(ctx context.Context, before time.Time, limit int) ([]string, error)
	Gone(ctx context.Context, keys []string) error
	// Strays returns those of the keys that nothing names, and that nothing named before a time either, when it was
	// asked for them as well. A key must be that of an object that is there.
	Strays(ctx context.Context, keys []string, before time.Time) ([]string, error)

	// GarbageStats says how much there is to do.
	GarbageStats(ctx context.Context, d Due) (GarbageStats, error)
	// Shrink gives free pages of the catalog back, some at a time, and reports whether there are more.
	Shrink(ctx context.Context) (more bool, err error)
}

// Due says which reviews are due.
type Due struct {
	Now   time.Time
	Grace time.Duration // since the event, and up to a quarter more; negative: waived
	Limit int           // reviews
}

// Collected is what came of reviews.
type Collected struct {
	Reviewed int `json:"reviewed"`
	Dead     int `json:"dead"`
	Leased   int `json:"leased"` // asked again later
}

// Unindexed is a manifest to be looked at.
type Unindexed struct {
	Repository string
	Manifest   Manifest
}

// PackUse is a pack, and who may need it.
type PackUse struct {
	Key    string
	Size   int64
	Dead   int64
	Used   int64 // counts layers that began to use it
	Event  int64 // of the review
	Layers []digest.Digest
	// Damaged are segments that it does not have, whatever its table says.
	Damaged map[segment.ID]bool
	// Frames are what its table says. The catalog does not know them: who replaces the pack sets them.
	Frames []Frame
}

// GarbageStats is what waits to be collected.
type GarbageStats struct {
	Queues []QueueStats `json:"queues"`
	// Leased counts blobs that stay since a client was told that they are there.
	Leased        int64 `json:"leased"`
	DeletedThings int64 `json:"deleted"` // manifests and tags that can be brought back
	Packs         int64 `json:"packs"`
	PackBytes     int64 `json:"pack_bytes"`
	DeadBytes     int64 `json:"dead_bytes"`
	// Unnamed are the bytes of blobs that no manifest names, here or deleted.
	Unnamed int64 `json:"unnamed_bytes"`
	// InWindow are those of blobs that only deleted manifests name.
	InWindow int64 `json:"deleted_bytes"`
}

// QueueStats is one queue of reviews.
type QueueStats struct {
	Name   string    `json:"name"`
	Length int64     `json:"length"`
	Due    int64     `json:"due"`
	Oldest time.Time `json:"oldest,omitzero"`
}

// Keep keeps packs while a layer is ingested that relies on their segments: no pack that it has seen is collected, or
// replaced by another one, until Release.
type Keep interface {
	// Find returns packs in which segments may rest, and keeps them. While a catalog is small all are found; of a large
	// one hooks are, a sample of the segments of each pack: what lies together was stored together, and who has found some
	// of it looks for the rest in the same packs. A pack may be found that has none of them.
	Find(ctx context.Context, ids []segment.ID) (Packs, error)
	// Hold keeps a pack that the catalog is about to be told of.
	Hold(pack string)
	// Packs are those that are kept; not nil.
	Packs() []string
	Release()
}
