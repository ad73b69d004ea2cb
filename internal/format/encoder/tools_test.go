package encoder

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"go/build"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"hydrofoil.dev/foil/internal/format/encoder/programs"
	"hydrofoil.dev/foil/internal/format/recipe"
)

// layer writes a tar stream of the Go library's own files to w, as builders do: by a tar.Writer.
func layer(t testing.TB, w io.Writer, limit int64) {
	t.Helper()
	a := tar.NewWriter(w)
	root := filepath.Join(build.Default.GOROOT, "src")
	total := int64(0)
	err := filepath.WalkDir(root, func(path string, d os.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() || total > limit {
			return err
		}
		b, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		total += int64(len(b))
		if err := a.WriteHeader(&tar.Header{Name: strings.TrimPrefix(path, root), Mode: 0o644, Size: int64(len(b))}); err != nil {
			return err
		}
		for len(b) > 0 && err == nil {
			n := min(len(b), 32<<10)
			_, err = a.Write(b[:n])
			b = b[n:]
		}
		return err
	})
	if err == nil {
		err = a.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
}

func plainLayer(t testing.TB, limit int64) []byte {
	var b bytes.Buffer
	layer(t, &b, limit)
	return b.Bytes()
}

// open reads b from an offset on.
func open(b []byte) func(context.Context, int64) (io.ReadCloser, error) {
	return func(_ context.Context, at int64) (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(b[at:])), nil
	}
}

func input(blob, plain []byte) Input {
	return Input{Size: int64(len(blob)), Blob: open(blob), Tar: open(plain), TarSize: int64(len(plain))}
}

// gzipOf is what a writer makes, if plain is written at once.
func gzipOf(t testing.TB, plain []byte, level int) []byte {
	var b bytes.Buffer
	w, err := gzip.NewWriterLevel(&b, level)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write(plain); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// filter runs a tool; it skips the test if there is none.
func filter(t testing.TB, plain []byte, name string, args ...string) []byte {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		t.Skipf("%s is not here: %v", name, err)
	}
	c := exec.Command(path, args...)
	c.Stdin = bytes.NewReader(plain)
	var out, msg bytes.Buffer
	c.Stdout, c.Stderr = &out, &msg
	if err := c.Run(); err != nil {
		t.Fatalf("%s: %v: %s", name, err, msg.Bytes())
	}
	return out.Bytes()
}

// checkRestore restores all of a blob, and ranges.
func checkRestore(t testing.TB, s *Set, e *recipe.Encoding, blob, plain []byte) {
	t.Helper()
	b, err := recipe.AppendCompression(nil, 8, recipe.Unknown, e)
	if err != nil {
		t.Fatal(err)
	}
	if _, e, err = recipe.ReadCompression(bytes.NewReader(b)); err != nil {
		t.Fatal(err)
	}
	r := rand.New(rand.NewPCG(1, uint64(len(blob))))
	for i := range 6 {
		from, to := int64(0), int64(len(blob))
		if i > 0 {
			from = r.Int64N(int64(len(blob)))
			to = from + 1 + r.Int64N(int64(len(blob))-from)
		}
		var out bytes.Buffer
		if err := s.Restore(t.Context(), &out, e, open(plain), from, to, 1+i%3); err != nil {
			t.Fatalf("bytes %d to %d: %v", from, to, err)
		}
		if !bytes.Equal(out.Bytes(), blob[from:to]) {
			t.Fatalf("bytes %d to %d are others", from, to)
		}
	}
}

