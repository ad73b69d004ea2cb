package guard

import (
	"errors"
	"net/http"
	"net/netip"
	"strconv"
	"sync"
	"time"

	"hydrofoil.dev/foil/internal/server/access"
	"hydrofoil.dev/foil/internal/server/limit"
	"hydrofoil.dev/foil/internal/server/login"
)

// Limits bound what each client may have: a subject at an address. An IPv6 network of 64 bits is one address; all
// who are anonymous at one are one client.
type Limits struct {
	// Requests is how many requests a second a client may send in the long run, and Burst how many at once;
	// 0 means 200 and 4,000.
	Requests float64 `toml:"requests"`
	Burst    int     `toml:"burst"`
	// Parallel is how many requests of a client may be under way, pushes, pulls and bundles included; 0 means 256.
	Parallel int `toml:"parallel"`
}

// maxClients is how many clients are told apart; the others count as one.
const maxClients = 10_000

// client is who a limit is for.
type client struct {
	subject string
	network netip.Addr
}

// quotas are what clients have used of Limits.
type quotas struct {
	requests *limit.Buckets[client]
	parallel int

	mu      sync.Mutex
	running map[client]int // guarded by mu
}

func newQuotas(l Limits) (*quotas, error) {
	if l.Requests < 0 || l.Burst < 0 || l.Parallel < 0 {
		return nil, errors.New("[limits]: want numbers above 0")
	}
	if l.Requests == 0 {
		l.Requests = 200
	}
	if l.Burst == 0 {
		l.Burst = max(4000, int(l.Requests))
	}
	if l.Parallel == 0 {
		l.Parallel = 256
	}
	return &quotas{requests: limit.New[client](l.Requests, l.Burst, maxClients), parallel: l.Parallel, running: make(map[client]int)}, nil
}

// Kinds of limits.
const (
	limitRequests = "requests"
	limitParallel = "parallel"
)

// begin lets a request in, or says which limit it is beyond, and when to try again.
func (q *quotas) begin(c client) (end func(), beyond string, after time.Duration) {
	if ok, after := q.requests.Take(c, 1); !ok {
		return nil, limitRequests, after
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.running[c] >= q.parallel {
		return nil, limitParallel, time.Second
	}
	q.running[c]++
	return func() {
		q.mu.Lock()
		defer q.mu.Unlock()
		if q.running[c]--; q.running[c] == 0 {
			delete(q.running, c)
		}
	}, "", 0
}

// tooMany answers a request beyond a limit.
func (g *Guard) tooMany(w http.ResponseWriter, beyond string, after time.Duration) {
	g.limited.WithLabelValues(beyond).Inc()
	w.Header().Set("Retry-After", strconv.Itoa(int((after+time.Second-1)/time.Second)))
	message := "too many requests a second: wait, or have an administrator raise [limits] requests"
	if beyond == limitParallel {
		message = "too many requests at once: wait for some to end, or have an administrator raise [limits] parallel"
	}
	answer(w, http.StatusTooManyRequests, "TOOMANYREQUESTS", message)
}

// clientOf is who a request counts for. Nobody has proven anything on paths that ask nobody.
func clientOf(c *caller, open bool) client {
	if open || c.relayed {
		return client{access.Anonymous, login.Network(c.address)}
	}
	return client{c.Name, login.Network(c.address)}
}
