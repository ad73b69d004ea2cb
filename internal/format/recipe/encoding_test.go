package recipe_test

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"hydrofoil.dev/foil/internal/format/columns"
	"hydrofoil.dev/foil/internal/format/recipe"
)

// encoding is what testdata/encoding was made of.
func encoding() *recipe.Encoding {
	sum := func(s string) [sha256.Size]byte { return sha256.Sum256([]byte(s)) }
	return &recipe.Encoding{
		Encoder: "go1.26", Arch: "amd64", Level: 6, Block: 1 << 20,
		Header: []byte("header"), Trailer: []byte("trailer"), Points: bytes.Repeat([]byte("points"), 100),
		Parts: []recipe.Part{{In: 1 << 22, Out: 12_345, Sum: sum("a")}, {In: 1 << 20, Out: 6, Sum: sum("stored"), Stored: []byte("stored")}, {In: 7, Out: 9, Sum: sum("c")}},
	}
}

func TestEncoding(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		blob := func(name string, n int) []byte { return []byte(rapid.StringN(0, n, n).Draw(t, name)) }
		want := &recipe.Encoding{
			Encoder: rapid.StringN(0, 20, 64).Draw(t, "encoder"), Arch: rapid.StringN(0, 9, 64).Draw(t, "arch"),
			Level: rapid.IntRange(0, 12).Draw(t, "level"), Block: rapid.Int64Range(0, 1<<40).Draw(t, "block"),
			Header: blob("header", 300), Trailer: blob("trailer", 300), Points: blob("points", 3000),
		}
		for range rapid.IntRange(1, 9).Draw(t, "parts") {
			p := recipe.Part{In: rapid.Int64Range(1, 1<<40).Draw(t, "in"), Out: rapid.Int64Range(1, 1<<40).Draw(t, "out")}
			copy(p.Sum[:], blob("sum", sha256.Size))
			if stored := blob("stored", 500); len(stored) > 0 {
				p.Stored, p.Out = stored, int64(len(stored))
			}
			want.Parts = append(want.Parts, p)
		}
		begin := rapid.Int64Range(8, 1<<40).Draw(t, "begin")
		b, err := recipe.AppendCompression(nil, begin, recipe.Unknown, want)
		if err != nil {
			t.Fatal(err)
		}
		if at, err := recipe.Begin(b[len(b)-recipe.BeginLen:], begin+int64(len(b))); at != begin || err != nil {
			t.Fatalf("it begins at %d, not %d: %v", at, begin, err)
		}
		c, got, err := recipe.ReadCompression(bytes.NewReader(b))
		if err != nil || c != want.Compression() {
			t.Fatalf("%v, %v", c, err)
		}
		for _, p := range []*[]byte{&want.Header, &want.Trailer, &want.Points} {
			if len(*p) == 0 {
				*p = nil
			}
		}
		if d := cmp.Diff(want, got); d != "" {
			t.Fatal(d)
		}
		if _, _, err := recipe.ReadCompression(bytes.NewReader(b[:rapid.IntRange(0, len(b)-1).Draw(t, "cut")])); !errors.Is(err, recipe.ErrCorrupt) {
			t.Fatalf("cut: %v", err)
		}
	})
}

// A recipe whose compression was replaced makes the same tar stream.
func TestReplacedCompression(t *testing.T) {
	stream := golden(t)
	encoded, contents, err := record(bytes.NewReader(stream), recipe.End{})
	if err != nil {
		t.Fatal(err)
	}
	begin, err := recipe.Begin(encoded[len(encoded)-recipe.BeginLen:], int64(len(encoded)))
	if err != nil {
		t.Fatal(err)
	}
	b, err := recipe.AppendCompression(encoded[:begin:begin], begin, recipe.Unknown, encoding())
	if err != nil {
		t.Fatal(err)
	}
	got, end, err := play(b, contents)
	if err != nil || !bytes.Equal(got, stream) || end.Compression != recipe.Patched {
		t.Errorf("%d bytes, %+v, %v", len(got), end, err)
	}
}

