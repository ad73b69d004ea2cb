package upstream_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/objects"
	"hydrofoil.dev/foil/internal/server/upstream"
	"hydrofoil.dev/foil/internal/server/upstream/upstreamtest"
)

// cutter lets through so many bytes of a body.
type cutter struct {
	http.ResponseWriter
	left int
}

func (c *cutter) Write(p []byte) (int, error) {
	n, err := c.ResponseWriter.Write(p[:min(len(p), c.left)])
	if c.left -= n; c.left == 0 && err == nil {
		_ = http.NewResponseController(c.ResponseWriter).Flush() // they arrive
		panic(http.ErrAbortHandler)
	}
	return n, err
}

// breakable is an upstream whose blobs break after a number of bytes.
func breakable(t *testing.T, after func(n int) int, ranges bool) (up *upstreamtest.Registry, gets func() []string) {
	up = upstreamtest.New()
	var mu sync.Mutex
	var asked []string
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if req.Method == "GET" && strings.Contains(req.URL.Path, "/blobs/") {
			mu.Lock()
			asked = append(asked, req.Header.Get("Range"))
			n := after(len(asked))
			mu.Unlock()
			if !ranges {
				req.Header.Del("Range")
			}
			if n > 0 {
				w = &cutter{w, n}
			}
		}
		up.ServeHTTP(w, req)
	}))
	t.Cleanup(s.Close)
	up.URL = s.URL
	return up, func() []string {
		mu.Lock()
		defer mu.Unlock()
		return asked
	}
}

func TestResume(t *testing.T) {
	b := noise(1_000_000)
	for _, ranges := range []bool{true, false} {
		t.Run(fmt.Sprint("ranges ", ranges), func(t *testing.T) {
			// It breaks more often than what brings nothing is tried.
			up, gets := breakable(t, func(n int) int {
				switch {
				case n > 8:
					return 0
				case ranges:
					return 120_000
				}
				return n * 110_000
			}, ranges)
			d := up.Blob("app", b)
			f := start(t, upstream.Options{URL: up.URL})
			if got := f.get("app/blobs/" + d.String()); !bytes.Equal(got, b) {
				t.Error("other bytes came")
			}
			if n := len(gets()); n != 9 {
				t.Errorf("asked %d times: %q", n, gets())
			}
			for i, r := range gets()[1:] {
				if !strings.HasPrefix(r, "bytes=") || r == "bytes=0-" {
					t.Errorf("request %d asked for the range %q", i+1, r)
				}
			}
		})
	}
}

// One that breaks without bringing anything is given up; what came stays for
// the next accelerator.
func TestResumeLater(t *testing.T) {
	b := noise(500_000)
	for _, damaged := range []bool{false, true} {
		t.Run(fmt.Sprint("damaged ", damaged), func(t *testing.T) {
			var sound sync.Map
			up, gets := breakable(t, func(n int) int {
				if _, ok := sound.Load(0); ok {
					return 0
				}
				if n == 1 {
					return 200_000
				}
				return 1
			}, true)
			up.Intercept(func(w http.ResponseWriter, req *http.Request) bool {
				if _, ok := sound.Load(0); !ok && req.Header.Get("Range") != "" {
					panic(http.ErrAbortHandler)
				}
				return false
			})
			d := up.Blob("app", b)
			f := start(t, upstream.Options{URL: up.URL})
			if a := f.do("GET", "app/blobs/"+d.String()); a.status == 200 && a.err == nil {
				t.Fatalf("a blob of %d bytes came whole from an upstream that breaks", len(a.body))
			}
			if err := f.Close(); err != nil {
				t.Fatal(err)
			}
			part := filepath.Join(f.dir, "fetching", strings.Replace(d.String(), ":", "-", 1))
			left, err := os.ReadFile(part)
			if err != nil || len(left) == 0 || !bytes.HasPrefix(b, left) {
				t.Fatalf("%d bytes were left, %v", len(left), err)
			}
			if damaged {
				left[100] ^= 1
				if err := os.WriteFile(part, left, 0o600); err != nil {
					t.Fatal(err)
				}
			}
			sound.Store(0, 0)
			before := len(gets())
			f.launch(upstream.Options{URL: up.URL, Dir: filepath.Join(f.dir, "fetching"), Catalog: f.local, Objects: f.store, Log: slog.New(slog.NewTextHandler(t.Output(), nil))})
			a := f.do("GET", "app/blobs/"+d.String())
			if damaged && a.err == nil && !bytes.Equal(a.body, b) {
				t.Fatalf("other bytes came whole")
			}
			// Who had read some of what was wrong reads again.
			if got := f.get("app/blobs/" + d.String()); !bytes.Equal(got, b) {
				t.Error("other bytes came")
			}
			asked := gets()[before:]
			if want := fmt.Sprintf("bytes=%d-", len(left)); asked[0] != want {
				t.Errorf("the first request was for the range %q, want %q", asked[0], want)
			}
			// A reader that leaves ends the download, and the next goes on with what
			// came: how many resume it is a matter of time.
			if again := slices.Contains(asked, ""); again != damaged {
				t.Errorf("the blob was asked for from its start: %v, want %v; ranges asked for: %q", again, damaged, asked)
			}
		})
	}
}

