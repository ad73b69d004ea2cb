package tcp

import (
	"io"
	"net/http"
	"sync"
	"time"
)

// Patient writes an answer to a client that may take it slowly, but must take
// some of it: an answer holds a connection, and buffers, as long as it lasts.
type Patient struct {
	http.ResponseWriter
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

// NewPatient returns a writer to w, of which a client takes some within most. Call End before the handler returns.
func NewPatient(w http.ResponseWriter, most time.Duration) *Patient {
	p := &Patient{ResponseWriter: w, rc: http.NewResponseController(w), most: most}
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

// PatientHandler has all answers of next be written so.
func PatientHandler(next http.Handler, most time.Duration) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		p := NewPatient(w, most)
		defer p.End()
		next.ServeHTTP(p, r)
	})
}

// End must be called before the handler returns.
func (p *Patient) End() {
	p.watch.Stop()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ended = true
}

// Unwrap is for http.ResponseController.
func (p *Patient) Unwrap() http.ResponseWriter { return p.ResponseWriter }

func (p *Patient) Write(b []byte) (n int, err error) {
	for first := true; err == nil && (first || len(b) > 0); first = false {
		var m int
		err = p.within(func() error {
			var err error
			m, err = p.ResponseWriter.Write(b[:min(len(b), patientBytes)])
			return err
		})
		n, b = n+m, b[m:]
	}
	return n, err
}

// ReadFrom keeps the way to sendfile(2) open.
func (p *Patient) ReadFrom(src io.Reader) (total int64, err error) {
	for {
		var n int64
		err := p.within(func() (err error) {
			n, err = io.Copy(p.ResponseWriter, io.LimitReader(src, patientBytes))
			return err
		})
		if total += n; err != nil || n < patientBytes {
			return total, err
		}
	}
}

// Flush sends what was written.
func (p *Patient) Flush() error { return p.within(p.rc.Flush) }

// within runs fn, which writes, for some time at most. Between calls there is no
// limit: an ingest may take longer.
func (p *Patient) within(fn func() error) error {
	p.watch.Reset(p.most)
	defer p.watch.Stop()
	return fn()
}
