package bundles

import (
	"net/http"
	"sync"
	"time"
)

// patient writes an answer to a client that may take it slowly, but must take
// some of it: a stream holds buffers and a plan as long as it lasts.
type patient struct {
	w    http.ResponseWriter
	rc   *http.ResponseController
	most time.Duration
	// watch ends a write that takes too long. (A write deadline for each would
	// be two messages to the goroutine that an HTTP/2 connection has.)
	watch *time.Timer

	mu    sync.Mutex
	ended bool // guarded by mu: w must not be used any more
}

// patientBytes is what has to be taken within the time: few enough for any link.
const patientBytes = 256 << 10

func newPatient(w http.ResponseWriter, most time.Duration) *patient {
	p := &patient{w: w, rc: http.NewResponseController(w), most: most}
	p.watch = time.AfterFunc(most, func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		if !p.ended {
			// A ResponseWriter without deadlines, as in tests, waits for ever.
			_ = p.rc.SetWriteDeadline(time.Unix(1, 0))
		}
	})
	p.watch.Stop()
	return p
}

// end must be called before the handler returns.
func (p *patient) end() {
	p.watch.Stop()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ended = true
}

func (p *patient) Write(b []byte) (n int, err error) {
	for len(b) > 0 && err == nil {
		var m int
		err = p.within(func() error {
			var err error
			m, err = p.w.Write(b[:min(len(b), patientBytes)])
			return err
		})
		n, b = n+m, b[m:]
	}
	return n, err
}

func (p *patient) Flush() error { return p.within(p.rc.Flush) }

// within runs fn, which writes, for some time at most. Between calls there is no
// limit: an ingest may take longer.
func (p *patient) within(fn func() error) error {
	p.watch.Reset(p.most)
	defer p.watch.Stop()
	return fn()
}
