package contents

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
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/format/toc/toctest"
	"hydrofoil.dev/foil/internal/worker/arena"
)

var update = flag.Bool("update", false, "write golden files")

// sample has a content of one segment and one of several, with a hole.
func sample(t testing.TB) *toc.TOC {
	x, _, _ := toctest.Files{
		"small": "hello",
		"holes": strings.Repeat("\x00", 5000),
		"large": toctest.Blob(1, 3<<20) + strings.Repeat("\x00", 8<<20) + toctest.Blob(2, 2<<20),
		"empty": "",
	}.TOC(t)
	return x
}

// three has three small files.
func three(t testing.TB) *toc.TOC {
	x, _, _ := toctest.Some(1, 3, 100).TOC(t)
	return x
}

func written(t testing.TB, x *toc.TOC, in func(int) bool) (path string, l *arena.Layout) {
	t.Helper()
	l, err := arena.NewLayout(x, in)
	if err != nil {
		t.Fatal(err)
	}
	path = filepath.Join(t.TempDir(), "contents")
	if err := Write(path, x, l); err != nil {
		t.Fatal(err)
	}
	return path, l
}

func TestContentsFileIsAsSpecified(t *testing.T) {
	path, _ := written(t, three(t), nil)
	got, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	golden := filepath.Join("testdata", "contents3.golden")
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

func kindOf(x *toc.TOC, i int) Kind {
	if c := x.Contents[i]; c.Segments > 1 || x.Segments[c.First].ID.IsHole() {
		return Composed
	}
	return Whole
}

// A file of an older version is read: what a lender keeps cannot be made again.
func TestContentsFileOfOlderVersionsIsRead(t *testing.T) {
	path, _ := written(t, three(t), nil)
	now, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer now.Close()
	for version, file := range map[string]string{firstMagic: "contents.golden", secondMagic: "contents2.golden"} {
		old, err := Open(filepath.Join("testdata", file))
		if err != nil {
			t.Fatal(err)
		}
		defer old.Close()
		if !old.Old() || now.Old() || old.Len() != now.Len() {
			t.Fatalf("%s: it is old: %v, and lists %d of %d", version, old.Old(), old.Len(), now.Len())
		}
		for i := range now.Len() {
			off, length, kind := old.place(i)
			wantOff, _, wantKind := now.place(i)
			if !bytes.Equal(old.id(i), now.id(i)) || off != wantOff || kind != wantKind || length != -1 {
				t.Errorf("%s: record %d has offset %d, length %d, kind %d", version, i, off, length, kind)
			}
		}
		b, err := old.Only([]arena.Range{{Off: 0, Len: 1 << 40}})
		if err != nil || string(b[:len(magic)]) != version {
			t.Errorf("what is kept of it is written as %.8q, %v", b, err)
		}
	}
}

// A content is found by its ID and its length, and is kept whole or not at all.
func TestALengthIsPartOfAContent(t *testing.T) {
	x := three(t)
	path, l := written(t, x, nil)
	c, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	id := func(i int32) *segment.ID { return &x.Contents[i].ID }
	for more, want := range map[int64]int{-1: 0, 0: 1, 1: 0} {
		found := 0
		c.Join([]int32{1}, id, func(i int32) int64 { return x.Contents[i].Size + more }, func(int32, int64, Kind) { found++ })
		if found != want {
			t.Errorf("with %d bytes more it is found %d times, want %d", more, found, want)
		}
	}
	off, _ := l.Offset(1)
	for n, want := range map[int64]int{x.Contents[1].Size: 1, x.Contents[1].Size - 1: 0} {
		b, err := c.Only([]arena.Range{{Off: off, Len: n}})
		if kept := (&List{b}).Len(); err != nil || kept != want {
			t.Errorf("of a content of which %d bytes are kept there are %d records, want %d; %v", n, kept, want, err)
		}
	}
}

func TestJoinFindsContentsAndPieces(t *testing.T) {
	x := sample(t)
	path, l := written(t, x, nil)
	c, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if !slices.IsSortedFunc(slices.Collect(func(yield func([]byte) bool) {
		for i := range c.Len() {
			if !yield(c.id(i)) {
				return
			}
		}
	}), bytes.Compare) {
		t.Error("the records are not sorted")
	}
	// Every segment and content of the image, and one that is nowhere.
	var ids []segment.ID
	var lengths []int64
	want := make(map[string]bool)
	for i, content := range x.Contents {
		off, _ := l.Offset(i)
		ids, lengths = append(ids, content.ID), append(lengths, content.Size)
		want[fmt.Sprint(content.ID, off, kindOf(x, i))] = true
		for _, s := range x.Segments[content.First : content.First+content.Segments] {
			if !s.ID.IsHole() && content.Segments > 1 {
				ids, lengths = append(ids, s.ID), append(lengths, int64(s.Length))
				want[fmt.Sprint(s.ID, off+s.Offset, Piece)] = true
			}
		}
	}
	ids, lengths = append(ids, segment.Sum([]byte("nowhere")), segment.ID{}), append(lengths, 7, 0)
	numbers := make([]int32, len(ids))
	for i := range numbers {
		numbers[i] = int32(i)
	}
	id := func(i int32) *segment.ID { return &ids[i] }
	segment.Sort(numbers, id)
	numbers = slices.CompactFunc(numbers, func(a, b int32) bool { return ids[a] == ids[b] })
	got := make(map[string]bool)
	c.Join(numbers, id, func(i int32) int64 { return lengths[i] }, func(i int32, off int64, kind Kind) { got[fmt.Sprint(ids[i], off, kind)] = true })
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
	path, _ := written(t, three(t), nil)
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	try := func(what string, b []byte) {
		t.Helper()
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		if c, err := Open(path); err == nil {
			c.Close()
			t.Errorf("%s: believed", what)
		}
	}
	for i := range whole {
		b := slices.Clone(whole)
		b[i] ^= 0x40
		try(fmt.Sprintf("byte %d flipped", i), b)
	}
	for _, n := range []int{0, 1, headerSize - 1, headerSize, len(whole) - recordSize, len(whole) - 1} {
		try(fmt.Sprintf("cut to %d bytes", n), whole[:n])
	}
	try("longer", append(slices.Clone(whole), make([]byte, recordSize)...))
	// Blocks that never reached the disk.
	try("zeros", make([]byte, len(whole)))
}

func FuzzContents(f *testing.F) {
	path, _ := written(f, three(f), nil)
	b, err := os.ReadFile(path)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Add([]byte(magic))
	f.Fuzz(func(t *testing.T, b []byte) {
		if check(b) != nil {
			return
		}
		// What is believed can be used.
		c := &List{b}
		ids := make([]segment.ID, c.Len())
		numbers, lengths := make([]int32, c.Len()), make([]int64, c.Len())
		for i := range ids {
			_, lengths[i], _ = c.place(i)
			copy(ids[i][:], c.id(i))
			numbers[i] = int32(i)
		}
		id := func(i int32) *segment.ID { return &ids[i] }
		segment.Sort(numbers, id)
		c.Join(numbers, id, func(i int32) int64 { return lengths[i] }, func(_ int32, off int64, _ Kind) {
			if off < 0 {
				t.Errorf("offset %d", off)
			}
		})
	})
}
