//go:build race || lockorder

package locks

import (
	"bytes"
	"fmt"
	"runtime"
	"slices"
	"strconv"
	"sync"
)

// Checked says that bugs of order end the program.
const Checked = true

// Mutex is a sync.Mutex of a rank. Its zero value is unlocked.
type Mutex[R Rank] struct{ mu sync.Mutex }

// held are the ranks that each goroutine holds.
var held = struct {
	sync.Mutex
	by map[int64][]int
}{by: make(map[int64][]int)}

// Lock implements sync.Locker. It panics when the calling goroutine holds a mutex
// of the same rank or of a later one.
func (m *Mutex[R]) Lock() {
	var r R
	id := goroutine()
	held.Lock()
	for _, other := range held.by[id] {
		if other >= r.rank() {
			held.Unlock()
			panic(fmt.Sprintf("locks: %T (rank %d) is taken while rank %d is held", r, r.rank(), other))
		}
	}
	held.by[id] = append(held.by[id], r.rank())
	held.Unlock()
	m.mu.Lock()
}

// Unlock implements sync.Locker. The goroutine that locked unlocks.
func (m *Mutex[R]) Unlock() {
	var r R
	id := goroutine()
	held.Lock()
	i := slices.Index(held.by[id], r.rank())
	if i < 0 {
		held.Unlock()
		panic(fmt.Sprintf("locks: %T is unlocked by a goroutine that did not lock it", r))
	}
	if held.by[id] = slices.Delete(held.by[id], i, i+1); len(held.by[id]) == 0 {
		delete(held.by, id)
	}
	held.Unlock()
	m.mu.Unlock()
}

// goroutine returns the number of the calling goroutine, from the first line of
// its stack: "goroutine 7 [running]:".
func goroutine() int64 {
	var buf [64]byte
	line := buf[:runtime.Stack(buf[:], false)]
	line = bytes.TrimPrefix(line, []byte("goroutine "))
	if i := bytes.IndexByte(line, ' '); i > 0 {
		line = line[:i]
	}
	id, err := strconv.ParseInt(string(line), 10, 64)
	if err != nil {
		panic("locks: the runtime names goroutines in another way")
	}
	return id
}
