package recipe_test

import (
	"archive/tar"
	"bytes"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/go-digest"
	"pgregory.net/rapid"

	"hydrofoil.dev/foil/internal/format/columns"
	lt "hydrofoil.dev/foil/internal/format/layer/layertest"
	"hydrofoil.dev/foil/internal/format/recipe"
)

var update = flag.Bool("update", false, "write the golden files")

// record makes the recipe of a tar stream, and returns the contents. It goes on
// as readers of layers do: what is no archive is read to its end all the same.
// Files whose number is in skip are passed over.
func record(r io.Reader, end recipe.End, skip ...int) (encoded []byte, contents [][]byte, err error) {
	var out bytes.Buffer
	w := recipe.NewWriter(&out)
	stream := w.Tap(r)
	archive := tar.NewReader(stream)
	for n := 0; ; n++ {
		h, err := archive.Next()
		if err != nil {
			break
		}
		if slices.Contains(skip, n) || h.Size == 0 || h.Typeflag != tar.TypeReg && h.Typeflag != tar.TypeGNUSparse {
			continue
		}
		w.Next()
		var content bytes.Buffer
		_, err = io.Copy(&content, readerFunc(func(p []byte) (int, error) { return w.Read(archive, p) }))
		contents = append(contents, content.Bytes())
		if err != nil {
			break
		}
	}
	if _, err := io.Copy(io.Discard, stream); err != nil {
		return nil, nil, err
	}
	err = w.Close(end)
	if w.Written() != int64(out.Len()) {
		return nil, nil, fmt.Errorf("%d bytes written, %d are there", w.Written(), out.Len())
	}
	return out.Bytes(), contents, err
}

type readerFunc func(p []byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }

// from is a Source of contents in memory. It holds that ranges go forward.
func from(contents [][]byte) recipe.Source {
	lastContent, lastEnd := int64(-1), int64(0)
	return func(content, offset, length int64) (io.Reader, error) {
		if content < lastContent || content == lastContent && offset < lastEnd {
			return nil, errors.New("out of order")
		}
		lastContent, lastEnd = content, offset+length
		if content >= int64(len(contents)) || offset+length > int64(len(contents[content])) {
			return nil, fmt.Errorf("%d bytes at %d are not there", length, offset)
		}
		return bytes.NewReader(contents[content][offset:]), nil
	}
}

func play(encoded []byte, contents [][]byte) ([]byte, recipe.End, error) {
	r := recipe.NewReader(bytes.NewReader(encoded), from(contents), recipe.Limits{})
	b, err := io.ReadAll(r)
	return b, r.End(), err
}

// checkExact plays the recipe of a stream.
func checkExact(t interface {
	Helper()
	Fatalf(string, ...any)
}, stream []byte, skip ...int) (encoded []byte, contents [][]byte) {
	t.Helper()
	want := recipe.End{Size: int64(len(stream)), DiffID: digest.FromBytes(stream), Compression: recipe.Plain}
	encoded, contents, err := record(bytes.NewReader(stream), want, skip...)
	if err != nil {
		t.Fatalf("record: %v", err)
	}
	want.Contents = int64(len(contents))
	got, end, err := play(encoded, contents)
	if err != nil {
		t.Fatalf("play: %v", err)
	}
	if !bytes.Equal(got, stream) {
		t.Fatalf("%d bytes were made of a stream of %d, or others", len(got), len(stream))
	}
	if d := cmp.Diff(want, end); d != "" {
		t.Fatalf("its end (-want +got):\n%s", d)
	}
	return encoded, contents
}

