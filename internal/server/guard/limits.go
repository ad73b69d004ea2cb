package guard

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"sync"
	"time"

	"hydrofoil.dev/foil/internal/format/bundle"
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
	// Bundles is how many of these may be bundles; 0: all.
	Bundles int `toml:"bundles"`
	// Bytes is how many bytes of bodies a second a client may send and get, in all; it is slowed down to that. 0: as
	// many as go.
	Bytes limit.Bytes `toml:"bytes"`
	// Work is for how long in an hour the server may plan bundles for a client, and ingest what it pulls or has
	// pushed; 0: for ever.
	Work limit.Duration `toml:"work"`
	// Uploads is how many uploads a client may have begun and not finished, and UploadBytes how many bytes they may have; 0:
	// any.
	Uploads     int         `toml:"uploads"`
	UploadBytes limit.Bytes `toml:"upload-bytes"`
	// UploadIdle is when an upload ends that nobody continues; 0: after a week.
	UploadIdle limit.Duration `toml:"upload-idle"`
}

const (
	// maxLarge is how many large requests of a client are in memory at once.
	maxLarge = 16
	// maxClients is how many clients are told apart; the others count as one.
	maxClients = 10_000
	// leastBytes is the least rate of a client, and of each of its requests when all that may be are under way, bytes a
	// second: slower streams would be taken for dead ones.
	leastBytes, leastEach = 1 << 20, 8 << 10
)

// Client is who a limit is for.
type Client struct {
	Subject string     `json:"subject,omitempty"`
	Network netip.Addr `json:"network"`
}

// quotas are what clients have used of Limits.
type quotas struct {
	Limits
	requests *limit.Buckets[Client]
	bytes    *limit.Buckets[Client] // nil: no limit
	work     *limit.Buckets[Client] // microseconds; nil: no limit

	mu      sync.Mutex
	running map[Client]int // guarded by mu
	bundles map[Client]int // guarded by mu
	large   map[Client]int // guarded by mu
}

