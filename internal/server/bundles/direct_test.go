package bundles_test

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"testing"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/server/bundles"
	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/objects"
	"hydrofoil.dev/foil/internal/server/planner/plannertest"
)

// returning is a listener that hands out again what was given back.
type returning struct {
	net.Listener
	next   chan net.Conn
	closed chan struct{} // when the inner one is
	back   chan struct{} // one for each that was given back
}

func (l *returning) run() {
	defer close(l.closed)
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return
		}
		l.next <- c
	}
}

func (l *returning) Accept() (net.Conn, error) {
	select {
	case c := <-l.next:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

func (l *returning) giveBack(c net.Conn) {
	l.next <- c
	l.back <- struct{}{}
}

// direct starts a server of HTTP/1.1 that takes connections over, and a client.
func direct(t *testing.T, w *plannertest.World) (s *server, l *returning) {
	t.Helper()
	inner, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l = &returning{Listener: inner, next: make(chan net.Conn, 16), closed: make(chan struct{}), back: make(chan struct{}, 16)}
	go l.run()
	h := bundles.New(bundles.Options{
		Catalog: w.Catalog, Objects: w.Objects, Log: slog.New(slog.DiscardHandler), GiveBack: l.giveBack,
		Rootfs: func(ctx context.Context, m *bundles.Resolved) (catalog.Rootfs, error) {
			return w.Catalog.Rootfs(ctx, m.ChainID)
		},
	})
	hs := &http.Server{Handler: h}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = hs.Serve(l) // ErrServerClosed
	}()
	tr := new(http.Transport)
	t.Cleanup(func() {
		tr.CloseIdleConnections()
		hs.Close()
		<-done
		ended, cancel := context.WithCancel(context.Background())
		cancel()
		h.Drain(ended)
		if err := h.Close(); err != nil {
			t.Error(err)
		}
	})
	return &server{World: w, url: "http://" + inner.Addr().String(), client: &http.Client{Transport: tr}, handler: h}, l
}

// What goes from the packs' files is what goes from memory: frames as they are
// and frames that are made, and the connection serves one pull after the other.
func TestDirect(t *testing.T) {
	for name, store := range map[string]func() objects.Store{
		"directory": func() objects.Store {
			dir, err := objects.OpenDir(t.TempDir())
			if err != nil {
				t.Fatal(err)
			}
			return dir
		},
		"not in files": func() objects.Store { return objects.NewMemory() },
	} {
		t.Run(name, func(t *testing.T) {
			s := start(t, store())
			s.image(t, "r", "1", version(1), ocispec.ImageConfig{})
			s.image(t, "r", "2", version(2), ocispec.ImageConfig{})
			d, l := direct(t, s.World)
			for _, tag := range []string{"1", "2", "1"} {
				want := s.pull(t, request("r", tag), nil)
				var promoted bool
				got := d.pull(t, request("r", tag), func(p *pulled) {
					if promoted {
						return
					}
					promoted = true
					last := uint32(len(p.plan.Frames) - 1)
					resp := d.post(t, context.Background(), bundle.PromotePath, bundle.Promotion{Stream: p.hello.Stream, Frames: []uint32{last}})
					if resp.StatusCode != http.StatusNoContent && resp.StatusCode != http.StatusNotFound {
						t.Errorf("promotion: %s", resp.Status)
					}
					resp.Body.Close()
				})
				if want.err != nil || got.err != nil {
					t.Fatal(want.err, got.err)
				}
				if len(got.segments) != len(want.segments) || missing(got.tocs[0], got.segments) > 0 {
					t.Errorf("%s: %d segments, over HTTP/2 %d", tag, len(got.segments), len(want.segments))
				}
				<-l.back
			}
		})
	}
}

// Errors in the stream arrive on a connection that was taken over, and it goes on.
func TestDirectDamage(t *testing.T) {
	dir, err := objects.OpenDir(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	s := start(t, dir)
	s.image(t, "r", "1", version(1), ocispec.ImageConfig{})
	d, l := direct(t, s.World)
	if p := d.pull(t, request("r", "1"), nil); p.err != nil {
		t.Fatal(p.err)
	}
	if err := dir.List(context.Background(), "packs/", func(key string, size int64) error {
		o, err := dir.Open(context.Background(), key, 0, size/2)
		if err != nil {
			return err
		}
		defer o.Close()
		half, err := io.ReadAll(o)
		if err == nil {
			s.Put(t, key, half)
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	var e *bundle.Error
	if p := d.pull(t, request("r", "1"), nil); !errors.As(p.err, &e) || e.Code != bundle.CodeCorrupt {
		t.Errorf("half of a pack: %v", p.err)
	}
	<-l.back
	<-l.back
}

// Drain cuts off a stream that goes on, and it shows.
func TestDirectDrain(t *testing.T) {
	dir, err := objects.OpenDir(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	s := start(t, dir)
	files := plannertest.Files{}
	for i := range 64 {
		files[fmt.Sprintf("/f%02d", i)] = text(uint64(i), 1<<20) // more than sockets hold
	}
	s.image(t, "r", "1", files, ocispec.ImageConfig{})
	d, _ := direct(t, s.World)
	req := request("r", "1")
	req.Versions = []int{bundle.Version}
	resp := d.post(t, context.Background(), bundle.PullPath, req)
	r := bundle.NewReader(resp.Body, bundle.ReaderOptions{Request: req})
	for {
		section, err := r.Next()
		if err != nil {
			t.Fatal(err)
		}
		if _, ok := section.(*bundle.Frame); ok {
			break // the connection has been taken over
		}
	}
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	d.handler.Drain(ended)
	if _, err := io.Copy(io.Discard, resp.Body); !errors.Is(err, io.ErrUnexpectedEOF) && !isReset(err) {
		t.Errorf("the rest of the stream: %v", err)
	}
	// None is taken over any more.
	resp = d.post(t, context.Background(), bundle.PullPath, req)
	if b, err := io.ReadAll(resp.Body); err == nil {
		t.Errorf("a stream of %d bytes after Drain, and no error", len(b))
	}
}

func isReset(err error) bool {
	var op *net.OpError
	return errors.As(err, &op)
}

// One connection serves one pull after the other, and other requests.
func TestDirectAgain(t *testing.T) {
	dir, err := objects.OpenDir(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	s := start(t, dir)
	s.image(t, "r", "1", version(1), ocispec.ImageConfig{})
	d, l := direct(t, s.World)
	c, err := net.Dial("tcp", strings.TrimPrefix(d.url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	req := request("r", "1")
	req.Versions = []int{bundle.Version}
	in := bufio.NewReader(c)
	var first int
	for i := range 3 {
		for path, body := range map[string][]byte{bundle.PullPath: mustJSON(req), bundle.WarmPath: mustJSON(bundle.Warm{Bytes: 1000})} {
			r, err := http.NewRequest(http.MethodPost, d.url+path, bytes.NewReader(body))
			if err != nil {
				t.Fatal(err)
			}
			if err := r.Write(c); err != nil {
				t.Fatal(err)
			}
			resp, err := http.ReadResponse(in, r)
			if err != nil {
				t.Fatal(err)
			}
			b, err := io.ReadAll(resp.Body)
			if err != nil || resp.StatusCode != http.StatusOK || resp.Close {
				t.Fatalf("%s %d: %s, %d bytes, %v", path, i, resp.Status, len(b), err)
			}
			if path == bundle.PullPath {
				first = cmp.Or(first, len(b))
				if len(b) != first {
					t.Errorf("pull %d has %d bytes, the first had %d", i, len(b), first)
				}
			}
		}
	}
	for range 3 {
		<-l.back
	}
}

// A client that closes after the answer gets it whole.
func TestDirectClose(t *testing.T) {
	dir, err := objects.OpenDir(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	s := start(t, dir)
	s.image(t, "r", "1", version(1), ocispec.ImageConfig{})
	d, l := direct(t, s.World)
	req := request("r", "1")
	req.Versions = []int{bundle.Version}
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, d.url+bundle.PullPath, bytes.NewReader(mustJSON(req)))
	if err != nil {
		t.Fatal(err)
	}
	r.Close = true
	resp, err := d.client.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if _, err := io.Copy(io.Discard, resp.Body); err != nil {
		t.Error(err)
	}
	d.handler.Drain(t.Context())
	if len(l.back) != 0 {
		t.Error("a connection that the client closes was given back")
	}
}
