package catalog

import (
	"cmp"
	"context"
	"time"

	"github.com/opencontainers/go-digest"
)

// Change is one change of what can be rebuilt from no other object: a register that was set, or
// is no more. The latest version of a register is its value; so changes may be applied in any order, and
// more than once.
type Change struct {
	// Version is greater than that of every change that the catalog made before.
	Version uint64
	Time    time.Time
	Kind    ChangeKind
	// Repo is empty for what belongs to no repository.
	Repo string
	// Name is the register's, among those of its kind in Repo: a digest, or a tag.
	Name string
	// Gone means that there is no value: it was deleted.
	Gone bool

	Blob     Blob          // of ChangedBlob
	Manifest Manifest      // of ChangedManifest
	Target   digest.Digest // of ChangedTag: the manifest
	Layer    Layer         // of ChangedLayer
	Rootfs   Rootfs        // of ChangedRootfs
	Deleted  time.Time     // of ChangedDeletedManifest, which has Manifest, and ChangedDeletedTag, which has Target
}

// ChangeKind is what a change is of. The numbers are part of a format.
type ChangeKind uint8

// The kinds of changes.
const (
	ChangedRepository ChangeKind = 1 // it is there; Name is empty
	ChangedBlob       ChangeKind = 2
	ChangedManifest   ChangeKind = 3
	ChangedTag        ChangeKind = 4
	ChangedLayer      ChangeKind = 5 // of no repository
	ChangedRootfs     ChangeKind = 6 // of no repository
	// ChangesWhole says that everything older has been recorded as well. It has neither
	// repository nor name.
	ChangesWhole ChangeKind = 7
	// What was deleted and can be brought back. The register of what it was is gone meanwhile.
	ChangedDeletedManifest ChangeKind = 8
	ChangedDeletedTag      ChangeKind = 9
)

// CompareRegisters orders changes by their registers: 0 means that both are of the same one.
func (c *Change) CompareRegisters(d *Change) int {
	return cmp.Or(cmp.Compare(c.Repo, d.Repo), cmp.Compare(c.Kind, d.Kind), cmp.Compare(c.Name, d.Name))
}

// A Log takes changes before the catalog makes them.
type Log interface {
	// Append makes changes durable, all or none. They may count from the moment it is called. After an error
	// they do not, and never will, unless the process ends before the next call.
	Append(ctx context.Context, changes []Change) error
}

// Logged is a catalog whose changes are in a log first (package journal says why).
type Logged interface {
	// LogState returns how far the catalog is.
	LogState(ctx context.Context) (LogState, error)
	// CatchUp makes changes of the log that the catalog lacks, and then has those of at
	// least version upTo.
	CatchUp(ctx context.Context, changes []Change, upTo uint64) error
	// SetLog has every change be in log before it counts.
	SetLog(ctx context.Context, log Log) error
	// LogMore logs some of what is older than the log, and reports whether that is all. What it has
	// logged it knows when it is called again, also by another process.
	LogMore(ctx context.Context) (whole bool, err error)
}

// LogState is how far a catalog is with its log.
type LogState struct {
	Applied  uint64 // it has all changes up to this version
	Reserved uint64 // it has given no change a greater version
	Whole    bool   // the log has everything
}
