package inflate_test

import (
	"bytes"
	"compress/flate"
	stdgzip "compress/gzip"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/iotest"
	"time"

	"github.com/klauspost/compress/gzip"
	"pgregory.net/rapid"

	"hydrofoil.dev/foil/internal/server/layer/inflate"
)

// compare reads a stream both ways: both give the same, or both fail.
func compare(t interface {
	Helper()
	Fatalf(string, ...any)
}, stream []byte) {
	t.Helper()
	got, err := io.ReadAll(inflate.NewReader(bytes.NewReader(stream)))
	var want []byte
	z, wantErr := stdgzip.NewReader(bytes.NewReader(stream))
	if wantErr == nil {
		want, wantErr = io.ReadAll(z)
	}
	switch {
	case (err == nil) != (wantErr == nil):
		t.Fatalf("error %v, want %v", err, wantErr)
	case err == nil && !bytes.Equal(got, want):
		t.Fatalf("%d bytes, want %d, or other ones", len(got), len(want))
	case err != nil && !bytes.HasPrefix(want, got):
		t.Fatalf("before the error %v: %d bytes, want the start of %d", err, len(got), len(want))
	case err != nil && !errors.Is(err, inflate.ErrCorrupt) && err != io.ErrUnexpectedEOF:
		t.Fatalf("error %v", err)
	}
}

func zip(t testing.TB, level int, b []byte) []byte {
	t.Helper()
	var out bytes.Buffer
	z, err := stdgzip.NewWriterLevel(&out, level)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := z.Write(b); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// text compresses into every kind of block: runs, words, noise.
func text(seed uint64, n int) []byte {
	r := rand.New(rand.NewPCG(seed, 1))
	var b bytes.Buffer
	for b.Len() < n {
		switch r.IntN(5) {
		case 0:
			b.Write(bytes.Repeat([]byte{byte(r.Uint32())}, r.IntN(2000)))
		case 1:
			noise := make([]byte, r.IntN(60_000))
			for i := range noise {
				noise[i] = byte(r.Uint32())
			}
			b.Write(noise)
		case 2:
			if b.Len() > 0 {
				from := max(0, b.Len()-1-r.IntN(40_000))
				b.Write(bytes.Clone(b.Bytes()[from : from+r.IntN(b.Len()-from)]))
			}
		case 3:
			// Values of very unequal frequency make long codes.
			for range r.IntN(30_000) {
				b.WriteByte(byte(r.ExpFloat64() * 12))
			}
		default:
			for range r.IntN(3000) {
				fmt.Fprintf(&b, "%d, ", r.IntN(10_000))
			}
		}
	}
	return b.Bytes()[:n]
}

func TestSameAsStandard(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		var stream, want []byte
		for range rapid.IntRange(1, 3).Draw(r, "members") {
			b := text(rapid.Uint64().Draw(r, "seed"), rapid.IntRange(0, 600_000).Draw(r, "length"))
			stream = append(stream, zip(t, rapid.IntRange(-2, 9).Draw(r, "level"), b)...)
			want = append(want, b...)
		}
		var in io.Reader = bytes.NewReader(stream)
		if rapid.Bool().Draw(r, "dribble") {
			in = &stepReader{in, rapid.IntRange(1, 70_000).Draw(r, "step")}
		}
		got, err := io.ReadAll(inflate.NewReader(in))
		if err != nil || !bytes.Equal(got, want) {
			r.Fatalf("%d bytes, %v; want %d", len(got), err, len(want))
		}
	})
}

type stepReader struct {
	r    io.Reader
	step int
}

func (s *stepReader) Read(p []byte) (int, error) { return s.r.Read(p[:min(len(p), s.step)]) }

// Streams that are cut anywhere end early, not in an error of another kind, and
// give nothing that was not there.
func TestCut(t *testing.T) {
	for _, level := range []int{0, 1, 6, -2} {
		b := text(uint64(level+5), 40_000)
		stream := zip(t, level, b)
		for n := 0; n < len(stream); n += 1 + n/200 {
			got, err := io.ReadAll(inflate.NewReader(iotest.HalfReader(bytes.NewReader(stream[:n]))))
			if err != io.ErrUnexpectedEOF || !bytes.HasPrefix(b, got) {
				t.Fatalf("level %d, cut after %d of %d bytes: %d bytes, %v", level, n, len(stream), len(got), err)
			}
		}
	}
}

// Damaged streams are errors where they are for the standard library.
func TestDamaged(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		stream := zip(t, rapid.IntRange(-2, 9).Draw(r, "level"), text(rapid.Uint64().Draw(r, "seed"), rapid.IntRange(1, 50_000).Draw(r, "length")))
		for range rapid.IntRange(1, 3).Draw(r, "changes") {
			stream[rapid.IntRange(0, len(stream)-1).Draw(r, "at")] ^= byte(rapid.IntRange(1, 255).Draw(r, "by"))
		}
		compare(r, stream)
	})
}

