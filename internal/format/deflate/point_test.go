package deflate

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

var update = flag.Bool("update", false, "write golden files anew")

// recorded is the stream of plaintext, and its points.
func recorded(t interface{ Fatal(...any) }, level int, plain []byte, every int64) ([]byte, *Index) {
	var b bytes.Buffer
	e, err := NewEncoder(&b, level)
	if err != nil {
		t.Fatal(err)
	}
	x := e.Record(every)
	if _, err := e.Write(plain); err != nil {
		t.Fatal(err)
	}
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes(), x
}

// Every point's continuation is the stream's tail, and any range of the stream is what it was.
func TestResume(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		level := rapid.IntRange(MinLevel, MaxLevel).Draw(t, "level")
		kind := rapid.IntRange(0, len(kinds)-1).Draw(t, "kind")
		r := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
		plain := kinds[kind].make(r, rapid.IntRange(0, 350_000).Draw(t, "size"))
		stream, x := recorded(t, level, plain, rapid.Int64Range(0, 200_000).Draw(t, "every"))

		decoded, err := Decode(x.Append(nil))
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(x, decoded, cmp.AllowUnexported(Point{})); d != "" {
			t.Fatalf("index, decoded (-made +decoded):\n%s", d)
		}
		if len(x.Points) > 0 {
			p := &x.Points[rapid.IntRange(0, len(x.Points)-1).Draw(t, "point")]
			var b bytes.Buffer
			e, err := Resume(&b, level, p, plain[:p.In])
			if err != nil {
				t.Fatal(err)
			}
			for rest := plain[p.In:]; len(rest) > 0; {
				n := min(len(rest), rapid.IntRange(1, 100_000).Draw(t, "write"))
				if _, err := e.Write(rest[:n]); err != nil {
					t.Fatal(err)
				}
				rest = rest[n:]
			}
			if err := e.Close(); err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(b.Bytes(), stream[p.Out:]) {
				t.Fatalf("another stream from the point at %d of %d on", p.In, len(plain))
			}
		}

		from := rapid.IntRange(0, len(stream)).Draw(t, "from")
		to := rapid.IntRange(from, len(stream)).Draw(t, "to")
		var b bytes.Buffer
		workers := rapid.IntRange(1, 4).Draw(t, "workers")
		if err := x.WriteRange(context.Background(), &b, bytes.NewReader(plain), int64(from), int64(to), workers); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(b.Bytes(), stream[from:to]) {
			t.Fatalf("bytes %d to %d of the stream are others", from, to)
		}
	})
}

// Where Writes end is in the index, if it made a difference.
func TestBetween(t *testing.T) {
	recordedAny, differed := false, false
	for seed := range uint64(60) {
		r := rand.New(rand.NewPCG(seed, 1))
		level := 2 + r.IntN(MaxLevel-1)
		plain := kinds[len(kinds)-1].make(r, 500_000)
		for at := slideAt; at < len(plain); at += maxDistance {
			copy(plain[at:], plain[at-maxDistance:][:5+r.IntN(40)]) // as far away as can be
		}
		var b bytes.Buffer
		e, err := NewEncoder(&b, level)
		if err != nil {
			t.Fatal(err)
		}
		x := e.Record(int64(r.IntN(100_000)))
		for at := 0; at < len(plain); {
			n := min(1+r.IntN(40_000), len(plain)-at)
			if end := (at+n)/maxDistance*maxDistance + slideAt - maxDistance + r.IntN(margin); r.IntN(2) == 0 && end > at && end < len(plain) {
				n = end - at
			}
			if _, err := e.Write(plain[at : at+n]); err != nil {
				t.Fatal(err)
			}
			e.Between()
			at += n
		}
		if err := e.Close(); err != nil {
			t.Fatal(err)
		}
		single, _ := recorded(t, level, plain, 1<<40)
		recordedAny = recordedAny || len(x.Between) > 0
		differed = differed || !bytes.Equal(single, b.Bytes())
		x, err = Decode(x.Append(nil))
		if err != nil {
			t.Fatal(err)
		}
		var again bytes.Buffer
		if err := x.WriteRange(t.Context(), &again, bytes.NewReader(plain), 0, x.Out, 2); err != nil {
			t.Fatal(err)
		}
		same(t, fmt.Sprintf("seed %d, level %d", seed, level), again.Bytes(), b.Bytes())
	}
	if !recordedAny || !differed {
		t.Errorf("no Write made a difference: recorded %v, another stream %v", recordedAny, differed)
	}
}

// All points of long streams, at each level.
func TestEveryPoint(t *testing.T) {
	for level := MinLevel; level <= MaxLevel; level++ {
		t.Run(fmt.Sprint("level ", level), func(t *testing.T) {
			plain := kinds[len(kinds)-1].make(rand.New(rand.NewPCG(uint64(level), 3)), 1_000_000)
			stream, x := recorded(t, level, plain, 70_000)
			if len(x.Points) < 5 {
				t.Fatalf("%d points only", len(x.Points))
			}
			for i, p := range x.Points {
				// The part between two points: all others together are the rest.
				end := x.end(i + 1)
				var b bytes.Buffer
				if err := x.WriteRange(context.Background(), &b, bytes.NewReader(plain), p.Out, end, 1); err != nil {
					t.Fatal(err)
				}
				same(t, fmt.Sprintf("the part from %d on", p.In), b.Bytes(), stream[p.Out:end])
			}
		})
	}
}

