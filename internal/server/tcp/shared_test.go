package tcp

import (
	"bytes"
	"context"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"hydrofoil.dev/foil/internal/kernel"
)

// What is sent over a shared connection arrives as it was, is paid for, and nothing is being paid for while the client takes
// nothing.
func TestShared(t *testing.T) {
	// More than a client that reads nothing takes.
	content := bytes.Repeat([]byte("0123456789abcdef"), kernel.FlightBytes/16)
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, content, 0o600); err != nil {
		t.Fatal(err)
	}
	file := func(t *testing.T) *os.File {
		f, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Close() })
		return f
	}
	for _, test := range []struct {
		name string
		send func(t *testing.T, w http.ResponseWriter) error
		want []byte
	}{
		{"bytes", func(_ *testing.T, w http.ResponseWriter) error {
			_, err := w.Write(content)
			return err
		}, content},
		{"a file", func(t *testing.T, w http.ResponseWriter) error {
			_, err := io.Copy(w, file(t))
			return err
		}, content},
		{"a part of one", func(t *testing.T, w http.ResponseWriter) error {
			f := file(t)
			if _, err := f.Seek(3, io.SeekStart); err != nil {
				return err
			}
			part := &io.LimitedReader{R: f, N: int64(len(content) - 5)}
			for range 2 { // in pieces, as Patient does
				if _, err := io.Copy(w, io.LimitReader(part, int64(len(content)/2))); err != nil {
					return err
				}
			}
			if part.N != 0 {
				t.Errorf("%d bytes are left of the part", part.N)
			}
			return nil
		}, content[3 : len(content)-2]},
		{"no file", func(_ *testing.T, w http.ResponseWriter) error {
			_, err := io.Copy(w, struct{ io.Reader }{bytes.NewReader(content)})
			return err
		}, content},
	} {
		t.Run(test.name, func(t *testing.T) {
			var paid, paying atomic.Int64
			s := serveShared(t, func(w http.ResponseWriter, r *http.Request) {
				Pay(r.Context(), func() func() {
					paid.Add(1)
					paying.Add(1)
					return func() { paying.Add(-1) }
				})
				if err := test.send(t, w); err != nil {
					t.Error(err)
				}
			})
			res, err := http.Get(s)
			if err != nil {
				t.Fatal(err)
			}
			defer res.Body.Close()
			// The server has filled the sockets when it pays no more.
			for last := int64(-1); last != paid.Load(); time.Sleep(50 * time.Millisecond) {
				last = paid.Load()
			}
			if n := paying.Load(); n != 0 {
				t.Errorf("%d pieces are being paid for while the client takes nothing", n)
			}
			got, err := io.ReadAll(res.Body)
			if err != nil || !bytes.Equal(got, test.want) {
				t.Errorf("%d bytes came, %v; want %d", len(got), err, len(test.want))
			}
			if n := paid.Load(); n < int64(len(test.want))/sharedBytes {
				t.Errorf("%d pieces were paid for", n)
			}
		})
	}
}

// A client that has gone, or takes nothing for too long, ends what is sent to it.
func TestSharedEnds(t *testing.T) {
	failed, content := make(chan error, 1), make([]byte, 2*kernel.FlightBytes)
	s := serveShared(t, func(w http.ResponseWriter, r *http.Request) {
		Pay(r.Context(), func() func() { return func() {} })
		if r.URL.Path == "/late" {
			if err := http.NewResponseController(w).SetWriteDeadline(time.Now().Add(200 * time.Millisecond)); err != nil {
				t.Error(err)
			}
		}
		_, err := w.Write(content)
		failed <- err
	})
	for _, path := range []string{"/gone", "/late"} {
		res, err := http.Get(s + path)
		if err != nil {
			t.Fatal(err)
		}
		if path == "/gone" {
			res.Body.Close()
		}
		select {
		case err := <-failed:
			if err == nil {
				t.Errorf("%s: all of it was sent", path)
			}
		case <-time.After(time.Minute):
			t.Fatalf("%s: the server goes on sending", path)
		}
		res.Body.Close()
	}
}

func serveShared(t *testing.T, h http.HandlerFunc) (url string) {
	plain, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l := NewListener(plain.(*net.TCPListener), SystemCongestion, 0)
	l.Shared = true
	s := &http.Server{Handler: h, ConnContext: ConnContext}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = s.Serve(l)
	}()
	t.Cleanup(func() {
		s.Close()
		<-done
		http.DefaultClient.CloseIdleConnections()
	})
	// Without a Conn, nothing is paid for.
	Pay(context.Background(), nil)
	return "http://" + l.Addr().String()
}