// TestLiterals says what must not be in a recipe: the bytes of files.
func TestLiterals(t *testing.T) {
	noise := make([]byte, 300_000)
	for i, x := 0, uint32(1); i < len(noise); i++ {
		x = x*1664525 + 1013904223
		noise[i] = byte(x >> 24)
	}
	file := string(noise)
	var small lt.Layer
	for i := range 200 {
		small = append(small, lt.File(fmt.Sprint(i), 0o644, file[20*i:][:20]))
	}
	end := string(make([]byte, 1024))
	for name, stream := range map[string][]byte{
		"plain":       lt.Layer{lt.File("a", 0o644, file), lt.Link("b", "a"), lt.File("c", 0o644, file[1:])}.TarBytes(t),
		"small":       small.TarBytes(t),
		"sparse GNU":  []byte(string(lt.Sparse(lt.SparseGNU, "s", 9<<20, fragments(file)...)) + end),
		"sparse 0.0":  []byte(string(lt.Sparse(lt.SparsePAX00, "s", 9<<20, fragments(file)...)) + end),
		"sparse 0.1":  []byte(string(lt.Sparse(lt.SparsePAX01, "s", 9<<20, fragments(file)...)) + end),
		"sparse 1.0":  []byte(string(lt.Sparse(lt.SparsePAX10, "s", 9<<20, fragments(file)...)) + end),
		"long zeros":  append(lt.Layer{lt.File("a", 0o644, file)}.TarBytes(t), make([]byte, 20<<20)...),
		"cut in file": lt.Layer{lt.File("a", 0o644, file)}.TarBytes(t)[:200_000],
	} {
		t.Run(name, func(t *testing.T) {
			encoded, contents := checkExact(t, stream)
			if len(contents) == 0 {
				t.Error("no file was read")
			}
			if len(encoded) > 4000 {
				t.Errorf("recipe of %d bytes", len(encoded))
			}
		})
	}
}

// fragments puts parts of data that begin and end with zeros into a sparse file.
func fragments(data string) []lt.Fragment {
	zeros := string(make([]byte, 700))
	list := []lt.Fragment{{Offset: 0, Data: data[:4096]}}
	for i := range 30 {
		list = append(list, lt.Fragment{Offset: int64(1+i) * 200_000, Data: zeros + data[i*5000:][:4321] + zeros})
	}
	return append(list, lt.Fragment{Offset: 7 << 20, Data: data[200_000:]})
}

// drawStream draws a tar stream, or something that begins like one.
func drawStream(t *rapid.T) []byte {
	var out bytes.Buffer
	var names []string
	data := func() string {
		switch rapid.IntRange(0, 4).Draw(t, "data") {
		case 0:
			return ""
		case 1:
			return strings.Repeat(rapid.StringN(1, 5, 20).Draw(t, "pattern"), rapid.IntRange(1, 400).Draw(t, "times"))
		case 2:
			return string(make([]byte, rapid.IntRange(1, 5000).Draw(t, "zeros")))
		}
		return string(rapid.SliceOfN(rapid.Byte(), 1, 1500).Draw(t, "bytes"))
	}
	name := func() string {
		n := rapid.StringMatching(`[a-z]{1,8}(/[a-zé]{1,9}){0,3}`).Draw(t, "name")
		if rapid.IntRange(0, 5).Draw(t, "long") == 0 {
			n += "/" + strings.Repeat("long-", rapid.IntRange(20, 60).Draw(t, "times"))
		}
		return n
	}
	for range rapid.IntRange(0, 8).Draw(t, "entries") {
		h := tar.Header{Name: name(), Mode: 0o644, ModTime: time.Unix(rapid.Int64Range(0, 1<<33).Draw(t, "mtime"), 0),
			Format: rapid.SampledFrom([]tar.Format{tar.FormatUnknown, tar.FormatUSTAR, tar.FormatPAX, tar.FormatGNU}).Draw(t, "format")}
		body := ""
		switch kind := rapid.IntRange(0, 6).Draw(t, "kind"); {
		case kind == 0 && len(names) > 0:
			h.Typeflag, h.Linkname = tar.TypeLink, rapid.SampledFrom(names).Draw(t, "target")
		case kind == 1:
			h.Typeflag, h.Linkname = tar.TypeSymlink, name()
		case kind == 2:
			h.Typeflag = tar.TypeDir
		case kind == 3:
			kind := rapid.SampledFrom(lt.SparseKinds).Draw(t, "sparse")
			var list []lt.Fragment
			at := int64(0)
			for range rapid.IntRange(0, 30).Draw(t, "fragments") {
				at += rapid.Int64Range(0, 70_000).Draw(t, "hole")
				f := lt.Fragment{Offset: at, Data: data()}
				at += int64(len(f.Data))
				list = append(list, f)
			}
			out.Write(lt.Sparse(kind, "sparse", at+rapid.Int64Range(0, 70_000).Draw(t, "hole"), list...))
			continue
		default:
			h.Typeflag, body = tar.TypeReg, data()
			names = append(names, h.Name)
			if rapid.Bool().Draw(t, "xattr") {
				h.Format = tar.FormatPAX
				h.PAXRecords = map[string]string{"SCHILY.xattr.user.x": data()}
			}
		}
		h.Size = int64(len(body))
		w := tar.NewWriter(&out)
		if w.WriteHeader(&h) != nil {
			continue // a format that cannot say it; nothing was written
		}
		_, err := io.WriteString(w, body)
		if err = errors.Join(err, w.Flush()); err != nil {
			t.Fatal(err)
		}
	}
	b := out.Bytes()
	if rapid.Bool().Draw(t, "end") {
		b = append(b, make([]byte, 1024)...)
	}
	b = append(b, make([]byte, rapid.IntRange(0, 20_000).Draw(t, "padding"))...)
	if rapid.Bool().Draw(t, "garbage") {
		b = append(b, rapid.SliceOf(rapid.Byte()).Draw(t, "after")...)
	}
	if rapid.IntRange(0, 2).Draw(t, "cut") == 0 {
		b = b[:rapid.IntRange(0, len(b)).Draw(t, "length")]
	}
	if rapid.IntRange(0, 3).Draw(t, "damage") == 0 && len(b) > 0 {
		b[rapid.IntRange(0, len(b)-1).Draw(t, "where")] ^= 1 << rapid.IntRange(0, 7).Draw(t, "bit")
	}
	return b
}