// Who has other plaintext hears of it, if sizes show it; who has too little, always.
func TestOtherPlaintext(t *testing.T) {
	r := rand.New(rand.NewPCG(4, 4))
	plain := words(r, 400_000)
	_, x := recorded(t, 6, plain, 100_000)
	var b bytes.Buffer
	write := func(plain []byte) error {
		return x.WriteRange(context.Background(), &b, bytes.NewReader(plain), 0, x.Out, 2)
	}
	if err := write(noise(r, len(plain), 256)); !errors.Is(err, ErrPlaintext) {
		t.Errorf("noise instead of words: %v", err)
	}
	if err := write(plain[:len(plain)-1]); err == nil {
		t.Error("a byte is missing, and nobody says so")
	}
	if err := x.WriteRange(context.Background(), &b, bytes.NewReader(plain), 5, x.Out+1, 2); err == nil {
		t.Error("a range beyond the stream's end was made")
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := x.WriteRange(ctx, &b, bytes.NewReader(plain), 0, x.Out, 2); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	// A point that holds back a match longer than all that follows.
	held := Point{In: 40_000, Out: 9, reach: 40_000, pending: true, length: longest, distance: 1}
	e, err := Resume(&b, 6, &held, plain[:40_000])
	if err != nil {
		t.Fatal(err)
	}
	if _, err := e.Write(plain[:20]); err != nil {
		t.Fatal(err)
	}
	if err := e.Close(); !errors.Is(err, ErrPlaintext) {
		t.Errorf("plaintext ends within a match: %v", err)
	}
	if _, err := Resume(&b, 6, &x.Points[0], plain[:100]); err == nil {
		t.Error("100 bytes of history were enough")
	}
}

// plainText is the same on every machine, whatever packages there are.
func plainText(n int) []byte {
	b := make([]byte, n)
	state := uint64(1)
	next := func() uint64 {
		state = state*6364136223846793005 + 1442695040888963407
		return state >> 33
	}
	for i := 0; i < n; {
		if i > 4 && next()%3 > 0 {
			from := uint64(i) - 1 - next()%uint64(min(i-1, 40_000))
			for range next() % 100 {
				if i < n {
					b[i] = b[from]
					i, from = i+1, from+1
				}
			}
			continue
		}
		b[i] = byte(next() >> 7 % 64)
		i++
	}
	return b
}

// Streams and encoded points do not change, whatever the toolchain.
func TestGolden(t *testing.T) {
	plain := plainText(500_000)
	var got bytes.Buffer
	fmt.Fprintf(&got, "plaintext: %x\n", sha256.Sum256(plain))
	for level := MinLevel; level <= MaxLevel; level++ {
		stream, x := recorded(t, level, plain, 150_000)
		fmt.Fprintf(&got, "level %d: %d bytes, %x\n", level, len(stream), sha256.Sum256(stream))
		encoded := x.Append(nil)
		if level == 6 {
			golden(t, "level6.points", encoded)
		} else {
			fmt.Fprintf(&got, "its points: %d bytes, %x\n", len(encoded), sha256.Sum256(encoded))
		}
	}
	golden(t, "streams", got.Bytes())
}

func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(string(want), string(got)); d != "" {
		t.Errorf("%s (-as it was +as it is):\n%s", path, d)
	}
}

// Points that lie are refused, or make other bytes: as many, unless there is an error.
func TestLyingPoints(t *testing.T) {
	plain := plainText(150_000)
	var encoded [MaxLevel + 1][]byte
	for _, level := range []int{1, 2, 6} {
		_, x := recorded(t, level, plain, 20_000)
		encoded[level] = x.Append(nil)
	}
	head := len(magic) + 2
	rapid.Check(t, func(t *rapid.T) {
		b := bytes.Clone(encoded[rapid.SampledFrom([]int{1, 2, 6}).Draw(t, "level")])
		for range rapid.IntRange(1, 4).Draw(t, "lies") {
			// Most of the bytes are marks: what is not is at the front.
			at := rapid.IntRange(head, min(len(b), head+40)-1).Draw(t, "at")
			b[at] = rapid.Byte().Draw(t, "byte")
		}
		x, err := Decode(b)
		if err != nil {
			if !errors.Is(err, ErrCorrupt) {
				t.Fatal(err)
			}
			return
		}
		if x.In > int64(len(plain)) {
			return
		}
		to := min(x.Out, 1<<20)
		var out bytes.Buffer
		err = x.WriteRange(context.Background(), &out, bytes.NewReader(plain), 0, to, 2)
		if err == nil && int64(out.Len()) != to {
			t.Fatalf("%d bytes of %d, and no error", out.Len(), to)
		}
	})
}

func FuzzDecode(f *testing.F) {
	plain := plainText(150_000)
	for _, level := range []int{1, 3, 6} {
		_, x := recorded(f, level, plain, 60_000)
		f.Add(x.Append(nil))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		x, err := Decode(b)
		if err != nil {
			if !errors.Is(err, ErrCorrupt) {
				t.Fatal(err)
			}
			return
		}
		if again := x.Append(nil); !bytes.Equal(again, b) {
			t.Fatalf("%x was read, %x is written", b, again)
		}
		// Points that lie give an error or other bytes, and nothing worse.
		if x.In <= int64(len(plain)) && x.Out <= 1<<20 {
			var out bytes.Buffer
			if err := x.WriteRange(context.Background(), &out, bytes.NewReader(plain), 0, x.Out, 2); err == nil && int64(out.Len()) != x.Out {
				t.Fatalf("%d bytes of %d, and no error", out.Len(), x.Out)
			}
		}
	})
}
