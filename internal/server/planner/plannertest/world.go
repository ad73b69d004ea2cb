// Package plannertest stores rootfs as ingest does, for tests of what serves
// them.
package plannertest

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"path"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/identity"
	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/catalog/sqlite"
	"hydrofoil.dev/foil/internal/server/dedup"
	"hydrofoil.dev/foil/internal/server/objects"
	"hydrofoil.dev/foil/internal/server/objects/objectstest"
)

// World is a server's stores.
type World struct {
	Objects objects.Store
	Catalog catalog.Catalog
	Store   *dedup.Store
	Places  *dedup.Finder // of all that was stored
}

// New returns empty stores: a catalog in a directory of the test, objects in
// memory unless some are given.
func New(t testing.TB, store objects.Store) *World {
	t.Helper()
	cat, err := sqlite.Open(context.Background(), filepath.Join(t.TempDir(), "catalog.db"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := cat.Close(); err != nil {
			t.Error(err)
		}
	})
	if store == nil {
		store = objectstest.NewMemory()
	}
	packs, keep := &dedup.Store{Objects: store, Catalog: cat}, cat.Keep()
	t.Cleanup(keep.Release)
	return &World{store, cat, packs, packs.NewFinder(keep)}
}

// Files are the regular files of a rootfs by absolute path, with their bytes; a
// value that starts with "-> " is the target of a symlink. Files below a "bin"
// directory are executable.
type Files map[string]string

// LayerOf returns the blob that Rootfs says a layer is of.
func LayerOf(diffID digest.Digest) digest.Digest {
	return digest.FromString("layer of " + string(diffID))
}

// Rootfs stores a rootfs whose only layer has the given diff ID.
func (w *World) Rootfs(t testing.TB, diffID digest.Digest, files Files) (*toc.TOC, catalog.Rootfs) {
	t.Helper()
	ctx := context.Background()
	keep := w.Catalog.Keep()
	defer keep.Release()
	packs := w.Store.NewWriter(ctx, dedup.Options{Keep: keep})
	defer packs.Close()
	root := &toc.File{Mode: unix.S_IFDIR | 0o755, Children: map[string]*toc.File{}}
	var build func(dir *toc.File, rest string) *toc.File
	build = func(dir *toc.File, rest string) *toc.File {
		name, rest, more := strings.Cut(rest, "/")
		f := dir.Children[name]
		if f == nil {
			f = &toc.File{Mode: unix.S_IFREG | 0o644}
			if more {
				f = &toc.File{Mode: unix.S_IFDIR | 0o755, Children: map[string]*toc.File{}}
			}
			dir.Children[name] = f
		}
		if !more {
			return f
		}
		return build(f, rest)
	}
	splitter := segment.NewSplitter(nil)
	for p, content := range files {
		f := build(root, strings.TrimPrefix(path.Clean(p), "/"))
		if strings.HasSuffix(path.Dir(p), "bin") {
			f.Mode |= 0o111
		}
		if target, ok := strings.CutPrefix(content, "-> "); ok {
			f.Mode, f.Target = unix.S_IFLNK|0o777, target
			continue
		}
		if content == "" {
			continue
		}
		f.Content = &toc.Bytes{}
		splitter.Reset(strings.NewReader(content))
		for {
			piece, err := splitter.Next()
			if err == io.EOF {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			if err := packs.Add(piece.ID, piece.Bytes); err != nil {
				t.Fatal(err)
			}
			f.Content.Segments = append(f.Content.Segments, toc.Segment{ID: piece.ID, Offset: piece.Offset, Length: piece.Length})
		}
		f.Content.ID, f.Content.Size = splitter.Content()
	}
	if err := packs.Publish(); err != nil {
		t.Fatal(err)
	}
	if err := w.Catalog.PutLayer(ctx, catalog.Layer{Blob: LayerOf(diffID), DiffID: diffID, Entries: "entries/none"}, keep.Packs()...); err != nil {
		t.Fatal(err)
	}
	x, err := toc.Build(identity.ChainID([]digest.Digest{diffID}), root)
	if err != nil {
		t.Fatal(err)
	}
	encoded, err := toc.Encode(x)
	if err != nil {
		t.Fatal(err)
	}
	r := catalog.Rootfs{ChainID: x.ChainID, TOC: toc.Digest(encoded), Key: fmt.Sprintf("tocs/%s", toc.Digest(encoded).Encoded())}
	w.Put(t, r.Key, encoded)
	if err := w.Catalog.PutRootfs(ctx, r); err != nil {
		t.Fatal(err)
	}
	return x, r
}

// Put stores an object.
func (w *World) Put(t testing.TB, key string, b []byte) {
	t.Helper()
	o, err := w.Objects.Create(context.Background(), key)
	if err != nil {
		t.Fatal(err)
	}
	defer o.Close()
	if _, err := io.Copy(o, bytes.NewReader(b)); err != nil {
		t.Fatal(err)
	}
	if err := o.Commit(); err != nil {
		t.Fatal(err)
	}
}