// What a download brought is kept for the next one, but not when whoever read it
// found the disk full.
func TestFullDiskKeepsNothing(t *testing.T) {
	for _, c := range []struct {
		name string
		err  error
		kept bool
	}{
		{"full", fmt.Errorf("write pack: %w", syscall.ENOSPC), false},
		{"quota", fmt.Errorf("write pack: %w", syscall.EDQUOT), false},
		{"other", errors.New("the client went away"), true},
	} {
		t.Run(c.name, func(t *testing.T) {
			up := upstreamtest.Start(t)
			b := noise(400_000)
			d := up.Blob("app", b)
			f := start(t, upstream.Options{URL: up.URL})
			f.do("HEAD", "app/blobs/"+d.String()) // the repository is known to hold it
			up.Intercept(func(w http.ResponseWriter, req *http.Request) bool {
				w.Header().Set("Content-Length", strconv.Itoa(len(b)))
				_, _ = w.Write(b[:100_000])
				_ = http.NewResponseController(w).Flush()
				<-req.Context().Done()
				return true
			})
			fetching := filepath.Join(f.dir, "fetching")
			earlier := filepath.Join(fetching, "sha256-0123")
			if err := os.WriteFile(earlier, []byte("of a download that broke off"), 0o600); err != nil {
				t.Fatal(err)
			}
			release := f.Want(t.Context(), []digest.Digest{d})
			r, err := f.Store().Open(t.Context(), catalog.BlobKey(d), 0, -1)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := io.ReadFull(r, make([]byte, 100_000)); err != nil {
				t.Fatal(err)
			}
			if err := r.Close(); err != nil {
				t.Fatal(err)
			}
			f.Full(c.err)
			release()
			if err := f.Close(); err != nil { // the download has ended
				t.Fatal(err)
			}
			left, err := os.ReadDir(fetching)
			if want := map[bool]int{true: 2}[c.kept]; err != nil || len(left) != want {
				t.Errorf("left behind: %v, %v, want %d files", left, err, want)
			}
		})
	}
}

// Nobody gets a blob with another digest whole, and it is not kept.
func TestWrongBlob(t *testing.T) {
	up := upstreamtest.Start(t)
	b := noise(400_000)
	d := up.Blob("app", b)
	bad := bytes.Clone(b)
	bad[399_999] ^= 1
	up.Intercept(func(w http.ResponseWriter, req *http.Request) bool {
		if req.Method != "GET" {
			return false
		}
		w.Header().Set("Content-Length", strconv.Itoa(len(bad)))
		_, _ = w.Write(bad)
		return true
	})
	f := start(t, upstream.Options{URL: up.URL})
	if a := f.do("GET", "app/blobs/"+d.String()); a.status == 200 && a.err == nil {
		t.Errorf("%d wrong bytes were served as a whole", len(a.body))
	} else if len(a.body) == len(b) {
		t.Error("the last byte was sent")
	}
	// On a busy machine the answer may come in two pieces, and then it is begun again.
	if log := f.log.String(); !strings.Contains(log, "its bytes have the digest "+digest.FromBytes(bad).String()) && !strings.Contains(log, "put together are wrong") {
		t.Error("the log does not say what is wrong")
	}
	if _, err := f.store.Stat(t.Context(), catalog.BlobKey(d)); !errors.Is(err, objects.ErrNotFound) {
		t.Errorf("the object: %v, want none", err)
	}
	up.Intercept(nil)
	if got := f.get("app/blobs/" + d.String()); !bytes.Equal(got, b) {
		t.Error("other bytes came")
	}
}

