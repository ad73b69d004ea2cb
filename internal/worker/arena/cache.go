package arena

import (
	"math/bits"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// reads are the blocks that were read by way of the gate.
//
// EROFS keeps what it reads in a page cache of its own. The arena's copy, which
// a write left in the page cache, is then of no more use: Sync drops it once it
// is on the disk.
type reads struct {
	seen    []uint64 // bits, by block
	dropped []uint64 // those of them whose copy is dropped; guarded by Arena.sync
	n       atomic.Int64
}

func (r *reads) init(l *Layout) {
	n := words(int(l.Blocks()))
	r.seen, r.dropped = make([]uint64, n), make([]uint64, n)
}

// Touch notes that [off, off+n) is read by way of the gate.
func (a *Arena) Touch(off, n int64) {
	from, to := a.blocks(off, n)
	for from < to {
		n := min(64-from%64, to-from)
		m := ^uint64(0) >> (64 - n) << (from % 64)
		if old := atomic.OrUint64(&a.reads.seen[from/64], m); old&m != m {
			a.reads.n.Add(int64(bits.OnesCount64(m &^ old)))
		}
		from += n
	}
}

// Touched returns how many bytes of blocks Touch has noted, each once.
func (a *Arena) Touched() int64 { return a.reads.n.Load() * BlockSize }

// undropped returns the blocks that were read and whose copies have not been
// dropped. a.sync is locked.
func (r *reads) undropped() []uint64 {
	var list []uint64
	for i := range r.seen {
		if w := atomic.LoadUint64(&r.seen[i]) &^ r.dropped[i]; w != 0 {
			if list == nil {
				list = make([]uint64, len(r.seen))
			}
			list[i] = w
		}
	}
	return list
}

// drop drops the arena's copies of blocks, which are on the disk. It may well
// fail: then memory is short a little earlier. a.sync is locked.
func (a *Arena) drop(blocks []uint64) {
	n := 64 * len(blocks)
	_ = a.conn.Control(func(fd uintptr) {
		for b := nextSet(blocks, 0, n); b < n; {
			e := nextClear(blocks, b, n)
			_ = unix.Fadvise(int(fd), int64(b)*BlockSize, int64(e-b)*BlockSize, unix.FADV_DONTNEED)
			b = nextSet(blocks, e, n)
		}
	})
	for i, w := range blocks {
		a.reads.dropped[i] |= w
	}
}