// TestAnyStream: whatever a stream is, its recipe makes it again.
func TestAnyStream(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		stream := drawStream(t)
		skip := rapid.SliceOf(rapid.IntRange(0, 9)).Draw(t, "skip")
		checkExact(t, stream, skip...)
	})
}

// TestOtherBytes: what is not as it passed is literal, wherever it went.
func TestOtherBytes(t *testing.T) {
	stream := strings.Repeat("what passed and is not what was read ", 20)
	for name, read := range map[string]func(p []byte) []byte{
		"other":    bytes.ToUpper,
		"the end":  func(p []byte) []byte { return p[len(p)/2:] },
		"the rest": func(p []byte) []byte { return p[:len(p)*3/4] },
		"nothing":  func([]byte) []byte { return nil },
	} {
		var out bytes.Buffer
		w := recipe.NewWriter(&out)
		below := w.Tap(strings.NewReader(stream))
		w.Next()
		content, err := io.ReadAll(readerFunc(func(p []byte) (int, error) {
			return w.Read(readerFunc(func(p []byte) (int, error) {
				b := make([]byte, len(p))
				n, err := io.ReadFull(below, b)
				if err == io.ErrUnexpectedEOF {
					err = io.EOF
				}
				return copy(p, read(b[:n])), err
			}), p)
		}))
		if err = errors.Join(err, w.Close(recipe.End{})); err != nil {
			t.Fatal(err)
		}
		got, _, err := play(out.Bytes(), [][]byte{content})
		if string(got) != stream || err != nil {
			t.Errorf("%s: made %q, %v", name, got, err)
		}
	}
}

