// Package catalog is what the server knows about the bytes it keeps: which
// repository holds which blob, manifest and tag, what has been ingested, and in
// which pack each segment rests.
package catalog

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"strings"
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/segment"
)

// ErrNotFound is returned, wrapped, when what was asked for is not there.
var ErrNotFound = errors.New("not in the catalog")

// ErrInUse is returned, wrapped, for what cannot be collected now.
var ErrInUse = errors.New("it is in use")

// ErrDamaged is returned, wrapped, for a catalog whose file is damaged.
var ErrDamaged = errors.New("the catalog is damaged")

// Catalog is all of it. Each method is one transaction, durable (it survives a
// power cut) when it returns nil. Every method is safe for concurrent use.
type Catalog interface {
	Repositories
	Dedup
	Startup
	Close() error
}

// Repositories is the registry's part: repositories, and what they hold.
type Repositories interface {
	// LinkBlob records that repo holds the blob. Idempotent.
	LinkBlob(ctx context.Context, repo string, b Blob) error
	// Exists is Blob for an answer that a client relies on: for a while the repository keeps the blob, whether or
	// not a manifest names it. LinkBlob does the same.
	Exists(ctx context.Context, repo string, d digest.Digest) (Blob, error)
	// Blob returns what repo holds. Errors: ErrNotFound.
	Blob(ctx context.Context, repo string, d digest.Digest) (Blob, error)
	// Blobs returns what repo holds, in the order of ds, in one go. Errors: ErrNotFound
	// when it does not hold all of them; Blob then says which.
	Blobs(ctx context.Context, repo string, ds []digest.Digest) ([]Blob, error)
	// AnyBlob looks in all repositories. Errors: ErrNotFound.
	AnyBlob(ctx context.Context, d digest.Digest) (Blob, error)
	// Holders returns the repositories that hold the blob, in byte order of their
	// names; none is no error.
	Holders(ctx context.Context, d digest.Digest) ([]string, error)
	// UnlinkBlob removes the blob from repo. Its bytes are the caller's: they
	// can go when AnyBlob says ErrNotFound. Errors: ErrNotFound.
	UnlinkBlob(ctx context.Context, repo string, d digest.Digest) error

	// PutManifest records m in repo, with its tags. A manifest of equal digest
	// keeps its Pushed time; a tag that exists moves.
	PutManifest(ctx context.Context, repo string, m Manifest, tags ...string) error
	// Manifest returns it by digest. Errors: ErrNotFound.
	Manifest(ctx context.Context, repo string, d digest.Digest) (Manifest, error)
	// DeleteManifest removes it and the tags that name it. For a while Deleted knows both. Errors: ErrNotFound.
	DeleteManifest(ctx context.Context, repo string, d digest.Digest) error
	// Referrers yields the manifests of repo whose subject is d, oldest first, one after the
	// other: who stops has only those in memory that it keeps. artifactType filters unless empty. after is the
	// one before the first that is wanted; if there is no such one they begin with the oldest. An error is the last.
	Referrers(ctx context.Context, repo string, d digest.Digest, artifactType string, after digest.Digest) iter.Seq2[Referrer, error]

	// Tag resolves a tag. Errors: ErrNotFound.
	Tag(ctx context.Context, repo, tag string) (digest.Digest, error)
	// DeleteTag removes a tag, not the manifest. For a while Deleted knows it. Errors: ErrNotFound.
	DeleteTag(ctx context.Context, repo, tag string) error
	// Tags returns at most limit tags after the given one, in byte order; a
	// limit < 0 is none. Errors: ErrNotFound when there is no such repository:
	// it is there from the first LinkBlob or PutManifest on.
	Tags(ctx context.Context, repo, after string, limit int) ([]string, error)
	// ListRepositories pages like Tags.
	ListRepositories(ctx context.Context, after string, limit int) ([]string, error)
}

// Blob is one blob as the registry serves it.
type Blob struct {
	Digest    digest.Digest
	Size      int64
	MediaType string // as its pusher or a manifest named it; may be empty
}

// BlobKey is where in the object store the bytes of a blob are:
// blobs/sha256/ab/abcd....
func BlobKey(d digest.Digest) string {
	return fmt.Sprintf("blobs/%s/%s/%s", d.Algorithm(), d.Encoded()[:2], d.Encoded())
}

