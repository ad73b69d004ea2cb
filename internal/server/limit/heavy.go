package limit

import (
	"context"
	"slices"
	"sync"
)

// HeavyBytes is from how many bytes on a document is dear to read: a millisecond of a processor, or more.
const HeavyBytes = 64 << 10

// Heavy lets requests that are dear to answer be worked on a few at a time, those of all clients in turn: what takes
// microseconds would wait behind all of them else, since the runtime gives each of them ten milliseconds before it has
// another go on. Its zero value lets nobody in; nil lets everybody in.
type Heavy[K comparable] struct {
	mu      sync.Mutex
	free    int                   // guarded by mu: places; none while somebody waits
	waiting map[K][]chan struct{} // guarded by mu: who waits, by client, the first is next
	next    []K                   // guarded by mu: clients that wait, in their turn
}

// NewHeavy returns one with places for so many at a time.
func NewHeavy[K comparable](places int) *Heavy[K] {
	return &Heavy[K]{free: places, waiting: make(map[K][]chan struct{})}
}

// Enter waits for a place. leave is to be called when the work is done. Errors: that of ctx.
func (h *Heavy[K]) Enter(ctx context.Context, client K) (leave func(), err error) {
	if h == nil {
		return func() {}, nil
	}
	h.mu.Lock()
	if h.free > 0 {
		h.free--
		h.mu.Unlock()
		return h.leave, nil
	}
	mine := make(chan struct{})
	if len(h.waiting[client]) == 0 {
		h.next = append(h.next, client)
	}
	h.waiting[client] = append(h.waiting[client], mine)
	h.mu.Unlock()
	select {
	case <-mine:
		return h.leave, nil
	case <-ctx.Done():
	}
	if !h.withdraw(client, mine) {
		h.leave() // it was its turn at that moment
	}
	return nil, ctx.Err()
}

// withdraw ends that somebody waits, and reports whether they did.
func (h *Heavy[K]) withdraw(client K, mine chan struct{}) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	i := slices.Index(h.waiting[client], mine)
	if i < 0 {
		return false
	}
	h.keep(client, slices.Delete(h.waiting[client], i, i+1))
	if len(h.waiting[client]) == 0 {
		h.next = slices.DeleteFunc(h.next, func(o K) bool { return o == client })
	}
	return true
}

// leave gives the place to who is next.
func (h *Heavy[K]) leave() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.next) == 0 {
		h.free++
		return
	}
	client := h.next[0]
	h.next = h.next[1:]
	all := h.waiting[client]
	close(all[0])
	if h.keep(client, all[1:]); len(all) > 1 {
		h.next = append(h.next, client)
	}
}

// keep notes who of a client waits. mu must be held.
func (h *Heavy[K]) keep(client K, all []chan struct{}) {
	if len(all) == 0 {
		delete(h.waiting, client)
		return
	}
	h.waiting[client] = all
}
