package bundles

import (
	"net/http"
	"time"
)

// patient writes an answer to a client that may take it slowly, but must take
// some of it: a stream holds buffers and a plan as long as it lasts.
type patient struct {
	w    http.ResponseWriter
	rc   *http.ResponseController
	most time.Duration
}

// patientBytes is what has to be taken within the time: few enough for any link.
const patientBytes = 128 << 10

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

// within runs fn, which writes, under a deadline. Between calls there is none:
// an ingest may take longer. A ResponseWriter without deadlines, as in tests,
// has none at all.
func (p *patient) within(fn func() error) error {
	_ = p.rc.SetWriteDeadline(time.Now().Add(p.most))
	defer func() { _ = p.rc.SetWriteDeadline(time.Time{}) }()
	return fn()
}
