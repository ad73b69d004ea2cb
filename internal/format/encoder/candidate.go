package encoder

import (
	"bytes"
	"encoding/binary"
	"slices"
)

// candidate is a way in which a blob may have been compressed.
type candidate struct {
	encoder string
	level   int
	block   int64
}

// gzipHeader is what a member of gzip (RFC 1952) says.
type gzipHeader struct {
	length int // bytes
	extra  byte
	system byte
	named  bool // it has a name, a comment or extra fields
	pgzip  bool // its time is that of klauspost/pgzip: the year 1, in 32 bits
}

// parseHeader reads the header of a member. Not ok: b does not begin with one.
func parseHeader(b []byte) (h gzipHeader, ok bool) {
	if len(b) < 10 || b[0] != 0x1f || b[1] != 0x8b || b[2] != 8 || b[3]&0xe0 != 0 {
		return h, false
	}
	flags := b[3]
	h = gzipHeader{extra: b[8], system: b[9], named: flags&^1 != 0,
		pgzip: binary.LittleEndian.Uint32(b[4:]) == 0x886e0900}
	at := 10
	if flags&4 != 0 {
		if len(b) < at+2 {
			return h, false
		}
		at += 2 + int(binary.LittleEndian.Uint16(b[at:]))
	}
	for _, flag := range []byte{8, 16} {
		if flags&flag == 0 {
			continue
		}
		n := bytes.IndexByte(b[min(at, len(b)):], 0)
		if n < 0 {
			return h, false
		}
		at += n + 1
	}
	if flags&2 != 0 {
		at += 2
	}
	h.length = at
	return h, at < len(b)
}

// systems are what is in the header for those who made it.
const (
	systemFAT     = 0 // Java before 16
	systemUnix    = 3 // pigz, GNU gzip
	systemUnknown = 255
)

// candidates are all ways that are known, the likeliest for the header first.
func candidates(h gzipHeader) []candidate {
	all := []candidate{}
	add := func(encoder string, block int64) {
		for _, level := range []int{6, 1, 9, 5, 2, 3, 4, 7, 8} {
			all = append(all, candidate{encoder, level, block})
		}
	}
	add(Go, 0)
	add(KlauspostB, pgzipBlock)
	add(KlauspostA, pgzipBlock)
	add(Zlib, pigzBlock)
	add(Zlib, 0)
	add(KlauspostB, 0)
	add(KlauspostA, 0)
	score := func(c candidate) (n int) {
		// What the level is, if the tool says it: 2 the best, 4 the fastest.
		want := map[byte]bool{0: c.level > 1 && c.level < 9, 2: c.level == 9, 4: c.level == 1}[h.extra]
		if !want {
			n += 2
		}
		// Who writes an operating system, or a name.
		switch {
		case c.encoder == Zlib && c.block > 0:
			want = h.system == systemUnix
		case c.encoder == Zlib:
			want = h.system != systemUnknown || h.named
		case c.block > 0:
			want = h.pgzip
		default:
			want = !h.pgzip && h.system == systemUnknown && !h.named
		}
		if !want {
			n += 4
		}
		return n
	}
	slices.SortStableFunc(all, func(a, b candidate) int { return score(a) - score(b) })
	return all
}