// A download that brings nothing is begun again where it is.
func TestStall(t *testing.T) {
	up := upstreamtest.Start(t)
	b := noise(300_000)
	d := up.Blob("app", b)
	up.Intercept(func(w http.ResponseWriter, req *http.Request) bool {
		if req.Method != "GET" || req.Header.Get("Range") != "" {
			return false
		}
		w.Header().Set("Content-Length", strconv.Itoa(len(b)))
		_, _ = w.Write(b[:100_000])
		_ = http.NewResponseController(w).Flush()
		<-req.Context().Done()
		return true
	})
	f := start(t, upstream.Options{URL: up.URL, Stall: 500 * time.Millisecond})
	if got := f.get("app/blobs/" + d.String()); !bytes.Equal(got, b) {
		t.Error("other bytes came")
	}
}

// A hundred clients at once are one download.
func TestSingleFlight(t *testing.T) {
	up := upstreamtest.Start(t)
	blob := layerOf(t, string(noise(400_000)))
	desc := up.Image("app", "1", blob)
	f := start(t, upstream.Options{URL: up.URL})
	var wg sync.WaitGroup
	for range 100 {
		wg.Go(func() {
			a := f.do("GET", "app/manifests/1")
			if digest.FromBytes(a.body) != desc.Digest {
				t.Errorf("another manifest: %d", a.status)
			}
			if a := f.do("GET", "app/blobs/"+blob.Digest.String()); !bytes.Equal(a.body, blob.Bytes) {
				t.Errorf("another blob: %d, %v", a.status, a.err)
			}
		})
	}
	wg.Wait()
	wantCount(t, up, "GET manifests", 1)
	wantCount(t, up, "HEAD blobs", 1)
	wantCount(t, up, "GET blobs", 1)
}

// A reader that goes leaves the download to the others; when all have gone it
// ends, and the next one goes on with it.
func TestLeave(t *testing.T) {
	up := upstreamtest.Start(t)
	b := noise(300_000)
	d := up.Blob("app", b)
	ended := make(chan struct{})
	up.Intercept(func(w http.ResponseWriter, req *http.Request) bool {
		if req.Method != "GET" || req.Header.Get("Range") != "" {
			return false
		}
		w.Header().Set("Content-Length", strconv.Itoa(len(b)))
		_, _ = w.Write(b[:100_000])
		_ = http.NewResponseController(w).Flush()
		<-req.Context().Done()
		close(ended)
		return true
	})
	f := start(t, upstream.Options{URL: up.URL})
	if _, err := f.Catalog().Blob(t.Context(), "app", d); err != nil {
		t.Fatal(err)
	}
	open := func() io.ReadCloser {
		t.Helper()
		r, err := f.Store().Open(t.Context(), catalog.BlobKey(d), 0, -1)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	one, two := open(), open()
	one.Close()
	buf := make([]byte, 50_000)
	if _, err := io.ReadFull(two, buf); err != nil || !bytes.Equal(buf, b[:50_000]) {
		t.Fatalf("the reader that stays: %v", err)
	}
	select {
	case <-ended:
		t.Error("the download ended while it was read")
	default:
	}
	two.Close()
	two.Close() // no harm
	<-ended
	three := open()
	defer three.Close()
	if got, err := io.ReadAll(three); err != nil || !bytes.Equal(got, b) {
		t.Errorf("the next reader: %v", err)
	}
}
