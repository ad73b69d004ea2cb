package deflate

import (
	"encoding/binary"
	"math/bits"
)

const (
	literalCodes = 286 // bytes, the end of a block, lengths
	offsetCodes  = 30
	metaCodes    = 19 // of the header that has the lengths of codes
	maxCodeBits  = 15
	maxMetaBits  = 7
	endOfBlock   = 256

	maxStored = 65535 // bytes of a stored block
)

// token is a literal byte, or a match: its length less minLength in the lower 8 bits
// and its distance, which is not 0, above.
type token uint32

func match(length, distance int) token { return token(distance<<8 | (length - minLength)) }

// metaOrder is the order in which the lengths of the header's own codes are written.
var metaOrder = [metaCodes]uint8{16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15}

// bitRun is bits of which the first is lowest.
type bitRun struct {
	bits uint32
	n    uint8
}

// lengths[l] is the code for the length l+minLength, less 257, and the bits after it.
var lengths = func() (t [256]struct {
	symbol uint8
	extra  bitRun
}) {
	for l := range 255 {
		t[l].symbol = uint8(l)
		if l >= 8 {
			n := bits.Len(uint(l)) - 3
			t[l].symbol = uint8(4*n + 4 + l>>n&3)
			t[l].extra = bitRun{uint32(l) & (1<<n - 1), uint8(n)}
		}
	}
	t[255].symbol = 28
	return t
}()

// offset is the code for a distance, and the bits after it.
func offset(distance uint32) (symbol uint32, extra bitRun) {
	d := distance - 1
	if d < 4 {
		return d, bitRun{}
	}
	n := uint32(bits.Len32(d)) - 2
	return 2*n + d>>n&3, bitRun{d & (1<<n - 1), uint8(n)}
}

// extraBits is how many bits follow the code for an offset or, less 257, a length.
func extraOffset(symbol int) int { return max(symbol/2-1, 0) }
func extraLength(symbol int) int {
	if symbol == 28 {
		return 0
	}
	return max(symbol/4-1, 0)
}

// bitWriter collects a stream's bits.
type bitWriter struct {
	out []byte
	acc uint64 // bits after those in out, the first lowest
	n   uint   // of them; fewer than 8 between calls
}

func (b *bitWriter) add(v uint64, n uint) {
	b.acc |= v << b.n
	for b.n += n; b.n >= 8; b.n -= 8 {
		b.out = append(b.out, byte(b.acc))
		b.acc >>= 8
	}
}

func (b *bitWriter) code(c code) { b.add(uint64(c.bits), uint(c.n)) }

// align ends the byte that has begun.
func (b *bitWriter) align() {
	if b.n > 0 {
		b.add(0, 8-b.n)
	}
}

// blockWriter writes blocks. See "Blocks" in the package's documentation.
type blockWriter struct {
	bitWriter
	maker codeMaker

	literalFreq [literalCodes]uint32
	offsetFreq  [offsetCodes]uint32
	literals    [literalCodes]code
	offsets     [offsetCodes]code

	// The header of the block with codes of its own.
	numLiterals, numOffsets, numMeta int
	metaFreq                         [metaCodes]uint32
	meta                             [metaCodes]code
	runs                             []metaRun
}

// metaRun is one code of the header, and what follows it.
type metaRun struct {
	symbol uint8
	extra  bitRun
}

var fixedLiterals, fixedOffsets = func() (l [literalCodes]code, o [offsetCodes]code) {
	for s := range l {
		c, n := s+48, 8
		switch {
		case s >= 280:
			c = s - 280 + 192
		case s >= 256:
			c, n = s-256, 7
		case s >= 144:
			c, n = s-144+400, 9
		}
		l[s] = code{bits.Reverse16(uint16(c)) >> (16 - n), uint8(n)}
	}
	for s := range o {
		o[s] = code{bits.Reverse16(uint16(s)) >> 11, 5}
	}
	return l, o
}()

