package node

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/worker/arena"
)

var update = flag.Bool("update", false, "write golden files")

// sample has a content of one segment and one of several, with a hole.
func sample(t testing.TB) *fakeImage {
	return newFakeImage(t, files{
		"small": "hello",
		"large": blob(1, 3<<20) + strings.Repeat("\x00", 8<<20) + blob(2, 2<<20),
		"empty": "",
	})
}

func written(t testing.TB, m *fakeImage, in func(int) bool) (path string, l *arena.Layout) {
	t.Helper()
	l, err := arena.NewLayout(m.toc, in)
	if err != nil {
		t.Fatal(err)
	}
	path = filepath.Join(t.TempDir(), "contents")
	if err := writeContents(path, m.toc, l); err != nil {
		t.Fatal(err)
	}
	return path, l
}

func TestContentsFileIsAsSpecified(t *testing.T) {
	path, _ := written(t, newFakeImage(t, some(1, 3, 100)), nil)
	got, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	golden := filepath.Join("testdata", "contents.golden")
	if *update {
		if err := os.WriteFile(golden, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("the contents file differs from %s: its format has changed", golden)
	}
}

func TestJoinFindsContentsAndPieces(t *testing.T) {
	m := sample(t)
	path, l := written(t, m, nil)
	c, err := openContents(path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.close()
	if !slices.IsSortedFunc(slices.Collect(func(yield func([]byte) bool) {
		for i := range c.len() {
			if !yield(c.id(i)) {
				return
			}
		}
	}), bytes.Compare) {
		t.Error("the records are not sorted")
	}
	// Every segment and content of the image, and one that is nowhere.
	var ids []segment.ID
	want := make(map[string]bool)
	for i, content := range m.toc.Contents {
		off, _ := l.Offset(i)
		ids = append(ids, content.ID)
		want[fmt.Sprint(content.ID, off, false)] = true
		for _, s := range m.toc.Segments[content.First : content.First+content.Segments] {
			if !s.ID.IsHole() && content.Segments > 1 {
				ids = append(ids, s.ID)
				want[fmt.Sprint(s.ID, off+s.Offset, true)] = true
			}
		}
	}
	ids = append(ids, segment.Sum([]byte("nowhere")), segment.ID{})
	numbers := make([]int32, len(ids))
	for i := range numbers {
		numbers[i] = int32(i)
	}
	id := func(i int32) *segment.ID { return &ids[i] }
	segment.Sort(numbers, id)
	numbers = slices.CompactFunc(numbers, func(a, b int32) bool { return ids[a] == ids[b] })
	got := make(map[string]bool)
	c.join(numbers, id, func(i int32, off int64, piece bool) { got[fmt.Sprint(ids[i], off, piece)] = true })
	for k := range want {
		if !got[k] {
			t.Errorf("not found: %s", k)
		}
	}
	if len(got) != len(want) {
		t.Errorf("found %d places, there are %d", len(got), len(want))
	}
}

func TestContentsFileThatIsDamagedIsNotBelieved(t *testing.T) {
	path, _ := written(t, newFakeImage(t, some(1, 3, 100)), nil)
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	try := func(what string, b []byte) {
		t.Helper()
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		if c, err := openContents(path); err == nil {
			c.close()
			t.Errorf("%s: believed", what)
		}
	}
	for i := range whole {
		b := slices.Clone(whole)
		b[i] ^= 0x40
		try(fmt.Sprintf("byte %d flipped", i), b)
	}
	for _, n := range []int{0, 1, contentsHeader - 1, contentsHeader, len(whole) - contentsRecord, len(whole) - 1} {
		try(fmt.Sprintf("cut to %d bytes", n), whole[:n])
	}
	try("longer", append(slices.Clone(whole), make([]byte, contentsRecord)...))
	// Blocks that never reached the disk.
	try("zeros", make([]byte, len(whole)))
}

func FuzzContents(f *testing.F) {
	path, _ := written(f, newFakeImage(f, some(1, 3, 100)), nil)
	b, err := os.ReadFile(path)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Add([]byte(contentsMagic))
	f.Fuzz(func(t *testing.T, b []byte) {
		if checkContents(b) != nil {
			return
		}
		// What is believed can be used.
		c := &contents{b}
		ids := make([]segment.ID, c.len())
		numbers := make([]int32, c.len())
		for i := range ids {
			copy(ids[i][:], c.id(i))
			numbers[i] = int32(i)
		}
		id := func(i int32) *segment.ID { return &ids[i] }
		segment.Sort(numbers, id)
		c.join(numbers, id, func(_ int32, off int64, _ bool) {
			if off < 0 {
				t.Errorf("offset %d", off)
			}
		})
	})
}

func FuzzPlacement(f *testing.F) {
	m := newFakeImage(f, some(1, 3, 100))
	f.Add(placement{0, 1, 0}.encode(), 2)
	f.Add([]byte{1}, 1)
	f.Fuzz(func(t *testing.T, b []byte, arenas int) {
		p, err := decodePlacement(b, m.toc, arenas)
		if err != nil {
			return
		}
		if len(p) != len(m.toc.Contents) || !bytes.Equal(p.encode(), b) {
			t.Errorf("placement %v of %x", p, b)
		}
		for _, d := range p {
			if int(d) >= arenas {
				t.Errorf("arena %d of %d", d, arenas)
			}
		}
	})
}

func TestReferences(t *testing.T) {
	const d = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
	for _, c := range []struct {
		in, host, repository, latest string
	}{
		{"registry.example/a/b:1", "registry.example", "a/b", "1"},
		{"registry.example/a/b", "registry.example", "a/b", "latest"},
		{"registry.example:5000/a@" + d, "registry.example:5000", "a", d},
		{"registry.example/a:1@" + d, "registry.example", "a", d},
		{"[::1]:5000/a:1", "[::1]:5000", "a", "1"},
	} {
		r, err := parseRef(c.in)
		if err != nil {
			t.Errorf("%s: %v", c.in, err)
			continue
		}
		if r.host != c.host || r.repository != c.repository || r.reference != c.latest {
			t.Errorf("%s: %+v", c.in, r)
		}
	}
	for _, in := range []string{"", "redis", "registry.example/A", "registry.example/a:", "registry.example/../a"} {
		if r, err := parseRef(in); err == nil {
			t.Errorf("%q is %+v", in, r)
		}
	}
	for in, ok := range map[string]bool{"": true, "linux/amd64": true, "linux/arm/v7": true, "linux": false, "windows/amd64": false, "linux/": false, "a/b/c/d": false} {
		if _, err := parsePlatform(in); (err == nil) != ok {
			t.Errorf("platform %q: %v", in, err)
		}
	}
}
