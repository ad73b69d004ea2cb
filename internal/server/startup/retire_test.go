package startup

import (
	"context"
	"runtime"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/trace"
	"hydrofoil.dev/foil/internal/server/catalog"
)

// stored returns the bytes of all objects of startup sets, and of the frames of those that serve.
func stored(t *testing.T, w *world, images ...*image) (objects, pages int64) {
	t.Helper()
	err := w.World.Objects.List(context.Background(), "startup/", func(_ string, size int64) error {
		objects += size
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range images {
		row, err := w.World.Catalog.StartupImage(context.Background(), m.Repository, m.Image.ChainID)
		if err != nil {
			t.Fatal(err)
		}
		s, err := w.open(context.Background(), row, m.x.Table())
		if err != nil {
			t.Fatal(err)
		}
		_, n := s.size()
		pages += n
	}
	return objects, pages
}

// What sets are kept in is at most a tenth more than their pages, compressed: also after many builds, in a while or when the server
// was started again.
func TestReplacedStoresGo(t *testing.T) {
	for name, retire := range map[string]time.Duration{"in a while": time.Millisecond, "at the next start": time.Hour} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.retireAfter = retire
			w.start(t)
			var images []*image
			for version := range uint64(3) {
				m := w.image(t, "r", string(rune('1'+version)), someFiles(1+version))
				blob := catalog.Blob{Digest: digest.FromString("a repository that there is"), Size: 1}
				if err := w.World.Catalog.LinkBlob(t.Context(), "r", blob); err != nil {
					t.Fatal(err)
				}
				for i := range uint32(4) {
					m.add(t, "a", m.trace(trace.Recorded, []string{"app"}, []trace.Run{m.run(t, "/usr/bin/app", 0, 0), m.run(t, "/usr/lib/libc.so.6", 100*i, 100)}, nil))
				}
				images = append(images, m)
			}
			if before, pages := stored(t, w, images...); retire == time.Hour && before < pages*3/2 {
				t.Fatalf("%d bytes for %d of pages: nothing was replaced", before, pages)
			}
			// A stream that began before reads what it lacks from the packs.
			set := images[0].find(t, "app")
			if retire == time.Hour {
				w.start(t)
			}
			for {
				objects, pages := stored(t, w, images...)
				if objects*10 <= pages*11 {
					break
				}
				runtime.Gosched()
			}
			images[0].deliver(t, set.Select(images[0].x.Table(), everything))
		})
	}
}