// TestPieces: how reads cut the stream changes nothing.
func TestPieces(t *testing.T) {
	stream := append(lt.Sparse(lt.SparsePAX10, "s", 200_000, lt.Fragment{Offset: 500, Data: strings.Repeat("abc", 1000)}),
		lt.Layer{lt.File("a", 0o644, strings.Repeat("x", 5000))}.TarBytes(t)...)
	for name, cut := range map[string]func(io.Reader) io.Reader{
		"one": iotest.OneByteReader, "half": iotest.HalfReader, "data and error": iotest.DataErrReader,
	} {
		encoded, contents, err := record(cut(bytes.NewReader(stream)), recipe.End{})
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		r := recipe.NewReader(cut(bytes.NewReader(encoded)), from(contents), recipe.Limits{})
		got, err := io.ReadAll(cut(r))
		if err != nil || !bytes.Equal(got, stream) {
			t.Errorf("%s: other bytes, %v", name, err)
		}
	}
}

// TestManyRanges needs several blocks, for ranges and for literal bytes.
func TestManyRanges(t *testing.T) {
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	for i := range recipe.MaxRanges + 100 {
		if err := w.WriteHeader(&tar.Header{Name: fmt.Sprint("file", i), Size: 3, Mode: 0o644}); err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(w, "%03d", i%1000)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	_, contents := checkExact(t, out.Bytes())
	if len(contents) != recipe.MaxRanges+100 {
		t.Errorf("%d contents", len(contents))
	}
	// One content that is all holes and fragments of 32 bytes: no literal bytes between.
	var list []lt.Fragment
	for i := range int64(recipe.MaxRanges + 100) {
		list = append(list, lt.Fragment{Offset: i * 100, Data: fmt.Sprintf("%032d", i+1)})
	}
	stream := lt.Sparse(lt.SparsePAX10, "s", 100*int64(len(list)), list...)
	if _, contents = checkExact(t, stream); len(contents) != 1 {
		t.Errorf("%d contents", len(contents))
	}
}

// coded is a recipe that is put together by hand.
type coded struct {
	blocks      [][5][]byte
	tail        []byte // everything after the blocks; nil: of size
	size        uint64
	contents    uint64
	diffID      string
	compression []byte
}

func numbers(list ...uint64) (b []byte) {
	for _, n := range list {
		b = binary.AppendUvarint(b, n)
	}
	return b
}

func ranges(before, content, offset, length []uint64, literals string) [5][]byte {
	return [5][]byte{numbers(before...), numbers(content...), numbers(offset...), numbers(length...), []byte(literals)}
}

func (c coded) bytes() []byte {
	b := []byte("HFRCP\r\n\x01")
	for _, block := range c.blocks {
		var all []byte
		for _, column := range block {
			all = columns.Append(all, column, true)
		}
		b = append(binary.AppendUvarint(b, uint64(len(all))), all...)
	}
	b = append(b, 0)
	if c.tail != nil {
		return append(b, c.tail...)
	}
	b = append(b, numbers(c.size, c.contents)...)
	b = columns.AppendBlock(b, c.diffID)
	begin := len(b)
	if c.compression == nil {
		c.compression = []byte{0, 0}
	}
	return binary.LittleEndian.AppendUint64(append(b, c.compression...), uint64(begin))
}

func TestHandmade(t *testing.T) {
	contents := [][]byte{[]byte("0123456789"), []byte("abcdefghij")}
	u := func(list ...uint64) []uint64 { return list }
	for name, tc := range map[string]struct {
		coded
		want, err string
	}{
		"nothing": {},
		"literal": {coded: coded{blocks: [][5][]byte{ranges(nil, nil, nil, nil, "xyz")}, size: 3}, want: "xyz"},
		"ranges": {coded: coded{blocks: [][5][]byte{
			ranges(u(1, 0, 2), u(0, 0, 1), u(2, 3, 0), u(2, 1, 10), "xyzend"),
			ranges(u(0), u(1), u(10), u(0), "")}, size: 99},
			want: "x237yzabcdefghijend", err: "empty range"},
		"two blocks": {coded: coded{blocks: [][5][]byte{
			ranges(u(0), u(1), u(2), u(2), ""), ranges(u(1), u(1), u(4), u(1), "-")}, size: 4, contents: 2}, want: "cd-e"},
		"later compression": {coded: coded{size: 0, compression: []byte{99, 3, 'a', 'b', 'c', 1, 'd', 0}}},

		"not one":              {coded: coded{}, err: "does not start"},
		"back in a content":    {coded: coded{blocks: [][5][]byte{ranges(u(0), u(0), u(2), u(2), ""), ranges(u(0), u(0), u(3), u(1), "")}}, want: "23", err: "content 0 at 3 after content 0 up to 4"},
		"back to a content":    {coded: coded{blocks: [][5][]byte{ranges(u(0), u(1), u(2), u(2), ""), ranges(u(0), u(0), u(3), u(1), "")}}, want: "cd", err: "content 0 at 3 after content 1"},
		"beyond a content":     {coded: coded{blocks: [][5][]byte{ranges(u(0), u(0), u(5), u(6), "")}}, err: "not there"},
		"no such content":      {coded: coded{blocks: [][5][]byte{ranges(u(0), u(2), u(0), u(1), "")}}, err: "not there"},
		"huge range":           {coded: coded{blocks: [][5][]byte{ranges(u(0), u(0), u(1<<61), u(1<<61), "")}}, err: "ends beyond"},
		"huge offsets":         {coded: coded{blocks: [][5][]byte{ranges(u(0, 0), u(0, 0), u(1, 1<<61), u(1, 1), "")}}, want: "1", err: "ends beyond"},
		"above the limit":      {coded: coded{blocks: [][5][]byte{ranges(u(0), u(0), u(0), u(1<<40+1), "")}}, err: "more than 1099511627776"},
		"more numbers":         {coded: coded{blocks: [][5][]byte{ranges(u(0), u(0, 0), u(0), u(1), "")}}, err: "columns of 1 and 2"},
		"too many ranges":      {coded: coded{blocks: [][5][]byte{{make([]byte, recipe.MaxRanges+1), nil, nil, nil, nil}}}, err: "at most 16384"},
		"fewer literals":       {coded: coded{blocks: [][5][]byte{ranges(u(2), u(0), u(0), u(1), "x")}}, err: "2 literal bytes before a range, the block has 1"},
		"empty block":          {coded: coded{blocks: [][5][]byte{ranges(nil, nil, nil, nil, "")}}, err: "0 ranges, 0 literal bytes"},
		"too many literals":    {coded: coded{blocks: [][5][]byte{{nil, nil, nil, nil, make([]byte, recipe.MaxLiterals+1)}}}, err: "no number of at most 1048576"},
		"wrong size":           {coded: coded{size: 1}, err: "has 1 bytes"},
		"contents that end":    {coded: coded{blocks: [][5][]byte{ranges(u(0), u(1), u(0), u(1), "")}, size: 1, contents: 1}, want: "a", err: "there are 1 contents; it uses number 1"},
		"bad diff ID":          {coded: coded{diffID: "sha256:x"}, err: "diff ID"},
		"long diff ID":         {coded: coded{diffID: strings.Repeat("x", 1000)}, err: "at most 256"},
		"payload of a kind":    {coded: coded{compression: []byte{1, 1, 0, 0}}, err: "with a payload"},
		"huge chunk":           {coded: coded{compression: append(numbers(99, recipe.MaxChunk+1), 0)}, err: "at most 1048576"},
		"wrong begin":          {coded: coded{tail: []byte{0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8}}, err: "its compression is at"},
		"more after it":        {coded: coded{tail: append(coded{}.bytes()[9:], 0)}, err: "follows"},
		"cut":                  {coded: coded{tail: coded{}.bytes()[9:13]}, err: "unexpected EOF"},
		"number not shortest":  {coded: coded{tail: []byte{0x80, 0, 0}}, err: "no number"},
		"number without end":   {coded: coded{tail: bytes.Repeat([]byte{0x80}, 20)}, err: "no number"},
		"bytes after a column": {coded: coded{blocks: [][5][]byte{{nil, nil, nil, nil, []byte("x")}}}, err: "1 bytes too many"},
	} {
		t.Run(name, func(t *testing.T) {
			encoded := tc.bytes()
			switch name {
			case "not one":
				encoded[0]++
			case "bytes after a column":
				encoded[8]++
				encoded = slices.Insert(encoded, 9+int(encoded[8])-1, 7)
			}
			got, end, err := play(encoded, contents)
			if string(got) != tc.want {
				t.Errorf("made %q, want %q", got, tc.want)
			}
			if tc.err == "" {
				if err != nil || end.Compression != recipe.Unknown {
					t.Errorf("got %v, %+v", err, end)
				}
				return
			}
			if err == nil || !strings.Contains(err.Error(), tc.err) {
				t.Errorf("error %v, want %q", err, tc.err)
			}
			if !errors.Is(err, recipe.ErrCorrupt) && tc.err != "not there" {
				t.Errorf("%v is no ErrCorrupt", err)
			}
		})
	}
}

func TestLimits(t *testing.T) {
	stream := lt.Layer{lt.File("a", 0o644, "some"), lt.File("b", 0o644, "bytes")}.TarBytes(t)
	encoded, contents, err := record(bytes.NewReader(stream), recipe.End{})
	if err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		limits recipe.Limits
		err    string
	}{
		"enough":   {recipe.Limits{Size: int64(len(stream)), Contents: 2}, ""},
		"size":     {recipe.Limits{Size: int64(len(stream)) - 1}, "more than"},
		"contents": {recipe.Limits{Contents: 1}, "content 1 of 1"},
	} {
		_, err := io.ReadAll(recipe.NewReader(bytes.NewReader(encoded), from(contents), tc.limits))
		if tc.err == "" && err != nil || tc.err != "" && (err == nil || !strings.Contains(err.Error(), tc.err)) {
			t.Errorf("%s: %v, want %q", name, err, tc.err)
		}
	}
}

