// Package gate makes a read of an absent arena block wait until the block is
// here, or fail.
package gate

import (
	"context"
	"os"
)

// A Gate holds back reads of blocks that are not present. Implementations:
// fanotify pre-content events (Linux 6.14).
type Gate interface {
	// Guard puts the arena file behind the gate. It must be called before the
	// file is opened by whatever reads it through the gate (EROFS at mount);
	// file itself must have been opened before Guard and stays exempt. b
	// answers for it.
	Guard(name string, file *os.File, b Backing) error
	// Release takes a complete arena from behind the gate: no reader waits,
	// and no process is in the path any more. Waiting reads are let through.
	Release(name string) error
	// Close stops answering. Reads that wait go on waiting as long as another
	// process holds the gate open.
	Close() error
}

// Backing is what stands behind the gate: an arena with its presence map.
type Backing interface {
	// Present reports whether all blocks of [off, off+n) are here and verified.
	Present(off, n int64) bool
	// Need blocks until [off, off+n) is present (nil), it cannot be had (an
	// error; the read fails with EIO), or ctx ends. It also makes the bytes
	// come sooner: the segments in the range are promoted.
	Need(ctx context.Context, off, n int64) error
}
