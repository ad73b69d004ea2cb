package guard

import (
	"context"
	"io"
	"net/http"
	"time"
)

// pieceBytes is what is sent or read of a body between two waits: the streams of a client come one after the
// other with pieces of this size, so that none takes more than its share of the rate.
const pieceBytes = 64 << 10

// pace has a body keep to the rate of its client.
type pace struct {
	g      *Guard
	q      *quotas
	client Client
	ctx    context.Context
	begun  bool // the first bytes wait at once: a client may send small bodies only
	owed   int  // bytes that have gone and are not paid for
}

// paced has a request keep to the rate of its client, if that has one. end is to be called when it has been answered.
func (g *Guard) paced(q *quotas, w http.ResponseWriter, req *http.Request, c Client) (paced http.ResponseWriter, end func()) {
	if q.bytes == nil {
		return w, func() {}
	}
	p := pace{g: g, q: q, client: c, ctx: req.Context()}
	body, answer := &pacedBody{req.Body, p}, &pacedWriter{w, p}
	if req.Body != nil && req.Body != http.NoBody {
		req.Body = body
	}
	return answer, func() { q.bytes.Charge(c, body.pace.owed+answer.pace.owed) }
}

// moved waits, for each piece, until bytes that have gone are paid for. n more have.
func (p *pace) moved(n int) error {
	if p.owed += n; p.owed == 0 || p.begun && p.owed < pieceBytes {
		return nil
	}
	after := p.q.bytes.Charge(p.client, p.owed)
	p.begun, p.owed = true, 0
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