// count sets frequencies and codes for the tokens of a block.
func (w *blockWriter) count(tokens []token) {
	clear(w.literalFreq[:])
	clear(w.offsetFreq[:])
	for _, t := range tokens {
		if t < 256 {
			w.literalFreq[t]++
			continue
		}
		symbol, _ := offset(uint32(t >> 8))
		w.literalFreq[257+int(lengths[uint8(t)].symbol)]++
		w.offsetFreq[symbol]++
	}
	w.literalFreq[endOfBlock]++
	w.numLiterals, w.numOffsets = occurring(w.literalFreq[:]), occurring(w.offsetFreq[:])
	if w.numOffsets == 0 {
		// The header cannot say that there is none. It counts in every size.
		w.offsetFreq[0], w.numOffsets = 1, 1
	}
	w.maker.codes(w.literals[:], w.literalFreq[:], maxCodeBits)
	w.maker.codes(w.offsets[:], w.offsetFreq[:], maxCodeBits)
	w.header()
}

// occurring is the last symbol that occurs, plus one.
func occurring(freq []uint32) int {
	n := len(freq)
	for n > 0 && freq[n-1] == 0 {
		n--
	}
	return n
}

// header makes the header for literals and offsets.
func (w *blockWriter) header() {
	clear(w.metaFreq[:])
	w.runs = w.runs[:0]
	length := func(i int) uint8 {
		if i < w.numLiterals {
			return w.literals[i].n
		}
		return w.offsets[i-w.numLiterals].n
	}
	total := w.numLiterals + w.numOffsets
	for i := 0; i < total; {
		n, times := length(i), 1
		for i+times < total && length(i+times) == n {
			times++
		}
		i += times
		w.run(n, times)
	}
	w.maker.codes(w.meta[:], w.metaFreq[:], maxMetaBits)
	w.numMeta = metaCodes
	for w.numMeta > 4 && w.metaFreq[metaOrder[w.numMeta-1]] == 0 {
		w.numMeta--
	}
}

// run says that a length comes so many times.
func (w *blockWriter) run(length uint8, times int) {
	add := func(symbol uint8, extra, bits int) {
		w.runs = append(w.runs, metaRun{symbol, bitRun{uint32(extra), uint8(bits)}})
		w.metaFreq[symbol]++
	}
	if length == 0 {
		for times >= 11 {
			n := min(times, 138)
			add(18, n-11, 7)
			times -= n
		}
		if times >= 3 {
			add(17, times-3, 3)
			times = 0
		}
	} else {
		add(length, 0, 0)
		for times--; times >= 3; {
			n := min(times, 6)
			add(16, n-3, 2)
			times -= n
		}
	}
	for ; times > 0; times-- {
		add(length, 0, 0)
	}
}

func size(freq []uint32, codes []code) int {
	total := 0
	for s, f := range freq {
		total += int(f) * int(codes[s].n)
	}
	return total
}

// dynamicSize is the size of the block with codes of its own, without extra bits.
func (w *blockWriter) dynamicSize() int {
	return 3 + 5 + 5 + 4 + 3*w.numMeta +
		size(w.metaFreq[:], w.meta[:]) + int(2*w.metaFreq[16]+3*w.metaFreq[17]+7*w.metaFreq[18]) +
		size(w.literalFreq[:], w.literals[:]) + size(w.offsetFreq[:], w.offsets[:])
}

// smallest writes a block of tokens in the way that takes the fewest bits. Plain is
// what they stand for, or nil if that is not known any more.
func (w *blockWriter) smallest(tokens []token, plain []byte) {
	w.count(tokens)
	dynamic := w.dynamicSize()
	fixed := 3 + size(w.literalFreq[:], fixedLiterals[:]) + size(w.offsetFreq[:], fixedOffsets[:])
	if plain != nil && len(plain) <= maxStored {
		extra := 0
		for s, f := range w.literalFreq[257:] {
			extra += int(f) * extraLength(s)
		}
		for s, f := range w.offsetFreq {
			extra += int(f) * extraOffset(s)
		}
		if 8*(len(plain)+5) < min(dynamic, fixed)+extra {
			w.stored(plain, false)
			return
		}
	}
	if dynamic < fixed {
		w.dynamic()
		w.tokens(tokens, &w.literals, &w.offsets)
		return
	}
	w.add(1<<1, 3)
	w.tokens(tokens, &fixedLiterals, &fixedOffsets)
}

// quick writes a block of tokens, with codes of its own if these save something.
func (w *blockWriter) quick(tokens []token, plain []byte) {
	w.count(tokens)
	if !w.storeQuick(plain) {
		w.dynamic()
		w.tokens(tokens, &w.literals, &w.offsets)
	}
}