func TestHeaders(t *testing.T) {
	body := func(change func(*stdgzip.Writer)) []byte {
		var out bytes.Buffer
		z := stdgzip.NewWriter(&out)
		change(z)
		z.Write([]byte("hello"))
		z.Close()
		return out.Bytes()
	}
	plain := body(func(*stdgzip.Writer) {})
	withSum := bytes.Clone(plain)
	withSum[3] |= 2
	sum := append(withSum[:10:10], append([]byte{0x99, 0x99}, plain[10:]...)...)
	for name, stream := range map[string][]byte{
		"plain":          plain,
		"all fields":     body(func(z *stdgzip.Writer) { z.Name, z.Comment, z.Extra = "name", "comment", make([]byte, 40_000) }),
		"longest name":   body(func(z *stdgzip.Writer) { z.Name = strings.Repeat("x", 511) }),
		"too long":       body(func(z *stdgzip.Writer) { z.Name = strings.Repeat("x", 512) }),
		"wrong checksum": sum,
		"empty":          {},
		"zeros after":    append(bytes.Clone(plain), 0, 0, 0, 0),
		"text after":     append(bytes.Clone(plain), "more"...),
		"half a header":  append(bytes.Clone(plain), plain[:5]...),
		"two":            append(bytes.Clone(plain), plain...),
	} {
		t.Run(name, func(t *testing.T) { compare(t, stream) })
	}
}

// A match reaches back into its own member only.
func TestMembersAreApart(t *testing.T) {
	var out bytes.Buffer
	f, err := flate.NewWriterDict(&out, 9, []byte("a word of the member before"))
	if err != nil {
		t.Fatal(err)
	}
	f.Write([]byte("a word of the member before"))
	f.Close()
	second := append([]byte{0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 0}, out.Bytes()...)
	stream := append(zip(t, 6, []byte("a word of the member before")), second...)
	if _, err := io.ReadAll(inflate.NewReader(bytes.NewReader(append(stream, make([]byte, 8)...)))); !errors.Is(err, inflate.ErrCorrupt) {
		t.Errorf("got %v", err)
	}
}

// An error of the input is told as it is.
func TestInputError(t *testing.T) {
	broken := errors.New("broken")
	stream := zip(t, 6, text(3, 100_000))
	r := inflate.NewReader(io.MultiReader(bytes.NewReader(stream[:len(stream)/2]), iotest.ErrReader(broken)))
	for range 2 {
		if _, err := io.ReadAll(r); err != broken {
			t.Errorf("got %v", err)
		}
	}
}

func FuzzReader(f *testing.F) {
	for level := -2; level <= 9; level++ {
		f.Add(zip(f, level, text(uint64(level+2), 3000)))
	}
	f.Add(append(zip(f, 6, []byte("one")), zip(f, 0, []byte("two"))...))
	f.Fuzz(func(t *testing.T, stream []byte) {
		if len(stream) > 1<<16 {
			t.Skip()
		}
		compare(t, stream)
	})
}

// BenchmarkReader decompresses some 64 MB of this machine's /usr/lib as gzip -6
// has it, with this package and the two that could be used instead.
func BenchmarkReader(b *testing.B) {
	names, err := exec.Command("find", "/usr/lib", "-xdev", "-type", "f", "-size", "-4M").Output()
	if err != nil {
		b.Skipf("list files: %v", err)
	}
	var all []byte
	for name := range strings.Lines(string(names)) {
		if c, err := os.ReadFile(filepath.Clean(strings.TrimSpace(name))); err == nil && len(all) < 64<<20 {
			all = append(all, c...)
		}
	}
	stream := zip(b, 6, all)
	for name, open := range map[string]func(io.Reader) (io.Reader, error){
		"inflate":   func(r io.Reader) (io.Reader, error) { return inflate.NewReader(r), nil },
		"klauspost": func(r io.Reader) (io.Reader, error) { return gzip.NewReader(r) },
		"standard":  func(r io.Reader) (io.Reader, error) { return stdgzip.NewReader(r) },
	} {
		b.Run(name, func(b *testing.B) {
			b.SetBytes(int64(len(all)))
			buf := make([]byte, 128<<10)
			before := cpuTime(b)
			for b.Loop() {
				z, err := open(bytes.NewReader(stream))
				if err != nil {
					b.Fatal(err)
				}
				if _, err := io.CopyBuffer(struct{ io.Writer }{io.Discard}, struct{ io.Reader }{z}, buf); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(len(all))/1e6*float64(b.N)/(cpuTime(b)-before).Seconds(), "MB/cpu-s")
		})
	}
}

// cpuTime is what the process has used so far.
func cpuTime(b *testing.B) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
