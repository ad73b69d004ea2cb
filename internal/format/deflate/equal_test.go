package deflate

import (
	"bytes"
	"compress/flate"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"strconv"
	"strings"
	"testing"
)

// theirs skips a test whose oracle is another encoder than the one that is followed.
func theirs(t testing.TB) {
	t.Helper()
	v := runtime.Version()
	minor, _, _ := strings.Cut(strings.TrimPrefix(v, "go1."), ".")
	if n, err := strconv.Atoi(minor); err != nil || n > 26 {
		t.Skipf("compress/flate of %s makes other streams: the encoder was replaced after Go 1.26", v)
	}
	t.Logf("compared with compress/flate of %s", v)
}

// pinned is the stream that compress/flate makes of Writes.
func pinned(t testing.TB, level int, writes ...[]byte) []byte {
	t.Helper()
	var b bytes.Buffer
	w, err := flate.NewWriter(&b, level)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range writes {
		if _, err := w.Write(p); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// ours is the stream that an Encoder makes of what it is told are Writes.
func ours(t testing.TB, level int, writes ...[]byte) []byte {
	t.Helper()
	var b bytes.Buffer
	e, err := NewEncoder(&b, level)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range writes {
		if _, err := e.Write(p); err != nil {
			t.Fatal(err)
		}
		e.Between()
	}
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// same fails if two streams differ.
func same(t testing.TB, what string, got, want []byte) {
	t.Helper()
	if !bytes.Equal(got, want) {
		n := 0
		for n < len(got) && n < len(want) && got[n] == want[n] {
			n++
		}
		t.Fatalf("%s: %d bytes, not the %d there should be; the first %d are equal", what, len(got), len(want), n)
	}
}

// kinds of plaintext, each of n bytes.
var kinds = []struct {
	name string
	make func(r *rand.Rand, n int) []byte
}{
	{"random", func(r *rand.Rand, n int) []byte { return noise(r, n, 256) }},
	{"few symbols", func(r *rand.Rand, n int) []byte { return noise(r, n, 1+r.IntN(5)) }},
	{"skewed", func(r *rand.Rand, n int) []byte {
		b := make([]byte, n)
		for i := range b {
			b[i] = byte(min(r.ExpFloat64()*20, 255))
		}
		return b
	}},
	{"powers of two", func(r *rand.Rand, n int) []byte {
		// Codes as long as can be: symbol s is twice as rare as the one before.
		b := make([]byte, n)
		for i := range b {
			s := byte(0)
			for s < 24 && r.IntN(2) == 0 {
				s++
			}
			b[i] = s * 7
		}
		return b
	}},
	{"sparse", func(r *rand.Rand, n int) []byte {
		b := make([]byte, n)
		for range n / 500 {
			b[r.IntN(n)] = byte(r.IntN(256))
		}
		return b
	}},
	{"words", words},
	{"far copies", func(r *rand.Rand, n int) []byte {
		// Matches just within reach, just beyond it, and of all lengths.
		b := noise(r, n, 256)
		for at := maxDistance; at < n; {
			d := maxDistance - 300 + r.IntN(310)
			l := min(r.IntN(300), n-at)
			if d <= at {
				copy(b[at:at+l], b[at-d:])
			}
			at += l + r.IntN(40)
		}
		return b
	}},
	{"mixed", func(r *rand.Rand, n int) []byte {
		var b []byte
		for len(b) < n {
			l := 1 + r.IntN(60_000)
			switch r.IntN(4) {
			case 0:
				b = append(b, noise(r, l, 256)...)
			case 1:
				b = append(b, words(r, l)...)
			case 2:
				b = append(b, make([]byte, l)...)
			default:
				if len(b) > 0 {
					from := r.IntN(len(b))
					b = append(b, b[from:min(from+l, len(b))]...)
				}
			}
		}
		return b[:n]
	}},
}

func noise(r *rand.Rand, n, symbols int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(r.IntN(symbols))
	}
	return b
}

// words has words as often as texts have.
func words(r *rand.Rand, n int) []byte {
	vocabulary := make([][]byte, 3000)
	for i := range vocabulary {
		vocabulary[i] = append(noise(r, 2+r.IntN(9), 26), ' ')
		for j := range vocabulary[i][:len(vocabulary[i])-1] {
			vocabulary[i][j] += 'a'
		}
	}
	b := make([]byte, 0, n+12)
	for len(b) < n {
		b = append(b, vocabulary[int(float64(len(vocabulary))*r.Float64()*r.Float64()*r.Float64())]...)
	}
	return b[:n]
}

// sizes around the ends of blocks and windows.
func sizes() []int {
	var s []int
	for n := range 300 {
		s = append(s, n)
	}
	for _, at := range []int{
		1 << 14, maxDistance, window - margin, quickBlock, window, window + maxDistance - margin,
		window + maxDistance, 2 * quickBlock, 2 * window, 3 * quickBlock, bufferSize, bufferSize + maxDistance,
	} {
		for _, d := range []int{-262, -130, -18, -17, -16, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 16, 17, 127, 128, 129} {
			s = append(s, at+d)
		}
	}
	return s
}

func TestEqual(t *testing.T) {
	theirs(t)
	sizes := sizes()
	for level := MinLevel; level <= MaxLevel; level++ {
		t.Run(fmt.Sprint("level ", level), func(t *testing.T) {
			for i, kind := range kinds {
				r := rand.New(rand.NewPCG(uint64(i), uint64(level)))
				whole := kind.make(r, 700_000+r.IntN(1000))
				same(t, kind.name, ours(t, level, whole), pinned(t, level, whole))
				for range 8 {
					n := sizes[r.IntN(len(sizes))]
					plain := whole[len(whole)-n:]
					same(t, fmt.Sprintf("%s, %d bytes", kind.name, n), ours(t, level, plain), pinned(t, level, plain))
				}
			}
		})
	}
}

// Code and data of a program: this one.
func TestEqualProgram(t *testing.T) {
	theirs(t)
	name, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	program, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	for level := MinLevel; level <= MaxLevel; level++ {
		plain := program[len(program)*(level-1)/10:][:len(program)/10]
		same(t, fmt.Sprintf("level %d", level), ours(t, level, plain), pinned(t, level, plain))
	}
}

// Positions in tables are made small again after some GiB, which changes nothing.
func TestRebase(t *testing.T) {
	plain := words(rand.New(rand.NewPCG(5, 5)), 3*bufferSize)
	for _, level := range []int{1, 3, 6} {
		var b bytes.Buffer
		e, err := NewEncoder(&b, level)
		if err != nil {
			t.Fatal(err)
		}
		shift := func() *uint32 {
			if level == 1 {
				return &e.quick.shift
			}
			return &e.chains.shift
		}
		*shift() = rebaseAt - bufferSize
		if _, err := e.Write(plain); err != nil {
			t.Fatal(err)
		}
		if *shift() >= rebaseAt-bufferSize {
			t.Errorf("level %d: positions are not small", level)
		}
		if err := e.Close(); err != nil {
			t.Fatal(err)
		}
		same(t, fmt.Sprintf("level %d", level), b.Bytes(), ours(t, level, plain))
	}
}

// Where Writes end changes nothing but in the case that the documentation tells.
func TestWrites(t *testing.T) {
	theirs(t)
	for level := MinLevel; level <= MaxLevel; level++ {
		for i, kind := range kinds {
			r := rand.New(rand.NewPCG(uint64(i), uint64(level)))
			plain := kind.make(r, 150_000+r.IntN(100_000))
			var writes [][]byte
			for at := 0; at < len(plain); {
				n := 1 + r.IntN(3*maxDistance)
				if r.IntN(2) == 0 {
					// Ends in the last bytes of a window.
					n = max(window-1-r.IntN(300)-at%maxDistance, 1)
				}
				n = min(n, len(plain)-at)
				writes = append(writes, plain[at:at+n])
				at += n
			}
			same(t, fmt.Sprintf("level %d, %s", level, kind.name), ours(t, level, writes...), pinned(t, level, writes...))
		}
	}
}

func TestWritesThatMatter(t *testing.T) {
	theirs(t)
	r := rand.New(rand.NewPCG(7, 7))
	reach := noise(r, 90_000, 256)
	copy(reach[slideAt:slideAt+20], reach[slideAt-maxDistance+20:])
	tail := noise(r, window, 64) // of which no block is stored
	copy(tail[window-100:], tail[maxDistance-80:maxDistance-50])
	for level := 2; level <= MaxLevel; level++ {
		for _, c := range []struct {
			name  string
			plain []byte
			end   int // of the first Write
		}{
			{"the position at the window's end", reach, window - 1},
			{"the end of plaintext", tail, window - 1},
		} {
			one, two := pinned(t, level, c.plain), pinned(t, level, c.plain[:c.end], c.plain[c.end:])
			if bytes.Equal(one, two) {
				t.Errorf("level %d, %s: one Write and two make the same stream: this test is of no use", level, c.name)
			}
			same(t, c.name+", one Write", ours(t, level, c.plain), one)
			same(t, c.name+", two Writes", ours(t, level, c.plain[:c.end], c.plain[c.end:]), two)
		}
	}
}

func FuzzEqual(f *testing.F) {
	f.Add(uint8(1), uint8(7), uint32(100_000), uint64(1), uint32(65535), []byte("x"))
	f.Add(uint8(6), uint8(6), uint32(140_000), uint64(2), uint32(65530), []byte("many words are many words"))
	f.Fuzz(func(t *testing.T, level, kind uint8, n uint32, seed uint64, end uint32, tail []byte) {
		theirs(t)
		l := MinLevel + int(level)%(MaxLevel-MinLevel+1)
		r := rand.New(rand.NewPCG(seed, 0))
		plain := append(kinds[int(kind)%len(kinds)].make(r, int(n%300_000)), tail...)
		at := int(end) % (len(plain) + 1)
		same(t, "one Write", ours(t, l, plain), pinned(t, l, plain))
		same(t, "two Writes", ours(t, l, plain[:at], plain[at:]), pinned(t, l, plain[:at], plain[at:]))
	})
}

// A match that ends near a block's tail at level 1, and in the next block the bytes after it.
func TestQuickTail(t *testing.T) {
	theirs(t)
	r := rand.New(rand.NewPCG(6, 6))
	for d := range 24 {
		plain := noise(r, 80_000, 64)
		clear(plain[quickBlock+1000:]) // else the block has literals only
		end := quickBlock - quickTail - d
		clear(plain[end-20_000 : end])
		for next := end - 2; next < quickBlock-quickTail; next++ {
			copy(plain[quickBlock+5:], plain[next:quickBlock])
			same(t, fmt.Sprintf("%d bytes before the tail", d), ours(t, 1, plain), pinned(t, 1, plain))
		}
	}
}
