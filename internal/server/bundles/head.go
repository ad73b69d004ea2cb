package bundles

import (
	"sync"
	"time"

	"hydrofoil.dev/foil/internal/server/turns"
)

// head is the beginning of a pull, for which the rests of others wait: until its startup set and
// plan have been sent, or, where there is no set, for its first second. Ingest is over by then.
type head struct {
	timer  *time.Timer
	settle func()
	stream *turns.Stream
}

// head begins it. close must be called when the pull has ended.
func (p *pull) head() head {
	over := p.h.turns.Urgent(p.conn)
	stream := p.h.turns.Stream(p.conn)
	p.queue.urgent, p.queue.favour = func() func() { return p.h.turns.Urgent(p.conn) }, favourMost
	settle := sync.OnceFunc(func() {
		over()
		p.queue.settle(stream)
	})
	return head{time.AfterFunc(turns.UrgentFor, settle), settle, stream}
}

// end has others wait no more. What is left of the pull takes turns with their rests from now on.
func (h head) end() {
	h.timer.Stop()
	h.settle()
}

func (h head) close() {
	h.end()
	h.stream.Close()
}
