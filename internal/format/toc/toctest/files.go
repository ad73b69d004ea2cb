package toctest

import (
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strings"

	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/identity"

	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
)

// T is a test: a testing.TB, or one of package rapid.
type T interface {
	Helper()
	Fatal(args ...any)
}

// Files are the files of a root directory, by name.
type Files map[string]string

// Blob returns n bytes that seed decides.
func Blob(seed uint64, n int) string {
	r := rand.New(rand.NewPCG(seed, 1))
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(r.IntN(64))
	}
	return string(b)
}

// Some returns count files of some size each, whose bytes the seeds from first
// on decide: equal seeds and sizes, equal bytes.
func Some(first uint64, count, size int) Files {
	f := make(Files)
	for i := range count {
		seed := first + uint64(i)
		f[fmt.Sprintf("f%03d-%03d", first, i)] = Blob(seed, size+int(seed)-1)
	}
	return f
}

// TOC returns the TOC of an image of one layer that has these files, that layer's
// diff ID, made up, and the bytes of all segments.
func (f Files) TOC(t T) (x *toc.TOC, diff digest.Digest, data map[segment.ID][]byte) {
	t.Helper()
	data = make(map[segment.ID][]byte)
	names := make([]string, 0, len(f))
	for name := range f {
		names = append(names, name)
	}
	slices.Sort(names)
	all := digest.Canonical.Hash()
	root := &toc.File{Mode: 0o040755, Children: map[string]*toc.File{}}
	sp := segment.NewSplitter(nil)
	for _, name := range names {
		fmt.Fprintf(all, "%s=%s", name, f[name])
		file := &toc.File{Mode: 0o100644}
		sp.Reset(strings.NewReader(f[name]))
		c := &toc.Bytes{}
		for {
			p, err := sp.Next()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			c.Segments = append(c.Segments, toc.Segment{ID: p.ID, Offset: p.Offset, Length: p.Length})
			data[p.ID] = slices.Clone(p.Bytes)
		}
		if c.ID, c.Size = sp.Content(); c.Size > 0 {
			file.Content = c
		}
		root.Children[name] = file
	}
	diff = digest.NewDigest(digest.Canonical, all)
	x, err := toc.Build(identity.ChainID([]digest.Digest{diff}), root)
	if err != nil {
		t.Fatal(err)
	}
	return x, diff, data
}