// TestLimitOfARange: nothing is made of a range that does not fit with what comes before it.
func TestLimitOfARange(t *testing.T) {
	b := coded{blocks: [][5][]byte{ranges([]uint64{2}, []uint64{0}, []uint64{0}, []uint64{2}, "xy")}, size: 4, contents: 1}.bytes()
	for size, want := range map[int64]string{4: "xyab", 3: ""} {
		r := recipe.NewReader(bytes.NewReader(b), from([][]byte{[]byte("ab")}), recipe.Limits{Size: size})
		got, err := io.ReadAll(r)
		if string(got) != want || (err == nil) != (size == 4) {
			t.Errorf("at most %d bytes: %q, %v", size, got, err)
		}
	}
}

// TestFailures: errors of what is below are told as they are.
func TestFailures(t *testing.T) {
	stream := lt.Layer{lt.File("a", 0o644, "some")}.TarBytes(t)
	broken := errors.New("broken")
	w := recipe.NewWriter(failing{broken})
	if _, err := io.Copy(io.Discard, w.Tap(bytes.NewReader(stream))); err != nil {
		t.Errorf("reading fails with the writer: %v", err)
	}
	if err := w.Close(recipe.End{}); !errors.Is(err, broken) {
		t.Errorf("Close: %v", err)
	}
	encoded, contents, err := record(bytes.NewReader(stream), recipe.End{})
	if err != nil {
		t.Fatal(err)
	}
	for n := range encoded {
		if _, _, err := play(encoded[:n], contents); !errors.Is(err, recipe.ErrCorrupt) {
			t.Fatalf("%d of %d bytes: %v", n, len(encoded), err)
		}
		r := io.MultiReader(bytes.NewReader(encoded[:n]), iotest.ErrReader(broken))
		if _, err := io.ReadAll(recipe.NewReader(r, from(contents), recipe.Limits{})); !errors.Is(err, broken) || errors.Is(err, recipe.ErrCorrupt) {
			t.Fatalf("broken after %d bytes: %v", n, err)
		}
	}
	short := func(int64, int64, int64) (io.Reader, error) { return strings.NewReader("so"), nil }
	_, err = io.ReadAll(recipe.NewReader(bytes.NewReader(encoded), short, recipe.Limits{}))
	if !errors.Is(err, io.ErrUnexpectedEOF) || !strings.Contains(err.Error(), "content 0 ends at byte 2") {
		t.Errorf("a content that ends early: %v", err)
	}
}

