package gatetest

import (
	"context"
	"errors"
	"os"
	"sync"
)

const blockSize = 4096

// Range is part of an arena, in bytes.
type Range struct{ Off, N int64 }

// Backing is a gate.Backing whose bytes are in memory and come when the test
// says so.
type Backing struct {
	file  *os.File
	truth []byte

	mu      sync.Mutex
	present []byte // one for each block, not 0: here
	here    int    // blocks present
	change  chan struct{}
	demand  bool
	fail    error
	needs   []Range
}

// NewBacking backs file, which must have been opened before it goes behind
// the gate and has the length of truth. present has one byte a block, not 0 for blocks that are
// here, and may be memory that outlives the process; nil: none is here.
func NewBacking(file *os.File, truth, present []byte) *Backing {
	blocks := (len(truth) + blockSize - 1) / blockSize
	if present == nil {
		present = make([]byte, blocks)
	}
	b := &Backing{file: file, truth: truth, present: present[:blocks], change: make(chan struct{})}
	for _, p := range b.present {
		if p != 0 {
			b.here++
		}
	}
	return b
}

func (b *Backing) blocks(off, n int64) (from, to int64) {
	size := int64(len(b.truth))
	off = min(off, size)
	n = min(n, size-off)
	return off / blockSize, (off + n + blockSize - 1) / blockSize
}

// Present implements gate.Backing.
func (b *Backing) Present(off, n int64) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.presentLocked(off, n)
}

// Met implements gate.Backing.
func (b *Backing) Met(int64, int64, bool) {}

func (b *Backing) presentLocked(off, n int64) bool {
	from, to := b.blocks(off, n)
	for i := from; i < to; i++ {
		if b.present[i] == 0 {
			return false
		}
	}
	return true
}

// Need implements gate.Backing.
func (b *Backing) Need(ctx context.Context, off, n int64) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.needs = append(b.needs, Range{off, n})
	b.signalLocked()
	for {
		switch {
		case b.presentLocked(off, n):
			return nil
		case b.fail != nil:
			return b.fail
		case b.demand:
			return b.fillLocked(off, n)
		}
		change := b.change
		b.mu.Unlock()
		select {
		case <-change:
			b.mu.Lock()
		case <-ctx.Done():
			b.mu.Lock()
			return ctx.Err()
		}
	}
}

func (b *Backing) signalLocked() {
	close(b.change)
	b.change = make(chan struct{})
}

// Demand makes each range arrive when it is needed, or not.
func (b *Backing) Demand(on bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.demand = on
	b.signalLocked()
}

// Fail makes Need fail with err; nil lets it work again.
func (b *Backing) Fail(err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.fail = err
	b.signalLocked()
}

// Fill makes the blocks of a range arrive.
func (b *Backing) Fill(off, n int64) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.fillLocked(off, n)
}

func (b *Backing) fillLocked(off, n int64) error {
	from, to := b.blocks(off, n)
	for i := from; i < to; i++ {
		if b.present[i] != 0 {
			continue
		}
		at := i * blockSize
		if _, err := b.file.WriteAt(b.truth[at:min(at+blockSize, int64(len(b.truth)))], at); err != nil {
			return err
		}
		b.present[i] = 1
		b.here++
	}
	b.signalLocked()
	return nil
}

// FillUnseen is Fill that no Need notices, as if the last bytes and the
// release of an arena came at once.
func (b *Backing) FillUnseen() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	change := b.change
	b.change = make(chan struct{})
	err := b.fillLocked(0, int64(len(b.truth)))
	close(b.change)
	b.change = change
	return err
}

// Needs returns the ranges that were needed so far.
func (b *Backing) Needs() []Range {
	b.mu.Lock()
	defer b.mu.Unlock()
	return append([]Range(nil), b.needs...)
}

// WaitNeeds waits until n ranges were needed.
func (b *Backing) WaitNeeds(ctx context.Context, n int) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	for len(b.needs) < n {
		change := b.change
		b.mu.Unlock()
		select {
		case <-change:
			b.mu.Lock()
		case <-ctx.Done():
			b.mu.Lock()
			return errors.New("nothing waits at the gate")
		}
	}
	return nil
}

// File returns the arena.
func (b *Backing) File() *os.File { return b.file }
