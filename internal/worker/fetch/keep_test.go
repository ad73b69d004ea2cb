package fetch

import (
	"context"
	"testing"

	"hydrofoil.dev/foil/internal/format/trace"
	"hydrofoil.dev/foil/internal/worker/arena"
)

// keptImage has a startup set of which the second frame holds filled pages, all of
// them of one content.
func keptImage(t *testing.T) (m *image, content uint32) {
	m = newImage(t, append(files(10), blob(98, 6000), blob(99, 4<<20))...)
	content = m.Index(blob(99, 4<<20))
	m.Startup = [][]trace.Run{{{Content: m.Index(blob(98, 6000)), First: 0, Blocks: 2}}, nil}
	for first := uint32(100); first < 140; first += 8 { // and between them others
		m.Startup[1] = append(m.Startup[1], trace.Run{Content: content, First: first, Blocks: 4})
	}
	m.Filled = 1
	return m, content
}

// TestKeepFilled: of filled pages what is read is written, and the rest when the start is over.
func TestKeepFilled(t *testing.T) {
	m, content := keptImage(t)
	with(t, m, func(t *testing.T, s *server, w *worker) {
		h := holding(t, s, w, nil)
		base, _ := h.a.Layout().Offset(int(content))
		at := func(page int64) int64 { return base + page*arena.BlockSize }
		if h.a.Present(at(100), 1) || h.a.Present(at(139), 1) {
			t.Error("filled pages are written that nobody reads")
		}
		if n := h.Progress().Startup.Raw; n != 6000 {
			t.Errorf("%d bytes of pages are written", n)
		}
		h.miss(t, at(109))
		if !h.a.Present(at(108), 4*arena.BlockSize) || h.a.Present(at(100), 1) || h.a.Present(at(116), 1) {
			t.Error("what was read is not what is written")
		}
		if n := h.Progress().Written; n != 6000+4*arena.BlockSize {
			t.Errorf("%d bytes are written", n)
		}
		if v := h.state(); v.Misses != 0 || v.Kept != 1 {
			t.Errorf("%d misses, %d frames kept", v.Misses, v.Kept)
		}
		// What was not sent is promoted; of what comes with it a part is written.
		h.miss(t, at(500))
		if h.a.Present(at(400), 200*arena.BlockSize) {
			t.Error("all of the frames that a miss brought is written")
		}
		if n := h.state().Misses; n != 1 {
			t.Errorf("%d misses", n)
		}
		// A read of both: a filled page, and the one after it.
		h.miss(t, at(103))
		if err := h.Need(context.Background(), h.a, at(103), 2*arena.BlockSize); err != nil {
			t.Fatal(err)
		}
		h.Release()
		h.end(t, w)
		if n := h.Progress().Startup.Raw; n != 6000+20*arena.BlockSize {
			t.Errorf("%d bytes of pages were written", n)
		}
	})
}

// TestKeepNothing: who is not held back has all written as it comes.
func TestKeepNothing(t *testing.T) {
	m, content := keptImage(t)
	with(t, m, func(t *testing.T, s *server, w *worker) {
		h := holding(t, s, w, func(o *Options) { o.Hold = 0 })
		base, _ := h.a.Layout().Offset(int(content))
		if !h.a.Present(base+108*arena.BlockSize, 4*arena.BlockSize) {
			t.Error("filled pages are not written")
		}
		h.end(t, w)
	})
}

// TestKeepDamaged: a damaged frame that was kept is noticed when it is read, and comes again.
func TestKeepDamaged(t *testing.T) {
	m, content := keptImage(t)
	for name, read := range map[string]bool{"read": true, "not read": false} {
		t.Run(name, func(t *testing.T) {
			with(t, m, func(t *testing.T, s *server, w *worker) {
				s.Scripts = []script{{Pages: damagePages(1)}}
				h := holding(t, s, w, nil)
				if read {
					base, _ := h.a.Layout().Offset(int(content))
					h.miss(t, base+109*arena.BlockSize)
				}
				h.Release()
				h.end(t, w)
				if n := h.Progress().Damaged; n != 1 {
					t.Errorf("%d damaged frames", n)
				}
			})
		})
	}
}

// TestKeepStopped: what is kept is written, or let go, before the pull has ended.
func TestKeepStopped(t *testing.T) {
	m, _ := keptImage(t)
	with(t, m, func(t *testing.T, s *server, w *worker) {
		h := holding(t, s, w, nil)
		h.Stop()
		if err := h.Wait(); err == nil {
			t.Error("no error")
		}
		if n := h.state().Kept; n > 0 {
			t.Errorf("%d frames are kept", n)
		}
	})
}
