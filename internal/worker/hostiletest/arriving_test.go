package hostiletest

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc/toctest"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/bundletest"
)

// container makes a container of an image, and returns what reads a file in it.
func (w *worker) container(id, ref string) (read func(name string) (string, error)) {
	w.t.Helper()
	c, err := w.n.CreateContainer(w.t.Context(), api.ContainerRequest{ID: id, Ref: ref})
	if err != nil {
		w.t.Fatal(err)
	}
	return func(name string) (string, error) {
		b, err := os.ReadFile(filepath.Join(c.Rootfs, name))
		return string(b), err
	}
}

// What an image has borrowed was hashed whole, and stays, whatever is found out of the one that lent it, and whether that
// is removed or not: while the image arrives, and after that.
func TestWhatALiarHasLentStays(t *testing.T) {
	for name, what := range map[string]struct{ found, removed, restarted bool }{
		"found out":                         {found: true},
		"found out, and a restart":          {found: true, restarted: true},
		"found out, removed":                {found: true, removed: true},
		"found out, removed, and a restart": {true, true, true},
		"removed":                           {removed: true},
		"removed, and a restart":            {removed: true, restarted: true},
	} {
		t.Run(name, func(t *testing.T) {
			onGates(t, func(t *testing.T, w *worker) {
				s := bundletest.New(t)
				common := toctest.Blob(7, 9000)
				good := bundletest.NewImage(t, toctest.Files{"common": common, "own": toctest.Blob(3, 5000)})
				liar := bundletest.NewImage(t, toctest.Files{"common": common, "program": toctest.Blob(666, 3<<20)})
				falsely(t, liar, "program", segment.Sum([]byte("another content")))
				bad := s.Serve("bad:1", liar)
				s.SetLimit(1)
				lies := make(chan error, 1)
				go func() { lies <- w.pull(bad, api.Complete) }()
				s.Change("bad", func(st *bundletest.Stream) { st.Limited, st.Limit = true, 1 })
				w.eventually(func() bool { return w.here(bad) >= int64(len(common)) })

				s.SetLimit(0)
				ref := s.Serve("good:1", good)
				w.mustPull(ref, api.Mounted)
				if rec := w.records(ref); len(rec.Arenas) != 2 {
					t.Fatalf("it borrows nothing: %v", rec.Arenas)
				}
				read := w.container("c", ref)
				if what.found {
					s.Change("bad", func(st *bundletest.Stream) { st.Limit = -1 })
					if err := <-lies; err == nil || !strings.Contains(err.Error(), "hashed whole") {
						t.Errorf("the liar's pull ends with %v", err)
					}
				}
				if what.removed {
					if err := w.n.RemoveImage(t.Context(), bad); err != nil {
						t.Fatal(err)
					}
				}
				if what.restarted {
					w.restart()
				}
				reads := func() {
					t.Helper()
					for name, want := range good.Files {
						if got, err := read(name); err != nil || got != want {
							t.Errorf("%s is %.40q, %v", name, got, err)
						}
					}
				}
				s.SetLimit(-1)
				w.mustPull(ref, api.Complete)
				reads()
				w.right(ref)
				if !what.removed {
					if err := w.n.RemoveImage(t.Context(), bad); err != nil {
						t.Fatal(err)
					}
				}
				reads()
				w.restart()
				reads()
				w.right(ref)
				if err := w.n.RemoveContainer(t.Context(), "c"); err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// A rootfs that a liar's pull fills, of an image of which it sends nothing, is an honest image's as well: when the liar has
// failed the honest pull goes on, and reads of its containers have waited.
func TestALiarThatFailsIsNobodyElsesError(t *testing.T) {
	onGates(t, func(t *testing.T, w *worker) {
		s := bundletest.New(t)
		good := private(t)
		liar := good.Clone(t)
		clear(liar.Data)
		held := make(chan struct{})
		liar.Lies.Before = func(section string, _ int, _ *bundle.Writer) bool {
			if section == "plan" {
				<-held
			}
			return true
		}
		bad, ref := s.Serve("bad:1", liar), s.Serve("good:1", good)
		w.mustPull(bad, api.Mounted)
		w.mustPull(ref, api.Mounted)
		read := w.container("c", ref)
		var begun, ended = make(chan struct{}), make(chan error, 1)
		go func() {
			close(begun)
			got, err := read("program")
			if err == nil && got != good.Files["program"] {
				t.Error("other bytes")
			}
			ended <- err
		}()
		<-begun
		w.eventually(func() bool { return w.waits(bad) > 0 })
		close(held)
		if err := <-ended; err != nil {
			t.Errorf("a read of the honest image: %v", err)
		}
		w.mustPull(ref, api.Complete)
		w.reads(ref, "secret", secret)
		w.right(ref)
		if err := w.n.RemoveContainer(t.Context(), "c"); err != nil {
			t.Error(err)
		}
	})
}

// waits is how many reads wait for what the pull of an image brings, or have waited.
func (w *worker) waits(ref string) int {
	w.t.Helper()
	report, err := w.n.PullReport(w.t.Context(), ref)
	if err != nil {
		w.t.Fatal(err)
	}
	return len(report.Reads)
}
