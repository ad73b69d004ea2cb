package bundles

import (
	"context"
	"time"

	"hydrofoil.dev/foil/internal/format/bundle"
)

// meanwhile is Handler.meanwhile of a pull, whose client it is charged to.
func (p *pull) meanwhile(ctx context.Context, work func()) {
	p.await(func() {
		defer p.h.o.Guard.Place(ctx)()
		began := time.Now()
		work()
		p.charge(time.Since(began))
	})
}

// await is Handler.meanwhile of a pull, for what is charged elsewhere.
func (p *pull) await(work func()) {
	_ = p.h.meanwhile(p.w, p.flush, func() error { // work keeps its own errors
		work()
		return nil
	})
}

// meanwhile runs work, which may take as long as an ingest and sends nothing, and
// tells the worker from time to time that the server is still there: it would take
// the silence for a stream that has stalled, and ask for the same again.
func (h *Handler) meanwhile(w *bundle.Writer, flush func() error, work func() error) error {
	over, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		tick := time.NewTicker(h.o.Alive)
		defer tick.Stop()
		for range h.o.AliveMost / h.o.Alive {
			select {
			case <-over:
				return
			case <-tick.C:
			}
			// If this fails, so does what is sent next.
			if w.Alive() != nil || flush() != nil {
				return
			}
		}
	}()
	defer func() {
		close(over)
		<-ended
	}()
	return work()
}