func TestGoldenEncoding(t *testing.T) {
	name := filepath.Join("testdata", "encoding")
	if *update {
		b, err := recipe.AppendCompression(nil, 1000, recipe.Unknown, encoding())
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, b, 0o666); err != nil {
			t.Fatal(err)
		}
	}
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	c, got, err := recipe.ReadCompression(bytes.NewReader(b))
	if err != nil || c != recipe.Patched {
		t.Fatalf("%v, %v", c, err)
	}
	if d := cmp.Diff(encoding(), got); d != "" {
		t.Errorf("(-was +is):\n%s", d)
	}
	if in, out, stored := got.In(), got.Out(), got.StoredBytes(); in != 1<<22+1<<20+7 || out != 12_345+6+9+13 || stored != 6 {
		t.Errorf("%d bytes in, %d out, %d stored", in, out, stored)
	}
}

// No byte of an encoding can be another one unseen.
func TestDamagedEncoding(t *testing.T) {
	b, err := os.ReadFile(filepath.Join("testdata", "encoding"))
	if err != nil {
		t.Fatal(err)
	}
	for i := range b[:len(b)-recipe.BeginLen] {
		damaged := bytes.Clone(b)
		damaged[i] ^= 1
		if _, e, err := recipe.ReadCompression(bytes.NewReader(damaged)); e != nil && err == nil {
			t.Errorf("byte %d of %d: it was read", i, len(b))
		}
	}
}

func TestEncodingBeyondLimits(t *testing.T) {
	for name, change := range map[string]func(*recipe.Encoding){
		"no parts":    func(e *recipe.Encoding) { e.Parts = nil },
		"long header": func(e *recipe.Encoding) { e.Header = make([]byte, recipe.MaxLiteral+1) },
		"much stored": func(e *recipe.Encoding) { e.Parts[1].Stored = make([]byte, recipe.MaxEncoding+1) },
	} {
		e := encoding()
		change(e)
		if _, err := recipe.AppendCompression(nil, 9, recipe.Unknown, e); err == nil {
			t.Errorf("%s: it was written", name)
		}
	}
}

// What is passed over is not asked for, and what follows it is what it was.
func TestSkip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		stream := drawStream(t)
		encoded, contents := checkExact(t, stream)
		at := rapid.IntRange(0, len(stream)+10).Draw(t, "skip")
		read := rapid.IntRange(0, min(at, len(stream))).Draw(t, "read before")
		asked := int64(0)
		source := from(contents)
		r := recipe.NewReader(bytes.NewReader(encoded), func(content, offset, length int64) (io.Reader, error) {
			asked += length
			return source(content, offset, length)
		}, recipe.Limits{})
		if _, err := io.CopyN(io.Discard, r, int64(read)); err != nil {
			t.Fatal(err)
		}
		before := asked
		if err := r.Skip(int64(at - read)); err != nil {
			t.Fatal(err)
		}
		if asked != before {
			t.Fatalf("%d bytes of contents were asked for to pass over %d", asked-before, at-read)
		}
		got, err := io.ReadAll(r)
		if err != nil || !bytes.Equal(got, stream[min(at, len(stream)):]) {
			t.Fatalf("%d bytes after %d of %d, or others: %v", len(got), at, len(stream), err)
		}
	})
}

// FuzzEncoding reads foreign compressions.
func FuzzEncoding(f *testing.F) {
	b, err := os.ReadFile(filepath.Join("testdata", "encoding"))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(byte(recipe.Patched), b[1+2+sha256.Size:len(b)-1-recipe.BeginLen])
	f.Add(byte(recipe.Intact), []byte(nil))
	f.Fuzz(func(t *testing.T, kind byte, payload []byte) {
		b := []byte{kind}
		if sum := sha256.Sum256(payload); len(payload) > 0 {
			b = columns.AppendBlock(b, append(sum[:], payload...))
		}
		b = append(b, make([]byte, 1+recipe.BeginLen)...)
		c, e, err := recipe.ReadCompression(bytes.NewReader(b))
		if err != nil {
			if !errors.Is(err, recipe.ErrCorrupt) || strings.Contains(err.Error(), "out of order") {
				t.Fatal(err)
			}
			return
		}
		if (e != nil) != (c == recipe.Reencoded || c == recipe.Patched) {
			t.Fatalf("%v with %+v", c, e)
		}
		if e == nil {
			return
		}
		again, err := recipe.AppendCompression(nil, 8, c, e)
		if err != nil {
			t.Fatal(err)
		}
		if _, e2, err := recipe.ReadCompression(bytes.NewReader(again)); err != nil || cmp.Diff(e, e2) != "" {
			t.Fatalf("%v\n%s", err, cmp.Diff(e, e2))
		}
	})
}
