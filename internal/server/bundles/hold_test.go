package bundles_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"testing"
	"time"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/server/objects"
	"hydrofoil.dev/foil/internal/server/planner/plannertest"
)

// holding is a stream that has come as far as its plan.
type holding struct {
	*bundle.Reader
	stream string
	frames uint32
}

// holding asks for an image of 20 files, with the set of a service that touches
// two of them; release: before its plan has come.
func (s *server) holding(t *testing.T, req *bundle.Request, release bool) *holding {
	t.Helper()
	req.Versions = []int{bundle.Version}
	resp := s.post(t, context.Background(), bundle.PullPath, req)
	if resp.StatusCode != http.StatusOK {
		t.Fatal(resp.Status)
	}
	h := &holding{Reader: bundle.NewReader(resp.Body, bundle.ReaderOptions{Request: req})}
	for {
		section, err := h.Next()
		if err != nil {
			t.Fatal(err)
		}
		switch v := section.(type) {
		case *bundle.Hello:
			h.stream = v.Stream
			if release {
				s.promotion(t, bundle.Promotion{Stream: h.stream, Release: true})
			}
		case *bundle.Plan:
			h.frames = uint32(len(v.Frames))
			return h
		}
	}
}

func (s *server) promotion(t *testing.T, p bundle.Promotion) {
	t.Helper()
	if resp := s.post(t, context.Background(), bundle.PromotePath, p); resp.StatusCode != http.StatusNoContent {
		t.Fatal(resp.Status)
	}
}

// next returns the next frame.
func (h *holding) next(t *testing.T) uint32 {
	t.Helper()
	section, err := h.Next()
	if err != nil {
		t.Fatal(err)
	}
	f, ok := section.(*bundle.Frame)
	if !ok {
		t.Fatalf("a section %T", section)
	}
	return f.Index
}

// rest reads to the end, and wants all frames that are not in got.
func (h *holding) rest(t *testing.T, got ...uint32) {
	t.Helper()
	for range int(h.frames) - len(got) {
		got = append(got, h.next(t))
	}
	slices.Sort(got)
	if len(slices.Compact(got)) != int(h.frames) {
		t.Errorf("frames %v", got)
	}
	if section, err := h.Next(); !errors.Is(err, io.EOF) {
		t.Errorf("%T, %v", section, err)
	}
}

