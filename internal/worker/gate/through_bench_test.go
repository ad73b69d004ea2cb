package gate_test

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/worker/gate"
	"hydrofoil.dev/foil/internal/worker/gate/gatetest"
)

// BenchmarkThrough reads a file of an EROFS mount over an arena whose bytes
// are all in the page cache, and none of the mount's: from beginning to end,
// and one block at a time without readahead.
func BenchmarkThrough(b *testing.B) {
	const size = 64 << 20
	for _, way := range []struct {
		name       string
		fuse, loop bool
		released   bool
	}{
		{name: "no gate", released: true},
		{name: "fanotify"},
		{name: "fuse", fuse: true},
		{name: "loop", fuse: true, loop: true},
	} {
		b.Run(way.name, func(b *testing.B) {
			var g gate.Gate
			if way.fuse {
				g = startedFUSE(b, gate.Options{})
			} else {
				g = started(b, gate.Options{})
			}
			defer g.Close()
			dir := b.TempDir()
			tree := gatetest.NewTree(b, dir, map[string][]byte{"file": gatetest.Random(11, size)})
			path := filepath.Join(dir, "arena")
			backing := gatetest.NewBacking(tree.NewArena(b, path), tree.Truth, nil)
			if err := backing.Fill(0, int64(len(tree.Truth))); err != nil {
				b.Fatal(err)
			}
			if err := g.Guard("arena", backing.File(), backing); err != nil {
				b.Fatal(err)
			}
			if way.released {
				if err := g.Release("arena"); err != nil {
					b.Fatal(err)
				}
			}
			mnt := filepath.Join(dir, "mnt")
			tree.MountBy(b, g.Device("arena", path), mnt, way.loop)
			f, err := os.Open(filepath.Join(mnt, "file"))
			if err != nil {
				b.Fatal(err)
			}
			defer f.Close()
			forget := func() {
				if err := unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED); err != nil {
					b.Fatal(err)
				}
			}
			b.Run("sequential", func(b *testing.B) {
				b.SetBytes(size)
				buf := make([]byte, 1<<20)
				for b.Loop() {
					b.StopTimer()
					forget()
					b.StartTimer()
					for off := int64(0); off < size; off += int64(len(buf)) {
						if _, err := f.ReadAt(buf, off); err != nil && !errors.Is(err, io.EOF) {
							b.Fatal(err)
						}
					}
				}
			})
			b.Run("block", func(b *testing.B) {
				if err := unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_RANDOM); err != nil {
					b.Fatal(err)
				}
				var buf [4096]byte
				forget()
				i := int64(0)
				for b.Loop() {
					if i == size/4096 {
						b.StopTimer()
						forget()
						b.StartTimer()
						i = 0
					}
					if _, err := f.ReadAt(buf[:], i*4096); err != nil {
						b.Fatal(err)
					}
					i++
				}
			})
		})
	}
}
