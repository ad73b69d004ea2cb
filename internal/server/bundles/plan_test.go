package bundles_test

import (
	"errors"
	"io"
	"slices"
	"testing"
	"time"

	"hydrofoil.dev/foil/internal/format/bundle"
)

// TestEarlyPlan: the plan goes among the pages of a startup set, and what is promoted then goes before
// the rest of them; nothing else does, and who does not take that does not get it.
func TestEarlyPlan(t *testing.T) {
	s := start(t, nil)
	s.fortyFiles(t, "serve", 20)

	late := s.slow(t, startupRequest("app", "1", []string{"serve"}))
	next[*bundle.Hello](t, late)
	next[*bundle.Image](t, late)
	for range next[*bundle.Startup](t, late).Frames {
		next[*bundle.Pages](t, late)
	}
	want := len(next[*bundle.Plan](t, late).Frames)

	req := startupRequest("app", "1", []string{"serve"})
	req.EarlyPlan = true
	early := s.slow(t, req)
	hello := next[*bundle.Hello](t, early)
	next[*bundle.Image](t, early)
	left := len(next[*bundle.Startup](t, early).Frames)
	var frames uint32
	for frames == 0 {
		section, err := early.Next()
		if err != nil {
			t.Fatal(err)
		}
		switch v := section.(type) {
		case *bundle.Pages:
			if left--; left == 0 {
				t.Fatal("all pages came before the plan")
			}
			time.Sleep(10 * time.Millisecond) // it takes less to make the plan than to send the set
		case *bundle.Plan:
			frames = uint32(len(v.Frames))
		default:
			t.Fatalf("a section %T", section)
		}
	}
	if int(frames) != want {
		t.Errorf("a plan of %d frames, after the pages one of %d", frames, want)
	}
	promoted := []uint32{frames - 1, frames / 2}
	s.promotion(t, bundle.Promotion{Stream: hello.Stream, Frames: promoted})
	var got []uint32
	for left > 0 || len(got) < int(frames) {
		section, err := early.Next()
		if err != nil {
			t.Fatal(err)
		}
		switch v := section.(type) {
		case *bundle.Pages:
			left--
		case *bundle.Frame:
			got = append(got, v.Index)
			if len(got) == len(promoted) && (left == 0 || !slices.Equal(got, promoted)) {
				t.Errorf("first came frames %v, %d pages before the end of the set; want %v early", got, left, promoted)
			}
			if left > 0 && len(got) > len(promoted) {
				t.Errorf("frame %d, which nobody promoted, came among the pages", v.Index)
			}
		default:
			t.Fatalf("a section %T", section)
		}
	}
	slices.Sort(got)
	if len(slices.Compact(got)) != int(frames) {
		t.Errorf("frames %v", got)
	}
	if section, err := early.Next(); !errors.Is(err, io.EOF) {
		t.Errorf("%T, %v", section, err)
	}
}