type failing struct{ err error }

func (f failing) Write([]byte) (int, error) { return 0, f.err }

// golden is what testdata/layer.recipe was made of.
func golden(t testing.TB) []byte {
	stream := lt.Layer{
		lt.Dir("etc", 0o755), lt.File("etc/motd", 0o644, "hello\n"), lt.File("etc/empty", 0o644, ""), lt.Link("etc/motd2", "etc/motd"),
		lt.File("etc/with", 0o600, strings.Repeat("attributes ", 200)).Xattr("user.a", "b"),
	}.TarBytes(t)
	stream = append(lt.Sparse(lt.SparsePAX10, "sparse", 1<<20, lt.Fragment{Offset: 4096, Data: strings.Repeat("data ", 300)}), stream...)
	return append(stream, make([]byte, 8192)...)
}

// TestGolden plays a recipe as it was written when the format was fixed.
func TestGolden(t *testing.T) {
	stream := golden(t)
	end := recipe.End{Size: int64(len(stream)), Contents: 3, DiffID: digest.FromBytes(stream), Compression: recipe.Intact}
	encoded, contents, err := record(bytes.NewReader(stream), end)
	if err != nil {
		t.Fatal(err)
	}
	name := filepath.Join("testdata", "layer.recipe")
	if *update {
		if err := os.WriteFile(name, encoded, 0o666); err != nil {
			t.Fatal(err)
		}
	}
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	got, gotEnd, err := play(b, contents)
	if err != nil || !bytes.Equal(got, stream) || gotEnd != end {
		t.Errorf("%d bytes, %+v, %v", len(got), gotEnd, err)
	}
}

