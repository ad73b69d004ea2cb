package encoder

import (
	"bytes"
	"slices"
)

const (
	block = 512 // of a tar archive
	slide = 32 << 10
	// Writes that end there, in each 32 KiB, may move the window of go1.26: the last 262 bytes of it.
	slideZone = slide - 262
)

// tarEnds finds where in a tar stream data end that archive/tar writes by themselves, as far
// as that can matter: they are not the last of a block then, and lie in the zone. It goes
// forward, and stops at what it does not understand.
type tarEnds struct {
	at     int64 // bytes seen
	header []byte
	rest   int64 // bytes until the next header
	lost   bool
	ends   []int64
}

// next is the first end after an offset, or 0.
func (t *tarEnds) next(at int64) int64 {
	i, _ := slices.BinarySearch(t.ends, at+1)
	if i == len(t.ends) {
		return 0
	}
	return t.ends[i]
}

// see takes the bytes at an offset; those that it has seen are passed over.
func (t *tarEnds) see(b []byte, at int64) {
	if at > t.at {
		t.lost = true
		return
	}
	b = b[min(t.at-at, int64(len(b))):]
	for len(b) > 0 && !t.lost {
		if t.rest > 0 {
			n := min(t.rest, int64(len(b)))
			b, t.rest, t.at = b[n:], t.rest-n, t.at+n
			continue
		}
		n := min(block-len(t.header), len(b))
		t.header = append(t.header, b[:n]...)
		b, t.at = b[n:], t.at+int64(n)
		if len(t.header) == block {
			t.entry()
			t.header = t.header[:0]
		}
	}
}

// entry reads a header.
func (t *tarEnds) entry() {
	sum := int64(8 * ' ')
	for i, c := range t.header {
		if i < 148 || i >= 156 {
			sum += int64(c)
		}
	}
	size, ok := octal(t.header[124:136])
	if want, good := octal(t.header[148:156]); !ok || !good || want != sum {
		t.lost = true // the end of the archive, or what only others understand
		return
	}
	if kind := t.header[156]; kind >= '1' && kind <= '6' {
		return // no data
	}
	if end := t.at + size; size%block != 0 && end%slide >= slideZone {
		t.ends = append(t.ends, end)
	}
	t.rest = (size + block - 1) / block * block
}

func octal(b []byte) (n int64, ok bool) {
	b = bytes.Trim(b, " \x00")
	for _, c := range b {
		if c < '0' || c > '7' || n >= 1<<50 {
			return 0, false
		}
		n = n<<3 | int64(c-'0')
	}
	return n, len(b) > 0
}
