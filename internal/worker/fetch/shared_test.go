package fetch

import (
	"testing"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/trace"
)

// TestStartupInPlaceElsewhere has a startup set bring a content that its own image uses
// in place from elsewhere, and that another image of the pull wants: nobody has the
// pages, and the plan leaves it out. Then it is asked for without sets, once, and the pull
// does not go on for ever.
func TestStartupInPlaceElsewhere(t *testing.T) {
	shared := blob(100, 40_000)
	a, b := newImage(t, "a", append(files(5), shared)...), newImage(t, "b", append(files(3), shared, blob(7, 9000))...)
	a.startup = [][]trace.Run{{{Content: a.index(shared), First: 0, Blocks: 10}}}
	with(t, []*image{a, b}, func(t *testing.T, s *server, w *worker) {
		w.in = func(m *image, content int) bool { return m != a || uint32(content) != a.index(shared) }
		c := s.client(t, ClientOptions{})
		defer c.Close()
		if err := Start(t.Context(), startupOptions(w, c, 2)).Wait(); err != nil {
			t.Fatal(err)
		}
		w.check()
		if len(s.requests) != 2 {
			t.Fatalf("%d requests", len(s.requests))
		}
		for i, want := range []bool{true, false} {
			for _, v := range s.requests[i].Images {
				if v.Startup != want {
					t.Errorf("request %d: %+v", i, v)
				}
			}
		}
		var brought *bundle.Have
		for i, h := range s.requests[1].Have {
			if h.ChainID == b.ChainID {
				brought = &s.requests[1].Have[i]
			}
		}
		if brought == nil {
			t.Error("the second request does not say what has arrived")
		}
	})
}
