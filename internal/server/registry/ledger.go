package registry

import (
	"sync"
	"time"

	"hydrofoil.dev/foil/internal/server/guard"
)

// retryUploads is when a client may try again that has too many uploads: nobody knows when it will have finished some.
const retryUploads = 30 * time.Second

// ledger is what the uploads under way take, for each client that began them. Its zero value is ready.
type ledger struct {
	mu      sync.Mutex
	uploads map[string]*entry       // guarded by mu; by ID
	clients map[guard.Client]*entry // guarded by mu: their sums
}

// entry is an upload, or all of a client.
type entry struct {
	client  guard.Client
	uploads int
	bytes   int64
}

// begin adds an upload, if its client has fewer than most; 0: any number.
func (l *ledger) begin(id string, c guard.Client, most int) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.uploads == nil {
		l.uploads, l.clients = make(map[string]*entry), make(map[guard.Client]*entry)
	}
	sum := l.clients[c]
	if sum == nil {
		sum = new(entry)
		l.clients[c] = sum
	}
	if most > 0 && sum.uploads >= most {
		return false
	}
	sum.uploads++
	l.uploads[id] = &entry{client: c}
	return true
}

// grow adds n bytes to an upload, if those of its client are then at most most; 0: any number. alone: the
// upload itself would have more.
func (l *ledger) grow(id string, n, most int64) (fits, alone bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := l.uploads[id]
	if e == nil {
		return true, false
	}
	sum := l.clients[e.client]
	if most > 0 && sum.bytes+n > most {
		return false, e.bytes+n > most
	}
	e.bytes += n
	sum.bytes += n
	return true, false
}

// set says how many bytes an upload has.
func (l *ledger) set(id string, bytes int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if e := l.uploads[id]; e != nil {
		l.clients[e.client].bytes += bytes - e.bytes
		e.bytes = bytes
	}
}

// end takes an upload away.
func (l *ledger) end(id string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := l.uploads[id]
	if e == nil {
		return
	}
	delete(l.uploads, id)
	sum := l.clients[e.client]
	sum.uploads--
	sum.bytes -= e.bytes
	if sum.uploads == 0 {
		delete(l.clients, e.client)
	}
}
