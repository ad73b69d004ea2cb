package guard

import (
	"context"
	"io"
	"net/http"
	"time"
)

// pieceBytes is what is sent or read of a body before it waits for its turn: the streams of a client come one after the
// other with pieces of this size, so that none takes all of its rate.
const pieceBytes = 64 << 10

// pace is the rate of one client.
type pace struct {
	g      *Guard
	q      *quotas
	client Client
	ctx    context.Context
}

// paced has a request keep to the rate of its client, if that has one.
func (g *Guard) paced(q *quotas, w http.ResponseWriter, req *http.Request, c Client) (http.ResponseWriter, *http.Request) {
	if q.bytes == nil {
		return w, req
	}
	p := pace{g, q, c, req.Context()}
	if req.Body != nil && req.Body != http.NoBody {
		req.Body = &pacedBody{req.Body, p}
	}
	return &pacedWriter{w, p}, req
}

// moved waits until n bytes that have gone are paid for.
func (p pace) moved(n int) error {
	if n <= 0 {
		return nil
	}
	after := p.q.bytes.Charge(p.client, n)
	if after <= 0 {
		return nil
	}
	began := time.Now()
	defer func() { p.g.delayed.Add(time.Since(began).Seconds()) }()
	timer := time.NewTimer(after)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-p.ctx.Done():
		return p.ctx.Err()
	}
}

type pacedBody struct {
	io.ReadCloser
	pace pace
}

func (b *pacedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p[:min(len(p), pieceBytes)])
	if late := b.pace.moved(n); err == nil {
		err = late
	}
	return n, err
}

type pacedWriter struct {
	http.ResponseWriter
	pace pace
}

// Unwrap is for http.ResponseController.
func (w *pacedWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func (w *pacedWriter) Write(p []byte) (total int, err error) {
	for first := true; err == nil && (first || len(p) > 0); first = false {
		var n int
		n, err = w.ResponseWriter.Write(p[:min(len(p), pieceBytes)])
		total, p = total+n, p[n:]
		if late := w.pace.moved(n); err == nil {
			err = late
		}
	}
	return total, err
}

// ReadFrom keeps the way to sendfile(2) open.
func (w *pacedWriter) ReadFrom(src io.Reader) (total int64, err error) {
	for err == nil {
		var n int64
		n, err = io.Copy(w.ResponseWriter, io.LimitReader(src, pieceBytes))
		total += n
		if late := w.pace.moved(int(n)); err == nil {
			err = late
		}
		if n < pieceBytes {
			break
		}
	}
	return total, err
}
