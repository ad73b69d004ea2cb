package gatetest

import (
	"crypto/sha256"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/kernel"
	"hydrofoil.dev/foil/internal/worker/erofs"
)

// Tree is a rootfs of a few files whose contents are in an arena: the bytes
// that the arena should have, and the image that shows them as files.
type Tree struct {
	Files map[string][]byte // by name
	Truth []byte            // of the arena
	Image string            // path of the EROFS image; its one device is the arena
}

// NewTree lays out files, executable ones if their name starts with "exec",
// and writes the image into dir.
func NewTree(tb testing.TB, dir string, files map[string][]byte) *Tree {
	tb.Helper()
	tree := &Tree{Files: files, Image: filepath.Join(dir, "image")}
	root := &toc.File{Mode: unix.S_IFDIR | 0o755, Children: map[string]*toc.File{}}
	places := map[segment.ID]int64{}
	for name, data := range files {
		id := segment.ID(sha256.Sum256(data))
		content := &toc.Bytes{ID: id, Size: int64(len(data))}
		places[id] = int64(len(tree.Truth))
		for at := 0; at < len(data); at += 1 << 20 {
			piece := data[at:min(at+1<<20, len(data))]
			content.Segments = append(content.Segments, toc.Segment{ID: segment.Sum(piece), Offset: int64(at), Length: uint32(len(piece))})
		}
		if len(content.Segments) == 1 {
			content.Segments[0].ID = id
		}
		mode := uint32(unix.S_IFREG | 0o644)
		if len(name) >= 4 && name[:4] == "exec" {
			mode = unix.S_IFREG | 0o755
		}
		root.Children[name] = &toc.File{Mode: mode, Content: content}
		tree.Truth = append(tree.Truth, data...)
		tree.Truth = append(tree.Truth, make([]byte, -len(data)&(blockSize-1))...)
	}
	t, err := toc.Build(digest.FromString("gatetest"), root)
	if err != nil {
		tb.Fatal(err)
	}
	f, err := os.Create(tree.Image)
	if err != nil {
		tb.Fatal(err)
	}
	defer f.Close()
	err = erofs.Write(f, t, erofs.Options{
		Devices: []erofs.Device{{Blocks: uint32(len(tree.Truth) / blockSize), Tag: "arena"}},
		Place: func(content int) erofs.Extent {
			return erofs.Extent{Block: uint32(places[t.Contents[content].ID] / blockSize)}
		},
	})
	if err != nil {
		tb.Fatal(err)
	}
	return tree
}

// NewArena makes an empty arena for the tree.
func (tree *Tree) NewArena(tb testing.TB, path string) *os.File {
	tb.Helper()
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { f.Close() })
	if err := f.Truncate(int64(len(tree.Truth))); err != nil {
		tb.Fatal(err)
	}
	return f
}

// Mount mounts the tree over device until the test ends.
func (tree *Tree) Mount(tb testing.TB, device, target string) {
	tb.Helper()
	tree.MountBy(tb, device, target, false)
}

// MountBy is Mount, by loop devices or without.
func (tree *Tree) MountBy(tb testing.TB, device, target string, loop bool) {
	tb.Helper()
	if err := os.Mkdir(target, 0o755); err != nil {
		tb.Fatal(err)
	}
	if err := kernel.MountErofs(kernel.Erofs{Image: tree.Image, Devices: []string{device}, Target: target, Loop: loop}); err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := kernel.Unmount(target, true); err != nil {
			tb.Errorf("unmount: %v", err)
		}
	})
}

// Random returns n bytes, the same for the same seed.
func Random(seed uint64, n int) []byte {
	r := rand.NewChaCha8([32]byte([]byte(fmt.Sprintf("%032d", seed))))
	b := make([]byte, n)
	r.Read(b)
	return b
}
