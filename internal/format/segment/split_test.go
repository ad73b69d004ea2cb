package segment_test

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"hydrofoil.dev/foil/internal/format/segment"
)

var update = flag.Bool("update", false, "write golden files anew")

func randomBytes(seed uint64, n int) []byte {
	b := make([]byte, n)
	var key [32]byte
	key[0], key[1] = byte(seed), byte(seed>>8)
	rand.NewChaCha8(key).Read(b)
	return b
}

type pieces struct {
	Pieces []segment.Piece // Bytes copied
	ID     segment.ID
	Size   int64
}

type fataler interface {
	Fatal(...any)
	Fatalf(string, ...any)
}

func split(t fataler, r io.Reader) pieces {
	var got pieces
	s := segment.NewSplitter(r)
	for {
		p, err := s.Next()
		if err == io.EOF {
			got.ID, got.Size = s.Content()
			return got
		}
		if err != nil {
			t.Fatal(err)
		}
		p.Bytes = bytes.Clone(p.Bytes)
		got.Pieces = append(got.Pieces, p)
	}
}

// join checks what holds for every splitting and puts the content together.
func join(t fataler, p pieces) []byte {
	var all []byte
	for i, s := range p.Pieces {
		if s.Offset != int64(len(all)) {
			t.Fatalf("piece %d at offset %d, want %d", i, s.Offset, len(all))
		}
		if s.Length == 0 || s.Length > segment.MaxLength {
			t.Fatalf("piece %d has length %d", i, s.Length)
		}
		b := s.Bytes
		if s.ID.IsHole() {
			if b != nil {
				t.Fatalf("piece %d: a hole with bytes", i)
			}
			b = make([]byte, s.Length)
		} else if segment.Sum(b) != s.ID {
			t.Fatalf("piece %d has a wrong ID", i)
		} else if len(bytes.Trim(b, "\x00")) == 0 {
			t.Fatalf("piece %d is zero and no hole", i)
		}
		if len(b) != int(s.Length) {
			t.Fatalf("piece %d has %d bytes, says %d", i, len(b), s.Length)
		}
		all = append(all, b...)
	}
	if p.ID != segment.Sum(all) || p.Size != int64(len(all)) {
		t.Fatalf("content is %v, %d bytes; want %v, %d", p.ID, p.Size, segment.Sum(all), len(all))
	}
	return all
}

func TestSplitSmall(t *testing.T) {
	hello := []byte("hello")
	whole := randomBytes(1, segment.MaxLength)
	for _, c := range []struct {
		name    string
		content []byte
		want    []segment.Piece
	}{
		{name: "empty"},
		{"tiny", hello, []segment.Piece{{ID: segment.Sum(hello), Length: 5, Bytes: hello}}},
		{"zeros", make([]byte, 7), []segment.Piece{{Length: 7}}},
		{"largest whole", whole, []segment.Piece{{ID: segment.Sum(whole), Length: segment.MaxLength, Bytes: whole}}},
		{"largest whole, zeros", make([]byte, segment.MaxLength), []segment.Piece{{Length: segment.MaxLength}}},
		{"zeros, one too many", make([]byte, segment.MaxLength+1), []segment.Piece{
			{Length: segment.MaxLength}, {Offset: segment.MaxLength, Length: 1}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := split(t, bytes.NewReader(c.content))
			if d := cmp.Diff(c.want, got.Pieces); d != "" {
				t.Error(d)
			}
			if all := join(t, got); !bytes.Equal(all, c.content) {
				t.Error("pieces do not give the content back")
			}
		})
	}
}

func TestSplitHoles(t *testing.T) {
	head, tail := randomBytes(2, 100_001), randomBytes(3, 50_000)
	head[len(head)-1], tail[0] = 1, 1
	run := func(n int) []byte { return bytes.Join([][]byte{head, make([]byte, n), tail}, nil) }

	got := split(t, bytes.NewReader(run(3<<20+5)))
	want := []segment.Piece{
		{ID: segment.Sum(head), Length: 100_001, Bytes: head},
		{Offset: 100_001, Length: segment.MaxLength},
		{Offset: 100_001 + 1<<20, Length: segment.MaxLength},
		{Offset: 100_001 + 2<<20, Length: segment.MaxLength},
		{Offset: 100_001 + 3<<20, Length: 50_005, Bytes: append(make([]byte, 5), tail...)},
	}
	want[4].ID = segment.Sum(want[4].Bytes)
	if d := cmp.Diff(want, got.Pieces); d != "" {
		t.Error(d)
	}

	// A run one byte too short for a hole stays inside segments.
	short := append(run(segment.HoleLength-1), randomBytes(4, segment.MaxLength)...)
	for _, p := range split(t, bytes.NewReader(short)).Pieces {
		if p.ID.IsHole() {
			t.Errorf("hole of %d bytes at %d", p.Length, p.Offset)
		}
	}
}

