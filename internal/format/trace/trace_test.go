package trace_test

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"flag"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/go-digest"
	"pgregory.net/rapid"

	"hydrofoil.dev/foil/internal/format/columns"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/format/trace"
)

var update = flag.Bool("update", false, "write golden files anew")

func example() *trace.Trace {
	return &trace.Trace{
		Kind:    trace.Reported,
		ChainID: digest.FromString("chain"), TOC: digest.FromString("toc"),
		Args:  []string{"redis-server", "", "--port=0"},
		Ready: 1234567 * time.Microsecond,
		Touched: []trace.Touch{
			{Run: trace.Run{Content: 7, First: 3, Blocks: 2}, At: 5 * time.Microsecond, Waited: true},
			{Run: trace.Run{Content: 7, First: 5, Blocks: 1}, At: 5 * time.Microsecond},
			{Run: trace.Run{Content: 7, First: 0, Blocks: 1}, At: 900 * time.Microsecond},
			{Run: trace.Run{Content: 2, First: 1 << 20, Blocks: 1 << 12}, At: 2 * time.Second, Waited: true},
		},
		Unused: []trace.Run{{Content: 0, First: 0, Blocks: 9}},
	}
}

func TestGolden(t *testing.T) {
	name := filepath.Join("testdata", "reported.trace")
	if *update {
		if err := os.WriteFile(name, example().Encode(), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	got, err := trace.Decode(b)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(example(), got); d != "" {
		t.Error(d)
	}
}

var runs = rapid.SliceOf(rapid.Custom(func(t *rapid.T) trace.Run {
	small := rapid.Uint32Range(0, 5)
	r := trace.Run{
		Content: rapid.OneOf(small, rapid.Uint32Range(0, math.MaxInt32)).Draw(t, "content"),
		First:   rapid.OneOf(small, rapid.Uint32Range(0, math.MaxUint32-1)).Draw(t, "first"),
	}
	r.Blocks = rapid.OneOf(rapid.Uint32Range(1, min(9, math.MaxUint32-r.First)), rapid.Uint32Range(1, math.MaxUint32-r.First)).Draw(t, "blocks")
	return r
}))

func TestRuns(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		want := runs.Draw(t, "runs")
		b := trace.AppendRuns([]byte("before"), want)
		got, rest, err := trace.NextRuns(append(b[6:], "after"...))
		if err != nil || string(rest) != "after" || string(b[:6]) != "before" {
			t.Fatalf("%q is left, %v", rest, err)
		}
		if d := cmp.Diff(append([]trace.Run{}, want...), got); d != "" {
			t.Fatal(d)
		}
	})
}

func TestRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		want := &trace.Trace{
			Kind:    rapid.SampledFrom([]trace.Kind{trace.Recorded, trace.Reported}).Draw(t, "kind"),
			ChainID: digest.FromString(rapid.String().Draw(t, "chain")),
			TOC:     digest.FromString("toc"),
			Args:    rapid.SliceOfN(rapid.String(), 1, 9).Draw(t, "args"),
			Ready:   time.Duration(rapid.Int64Range(0, 86400e6).Draw(t, "ready")) * time.Microsecond,
		}
		at := int64(0)
		for _, r := range runs.Draw(t, "touched") {
			at += rapid.Int64Range(0, 1e6).Draw(t, "after")
			want.Touched = append(want.Touched, trace.Touch{Run: r, At: time.Duration(at) * time.Microsecond, Waited: rapid.Bool().Draw(t, "waited")})
		}
		if u := runs.Draw(t, "unused"); len(u) > 0 {
			want.Unused = u
		}
		b := want.Encode()
		got, err := trace.Decode(b)
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(want, got); d != "" {
			t.Fatal(d)
		}
		n := rapid.IntRange(0, len(b)-1).Draw(t, "cut")
		if _, err := trace.Decode(b[:n]); !errors.Is(err, trace.ErrCorrupt) && !errors.Is(err, columns.ErrCorrupt) {
			t.Fatalf("cut after %d of %d bytes: %v", n, len(b), err)
		}
	})
}

// What is read besides comes where it would have come, had the start taken as long as the one before.
func TestAfter(t *testing.T) {
	touch := func(content, first, blocks uint32, at time.Duration) trace.Touch {
		return trace.Touch{Run: trace.Run{Content: content, First: first, Blocks: blocks}, At: at}
	}
	cold := &trace.Trace{Ready: 900, Touched: []trace.Touch{touch(1, 0, 4, 0), touch(2, 5, 1, 300), touch(1, 8, 2, 600)}}
	warm := &trace.Trace{Ready: 300, Touched: []trace.Touch{
		touch(1, 0, 4, 0), touch(2, 5, 1, 0), touch(1, 8, 1, 0), // as they were read in
		touch(1, 3, 3, 100), touch(2, 4, 1, 100), touch(1, 9, 1, 250), touch(3, 0, 1, 310),
	}}
	warm.After(cold)
	want := &trace.Trace{Ready: 900, Touched: []trace.Touch{
		touch(1, 0, 4, 0), touch(2, 5, 1, 300), touch(1, 4, 1, 300), touch(1, 5, 1, 300), touch(2, 4, 1, 300), touch(1, 8, 2, 600), touch(3, 0, 1, 930),
	}}
	if d := cmp.Diff(want, warm); d != "" {
		t.Error(d)
	}
}

