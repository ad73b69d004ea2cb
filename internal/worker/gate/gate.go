// Package gate makes a read of an absent arena block wait until the block is
// here, or fail.
package gate

import (
	"context"
	"os"
)

// A Gate holds back reads of blocks that are not present. Implementations:
// fanotify pre-content events (Linux 6.14), and files of a FUSE filesystem.
type Gate interface {
	// Guard puts the arena file behind the gate. It must be called before the
	// file is opened by whatever reads it through the gate (EROFS at mount);
	// file itself must have been opened before Guard and stays exempt. b
	// answers for it.
	Guard(name string, file *os.File, b Backing) error
	// Start begins to answer. Every arena of an earlier daemon must be back
	// behind the gate: reads of others fail.
	Start() error
	// Device returns the path by which EROFS is to be mounted over the arena
	// that is guarded as name and whose file is at path arena: a path of the
	// gate's, or arena itself, as for one that is not guarded.
	Device(name, arena string) string
	// Release takes a complete arena from behind the gate: no reader waits, and
	// no process is in the path of mounts that are made from now on; whether
	// one stays in that of existing mounts is the implementation's. Waiting
	// reads are let through.
	Release(name string) error
	// Close stops answering. Reads that wait go on waiting as long as another
	// process holds the gate open.
	Close() error
	// Idle reports whether nothing is guarded and no mount needs the gate, so
	// that it may End.
	Idle() bool
	// End closes the gate for good: the keeper has nothing of it any more.
	End(ctx context.Context) error
	// Stats returns what this process's gate did so far.
	Stats() Stats
	// Kind is what users call it: "fanotify" or "fuse".
	Kind() string
}

// Backing is what stands behind the gate: an arena with its presence map.
type Backing interface {
	// Present reports whether all blocks of [off, off+n) are here and verified.
	Present(off, n int64) bool
	// Met is told once of each read that meets the gate, with what Present
	// answered, before the read goes on or waits.
	Met(off, n int64, present bool)
	// Need blocks until [off, off+n) is present (nil), it cannot be had (an
	// error; the read fails with EIO), or ctx ends. It also makes the bytes
	// come sooner: the segments in the range are promoted.
	Need(ctx context.Context, off, n int64) error
}
