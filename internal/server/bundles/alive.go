package bundles

import "time"

// meanwhile runs work, which may take as long as an ingest and sends nothing, and
// tells the worker from time to time that the server is still there: it would take
// the silence for a stream that has stalled, and ask for the same again.
func (p *pull) meanwhile(work func()) {
	over, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		tick := time.NewTicker(p.h.o.Alive)
		defer tick.Stop()
		for range p.h.o.AliveMost / p.h.o.Alive {
			select {
			case <-over:
				return
			case <-tick.C:
			}
			// If this fails, so does what is sent next.
			if p.w.Alive() != nil || p.flush() != nil {
				return
			}
		}
	}()
	defer func() {
		close(over)
		<-ended
	}()
	work()
}
