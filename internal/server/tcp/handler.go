package tcp

import (
	"context"
	"io"
	"net"
	"net/http"
	"time"
)

// pacerKey is the key of a connection's pacer in the contexts of its requests.
type pacerKey struct{}

// ConnContext is for http.Server.ConnContext: it makes the pacer of a connection that
// BBR controls, which Handler uses, and lets Pay find a Conn.
func ConnContext(ctx context.Context, c net.Conn) context.Context {
	// Of tls.Conn.
	if below, ok := c.(interface{ NetConn() net.Conn }); ok {
		c = below.NetConn()
	}
	tcp, ok := c.(*net.TCPConn)
	if shared, is := c.(*Conn); is {
		ctx = context.WithValue(ctx, connKey{}, shared)
		tcp, ok = shared.TCPConn, true
	}
	if !ok {
		return ctx
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		return ctx
	}
	s := bbr{raw}
	if !s.inUse() {
		return ctx
	}
	return context.WithValue(ctx, pacerKey{}, &pacer{socket: s})
}

// Handler paces the answers of next. Answers to requests that corks picks are corked.
// On connections without BBR it does nothing.
func Handler(next http.Handler, corks func(*http.Request) bool) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		p, ok := r.Context().Value(pacerKey{}).(*pacer)
		if !ok {
			next.ServeHTTP(w, r)
			return
		}
		a := &answer{ResponseWriter: w, pacer: p}
		if corks(r) {
			a.cork = p.cork()
			defer a.cork.release()
		}
		next.ServeHTTP(a, r)
	})
}

// answer is a paced ResponseWriter.
type answer struct {
	http.ResponseWriter
	pacer *pacer
	cork  *cork // nil if nothing is held back
}

func (a *answer) Write(b []byte) (int, error) {
	a.pacer.check(time.Now())
	n, err := a.ResponseWriter.Write(b)
	a.cork.wrote(int64(n))
	return n, err
}

// ReadFrom lets a whole file be sent by sendfile(2).
func (a *answer) ReadFrom(src io.Reader) (int64, error) {
	a.pacer.check(time.Now())
	n, err := io.Copy(a.ResponseWriter, src)
	a.cork.wrote(n)
	return n, err
}

// FlushError is for http.ResponseController.
func (a *answer) FlushError() error {
	err := http.NewResponseController(a.ResponseWriter).Flush()
	a.cork.flushed()
	return err
}

// Unwrap is for http.ResponseController.
func (a *answer) Unwrap() http.ResponseWriter { return a.ResponseWriter }