// TestTools: blobs of tools are restored, bit for bit.
func TestTools(t *testing.T) {
	s := &Set{Programs: programs.Program}
	defer s.Close()
	plain := plainLayer(t, 5<<20)
	python := func(level int) func(testing.TB) []byte {
		return func(t testing.TB) []byte {
			return filter(t, plain, "python3", "-c", fmt.Sprintf("import gzip,sys; sys.stdout.buffer.write(gzip.compress(sys.stdin.buffer.read(), %d))", level))
		}
	}
	for name, tc := range map[string]struct {
		blob    func(testing.TB) []byte
		encoder string // "": none
		level   int
		block   int64
	}{
		"Go 1, at once": {func(t testing.TB) []byte { return gzipOf(t, plain, 1) }, Go, 1, 0},
		"Go 6, at once": {func(t testing.TB) []byte { return gzipOf(t, plain, 6) }, Go, 6, 0},
		"Go 6, as a builder": {func(t testing.TB) []byte {
			var b bytes.Buffer
			w := gzip.NewWriter(&b)
			layer(t, w, 5<<20)
			if err := w.Close(); err != nil {
				t.Fatal(err)
			}
			return b.Bytes()
		}, Go, 6, 0},
		"pigz 9":   {func(t testing.TB) []byte { return filter(t, plain, "pigz", "-9", "-n", "-p", "2") }, Zlib, 9, pigzBlock},
		"pigz 6":   {func(t testing.TB) []byte { return filter(t, plain, "pigz", "-6", "-n", "-p", "2") }, Zlib, 6, pigzBlock},
		"Python 9": {python(9), Zlib, 9, 0},
		"Python 6": {python(6), Zlib, 6, 0},
		"GNU gzip": {func(t testing.TB) []byte { return filter(t, plain, "gzip", "-6", "-n") }, "", 0, 0},
		"members":  {func(t testing.TB) []byte { return append(gzipOf(t, plain[:3<<20], 6), gzipOf(t, plain[3<<20:], 6)...) }, "", 0, 0},
		"not gzip": {func(testing.TB) []byte { return plain }, "", 0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			if strings.HasPrefix(name, "Go") {
				pinned(t)
			}
			blob := tc.blob(t)
			if tc.encoder != "" {
				if err := s.check(t.Context(), tc.encoder); errors.Is(err, ErrUnavailable) {
					t.Skip(err)
				}
			}
			e, skipped, err := s.Prove(t.Context(), input(blob, plain))
			if err != nil {
				t.Fatal(err)
			}
			if tc.encoder == "" {
				if e != nil {
					t.Fatalf("%s at level %d made it", e.Encoder, e.Level)
				}
				return
			}
			if e == nil {
				t.Fatalf("nothing was proven of %d bytes; not tried: %v", len(blob), skipped)
			}
			if e.Encoder != tc.encoder || e.Level != tc.level || e.Block != tc.block {
				t.Errorf("%s at level %d, blocks of %d", e.Encoder, e.Level, e.Block)
			}
			t.Logf("%d bytes, %d parts, recipe of %d bytes", len(blob), len(e.Parts), size(t, e))
			checkRestore(t, s, e, blob, plain)
		})
	}
}

// TestWrites: where the writes of a builder end makes another stream, which is proven all the same.
func TestWrites(t *testing.T) {
	pinned(t)
	r := rand.New(rand.NewPCG(3, 3))
	differed := 0
	for seed := range 2 {
		var blob, plain bytes.Buffer
		z, err := gzip.NewWriterLevel(&blob, 6)
		if err != nil {
			t.Fatal(err)
		}
		a := tar.NewWriter(io.MultiWriter(z, &plain))
		for i := range 30 {
			begin := (plain.Len()+block-1)/block*block + block
			end := begin + 20_000
			end += slideZone - end%slide + 100 + r.IntN(160)
			data := make([]byte, end-begin)
			for j := range data {
				// A match ends where the zone begins, and one from far away begins there.
				switch at := begin + j; {
				case j > 10_000 && at%slide >= slideZone-200 && at%slide < slideZone:
					data[j] = data[j-5000]
				case at > slide && at-slide+60 < plain.Len() && at%slide >= slideZone && at%slide < slideZone+25:
					data[j] = plain.Bytes()[at-slide+60]
				default:
					data[j] = byte(r.IntN(60))
				}
			}
			if err := a.WriteHeader(&tar.Header{Name: fmt.Sprint(i), Size: int64(len(data))}); err != nil {
				t.Fatal(err)
			}
			if _, err := a.Write(data); err != nil {
				t.Fatal(err)
			}
		}
		if err := errors.Join(a.Close(), z.Close()); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(gzipOf(t, plain.Bytes(), 6), blob.Bytes()) {
			differed++
		}
		s := &Set{}
		e, _, err := s.Prove(t.Context(), input(blob.Bytes(), plain.Bytes()))
		if err != nil || e == nil || e.Encoder != Go || e.Level != 6 {
			t.Fatalf("seed %d: %+v, %v", seed, e, err)
		}
		checkRestore(t, s, e, blob.Bytes(), plain.Bytes())
	}
	if differed == 0 {
		t.Error("nowhere did the ends of writes make a difference")
	}
}

func size(t testing.TB, e *recipe.Encoding) int {
	b, err := recipe.AppendCompression(nil, 8, recipe.Unknown, e)
	if err != nil {
		t.Fatal(err)
	}
	return len(b)
}

// pinned skips a test whose oracle is another encoder than the one that is followed.
func pinned(t testing.TB) {
	t.Helper()
	if err := gzipIsPinned(); err != nil {
		t.Skip(err)
	}
}

func gzipIsPinned() error {
	v := runtime.Version()
	if strings.HasPrefix(v, "go1.2") && len(v) > 5 && v[5] <= '6' && (len(v) == 6 || v[6] == '.') {
		return nil
	}
	return fmt.Errorf("compress/flate of %s makes other streams: the encoder was replaced after Go 1.26", v)
}
