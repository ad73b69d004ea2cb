package inflate

import (
	"fmt"
	"math/bits"
)

// An entry of a table says what the next bits mean:
//
//	bits 0-5    how many bits the code has; in a second table, without those
//	            that led there
//	bits 8-11   how many extra bits follow; in the entry of a second table of
//	            literals and lengths, the mask of its index
//	bits 12-15  flags
//	bits 16-31  the literal, or the least length or distance, or where in the
//	            table the second table starts
const (
	literal = 1 << 12
	second  = 1 << 13
	ends    = 1 << 14 // of the block
	bad     = 1 << 15

	litBits       = 11
	distTableBits = 8
	maxCode       = 15
	maxLit        = 288
	maxDist       = 32
	// Of codes longer than a table's bits there are at least two for each second
	// table: those of a whole code fill it.
	litSize  = 8192
	distSize = 4096
)

// table decodes codes. Both kinds have the array of the larger one, so that
// there is one way to make them.
type table struct {
	entries [litSize]uint32
	bits    uint // of the index of second tables
}

// symbols are the entries of symbols, without the bits of their codes.
var litSymbols, distSymbols = symbols()

func symbols() (lit [maxLit]uint32, dist [maxDist]uint32) {
	for i := range 256 {
		lit[i] = literal | uint32(i)<<16
	}
	lit[256] = ends
	base := uint32(3)
	for i := 257; i < 285; i++ {
		extra := uint32(max(0, (i-261)/4))
		lit[i] = base<<16 | extra<<8
		base += 1 << extra
	}
	lit[285] = maxMatch << 16
	lit[286], lit[287] = bad, bad
	base = 1
	for i := range 30 {
		extra := uint32(max(0, (i-2)/2))
		dist[i] = base<<16 | extra<<8
		base += 1 << extra
	}
	dist[30], dist[31] = bad, bad
	return lit, dist
}

// build makes the table of the code that has lengths, for so many bits at
// first. It reports whether there is such a code: a whole one, a single code of
// one bit, or none at all.
func (t *table) build(lengths []uint8, symbols []uint32, tableBits uint) bool {
	var counts [maxCode + 1]int
	longest := 0
	for _, n := range lengths {
		counts[n]++
		longest = max(longest, int(n))
	}
	counts[0] = 0
	left := 1
	var next [maxCode + 1]uint32
	code := uint32(0)
	for n := 1; n <= maxCode; n++ {
		left = left<<1 - counts[n]
		if left < 0 {
			return false
		}
		code = (code + uint32(counts[n-1])) << 1
		next[n] = code
	}
	whole := left == 0
	if !whole {
		if longest > 1 || longest == 1 && counts[1] != 1 {
			return false
		}
		for i := range t.entries[:1<<tableBits] {
			t.entries[i] = bad
		}
	}
	t.bits = uint(max(0, longest-int(tableBits)))
	free := 1 << tableBits // where the next second table starts
	if longest > int(tableBits) {
		// Only entries of this code may lead to second tables.
		clear(t.entries[:1<<tableBits])
	}
	for s, n := range lengths {
		if n == 0 {
			continue
		}
		code := uint(bits.Reverse32(next[n]) >> (32 - n))
		next[n]++
		if uint(n) <= tableBits {
			e := symbols[s] | uint32(n)
			for i := code; i < 1<<tableBits; i += 1 << n {
				t.entries[i] = e
			}
			continue
		}
		first := &t.entries[code&(1<<tableBits-1)]
		if *first == 0 {
			*first = second | uint32(free)<<16 | uint32(1<<t.bits-1)<<8&0xf00
			free += 1 << t.bits
		}
		e := symbols[s] | uint32(n) - uint32(tableBits)
		for i := code >> tableBits; i < 1<<t.bits; i += 1 << (uint(n) - tableBits) {
			t.entries[int(*first>>16)+int(i)] = e
		}
	}
	return true
}

// fixed makes the tables of blocks that bring none.
func (z *Reader) fixed() {
	var lengths [maxLit]uint8
	for i := range lengths {
		switch {
		case i < 144:
			lengths[i] = 8
		case i < 256:
			lengths[i] = 9
		case i < 280:
			lengths[i] = 7
		default:
			lengths[i] = 8
		}
	}
	z.lit.build(lengths[:], litSymbols[:], litBits)
	var dist [maxDist]uint8
	for i := range dist {
		dist[i] = 5
	}
	z.dist.build(dist[:], distSymbols[:], distTableBits)
}

// codeOrder is the order in which the lengths of the code of lengths come.
var codeOrder = [19]uint8{16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15}

var codeSymbols = [19]uint32{
	0 << 16, 1 << 16, 2 << 16, 3 << 16, 4 << 16, 5 << 16, 6 << 16, 7 << 16, 8 << 16, 9 << 16,
	10 << 16, 11 << 16, 12 << 16, 13 << 16, 14 << 16, 15 << 16, 16 << 16, 17 << 16, 18 << 16,
}

// dynamic reads the codes of a block and makes their tables.
func (z *Reader) dynamic() error {
	lits, dists, codes := int(z.take(5))+257, int(z.take(5))+1, int(z.take(4))+4
	if lits > 286 || dists > 30 {
		return fmt.Errorf("%w: block of %d literals and lengths, %d distances", ErrCorrupt, lits, dists)
	}
	var lengths [19]uint8
	for _, s := range codeOrder[:codes] {
		lengths[s] = uint8(z.take(3))
	}
	if !z.dist.build(lengths[:], codeSymbols[:], 7) {
		return fmt.Errorf("%w: code of lengths", ErrCorrupt)
	}
	all := z.lengths[:lits+dists]
	for i := 0; i < len(all); {
		if err := z.ensure(); err != nil {
			return err
		}
		z.refill()
		e := z.dist.entries[z.bits&(1<<7-1)]
		if e&bad != 0 {
			return fmt.Errorf("%w: length of a code", ErrCorrupt)
		}
		z.bits >>= e & 63
		z.count -= uint(e & 63)
		symbol := uint8(e >> 16)
		if symbol < 16 {
			all[i] = symbol
			i++
			continue
		}
		value, n := uint8(0), 0
		switch symbol {
		case 16:
			if i == 0 {
				return fmt.Errorf("%w: no length of a code to repeat", ErrCorrupt)
			}
			value, n = all[i-1], 3+int(z.take(2))
		case 17:
			n = 3 + int(z.take(3))
		default:
			n = 11 + int(z.take(7))
		}
		if n > len(all)-i {
			return fmt.Errorf("%w: too many lengths of codes", ErrCorrupt)
		}
		for range n {
			all[i] = value
			i++
		}
	}
	if !z.lit.build(all[:lits], litSymbols[:], litBits) || !z.dist.build(all[lits:], distSymbols[:], distTableBits) {
		return fmt.Errorf("%w: code", ErrCorrupt)
	}
	return nil
}
