package fetch

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/format/toc/toctest"
	"hydrofoil.dev/foil/internal/worker/arena"
	"hydrofoil.dev/foil/internal/worker/bundletest"
	"hydrofoil.dev/foil/internal/worker/remote"
)

// fataler is *testing.T, *testing.B or *rapid.T.
type fataler interface {
	Helper()
	Fatal(...any)
	Fatalf(string, ...any)
	Errorf(string, ...any)
}

type (
	image   = bundletest.Image
	server  = bundletest.Scripted
	script  = bundletest.Script
	serving = bundletest.Serving
)

var newServer = bundletest.NewScripted

// blob returns n bytes that seed decides, compressible a little.
func blob(seed uint64, n int) []byte { return []byte(toctest.Blob(seed, n)) }

// newImage returns an image of the files.
func newImage(t fataler, files ...[]byte) *image {
	t.Helper()
	f := make(toctest.Files)
	for i, b := range files {
		f[fmt.Sprintf("%04d", i)] = string(b)
	}
	return bundletest.NewImage(t, f)
}

// worker opens arenas for images in a directory.
type worker struct {
	t      fataler
	dir    string
	server *server
	in     func(m *image, content int) bool // what is fetched; nil: all
	mu     sync.Mutex
	arenas map[digest.Digest]*arena.Arena
	opened atomic.Int64
}

func newWorker(t fataler, s *server, dir string) *worker {
	return &worker{t: t, dir: dir, server: s, arenas: map[digest.Digest]*arena.Arena{}}
}

func (w *worker) open(_ context.Context, img *bundle.Image, t *toc.TOC) (*arena.Arena, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	defer w.opened.Add(1)
	if a := w.arenas[img.ChainID]; a != nil {
		return a, nil
	}
	m := w.server.Image
	var in func(int) bool
	if w.in != nil {
		in = func(c int) bool { return w.in(m, c) }
	}
	l, err := arena.NewLayout(t, in)
	if err != nil {
		return nil, err
	}
	a, err := arena.Create(filepath.Join(w.dir, img.ChainID.Encoded()), l)
	if err != nil {
		return nil, err
	}
	w.arenas[img.ChainID] = a
	return a, nil
}

func (w *worker) options(c *remote.Client) Options {
	o := Options{Client: c, Pause: time.Millisecond, Open: w.open, TOC: func(context.Context, *bundle.Image) ([]byte, error) {
		return w.server.Image.TOC, nil
	}}
	o.Request.Versions = []int{1}
	o.Request.Image = bundle.ImageRequest{Repository: "image0", Reference: "latest"}
	return o
}

// contents returns what m's arena should hold.
func (w *worker) contents(m *image) []byte {
	l := w.arenas[m.ChainID].Layout()
	want := make([]byte, l.Size())
	for i, c := range m.Tree.Contents {
		off, ok := l.Offset(i)
		if !ok {
			continue
		}
		for _, s := range m.Tree.Segments[c.First : c.First+c.Segments] {
			copy(want[off+s.Offset:], m.Data[s.ID])
		}
	}
	return want
}

// check compares the arena with the contents that it should have.
func (w *worker) check() {
	w.t.Helper()
	m := w.server.Image
	a := w.arenas[m.ChainID]
	if a == nil {
		return
	}
	if !a.Complete() {
		w.t.Errorf("the arena lacks %d segments", a.Missing())
	}
	got, err := os.ReadFile(filepath.Join(a.Dir(), arena.FileName))
	if err != nil {
		w.t.Fatal(err)
	}
	if !bytes.Equal(got, w.contents(m)) {
		w.t.Errorf("the arena differs from the contents")
	}
}

func (w *worker) close() {
	for _, a := range w.arenas {
		a.Close()
	}
}