// Manifest is one manifest or index, with its exact bytes.
type Manifest struct {
	Digest       digest.Digest
	MediaType    string
	ArtifactType string        // as Referrers filters: of an image, without one, its config's type
	Subject      digest.Digest // empty when it has none
	Annotations  map[string]string
	Bytes        []byte
	Pushed       time.Time
}

// Referrer is a manifest as lists of referrers have it.
type Referrer struct {
	Digest       digest.Digest
	MediaType    string
	ArtifactType string
	Annotations  map[string]string
	Size         int64 // bytes
}

// Dedup is the deduplicating store's part: packs, frames, segments, and what
// has been ingested from them.
type Dedup interface {
	// AddPack records a pack that is durable in the object store, and hooks of its segments, by which
	// Keep.Find finds it. Its frames are not recorded: the pack has a table of them (package dedup).
	// Adding a pack again does nothing. Layers that need a segment of it that was damaged elsewhere need
	// this pack too.
	AddPack(ctx context.Context, p Pack) error
	// PacksOf returns the packs that layers need, and those that the layers of images of a rootfs do, of a chain ID
	// that may be empty.
	PacksOf(ctx context.Context, layers []digest.Digest, rootfs digest.Digest) (Packs, error)
	// Forget records segments whose bytes in a pack turned out to be lost or damaged: nobody looks for them there any
	// more. Those of packs that are not known are passed over.
	Forget(ctx context.Context, damaged []Resting) error

	// PutLayer records that the layer blob has been ingested, or refused.
	// Called after every pack it needs has been added. packs are all that its segments are in, kept (Keep) until it
	// returns; nil: the layer counts as needing packs that nobody knows.
	PutLayer(ctx context.Context, l Layer, packs ...string) error
	// Keep returns what an ingest looks segments up with.
	Keep() Keep
	// PacksKnown reports whether the catalog knows all of these packs. What it knows when a reader has begun stays until
	// that ends (package readers).
	PacksKnown(ctx context.Context, keys []string) (bool, error)
	// Layer returns what ingest made of a layer blob. Errors: ErrNotFound.
	Layer(ctx context.Context, blob digest.Digest) (Layer, error)
	// Layers returns what ingest made of layer blobs, in their order, in one go. Errors:
	// ErrNotFound when it has not seen all of them; Layer then says which.
	Layers(ctx context.Context, blobs []digest.Digest) ([]Layer, error)
	// PutRecipe records the recipe of a layer that was ingested. Errors: ErrNotFound.
	PutRecipe(ctx context.Context, blob digest.Digest, r Recipe) error
	// WithoutRecipe returns at most limit layers after the given one, in byte order
	// of their digests, that were ingested, not refused, and have no recipe.
	WithoutRecipe(ctx context.Context, after digest.Digest, limit int) ([]Layer, error)
	// NotLooked returns at most limit layers after the given one, in the same order, that have a recipe of which nobody
	// has looked for how the blob was compressed (Recipe.Looked).
	NotLooked(ctx context.Context, after digest.Digest, limit int) ([]Layer, error)
	// PutRootfs records a flattened rootfs.
	PutRootfs(ctx context.Context, r Rootfs) error
	// Rootfs returns it. Errors: ErrNotFound.
	Rootfs(ctx context.Context, chainID digest.Digest) (Rootfs, error)
}

// Pack is an object that holds frames, one after the other.
type Pack struct {
	Key    string // in the object store
	Size   int64
	Frames []Frame
}

// Packs are packs in which segments may rest.
type Packs struct {
	Keys []string // in the order in which they were recorded
	// Damaged are segments that these packs do not have, whatever their tables say.
	Damaged map[Resting]bool
}

// Resting is a segment in a pack, by the pack's key.
type Resting struct {
	Pack string
	ID   segment.ID
}

// Frame is one frame in a pack.
type Frame struct {
	Pack      string // object key
	Offset    int64  // bytes, in the pack
	Length    uint32 // bytes, as stored
	RawLength uint32 // bytes, decompressed: the sum of its segments' lengths
	Segments  []FrameSegment
}

// FrameSegment is one segment in a frame; segments lie one after the other.
type FrameSegment struct {
	ID     segment.ID
	Length uint32
}

// A Locator says where segments rest, in the order of ids. One that does not has a nil Frame.
type Locator interface {
	Locate(ctx context.Context, ids []segment.ID) ([]Location, error)
}

// Location is the place of one segment.
type Location struct {
	Frame *Frame // shared between the locations of one call; nil: not stored
	Index int    // in Frame.Segments
}

