package tcp

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/kernel/kerneltest"
)

// What a pull is answered is held back until it is worth a packet, ends, or took too long.
func TestCork(t *testing.T) {
	const pull, hello, header = "/pull", 50, corkFull
	type step struct {
		write  int // bytes
		flush  bool
		wait   time.Duration
		corked bool // thereafter
	}
	closed := errors.New("closed")
	for _, test := range []struct {
		name  string
		path  string
		busy  bool
		err   error
		steps []step
	}{
		{"a header comes soon", pull, false, nil, []step{
			{corked: true}, {write: hello, flush: true, corked: true}, {write: header}, {write: header, flush: true},
		}},
		{"in pieces", pull, false, nil, []step{
			{write: hello, flush: true, corked: true}, {write: header / 2, corked: true}, {write: header / 2},
		}},
		{"a small one, after which nothing may come for a while", pull, false, nil, []step{
			{write: hello, flush: true, corked: true}, {write: corkHello, corked: true}, {flush: true},
		}},
		{"it takes long", pull, false, nil, []step{
			{write: hello, flush: true, corked: true}, {wait: corkMost - 1, corked: true}, {wait: 2}, {write: header},
		}},
		{"it is refused", pull, false, nil, []step{{write: hello, corked: true}}},
		{"something is in flight", pull, true, nil, []step{{}, {write: hello, flush: true}}},
		{"the connection was closed", pull, false, closed, []step{{}, {write: hello, flush: true}}},
		{"no pull", "/other", false, nil, []step{{}, {write: hello}}},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := &fakeSocket{busy: test.busy, err: test.err}
				h := Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
					for i, s := range test.steps {
						time.Sleep(s.wait)
						synctest.Wait()
						if s.write > 0 {
							w.Write(make([]byte, s.write))
						}
						if s.flush {
							http.NewResponseController(w).Flush()
						}
						if f.corked.Load() != s.corked {
							t.Errorf("step %d: corked: %t", i, !s.corked)
						}
					}
				}), func(r *http.Request) bool { return r.URL.Path == pull })
				req := httptest.NewRequest(http.MethodPost, test.path, nil)
				h.ServeHTTP(httptest.NewRecorder(), req.WithContext(context.WithValue(t.Context(), pacerKey{}, &pacer{socket: f})))
				if f.corked.Load() {
					t.Error("corked at the end")
				}
			})
		})
	}
}

// The kernel holds back what is too little for a packet.
func TestCorkOfBBR(t *testing.T) {
	conn := connection(t, "bbr")
	raw, err := conn.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	corked := func() bool { return kerneltest.SocketOption(t, conn, unix.IPPROTO_TCP, unix.TCP_CORK) != 0 }
	b := bbr{raw}
	if idle, err := b.idle(); err != nil || !idle {
		t.Errorf("a new connection is idle: %t, %v", idle, err)
	}
	for _, on := range []bool{true, false} {
		if err := b.cork(on); err != nil || corked() != on {
			t.Errorf("cork(%t): corked %t, %v", on, corked(), err)
		}
	}
	p := pacerOf(ConnContext(t.Context(), conn))
	conn.Close()
	if c := p.cork(); c != nil {
		t.Error("a closed connection is corked")
	}
}