// quickLiterals is quick for a block of literals only.
func (w *blockWriter) quickLiterals(plain []byte) {
	clear(w.literalFreq[:])
	clear(w.offsetFreq[:])
	for _, b := range plain {
		w.literalFreq[b]++
	}
	w.literalFreq[endOfBlock], w.offsetFreq[0] = 1, 1
	w.numLiterals, w.numOffsets = endOfBlock+1, 1
	w.maker.codes(w.literals[:], w.literalFreq[:], maxCodeBits)
	w.maker.codes(w.offsets[:], w.offsetFreq[:], maxCodeBits)
	w.header()
	if w.storeQuick(plain) {
		return
	}
	w.dynamic()
	w.out = grow(w.out, 2*len(plain)+16)
	out, at, acc, n := w.out[:cap(w.out)], len(w.out), w.acc, w.n
	for _, b := range plain {
		c := w.literals[b]
		acc |= uint64(c.bits) << n
		n += uint(c.n)
		binary.LittleEndian.PutUint32(out[at:], uint32(acc))
		at += int(n >> 3)
		acc >>= n &^ 7
		n &= 7
	}
	w.out, w.acc, w.n = out[:at], acc, n
	w.code(w.literals[endOfBlock])
}

// storeQuick stores the block, if its codes save less than a sixteenth.
func (w *blockWriter) storeQuick(plain []byte) bool {
	dynamic := w.dynamicSize()
	if 8*(len(plain)+5) >= dynamic+dynamic>>4 {
		return false
	}
	w.stored(plain, false)
	return true
}

// stored writes plain as it is.
func (w *blockWriter) stored(plain []byte, final bool) {
	kind := uint64(0)
	if final {
		kind = 1
	}
	w.add(kind, 3)
	w.align()
	w.add(uint64(len(plain)), 16)
	w.add(uint64(^uint16(len(plain))), 16)
	w.out = append(w.out, plain...)
}

// dynamic writes the header of a block with codes of its own.
func (w *blockWriter) dynamic() {
	w.add(2<<1, 3)
	w.add(uint64(w.numLiterals-257), 5)
	w.add(uint64(w.numOffsets-1), 5)
	w.add(uint64(w.numMeta-4), 4)
	for _, s := range metaOrder[:w.numMeta] {
		w.add(uint64(w.meta[s].n), 3)
	}
	for _, r := range w.runs {
		w.code(w.meta[r.symbol])
		w.add(uint64(r.extra.bits), uint(r.extra.n))
	}
}

// tokens writes tokens and the end of the block.
func (w *blockWriter) tokens(tokens []token, literals *[literalCodes]code, offsets *[offsetCodes]code) {
	// Code and extra bits of a length are written as one.
	var whole [256]bitRun
	for l := range whole {
		x := lengths[l]
		c := literals[257+int(x.symbol)]
		whole[l] = bitRun{uint32(c.bits) | x.extra.bits<<c.n, c.n + x.extra.n}
	}
	w.out = grow(w.out, 6*len(tokens)+16)
	out, at, acc, n := w.out[:cap(w.out)], len(w.out), w.acc, w.n
	for _, t := range tokens {
		if t < 256 {
			c := literals[t]
			acc |= uint64(c.bits) << n
			n += uint(c.n)
		} else {
			l := whole[uint8(t)]
			acc |= uint64(l.bits) << n
			n += uint(l.n)
			symbol, extra := offset(uint32(t >> 8))
			c := offsets[symbol]
			acc |= (uint64(c.bits) | uint64(extra.bits)<<c.n) << n
			n += uint(c.n + extra.n)
		}
		// At most 7+20+28 bits.
		binary.LittleEndian.PutUint64(out[at:], acc)
		at += int(n >> 3)
		acc >>= n &^ 7
		n &= 7
	}
	w.out, w.acc, w.n = out[:at], acc, n
	w.code(literals[endOfBlock])
}

// grow makes room for n more bytes.
func grow(b []byte, n int) []byte {
	if cap(b)-len(b) >= n {
		return b
	}
	return append(make([]byte, 0, len(b)+n), b...)
}
