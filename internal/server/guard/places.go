package guard

import (
	"context"
	"io"
	"net/http"
	"net/netip"
	"runtime"
	"sync"

	"hydrofoil.dev/foil/internal/server/limit"
	"hydrofoil.dev/foil/internal/server/tcp"
)

// places are where requests are worked on. A group of clients is a subject at all its addresses, so that whoever has many
// addresses, or many connections, has no more of the processors than others; all who are anonymous are one.
type places = limit.Places[string, netip.Addr]

func newPlaces() *places { return limit.NewPlaces[string, netip.Addr](runtime.GOMAXPROCS(0)) }

// worker is a request that is worked on. It has a place, but not while it waits for its client: from the first bytes of a large
// answer on its connection has one for each piece.
type worker struct {
	places *places
	client Client

	mu    sync.Mutex
	place *limit.Place[string, netip.Addr] // guarded by mu; nil: it has none
}

// enter waits for a place, if it has none. Errors: that of ctx.
func (w *worker) enter(ctx context.Context) error {
	p, err := w.places.Enter(ctx, w.client.Subject, w.client.Network)
	if err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.place = p
	return nil
}

// leave gives the place up, if it has one.
func (w *worker) leave() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.place.Leave()
	w.place = nil
}

// pay is for a piece of an answer.
func (w *worker) pay() (end func()) {
	w.leave()
	// Whoever has a place is not waiting for anything: it comes soon, and always.
	p, _ := w.places.Enter(context.Background(), w.client.Subject, w.client.Network)
	return p.Leave
}

// work lets a request be worked on. end is to be called when it was answered. Errors: that of its context.
func (g *Guard) work(req *http.Request, c *caller) (end func(), err error) {
	w := &worker{places: g.places, client: c.client}
	c.worker = w
	if err := w.enter(req.Context()); err != nil {
		return nil, err
	}
	tcp.Pay(req.Context(), w.pay)
	if req.Body != nil && req.Body != http.NoBody {
		req.Body = &workedBody{req.Body, req.Context(), w}
	}
	return w.leave, nil
}

// workedBody is the body of a request that has a place while it works on what it has read.
type workedBody struct {
	io.ReadCloser
	ctx    context.Context
	worker *worker
}

func (b *workedBody) Read(p []byte) (int, error) {
	b.worker.leave()
	n, err := b.ReadCloser.Read(p)
	if gone := b.worker.enter(b.ctx); err == nil {
		err = gone
	}
	return n, err
}

// Place waits for one for what a request has others do, or does when some of its answer has gone. leave gives it up, and so
// does time, if it takes long. There is none when ctx has ended.
func (g *Guard) Place(ctx context.Context) (leave func()) {
	c := from(ctx)
	if g == nil || c == nil {
		return func() {}
	}
	c.worker.leave()
	w := &worker{places: g.places, client: c.client}
	_ = w.enter(ctx) // whoever works finds out
	return w.leave
}
