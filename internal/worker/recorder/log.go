package recorder

import (
	"slices"
	"sync"
	"time"
)

// BlockSize is the unit of what is recorded, bytes.
const BlockSize = 4096

// near is how long after the first block of a Read its last one may be read.
const near = 5 * time.Millisecond

// Read is the first read of some blocks of an arena, one after the other.
type Read struct {
	Arena  int // its number
	Off, N int64
	At     time.Time // of the first of them
	Waited bool      // they were absent
}

// Log notes which blocks of arenas are read first and when. It is safe for
// concurrent use.
type Log struct {
	max int

	mu     sync.Mutex
	seen   []blocks // by arena
	reads  []Read
	count  int64 // blocks
	last   time.Time
	full   bool
	closed bool
}

// NewLog makes an empty log of at most max reads, which are 40 bytes each; 0
// means 1<<20.
func NewLog(arenas, max int) *Log {
	if max == 0 {
		max = 1 << 20
	}
	return &Log{max: max, seen: make([]blocks, arenas)}
}

// blocks is a bitmap that grows.
type blocks []uint64

// set reports whether block i was not in the map, and adds it.
func (b *blocks) set(i int64) bool {
	if n := i/64 + 1 - int64(len(*b)); n > 0 {
		*b = append(*b, make([]uint64, n)...)
	}
	bit := uint64(1) << (i % 64)
	was := (*b)[i/64]
	(*b)[i/64] = was | bit
	return was&bit == 0
}

// Add notes a read of [off, off+n) of an arena.
func (l *Log) Add(arena int, off, n int64, at time.Time, waited bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if off < 0 || n <= 0 || l.full || l.closed {
		return
	}
	for b := off / BlockSize; b < (off+n+BlockSize-1)/BlockSize; b++ {
		if !l.seen[arena].set(b) {
			continue
		}
		l.count++
		l.last = at
		if k := len(l.reads) - 1; k >= 0 {
			if r := &l.reads[k]; r.Arena == arena && r.Off+r.N == b*BlockSize && r.Waited == waited && at.Sub(r.At) < near {
				r.N += BlockSize
				continue
			}
		}
		if len(l.reads) == l.max {
			l.full = true
			return
		}
		l.reads = append(l.reads, Read{Arena: arena, Off: b * BlockSize, N: BlockSize, At: at, Waited: waited})
	}
}

// Count returns how many blocks have been read, and when a new one was last.
func (l *Log) Count() (blocks int64, last time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.count, l.last
}

// State is Count, and whether there was more than the log holds.
func (l *Log) State() (blocks int64, last time.Time, full bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.count, l.last, l.full
}

// Reads returns what has been noted, no block twice. full says that there was
// more than the log holds.
func (l *Log) Reads() (reads []Read, full bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.reads), l.full
}

// End drops everything; nothing is noted any more.
func (l *Log) End() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed, l.seen, l.reads = true, nil, nil
}