func TestDecodeRefuses(t *testing.T) {
	good := example().Encode()
	changed := func(change func(*trace.Trace)) []byte {
		x := example()
		change(x)
		return x.Encode()
	}
	for name, b := range map[string][]byte{
		"empty":         nil,
		"magic":         append([]byte("HFTRACE\r"), good[8:]...),
		"version":       append([]byte("HFTRACE\n\x02"), good[9:]...),
		"bytes after":   append(bytes.Clone(good), 0),
		"kind":          changed(func(x *trace.Trace) { x.Kind = 2 }),
		"ready":         changed(func(x *trace.Trace) { x.Ready = 25 * time.Hour }),
		"negative time": changed(func(x *trace.Trace) { x.Ready = -time.Second }),
		"digest":        changed(func(x *trace.Trace) { x.TOC = "sha256:x" }),
		"arguments":     changed(func(x *trace.Trace) { x.Args = make([]string, trace.MaxArgs+1) }),
		"argument":      changed(func(x *trace.Trace) { x.Args = []string{string(make([]byte, 128<<10+1))} }),
		"content":       changed(func(x *trace.Trace) { x.Unused[0].Content = math.MaxInt32 + 1 }),
		"end of run":    changed(func(x *trace.Trace) { x.Unused[0].First = math.MaxUint32 }),
		"no pages":      changed(func(x *trace.Trace) { x.Unused[0].Blocks = 0 }),
		"too long":      make([]byte, trace.MaxEncoded+1),
	} {
		if x, err := trace.Decode(b); !errors.Is(err, trace.ErrCorrupt) && !errors.Is(err, columns.ErrCorrupt) {
			t.Errorf("%s: %+v, %v", name, x, err)
		}
	}
}

func TestCheck(t *testing.T) {
	x := &toc.TOC{Contents: []toc.Content{{Size: 1}, {Size: 2*trace.BlockSize + 1}}}
	for _, c := range []struct {
		run trace.Run
		ok  bool
	}{
		{trace.Run{Content: 0, First: 0, Blocks: 1}, true},
		{trace.Run{Content: 1, First: 0, Blocks: 3}, true},
		{trace.Run{Content: 1, First: 2, Blocks: 1}, true},
		{trace.Run{Content: 0, First: 0, Blocks: 0}, false},
		{trace.Run{Content: 0, First: 1, Blocks: 1}, false},
		{trace.Run{Content: 1, First: 2, Blocks: 2}, false},
		{trace.Run{Content: 1, First: 2, Blocks: math.MaxUint32}, false},
		{trace.Run{Content: 2, First: 0, Blocks: 1}, false},
	} {
		if err := trace.Check([]trace.Run{c.run}, x); (err == nil) != c.ok || err != nil && !errors.Is(err, trace.ErrCorrupt) {
			t.Errorf("%+v: %v", c.run, err)
		}
	}
}

func TestRun(t *testing.T) {
	const size = 2*trace.BlockSize + 5
	for _, c := range []struct {
		run    trace.Run
		off, n int64
		whole  bool
	}{
		{trace.Run{First: 0, Blocks: 3}, 0, size, true},
		{trace.Run{First: 2, Blocks: 1}, 8192, 5, false},
		{trace.Run{First: 1, Blocks: 1}, 4096, 4096, false},
	} {
		off, n := c.run.Range(size)
		if off != c.off || n != c.n || c.run.Whole(size) != c.whole {
			t.Errorf("%+v: %d bytes at %d, whole %v", c.run, n, off, c.run.Whole(size))
		}
	}
	if n := trace.Pages(0); n != 0 {
		t.Errorf("nothing has %d pages", n)
	}
}

func TestService(t *testing.T) {
	sum := sha256.Sum256([]byte("1:a,2:bc,"))
	if got, want := trace.Service([]string{"a", "bc"}), digest.NewDigestFromBytes(digest.SHA256, sum[:]).Encoded()[:16]; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	if trace.Service([]string{"a", "b"}) == trace.Service([]string{"a,1:b"}) || trace.Service(nil) == trace.Service([]string{""}) {
		t.Error("two services have one name")
	}
}

