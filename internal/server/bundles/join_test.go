package bundles_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"testing"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/format/trace"
	"hydrofoil.dev/foil/internal/server/planner/plannertest"
)

// TestStartupSetOnly: who asks for no more than a header gets a startup set with
// it, of what is lacking, and no frames.
func TestStartupSetOnly(t *testing.T) {
	s := start(t, nil)
	files := version(1)
	_, x := s.image(t, "app", "1", files, ocispec.ImageConfig{})
	r, err := s.Catalog.Rootfs(context.Background(), x.ChainID)
	if err != nil {
		t.Fatal(err)
	}
	sh, big, passwd := pagesOf(t, x, "/bin/sh", 0, 0), pagesOf(t, x, "/var/big", 10, 20), pagesOf(t, x, "/etc/passwd", 0, 0)
	s.record(t, "app", "1", x, []string{"second"}, sh, big, passwd)
	present := make([]byte, (len(x.Segments)+7)/8)
	i, _ := x.Lookup("/bin/sh")
	for _, seg := range x.SegmentsOf(i) {
		n := slices.IndexFunc(x.Segments, func(o toc.Segment) bool { return o.ID == seg.ID })
		present[n/8] |= 1 << (n % 8)
	}
	for name, c := range map[string]struct {
		have []bundle.Have
		want []trace.Run
	}{
		"nothing": {nil, []trace.Run{sh, big, passwd}},
		"some": {
			[]bundle.Have{{ChainID: x.ChainID, TOC: r.TOC, Present: present, Pages: trace.AppendRuns(nil, []trace.Run{big})}},
			[]trace.Run{passwd},
		},
		"all": {[]bundle.Have{{ChainID: x.ChainID, TOC: r.TOC}}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			req := startupRequest("app", "1", []string{"second"})
			req.Image.Header, req.Have = true, c.have
			p := s.pull(t, req, nil)
			if p.err != nil || len(p.startups) != 1 || len(p.plan.Frames) != 0 {
				t.Fatalf("%v: %d sets, plan %+v", p.err, len(p.startups), p.plan)
			}
			if got := trace.Merge(p.startups[0].Runs); !slices.Equal(got, trace.Merge(c.want)) {
				t.Errorf("got %v, want %v", got, c.want)
			}
		})
	}
}

// slowStream is an answer that is read section by section, and is sent no faster.
type slowStream struct {
	*bundle.Reader
	http.ResponseWriter
	w    *io.PipeWriter
	done chan struct{}
}

func (s *slowStream) Write(b []byte) (int, error) { return s.w.Write(b) }
func (s *slowStream) WriteHeader(int)             {}
func (s *slowStream) Flush()                      {}

func (s *server) slow(t *testing.T, req *bundle.Request) *slowStream {
	t.Helper()
	req.Versions = []int{bundle.Version}
	r, w := io.Pipe()
	v := &slowStream{ResponseWriter: httptest.NewRecorder(), w: w, done: make(chan struct{}), Reader: bundle.NewReader(r, bundle.ReaderOptions{Request: req})}
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		defer close(v.done)
		hr := httptest.NewRequest(http.MethodPost, bundle.PullPath, bytes.NewReader(mustJSON(req))).WithContext(ctx)
		s.handler.ServeHTTP(v, hr)
		w.Close()
	}()
	t.Cleanup(func() {
		cancel()
		r.Close()
		<-v.done
	})
	return v
}

// next reads the next section, which must be a T.
func next[T any](t *testing.T, s *slowStream) T {
	t.Helper()
	section, err := s.Next()
	if err != nil {
		t.Fatal(err)
	}
	v, ok := any(section).(T)
	if !ok {
		t.Fatalf("a section %T", section)
	}
	return v
}

// fortyFiles makes app:1, an image of forty large files, and records that a service touches the first
// so many of them.
func (s *server) fortyFiles(t *testing.T, service string, touches int) {
	t.Helper()
	files := plannertest.Files{}
	for i := range 40 {
		files[fmt.Sprintf("/f%02d", i)] = text(uint64(10+i), 200_000)
	}
	_, x := s.image(t, "app", "1", files, ocispec.ImageConfig{})
	var touched []trace.Run
	for i := range touches {
		touched = append(touched, pagesOf(t, x, fmt.Sprintf("/f%02d", i), 0, 0))
	}
	s.record(t, "app", "1", x, []string{service}, touched...)
}

// TestAhead has a stream wait for the startup set of another, but for what is
// promoted of it.
func TestAhead(t *testing.T) {
	s := start(t, nil)
	s.fortyFiles(t, "second", 6)

	first := s.slow(t, request("app", "1"))
	hello := next[*bundle.Hello](t, first)
	next[*bundle.Image](t, first)
	frames := next[*bundle.Plan](t, first).Frames

	req := startupRequest("app", "1", []string{"second"})
	req.Image.Header, req.Ahead = true, hello.Stream
	second := s.slow(t, req)
	next[*bundle.Hello](t, second)
	next[*bundle.Image](t, second)
	set := next[*bundle.Startup](t, second)
	if len(set.Frames) < 3 || len(frames) < 35 {
		t.Fatalf("the test wants more frames than %d and %d", len(set.Frames), len(frames))
	}
	next[*bundle.Pages](t, second)

	// The stream that waits sends what it had read, two runs, and what it was
	// about to read; then what is promoted, and nothing else.
	const ahead = 3 * 256 << 10
	var got []uint32
	promoted, others := map[uint32]bool{}, 0
	for k := uint32(len(frames)) - 1; k > uint32(len(frames))-20; k-- {
		promoted[k] = true
		if resp := s.post(t, context.Background(), bundle.PromotePath, bundle.Promotion{Stream: hello.Stream, Frames: []uint32{k}}); resp.StatusCode != http.StatusNoContent {
			t.Fatal(resp.Status)
		}
		for {
			f := next[*bundle.Frame](t, first)
			got = append(got, f.Index)
			if f.Index == k {
				break
			}
			if promoted[f.Index] {
				t.Fatalf("frame %d out of its turn", f.Index)
			}
			others += len(f.Data)
		}
	}
	if others > ahead {
		t.Errorf("%d bytes came between the startup set's, at most %d were on their way", others, ahead)
	}
	// Then all the rest, once.
	for range set.Frames[1:] {
		next[*bundle.Pages](t, second)
	}
	if p := next[*bundle.Plan](t, second); len(p.Frames) != 0 {
		t.Errorf("a plan of %d frames", len(p.Frames))
	}
	for range len(frames) - len(got) {
		got = append(got, next[*bundle.Frame](t, first).Index)
	}
	slices.Sort(got)
	if len(slices.Compact(got)) != len(frames) {
		t.Errorf("frames %v", got)
	}
	for _, v := range []*slowStream{first, second} {
		if section, err := v.Next(); !errors.Is(err, io.EOF) {
			t.Errorf("%T, %v", section, err)
		}
	}
}

// TestAheadOfNothing: a stream that has ended is waited for by nobody, and none
// goes ahead of itself.
func TestAheadOfNothing(t *testing.T) {
	s := start(t, nil)
	files := version(1)
	_, x := s.image(t, "app", "1", files, ocispec.ImageConfig{})
	s.record(t, "app", "1", x, []string{"second"}, pagesOf(t, x, "/bin/sh", 0, 0))
	req := startupRequest("app", "1", []string{"second"})
	req.Ahead = "gone"
	p := s.pull(t, req, nil)
	p.verify(t, x, files, nil)
}