// Cut points are found again after an insertion: that is what they are for.
func TestSplitShift(t *testing.T) {
	a := randomBytes(5, 24<<20)
	b := bytes.Join([][]byte{a[:3<<20], []byte("inserted"), a[3<<20:]}, nil)
	have := map[segment.ID]bool{}
	for _, p := range split(t, bytes.NewReader(a)).Pieces {
		have[p.ID] = true
	}
	missing := 0
	got := split(t, bytes.NewReader(b))
	for _, p := range got.Pieces {
		if !have[p.ID] {
			missing++
		}
	}
	if missing == 0 || missing > 4 {
		t.Errorf("%d of %d segments are new after an insertion of 8 bytes", missing, len(got.Pieces))
	}
	if n := len(got.Pieces); n < 24<<20/(512<<10) || n > 24<<20/(256<<10) {
		t.Errorf("24 MiB gave %d segments", n)
	}
}

func TestSplitErrors(t *testing.T) {
	broken := errors.New("broken")
	s := segment.NewSplitter(io.MultiReader(strings.NewReader("abc"), iotest.ErrReader(broken)))
	for range 2 {
		if _, err := s.Next(); !errors.Is(err, broken) {
			t.Errorf("got %v, want the reader's error", err)
		}
	}
	s.Reset(strings.NewReader("abc"))
	if p, err := s.Next(); err != nil || string(p.Bytes) != "abc" {
		t.Errorf("after Reset: %q, %v", p.Bytes, err)
	}
}

// Whatever the content and however it arrives, the pieces are the same and give
// it back.
func TestSplitProperty(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var content []byte
		for range rapid.IntRange(0, 5).Draw(t, "runs") {
			n := rapid.IntRange(1, 1<<20).Draw(t, "length")
			if rapid.Bool().Draw(t, "zeros") {
				content = append(content, make([]byte, n)...)
			} else {
				content = append(content, randomBytes(rapid.Uint64().Draw(t, "seed"), n)...)
			}
		}
		step := rapid.IntRange(1, 1<<20).Draw(t, "step")
		got := split(t, bytes.NewReader(content))
		if !bytes.Equal(join(t, got), content) {
			t.Fatalf("pieces do not give the content back")
		}
		same := func(a, b segment.Piece) bool { return a.ID == b.ID && a.Offset == b.Offset && a.Length == b.Length }
		if again := split(t, &stepReader{content, step}); !slices.EqualFunc(got.Pieces, again.Pieces, same) {
			t.Fatalf("read %d bytes at a time, the pieces differ", step)
		}
	})
}

type stepReader struct {
	b    []byte
	step int
}

func (r *stepReader) Read(p []byte) (int, error) {
	if len(r.b) == 0 {
		return 0, io.EOF
	}
	n := copy(p[:min(len(p), r.step)], r.b)
	r.b = r.b[n:]
	return n, nil
}

// TestSplitGolden holds the cut points fixed forever.
func TestSplitGolden(t *testing.T) {
	content := bytes.Join([][]byte{
		randomBytes(10, 5<<20), make([]byte, 2<<20+77), randomBytes(11, 700_000),
		make([]byte, segment.HoleLength), bytes.Repeat([]byte("the same line over and over\n"), 100_000),
		randomBytes(12, 2<<20), make([]byte, 1000),
	}, nil)
	var b strings.Builder
	fmt.Fprintf(&b, "content %x\n", sha256.Sum256(content))
	for _, p := range split(t, bytes.NewReader(content)).Pieces {
		fmt.Fprintf(&b, "%9d %8d %s\n", p.Offset, p.Length, p.ID)
	}
	golden(t, "split.golden", []byte(b.String()))
}

func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	name = filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(name, got, 0o666); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(want, got) {
		t.Errorf("%s differs; run with -update if the format was meant to change\ngot:\n%q\nwant:\n%q", name, got, want)
	}
}

func FuzzSplit(f *testing.F) {
	f.Add([]byte("hello"), 3, 1<<20)
	f.Fuzz(func(t *testing.T, b []byte, repeat, zeros int) {
		if repeat < 0 || repeat > 1<<12 || zeros < 0 || zeros > 4<<20 || len(b) > 1<<12 {
			t.Skip()
		}
		content := append(bytes.Repeat(b, repeat), make([]byte, zeros)...)
		content = append(content, b...)
		if !bytes.Equal(join(t, split(t, bytes.NewReader(content))), content) {
			t.Fatal("pieces do not give the content back")
		}
	})
}

func BenchmarkSplit(b *testing.B) {
	for _, c := range []struct {
		name    string
		content []byte
	}{
		{"small-16KiB", randomBytes(20, 16<<10)},
		{"large-64MiB", randomBytes(21, 64<<20)},
		{"zeros-64MiB", make([]byte, 64<<20)},
	} {
		b.Run(c.name, func(b *testing.B) {
			b.SetBytes(int64(len(c.content)))
			s := segment.NewSplitter(nil)
			r := bytes.NewReader(nil)
			for b.Loop() {
				r.Reset(c.content)
				s.Reset(r)
				for {
					if _, err := s.Next(); err != nil {
						break
					}
				}
			}
		})
	}
}