func FuzzDecode(f *testing.F) {
	f.Add(example().Encode())
	f.Add((&trace.Trace{ChainID: digest.FromString("a"), TOC: digest.FromString("b")}).Encode())
	f.Fuzz(func(t *testing.T, b []byte) {
		x, err := trace.Decode(b)
		if err != nil {
			return
		}
		again, err := trace.Decode(x.Encode())
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(x, again); d != "" {
			t.Fatal(d)
		}
	})
}

func FuzzNextRuns(f *testing.F) {
	f.Add(trace.AppendRuns(nil, example().Unused))
	f.Add(columns.Append(nil, []byte{0, 0, 0, 1, 0xff, 0xff, 0xff, 0xff, 0x1f, 0}, false))
	f.Fuzz(func(t *testing.T, b []byte) {
		runs, rest, err := trace.NextRuns(b)
		if err != nil {
			return
		}
		for _, r := range runs {
			if r.Blocks == 0 || r.End() <= r.First {
				t.Fatalf("%+v", r)
			}
		}
		again, none, err := trace.NextRuns(trace.AppendRuns(nil, runs))
		if err != nil || len(none) != 0 || !cmp.Equal(runs, again) || len(rest) >= len(b) {
			t.Fatalf("%v, %d left, %v", again, len(none), err)
		}
	})
}

func BenchmarkTrace(b *testing.B) {
	x := example()
	x.Touched = nil
	for i := range uint32(4000) {
		x.Touched = append(x.Touched, trace.Touch{Run: trace.Run{Content: i / 20 * 37 % 1000, First: i % 20 * 3, Blocks: 1 + i%3}, At: time.Duration(i) * time.Millisecond})
	}
	encoded := x.Encode()
	b.Run("encode", func(b *testing.B) {
		b.SetBytes(int64(len(encoded)))
		for b.Loop() {
			x.Encode()
		}
	})
	b.Run("decode", func(b *testing.B) {
		b.SetBytes(int64(len(encoded)))
		for b.Loop() {
			if _, err := trace.Decode(encoded); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// TestFit: a trace within the limits stays as it is; of a larger one what is
// needed last goes, and what is left decodes.
func TestFit(t *testing.T) {
	d := digest.FromString("rootfs")
	random := rand.New(rand.NewPCG(1, 2))
	of := func(n int, page func(i int) trace.Run) *trace.Trace {
		v := &trace.Trace{ChainID: d, TOC: d, Args: []string{"serve"}}
		for i := range n {
			v.Touched = append(v.Touched, trace.Touch{Run: page(i), At: time.Duration(i) * time.Microsecond})
		}
		return v
	}
	sequential := func(i int) trace.Run { return trace.Run{Content: uint32(i / 1000), First: uint32(i % 1000), Blocks: 1} }
	apart := func(i int) trace.Run { return trace.Run{Content: uint32(i % 2), First: uint32(i), Blocks: 1} }
	anywhere := func(i int) trace.Run {
		return trace.Run{Content: random.Uint32N(1 << 30), First: random.Uint32N(1 << 20), Blocks: 1 + random.Uint32N(1<<16)}
	}
	for _, c := range []struct {
		name   string
		t      *trace.Trace
		unused int
		pieces int  // at most
		left   bool // something is left out
	}{
		{"small", of(1000, sequential), 10, 1010, false},
		{"as large as may be", of(trace.MaxPieces, apart), 0, trace.MaxPieces, false},
		{"sequential", of(4*trace.MaxPieces, sequential), 10, 4*trace.MaxPieces/1000 + 11, false},
		{"too many pieces", of(trace.MaxPieces+5, apart), 10, trace.MaxPieces, true},
		{"too many unused", of(trace.MaxPieces-5, apart), 10, trace.MaxPieces, false},
		{"too many bytes", of(trace.MaxPieces-5, anywhere), 5, trace.MaxPieces - 6, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			for i := range c.unused {
				c.t.Unused = append(c.t.Unused, trace.Run{Content: 7, First: uint32(2 * i), Blocks: 1})
			}
			pages := func() (n int64) {
				for _, r := range c.t.Touched {
					n += int64(r.Blocks)
				}
				return n
			}
			all, first := pages(), c.t.Touched[0]
			b, left := c.t.Fit()
			if len(b) > trace.MaxEncoded || left > 0 != c.left || pages()+left != all {
				t.Errorf("%d bytes, %d pages left out, %d are in it of %d", len(b), left, pages(), all)
			}
			got, err := trace.Decode(b)
			if err != nil {
				t.Fatal(err)
			}
			if n := len(got.Touched) + len(got.Unused); n > c.pieces || len(got.Touched) != len(c.t.Touched) {
				t.Errorf("%d pieces, %d touched; want at most %d", n, len(got.Touched), c.pieces)
			}
			if got.Touched[0].Content != first.Content || got.Touched[0].First != first.First {
				t.Errorf("it begins with %+v", got.Touched[0])
			}
		})
	}
}