// Layer is what ingest made of one layer blob.
type Layer struct {
	Blob   digest.Digest // the compressed blob
	DiffID digest.Digest // the tar stream
	// Key of its entry list in the object store; empty when refused.
	Entries string
	// Refused is why the layer cannot be served in bundles; empty if it can.
	Refused string
	Size    int64 // bytes of the tar stream
	Files   int64
	Recipe  Recipe
}

// Recipe is where the recipe of a layer rests (package recipe). The zero value is
// that of a layer whose recipe nobody has made yet, or that was refused.
//
// Its key says whether somebody has looked for how the blob was compressed: then it ends in a dot and the word for what
// was found (recipe.Compression). So whoever has the key knows, and every change of that has a key of its own.
type Recipe struct {
	Key    string        // in the object store
	Digest digest.Digest // of the recipe
	Size   int64         // of the recipe, bytes
}

// Looked reports whether somebody has looked for how the blob was compressed.
func (r Recipe) Looked() bool { return strings.Contains(r.Key, ".") }

// Proven reports whether the blob can be made again by the recipe.
func (r Recipe) Proven() bool { return r.Looked() && !strings.HasSuffix(r.Key, ".intact") }

// Rootfs is a flattened stack of layers.
type Rootfs struct {
	ChainID digest.Digest
	TOC     digest.Digest // of the encoded TOC
	Key     string        // of the encoded TOC in the object store
	Index   string        // object key of its frame index (package planner); rebuilt when lost
}

// Startup is what is known of startup sets: traces of services, and where the
// pages of an image are. All of it belongs to one repository: what the clients of
// another one say about the same rootfs has no influence.
type Startup interface {
	// NoteImage records a rootfs of a repository, as wanting a build. It keeps what
	// is there if Repository, ChainID and TOC are known; another TOC empties Key and
	// Previous and wants a build.
	NoteImage(ctx context.Context, m StartupImage) error
	// StartupImage returns what is recorded. Errors: ErrNotFound.
	StartupImage(ctx context.Context, repo string, chainID digest.Digest) (StartupImage, error)
	// StartupImages returns those of a repository, the latest Noted first.
	StartupImages(ctx context.Context, repo string) ([]StartupImage, error)
	// StaleImages returns at most limit images of all repositories whose Built is
	// not Wanted, the latest Noted first.
	StaleImages(ctx context.Context, limit int) ([]StartupImage, error)
	// PutBuilt records Built, Generation, Key and Previous of an image that was
	// noted. Errors: ErrNotFound.
	PutBuilt(ctx context.Context, m StartupImage) error

	// PutTrace records a trace of an image that was noted. A report takes the
	// place of the one that its client sent before. Of the traces of one kind
	// and service at most limits.Traces stay, of the services that have traces
	// limits.Services: what goes is the oldest trace of the client that has most of
	// them, and, of the services that t is not of, those that nobody recorded, then those
	// that fewest clients know, then those that were heard of longest ago. Images of
	// the repository with the same Platform want a build, since they may inherit.
	// Errors: ErrNotFound when the image was not noted.
	PutTrace(ctx context.Context, t Trace, limits TraceLimits) error
	// Traces returns the traces of an image, oldest first.
	Traces(ctx context.Context, repo string, chainID digest.Digest) ([]Trace, error)
	// DeleteTraces removes those of one service, or, if it is empty, of all; those
	// who may have inherited want a build. Errors: ErrNotFound when there are none.
	DeleteTraces(ctx context.Context, repo string, chainID digest.Digest, service string) error
}

// StartupImage is one rootfs of a repository with its startup sets.
type StartupImage struct {
	Repository string
	ChainID    digest.Digest
	TOC        digest.Digest // of the encoded TOC
	Platform   string        // only images of the same one inherit from each other
	Noted      time.Time     // for the first time

	Wanted     int64  // counts what changed that its sets are made from
	Built      int64  // the value of Wanted when its sets were read; less: they are stale
	Generation int64  // counts builds that wrote an object
	Key        string // of its store of pages in the object store; empty: there is none
	Previous   string // of the one before, which streams may still read
}

// Trace is one trace of a service, as it was sent.
type Trace struct {
	Repository string
	ChainID    digest.Digest
	TOC        digest.Digest // that its contents are numbered by
	Service    string        // ID
	Recorded   bool          // else reported by a worker
	Client     string        // opaque name of who sent it
	Received   time.Time
	Body       []byte // encoded (package trace)
}

// TraceLimits bound what PutTrace keeps of one image.
type TraceLimits struct {
	Traces   int
	Services int
}