// FuzzReader plays foreign recipes.
func FuzzReader(f *testing.F) {
	b, err := os.ReadFile(filepath.Join("testdata", "layer.recipe"))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Add(coded{blocks: [][5][]byte{ranges([]uint64{1, 0}, []uint64{0, 0}, []uint64{2, 3}, []uint64{2, 1}, "xyz")}, size: 6, contents: 1}.bytes())
	f.Add(coded{compression: []byte{99, 3, 'a', 'b', 'c', 0}, diffID: string(digest.FromString(""))}.bytes())
	zeros := make([]byte, 1<<20)
	contents := [][]byte{zeros, zeros[:1500], zeros[:7], zeros}
	f.Fuzz(func(t *testing.T, b []byte) {
		limits := recipe.Limits{Size: 8 << 20, Contents: 4}
		r := recipe.NewReader(bytes.NewReader(b), from(contents), limits)
		n, err := io.Copy(io.Discard, r)
		if n > limits.Size {
			t.Fatalf("%d bytes", n)
		}
		if end := r.End(); err == nil && (end.Size != n || end.Contents > limits.Contents || end.Compression > recipe.Intact) {
			t.Fatalf("%d bytes, end %+v", n, end)
		}
		if errors.Is(err, io.EOF) || err != nil && strings.Contains(err.Error(), "out of order") {
			t.Fatal(err)
		}
	})
}

// FuzzWriter takes anything for a tar stream.
func FuzzWriter(f *testing.F) {
	f.Add(golden(f))
	for _, kind := range lt.SparseKinds {
		f.Add(lt.Sparse(kind, "s", 100_000, fragments(strings.Repeat("0123456789", 30_000))[:7]...))
	}
	f.Fuzz(func(t *testing.T, stream []byte) {
		// A sparse file of exabytes takes for ever to read; layer.Options bound that.
		archive := tar.NewReader(bytes.NewReader(stream))
		for total := int64(0); ; {
			h, err := archive.Next()
			if err != nil {
				break
			}
			if total += h.Size; h.Size > 1<<24 || total > 1<<24 {
				t.Skip()
			}
		}
		checkExact(t, stream)
	})
}
