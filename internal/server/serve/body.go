package serve

import (
	"errors"
	"io"
	"net/http"
	"sync"
	"time"
)

// bodyRate is how fast the body of a request comes at least, bytes a second, in the long run.
const bodyRate = 1 << 10

// errSlowBody is what reading a body ends with that brings too little.
var errSlowBody = errors.New("it brought too little for too long")

// endSlowBodies ends requests whose bodies bring nothing for idle, or, after that, less than bodyRate in all:
// each holds a connection, and an upload's lock.
func endSlowBodies(idle time.Duration, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if req.Body == nil || req.Body == http.NoBody {
			next.ServeHTTP(w, req)
			return
		}
		b := &timedBody{ReadCloser: req.Body, idle: idle}
		rc := http.NewResponseController(w)
		b.watch = time.AfterFunc(idle, func() {
			b.mu.Lock()
			defer b.mu.Unlock()
			if b.reading {
				b.slow = true
				// A ResponseWriter without deadlines, as in tests, waits for ever.
				_ = rc.SetReadDeadline(time.Unix(1, 0))
			}
		})
		b.watch.Stop()
		defer b.end(rc)
		req.Body = b
		next.ServeHTTP(w, req)
	})
}

// timedBody is the body of a request.
type timedBody struct {
	io.ReadCloser
	idle     time.Duration
	waited   time.Duration // for bytes: what the server does with them meanwhile is not the client's time
	received int64
	over     bool // it was read to its end
	watch    *time.Timer

	mu      sync.Mutex
	reading bool // guarded by mu: somebody waits for bytes; not when the request has ended
	slow    bool // guarded by mu
}

func (b *timedBody) Read(p []byte) (int, error) {
	left := b.idle + time.Duration(float64(b.received)/bodyRate*float64(time.Second)) - b.waited
	began := time.Now()
	b.mark(true)
	b.watch.Reset(max(0, min(left, b.idle)))
	n, err := b.ReadCloser.Read(p)
	b.watch.Stop()
	b.waited += time.Since(began)
	b.received += int64(n)
	b.over = b.over || err == io.EOF
	if b.mark(false) && err != nil && err != io.EOF {
		err = errSlowBody
	}
	return n, err
}

// mark says whether somebody waits, and returns whether the body was too slow.
func (b *timedBody) mark(reading bool) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.reading = reading
	return b.slow
}

// end must be called before the handler returns: the connection is another request's then. The HTTP
// server reads what is left of a body first, without a limit of its own.
func (b *timedBody) end(rc *http.ResponseController) {
	b.watch.Stop()
	slow := b.mark(false)
	if b.over {
		return
	}
	until := time.Now().Add(b.idle)
	if slow {
		until = time.Unix(1, 0)
	}
	_ = rc.SetReadDeadline(until)
}