// TestHold: what was asked to be held back is, but for what is promoted.
func TestHold(t *testing.T) {
	dir, err := objects.OpenDir(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	s := start(t, dir)
	files := plannertest.Files{}
	for i := range 20 {
		files[fmt.Sprintf("/f%02d", i)] = text(uint64(10+i), 200_000)
	}
	_, x := s.image(t, "app", "1", files, ocispec.ImageConfig{})
	s.record(t, "app", "1", x, []string{"serve"}, pagesOf(t, x, "/f00", 0, 0), pagesOf(t, x, "/f01", 0, 10))
	ask := func(hold time.Duration) *bundle.Request {
		req := startupRequest("app", "1", []string{"serve"})
		req.Hold = hold
		return req
	}
	t.Run("released", func(t *testing.T) {
		h := s.holding(t, ask(bundle.MaxHold), false)
		var got []uint32
		// Their neighbours in the pack do not come along.
		for _, f := range []uint32{h.frames - 4, 3, h.frames - 2, 4} {
			s.promotion(t, bundle.Promotion{Stream: h.stream, Frames: []uint32{f}})
			if n := h.next(t); n != f {
				t.Fatalf("frame %d, promoted was %d", n, f)
			}
			got = append(got, f)
		}
		s.promotion(t, bundle.Promotion{Stream: h.stream, Frames: []uint32{h.frames - 1}, Release: true})
		if n := h.next(t); n != h.frames-1 {
			t.Errorf("frame %d, promoted was %d", n, h.frames-1)
		}
		h.rest(t, append(got, h.frames-1)...)
	})
	t.Run("released before", func(t *testing.T) { s.holding(t, ask(bundle.MaxHold), true).rest(t) })
	t.Run("for some time", func(t *testing.T) { s.holding(t, ask(10*time.Millisecond), false).rest(t) })
	t.Run("all promoted", func(t *testing.T) {
		h := s.holding(t, ask(bundle.MaxHold), false)
		var all []uint32
		for f := range h.frames {
			all = append(all, f)
		}
		s.promotion(t, bundle.Promotion{Stream: h.stream, Frames: all})
		h.rest(t)
	})
	t.Run("no set", func(t *testing.T) {
		req := ask(bundle.MaxHold)
		req.Image.Startup = false
		s.holding(t, req, false).rest(t)
	})
	t.Run("a set of other services", func(t *testing.T) {
		req := ask(bundle.MaxHold)
		req.Image.Entrypoint = []string{"another"}
		s.holding(t, req, false).rest(t)
	})
	t.Run("a header only", func(t *testing.T) {
		req := ask(bundle.MaxHold)
		req.Image.Header = true
		s.holding(t, req, false).rest(t)
	})
}

// TestRest: a stream that is told to rest sends what is promoted, and goes on by itself.
func TestRest(t *testing.T) {
	dir, err := objects.OpenDir(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	s := start(t, dir)
	files := plannertest.Files{}
	for i := range 20 {
		files[fmt.Sprintf("/f%02d", i)] = text(uint64(10+i), 200_000)
	}
	s.image(t, "app", "1", files, ocispec.ImageConfig{})
	req := request("app", "1")
	req.Choose = true // nothing is sent before
	h := s.holding(t, req, false)
	s.promotion(t, bundle.Promotion{Stream: h.stream, Rest: bundle.MaxRest})
	s.promotion(t, bundle.Promotion{Stream: h.stream, Frames: []uint32{h.frames - 1}, Number: 1, Chosen: true})
	if n := h.next(t); n != h.frames-1 {
		t.Errorf("frame %d, promoted was %d", n, h.frames-1)
	}
	h.rest(t, h.frames-1)
	for _, d := range []time.Duration{-1, bundle.MaxRest + 1} {
		h := s.holding(t, req, false)
		if resp := s.post(t, t.Context(), bundle.PromotePath, bundle.Promotion{Stream: h.stream, Rest: d}); resp.StatusCode != http.StatusBadRequest {
			t.Errorf("a rest of %v is answered with %s", d, resp.Status)
		}
		s.promotion(t, bundle.Promotion{Stream: h.stream, Chosen: true})
		h.rest(t)
	}
}

// TestChoose: a stream waits for the worker's choice, then sends what was not skipped.
func TestChoose(t *testing.T) {
	dir, err := objects.OpenDir(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	s := start(t, dir)
	files := plannertest.Files{}
	for i := range 20 {
		files[fmt.Sprintf("/f%02d", i)] = text(uint64(10+i), 200_000)
	}
	s.image(t, "app", "1", files, ocispec.ImageConfig{})
	req := request("app", "1")
	req.Choose = true
	h := s.holding(t, req, false)
	s.promotion(t, bundle.Promotion{Stream: h.stream, Frames: []uint32{3}, Number: 1})
	if n := h.next(t); n != 3 {
		t.Errorf("frame %d, promoted was 3", n)
	}
	var skip []uint32
	for f := uint32(1); f < h.frames; f++ {
		skip = append(skip, f)
	}
	s.promotion(t, bundle.Promotion{Stream: h.stream, Frames: []uint32{2}, Number: 2})
	if n := h.next(t); n != 2 {
		t.Errorf("frame %d, promoted was 2", n)
	}
	s.promotion(t, bundle.Promotion{Stream: h.stream, Skip: skip, Chosen: true})
	if n := h.next(t); n != 0 {
		t.Errorf("frame %d, all but 0 were skipped or sent", n)
	}
	if section, err := h.Next(); !errors.Is(err, io.EOF) {
		t.Errorf("%T, %v", section, err)
	}
	resp := s.post(t, context.Background(), bundle.PromotePath, bundle.Promotion{Stream: h.stream})
	if resp.StatusCode != http.StatusNotFound {
		t.Errorf("a stream of which the rest was skipped has not ended: %s", resp.Status)
	}
}
