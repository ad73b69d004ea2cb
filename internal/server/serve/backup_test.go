package serve_test

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"hydrofoil.dev/foil/internal/format/layer/layertest"
	"hydrofoil.dev/foil/internal/server/backup"
	"hydrofoil.dev/foil/internal/server/rebuild"
	"hydrofoil.dev/foil/internal/server/rootdir"
)

// A backup of a busy server has everything that was acknowledged before it began, whole, and can be rebuilt as
// well; what is done later to the one does not reach the other.
func TestBackup(t *testing.T) {
	dir := t.TempDir()
	root, to := filepath.Join(dir, "root"), filepath.Join(dir, "backup")
	base, cmd := child(t, root)
	img := makeImage(t, layertest.Layer{layertest.File("a", 200_000, noise(3, 200_000))})
	img.push(t, strings.TrimPrefix(base, "http://"))
	if err := img.pull(strings.TrimPrefix(base, "http://")); err != nil {
		t.Fatal(err)
	}
	quiet := &busyClient{id: 0, rng: rand.New(rand.NewPCG(1, 1)), base: base, held: map[string][][]byte{}}
	for range 20 {
		quiet.step()
	}
	var busy sync.WaitGroup
	begun, end := make(chan struct{}, 100), make(chan struct{})
	for id := 1; id < 4; id++ {
		c := &busyClient{id: id, rng: rand.New(rand.NewPCG(2, uint64(id))), base: base, held: map[string][][]byte{}}
		busy.Go(func() {
			for n := 0; c.step(); n++ {
				if n == 5 {
					begun <- struct{}{}
				}
				select {
				case <-end:
					return
				default:
				}
			}
		})
	}
	for range 3 {
		<-begun
	}
	r, err := backup.Backup(t.Context(), root, to)
	close(end)
	busy.Wait()
	if err != nil || len(r.Missing) > 0 || r.Linked == 0 {
		t.Fatalf("%+v, %v", r, err)
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	if err := os.RemoveAll(root); err != nil {
		t.Fatal(err)
	}
	for n := range 2 {
		restored := filepath.Join(dir, fmt.Sprint("restored", n))
		if _, err := backup.Restore(t.Context(), to, restored); err != nil {
			t.Fatal(err)
		}
		if _, err := backup.Restore(t.Context(), to, restored); err == nil {
			t.Error("a root that is there was replaced")
		}
		if n == 1 {
			if err := os.RemoveAll(rootdir.Catalog(restored)); err != nil {
				t.Fatal(err)
			}
			if _, err := rebuild.Run(t.Context(), rebuild.Options{Root: restored}); err != nil {
				t.Fatal(err)
			}
		}
		quiet.base, cmd = child(t, restored)
		if quiet.check(t) == 0 {
			t.Error("nothing was compared")
		}
		if err := img.pull(strings.TrimPrefix(quiet.base, "http://")); err != nil {
			t.Error(err)
		}
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}
	if err := os.Remove(filepath.Join(to, "complete")); err != nil {
		t.Fatal(err)
	}
	if _, err := backup.Restore(t.Context(), to, filepath.Join(dir, "other")); err == nil {
		t.Error("what is no whole backup was restored")
	}
}
