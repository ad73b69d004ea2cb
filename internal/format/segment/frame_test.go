package segment_test

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/klauspost/compress/zstd"
	"pgregory.net/rapid"

	"hydrofoil.dev/foil/internal/format/segment"
)

func TestFrameRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var segments [][]byte
		var all []byte
		for range rapid.IntRange(1, 5).Draw(t, "segments") {
			s := rapid.SliceOfN(rapid.Byte(), 1, 2000).Draw(t, "bytes")
			s = bytes.Repeat(s, rapid.IntRange(1, 50).Draw(t, "repeat"))
			segments, all = append(segments, s), append(all, s...)
		}
		enc := rapid.SampledFrom([]segment.Encoding{segment.Stored, segment.Zstd}).Draw(t, "encoding")
		frame, err := segment.AppendFrame([]byte("before"), enc, segments...)
		if err != nil {
			t.Fatal(err)
		}
		frame, ok := bytes.CutPrefix(frame, []byte("before"))
		if !ok || len(frame) > segment.MaxEncoded(len(all)) {
			t.Fatalf("frame of %d bytes for %d", len(frame), len(all))
		}
		got, err := segment.DecodeFrame([]byte("kept"), frame, len(all))
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, append([]byte("kept"), all...)) {
			t.Fatal("decodes to something else")
		}
	})
}

func TestFrameIncompressible(t *testing.T) {
	b := randomBytes(30, 5000)
	frame, err := segment.AppendFrame(nil, segment.Zstd, b)
	if err != nil {
		t.Fatal(err)
	}
	if segment.Encoding(frame[0]) != segment.Stored || len(frame) != segment.MaxEncoded(len(b)) {
		t.Errorf("encoding %d, %d bytes", frame[0], len(frame))
	}
}

func TestFrameRefused(t *testing.T) {
	z, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	bomb := z.EncodeAll(make([]byte, 64<<20), []byte{byte(segment.Zstd)})
	good, err := segment.AppendFrame(nil, segment.Zstd, bytes.Repeat([]byte("abc"), 100))
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name  string
		frame []byte
		raw   int
	}{
		{"empty", nil, 5},
		{"no raw length", good, 0},
		{"huge raw length", good, segment.MaxFrameRaw + 1},
		{"unknown encoding", []byte{9, 1, 2}, 2},
		{"stored too short", []byte{0, 1, 2}, 3},
		{"stored too long", []byte{0, 1, 2}, 1},
		{"decodes to more", good, 299},
		{"decodes to less", good, 301},
		{"cut", good[:len(good)-1], 300},
		{"no zstd", []byte{1, 2, 3}, 2},
		{"bomb", bomb, segment.MaxFrameRaw},
		{"repeated", append(bytes.Clone(good), good[1:]...), 300},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := segment.DecodeFrame([]byte("kept"), c.frame, c.raw)
			if !errors.Is(err, segment.ErrCorrupt) || string(got) != "kept" {
				t.Errorf("got %d bytes, %v", len(got), err)
			}
			if cap(got) > 4+2*segment.MaxFrameRaw {
				t.Errorf("allocated %d bytes", cap(got))
			}
		})
	}
	if _, err := segment.AppendFrame(nil, segment.Zstd); err == nil {
		t.Error("an empty frame was encoded")
	}
	if _, err := segment.AppendFrame(nil, segment.ZstdAgainst, []byte("a")); err == nil {
		t.Error("a frame with a reserved encoding was encoded")
	}
	if _, err := segment.AppendFrame(nil, segment.Stored, make([]byte, segment.MaxFrameRaw+1)); err == nil {
		t.Error("a frame too large was encoded")
	}
}

// TestFrameGolden decodes a frame as it was written when the format was fixed;
// what the encoder writes may change, what it wrote must stay readable.
func TestFrameGolden(t *testing.T) {
	raw := bytes.Repeat([]byte("one segment and another\n"), 40)
	name := filepath.Join("testdata", "frame.golden")
	if *update {
		frame, err := segment.AppendFrame(nil, segment.Zstd, raw[:100], raw[100:])
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, frame, 0o666); err != nil {
			t.Fatal(err)
		}
	}
	frame, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	got, err := segment.DecodeFrame(nil, frame, len(raw))
	if err != nil || !bytes.Equal(got, raw) {
		t.Errorf("got %q, %v", got, err)
	}
}

func FuzzDecodeFrame(f *testing.F) {
	for _, s := range []string{"", "a", "the same the same the same"} {
		for _, e := range []segment.Encoding{segment.Stored, segment.Zstd} {
			frame, _ := segment.AppendFrame(nil, e, bytes.Repeat([]byte(s), 10))
			f.Add(frame, 10*len(s))
		}
	}
	f.Fuzz(func(t *testing.T, frame []byte, raw int) {
		got, err := segment.DecodeFrame(nil, frame, raw)
		if err == nil && len(got) != raw {
			t.Fatalf("%d bytes, want %d", len(got), raw)
		}
		if err != nil && !errors.Is(err, segment.ErrCorrupt) {
			t.Fatal(err)
		}
	})
}

// BenchmarkFrame encodes and decodes what a distribution's packages hold: the
// files of this machine's /usr/lib and /usr/share, as frames of FrameTarget.
func BenchmarkFrame(b *testing.B) {
	sample := systemSample(b, 48<<20)
	var frames [][]byte
	b.Run("append", func(b *testing.B) {
		b.SetBytes(int64(len(sample)))
		for b.Loop() {
			frames = frames[:0]
			var encoded int
			for at := 0; at < len(sample); at += segment.FrameTarget {
				f, err := segment.AppendFrame(nil, segment.Zstd, sample[at:min(at+segment.FrameTarget, len(sample))])
				if err != nil {
					b.Fatal(err)
				}
				encoded += len(f)
				frames = append(frames, f)
			}
			b.ReportMetric(float64(encoded)/float64(len(sample)), "ratio")
		}
	})
	b.Run("decode", func(b *testing.B) {
		if len(frames) == 0 {
			b.Skip("needs append")
		}
		b.SetBytes(int64(len(sample)))
		buf := make([]byte, 0, segment.MaxFrameRaw)
		for b.Loop() {
			for i, f := range frames {
				raw := min(segment.FrameTarget, len(sample)-i*segment.FrameTarget)
				if _, err := segment.DecodeFrame(buf, f, raw); err != nil {
					b.Fatal(err)
				}
			}
		}
	})
}

// systemSample reads files of the machine up to n bytes.
func systemSample(b *testing.B, n int) []byte {
	out, err := exec.Command("find", "/usr/lib", "/usr/share", "-xdev", "-type", "f", "-size", "-512k").Output()
	if err != nil {
		b.Skipf("list files: %v", err)
	}
	names := bytes.Split(out, []byte("\n"))
	step := max(1, len(names)/4000)
	var sample []byte
	for i := 0; i < len(names) && len(sample) < n; i += step {
		if c, err := os.ReadFile(string(names[i])); err == nil {
			sample = append(sample, c...)
		}
	}
	if len(sample) == 0 {
		b.Skip("no files to read")
	}
	return sample[:min(n, len(sample))]
}