func newQuotas(l Limits) (*quotas, error) {
	if l.Requests < 0 || l.Burst < 0 || l.Parallel < 0 || l.Bundles < 0 || l.Bytes < 0 || l.Work < 0 || l.Uploads < 0 || l.UploadBytes < 0 || l.UploadIdle < 0 {
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
	if least := max(leastBytes, l.Parallel*leastEach); l.Bytes > 0 && int(l.Bytes) < least {
		return nil, fmt.Errorf("[limits]: bytes = %d a second are too few for parallel = %d: at least %d, or streams would look dead", l.Bytes, l.Parallel, least)
	}
	if l.Work > 0 && l.Work < limit.Duration(time.Second) || l.UploadIdle > 0 && l.UploadIdle < limit.Duration(time.Hour) {
		return nil, errors.New(`[limits]: work wants at least a second of each hour ("10m"), upload-idle at least an hour ("24h")`)
	}
	q := &quotas{Limits: l, requests: limit.New[Client](l.Requests, l.Burst, maxClients), running: make(map[Client]int), bundles: make(map[Client]int), large: make(map[Client]int)}
	if l.Bytes > 0 {
		q.bytes = limit.New[Client](float64(l.Bytes), int(l.Bytes), maxClients)
	}
	if l.Work > 0 {
		us := time.Duration(l.Work).Microseconds()
		q.work = limit.New[Client](float64(us)/3600, int(us), maxClients)
	}
	return q, nil
}

// What a request may be refused for besides its rights, in metrics.
const (
	limitRequests    = "requests"
	limitParallel    = "parallel"
	limitBundles     = "bundles"
	limitLarge       = "large"
	limitWork        = "work"
	LimitUploads     = "uploads"
	LimitUploadBytes = "upload-bytes"
	LimitQuota       = "quota"
	LimitImmutable   = "immutable"
)

var limits = []string{limitRequests, limitParallel, limitBundles, limitLarge, limitWork, LimitUploads, LimitUploadBytes, LimitQuota, LimitImmutable}

// Beyond is a limit that a client has reached.
type Beyond struct {
	Message string
	After   time.Duration
}

func (e *Beyond) Error() string { return e.Message }

// Answer is how clients are told.
func (e *Beyond) Answer() (status int, code, message string) {
	return http.StatusTooManyRequests, "TOOMANYREQUESTS", e.Message
}

// RetryAfter is when to ask again.
func (e *Beyond) RetryAfter() time.Duration { return e.After }

// Beyond counts a request that is refused because of a limit.
func (g *Guard) Beyond(limit string, after time.Duration, message string) error {
	g.Refused(limit)
	return &Beyond{message + ", or have an administrator raise [limits] " + limit, after}
}

// Refused counts a request that is refused because of a limit.
func (g *Guard) Refused(limit string) {
	if g != nil {
		g.limited.WithLabelValues(limit).Inc()
	}
}

// count takes one of most in a map that mu guards.
func (q *quotas) count(in map[Client]int, c Client, most int) (end func(), ok bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if in[c] >= most {
		return nil, false
	}
	in[c]++
	return func() {
		q.mu.Lock()
		defer q.mu.Unlock()
		if in[c]--; in[c] == 0 {
			delete(in, c)
		}
	}, true
}

// begin lets a request in. Errors: *Beyond.
func (g *Guard) begin(q *quotas, c Client) (end func(), err error) {
	if ok, after := q.requests.Take(c, 1); !ok {
		return nil, g.Beyond(limitRequests, after, "too many requests a second: wait")
	}
	end, ok := q.count(q.running, c, q.Parallel)
	if !ok {
		return nil, g.Beyond(limitParallel, time.Second, "too many requests at once: wait for some to end")
	}
	return end, nil
}

// dear is as how many requests one counts that begins a bundle or an upload.
const dear = 4

// Dear has a request count as several, which was let in: it begins something that costs much more than an answer.
func (g *Guard) Dear(ctx context.Context) {
	if c := from(ctx); g != nil && c != nil {
		g.now().quotas.requests.Charge(c.client, dear-1)
	}
}

// Bundle lets a bundle begin, whose request was let in. Errors: *Beyond.
func (g *Guard) Bundle(ctx context.Context) (end func(), err error) {
	c := from(ctx)
	if g == nil || c == nil {
		return func() {}, nil
	}
	g.Dear(ctx)
	q := g.now().quotas
	if q.Bundles == 0 {
		return func() {}, nil
	}
	end, ok := q.count(q.bundles, c.client, q.Bundles)
	if !ok {
		return nil, g.Beyond(limitBundles, time.Second, "too many bundles at once: wait for some to end")
	}
	return end, nil
}

// Large lets something large be in memory for a client: the body of a request, which waits there for its turn to be worked on, a
// manifest, an answer that the client takes. It counts as a request more for each limit.HeavyBytes. length is as http.Request has it:
// that of others is not known. Errors: *Beyond.
func (g *Guard) Large(ctx context.Context, length int64) (end func(), err error) {
	c := from(ctx)
	if g == nil || c == nil || 0 <= length && length < limit.HeavyBytes {
		return func() {}, nil
	}
	q := g.now().quotas
	q.requests.Charge(c.client, max(1, int(length/limit.HeavyBytes)))
	return g.slot(q, c.client)
}

// Crowded reports that nothing large may be in memory for a client any more, before it is made. Errors: *Beyond.
func (g *Guard) Crowded(ctx context.Context) error {
	c := from(ctx)
	if g == nil || c == nil {
		return nil
	}
	end, err := g.slot(g.now().quotas, c.client)
	if err == nil {
		end()
	}
	return err
}

// slot lets something large be in memory. Errors: *Beyond.
func (g *Guard) slot(q *quotas, c Client) (end func(), err error) {
	end, ok := q.count(q.large, c, maxLarge)
	if !ok {
		g.Refused(limitLarge)
		return nil, &Beyond{"too many large requests at once: wait for some to end", time.Second}
	}
	return end, nil
}

// Work lets work begin for who sends a request: planning, ingesting. charge is to be called with how long it
// took. Errors: *Beyond.
func (g *Guard) Work(ctx context.Context) (charge func(time.Duration), err error) {
	c := from(ctx)
	if g == nil || c == nil {
		return func(time.Duration) {}, nil
	}
	q := g.now().quotas
	if q.work == nil {
		return func(time.Duration) {}, nil
	}
	if after := q.work.Charge(c.client, 0); after > 0 {
		return nil, g.Beyond(limitWork, after, "the server has worked too long for you in the last hour: wait")
	}
	return func(d time.Duration) { q.work.Charge(c.client, int(d.Microseconds())) }, nil
}

// Limits are those that count now.
func (g *Guard) Limits() Limits {
	if g == nil {
		return Limits{}
	}
	return g.now().quotas.Limits
}

// ClientOf is who a request counts for.
func ClientOf(ctx context.Context) Client {
	if c := from(ctx); c != nil {
		return c.client
	}
	return Client{}
}

// clientOf is who a request counts for. Nobody has proven anything on paths that ask nobody.
func clientOf(c *caller, open bool) Client {
	if open || c.relayed {
		return Client{access.Anonymous, login.Network(c.address)}
	}
	return Client{c.Name, login.Network(c.address)}
}

// tooMany answers a request beyond a limit.
func tooMany(w http.ResponseWriter, err error) {
	e, ok := errors.AsType[*Beyond](err)
	if !ok {
		answer(w, http.StatusInternalServerError, "INTERNAL", "the registry failed; its log says why")
		return
	}
	bundle.SetRetryAfter(w.Header(), e.After)
	status, code, message := e.Answer()
	answer(w, status, code, message)
}
