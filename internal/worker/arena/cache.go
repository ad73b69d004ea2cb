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
	ahead   []uint64 // those that Ahead noted; nobody need have asked for them
	dropped []uint64 // those of them whose copy is dropped; guarded by Arena.sync
	n       atomic.Int64
}

func (r *reads) init(l *Layout) {
	n := words(int(l.Blocks()))
	r.seen, r.ahead, r.dropped = make([]uint64, n), make([]uint64, n), make([]uint64, n)
}

// Touch notes that [off, off+n) is read by way of the gate, and reports whether
// that tells that somebody needs it: what Ahead announced says nothing.
func (a *Arena) Touch(off, n int64) (needed bool) {
	a.eachWord(off, n, func(i int, m uint64) {
		ahead := atomic.LoadUint64(&a.reads.ahead[i])
		needed = needed || m&^ahead != 0
		if old := atomic.OrUint64(&a.reads.seen[i], m); m&^old&^ahead != 0 {
			a.reads.n.Add(int64(bits.OnesCount64(m &^ old &^ ahead)))
		}
	})
	return needed
}

// Ahead notes that [off, off+n) is about to be read so that it is in the mount's
// page cache before anybody asks: Touch does not count it. Whoever needs it reads it
// from there, which nobody sees.
func (a *Arena) Ahead(off, n int64) {
	a.eachWord(off, n, func(i int, m uint64) { atomic.OrUint64(&a.reads.ahead[i], m) })
}

// IsAhead reports whether Ahead noted the block at off.
func (a *Arena) IsAhead(off int64) (ahead bool) {
	a.eachWord(off, 1, func(i int, m uint64) { ahead = atomic.LoadUint64(&a.reads.ahead[i])&m != 0 })
	return ahead
}

// eachWord calls fn with the bits of the blocks of [off, off+n), word by word.
func (a *Arena) eachWord(off, n int64, fn func(i int, m uint64)) {
	from, to := a.blocks(off, n)
	for from < to {
		n := min(64-from%64, to-from)
		fn(from/64, ^uint64(0)>>(64-n)<<(from%64))
		from += n
	}
}

// Touched returns how many bytes of blocks Touch has noted as needed, each once.
func (a *Arena) Touched() int64 { return a.reads.n.Load() * BlockSize }

// Shed has all pages of the arena leave the page cache that are on the disk: memory is short, and who needs them
// reads them. Those that are in a mount's page cache stay there.
func (a *Arena) Shed() {
	_ = a.conn.Control(func(fd uintptr) { _ = unix.Fadvise(int(fd), 0, 0, unix.FADV_DONTNEED) })
}

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
